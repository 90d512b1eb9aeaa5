//! The directory of a file store: opened once, checked, locked; everything else is relative to its handle.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};

use super::witness::{DiskEvent, Witness};
use crate::backend::store::gate::locked;

/// Why a file store cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The system refused.
    #[error("{op} {path}: {source}")]
    Io {
        /// What was being done.
        op: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The root belongs to another user, who could replace what is in it.
    #[error("{path} belongs to user {owner}, this process is user {user}")]
    ForeignOwner {
        /// The root.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The process's effective user.
        user: u32,
    },
    /// Others may write into the root.
    #[error("{path} has mode {mode:o}: others may write into it")]
    OthersMayWrite {
        /// The root.
        path: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// Another process, or another store of this one, has it open.
    #[error("{path} is in use by another store")]
    InUse {
        /// The root.
        path: PathBuf,
    },
    /// A segment of a version this build does not read. Nothing was changed.
    #[error("{name} has format version {found}, this build reads {}", super::segment::VERSION)]
    Version {
        /// File.
        name: String,
        /// Version found.
        found: u16,
    },
    /// The configuration contradicts itself.
    #[error("{field} is {value}: {why}")]
    Config {
        /// Field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it would have to be.
        why: &'static str,
    },
}

/// A checked and locked directory.
#[derive(Debug)]
pub(super) struct Root {
    dir: OwnedFd,
    path: PathBuf,
    witness: Option<Arc<dyn Witness>>,
    /// Holds the lock until released.
    lock: Mutex<Option<OwnedFd>>,
}

fn io_error(op: &'static str, path: &Path) -> impl FnOnce(rustix::io::Errno) -> OpenError {
    let path = path.to_owned();
    move |e| OpenError::Io { op, path, source: e.into() }
}

const LOCK: &CStr = c"LOCK";

impl Root {
    /// Opens `path`, making the last component if it is not there.
    ///
    /// Links are not followed at the last component; those before it are the operator's choice.
    pub(super) fn open(path: &Path, witness: Option<Arc<dyn Witness>>) -> Result<Root, OpenError> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(io_error("create", path)(e)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(io_error("open", path))?;
        let stat = rustix::fs::fstat(&dir).map_err(io_error("stat", path))?;
        let user = rustix::process::geteuid().as_raw();
        if stat.st_uid != user {
            return Err(OpenError::ForeignOwner { path: path.to_owned(), owner: stat.st_uid, user });
        }
        if stat.st_mode & 0o022 != 0 {
            return Err(OpenError::OthersMayWrite { path: path.to_owned(), mode: stat.st_mode & 0o7777 });
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = rustix::fs::openat(&dir, LOCK, flags, Mode::RUSR | Mode::WUSR)
            .map_err(io_error("open the lock of", path))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Root { dir, path: path.to_owned(), witness, lock: Mutex::new(Some(lock)) }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(OpenError::InUse { path: path.to_owned() }),
            Err(e) => Err(io_error("lock", path)(e)),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Lets others open the directory. Said in so many words, because closing the file is not enough while another
    /// thread forks: until the child calls `exec`, it has the lock too.
    pub(super) fn unlock(&self) {
        if let Some(lock) = locked(&self.lock).take() {
            // It can not fail on a lock that is held, and the file is closed all the same.
            let _ = rustix::fs::flock(&lock, FlockOperation::Unlock);
        }
    }

    pub(super) fn witness(&self) -> Option<Arc<dyn Witness>> {
        self.witness.clone()
    }

    fn saw(&self, event: DiskEvent<'_>) {
        if let Some(w) = &self.witness {
            w.saw(event);
        }
    }

    /// Names of regular entries, in no order.
    pub(super) fn names(&self) -> io::Result<Vec<String>> {
        let mut out = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.dir)? {
            // Names that are not UTF-8 are not ours.
            if let Ok(name) = entry?.file_name().to_str() {
                out.push(name.to_owned());
            }
        }
        Ok(out)
    }

    /// Makes a file that must not exist.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.dir, name, flags, Mode::RUSR | Mode::WUSR)?;
        self.saw(DiskEvent::Create { name });
        Ok(fd.into())
    }

    /// Opens a file that exists; refuses links and anything but regular files.
    pub(super) fn open_file(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file: File = rustix::fs::openat(&self.dir, name, flags, Mode::empty())?.into();
        if !file.metadata()?.is_file() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(file)
    }

    /// All bytes of a file.
    pub(super) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_file(name)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// A second handle of a file that bypasses the page cache. `None` where the file system has no such thing.
    pub(super) fn open_direct(&self, name: &str) -> Option<File> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::DIRECT;
        rustix::fs::openat(&self.dir, name, flags, Mode::empty()).ok().map(File::from)
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        rustix::fs::renameat(&self.dir, from, &self.dir, to)?;
        self.saw(DiskEvent::Rename { from, to });
        Ok(())
    }

    pub(super) fn unlink(&self, name: &str) -> io::Result<()> {
        rustix::fs::unlinkat(&self.dir, name, AtFlags::empty())?;
        self.saw(DiskEvent::Unlink { name });
        Ok(())
    }

    /// Makes creations, renames and removals durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        rustix::fs::fsync(&self.dir)?;
        self.saw(DiskEvent::SyncDir);
        Ok(())
    }

    /// Bytes that an unprivileged user may still take from the file system.
    pub(super) fn free_bytes(&self) -> io::Result<u64> {
        let s = rustix::fs::fstatvfs(&self.dir)?;
        Ok(s.f_bavail.saturating_mul(s.f_frsize))
    }
}
