//! Bad input: a clear message, exit code 2, no panic.

use std::path::Path;

use crate::{chats, command, text};

/// Runs and returns what it complains about.
fn refused(line: &str) -> String {
    let output = command(line).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}: {}\n{err}", output.status);
    assert!(!err.contains("panicked"), "{line}: {err}");
    assert!(output.stdout.is_empty(), "{line}: a report of a run that must not be");
    err
}

fn assert_refused(line: &str, because: &str) {
    let message = refused(line);
    assert!(message.contains(because), "{line}: `{because}` is not in\n{message}");
}

#[test]
fn options() {
    assert_refused("--bogus", "--bogus");
    assert_refused("--page-size 0", "must be between 1 and 512");
    assert_refused("--page-size -3", "must be between 1 and 512");
    assert_refused("--page-size 1000", "must be between 1 and 512");
    assert_refused("--device-pages 0", "must be between 1 and");
    assert_refused("--device-pages some", "not a number: some");
    assert_refused("--host-pages -1", "must be between 0 and");
    assert_refused("--layers 0", "must be between 1 and");
    assert_refused("--bytes-per-token-layer 0", "must be between 1 and");
    assert_refused("--requests 0", "must be between 1 and");
    assert_refused("--speedup 0", "finite number above 0");
    assert_refused("--abort-rate 2", "between 0 and 1");
    assert_refused("--write-policy sometimes", "write-through-selective");
    assert_refused("--prefetch perhaps", "best-effort");
    assert_refused("--host-pages 0 --store mem", "--store needs --host-pages");
    assert_refused("--host-pages 0 --write-policy write-back", "needs --host-pages");
    assert_refused("--layers 1024 --bytes-per-token-layer 1048576 --page-size 512", "bytes");
    assert_refused("stray", "stray");
}

#[test]
fn files() {
    assert_refused("--trace /no/such/trace.jsonl", "/no/such/trace.jsonl");
    assert_refused("--trace /", "cannot read trace /");
    assert_refused("--requests 5 --json /no/such/dir/report.json", "cannot write /no/such/dir/report.json");
    assert_refused("--requests 5 --chart /no/such/dir/chart.svg", "cannot write /no/such/dir/chart.svg");
}

#[test]
fn store_directories() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "not a directory").unwrap();
    assert_refused(&format!("--requests 5 --store {}", file.display()), &file.display().to_string());
    assert_refused(&format!("--requests 5 --store {}/below", file.display()), "below");
    assert_refused("--requests 5 --store /proc/no/such", "/proc/no/such");
    unreadable(dir.path());
}

/// A directory without permissions. Root reads it all the same, so for root there is nothing to refuse.
fn unreadable(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let closed = dir.join("closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::read_dir(&closed).is_err() {
        assert_refused(&format!("--requests 5 --store {}", closed.display()), "closed");
    } else {
        eprintln!("running as root: a directory without permissions is readable");
    }
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn a_trace_line_is_named_with_file_line_and_reason() {
    let dir = tempfile::tempdir().unwrap();
    let good = std::fs::read_to_string(chats()).unwrap();
    let write = |name: &str, bad: &str| {
        let path = dir.path().join(name);
        let mut lines: Vec<&str> = good.lines().take(12).collect();
        lines.insert(7, bad);
        std::fs::write(&path, lines.join("\n")).unwrap();
        path.display().to_string()
    };
    let negative = write(
        "negative",
        r#"{"timestamp": 1, "input_length": -600, "output_length": 1, "hash_ids": [1, 2]}"#,
    );
    assert_refused(&format!("--trace {negative}"), &format!("{negative}:8: input_length is -600"));
    let torn = write("torn", r#"{"timestamp": 1, "input_len"#);
    assert_refused(&format!("--trace {torn}"), &format!("{torn}:8: "));

    let output = command(&format!("--trace {torn} --lenient")).output().unwrap();
    assert!(output.status.success());
    assert!(text(&output.stderr).contains("1 malformed lines skipped"));
    assert!(text(&output.stdout).contains("requests       12 "));

    let empty = dir.path().join("empty");
    std::fs::write(&empty, "\n\n").unwrap();
    assert_refused(&format!("--trace {}", empty.display()), "holds no request");
}

/// An op log is checked step by step; a line that is none is named.
#[test]
fn an_op_log_is_checked_or_refused() {
    let run = |text: &str| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let log = dir.path().join("log");
        std::fs::write(&log, text).expect("a file");
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_sapwood"))
            .arg("check")
            .arg(&log)
            .output()
            .expect("the tool starts");
        let said =
            format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        (out.status.code(), said)
    };
    let header = "sapwood-oplog-3 4 8 0 none wait-complete 4 2 2 100 0 8 0 0 5 64 - - -\n";
    let (code, said) = run(&format!("{header}request 0\nalloc 0.0 2\nfinish 0.0 0 1 2 3 4 5 6 7 8\n"));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.starts_with("3 ops, no rule broken, digest "), "{said}");
    let (code, said) = run(&format!("{header}request 0\nalloc 0.0\n"));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("line 3: a word is missing"), "{said}");
}
