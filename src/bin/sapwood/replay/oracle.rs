//! How many prompt tokens a perfect, unlimited cache would have had, counted over the workload alone: no tree,
//! no hashes of tokens, no pages of memory. For requests one after the other, a request may match its first
//! `(input - 1) / page` pages, since one token is always computed, and a page hits if all pages before it hit and
//! an earlier request left it whole behind the same pages.
//!
//! For a trace and pages of one block this is the count by ids: in a well-made trace an id names its block
//! together with everything before it, so "the id was seen" and "the id was seen behind the same ids" agree.

use std::collections::HashMap;

use super::tokens::{Span, push};
use super::workload::Job;

/// Tokens that hit, over all requests. `with_answers` counts answers as cached too; the last token of an answer
/// never is, because the model ends before it computes on it. O(pages), each hashed once.
pub(crate) fn hit_tokens(jobs: &[Job], page_tokens: u32, with_answers: bool) -> u64 {
    let mut seen: HashMap<(u32, Vec<Span>), u32> = HashMap::new();
    let mut hits = 0;
    for job in jobs {
        let cached = job.input_tokens + if with_answers { job.output_tokens.saturating_sub(1) } else { 0 };
        let spans = if with_answers { job.spans() } else { job.input.clone() };
        let matchable = (job.input_tokens - 1) / page_tokens;
        let (mut parent, mut hitting) = (u32::MAX - job.tenant as u32, true);
        for (number, page) in pages(&spans, page_tokens).take((cached / page_tokens) as usize).enumerate() {
            let fresh = seen.len() as u32 + 1;
            let node = *seen.entry((parent, page)).or_insert(fresh);
            hitting &= node != fresh;
            if hitting && (number as u32) < matchable {
                hits += u64::from(page_tokens);
            }
            parent = node;
        }
    }
    hits
}

/// The whole pages of a text. Equal pages give equal lists, because spans that continue each other are joined.
fn pages(spans: &[Span], page_tokens: u32) -> impl Iterator<Item = Vec<Span>> {
    let mut rest = spans.iter().copied();
    let mut open: Option<Span> = None;
    std::iter::from_fn(move || {
        let (mut page, mut need) = (Vec::new(), page_tokens);
        while need > 0 {
            let span = open.take().or_else(|| rest.next())?;
            let len = span.len.min(need);
            push(&mut page, Span { len, ..span });
            need -= len;
            if len < span.len {
                open = Some(Span { first: span.first + len, len: span.len - len, ..span });
            }
        }
        Some(page)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::tokens::expand;
    use crate::replay::workload::built_in;

    fn job(input: &[(u64, u32)], output: &[(u64, u32)]) -> Job {
        let spans = |list: &[(u64, u32)]| -> Vec<Span> {
            list.iter().map(|&(source, len)| Span { source, first: 0, len }).collect()
        };
        Job::new(0, spans(input), spans(output))
    }

    #[test]
    fn counted_by_hand() {
        let first = job(&[(1, 512), (2, 512), (3, 100)], &[]);
        // The same prompt: block 2 is whole and before the last token, so both whole blocks hit.
        assert_eq!(hit_tokens(&[first.clone(), first.clone()], 512, false), 1024);
        // A prompt of exactly two blocks computes its last block again.
        let exact = job(&[(1, 512), (2, 512)], &[]);
        assert_eq!(hit_tokens(&[first.clone(), exact.clone()], 512, false), 512);
        assert_eq!(hit_tokens(&[first.clone(), exact], 64, false), 960);
        // Block 2 behind another block is another page.
        let moved = job(&[(9, 512), (2, 512), (3, 512)], &[]);
        assert_eq!(hit_tokens(&[first.clone(), moved], 512, false), 0);
        // Block 3 was partial in the first request: 64 of its 100 tokens are a page of 64.
        let longer = job(&[(1, 512), (2, 512), (3, 512)], &[]);
        assert_eq!(hit_tokens(&[first, longer], 64, false), 1024 + 64);
    }

    #[test]
    fn answers_count_without_their_last_token() {
        let turn = |answer| [job(&[(1, 64)], &[(2, answer)]), job(&[(1, 64), (2, answer), (3, 64)], &[])];
        assert_eq!(hit_tokens(&turn(64), 64, true), 64);
        assert_eq!(hit_tokens(&turn(65), 64, true), 128);
        assert_eq!(hit_tokens(&turn(65), 64, false), 64);
    }

    /// The same count the slow way, over token ids.
    fn by_tokens(jobs: &[Job], page: usize, with_answers: bool) -> u64 {
        let mut seen: std::collections::HashSet<(usize, Vec<u32>)> = std::collections::HashSet::new();
        let (mut hits, mut tokens) = (0, Vec::new());
        for job in jobs {
            expand(&job.spans(), job.input_tokens + job.output_tokens, &mut tokens);
            let limit = (job.input_tokens as usize - 1) / page * page;
            let hit = (page..=limit)
                .step_by(page)
                .take_while(|&end| seen.contains(&(job.tenant, tokens[..end].to_vec())))
                .count();
            hits += (hit * page) as u64;
            let cached = job.input_tokens as usize
                + if with_answers { (job.output_tokens as usize).max(1) - 1 } else { 0 };
            seen.extend((page..=cached).step_by(page).map(|end| (job.tenant, tokens[..end].to_vec())));
        }
        hits
    }

    #[test]
    fn agrees_with_a_count_over_token_ids() {
        let jobs = built_in(30, 5);
        for page in [48, 64, 512] {
            for with_answers in [false, true] {
                let count = hit_tokens(&jobs, page, with_answers);
                assert_eq!(count, by_tokens(&jobs, page as usize, with_answers), "page {page}");
                assert!(count > 0);
            }
        }
    }
}
