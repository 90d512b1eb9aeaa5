//! Builds the stand-in for the embedded library, once per process, and opens stores on it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use sapwood::backend::store::mooncake::embedded::{EmbeddedConfig, EmbeddedStore};

static BUILT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();

/// The library. It stays loaded, so that its pools live as long as the process.
pub(crate) fn library() -> PathBuf {
    let build = || {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("libmooncake_store.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mooncake/stand_in.c");
        let built = Command::new(std::env::var_os("CC").unwrap_or("cc".into()))
            .args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"])
            .args([path.as_os_str(), source.as_ref()])
            .status()
            .unwrap();
        assert!(built.success(), "the stand-in does not compile");
        std::mem::forget(open_at(path.clone(), "keeps-it-loaded"));
        (dir, path)
    };
    BUILT.get_or_init(build).1.clone()
}

fn open_at(library: PathBuf, pool: &str) -> EmbeddedStore {
    EmbeddedStore::open(&EmbeddedConfig::at(library, "127.0.0.1:1", pool)).unwrap()
}

/// A store in the pool of this name.
pub(crate) fn open(pool: &str) -> EmbeddedStore {
    open_at(library(), pool)
}

/// A name that no other test has.
pub(crate) fn pool() -> String {
    static LAST: AtomicU32 = AtomicU32::new(0);
    format!("pool-{}", LAST.fetch_add(1, Relaxed))
}
