//! Reads Mooncake-format traces: one JSON object a line with `timestamp` (milliseconds), `input_length`,
//! `output_length` (tokens) and `hash_ids`, one id for each started block of 512 prompt tokens.
//!
//! What the ids mean here. An id stands for 512 token ids that depend on nothing but the id; the last block of
//! a prompt is cut to `input_length`. The trace does not say what the model answered, except through later
//! requests: when a later request's ids begin with *all* ids of this one and it is longer, it is the next turn,
//! and this request's answer is what the later prompt holds after this prompt. The nearest later request with
//! more blocks decides, failing that the longest one with the same blocks. Where no later request says, or its
//! prompt ends, the answer is tokens that only this request has. (Published traces give the last, partial block
//! an id of its own, so most answers are unique; prompts that end on a block border are the exception.)

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::tokens::{Span, TRACE_ID_END, push, unique_source};
use super::workload::Job;

/// Tokens of one block of a trace.
pub(crate) const BLOCK_TOKENS: u32 = 512;
/// Longest line that is read: a prompt of 4 million tokens has 8,192 ids, which is below 200 KiB.
const LINE_BYTES_MAX: usize = 4 << 20;
/// Most tokens of a prompt or an answer.
const TOKENS_MAX: i64 = 4 << 20;
/// Latest timestamp: a year.
const TIMESTAMP_MS_MAX: f64 = 366.0 * 86_400_000.0;

/// Why a line is not a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LineFault {
    #[error("not a request: {0}")]
    Json(serde_json::Error),
    #[error("the line is longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    #[error("timestamp {0} is not a time in milliseconds between 0 and one year")]
    Timestamp(f64),
    #[error("{field} is {value}, below {least}")]
    TooSmall { field: &'static str, value: i64, least: i64 },
    #[error("{field} is {value}, above the limit of {TOKENS_MAX} tokens")]
    TooLarge { field: &'static str, value: i64 },
    #[error("{ids} hash_ids for {tokens} prompt tokens, {expected} blocks of {BLOCK_TOKENS} expected")]
    IdCount { ids: usize, tokens: i64, expected: usize },
    #[error("hash id {0} is not between 0 and 2^62")]
    Id(i64),
}

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    #[error("cannot read trace {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}:{line}: {fault} (--lenient skips such lines)", path.display())]
    Line { path: PathBuf, line: usize, fault: LineFault },
    #[error("trace {} holds no request ({skipped} lines skipped)", path.display())]
    Empty { path: PathBuf, skipped: usize },
}

/// A trace in memory.
#[derive(Debug)]
pub(crate) struct Trace {
    /// Requests in file order.
    pub(crate) jobs: Vec<Job>,
    /// Malformed lines that were passed over.
    pub(crate) skipped_lines: usize,
    /// Ids met after different predecessors. Zero in a well-made trace, where an id names its block together
    /// with everything before it.
    pub(crate) ids_with_two_parents: usize,
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: i64,
    output_length: i64,
    hash_ids: Vec<i64>,
}

/// A line that passed.
struct Raw {
    arrival_us: u64,
    input_tokens: u32,
    output_tokens: u32,
    ids: Vec<u64>,
}

/// Reads `path`, at most `requests_max` requests of it.
pub(crate) fn read(path: &Path, lenient: bool, requests_max: usize) -> Result<Trace, TraceError> {
    let unreadable = |source| TraceError::Read { path: path.to_owned(), source };
    let mut reader = BufReader::with_capacity(1 << 20, File::open(path).map_err(unreadable)?);
    let (mut raws, mut skipped_lines, mut number, mut line) = (Vec::new(), 0, 0, Vec::new());
    while raws.len() < requests_max && next_line(&mut reader, &mut line).map_err(unreadable)? {
        number += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match parse(&line) {
            Ok(raw) => raws.push(raw),
            Err(_) if lenient => skipped_lines += 1,
            Err(fault) => return Err(TraceError::Line { path: path.to_owned(), line: number, fault }),
        }
    }
    if raws.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned(), skipped: skipped_lines });
    }
    let ids_with_two_parents = count_two_parents(&raws);
    Ok(Trace { jobs: to_jobs(&raws), skipped_lines, ids_with_two_parents })
}

/// Reads one line without its end; at most one byte more than allowed is kept, the rest is read past.
fn next_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> std::io::Result<bool> {
    line.clear();
    let limit = LINE_BYTES_MAX as u64 + 1;
    if reader.by_ref().take(limit).read_until(b'\n', line)? == 0 {
        return Ok(false);
    }
    if line.last() != Some(&b'\n') && line.len() as u64 == limit {
        loop {
            let chunk = reader.fill_buf()?;
            let (used, done) = match chunk.iter().position(|&b| b == b'\n') {
                Some(at) => (at + 1, true),
                None => (chunk.len(), chunk.is_empty()),
            };
            reader.consume(used);
            if done {
                break;
            }
        }
    }
    Ok(true)
}

fn parse(line: &[u8]) -> Result<Raw, LineFault> {
    if line.len() > LINE_BYTES_MAX {
        return Err(LineFault::TooLong);
    }
    let line: Line = serde_json::from_slice(line).map_err(LineFault::Json)?;
    if !(0.0..=TIMESTAMP_MS_MAX).contains(&line.timestamp) {
        return Err(LineFault::Timestamp(line.timestamp));
    }
    let tokens = |field, value: i64, least| {
        if value < least {
            return Err(LineFault::TooSmall { field, value, least });
        }
        u32::try_from(value).ok().filter(|_| value <= TOKENS_MAX).ok_or(LineFault::TooLarge { field, value })
    };
    let input_tokens = tokens("input_length", line.input_length, 1)?;
    let output_tokens = tokens("output_length", line.output_length, 0)?;
    let expected = input_tokens.div_ceil(BLOCK_TOKENS) as usize;
    if line.hash_ids.len() != expected {
        return Err(LineFault::IdCount { ids: line.hash_ids.len(), tokens: line.input_length, expected });
    }
    let id = |&id: &i64| u64::try_from(id).ok().filter(|&i| i < TRACE_ID_END).ok_or(LineFault::Id(id));
    Ok(Raw {
        arrival_us: (line.timestamp * 1_000.0) as u64,
        input_tokens,
        output_tokens,
        ids: line.hash_ids.iter().map(id).collect::<Result<_, _>>()?,
    })
}

fn count_two_parents(raws: &[Raw]) -> usize {
    let mut parents: HashMap<u64, Option<u64>> = HashMap::new();
    let mut mixed = std::collections::HashSet::new();
    for raw in raws {
        let mut before = None;
        for &id in &raw.ids {
            if *parents.entry(id).or_insert(before) != before {
                mixed.insert(id);
            }
            before = Some(id);
        }
    }
    mixed.len()
}

/// Interns every run of leading ids: equal numbers mean equal ids from the first block on.
#[derive(Default)]
struct Chains {
    next: HashMap<(u32, u64), u32>,
}

impl Chains {
    fn extend(&mut self, chain: u32, id: u64) -> u32 {
        let fresh = self.next.len() as u32 + 1;
        *self.next.entry((chain, id)).or_insert(fresh)
    }
}

/// Turns lines into requests; walks backwards, so that "the nearest later request" is the last one noted.
fn to_jobs(raws: &[Raw]) -> Vec<Job> {
    let mut chains = Chains::default();
    let mut later: HashMap<u32, usize> = HashMap::new();
    let mut jobs: Vec<Job> = Vec::with_capacity(raws.len());
    for (index, raw) in raws.iter().enumerate().rev() {
        let path: Vec<u32> = raw
            .ids
            .iter()
            .scan(0, |chain, &id| {
                *chain = chains.extend(*chain, id);
                Some(*chain)
            })
            .collect();
        let whole = *path.last().unwrap_or(&0);
        let next_turn = later.get(&whole).map(|&at| &raws[at]).filter(|n| n.input_tokens > raw.input_tokens);
        jobs.push(to_job(index, raw, next_turn));
        for (depth, &chain) in path.iter().enumerate() {
            let reaches_on = raw.ids.len() > depth + 1;
            later
                .entry(chain)
                .and_modify(|at| {
                    if reaches_on || raw.input_tokens > raws[*at].input_tokens {
                        *at = index;
                    }
                })
                .or_insert(index);
        }
    }
    jobs.reverse();
    jobs
}

fn to_job(index: usize, raw: &Raw, next_turn: Option<&Raw>) -> Job {
    let input = blocks(&raw.ids, 0, raw.input_tokens);
    let known_to = next_turn.map_or(0, |n| n.input_tokens.min(raw.input_tokens + raw.output_tokens));
    let mut output = next_turn.map_or(Vec::new(), |n| blocks(&n.ids, raw.input_tokens, known_to));
    let known = known_to.saturating_sub(raw.input_tokens);
    push(&mut output, Span { source: unique_source(index), first: 0, len: raw.output_tokens - known });
    Job::new(raw.arrival_us, input, output)
}

/// Tokens `from..to` of the text that `ids` name.
fn blocks(ids: &[u64], from: u32, to: u32) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut at = from;
    while at < to {
        let (block, first) = (at / BLOCK_TOKENS, at % BLOCK_TOKENS);
        let len = (BLOCK_TOKENS - first).min(to - at);
        push(&mut spans, Span { source: ids[block as usize], first, len });
        at += len;
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn write(text: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        file
    }

    fn jobs(text: &str) -> Vec<Job> {
        read(write(text.as_bytes()).path(), false, usize::MAX).unwrap().jobs
    }

    fn fault(text: &str) -> String {
        let file = write(text.as_bytes());
        let message = read(file.path(), false, usize::MAX).unwrap_err().to_string();
        message.replace(&file.path().display().to_string(), "F")
    }

    const GOOD: &str = r#"{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]}"#;

    #[test]
    fn a_line_becomes_blocks_cut_to_the_prompt_and_a_unique_answer() {
        let jobs = jobs(GOOD);
        assert_eq!(jobs[0].arrival_us, 5_000);
        let span = |source, first, len| Span { source, first, len };
        assert_eq!(jobs[0].input, [span(4, 0, 512), span(9, 0, 88)]);
        assert_eq!(jobs[0].output, [span(unique_source(0), 0, 3)]);
    }

    #[test]
    fn the_next_turn_says_what_the_answer_was() {
        // Turn 1 ends on a block border; turn 2 goes on with ids 2 and 3 and knows 700 tokens of the answer.
        let jobs = jobs(concat!(
            r#"{"timestamp": 0, "input_length": 512, "output_length": 800, "hash_ids": [1]}"#,
            "\n",
            r#"{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [8]}"#,
            "\n",
            r#"{"timestamp": 2, "input_length": 1212, "output_length": 4, "hash_ids": [1, 2, 3]}"#,
            "\n",
        ));
        let span = |source, first, len| Span { source, first, len };
        assert_eq!(jobs[0].output, [span(2, 0, 512), span(3, 0, 188), span(unique_source(0), 0, 100)]);
        assert_eq!(jobs[1].output, [span(unique_source(1), 0, 1)]);
        assert_eq!(jobs[2].output, [span(unique_source(2), 0, 4)]);
    }

    #[test]
    fn a_partial_block_goes_on_only_under_the_same_id() {
        let first = r#"{"timestamp": 0, "input_length": 600, "output_length": 100, "hash_ids": [1, 2]}"#;
        let other = r#"{"timestamp": 1, "input_length": 900, "output_length": 0, "hash_ids": [1, 3]}"#;
        let same = r#"{"timestamp": 1, "input_length": 650, "output_length": 0, "hash_ids": [1, 2]}"#;
        assert_eq!(jobs(&format!("{first}\n{other}"))[0].output[0].source, unique_source(0));
        let span = |source, first, len| Span { source, first, len };
        assert_eq!(
            jobs(&format!("{first}\n{same}"))[0].output,
            [span(2, 88, 50), span(unique_source(0), 0, 50)]
        );
        // A repetition of the same prompt says nothing about the answer and hides no later turn.
        assert_eq!(jobs(&format!("{first}\n{first}\n{same}"))[0].output.len(), 2);
    }

    #[test]
    fn every_malformed_line_is_named_with_file_line_and_reason() {
        let line = |edit: (&str, &str)| format!("{GOOD}\n\n{}\n", GOOD.replace(edit.0, edit.1));
        let cases = [
            (("600", "-5"), "F:3: input_length is -5, below 1"),
            (("600", "0"), "F:3: input_length is 0, below 1"),
            (("600", "1100"), "F:3: 2 hash_ids for 1100 prompt tokens, 3 blocks of 512 expected"),
            (("600", "99999999"), "F:3: input_length is 99999999, above the limit"),
            (("600", "600.5"), "F:3: not a request: invalid type: floating point"),
            (("\"output_length\": 3", "\"output_length\": -1"), "F:3: output_length is -1, below 0"),
            (("9]", "-9]"), "F:3: hash id -9 is not between"),
            (("\"timestamp\": 5", "\"timestamp\": -5"), "F:3: timestamp -5 is not a time"),
            (("\"timestamp\": 5, ", ""), "F:3: not a request: missing field `timestamp`"),
            (("{", ""), "F:3: not a request: "),
        ];
        for (edit, expected) in cases {
            let message = fault(&line(edit));
            assert!(message.starts_with(expected), "{message} does not start with {expected}");
        }
        assert!(fault("").contains("holds no request"));
        let missing = read(Path::new("/no/such/file"), false, 1).unwrap_err().to_string();
        assert!(missing.starts_with("cannot read trace /no/such/file"), "{missing}");
    }

    #[test]
    fn lenient_counts_and_goes_on_past_any_bytes() {
        let mut text = format!("{GOOD}\n{{\n").into_bytes();
        text.extend([0xFF, 0xFE, b'\n']);
        text.extend(vec![b'x'; LINE_BYTES_MAX + 70_000]);
        text.extend(format!("\n{GOOD}").bytes());
        let trace = read(write(&text).path(), true, usize::MAX).unwrap();
        assert_eq!((trace.jobs.len(), trace.skipped_lines), (2, 3));
        assert_eq!(read(write(&text).path(), true, 1).unwrap().jobs.len(), 1);
    }

    #[test]
    fn ids_under_two_parents_are_noticed() {
        let line = |ids: &str| {
            format!("{{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 0, \"hash_ids\": {ids}}}")
        };
        let text = format!("{}\n{}\n{}", line("[1, 2]"), line("[3, 2]"), line("[1, 2]"));
        assert_eq!(read(write(text.as_bytes()).path(), false, 9).unwrap().ids_with_two_parents, 1);
    }
}
