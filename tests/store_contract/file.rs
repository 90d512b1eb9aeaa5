//! What only the file store promises: bounds, restarts, bad directories, other people's files.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::slice::from_ref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use sapwood::backend::store::file::{DiskEvent, FileConfig, FileStore, IoMode, OpenError, Witness};
use sapwood::backend::store::{Call, Health, Outcome, Store, StoreError};

use crate::kit::{Arena, bytes_of, item, key, namespace_of, skip};

const LEN: usize = 8 << 10;

fn config(root: &Path) -> FileConfig {
    let mut c = FileConfig::new(root, 4 << 20);
    c.segment_bytes = 128 << 10;
    c.free_bytes_min = 0;
    c
}

fn put(store: &dyn Store, a: &Arena, n: u64) -> Outcome {
    a.write(0, &bytes_of(n, LEN));
    store.put(&[item(n, a.span(0, LEN))], &Call::unbounded())[0]
}

fn got(store: &dyn Store, a: &Arena, n: u64) -> Outcome {
    a.write(0, &[0xEE; LEN]);
    let outcome = store.get(&[item(n, a.span(0, LEN))], &Call::unbounded())[0];
    if outcome.is_ok() {
        assert!(a.read(0, LEN) == bytes_of(n, LEN), "page {n}");
    }
    outcome
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Bytes of blocks of all files under a directory. A store at work may remove one between the list and the look.
fn disk_bytes(root: &Path) -> u64 {
    let blocks = |file: std::io::Result<std::fs::DirEntry>| match file.unwrap().metadata() {
        Ok(found) => found.blocks(),
        Err(gone) if gone.kind() == std::io::ErrorKind::NotFound => 0,
        Err(other) => panic!("{other}"),
    };
    std::fs::read_dir(root).unwrap().map(blocks).sum::<u64>() * 512
}

#[test]
fn a_closed_store_opens_from_its_index_files_and_has_everything() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    for round in 0..3u64 {
        let store = FileStore::open(config(&root)).unwrap();
        assert_eq!(store.recovery().pages, round * 50);
        assert_eq!(store.recovery().segments_scanned, 0, "closed cleanly");
        let a = Arena::new(&store, LEN);
        for n in round * 50..(round + 1) * 50 {
            assert_eq!(put(&store, &a, n), Outcome::Ok(LEN));
        }
        for n in 0..(round + 1) * 50 {
            assert_eq!(got(&store, &a, n), Outcome::Ok(LEN), "page {n} in round {round}");
        }
        store.close(soon()).unwrap();
    }
}

/// lmc#4725, lmc#1454: a cap that was a label.
#[test]
fn the_cap_holds_and_the_oldest_go() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let mut c = config(&root);
    c.bytes_max = 512 << 10;
    let mut store = FileStore::open(c.clone()).unwrap();
    let mut a = Arena::new(&store, LEN);
    for n in 0..1000 {
        assert_eq!(put(&store, &a, n), Outcome::Ok(LEN));
        if n % 50 == 0 {
            // An index file may be in the making.
            assert!(disk_bytes(&root) <= c.bytes_max + 8192, "{} after {n}", disk_bytes(&root));
        }
        if n == 500 {
            drop(store);
            store = FileStore::open(c.clone()).unwrap();
            a = Arena::new(&store, LEN);
        }
    }
    let stats = store.stats();
    assert!(stats.bytes <= c.bytes_max);
    assert!(stats.evicted_total > 400);
    assert_eq!(got(&store, &a, 999), Outcome::Ok(LEN), "the newest stays");
    assert_eq!(got(&store, &a, 0), Outcome::Missing, "the oldest went");
    let found = (0..1000).filter(|&n| got(&store, &a, n).is_ok()).count() as u64;
    assert_eq!(found, stats.objects);
    assert_eq!(store.stats().corrupt_total, 0);
}

/// What is read keeps its place, whatever streams through beside it.
#[test]
fn pages_that_are_read_outlive_pages_that_are_not() {
    for io in [IoMode::Buffered, IoMode::Direct] {
        let dir = tempfile::tempdir().unwrap();
        let mut c = config(&dir.path().join("s"));
        (c.bytes_max, c.io) = (512 << 10, io);
        let store = FileStore::open(c.clone()).unwrap();
        let a = Arena::new(&store, LEN);
        (0..3).for_each(|n| assert!(put(&store, &a, n).is_ok()));
        for n in 100..600 {
            assert_eq!(put(&store, &a, n), Outcome::Ok(LEN));
            if n % 4 == 0 {
                assert_eq!(got(&store, &a, 0), Outcome::Ok(LEN), "after {n}");
                assert_eq!(got(&store, &a, 2), Outcome::Ok(LEN), "after {n}");
            }
        }
        assert_eq!(got(&store, &a, 1), Outcome::Missing);
        let stats = store.stats();
        assert!(stats.rescued_total >= 10 && stats.bytes <= c.bytes_max, "{stats:?}");
        // A moved page is moved for good.
        drop(store);
        let store = FileStore::open(c).unwrap();
        let a = Arena::new(&store, LEN);
        assert_eq!(got(&store, &a, 2), Outcome::Ok(LEN));
    }
}

/// So does a page that is used elsewhere, if the store is told.
#[test]
fn pages_that_are_touched_outlive_pages_that_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(&dir.path().join("s"));
    c.bytes_max = 512 << 10;
    let store = FileStore::open(c).unwrap();
    let a = Arena::new(&store, LEN);
    (0..3).for_each(|n| assert!(put(&store, &a, n).is_ok()));
    for n in 100..600 {
        assert_eq!(put(&store, &a, n), Outcome::Ok(LEN));
        if n % 4 == 0 {
            store.touch(&[key(0), key(99), key(2)], &Call::unbounded());
        }
    }
    assert_eq!([0, 1, 2].map(|n| got(&store, &a, n).is_ok()), [true, false, true]);
    assert!(store.stats().rescued_total >= 10);
    store.close(soon()).unwrap();
    store.touch(&[key(0)], &Call::unbounded());
}

/// A store in which everything is read still takes new pages.
#[test]
fn rescuing_leaves_room_for_new_pages() {
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(&dir.path().join("s"));
    c.bytes_max = 512 << 10;
    let store = FileStore::open(c).unwrap();
    let a = Arena::new(&store, LEN);
    for n in 0..300 {
        assert_eq!(put(&store, &a, n), Outcome::Ok(LEN));
        assert_eq!(got(&store, &a, n), Outcome::Ok(LEN));
    }
    let stats = store.stats();
    assert!(stats.rescued_total <= 150, "{} moved for 300 written", stats.rescued_total);
    assert!(stats.evicted_total >= 200);
    assert_eq!(got(&store, &a, 299), Outcome::Ok(LEN));
}

#[test]
fn a_smaller_cap_after_a_restart_is_reached() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let store = FileStore::open(config(&root)).unwrap();
    let a = Arena::new(&store, LEN);
    (0..200).for_each(|n| assert!(put(&store, &a, n).is_ok()));
    drop(store);
    let mut c = config(&root);
    c.bytes_max = 512 << 10;
    let store = FileStore::open(c).unwrap();
    let a = Arena::new(&store, LEN);
    assert!(put(&store, &a, 1000).is_ok());
    assert!(store.stats().bytes <= 512 << 10);
    assert_eq!(got(&store, &a, 1000), Outcome::Ok(LEN));
}

#[test]
fn below_the_free_space_floor_puts_are_refused_and_gets_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(&dir.path().join("s"));
    let store = FileStore::open(c.clone()).unwrap();
    let a = Arena::new(&store, LEN);
    assert!(put(&store, &a, 1).is_ok());
    drop(store);
    c.free_bytes_min = u64::MAX / 2;
    let store = FileStore::open(c).unwrap();
    let a = Arena::new(&store, LEN);
    // What is there makes room first; a cache below its floor gives back, whatever that costs in hits.
    assert_eq!(put(&store, &a, 2), Outcome::NoSpace);
    assert_eq!(store.stats().no_space_total, 1);
    assert!(matches!(got(&store, &a, 1), Outcome::Missing));
}

/// A file system of its own in memory, so small that it can be filled.
struct Small(tempfile::TempDir);

impl Small {
    /// `None`, and a named skip, where mounting is not permitted.
    fn mount(size: &str) -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=0700");
        let small = Small(dir);
        if small.run("mount", &["-t", "tmpfs", "-o", &options, "sapwood-test"]) {
            return Some(small);
        }
        std::mem::forget(small);
        skip("a small tmpfs (mount is not permitted)");
        None
    }

    fn run(&self, program: &str, args: &[&str]) -> bool {
        let done = std::process::Command::new(program).args(args).arg(self.0.path()).output();
        done.is_ok_and(|o| o.status.success())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily, because a failed test may still have files open.
        self.run("umount", &["-l"]);
    }
}

#[test]
fn a_full_file_system_is_an_outcome() {
    let Some(disk) = Small::mount("1m") else { return };
    let c = config(&disk.path().join("s"));
    let store = FileStore::open(c).unwrap();
    let a = Arena::new(&store, LEN);
    // The cap is 4 MiB, the file system holds 1: the store notices and makes room among its own.
    for n in 0..300 {
        assert_eq!(put(&store, &a, n), Outcome::Ok(LEN), "page {n}");
    }
    assert_eq!(got(&store, &a, 299), Outcome::Ok(LEN));
    // Somebody else takes the rest, and the store's own segments do not suffice.
    drop(store);
    let hog = disk.path().join("hog");
    std::fs::remove_dir_all(disk.path().join("s")).unwrap();
    std::fs::write(&hog, vec![1; 960 << 10]).unwrap();
    let store = FileStore::open(config(&disk.path().join("s"))).unwrap();
    let a = Arena::new(&store, LEN);
    assert_eq!(put(&store, &a, 0), Outcome::NoSpace);
    std::fs::remove_file(&hog).unwrap();
    assert_eq!(put(&store, &a, 0), Outcome::Ok(LEN));
    assert_eq!(got(&store, &a, 0), Outcome::Ok(LEN));
}

/// Others fill the disk to the last byte while the store has durable pages on it. What the store gives up for new pages
/// it counts, from the oldest on; it opens, reads, verifies and removes on the full disk; and nothing else is lost.
#[test]
fn a_disk_that_others_fill_costs_only_what_is_counted() {
    let Some(disk) = Small::mount("2m") else { return };
    let root = disk.path().join("s");
    let store = FileStore::open(config(&root)).unwrap();
    let a = Arena::new(&store, LEN);
    (0..100).for_each(|n| assert_eq!(put(&store, &a, n), Outcome::Ok(LEN)));
    store.sync(&Call::unbounded()).unwrap();
    let mut hog = std::fs::File::create(disk.path().join("hog")).unwrap();
    while std::io::Write::write(&mut hog, &[1; 4096]).is_ok_and(|n| n > 0) {}
    // Everything that is there is read, on a disk without a free byte.
    (0..100).for_each(|n| assert_eq!(got(&store, &a, n), Outcome::Ok(LEN)));
    let outcomes: Vec<Outcome> = (100..140).map(|n| put(&store, &a, n)).collect();
    assert!(outcomes.iter().all(|o| matches!(o, Outcome::Ok(LEN) | Outcome::NoSpace)), "{outcomes:?}");
    let stats = store.stats();
    assert_eq!(stats.no_space_total, outcomes.iter().filter(|o| !o.is_ok()).count() as u64);
    // Closing can not write its index file, and says so; opening scans, and can not write it either.
    let _ = store.close(soon());
    drop(store);
    let expected = |n: u64| match n {
        0..100 => n >= stats.evicted_total,
        _ => outcomes[n as usize - 100].is_ok(),
    };
    for round in 0..2 {
        let store = FileStore::open(config(&root)).unwrap();
        let a = Arena::new(&store, LEN);
        for n in 0..140 {
            let want = if expected(n) { Outcome::Ok(LEN) } else { Outcome::Missing };
            // What was read has a second chance, so eviction does not take the oldest in order.
            let found = got(&store, &a, n);
            assert!(found == want || stats.rescued_total > 0, "page {n} in round {round}: {found:?}");
        }
        let found = (0..140).filter(|&n| got(&store, &a, n).is_ok()).count() as u64;
        let put = 100 + outcomes.iter().filter(|o| o.is_ok()).count() as u64;
        assert_eq!(found, put - stats.evicted_total, "round {round}");
        let verified = store.verify(&Call::unbounded(), &mut |_| {}).unwrap();
        assert_eq!((verified.good, verified.corrupt.len()), (found, 0));
    }
    drop(hog);
    std::fs::remove_file(disk.path().join("hog")).unwrap();
    let store = FileStore::open(config(&root)).unwrap();
    let a = Arena::new(&store, LEN);
    assert_eq!(put(&store, &a, 500), Outcome::Ok(LEN));
    assert_eq!(store.health(), Health::Up);
}

/// A root that can be read and not be written: a typed error, and the pages are there when it can be written again.
#[test]
fn an_unwritable_root_is_a_typed_error_and_keeps_its_pages() {
    let is_root = rustix::process::geteuid().is_root();
    let refused = |root: &Path| match FileStore::open(config(root)) {
        Err(OpenError::Io { source, path, .. }) => {
            assert_eq!(path, root);
            source.raw_os_error()
        }
        other => panic!("{other:?}"),
    };
    if is_root {
        // Permissions do not stop the superuser; a read-only file system does.
        let Some(disk) = Small::mount("8m") else { return };
        let root = disk.path().join("s");
        let pages = two_segments(&root);
        assert!(disk.run("mount", &["-o", "remount,ro"]));
        for _ in 0..2 {
            assert_eq!(refused(&root), Some(EROFS));
            assert_eq!(refused(&disk.path().join("new")), Some(EROFS));
        }
        assert!(disk.run("mount", &["-o", "remount,rw"]));
        assert_eq!(present(&root, pages), pages);
    } else {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("s");
        let pages = two_segments(&root);
        for mode in [0o500, 0o000] {
            std::fs::set_permissions(&root, PermissionsExt::from_mode(mode)).unwrap();
            let opened = FileStore::open(config(&root));
            // With mode 0500 the lock is there already: it opens for reading, and the first segment can not be made.
            match opened {
                Err(OpenError::Io { .. }) => {}
                Ok(store) => {
                    let a = Arena::new(&store, LEN);
                    assert!(matches!(put(&store, &a, 9999), Outcome::Transport(_)));
                    assert_eq!(got(&store, &a, 0), Outcome::Ok(LEN));
                }
                other => panic!("{other:?}"),
            }
        }
        std::fs::set_permissions(&root, PermissionsExt::from_mode(0o700)).unwrap();
        assert_eq!(present(&root, pages), pages);
    }
}

/// "Read-only file system", as Linux numbers it.
const EROFS: i32 = 30;

#[test]
fn the_second_opener_is_refused_until_the_first_has_closed() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let store = FileStore::open(config(&root)).unwrap();
    assert!(matches!(FileStore::open(config(&root)), Err(OpenError::InUse { .. })));
    store.close(soon()).unwrap();
    let second = FileStore::open(config(&root)).unwrap();
    assert_eq!((store.health(), second.health()), (Health::Closed, Health::Up));
}

/// A child process begins as a copy of this one and holds what it holds until it runs its own program.
#[test]
fn a_closed_store_opens_again_while_others_fork() {
    let dir = tempfile::tempdir().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    // A command with a hook between fork and exec forks for real, and stays there for a moment.
                    let _ = std::process::Command::new("true")
                        .arg0("sapwood-test")
                        .uid(rustix::process::geteuid().as_raw())
                        .status();
                }
            });
        }
        for round in 0..60 {
            let opened = FileStore::open(config(&dir.path().join("s")));
            if let Err(error) = &opened {
                over.store(true, Ordering::Relaxed);
                panic!("round {round}: {error}");
            }
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn bad_roots_are_typed_errors() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    std::fs::write(&root, b"a file").unwrap();
    assert!(matches!(FileStore::open(config(&root)), Err(OpenError::Io { op: "open", .. })));
    assert!(matches!(
        FileStore::open(config(&dir.path().join("no/where"))),
        Err(OpenError::Io { op: "create", .. })
    ));
    std::fs::remove_file(&root).unwrap();
    drop(FileStore::open(config(&root)).unwrap());
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&root, &link).unwrap();
    assert!(matches!(FileStore::open(config(&link)), Err(OpenError::Io { op: "open", .. })));
    std::fs::set_permissions(&root, PermissionsExt::from_mode(0o777)).unwrap();
    assert!(matches!(FileStore::open(config(&root)), Err(OpenError::OthersMayWrite { mode: 0o777, .. })));
    std::fs::set_permissions(&root, PermissionsExt::from_mode(0o700)).unwrap();
    assert!(FileStore::open(config(&root)).is_ok());
}

#[test]
fn a_root_of_another_user_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    drop(FileStore::open(config(&root)).unwrap());
    if std::os::unix::fs::chown(&root, Some(12_345), None).is_err() {
        return skip("giving a directory to another user (not permitted)");
    }
    assert!(matches!(FileStore::open(config(&root)), Err(OpenError::ForeignOwner { owner: 12_345, .. })));
}

#[test]
fn contradictory_configurations_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |change: fn(&mut FileConfig)| {
        let mut c = config(&dir.path().join("s"));
        change(&mut c);
        match FileStore::open(c) {
            Err(OpenError::Config { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(|c| c.align = 100), "align");
    assert_eq!(refused(|c| c.align = 0), "align");
    assert_eq!(refused(|c| (c.io, c.align) = (IoMode::Direct, 512)), "align");
    assert_eq!(refused(|c| c.segment_bytes = 1000), "segment_bytes");
    assert_eq!(refused(|c| c.segment_bytes += 1), "segment_bytes");
    assert_eq!(refused(|c| c.bytes_max = c.segment_bytes), "bytes_max");
}

#[test]
fn files_are_private() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let store = FileStore::open(config(&root)).unwrap();
    let a = Arena::new(&store, LEN);
    (0..40).for_each(|n| assert!(put(&store, &a, n).is_ok()));
    store.close(soon()).unwrap();
    assert_eq!(std::fs::metadata(&root).unwrap().mode() & 0o777, 0o700);
    let mut files = 0;
    for entry in std::fs::read_dir(&root).unwrap() {
        assert_eq!(entry.unwrap().metadata().unwrap().mode() & 0o777, 0o600);
        files += 1;
    }
    assert!(files > 5);
}

/// Two segments of pages in `root`, closed.
fn two_segments(root: &Path) -> u64 {
    let store = FileStore::open(config(root)).unwrap();
    let a = Arena::new(&store, LEN);
    let mut n = 0;
    while std::fs::metadata(root.join("seg-00000003.log")).is_err() {
        assert!(put(&store, &a, n).is_ok());
        n += 1;
    }
    store.close(soon()).unwrap();
    n
}

fn present(root: &Path, pages: u64) -> u64 {
    let store = FileStore::open(config(root)).unwrap();
    let a = Arena::new(&store, LEN);
    (0..pages).filter(|&n| got(&store, &a, n).is_ok()).count() as u64
}

#[test]
fn garbage_is_put_aside_and_strangers_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let pages = two_segments(&root);
    let strangers = ["notes.txt", "seg-xyz.log", "seg-00000009.tmp", "bad-old"];
    for name in strangers {
        std::fs::write(root.join(name), b"mine").unwrap();
    }
    std::fs::write(root.join("seg-00000007.log"), bytes_of(7, 70_000)).unwrap();
    std::fs::write(root.join("seg-00000008.log"), b"").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", root.join("seg-00000006.log")).unwrap();
    std::fs::create_dir(root.join("seg-0000000a.log")).unwrap();
    std::fs::write(root.join("seg-00000055.idx"), b"an index of nothing").unwrap();
    std::fs::write(root.join("tmp-00000001.idx"), b"half").unwrap();
    let store = FileStore::open(config(&root)).unwrap();
    assert_eq!(store.recovery().files_put_aside, 3);
    assert_eq!(store.recovery().pages, pages);
    drop(store);
    for name in strangers {
        assert_eq!(std::fs::read(root.join(name)).unwrap(), b"mine", "{name}");
    }
    assert!(root.join("bad-seg-00000007.log").exists());
    assert!(!root.join("seg-00000055.idx").exists());
    assert!(!root.join("tmp-00000001.idx").exists());
    assert!(!root.join("seg-00000008.log").exists(), "empty: its making was interrupted");
    assert_eq!(present(&root, pages), pages);
    assert_eq!(FileStore::open(config(&root)).unwrap().gc().unwrap(), 2);
    assert!(!root.join("bad-seg-00000007.log").exists());
    assert!(root.join("bad-old").exists());
    assert_eq!(present(&root, pages), pages);
}

#[test]
fn a_truncated_segment_loses_its_end_only() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let pages = two_segments(&root);
    let name = root.join("seg-00000001.log");
    let file = std::fs::OpenOptions::new().write(true).open(&name).unwrap();
    file.set_len(60_000).unwrap();
    let kept = present(&root, pages);
    assert!(kept < pages && kept > pages / 2, "{kept} of {pages}");
    // Without the index file it is scanned, with the same result.
    std::fs::remove_file(root.join("seg-00000001.idx")).unwrap();
    assert_eq!(present(&root, pages), kept);
}

#[test]
fn a_future_version_is_refused_and_nothing_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let pages = two_segments(&root);
    let name = root.join("seg-00000001.log");
    let good = std::fs::read(&name).unwrap();
    let mut future = good.clone();
    future[8] = 9;
    future[60..64].fill(0);
    let crc = crc32c(&future[..64]);
    future[60..64].copy_from_slice(&crc.to_le_bytes());
    std::fs::write(&name, &future).unwrap();
    std::fs::write(root.join("tmp-00000001.idx"), b"half").unwrap();
    assert!(matches!(FileStore::open(config(&root)), Err(OpenError::Version { found: 9, .. })));
    assert!(root.join("tmp-00000001.idx").exists());
    std::fs::write(&name, good).unwrap();
    assert_eq!(present(&root, pages), pages);
}

/// Bit by bit, so that the test does not share the library's table.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &b| {
        (0..8).fold(crc ^ u32::from(b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0x82F6_3B78 } else { c >> 1 })
    })
}

#[test]
fn files_deleted_behind_its_back_cost_hits_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let pages = two_segments(&root);
    let store = FileStore::open(config(&root)).unwrap();
    let a = Arena::new(&store, LEN);
    for entry in std::fs::read_dir(&root).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    for n in 0..pages {
        assert!(got(&store, &a, n).is_ok(), "open handles still read");
    }
    (pages..pages + 700).for_each(|n| assert!(put(&store, &a, n).is_ok(), "page {n}"));
    assert!(got(&store, &a, pages + 699).is_ok());
    store.close(soon()).unwrap();
    assert!(present(&root, pages + 700) > 100);
}

#[test]
fn removals_and_clearings_hold_after_a_restart_and_give_blocks_back() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let pages = two_segments(&root);
    let before = disk_bytes(&root);
    let store = FileStore::open(config(&root)).unwrap();
    assert_eq!(store.remove(&[key(0), key(3)], &Call::unbounded()), [Outcome::Ok(LEN); 2]);
    assert!(disk_bytes(&root) <= before + (128 << 10) - 2 * LEN as u64, "a new segment, less two pages");
    drop(store);
    assert_eq!(present(&root, pages), pages - 2);
    let store = FileStore::open(config(&root)).unwrap();
    assert_eq!(store.clear(namespace_of(0), &Call::unbounded()).unwrap(), pages - 2);
    store.close(soon()).unwrap();
    assert_eq!(present(&root, pages), 0);
    assert!(disk_bytes(&root) < 64 << 10, "{}", disk_bytes(&root));
}

/// Stops in the first sync of a file until it is let go.
#[derive(Debug, Default)]
struct Stopper {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Stopper {
    fn wait_until(&self, ready: fn(&(bool, bool)) -> bool) {
        let mut s = self.state.lock().unwrap();
        while !ready(&s) {
            s = self.changed.wait(s).unwrap();
        }
    }

    fn let_go(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

impl Witness for Stopper {
    fn saw(&self, event: DiskEvent<'_>) {
        if matches!(event, DiskEvent::SyncFile { .. }) {
            self.state.lock().unwrap().0 = true;
            self.changed.notify_all();
            self.wait_until(|s| s.1);
        }
    }
}

/// Two callers sync at once: the second finds nothing left to do, but what the first took over is not on the
/// disk yet.
#[test]
fn a_sync_does_not_overtake_another() {
    let dir = tempfile::tempdir().unwrap();
    let stopper = Arc::new(Stopper::default());
    let mut c = config(&dir.path().join("s"));
    c.witness = Some(Arc::clone(&stopper) as Arc<dyn Witness>);
    let store = FileStore::open(c).unwrap();
    let a = Arena::new(&store, LEN);
    assert!(put(&store, &a, 1).is_ok());
    let second = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| store.sync(&Call::unbounded()).unwrap());
        stopper.wait_until(|s| s.0);
        s.spawn(|| {
            store.sync(&Call::unbounded()).unwrap();
            second.store(true, Ordering::SeqCst);
        });
        // Time enough to overtake, if it could; a slow machine only makes the test easier to pass.
        std::thread::sleep(Duration::from_millis(50));
        let overtook = second.load(Ordering::SeqCst);
        stopper.let_go();
        assert!(!overtook);
    });
    assert!(second.load(Ordering::SeqCst));
}

#[test]
fn verify_finds_and_puts_aside_what_rotted() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    let pages = two_segments(&root);
    let name = root.join("seg-00000001.log");
    let mut bytes = std::fs::read(&name).unwrap();
    bytes[4096 + 4096 + 17] ^= 4; // in the payload of the first page
    std::fs::write(&name, bytes).unwrap();
    let store = FileStore::open(config(&root)).unwrap();
    let mut last = None;
    let report = store.verify(&Call::unbounded(), &mut |p| last = Some(p)).unwrap();
    assert_eq!((report.good, report.corrupt.as_slice()), (pages - 1, from_ref(&key(0))));
    assert_eq!(last.map(|p| (p.pages_done, p.pages_total)), Some((pages, pages)));
    assert_eq!(store.query(&[key(0)], &Call::unbounded()), [Outcome::Missing]);
    let again = store.verify(&Call::unbounded(), &mut |_| {}).unwrap();
    assert_eq!((again.good, again.corrupt.len()), (pages - 1, 0));
    let late = Call { deadline: Some(Instant::now()), ..Call::default() };
    assert!(matches!(store.verify(&late, &mut |_| {}), Err(StoreError::Timeout)));
    let usage = store.usage();
    assert_eq!((usage.pages, usage.payload_bytes), (pages - 1, (pages - 1) * LEN as u64));
    assert_eq!(usage.spaces.len(), 1);
    drop(store);
    assert_eq!(present(&root, pages), pages - 1, "put aside for good");
}

#[test]
fn a_corrupt_page_is_counted_put_aside_and_can_be_put_again() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("s");
    two_segments(&root);
    let name = root.join("seg-00000001.log");
    let mut bytes = std::fs::read(&name).unwrap();
    bytes[4096 + 40] ^= 1; // in the key of the first page's header
    std::fs::write(&name, bytes).unwrap();
    let store = FileStore::open(config(&root)).unwrap();
    let a = Arena::new(&store, LEN);
    assert_eq!(got(&store, &a, 0), Outcome::Corrupt);
    assert_eq!(store.stats().corrupt_total, 1);
    assert_eq!(got(&store, &a, 0), Outcome::Missing);
    assert_eq!(put(&store, &a, 0), Outcome::Ok(LEN));
    assert_eq!(got(&store, &a, 0), Outcome::Ok(LEN));
}

#[test]
fn an_object_larger_than_a_segment_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(config(&dir.path().join("s"))).unwrap();
    let a = Arena::new(&store, 1 << 20);
    let max = store.caps().object_bytes_max;
    for (n, len, want) in [(1, max, Outcome::Ok(max)), (2, max + 1, Outcome::NoSpace)] {
        a.write(0, &bytes_of(n, len));
        assert_eq!(store.put(&[item(n, a.span(0, len))], &Call::unbounded()), [want]);
    }
    assert_eq!(store.get(&[item(1, a.span(0, max))], &Call::unbounded()), [Outcome::Ok(max)]);
    assert!(a.read(0, max) == bytes_of(1, max));
}

/// A page is removed, and its blocks given back, while others read it: they may miss it, but nobody calls it
/// corrupt and nobody sees half of it.
#[test]
fn a_removal_under_readers_is_a_miss_never_corruption() {
    const BIG: usize = 512 << 10;
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(&dir.path().join("s"));
    (c.bytes_max, c.segment_bytes) = (64 << 20, 8 << 20);
    let store = FileStore::open(c).unwrap();
    let whole = bytes_of(1, BIG);
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                let a = Arena::new(&store, BIG);
                while !over.load(Ordering::Relaxed) {
                    let outcome = store.get(&[item(1, a.span(0, BIG))], &Call::unbounded())[0];
                    assert!(matches!(outcome, Outcome::Ok(_) | Outcome::Missing), "{outcome:?}");
                    assert!(!outcome.is_ok() || a.read(0, BIG) == whole);
                }
            });
        }
        let a = Arena::new(&store, BIG);
        a.write(0, &whole);
        for _ in 0..150 {
            assert!(store.put(&[item(1, a.span(0, BIG))], &Call::unbounded())[0].is_ok());
            std::thread::yield_now();
            assert!(store.remove(&[key(1)], &Call::unbounded())[0].is_ok());
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(store.stats().corrupt_total, 0);
}

/// Readers, writers, removals and evictions at once: whatever is found is right, and nothing is called
/// corrupt that was merely removed or evicted under a reader.
#[test]
fn eviction_under_readers_is_a_miss_never_corruption() {
    for io in [IoMode::Buffered, IoMode::Direct] {
        let dir = tempfile::tempdir().unwrap();
        let mut c = config(&dir.path().join("s"));
        (c.bytes_max, c.io) = (384 << 10, io);
        let store = FileStore::open(c).unwrap();
        let arenas: Vec<_> = (0..4).map(|_| Arena::new(&store, LEN)).collect();
        std::thread::scope(|s| {
            for (t, a) in arenas.iter().enumerate() {
                let store = &store;
                s.spawn(move || {
                    let mut rng = crate::kit::Rng::seeded(31 + t as u64);
                    for step in 0..300u64 {
                        let n = (step / 3 + rng.below(20) as u64) % 90;
                        let outcome = match rng.below(9) {
                            0..4 => put(store, a, n),
                            4..8 => got(store, a, n),
                            _ => store.remove(&[key(n)], &Call::unbounded())[0],
                        };
                        assert!(
                            matches!(outcome, Outcome::Ok(_) | Outcome::Missing | Outcome::NoSpace),
                            "{outcome:?}"
                        );
                    }
                });
            }
        });
        assert_eq!(store.stats().corrupt_total, 0);
    }
}
