//! `sapwood-peers [--quick] [--page N] [PEER ..]`: sapwood and its rivals on workloads W1, W2, W4 and W5, one table.
//!
//! Every peer runs in turn on the same thread; times are CPU time of that thread (the machine may be shared), the least of
//! a few rounds. What a peer does not do is said in its row: several keep neither tokens nor page ids, and hash the prompt
//! before they can look it up.

mod rivals;
mod sapwood_peer;
mod workloads;

use std::hint::black_box;

use workloads as w;

/// What a prefix cache or index offers. A prompt is prepared once per request: hashed, for the peers that index hashes.
pub trait Peer {
    /// A prompt as the peer looks it up.
    type Prompt;
    /// What this peer leaves out.
    const LEAVES_OUT: &'static str;
    fn page(&self) -> usize;
    fn prepare(&self, tokens: &[u32]) -> Self::Prompt;
    /// Tokens found. Peers with page ids write them out; peers with locks lock and unlock.
    fn find(&mut self, prompt: &Self::Prompt) -> usize;
    /// Adds a prompt of which `hit` tokens were found.
    fn put(&mut self, prompt: &Self::Prompt, hit: usize);
    /// Makes room for a prompt; peers that do not choose victims are told the oldest.
    fn evict(&mut self, oldest: &Self::Prompt);
    /// Tokens held, if the peer can say.
    fn held_tokens(&self) -> Option<usize> {
        None
    }
}

fn cpu_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

fn rss_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Least CPU time per call over a few rounds, in microseconds.
fn time(rounds: usize, calls: usize, mut f: impl FnMut(usize)) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..rounds {
        let start = cpu_ns();
        (0..calls).for_each(&mut f);
        best = best.min((cpu_ns() - start) as f64 / calls as f64 / 1e3);
    }
    best
}

fn row(peer: &str, what: &str, us: f64, floor_us: f64) {
    println!("| {peer} | {what} | {us:.2} | {:.2} |", us / floor_us);
}

fn memory(sizes: &Sizes, bytes: f64) -> String {
    if sizes.memory { format!(", {bytes:.1} B/token") } else { String::new() }
}

struct Sizes {
    quick: bool,
    page: usize,
    /// Growth of the process says something only while it holds one peer: a later one finds the heap of the earlier.
    memory: bool,
}

/// Compare the same tokens as 4-byte words and write the same page list.
fn floor(prompts: &[Vec<u32>], page: usize) -> f64 {
    let copies = prompts.to_vec();
    let pages: Vec<Vec<u32>> = prompts.iter().map(|p| vec![7; p.len() / page]).collect();
    let mut into = Vec::new();
    time(9, 200, |i| {
        let i = i % prompts.len();
        assert!(black_box(&prompts[i]) == black_box(&copies[i]));
        into.clear();
        into.extend_from_slice(&pages[i]);
        black_box(&into);
    })
}

fn w1<P: Peer>(name: &str, make: &impl Fn(usize) -> P, sizes: &Sizes) {
    let prompts = w::w1_prompts();
    let floor_us = floor(&prompts, sizes.page);
    for (shape, step) in [("W1 one step", 32_768), ("W1 128 steps", 256)] {
        let mut peer = make(1 << 20);
        for prompt in &prompts {
            for end in (step..=prompt.len()).step_by(step) {
                let prepared = peer.prepare(&prompt[..end]);
                let hit = peer.find(&prepared);
                peer.put(&prepared, hit);
            }
        }
        let calls = if sizes.quick { 48 } else { 320 };
        let us = time(7, calls, |i| {
            let prepared = peer.prepare(&prompts[i % 16]);
            assert_eq!(black_box(peer.find(&prepared)), 32_768);
        });
        row(name, shape, us, floor_us);
    }
}

fn w2<P: Peer>(name: &str, make: &impl Fn(usize) -> P, sizes: &Sizes) {
    let chat = w::Chat::new(if sizes.quick { 300 } else { 2_000 });
    let mut best = f64::INFINITY;
    let mut hit_rate = 0.0;
    let mut bytes = 0.0;
    for _ in 0..3 {
        let mut peer = make(1 << 23);
        let (before, start) = (rss_bytes(), cpu_ns());
        let (mut hits, mut asked) = (0, 0);
        for (session, end) in chat.turns() {
            let prepared = peer.prepare(&chat.rows[session][..end]);
            let hit = peer.find(&prepared);
            peer.put(&prepared, hit);
            hits += hit;
            asked += end;
        }
        best = best.min((cpu_ns() - start) as f64 / chat.turn_count() as f64 / 1e3);
        hit_rate = hits as f64 / asked as f64;
        assert!(
            hit_rate <= chat.optimum(),
            "hits above the offline optimum: the harness or the peer is wrong"
        );
        if bytes == 0.0 {
            bytes = rss_bytes().saturating_sub(before) as f64 / chat.unique_tokens() as f64;
        }
    }
    let floor_us =
        floor(&chat.rows[..16].iter().map(|r| r[..2_848].to_vec()).collect::<Vec<_>>(), sizes.page);
    row(name, &format!("W2 turn (hits {:.2} %{})", 100.0 * hit_rate, memory(sizes, bytes)), best, floor_us);
}

fn w4<P: Peer>(name: &str, make: &impl Fn(usize) -> P, sizes: &Sizes) {
    let (cap, len) = (1usize << 20, 2_048);
    let mut peer = make(cap);
    let prompts: Vec<Vec<u32>> = (0..cap / len * 3).map(|i| w::w4_prompt(i, len)).collect();
    let fill = cap / len;
    for prompt in &prompts[..fill] {
        let prepared = peer.prepare(prompt);
        peer.put(&prepared, 0);
    }
    let rounds = if sizes.quick { 200 } else { fill };
    let mut next = fill;
    let us = time(3, rounds, |_| {
        let prepared = peer.prepare(&prompts[next % prompts.len()]);
        black_box(peer.find(&prepared));
        let oldest = peer.prepare(&prompts[(next - fill) % prompts.len()]);
        peer.evict(&oldest);
        peer.put(&prepared, 0);
        next += 1;
    });
    if let Some(held) = peer.held_tokens() {
        assert!(held <= cap, "tokens in the tree + free = capacity");
    }
    let floor_us = floor(&prompts[..16], sizes.page);
    row(name, "W4 miss + evict + insert", us, floor_us);
}

fn w5<P: Peer>(name: &str, make: &impl Fn(usize) -> P, sizes: &Sizes) {
    let top = if sizes.quick { 100_000 } else { 1_000_000 };
    let mut peer = make(top * 32 + (1 << 16));
    let (before, mut sessions) = (rss_bytes(), 0);
    for steps in [10_000, 100_000, 1_000_000].into_iter().filter(|&n| n <= top) {
        while sessions * 10 < steps {
            let tokens = w::w5_session(sessions);
            for d in 1..=10 {
                let prepared = peer.prepare(&tokens[..d * 32]);
                peer.put(&prepared, (d - 1) * 32);
            }
            sessions += 1;
        }
        let picked: Vec<Vec<u32>> = (0..4_000).map(|i| w::w5_session(w::pick(steps + i, sessions))).collect();
        let us = time(5, picked.len(), |i| {
            let prepared = peer.prepare(&picked[i]);
            assert_eq!(black_box(peer.find(&prepared)), 320);
        });
        let bytes = rss_bytes().saturating_sub(before) as f64 / (sessions * 320) as f64;
        let floor_us = floor(&picked[..16], sizes.page);
        row(name, &format!("W5 of {steps} steps{}", memory(sizes, bytes)), us, floor_us);
    }
}

fn all<P: Peer>(name: &str, make: impl Fn(usize) -> P, sizes: &Sizes) {
    println!("| **{name}** | leaves out: {} | | |", P::LEAVES_OUT);
    w1(name, &make, sizes);
    w2(name, &make, sizes);
    w4(name, &make, sizes);
    w5(name, &make, sizes);
}

fn main() {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let quick = args.iter().any(|a| a == "--quick");
    let page = args
        .iter()
        .position(|a| a == "--page")
        .and_then(|i| args.get(i + 1).and_then(|n| n.parse().ok()))
        .unwrap_or(16);
    args.retain(|a| !a.starts_with("--") && a.parse::<usize>().is_err());
    let chosen = |name: &str| args.is_empty() || args.iter().any(|a| a == name);
    let sizes = Sizes { quick, page, memory: args.len() == 1 };
    println!("| peer | work | us (least CPU time) | x floor |\n|---|---|---|---|");
    if chosen("sapwood") {
        all("sapwood", |cap| sapwood_peer::Ours::new(page, cap), &sizes);
    }
    if chosen("token-tree") {
        all("token-tree", |_| rivals::TokenTree::new(), &sizes);
    }
    if chosen("chain-index") {
        all("chain-index", |_| rivals::Chain::new(page), &sizes);
    }
    if chosen("dynamo") {
        all("dynamo", |_| rivals::Dynamo::new(page), &sizes);
    }
    if chosen("kvbm") {
        all("kvbm", |cap| rivals::Kvbm::new(page, cap), &sizes);
    }
}
