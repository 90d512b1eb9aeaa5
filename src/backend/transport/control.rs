//! The control channel over TCP: frames of the protocol between addresses. No call waits for a peer: what
//! cannot be sent is dropped, as a network would, and the protocol repeats it.

use std::io::{BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::TransportError;
use crate::base::containers::Map;
use crate::pd::ids::PeerId;
use crate::pd::wire::{HEAD_BYTES, frame_len};

/// Frames waiting for one peer; more are dropped.
const OUT_MAX: usize = 4096;
/// Frames waiting for the owner; then readers wait, and TCP slows the peers down.
const IN_MAX: usize = 65_536;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a failed connection.
const RETRY: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct Directory {
    numbers: Map<SocketAddr, PeerId>,
    addresses: Vec<SocketAddr>,
}

impl Directory {
    fn number(&mut self, a: SocketAddr) -> PeerId {
        if let Some(n) = self.numbers.get(&a) {
            return *n;
        }
        let n = PeerId(self.addresses.len() as u32);
        self.addresses.push(a);
        self.numbers.insert(a, n);
        n
    }
}

/// One end of the control channel.
#[derive(Debug)]
pub struct Control {
    address: SocketAddr,
    directory: Arc<Mutex<Directory>>,
    inbox: Receiver<(PeerId, Vec<u8>)>,
    outs: Map<PeerId, Sender<Vec<u8>>>,
    stop: Arc<AtomicBool>,
    /// Frames dropped because a queue was full.
    pub dropped: u64,
}

impl Control {
    /// Listens on a free port of `ip`.
    pub fn new(ip: IpAddr) -> Result<Control, TransportError> {
        let listener = TcpListener::bind((ip, 0)).map_err(TransportError::system("bind"))?;
        let address = listener.local_addr().map_err(TransportError::system("local_addr"))?;
        let (inbox_in, inbox) = bounded(IN_MAX);
        let directory: Arc<Mutex<Directory>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (d, s) = (directory.clone(), stop.clone());
        let run = move || {
            for stream in listener.incoming() {
                if s.load(Ordering::Acquire) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (d, inbox) = (d.clone(), inbox_in.clone());
                let read = move || drop(listen(stream, &d, &inbox));
                let _ = std::thread::Builder::new().name("sapwood-pd-in".into()).spawn(read);
            }
        };
        std::thread::Builder::new()
            .name("sapwood-pd-accept".into())
            .spawn(run)
            .map_err(TransportError::system("spawn"))?;
        Ok(Control { address, directory, inbox, outs: Map::default(), stop, dropped: 0 })
    }

    /// Where others reach this end.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The number of an address.
    pub fn peer(&self, address: SocketAddr) -> PeerId {
        self.directory.lock().unwrap_or_else(PoisonError::into_inner).number(address)
    }

    /// Hands a frame to the network.
    pub fn send(&mut self, to: PeerId, frame: Vec<u8>) {
        if !self.outs.contains_key(&to) {
            let known = self
                .directory
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .addresses
                .get(to.0 as usize)
                .copied();
            let Some(address) = known else { return };
            let (out, frames) = bounded::<Vec<u8>>(OUT_MAX);
            let me = self.address;
            let run = move || deliver(address, me, &frames);
            if std::thread::Builder::new().name("sapwood-pd-out".into()).spawn(run).is_err() {
                self.dropped += 1;
                return;
            }
            self.outs.insert(to, out);
        }
        if self.outs.get(&to).is_none_or(|out| out.try_send(frame).is_err()) {
            self.dropped += 1;
        }
    }

    /// The next frame, waiting at most so long.
    pub fn receive(&self, wait: Duration) -> Option<(PeerId, Vec<u8>)> {
        self.inbox.recv_timeout(wait).ok()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the accept loop; writers end with their queues, readers with their peers.
        let _ = TcpStream::connect_timeout(&self.address, CONNECT_TIMEOUT);
    }
}

/// Reads a peer's address, then its frames. A stream that is not frames is closed.
fn listen(
    stream: TcpStream,
    directory: &Mutex<Directory>,
    inbox: &Sender<(PeerId, Vec<u8>)>,
) -> std::io::Result<()> {
    let mut r = BufReader::with_capacity(64 << 10, stream);
    let mut len = [0; 1];
    r.read_exact(&mut len)?;
    let mut text = vec![0; usize::from(len[0])];
    r.read_exact(&mut text)?;
    let Some(address) = std::str::from_utf8(&text).ok().and_then(|t| t.parse().ok()) else { return Ok(()) };
    let peer = directory.lock().unwrap_or_else(PoisonError::into_inner).number(address);
    loop {
        let mut frame = vec![0; HEAD_BYTES];
        r.read_exact(&mut frame)?;
        let Ok(Some(len)) = frame_len(&frame) else { return Ok(()) };
        // Grows with what arrives, so a length alone allocates nothing.
        let want = (len - HEAD_BYTES) as u64;
        if r.by_ref().take(want).read_to_end(&mut frame)? as u64 != want || inbox.send((peer, frame)).is_err()
        {
            return Ok(());
        }
    }
}

/// Sends frames to one address; what does not go through is lost.
fn deliver(address: SocketAddr, me: SocketAddr, frames: &Receiver<Vec<u8>>) {
    let mut stream: Option<TcpStream> = None;
    let mut not_before = Instant::now();
    for frame in frames {
        if stream.is_none() && Instant::now() >= not_before {
            let open = || -> std::io::Result<TcpStream> {
                let mut s = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?;
                s.set_nodelay(true)?;
                s.set_write_timeout(Some(SEND_TIMEOUT))?;
                let text = me.to_string();
                s.write_all(&[text.len() as u8])?;
                s.write_all(text.as_bytes())?;
                Ok(s)
            };
            stream = open().ok();
            not_before = Instant::now() + RETRY;
        }
        if let Some(s) = &mut stream
            && s.write_all(&frame).is_err()
        {
            stream = None;
        }
    }
}
