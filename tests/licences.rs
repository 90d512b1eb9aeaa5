//! What the crate brings along: licences that can be combined with its own, and nothing linked in two versions.
//!
//! Reads `cargo tree`, so it covers what is locked, for every target and feature, without the network.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Licences that ask for no more than a notice.
const ALLOWED: &[&str] =
    &["Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "Unicode-3.0", "Unlicense", "Zlib"];

/// Lines of `cargo tree`, each once.
fn tree(edges: &str) -> BTreeSet<String> {
    let out = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--offline", "--locked", "--all-features", "--target", "all", "--prefix", "none"])
        .args(["--no-dedupe", "--edges", edges, "--format", "{p}\t{l}"])
        .output()
        .expect("cargo runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).lines().filter(|l| !l.is_empty()).map(str::to_owned).collect()
}

/// Whether an SPDX expression can be met with allowed licences alone.
fn is_met(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    any(&words, &mut at) && at == words.len()
}

fn any(words: &[&str], at: &mut usize) -> bool {
    let mut met = all(words, at);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        met |= all(words, at);
    }
    met
}

fn all(words: &[&str], at: &mut usize) -> bool {
    let mut met = one(words, at);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        met &= one(words, at);
    }
    met
}

fn one(words: &[&str], at: &mut usize) -> bool {
    let Some(&word) = words.get(*at) else { return false };
    *at += 1;
    if word == "(" {
        let met = any(words, at);
        *at += 1;
        return met && words.get(*at - 1) == Some(&")");
    }
    if words.get(*at) == Some(&"WITH") {
        // An exception only permits more.
        *at += 2;
    }
    ALLOWED.contains(&word)
}

#[test]
fn expressions_are_read_as_written() {
    for yes in ["MIT", "GPL-3.0 OR MIT", "Unlicense/MIT", "(GPL-2.0 OR MIT) AND Unicode-3.0"] {
        assert!(is_met(yes), "{yes}");
    }
    assert!(is_met("Apache-2.0 WITH LLVM-exception OR GPL-3.0"));
    for no in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Zlib) AND GPL-3.0", "MIT MIT", "(MIT"] {
        assert!(!is_met(no), "{no}");
    }
}

#[test]
fn every_licence_can_be_combined() {
    let lines = tree("normal,build,dev");
    assert!(lines.len() > 20, "{lines:?}");
    for line in lines {
        let (package, licence) = line.split_once('\t').expect("two columns");
        assert!(is_met(licence), "{package} is under {licence:?}");
    }
}

#[test]
fn nothing_is_linked_in_two_versions() {
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in tree("normal,no-proc-macro") {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            versions.entry(name.to_owned()).or_default().insert(version.to_owned());
        }
    }
    assert!(versions.len() > 10, "{versions:?}");
    versions.retain(|_, v| v.len() > 1);
    assert!(versions.is_empty(), "in several versions: {versions:?}");
}
