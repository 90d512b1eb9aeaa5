//! Rendezvous over HTTP/1.1: a front for [`Registry`], small enough to embed, and the client for it.
//!
//! | request | answer |
//! |---|---|
//! | `PUT /v1/rank` with `key value` lines | 200; 409 with the reason; 400 |
//! | `GET /v1/instance` | 200 with `key value` lines; 503 until all ranks are there |
//! | `GET /v1/rank?dp=0&pp=0&cp=0&tp=0` | 200 `incarnation address`; 404; 503; 400 |
//! | `PUT /v1/room?room=7&dp=1`, `GET /v1/room?room=7` | 200; 404 |
//! | `GET /health` | 200 |
//!
//! Unknown keys are skipped, so either side may be newer. A user with a rendezvous of their own implements
//! [`Rendezvous`].

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::TransportError;
use crate::base::Time;
use crate::base::containers::Map;
use crate::pd::bootstrap::{Endpoint, Face, LookupRefused, Registration, Registry};
use crate::pd::ids::Incarnation;
use crate::pd::topo::{CpSpread, Rank, STAGES_MAX, Topology};

const BODY_BYTES_MAX: usize = 16 << 10;
const LINE_BYTES_MAX: usize = 4 << 10;
const LINES_MAX: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(5);

/// Finds prefill ranks. The calls may wait for the network; a scheduler calls them from a thread of its own.
pub trait Rendezvous: Send {
    /// Enters a rank.
    fn register(&mut self, r: &Registration) -> Result<(), RendezvousError>;
    /// The instance and its face, when it is complete.
    fn face(&mut self) -> Result<(u64, Face), RendezvousError>;
    /// One rank.
    fn endpoint(&mut self, rank: Rank) -> Result<Endpoint, RendezvousError>;
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Ranks are missing; ask again.
    #[error("not all ranks are registered")]
    NotReady,
    /// No such rank.
    #[error("unknown rank")]
    Unknown,
    /// The registration was refused.
    #[error("refused with status {0}")]
    Refused(u16),
    /// The answer cannot be read.
    #[error("answer cannot be read")]
    Answer,
    /// The network failed.
    #[error("rendezvous: {0}")]
    Io(#[from] std::io::Error),
}

fn face_lines(instance: u64, f: &Face) -> String {
    let t = &f.topo;
    let stages: Vec<String> = t.stage_layers.iter().map(u32::to_string).collect();
    format!(
        "instance {instance}\ndp {}\ncp {}\ntp {}\nstages {}\ncp_block {}\npage_shard {}\nmodel {}\npage_tokens {}\n\
         window_tokens {}\nversion_min {}\nversion_max {}\n",
        t.dp,
        t.cp,
        t.tp,
        stages.join(","),
        u8::from(t.cp_spread == CpSpread::Block),
        u8::from(t.page_shard),
        f.model,
        f.page_tokens,
        f.window_tokens,
        f.versions.0,
        f.versions.1,
    )
}

struct Lines<'a>(Map<&'a str, &'a str>);

impl<'a> Lines<'a> {
    fn parse(text: &'a str) -> Lines<'a> {
        Lines(text.lines().take(LINES_MAX).filter_map(|l| l.split_once(' ')).collect())
    }

    fn number<T: std::str::FromStr>(&self, key: &str) -> Option<T> {
        self.0.get(key)?.parse().ok()
    }

    fn face(&self) -> Option<(u64, Face)> {
        let stages: Vec<u32> = self
            .0
            .get("stages")?
            .split(',')
            .take(STAGES_MAX + 1)
            .map(|s| s.parse().ok())
            .collect::<Option<_>>()?;
        let block = self.number::<u8>("cp_block")? == 1;
        let topo = Topology {
            dp: self.number("dp")?,
            cp: self.number("cp")?,
            tp: self.number("tp")?,
            stage_layers: stages,
            cp_spread: if block { CpSpread::Block } else { CpSpread::Replicated },
            page_shard: self.number::<u8>("page_shard")? == 1,
        };
        let face = Face {
            topo,
            model: self.number("model")?,
            page_tokens: self.number("page_tokens")?,
            window_tokens: self.number("window_tokens")?,
            versions: (self.number("version_min")?, self.number("version_max")?),
        };
        Some((self.number("instance")?, face))
    }

    fn rank(&self) -> Option<Rank> {
        Some(Rank {
            dp: self.number("dp")?,
            pp: self.number("pp")?,
            cp: self.number("cp")?,
            tp: self.number("tp")?,
        })
    }

    fn registration(&self) -> Option<Registration> {
        let (instance, face) = self.face()?;
        let rank = |k: &str| self.number(k);
        Some(Registration {
            instance,
            started_us: self.number("started_us")?,
            face,
            rank: Rank {
                dp: rank("rank_dp")?,
                pp: rank("rank_pp")?,
                cp: rank("rank_cp")?,
                tp: rank("rank_tp")?,
            },
            incarnation: Incarnation(self.number("incarnation")?),
            address: (*self.0.get("address")?).to_string(),
        })
    }
}

/// The server. It ends when dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
}

impl Server {
    /// Serves an empty registry on a port of `ip` (0 picks one).
    pub fn new(ip: IpAddr, port: u16) -> Result<Server, TransportError> {
        let listener = TcpListener::bind((ip, port)).map_err(TransportError::system("bind"))?;
        let address = listener.local_addr().map_err(TransportError::system("local_addr"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let (s, registry, start) = (stop.clone(), Arc::new(Mutex::new(Registry::new())), Instant::now());
        let run = move || {
            for stream in listener.incoming() {
                if s.load(Ordering::Acquire) {
                    return;
                }
                let (Ok(stream), registry) = (stream, registry.clone()) else { continue };
                let answer = move || drop(serve(stream, &registry, start));
                let _ = std::thread::Builder::new().name("sapwood-rendezvous".into()).spawn(answer);
            }
        };
        std::thread::Builder::new()
            .name("sapwood-rendezvous".into())
            .spawn(run)
            .map_err(TransportError::system("spawn"))?;
        Ok(Server { address, stop })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = TcpStream::connect_timeout(&self.address, TIMEOUT);
    }
}

/// One request per connection. Anything odd is a 400, anything long is cut.
fn serve(stream: TcpStream, registry: &Mutex<Registry>, start: Instant) -> std::io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut out = stream.try_clone()?;
    let mut r = BufReader::new(stream.take((LINE_BYTES_MAX * LINES_MAX + BODY_BYTES_MAX) as u64));
    let mut first = String::new();
    r.read_line(&mut first)?;
    let mut length = 0usize;
    for _ in 0..LINES_MAX {
        let mut line = String::new();
        if r.read_line(&mut line)? == 0 || line.trim_end().is_empty() {
            break;
        }
        if let Some((k, v)) = line.split_once(':')
            && k.eq_ignore_ascii_case("content-length")
        {
            length = v.trim().parse().unwrap_or(usize::MAX);
        }
    }
    let (status, text) = if length > BODY_BYTES_MAX {
        (413, String::new())
    } else {
        let mut body = vec![0; length];
        r.read_exact(&mut body)?;
        let now = Time(u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX));
        let body = String::from_utf8_lossy(&body).into_owned();
        answer(&mut registry.lock().unwrap_or_else(PoisonError::into_inner), now, &first, &body)
    };
    let head = format!("HTTP/1.1 {status} -\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", text.len());
    out.write_all(head.as_bytes())?;
    out.write_all(text.as_bytes())
}

/// The answer to a request line and its body.
fn answer(registry: &mut Registry, now: Time, first: &str, body: &str) -> (u16, String) {
    let mut words = first.split_whitespace();
    let (Some(method), Some(target)) = (words.next(), words.next()) else { return (400, String::new()) };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let query = query.replace('&', "\n").replace('=', " ");
    let query = Lines::parse(&query);
    let refused = |e: LookupRefused| match e {
        LookupRefused::NotReady { .. } => (503, e.to_string()),
        LookupRefused::Unknown => (404, e.to_string()),
    };
    match (method, path) {
        ("GET", "/health") => (200, "ok".into()),
        ("PUT", "/v1/rank") => match Lines::parse(body).registration() {
            None => (400, "registration cannot be read".into()),
            Some(r) => match registry.register(r) {
                Ok(what) => (200, format!("{what:?}")),
                Err(why) => (409, why.to_string()),
            },
        },
        ("GET", "/v1/instance") => match registry.face() {
            Ok((instance, face)) => (200, face_lines(instance, face)),
            Err(e) => refused(e),
        },
        ("GET", "/v1/rank") => match query.rank() {
            None => (400, "dp, pp, cp and tp are needed".into()),
            Some(rank) => match registry.endpoint(rank) {
                Ok(e) => (200, format!("{} {}", e.incarnation.0, e.address)),
                Err(e) => refused(e),
            },
        },
        ("PUT", "/v1/room") => match (query.number("room"), query.number("dp")) {
            (Some(room), Some(dp)) => {
                registry.note_replica(now, room, dp);
                (200, String::new())
            }
            _ => (400, "room and dp are needed".into()),
        },
        ("GET", "/v1/room") => match query.number("room").map(|r| registry.replica(r)) {
            None => (400, "room is needed".into()),
            Some(None) => (404, String::new()),
            Some(Some(dp)) => (200, dp.to_string()),
        },
        _ => (404, "no such thing".into()),
    }
}

/// The client of a [`Server`].
#[derive(Clone, Debug)]
pub struct Client {
    address: SocketAddr,
}

impl Client {
    /// A client of the server at this address.
    #[must_use]
    pub fn new(address: SocketAddr) -> Client {
        Client { address }
    }

    fn call(&self, method: &str, target: &str, body: &str) -> Result<(u16, String), RendezvousError> {
        let mut s = TcpStream::connect_timeout(&self.address, TIMEOUT)?;
        s.set_read_timeout(Some(TIMEOUT))?;
        s.set_write_timeout(Some(TIMEOUT))?;
        let head = format!(
            "{method} {target} HTTP/1.1\r\nHost: sapwood\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        s.write_all(head.as_bytes())?;
        let mut text = String::new();
        s.take((BODY_BYTES_MAX + LINE_BYTES_MAX) as u64).read_to_string(&mut text)?;
        let (head, body) = text.split_once("\r\n\r\n").ok_or(RendezvousError::Answer)?;
        let status =
            head.split_whitespace().nth(1).and_then(|s| s.parse().ok()).ok_or(RendezvousError::Answer)?;
        Ok((status, body.to_string()))
    }
}

fn ok(r: (u16, String)) -> Result<String, RendezvousError> {
    match r.0 {
        200 => Ok(r.1),
        404 => Err(RendezvousError::Unknown),
        503 => Err(RendezvousError::NotReady),
        other => Err(RendezvousError::Refused(other)),
    }
}

impl Rendezvous for Client {
    fn register(&mut self, r: &Registration) -> Result<(), RendezvousError> {
        let mut body = face_lines(r.instance, &r.face);
        let k = r.rank;
        body += &format!("rank_dp {}\nrank_pp {}\nrank_cp {}\nrank_tp {}\n", k.dp, k.pp, k.cp, k.tp);
        body +=
            &format!("started_us {}\nincarnation {}\naddress {}\n", r.started_us, r.incarnation.0, r.address);
        ok(self.call("PUT", "/v1/rank", &body)?).map(|_| ())
    }

    fn face(&mut self) -> Result<(u64, Face), RendezvousError> {
        let text = ok(self.call("GET", "/v1/instance", "")?)?;
        Lines::parse(&text).face().ok_or(RendezvousError::Answer)
    }

    fn endpoint(&mut self, r: Rank) -> Result<Endpoint, RendezvousError> {
        let target = format!("/v1/rank?dp={}&pp={}&cp={}&tp={}", r.dp, r.pp, r.cp, r.tp);
        let text = ok(self.call("GET", &target, "")?)?;
        let (inc, address) = text.split_once(' ').ok_or(RendezvousError::Answer)?;
        let incarnation = Incarnation(inc.parse().map_err(|_| RendezvousError::Answer)?);
        Ok(Endpoint { incarnation, address: address.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn registration(tp: u32) -> Registration {
        Registration {
            instance: 3,
            started_us: 5,
            face: Face {
                topo: Topology { tp: 2, stage_layers: vec![4, 5], ..Topology::single(1) },
                model: u64::MAX,
                page_tokens: 16,
                window_tokens: 0,
                versions: (1, 1),
            },
            rank: Rank { tp, ..Rank::default() },
            incarnation: Incarnation(70 + u64::from(tp)),
            address: format!("10.0.0.{tp}:9"),
        }
    }

    #[test]
    fn ranks_register_and_are_found_over_http() {
        let server = Server::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
        let mut c = Client::new(server.address());
        assert!(matches!(c.face(), Err(RendezvousError::NotReady)));
        for pp in 0..2 {
            for tp in 0..2 {
                let mut r = registration(tp);
                r.rank.pp = pp;
                c.register(&r).unwrap();
                c.register(&r).unwrap();
            }
        }
        let (instance, face) = c.face().unwrap();
        assert_eq!((instance, face), (3, registration(0).face));
        let end = c.endpoint(Rank { tp: 1, pp: 1, ..Rank::default() }).unwrap();
        assert_eq!((end.incarnation, end.address.as_str()), (Incarnation(71), "10.0.0.1:9"));
        assert!(matches!(c.endpoint(Rank { tp: 2, ..Rank::default() }), Err(RendezvousError::Unknown)));
        let mut other = registration(0);
        other.face.page_tokens = 8;
        assert!(matches!(c.register(&other), Err(RendezvousError::Refused(409))));
        assert_eq!(c.call("PUT", "/v1/room?room=7&dp=1", "").unwrap().0, 200);
        assert_eq!(c.call("GET", "/v1/room?room=7", "").unwrap(), (200, "1".into()));
    }

    #[test]
    fn odd_requests_are_answers() {
        let server = Server::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
        let c = Client::new(server.address());
        for (m, t, b, want) in [
            ("GET", "/v1/rank?dp=x", "", 400),
            ("GET", "/v1/rank", "", 400),
            ("PUT", "/v1/rank", "nonsense", 400),
            ("PUT", "/v1/rank", "stages 1,2,x\n", 400),
            ("GET", "/v1/room", "", 400),
            ("GET", "/v1/room?room=1", "", 404),
            ("BREW", "/coffee", "", 404),
            ("GET", "/health", "", 200),
        ] {
            assert_eq!(c.call(m, t, b).unwrap().0, want, "{m} {t}");
        }
        let mut s = TcpStream::connect(server.address()).unwrap();
        s.write_all(&[0xFF; 300]).unwrap();
        drop(s);
        assert_eq!(c.call("GET", "/health", "").unwrap().0, 200);
    }
}
