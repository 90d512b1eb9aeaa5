//! One connection to a Redis server: requests out, replies in, nothing trusted.
//!
//! Replies are bounded before anything is allocated. Whatever is not the protocol ends the connection.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::backend::store::envelope::HEADER_BYTES;
use crate::backend::store::regions::HeldSpans;

/// Where the server is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RedisAddress {
    /// `host:port`.
    Tcp(String),
    /// A socket file.
    Unix(PathBuf),
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        // Zero would mean no limit.
        let time = Some(time.max(Duration::from_millis(1)));
        match self {
            Stream::Tcp(s) => s.set_read_timeout(time).and_then(|()| s.set_write_timeout(time)),
            Stream::Unix(s) => s.set_read_timeout(time).and_then(|()| s.set_write_timeout(time)),
        }
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.read(into),
            Stream::Unix(s) => s.read(into),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write(bytes),
            Stream::Unix(s) => s.write(bytes),
        }
    }
}

/// Why an exchange failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LinkError {
    /// The deadline passed. The connection is of no use any more.
    Timeout,
    /// The connection broke.
    Broken,
    /// The answer was not the protocol. The connection is of no use any more.
    Protocol,
    /// The server refused this one command; the connection is good.
    Refused(Refusal),
}

/// What the server said no for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// Out of memory.
    Full,
    /// Loading, busy with a script, or a failover.
    Busy,
    /// Anything else.
    Other,
}

/// A reply that is small by nature.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Reply {
    Simple,
    Int(i64),
    Bulk(Option<Vec<u8>>),
    List(Vec<Reply>),
}

const BUFFER_BYTES: usize = 256 << 10;
/// Largest line, bulk and list taken as a small reply. A scan of 1000 keys stays far below.
const LINE_BYTES_MAX: usize = 4096;
const SMALL_BYTES_MAX: usize = 64 << 10;
const LIST_MAX: usize = 100_000;
/// Largest value that Redis stores.
const BULK_BYTES_MAX: usize = 512 << 20;

/// A connection.
#[derive(Debug)]
pub(super) struct Link {
    stream: Stream,
    out: Vec<u8>,
    buffer: Box<[u8]>,
    from: usize,
    to: usize,
    deadline: Instant,
}

impl Link {
    pub(super) fn connect(address: &RedisAddress, deadline: Instant) -> Result<Link, LinkError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LinkError::Timeout);
        }
        let stream = match address {
            RedisAddress::Tcp(at) => {
                let mut found = at.to_socket_addrs().map_err(|e| of_io(&e))?;
                let address = found.next().ok_or(LinkError::Broken)?;
                let s = TcpStream::connect_timeout(&address, left).map_err(|e| of_io(&e))?;
                s.set_nodelay(true).map_err(|e| of_io(&e))?;
                Stream::Tcp(s)
            }
            RedisAddress::Unix(path) => Stream::Unix(UnixStream::connect(path).map_err(|e| of_io(&e))?),
        };
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Ok(Link { stream, out: Vec::new(), buffer, from: 0, to: 0, deadline })
    }

    /// Everything from here on ends by `deadline`.
    pub(super) fn until(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    fn limit(&self) -> Result<(), LinkError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LinkError::Timeout);
        }
        self.stream.limit(left).map_err(|e| of_io(&e))
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> Result<(), LinkError> {
        while !bytes.is_empty() {
            self.limit()?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(LinkError::Broken),
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(of_io(&e)),
            }
        }
        Ok(())
    }

    /// Queues a command.
    pub(super) fn command(&mut self, parts: &[&[u8]]) {
        self.line(b'*', parts.len());
        for part in parts {
            self.line(b'$', part.len());
            self.out.extend_from_slice(part);
            self.out.extend_from_slice(b"\r\n");
        }
    }

    fn line(&mut self, sigil: u8, n: usize) {
        self.out.push(sigil);
        self.out.extend_from_slice(n.to_string().as_bytes());
        self.out.extend_from_slice(b"\r\n");
    }

    /// Sends a SET whose value is a header and the bytes of a page, straight from where they lie.
    pub(super) fn set(
        &mut self,
        key: &[u8],
        header: &[u8; HEADER_BYTES],
        page: &HeldSpans,
    ) -> Result<(), LinkError> {
        self.line(b'*', 3);
        for part in [&b"SET"[..], key] {
            self.line(b'$', part.len());
            self.out.extend_from_slice(part);
            self.out.extend_from_slice(b"\r\n");
        }
        self.line(b'$', HEADER_BYTES + page.len());
        self.out.extend_from_slice(header);
        for run in page.runs() {
            // Small runs are worth collecting, large ones are not worth copying.
            if run.len() < 16 << 10 {
                self.out.extend_from_slice(run);
            } else {
                self.flush()?;
                self.write_all(run)?;
            }
        }
        self.out.extend_from_slice(b"\r\n");
        Ok(())
    }

    /// Sends what is queued.
    pub(super) fn flush(&mut self) -> Result<(), LinkError> {
        let out = std::mem::take(&mut self.out);
        let sent = self.write_all(&out);
        self.out = out;
        self.out.clear();
        sent
    }

    fn fill(&mut self) -> Result<(), LinkError> {
        self.limit()?;
        (self.from, self.to) = (0, 0);
        loop {
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Err(LinkError::Broken),
                Ok(n) => {
                    self.to = n;
                    return Ok(());
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(of_io(&e)),
            }
        }
    }

    /// Takes exactly `n` bytes and hands them on in pieces.
    pub(super) fn take(&mut self, mut n: usize, mut piece: impl FnMut(&[u8])) -> Result<(), LinkError> {
        while n > 0 {
            if self.from == self.to {
                self.fill()?;
            }
            let now = n.min(self.to - self.from);
            piece(&self.buffer[self.from..self.from + now]);
            self.from += now;
            n -= now;
        }
        Ok(())
    }

    fn take_line(&mut self) -> Result<Vec<u8>, LinkError> {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            if line.len() > LINE_BYTES_MAX {
                return Err(LinkError::Protocol);
            }
            self.take(1, |b| line.extend_from_slice(b))?;
        }
        line.truncate(line.len() - 2);
        Ok(line)
    }

    /// The end of a bulk string.
    pub(super) fn take_end(&mut self) -> Result<(), LinkError> {
        let mut end = [0; 2];
        let mut at = 0;
        self.take(2, |b| {
            end[at..at + b.len()].copy_from_slice(b);
            at += b.len();
        })?;
        if end == *b"\r\n" { Ok(()) } else { Err(LinkError::Protocol) }
    }

    /// The length of a bulk reply that follows, `None` for "no such key".
    pub(super) fn bulk(&mut self) -> Result<Option<usize>, LinkError> {
        let line = self.take_line()?;
        match line.split_first() {
            Some((b'$', n)) => bulk_len(n),
            Some((b'-', text)) => Err(LinkError::Refused(refusal(text))),
            _ => Err(LinkError::Protocol),
        }
    }

    /// A small reply.
    pub(super) fn reply(&mut self) -> Result<Reply, LinkError> {
        self.reply_at(0)
    }

    fn reply_at(&mut self, depth: usize) -> Result<Reply, LinkError> {
        let line = self.take_line()?;
        let Some((sigil, rest)) = line.split_first() else { return Err(LinkError::Protocol) };
        match sigil {
            b'+' => Ok(Reply::Simple),
            b'-' => Err(LinkError::Refused(refusal(rest))),
            b':' => Ok(Reply::Int(number(rest).ok_or(LinkError::Protocol)?)),
            b'$' => match bulk_len(rest)? {
                None => Ok(Reply::Bulk(None)),
                Some(n) if n <= SMALL_BYTES_MAX => {
                    let mut bytes = Vec::with_capacity(n);
                    self.take(n, |b| bytes.extend_from_slice(b))?;
                    self.take_end()?;
                    Ok(Reply::Bulk(Some(bytes)))
                }
                Some(_) => Err(LinkError::Protocol),
            },
            b'*' if depth < 3 => {
                let n = number(rest).and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= LIST_MAX);
                let n = n.ok_or(LinkError::Protocol)?;
                (0..n).map(|_| self.reply_at(depth + 1)).collect::<Result<_, _>>().map(Reply::List)
            }
            _ => Err(LinkError::Protocol),
        }
    }
}

fn number(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn bulk_len(text: &[u8]) -> Result<Option<usize>, LinkError> {
    match number(text) {
        Some(-1) => Ok(None),
        Some(n) => match usize::try_from(n) {
            Ok(n) if n <= BULK_BYTES_MAX => Ok(Some(n)),
            _ => Err(LinkError::Protocol),
        },
        None => Err(LinkError::Protocol),
    }
}

fn refusal(text: &[u8]) -> Refusal {
    let code = text.split(|&b| b == b' ').next().unwrap_or_default();
    match code {
        b"OOM" => Refusal::Full,
        b"LOADING" | b"BUSY" | b"TRYAGAIN" | b"MASTERDOWN" | b"CLUSTERDOWN" => Refusal::Busy,
        _ => Refusal::Other,
    }
}

fn of_io(e: &io::Error) -> LinkError {
    match e.kind() {
        // A socket whose time limit passed says either.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => LinkError::Timeout,
        _ => LinkError::Broken,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link to somebody who says `says` and then hangs up.
    fn link(says: &[u8]) -> Link {
        let (mine, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(says).unwrap();
        drop(theirs);
        let buffer = vec![0; 64].into_boxed_slice();
        let deadline = Instant::now() + Duration::from_secs(60);
        Link { stream: Stream::Unix(mine), out: vec![], buffer, from: 0, to: 0, deadline }
    }

    #[test]
    fn replies_read_back() {
        let mut l = link(
            b"+OK\r\n:42\r\n$3\r\nabc\r\n$-1\r\n*2\r\n$1\r\n0\r\n*1\r\n$2\r\nhi\r\n-OOM no\r\n-ERR x\r\n",
        );
        assert_eq!(l.reply(), Ok(Reply::Simple));
        assert_eq!(l.reply(), Ok(Reply::Int(42)));
        assert_eq!(l.reply(), Ok(Reply::Bulk(Some(b"abc".to_vec()))));
        assert_eq!(l.reply(), Ok(Reply::Bulk(None)));
        let inner = Reply::List(vec![Reply::Bulk(Some(b"hi".to_vec()))]);
        assert_eq!(l.reply(), Ok(Reply::List(vec![Reply::Bulk(Some(b"0".to_vec())), inner])));
        assert_eq!(l.reply(), Err(LinkError::Refused(Refusal::Full)));
        assert_eq!(l.bulk(), Err(LinkError::Refused(Refusal::Other)));
        assert_eq!(l.reply(), Err(LinkError::Broken));
    }

    #[test]
    fn nonsense_ends_the_connection_without_a_panic_or_an_allocation() {
        for says in [
            &b"$99999999999\r\n"[..],
            b"$70000\r\n",
            b"$-2\r\n",
            b"*9999999\r\n",
            b"*-1\r\n",
            b":abc\r\n",
            b"?\r\n",
            b"\r\n",
            b"$3\r\nabcXY",
            b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        ] {
            assert_eq!(link(says).reply(), Err(LinkError::Protocol), "{:?}", String::from_utf8_lossy(says));
        }
        assert_eq!(link(&[b'+'; 10_000]).reply(), Err(LinkError::Protocol));
        assert_eq!(link(b"$600000000\r\n").bulk(), Err(LinkError::Protocol));
        assert_eq!(link(b"$5\r\nab").reply(), Err(LinkError::Broken));
    }

    #[test]
    fn a_silent_server_is_a_timeout() {
        let (mine, _theirs) = UnixStream::pair().unwrap();
        let buffer = vec![0; 64].into_boxed_slice();
        let deadline = Instant::now() + Duration::from_millis(5);
        let mut l = Link { stream: Stream::Unix(mine), out: vec![], buffer, from: 0, to: 0, deadline };
        assert_eq!(l.reply(), Err(LinkError::Timeout));
    }
}
