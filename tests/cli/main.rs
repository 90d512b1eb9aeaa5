//! Drives the built `sapwood` binary as a user does.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod bad_input;
mod crash;
mod doctor;
#[cfg(any(feature = "redis", feature = "object", feature = "mooncake"))]
mod kit;
mod pd_demo;
#[cfg(any(feature = "redis", feature = "object", feature = "mooncake"))]
mod remote;
mod replay;
mod store;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The committed trace: 170 requests of 48 chats with shared system prompts.
fn chats() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chats.jsonl")
}

fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sapwood"));
    command.arg("replay").args(line.split_whitespace());
    // What the servers of the tests let in.
    command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs and returns the report, which must say that all is well.
fn replay(line: &str) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("report.json");
    let output: Output = command(line).arg("--json").arg(&json).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{line}: {}\n{out}\n{err}", output.status);
    let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    check(line, &report);
    report
}

/// What holds for every run, whatever its options.
fn check(line: &str, report: &Value) {
    assert_eq!(number(report, "/mismatches"), 0, "{line}");
    assert_eq!(report["violations"], Value::Array(vec![]), "{line}");
    for tier in ["device", "host"] {
        let part = |name: &str| number(report, &format!("/pages/{tier}/{name}"));
        assert_eq!(part("capacity"), part("free") + part("cached"), "{line}: {tier}");
        assert_eq!(part("leaked"), 0, "{line}: {tier}");
    }
    let ended = number(report, "/finished") + number(report, "/aborted") + number(report, "/rejected");
    assert_eq!(ended, number(report, "/requests"), "{line}");
    if number(report, "/aborted") + number(report, "/rejected") + number(report, "/retracted") == 0 {
        assert_eq!(
            hits(report) + number(report, "/computed_tokens"),
            number(report, "/input_tokens"),
            "{line}"
        );
    }
}

fn number(report: &Value, path: &str) -> u64 {
    report.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path} is not in the report"))
}

fn hits(report: &Value) -> u64 {
    ["device", "host", "store"].iter().map(|tier| number(report, &format!("/hit_tokens/{tier}"))).sum()
}
