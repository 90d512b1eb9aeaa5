//! Real servers: started on loopback, shared by the tests that run at the time, killed by their id.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A running server. Dropping the last handle ends it.
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
    pub(crate) dir: TempDir,
}

impl Server {
    /// Starts a program and waits until `ready`. `None` if the program is not installed.
    fn start(
        program: &PathBuf,
        args: impl Fn(u16, &str) -> Vec<String>,
        ready: fn(&Server) -> bool,
    ) -> Option<Server> {
        let dir = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Command::new(program)
            .args(args(port, &dir.path().display().to_string()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut server = Server { child, port, dir };
        let patience = Instant::now() + Duration::from_secs(60);
        while !ready(&server) {
            assert!(Instant::now() < patience, "{} does not come up", program.display());
            assert!(server.child.try_wait().unwrap().is_none(), "{} ended", program.display());
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(server)
    }

    /// Ends the server as a power cut would.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    #[cfg(feature = "redis")]
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("redis.sock")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

type Shared = Mutex<Weak<Server>>;

fn shared(slot: &Shared, start: fn() -> Option<Server>) -> Option<Arc<Server>> {
    let mut slot = slot.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(server) = slot.upgrade() {
        return Some(server);
    }
    let server = Arc::new(start()?);
    *slot = Arc::downgrade(&server);
    Some(server)
}

/// A name that no other test uses.
pub(crate) fn fresh_name(what: &str) -> String {
    static LAST: AtomicU64 = AtomicU64::new(0);
    format!("{what}-{}-{}", std::process::id(), LAST.fetch_add(1, Ordering::Relaxed))
}

#[cfg(feature = "redis")]
/// `redis-server` on a socket file and on a port.
pub(crate) fn start_redis() -> Option<Server> {
    let args = |port: u16, dir: &str| {
        let text = format!(
            "--port {port} --bind 127.0.0.1 --unixsocket {dir}/redis.sock --dir {dir} --appendonly no \
             --maxmemory 256mb --maxmemory-policy noeviction --save"
        );
        let mut args: Vec<String> = text.split(' ').map(str::to_owned).collect();
        args.push(String::new());
        args
    };
    Server::start(&PathBuf::from("redis-server"), args, |s| {
        let up = || -> std::io::Result<bool> {
            let mut link = std::os::unix::net::UnixStream::connect(s.socket())?;
            link.write_all(b"PING\r\n")?;
            let mut answer = [0; 5];
            link.read_exact(&mut answer)?;
            Ok(answer == *b"+PONG")
        };
        up().unwrap_or(false)
    })
}

#[cfg(feature = "redis")]
pub(crate) fn redis() -> Option<Arc<Server>> {
    static REDIS: Shared = Mutex::new(Weak::new());
    shared(&REDIS, start_redis)
}

#[cfg(feature = "object")]
/// `localbucket`, an S3 server that keeps buckets as directories, with the bucket `pages`.
pub(crate) fn start_s3() -> Option<Server> {
    let program = std::env::var_os("SAPWOOD_LOCALBUCKET")
        .map_or_else(|| PathBuf::from("target/l3/bin/localbucket"), PathBuf::from);
    let args = |port: u16, dir: &str| {
        std::fs::create_dir_all(format!("{dir}/root/pages")).unwrap();
        vec!["--port".into(), port.to_string(), format!("{dir}/root")]
    };
    Server::start(&program, args, |s| TcpStream::connect(("127.0.0.1", s.port)).is_ok())
}

#[cfg(feature = "object")]
pub(crate) fn s3() -> Option<Arc<Server>> {
    static S3: Shared = Mutex::new(Weak::new());
    shared(&S3, start_s3)
}
