//! Runs that must go well.

use std::collections::HashSet;
use std::io::Read;
use std::process::Stdio;

use serde_json::Value;

use crate::{chats, command, hits, number, replay, text};

/// The count of the specification, over the file alone: a request may match its first `(input - 1) / 512` blocks,
/// and a block hits if all before it hit and it was among the whole blocks of an earlier request.
fn count_over_the_file() -> u64 {
    let (mut seen, mut tokens) = (HashSet::new(), 0);
    for line in std::fs::read_to_string(chats()).unwrap().lines() {
        let request: Value = serde_json::from_str(line).unwrap();
        let input = request["input_length"].as_u64().unwrap();
        let ids: Vec<u64> =
            request["hash_ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap()).collect();
        let matchable = &ids[..((input - 1) / 512) as usize];
        tokens += 512 * matchable.iter().take_while(|id| seen.contains(*id)).count() as u64;
        seen.extend(ids[..(input / 512) as usize].iter().copied());
    }
    tokens
}

#[test]
fn an_unlimited_cache_hits_what_the_count_over_the_file_says() {
    let line = format!(
        "--trace {} --page-size 512 --device-pages unlimited --host-pages 0 --store none --write-policy none \
         --sequential --no-decode --oracle",
        chats().display()
    );
    let report = replay(&line);
    assert_eq!(count_over_the_file(), 454_656, "the committed trace has changed");
    assert_eq!(hits(&report), 454_656);
    assert_eq!(number(&report, "/oracle_hit_tokens"), 454_656);
    assert_eq!(number(&report, "/hit_tokens/host") + number(&report, "/hit_tokens/store"), 0);
    assert_eq!(number(&report, "/pages_verified"), 454_656 / 512);
    assert_eq!(number(&report, "/decoded_tokens"), 0);
}

#[test]
fn the_oracle_holds_for_other_pages_and_with_answers_cached() {
    for page in [1, 48, 64, 100] {
        for decode in ["", "--no-decode"] {
            let line = format!(
                "--trace {} --requests 60 --page-size {page} --device-pages unlimited --host-pages 0 --store none \
                 --write-policy none --sequential --oracle {decode}",
                chats().display()
            );
            let report = replay(&line);
            assert_eq!(hits(&report), number(&report, "/oracle_hit_tokens"), "page {page} {decode}");
            assert!(hits(&report) > 0);
        }
    }
}

#[test]
fn the_built_in_workload_uses_every_tier_and_repeats_itself() {
    let first = replay("--requests 250 --device-pages 500 --host-pages 700");
    for tier in ["device", "host", "store"] {
        assert!(number(&first, &format!("/hit_tokens/{tier}")) > 0, "no hit on {tier}");
    }
    for moved in ["d2h", "h2d", "store_put", "store_get"] {
        assert!(number(&first, &format!("/bytes/{moved}")) > 0, "nothing moved {moved}");
    }
    assert!(number(&first, "/evicted_pages/device") > 0 && number(&first, "/evicted_pages/host") > 0);
    assert!(number(&first, "/decoded_tokens") > 0);
    let again = replay("--requests 250 --device-pages 500 --host-pages 700");
    assert_eq!(first["digest"], again["digest"]);
    assert_eq!(first["hit_tokens"], again["hit_tokens"]);
    let other = replay("--requests 250 --device-pages 500 --host-pages 700 --seed 2");
    assert_ne!(first["digest"], other["digest"]);
}

#[test]
fn every_policy_keeps_every_byte_and_every_page() {
    for write in ["write-through", "write-through-selective", "write-back", "none"] {
        for prefetch in ["best-effort", "wait-complete", "timeout", "adaptive"] {
            let store = tempfile::tempdir().unwrap();
            let line = format!(
                "--trace {} --page-size 64 --device-pages 700 --host-pages 1200 --store {} --write-policy {write} \
                 --prefetch {prefetch} --speedup 4 --abort-rate 0.1",
                chats().display(),
                store.path().display()
            );
            let report = replay(&line);
            assert!(number(&report, "/aborted") > 0, "{line}");
            assert!(hits(&report) > 0, "{line}");
        }
    }
}

/// A store that is slower than computing is not read, a faster one is.
#[test]
fn adaptive_reads_what_is_faster_than_computing() {
    for (gb_per_s, is_read) in [(4, false), (25, true)] {
        let line = format!(
            "--trace {} --page-size 64 --device-pages 300 --host-pages 300 --store mem --prefetch adaptive \
             --get-gb-per-s {gb_per_s}",
            chats().display()
        );
        let report = replay(&line);
        assert_eq!(number(&report, "/hit_tokens/store") > 0, is_read, "{line}");
    }
}

/// Windows and states beside full attention: every page of every pool is compared, on every rank, after every tier, and none is
/// lost.
#[test]
fn windows_and_states_keep_every_byte_and_every_page() {
    for components in ["full,window", "full,state", "full,window,state"] {
        for (write, ranks) in [("write-through", 1), ("write-back", 1), ("write-through --exclusive", 2)] {
            let store = tempfile::tempdir().unwrap();
            let line = format!(
                "--trace {} --page-size 64 --device-pages 500 --host-pages 900 --store {} --write-policy {write} \
                 --speedup 4 --abort-rate 0.1 --components {components} --window-tokens 200 --state-slots 150 \
                 --ranks {ranks}",
                chats().display(),
                store.path().display()
            );
            let report = replay(&line);
            // Written back late, a prompt has often lost its window by then and can not be gone on from.
            let moved: &[&str] = if write == "write-back" { &["d2h"] } else { &["d2h", "h2d", "store_put"] };
            for moved in moved {
                assert!(number(&report, &format!("/bytes/{moved}")) > 0, "{line}: nothing moved {moved}");
            }
            assert!(hits(&report) > 0, "{line}");
            if ranks == 1 && write == "write-through" {
                let again = replay(&line);
                assert!(number(&again, "/hit_tokens/store") > 0, "{line}");
                assert!(number(&again, "/counters/component_prefetched_pages") > 0, "{line}");
            }
        }
    }
}

#[test]
fn a_device_hardly_larger_than_a_request_still_finishes() {
    let line = format!(
        "--trace {} --requests 80 --page-size 64 --device-pages 130 --host-pages 400 --speedup 50 --max-running 16",
        chats().display()
    );
    let report = replay(&line);
    assert!(number(&report, "/retracted") > 0, "no pressure");
    assert!(number(&report, "/finished") > 0);
}

#[test]
fn two_prompts_that_fill_the_device_do_not_take_turns_for_ever() {
    let report = replay(
        "--page-size 128 --device-pages 125 --host-pages 250 --requests 200 --seed 743 --write-policy write-back \
         --abort-rate 0.5 --speedup 5 --chunk-tokens 100 --h2d-gb-per-s 1 --d2h-gb-per-s 1 --store none --no-decode",
    );
    assert!(number(&report, "/retracted") <= number(&report, "/requests"));
}

#[test]
fn a_second_run_finds_the_first_in_the_store() {
    let store = tempfile::tempdir().unwrap();
    let line = format!(
        "--trace {} --page-size 128 --device-pages 4000 --host-pages 4000 --store {} --sequential --prefetch wait-complete",
        chats().display(),
        store.path().display()
    );
    let (first, second) = (replay(&line), replay(&line));
    assert!(number(&second, "/hit_tokens/store") > number(&first, "/hit_tokens/store"));
    assert!(hits(&second) > hits(&first));
}

#[test]
fn json_chart_and_table_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let chart = dir.path().join("chart.svg");
    let output = command("--requests 40").arg("--chart").arg(&chart).output().unwrap();
    assert!(output.status.success());
    let table = text(&output.stdout);
    for part in
        ["requests", "tokens hit", "prefill saved", "device", "store put", "p99", "verified", "digest"]
    {
        assert!(table.contains(part), "{part} is missing in\n{table}");
    }
    assert!(output.stderr.is_empty(), "a pipe is no terminal: {}", text(&output.stderr));
    let svg = std::fs::read_to_string(chart).unwrap();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = command("--requests 20").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(child.wait().unwrap().success(), "{err}");
    assert!(!err.contains("panicked"), "{err}");
}

#[test]
fn ranks_decide_alike_although_their_copies_end_apart() {
    let mut one = 0;
    for ranks in [1, 2, 4] {
        let store = tempfile::tempdir().unwrap();
        let line = format!(
            "--trace {} --page-size 64 --device-pages 500 --host-pages 900 --store {} --speedup 4 --abort-rate 0.1 \
             --ranks {ranks}",
            chats().display(),
            store.path().display()
        );
        let report = replay(&line);
        let digests = report["rank_digests"].as_array().unwrap();
        assert_eq!(digests.len(), ranks);
        assert!(digests.iter().all(|digest| *digest == report["digest"]), "{digests:?}");
        assert!(number(&report, "/hit_tokens/host") > 0 && number(&report, "/bytes/store_put") > 0, "{line}");
        let verified = number(&report, "/pages_verified");
        one = if ranks == 1 { verified } else { one };
        // Every rank's bytes are looked at.
        assert!(verified > one * (ranks as u64) / 2, "{verified} pages on {ranks} ranks, {one} on one");
    }
}
