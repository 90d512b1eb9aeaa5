//! `sapwood store` over directories that `sapwood replay` filled.

use std::path::Path;
use std::process::Command;

use sapwood::backend::store::file::{FileConfig, FileStore};
use serde_json::Value;

use crate::{number, replay, text};

/// Exit code, standard output, standard error.
fn store(args: &[&str], dir: &Path) -> (i32, String, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_sapwood")).arg("store").args(args).arg(dir).output().unwrap();
    let err = text(&output.stderr);
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    (output.status.code().unwrap(), text(&output.stdout), err)
}

fn stat(dir: &Path) -> Value {
    let (code, out, err) = store(&["stat", "--json"], dir);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).unwrap()
}

/// A directory with the pages of a short run.
fn filled() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("kv");
    replay(&format!("--requests 40 --device-pages 300 --host-pages 400 --store {}", root.display()));
    (dir, root)
}

#[test]
fn stat_counts_what_is_there() {
    let (_dir, root) = filled();
    let stat = stat(&root);
    let spaces = stat["spaces"].as_array().unwrap();
    assert!(spaces.len() > 1, "the workload has several namespaces");
    let sum: u64 = spaces.iter().map(|s| s["pages"].as_u64().unwrap()).sum();
    assert!(sum > 0 && sum == number(&stat, "/pages"), "{stat}");
    assert!(number(&stat, "/disk_bytes") >= number(&stat, "/payload_bytes"));
    let (code, out, _) = store(&["stat"], &root);
    assert_eq!(code, 0);
    assert!(out.starts_with(&format!("pages          {sum} with ")), "{out}");
    assert!(out.contains(&format!("namespace {}", &spaces[0]["namespace"].as_str().unwrap()[..16])), "{out}");
}

#[test]
fn verify_takes_out_what_is_damaged_and_says_so_once() {
    let (_dir, root) = filled();
    let pages = number(&stat(&root), "/pages");
    let (code, out, err) = store(&["verify"], &root);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with(&format!("good           {pages} pages with ")), "{out}");
    let name = root.join("seg-00000001.log");
    let mut bytes = std::fs::read(&name).unwrap();
    bytes[4096 + 4096 + 9] ^= 1; // in the payload of the first page
    std::fs::write(&name, bytes).unwrap();
    let (code, out, _) = store(&["verify"], &root);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("damaged        1 pages, taken out"), "{out}");
    assert_eq!(out.lines().filter(|l| l.starts_with("damaged ") && l.len() == 72).count(), 1, "{out}");
    let (code, out, _) = store(&["verify"], &root);
    assert_eq!(code, 0, "{out}");
    assert!(out.starts_with(&format!("good           {} pages", pages - 1)), "{out}");
}

#[test]
fn clear_removes_one_namespace_and_gc_what_is_left_of_it() {
    let (_dir, root) = filled();
    let before = stat(&root);
    let namespace = before["spaces"][0]["namespace"].as_str().unwrap().to_owned();
    let of = |stat: &Value, this: bool| -> u64 {
        let spaces = stat["spaces"].as_array().unwrap().iter();
        spaces.filter(|s| (s["namespace"] == *namespace) == this).map(|s| s["pages"].as_u64().unwrap()).sum()
    };
    let (mine, others) = (of(&before, true), of(&before, false));
    assert!(mine > 0 && others > 0);
    let digits = if namespace.starts_with("00000000") { "default" } else { &namespace[..12] };
    let (code, out, err) = store(&["clear", "--namespace", digits], &root);
    assert_eq!(code, 0, "{err}");
    assert!(out.starts_with(&format!("removed        {mine} pages")), "{out}");
    let after = stat(&root);
    assert_eq!((of(&after, true), of(&after, false)), (0, others));
    // Nothing is left to remove, and all 64 digits name it all the same.
    let (code, out, _) = store(&["clear", "--namespace", &namespace], &root);
    assert_eq!((code, out.starts_with("removed        0 pages")), (0, true), "{out}");
    std::fs::write(
        root.join("seg-000000aa.log"),
        b"garbage of sixty-four bytes and more, so that it is no blank head",
    )
    .unwrap();
    assert_eq!(number(&stat(&root), "/files_put_aside"), 1);
    let (code, out, err) = store(&["gc"], &root);
    assert_eq!(code, 0, "{err}");
    assert!(out.starts_with("deleted        "), "{out}");
    assert!(!root.join("bad-seg-000000aa.log").exists());
    assert_eq!(of(&stat(&root), false), others);
    assert_eq!(store(&["verify"], &root).0, 0);
}

#[test]
fn bad_input_is_told_and_touches_nothing() {
    let (_dir, root) = filled();
    let refused = |args: &[&str], dir: &Path, because: &str| {
        let (code, out, err) = store(args, dir);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.contains(because), "{args:?}: `{because}` is not in {err}");
    };
    let empty = tempfile::tempdir().unwrap();
    for args in [&["stat"][..], &["verify"], &["gc"], &["clear", "--namespace", "default"]] {
        refused(args, empty.path(), "is not the directory of a store");
        refused(args, &empty.path().join("nowhere"), "is not the directory of a store");
    }
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0, "something was made");
    for namespace in ["", "0", "ABCDEF12", "../../x", &"0".repeat(65)] {
        refused(&["clear", "--namespace", namespace], &root, "is no namespace");
    }
    refused(&["clear", "--namespace", "0123456789abcdef"], &root, "no namespace in the store begins with");
    refused(&["clear"], &root, "--namespace");
    refused(&["mend"], &root, "mend");
    let open = FileStore::open(FileConfig::new(&root, 1 << 30)).unwrap();
    refused(&["stat"], &root, "in use by another store");
    drop(open);
    let future = root.join("seg-00000001.log");
    let good = std::fs::read(&future).unwrap();
    std::fs::write(&future, future_version(good.clone())).unwrap();
    refused(&["verify"], &root, "has format version 9");
    std::fs::write(&future, good).unwrap();
    assert_eq!(store(&["verify"], &root).0, 0);
}

/// The head of a segment with the version that a later release may write.
fn future_version(mut segment: Vec<u8>) -> Vec<u8> {
    segment[8] = 9;
    segment[60..64].fill(0);
    let crc = !segment[..64].iter().fold(!0u32, |crc, &b| {
        (0..8).fold(crc ^ u32::from(b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0x82F6_3B78 } else { c >> 1 })
    });
    segment[60..64].copy_from_slice(&crc.to_le_bytes());
    segment
}
