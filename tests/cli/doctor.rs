//! `sapwood doctor` on whatever machine this is.

use std::process::Command;

use crate::text;

#[test]
fn it_reports_in_words_and_ends_well_without_a_device() {
    let output = Command::new(env!("CARGO_BIN_EXE_sapwood")).arg("doctor").output().unwrap();
    let out = text(&output.stdout);
    assert!(output.status.success(), "{out}{}", text(&output.stderr));
    for what in ["CUDA", "host copies:", "locked memory:", "memory:"] {
        assert!(out.contains(what), "{what} is missing from\n{out}");
    }
    let strict = Command::new(env!("CARGO_BIN_EXE_sapwood")).args(["doctor", "--strict"]).output().unwrap();
    assert_eq!(strict.status.code(), Some(i32::from(text(&strict.stdout).contains("missing  "))));
}
