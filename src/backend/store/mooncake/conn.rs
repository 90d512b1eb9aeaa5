//! Sockets to the real client: one TCP connection for calls, one local connection for each segment handed over.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::wire::{
    ClientId, Function, MAP_SEGMENT, Malformed, REPLY_HEADER_BYTES, Reply, ReplyHeader, Request, segment,
};
use crate::backend::store::TransportCause;

/// Why a call brought no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The connection broke, or could not be made; the errno, 0 if the far side closed it.
    #[error("connection lost, errno {0}")]
    Lost(i32),
    /// The time was up.
    #[error("no answer in time")]
    Timeout,
    /// The answer is not of the protocol.
    #[error("answer outside the protocol")]
    Protocol,
    /// The server refused the call: the types of the arguments (4), or no such function (11).
    #[error("call refused with code {0}")]
    Rpc(u8),
}

impl From<Malformed> for CallError {
    fn from(_: Malformed) -> CallError {
        CallError::Protocol
    }
}

impl From<std::io::Error> for CallError {
    fn from(e: std::io::Error) -> CallError {
        match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => CallError::Timeout,
            _ => CallError::Lost(e.raw_os_error().unwrap_or(0)),
        }
    }
}

impl CallError {
    /// What a caller of the store hears.
    pub(super) fn cause(self) -> TransportCause {
        match self {
            CallError::Lost(_) | CallError::Timeout => TransportCause::Disconnected,
            CallError::Protocol => TransportCause::Protocol,
            CallError::Rpc(code) => TransportCause::Remote(i32::from(code)),
        }
    }
}

/// A connection for calls. Several may be under way at a time; the server runs them in order.
#[derive(Debug)]
pub(super) struct Conn {
    stream: TcpStream,
    last: u32,
    answered: Vec<(u32, Result<Vec<u8>, CallError>)>,
}

impl Conn {
    pub(super) fn dial(address: SocketAddr, wait_max: Duration) -> Result<Conn, CallError> {
        let stream = TcpStream::connect_timeout(&address, wait_max.max(Duration::from_millis(1)))?;
        stream.set_nodelay(true)?;
        Ok(Conn { stream, last: 0, answered: Vec::new() })
    }

    /// Sends a request and gives it a number.
    pub(super) fn send(&mut self, request: Request) -> Result<u32, CallError> {
        self.last = self.last.wrapping_add(1);
        self.stream.write_all(&request.frame(self.last))?;
        Ok(self.last)
    }

    /// The body of the answer to a request. Without `until` it waits for as long as the connection lives: bytes
    /// are being moved, and only the answer says that nobody touches them any more. After `Timeout` and `Lost`
    /// the connection is of no use.
    pub(super) fn receive(&mut self, number: u32, until: Option<Instant>) -> Result<Vec<u8>, CallError> {
        loop {
            if let Some(at) = self.answered.iter().position(|(n, _)| *n == number) {
                return self.answered.swap_remove(at).1;
            }
            let mut header = [0; REPLY_HEADER_BYTES];
            self.fill(&mut header, until)?;
            let header = ReplyHeader::decode(&header)?;
            let mut body = vec![0; header.body_bytes];
            self.fill(&mut body, until)?;
            let body = if header.error == 0 { Ok(body) } else { Err(CallError::Rpc(header.error)) };
            self.answered.push((header.sequence, body));
            if self.answered.len() > 1024 {
                return Err(CallError::Protocol);
            }
        }
    }

    fn fill(&mut self, mut into: &mut [u8], until: Option<Instant>) -> Result<(), CallError> {
        while !into.is_empty() {
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(CallError::Timeout);
            }
            self.stream.set_read_timeout(left)?;
            match self.stream.read(into) {
                Ok(0) => return Err(CallError::Lost(0)),
                Ok(n) => into = &mut into[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Sends a request and reads its answer.
    pub(super) fn call<T>(
        &mut self,
        function: &Function,
        request: Request,
        until: Option<Instant>,
        read: impl FnOnce(Reply<'_>) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        let number = self.send(request)?;
        let body = self.receive(number, until)?;
        Ok(read(Reply::of(function, &body)?)?)
    }
}

/// The process at the other end, as far as the system tells.
#[derive(Debug)]
pub(super) struct Peer(Option<OwnedFd>);

impl Peer {
    /// Nothing is known of it.
    pub(super) fn unknown() -> Peer {
        Peer(None)
    }

    /// Whether it has ended. `None` if the system does not say (another process namespace).
    pub(super) fn has_ended(&self) -> Option<bool> {
        use rustix::event::{PollFd, PollFlags, poll};
        let fd = self.0.as_ref()?;
        let mut polled = [PollFd::new(fd, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).ok().map(|n| n > 0)
    }
}

/// Hands a segment to the real client, which maps it. `Ok(Err(code))` if it refuses.
pub(super) fn hand_over(
    ipc_name: &str,
    client: ClientId,
    base: u64,
    bytes: u64,
    fd: BorrowedFd<'_>,
    wait_max: Duration,
) -> Result<Result<Peer, i32>, CallError> {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(ipc_name)?;
    let mut stream = UnixStream::connect_addr(&address)?;
    stream.set_read_timeout(Some(wait_max))?;
    stream.set_write_timeout(Some(wait_max))?;
    let peer = peer_of(&stream);
    stream.write_all(&MAP_SEGMENT)?;
    let record = segment(client, base, bytes);
    let fds = [fd];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(CallError::Protocol);
    }
    let io = [std::io::IoSlice::new(&record)];
    let sent = rustix::net::sendmsg(&stream, &io, &mut ancillary, SendFlags::NOSIGNAL)
        .map_err(std::io::Error::from)?;
    if sent != record.len() {
        return Err(CallError::Lost(0));
    }
    let mut status = [0; 4];
    stream.read_exact(&mut status)?;
    Ok(match i32::from_le_bytes(status) {
        0 => Ok(peer),
        code => Err(code),
    })
}

fn peer_of(stream: &UnixStream) -> Peer {
    let pid = rustix::net::sockopt::socket_peercred(stream).ok().map(|c| c.pid);
    Peer(pid.and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()))
}
