//! A witness sees everything that a file store does to its directory, in an order in which it may have
//! reached the disk's queue. Crash tests rebuild from it what a power cut could have left.

use std::fmt::Debug;

/// One change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DiskEvent<'a> {
    /// An empty file was made.
    Create {
        /// File.
        name: &'a str,
    },
    /// A file got a length; new bytes are zero.
    SetLen {
        /// File.
        name: &'a str,
        /// Bytes.
        len: u64,
    },
    /// Bytes were written.
    Write {
        /// File.
        name: &'a str,
        /// First byte.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// A range was made zero and its blocks given back.
    Punch {
        /// File.
        name: &'a str,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Everything written to the file before is on the disk.
    SyncFile {
        /// File.
        name: &'a str,
    },
    /// A file changed its name, replacing the target.
    Rename {
        /// Old name.
        from: &'a str,
        /// New name.
        to: &'a str,
    },
    /// A file was removed.
    Unlink {
        /// File.
        name: &'a str,
    },
    /// Every change of names before is on the disk.
    SyncDir,
}

/// Receives the changes. Called on the threads that make them.
pub trait Witness: Send + Sync + Debug {
    /// A change happened.
    fn saw(&self, event: DiskEvent<'_>);
}
