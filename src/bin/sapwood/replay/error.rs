//! What can stop a replay.

use std::path::PathBuf;

use sapwood::backend::device::DeviceError;
use sapwood::backend::host::MemoryError;
use sapwood::backend::store::file::OpenError;
use sapwood::engine::{BuildError, CacheError};
use sapwood::key::NamespaceError;
use sapwood::pool::GeometryError;

use super::args::Conflict;
use super::store_url::ServiceError;
use super::trace::TraceError;

/// Bad input: exit code 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    #[error(transparent)]
    Conflict(#[from] Conflict),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("cannot use store directory {}: {error}", path.display())]
    StoreDir { path: PathBuf, error: OpenError },
    #[error("cannot use the store: {0}")]
    Service(#[from] ServiceError),
    #[error("cannot write {}: {source}", path.display())]
    Output { path: PathBuf, source: std::io::Error },
    #[error("geometry: {0}")]
    Geometry(#[from] GeometryError),
    #[error("device: {0}")]
    Device(#[from] DeviceError),
    #[error("cache: {0}")]
    Build(#[from] BuildError),
    #[error("namespace: {0}")]
    Namespace(#[from] NamespaceError),
}

/// The run could not go on: exit code 1.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error("cache: {0}")]
    Cache(#[from] CacheError),
    #[error("rank {rank} answers the call `{call}` in another way than rank 0")]
    Answers { rank: usize, call: &'static str },
    #[error("device memory: {0}")]
    Memory(#[from] MemoryError),
    #[error("cannot write {}: {source}", path.display())]
    Output { path: PathBuf, source: std::io::Error },
}
