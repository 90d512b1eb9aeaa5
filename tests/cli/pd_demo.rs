//! `sapwood pd-demo`: processes of their own, real bytes, a kill in the middle.

use std::process::Command;

use super::text;

fn demo(line: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sapwood"));
    let out = command.arg("pd-demo").args(line.split_whitespace()).output().unwrap();
    (out.status.success(), text(&out.stdout) + &text(&out.stderr))
}

/// What stands in the table behind a name.
fn figure(table: &str, name: &str) -> u64 {
    let line = table.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{table}"));
    line[name.len()..].split_whitespace().next().unwrap().parse().unwrap()
}

fn every_room_ends_and_nothing_is_lost(transport: &str) {
    let (good, table) =
        demo(&format!("--rooms 60 --abort-rate 10 --kill --layers 2 --pages 640 --transport {transport}"));
    assert!(good, "{table}");
    assert_eq!((figure(&table, "rooms"), figure(&table, "mismatches")), (60, 0));
    assert_eq!(figure(&table, "leaked pages"), 0);
    assert!(figure(&table, "arrived") > 30 && figure(&table, "prefix pages") > 0, "{table}");
    if transport.contains("staging") {
        assert!(figure(&table, "blocks") > 0, "{table}");
    }
}

#[test]
fn over_tcp() {
    every_room_ends_and_nothing_is_lost("tcp");
}

#[test]
fn over_shared_memory() {
    every_room_ends_and_nothing_is_lost("shm");
}

/// Prefill ranks with half of the heads each, decode ranks with all: slices go as blocks through a ring.
#[test]
fn slices_of_heads_over_tcp_and_shared_memory() {
    for transport in ["tcp --staging", "shm --staging"] {
        every_room_ends_and_nothing_is_lost(transport);
    }
}

/// With the library all the same; without it, or without the feature, words and a failure.
#[test]
fn over_nixl_or_not_at_all() {
    if cfg!(feature = "nixl") && std::env::var_os("SAPWOOD_NIXL").is_some() {
        return every_room_ends_and_nothing_is_lost("nixl");
    }
    let (good, said) = demo("--rooms 2 --transport nixl");
    assert!(!good, "{said}");
    assert!(said.contains("nixl"), "{said}");
}
