//! A workload as a prefix tree that is known in advance.
//!
//! All prompts of a workload are laid into one tree before anything runs. A node is a run of pages that requests only
//! use together, so a simulation walks a few nodes per request and keeps one number per node: how many of its pages,
//! from its start, are resident.
//!
//! What a policy is told must not depend on where a node will split *later*: that tells who comes back. (A model
//! trained on node lengths taken from this tree "closed" 61 % of the gap that way.) So [`Step`] describes
//! the node that a growing tree would have had: neighbours with the same past count as one.

use std::collections::HashMap;

/// Text of a prompt: a number that names `pages` pages together with all text before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) id: u64,
    pub(crate) pages: u32,
}

/// A run of pages. Node 0 is the root.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub(crate) parent: u32,
    pub(crate) pages: u32,
    /// Pages from the root to its start.
    pub(crate) depth: u32,
}

/// A request's use of one node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) node: u32,
    /// Pages of the node that the request uses: all but for the last step.
    pub(crate) pages: u32,
    /// Start and end of the node that a growing tree would have here, in pages from the root.
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Ways in which earlier requests and this one go on from there.
    pub(crate) kids: u32,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) at_us: u64,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    /// Whole pages of the prompt.
    pub(crate) pages: u32,
    first_step: usize,
    steps: u32,
}

/// A workload.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) name: String,
    pub(crate) page_tokens: u32,
    pub(crate) nodes: Vec<Node>,
    pub(crate) jobs: Vec<Job>,
    steps: Vec<Step>,
    pub(crate) input_tokens: u64,
}

impl Work {
    /// The path of a request, root side first.
    pub(crate) fn path(&self, job: &Job) -> &[Step] {
        &self.steps[job.first_step..job.first_step + job.steps as usize]
    }

    /// Share of prompt tokens, in percent, that `pages` hit pages are.
    pub(crate) fn percent(&self, pages: u64) -> f64 {
        100.0 * (pages * u64::from(self.page_tokens)) as f64 / self.input_tokens.max(1) as f64
    }

    /// Hits of a cache without limit, in pages.
    pub(crate) fn unlimited(&self) -> u64 {
        let mut seen = vec![0; self.nodes.len()];
        let mut hits = 0;
        for job in &self.jobs {
            let mut whole = true;
            for step in self.path(job) {
                let have = seen[step.node as usize];
                if whole {
                    hits += u64::from(step.pages.min(have));
                }
                whole &= have >= step.pages;
                seen[step.node as usize] = have.max(step.pages);
            }
        }
        hits
    }
}

/// Builds a [`Work`].
#[derive(Default)]
pub(crate) struct Builder {
    kids: HashMap<(u32, u64), u32>,
    raw: Vec<Raw>,
    jobs: Vec<(Job, u32)>,
    /// Nodes of all requests.
    paths: Vec<u32>,
}

/// A span in the tree, before runs are merged.
#[derive(Clone, Copy, Default)]
struct Raw {
    parent: u32,
    pages: u32,
    uses: u32,
    /// A request ends here or uses only a part.
    stop: bool,
}

impl Builder {
    pub(crate) fn new() -> Builder {
        Builder { raw: vec![Raw { stop: true, ..Raw::default() }], ..Builder::default() }
    }

    /// Adds a request; requests come in order of arrival. `spans` cover the whole pages of the prompt.
    pub(crate) fn push(&mut self, at_us: u64, input_tokens: u32, output_tokens: u32, spans: &[Span]) {
        let first_step = self.paths.len();
        let (mut at, mut pages) = (0, 0);
        for span in spans.iter().filter(|s| s.pages > 0) {
            let fresh = self.raw.len() as u32;
            let next = *self.kids.entry((at, span.id)).or_insert(fresh);
            if next == fresh {
                self.raw.push(Raw { parent: at, pages: span.pages, ..Raw::default() });
            }
            let raw = &mut self.raw[next as usize];
            raw.stop |= raw.pages != span.pages;
            raw.pages = raw.pages.max(span.pages);
            raw.uses += 1;
            pages += span.pages;
            self.paths.push(next);
            at = next;
        }
        self.raw[at as usize].stop = true;
        let steps = (self.paths.len() - first_step) as u32;
        self.jobs.push((Job { at_us, input_tokens, output_tokens, pages, first_step, steps }, pages));
    }

    /// Merges runs and works out what a growing tree would have known.
    pub(crate) fn build(self, name: &str, page_tokens: u32) -> Work {
        let mut work = Work { name: name.to_owned(), page_tokens, ..Work::default() };
        let map = self.merge(&mut work.nodes);
        for (job, pages) in &self.jobs {
            let first_step = work.steps.len();
            for &raw in &self.paths[job.first_step..job.first_step + job.steps as usize] {
                let node = map[raw as usize];
                if work.steps.len() == first_step || work.steps.last().is_some_and(|s| s.node != node) {
                    let pages = work.nodes[node as usize].pages;
                    work.steps.push(Step { node, pages, from: 0, to: 0, kids: 0 });
                }
            }
            if let Some(last) = work.steps[first_step..].last_mut() {
                last.pages = pages - work.nodes[last.node as usize].depth;
            }
            let steps = (work.steps.len() - first_step) as u32;
            work.input_tokens += u64::from(job.input_tokens);
            work.jobs.push(Job { first_step, steps, ..*job });
        }
        describe(&mut work);
        work
    }

    /// Makes one node of spans that are always used together; maps spans to nodes.
    fn merge(&self, nodes: &mut Vec<Node>) -> Vec<u32> {
        let mut map = vec![0; self.raw.len()];
        nodes.push(Node { parent: 0, pages: 0, depth: 0 });
        for (at, raw) in self.raw.iter().enumerate().skip(1) {
            let parent = map[raw.parent as usize];
            let above = &self.raw[raw.parent as usize];
            if raw.parent != 0 && !above.stop && above.uses == raw.uses {
                map[at] = parent;
                nodes[parent as usize].pages += raw.pages;
            } else {
                map[at] = nodes.len() as u32;
                nodes.push(Node { parent, pages: raw.pages, depth: 0 });
            }
        }
        for at in 1..nodes.len() {
            let above = nodes[nodes[at].parent as usize];
            nodes[at].depth = above.depth + above.pages;
        }
        map
    }
}

/// Fills in `from`, `to` and `kids` of every step from the past alone.
fn describe(work: &mut Work) {
    #[derive(Clone, Copy, PartialEq, Default)]
    struct Past {
        first_job: u32,
        uses: u32,
    }
    let mut past = vec![Past::default(); work.nodes.len()];
    let mut kids = vec![0u32; work.nodes.len()];
    for (number, job) in work.jobs.iter().enumerate() {
        let steps = &mut work.steps[job.first_step..job.first_step + job.steps as usize];
        for step in steps.iter() {
            let p = &mut past[step.node as usize];
            if p.uses == 0 {
                p.first_job = number as u32;
                // The first child is no branch: a growing tree would have had one longer node.
                let parent = work.nodes[step.node as usize].parent as usize;
                if past[parent].first_job != number as u32 {
                    kids[parent] += 1;
                }
            }
            past[step.node as usize].uses += 1;
        }
        for k in 0..steps.len() {
            let node = steps[k].node as usize;
            let alike = k > 0 && past[steps[k - 1].node as usize] == past[node];
            steps[k].from = if alike { steps[k - 1].from } else { work.nodes[node].depth };
        }
        for k in (0..steps.len()).rev() {
            let node = steps[k].node as usize;
            let alike = steps.get(k + 1).is_some_and(|s| past[s.node as usize] == past[node]);
            (steps[k].to, steps[k].kids) = if alike {
                (steps[k + 1].to, steps[k + 1].kids)
            } else {
                (work.nodes[node].depth + steps[k].pages, kids[node])
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(prompts: &[&[(u64, u32)]]) -> Work {
        let mut builder = Builder::new();
        for (at, prompt) in prompts.iter().enumerate() {
            let spans: Vec<Span> = prompt.iter().map(|&(id, pages)| Span { id, pages }).collect();
            let pages: u32 = spans.iter().map(|s| s.pages).sum();
            builder.push(at as u64, pages * 64, 1, &spans);
        }
        builder.build("test", 64)
    }

    #[test]
    fn runs_are_merged_and_split_where_requests_part() {
        let w =
            work(&[&[(1, 8), (2, 8), (3, 8)], &[(1, 8), (2, 8), (4, 8)], &[(1, 8), (2, 8), (4, 8), (5, 2)]]);
        let pages: Vec<u32> = w.nodes.iter().map(|n| n.pages).collect();
        assert_eq!(pages, [0, 16, 8, 8, 2]);
        assert_eq!(w.path(&w.jobs[2]).iter().map(|s| s.node).collect::<Vec<_>>(), [1, 3, 4]);
        assert_eq!(w.nodes[4].depth, 24);
        assert_eq!(w.unlimited(), 16 + 24);
        assert_eq!(w.jobs[0].pages, 24);
    }

    #[test]
    fn a_part_of_a_node_is_a_step_of_its_own_length() {
        let w = work(&[&[(1, 8), (2, 3)], &[(1, 8), (2, 5)]]);
        let last = |job: usize| *w.path(&w.jobs[job]).last().unwrap();
        assert_eq!((last(0).pages, last(1).pages), (11, 13));
        assert_eq!(w.nodes[last(1).node as usize].pages, 13);
        assert_eq!(w.unlimited(), 8 + 3);
    }

    #[test]
    fn steps_do_not_tell_of_later_splits() {
        let one: &[(u64, u32)] = &[(1, 8), (2, 8), (3, 8)];
        let alone = work(&[one]);
        let split_later = work(&[one, &[(1, 8), (4, 8)], &[(1, 8), (2, 8), (5, 1)]]);
        let told = |w: &Work| -> Vec<(u32, u32, u32)> {
            let mut seen: Vec<_> = w.path(&w.jobs[0]).iter().map(|s| (s.from, s.to, s.kids)).collect();
            seen.dedup();
            seen
        };
        assert_eq!(told(&alone), told(&split_later));
        let second = split_later.path(&split_later.jobs[1]);
        assert_eq!((second[0].from, second[0].to, second[0].kids), (0, 8, 1));
    }
}
