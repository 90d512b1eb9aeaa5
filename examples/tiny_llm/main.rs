//! A transformer that keeps its K and V in the cache's pages, served by a small continuous-batching scheduler under
//! every set-up of the tiers. The answers, and the bits of every score that chose them, must be those of a run
//! without a cache.
//!
//! ```text
//! cargo run --release --example tiny_llm
//! ```
//! A seed for the adversarial runs: `SAPWOOD_SEED=17 cargo run --release --example tiny_llm`.

mod hardware;
mod kv;
mod model;
mod proof;
mod sequence;
mod server;

use std::process::ExitCode;

fn main() -> ExitCode {
    let model = model::Model::new();
    let work = proof::workload();
    let want = proof::without_cache(&model, &work);
    let drafted: usize = want.iter().map(|o| o.drafted).sum();
    let accepted: usize = want.iter().map(|o| o.accepted).sum();
    println!("{} requests; the draft head is right in {accepted} of {drafted} tokens", work.len());
    println!("{:<44} {:>8} {:>9} {:>7} {:>8} {:>7}", "set-up", "prefill", "of", "saved", "loaded", "fetched");
    let seed = std::env::var("SAPWOOD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let mut setups = [proof::setups(1), proof::setups(2)].into_iter().flatten().collect::<Vec<_>>();
    (seed..seed + 8).for_each(|seed| setups.extend(proof::adversarial(seed)));
    let mut failed = 0;
    for setup in &setups {
        match proof::run(&model, setup, &work, &want) {
            Ok(r) => println!(
                "{:<44} {:>8} {:>9} {:>7} {:>8} {:>7}",
                setup.name,
                r.prefilled_tokens,
                r.prompt_tokens,
                r.saved_tokens(),
                r.stats.loaded_pages,
                r.stats.store_got_pages,
            ),
            Err(error) => {
                failed += 1;
                println!("{:<44} FAILED: {error}", setup.name);
            }
        }
    }
    println!("{} set-ups, {failed} with another answer than without a cache", setups.len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
