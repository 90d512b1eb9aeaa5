//! The real service on loopback: `mooncake_master` and the standalone `mooncake_client`, started for one test and
//! stopped by process id.
//!
//! The two programs come with a Python package. `SAPWOOD_MOONCAKE` names the folder they lie in, or, to test the
//! tests, they are found on the path.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Master and real client.
#[derive(Debug)]
pub(crate) struct Service {
    master: Child,
    master_port: u16,
    pub(crate) client: Option<Child>,
    client_port: u16,
    segment: String,
    advised: bool,
    folder: PathBuf,
}

/// How `docs/MOONCAKE.md` advises to start the real client: a second thread for its calls, and its C library told to copy
/// past the caches what is at least so large.
const THREADS: &str = "--threads=2";
const TUNABLES: &str = "glibc.cpu.x86_non_temporal_threshold=0x10000";

/// A port that nobody listens on. Somebody else may take it before the service does; then the service does not
/// start and the caller tries another.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

fn folder() -> Option<PathBuf> {
    let has = |d: &PathBuf| d.join("mooncake_client").is_file() && d.join("mooncake_master").is_file();
    let named = std::env::var_os("SAPWOOD_MOONCAKE").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    named.into_iter().chain(std::env::split_paths(&path)).find(has)
}

fn listens(port: u16, child: &mut Child) -> bool {
    let until = Instant::now() + Duration::from_secs(30);
    while Instant::now() < until {
        if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

/// Whether it is a real client that listens there, and not somebody who was given the same port.
fn answers(port: u16) -> bool {
    use std::io::{Read as _, Write as _};
    const READY: [u8; 20] = [0x15, 0, 0, 0, 0, 0, 0, 0, 0xc8, 0xf9, 0x33, 0xe8, 0, 0, 0, 0, 0, 0, 0, 0];
    let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { return false };
    let mut reply = [0; 16];
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&READY).is_ok() && stream.read_exact(&mut reply).is_ok() && reply[..3] == [0x15, 0, 0]
}

fn stop(child: &mut Child) {
    // Not SIGTERM: nothing of it is needed afterwards, and a test must not wait for its manners.
    let _ = child.kill();
    let _ = child.wait();
}

impl Service {
    /// Starts both, or says that they are not here.
    pub(crate) fn start(segment: &str) -> Option<Service> {
        Service::start_as(segment, false)
    }

    /// Starts both, the real client as it comes or as we advise.
    pub(crate) fn start_as(segment: &str, advised: bool) -> Option<Service> {
        let Some(folder) = folder() else {
            crate::kit::skip("mooncake_master and mooncake_client (set SAPWOOD_MOONCAKE to their folder)");
            return None;
        };
        for _ in 0..5 {
            if let Some(service) = Service::try_start(&folder, segment, advised) {
                return Some(service);
            }
        }
        panic!("mooncake does not start from {}", folder.display());
    }

    fn try_start(folder: &std::path::Path, segment: &str, advised: bool) -> Option<Service> {
        let (master_port, metrics_port, client_port) = (free_port(), free_port(), free_port());
        let mut master = Command::new(folder.join("mooncake_master"))
            .args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"])
            .arg(format!("--rpc_port={master_port}"))
            .arg(format!("--metrics_port={metrics_port}"))
            .arg("--client_ttl=4")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        if !listens(master_port, &mut master) {
            stop(&mut master);
            return None;
        }
        let mut service = Service {
            master,
            master_port,
            client: None,
            client_port,
            segment: segment.to_owned(),
            advised,
            folder: folder.to_owned(),
        };
        service.start_client().then_some(service)
    }

    /// Starts the real client, again after [`Service::kill_client`].
    pub(crate) fn start_client(&mut self) -> bool {
        let mut client = Command::new(self.folder.join("mooncake_client"));
        if self.advised {
            client.arg(THREADS).env("GLIBC_TUNABLES", TUNABLES);
        }
        let mut client = client
            .args(["--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"])
            .arg(format!("--port={}", self.client_port))
            .arg(format!("--master_server_address=127.0.0.1:{}", self.master_port))
            .arg(format!("--global_segment_size={}", self.segment))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let up = listens(self.client_port, &mut client) && answers(self.client_port);
        self.client = Some(client);
        up
    }

    /// Ends the real client as a crash would.
    pub(crate) fn kill_client(&mut self) {
        if let Some(mut client) = self.client.take() {
            stop(&mut client);
        }
    }

    /// Where the real client listens.
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.client_port))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.kill_client();
        stop(&mut self.master);
    }
}
