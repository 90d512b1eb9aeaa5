//! Kill -9 in the middle of a run that writes to a store; run again over what is left.

use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use crate::{command, number, replay};

fn bytes_below(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    let sizes = entries.flatten().map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => bytes_below(&entry.path()),
        _ => entry.metadata().map_or(0, |m| m.len()),
    });
    sizes.sum()
}

#[test]
fn a_killed_run_leaves_a_store_that_serves_right_bytes() {
    let store = tempfile::tempdir().unwrap();
    let line = |requests: u32| {
        format!(
            "--requests {requests} --device-pages 500 --host-pages 700 --prefetch wait-complete --store {}",
            store.path().display()
        )
    };
    // Far more requests than can finish before the kill; each round is killed with more in the store.
    for round in 1..=3 {
        let mut child = command(&line(20_000)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while bytes_below(store.path()) < round * (1 << 20) {
            assert!(child.try_wait().unwrap().is_none(), "the run ended before it was killed");
            sleep(Duration::from_millis(5));
        }
        child.kill().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()), Some(9));
    }
    // The first requests are those of the killed runs, so the store must know them.
    let report = replay(&line(150));
    assert!(number(&report, "/hit_tokens/store") > 0);
}

/// Flips a bit in every 4 KiB of every file, where the pages are.
fn damage(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            damage(&entry.path());
        } else {
            let mut bytes = std::fs::read(entry.path()).unwrap();
            bytes.chunks_mut(4096).skip(1).filter(|c| c.len() > 2048).for_each(|chunk| chunk[2048] ^= 1);
            std::fs::write(entry.path(), bytes).unwrap();
        }
    }
}

#[test]
fn a_damaged_store_serves_nothing_rather_than_wrong_bytes() {
    let store = tempfile::tempdir().unwrap();
    let line = format!(
        "--requests 150 --device-pages 500 --host-pages 700 --prefetch wait-complete --store {}",
        store.path().display()
    );
    replay(&line);
    damage(store.path());
    let report = replay(&line);
    assert!(number(&report, "/counters/store_corrupt_pages") > 0, "no damaged page was met");
}
