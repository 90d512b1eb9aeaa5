//! The trace reader of the command line: any bytes as a trace file.
#![no_main]

#[path = "../../src/bin/sapwood/replay/tokens.rs"]
#[expect(dead_code, reason = "the reader uses a part of it")]
mod tokens;
#[path = "../../src/bin/sapwood/replay/trace.rs"]
#[expect(dead_code, reason = "the command line reads more of what it returns")]
mod trace;
#[path = "../../src/bin/sapwood/replay/workload.rs"]
#[expect(dead_code, reason = "the reader uses a part of it")]
mod workload;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    dir.join(format!("sapwood-fuzz-trace-{}", std::process::id()))
});

fuzz_target!(|bytes: &[u8]| {
    fs::write(&*FILE, bytes).expect("room for a small file");
    let lines = bytes.split(|b| *b == b'\n').count();
    let strict = trace::read(&FILE, false, usize::MAX);
    let lenient = trace::read(&FILE, true, usize::MAX);
    if let Ok(strict) = &strict {
        let lenient = lenient.as_ref().expect("what passes strictly passes leniently");
        assert_eq!((strict.jobs.len(), strict.skipped_lines), (lenient.jobs.len(), 0));
    }
    if let Ok(lenient) = &lenient {
        assert!(lenient.jobs.len() + lenient.skipped_lines <= lines);
        for job in &lenient.jobs {
            assert!(tokens::total(&job.input) >= 1, "a prompt has a token");
            assert!(job.input.iter().chain(&job.output).all(|span| span.len > 0), "no empty span");
        }
        let first = trace::read(&FILE, true, 1).expect("there is a first request");
        assert_eq!(first.jobs.len(), 1);
    }
});
