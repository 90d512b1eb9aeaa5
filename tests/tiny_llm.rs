//! A model that computes through the cache answers as it does without one, whatever the tiers do to its pages.
//!
//! `SAPWOOD_SEED=17 cargo test --test tiny_llm` starts the adversarial seeds at 17.

#[path = "../examples/tiny_llm/hardware.rs"]
mod hardware;
#[path = "../examples/tiny_llm/kv.rs"]
mod kv;
#[path = "../examples/tiny_llm/model.rs"]
mod model;
#[path = "../examples/tiny_llm/proof.rs"]
mod proof;
#[path = "../examples/tiny_llm/sequence.rs"]
mod sequence;
#[path = "../examples/tiny_llm/server.rs"]
mod server;

use std::sync::Arc;

use sapwood::backend::store::fault::{Fault, Faulty, When};
use sapwood::backend::store::mem::MemStore;
use sapwood::backend::store::stats::OpKind;
use sapwood::tiers::WritePolicy;

use proof::{Setup, Shows};
use server::{Hardware, Options};

fn all_agree(setups: Vec<Setup>) {
    let model = model::Model::new();
    let work = proof::workload();
    let want = proof::without_cache(&model, &work);
    assert!(want.iter().any(|o| o.accepted > 0) && want.iter().any(|o| o.accepted < o.drafted));
    for setup in setups {
        match proof::run(&model, &setup, &work, &want) {
            Ok(report) => assert!(report.saved_tokens() > 0, "{}: {report:?}", setup.name),
            Err(error) => panic!("{}: {error}", setup.name),
        }
    }
}

#[test]
fn one_thread() {
    all_agree(proof::setups(1));
}

#[test]
fn two_threads() {
    all_agree(proof::setups(2));
}

#[test]
fn copies_in_the_order_that_hurts_most() {
    let seed = std::env::var("SAPWOOD_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    println!("SAPWOOD_SEED={seed}");
    all_agree((seed..seed + 8).flat_map(proof::adversarial).collect());
}

/// What the comparison is worth: each of these mistakes must show.
#[test]
fn a_wrong_byte_and_a_forgotten_fence_are_noticed() {
    let model = model::Model::new();
    let work = proof::workload();
    let want = proof::without_cache(&model, &work);
    let through = WritePolicy::WriteThrough { threshold: 1 };
    let setup = |options: Options| Setup {
        name: "mistake".to_owned(),
        restart: options.store.is_some(),
        options,
        shows: Shows::default(),
    };
    let lying = Faulty::new(MemStore::new(64 << 20));
    lying.add(OpKind::Get, When::Every(7), Fault::Lie);
    let wrong_byte = Options {
        device_pages: 56,
        host_pages: 400,
        write: through,
        store: Some(Arc::new(lying)),
        ..Options::ample()
    };
    let forgotten = Options {
        device_pages: 56,
        host_pages: 160,
        write: through,
        publish_early: true,
        forget_fences: true,
        hardware: Hardware::Adversary(2),
        ..Options::ample()
    };
    for options in [wrong_byte, forgotten] {
        assert!(proof::run(&model, &setup(options), &work, &want).is_err());
    }
}
