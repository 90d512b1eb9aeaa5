//! Reads Mooncake-format traces: one JSON object a line with `timestamp` (milliseconds), `input_length`,
//! `output_length` (tokens) and `hash_ids`, each of which names 512 tokens together with all text before them.
//! Only prompts are laid into the tree, so that figures compare with published ones.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::work::{Builder, Span, Work};

const BLOCK_TOKENS: u32 = 512;
/// Longest prompt or answer.
const TOKENS_MAX: u32 = 4 << 20;

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}:{line}: {source}", path.display())]
    Json { path: PathBuf, line: usize, source: serde_json::Error },
    #[error("{}:{line}: a timestamp, a length or the number of ids is out of range", path.display())]
    Range { path: PathBuf, line: usize },
    #[error("{} holds no request", path.display())]
    Empty { path: PathBuf },
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

impl Line {
    fn is_sound(&self) -> bool {
        self.timestamp.is_finite()
            && (0.0..1e15).contains(&self.timestamp)
            && self.input_length <= TOKENS_MAX
            && self.output_length <= TOKENS_MAX
            && self.hash_ids.len() == self.input_length.div_ceil(BLOCK_TOKENS) as usize
    }
}

/// Reads at most `requests_max` requests. `page_tokens` divides 512.
pub(crate) fn read(path: &Path, page_tokens: u32, requests_max: usize) -> Result<Work, TraceError> {
    let unreadable = |source| TraceError::Read { path: path.to_owned(), source };
    let mut builder = Builder::new();
    let (mut spans, mut requests) = (Vec::new(), 0);
    for (at, line) in BufReader::new(File::open(path).map_err(unreadable)?).lines().enumerate() {
        let line = line.map_err(unreadable)?;
        if requests == requests_max {
            break;
        }
        if line.trim().is_empty() {
            continue;
        }
        let line_number = at + 1;
        let request: Line = serde_json::from_str(&line).map_err(|source| TraceError::Json {
            path: path.to_owned(),
            line: line_number,
            source,
        })?;
        if !request.is_sound() {
            return Err(TraceError::Range { path: path.to_owned(), line: line_number });
        }
        let mut left = request.input_length / page_tokens;
        spans.clear();
        for &id in &request.hash_ids {
            let pages = left.min(BLOCK_TOKENS / page_tokens);
            left -= pages;
            spans.push(Span { id, pages });
        }
        let at_us = (request.timestamp * 1_000.0) as u64;
        builder.push(at_us, request.input_length, request.output_length, &spans);
        requests += 1;
    }
    if requests == 0 {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    let name = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
    Ok(builder.build(&name, page_tokens))
}
