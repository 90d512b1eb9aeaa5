//! A toy continuous-batching loop around the cache, with the public API only.
//!
//! The "model" writes one byte per token where KV would go, and says what the previous token and its position
//! make. Run it with `cargo run --example scheduler`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::backend::device::SoftDevice;
use sapwood::base::{Fence, Time};
use sapwood::engine::{PrefixCache, Request};
use sapwood::key::Namespace;
use sapwood::pool::{Capacities, Capacity, Geometry, Plane, PlaneId};
use sapwood::tiers::{Alloc, LoadState, WritePolicy};

const PAGE: usize = 16;

/// A running request: its guard, what was said so far, and for how many tokens the KV is there.
struct Running {
    request: Request,
    tokens: Vec<u32>,
    computed: usize,
    until: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Two layers of K and V, 8 bytes each: a device of 64 pages, a host of 256, every page backed up.
    let geometry = Arc::new(Geometry::builder(PAGE as u32).plane(Plane::target(2, 8)).build()?);
    let device = SoftDevice::threaded(Arc::clone(&geometry), Capacities::full(Capacity::Pages(64)))?;
    let mut cache = PrefixCache::builder(geometry)
        .device(device.clone())
        .host_pages(Capacity::Pages(256))
        .write_policy(WritePolicy::WriteThrough { threshold: 1 })
        .build()?;
    let namespace = cache.namespace(&Namespace::default())?;
    let started = Instant::now();

    // Chats that share a system prompt of 160 tokens; later turns repeat the earlier ones.
    let system: Vec<u32> = (0..160).collect();
    let mut queue: VecDeque<(Request, Vec<u32>)> = VecDeque::new();
    for turn in 1..=3 {
        for chat in (0..6).rev() {
            let said = (0..turn * 60).map(|i| 1_000 * (chat + 1) + i);
            let tokens: Vec<u32> = system.iter().copied().chain(said).collect();
            // The cache is told of the queue, so that it keeps what those who wait will use.
            let mut request = cache.request(namespace);
            cache.expect_prefix(&mut request, &tokens)?;
            queue.push_back((request, tokens));
        }
    }
    let mut running: Vec<Running> = Vec::new();
    let (mut hit, mut prompt_tokens, mut finished) = (0, 0, 0);

    while !queue.is_empty() || !running.is_empty() {
        cache.tick(Time(started.elapsed().as_micros() as u64))?;

        // Admission: match, restore from the host, take the pages of the prompt.
        while running.len() < 4 {
            let Some((mut request, tokens)) = queue.pop_front() else { break };
            // One token at least is computed, so the last one is not part of the match.
            let found = cache.match_prefix(&mut request, &tokens[..tokens.len() - 1])?;
            cache.load_back(&mut request)?;
            let cached = cache.pages(&request)?.len();
            let fresh = tokens.len().div_ceil(PAGE) - cached;
            if cache.alloc(&mut request, fresh as u32)? != Alloc::Granted {
                // Lets go of what was found; the request keeps its place in the queue.
                cache.match_prefix(&mut request, &[])?;
                queue.push_front((request, tokens));
                break;
            }
            hit += cached * PAGE;
            prompt_tokens += tokens.len();
            println!(
                "{:>4} prompt tokens: {:>3} on the device, {:>3} on the host",
                tokens.len(),
                found.device_tokens,
                found.host_tokens
            );
            let until = tokens.len() + 12;
            running.push(Running { request, tokens, computed: cached * PAGE, until });
        }

        // One step: the prompt in one go, then one token at a time.
        let mut at = 0;
        while at < running.len() {
            let r = &mut running[at];
            if cache.load_state(&r.request)? != LoadState::Ready || !room(&mut cache, r)? {
                at += 1;
                continue;
            }
            let fence = compute(&cache, &device, r)?;
            if r.tokens.len() < r.until {
                cache.checkpoint(&mut r.request, &r.tokens[..r.computed], fence)?;
                at += 1;
            } else {
                let done = running.swap_remove(at);
                cache.finish(done.request, &done.tokens[..done.computed], fence)?;
                finished += 1;
            }
        }
        if running.iter().all(|r| cache.load_state(&r.request) != Ok(LoadState::Ready)) {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    println!("{finished} requests, {hit} of {prompt_tokens} prompt tokens were cached");
    cache.close(Duration::from_secs(5));
    assert!(cache.sanity().is_empty());
    Ok(())
}

/// A page for the next token, where the last one is full.
fn room(cache: &mut PrefixCache, r: &mut Running) -> Result<bool, Box<dyn std::error::Error>> {
    let missing = r.tokens.len().div_ceil(PAGE).saturating_sub(cache.pages(&r.request)?.len());
    Ok(missing == 0 || cache.alloc(&mut r.request, missing as u32)? == Alloc::Granted)
}

/// Writes the KV of every token that has none, says one more token, and returns the fence behind the work.
fn compute(
    cache: &PrefixCache,
    device: &SoftDevice,
    r: &mut Running,
) -> Result<Fence, Box<dyn std::error::Error>> {
    let table = cache.pages(&r.request)?;
    let work = device.compute_begin();
    for position in r.computed..r.tokens.len() {
        let row = [r.tokens[position] as u8; 16];
        for layer in 0..2 {
            device.write_rows(PlaneId(0), table[position / PAGE], layer, (position % PAGE) as u32, &row)?;
        }
    }
    device.compute_end(work);
    r.computed = r.tokens.len();
    let last = r.tokens[r.computed - 1];
    r.tokens.push(last.wrapping_mul(31).wrapping_add(r.computed as u32) & 0x7FFF_FFFF);
    Ok(work)
}
