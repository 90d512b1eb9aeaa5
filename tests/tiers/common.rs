//! The conventions of the stories: letters are pages of four tokens.

use sapwood::pool::Capacity;
use sapwood::sim::Rig;
use sapwood::tiers::{Alloc, CoreConfig, Eviction, PrefetchConfig, PrefetchPolicy, StoreConfig, WritePolicy};

pub const PAGE: u32 = 4;

/// Tokens of a prompt whose pages are letters: `t("ABC")` is three pages.
pub fn t(letters: &str) -> Vec<u32> {
    letters.bytes().flat_map(|letter| (0..PAGE).map(move |i| u32::from(letter) * 16 + i)).collect()
}

/// The same with one token more, so that a match may use every page (at least one token is computed).
pub fn t1(letters: &str) -> Vec<u32> {
    let mut tokens = t(letters);
    tokens.push(7);
    tokens
}

pub const WT1: WritePolicy = WritePolicy::WriteThrough { threshold: 1 };
pub const WT2: WritePolicy = WritePolicy::WriteThrough { threshold: 2 };

/// Least recently used: the stories say who goes next, page by page.
pub fn config(device: u32, host: u32, write: WritePolicy) -> CoreConfig {
    CoreConfig {
        eviction: Eviction::Lru,
        host: Capacity::Pages(host),
        write,
        prefetch: PrefetchConfig {
            policy: PrefetchPolicy::WaitComplete,
            threshold_tokens: PAGE,
            batch_pages: 2,
            window_batches: 2,
            host_share_percent: 100,
            retry_ms: 0,
            ..PrefetchConfig::default()
        },
        ..CoreConfig::device_only(PAGE, Capacity::Pages(device))
    }
}

pub fn with_store(mut config: CoreConfig) -> CoreConfig {
    config.store = Some(StoreConfig {
        batch_pages: 2,
        pages_in_flight_max: 64,
        queue_nodes_max: 64,
        attempts_max: 4,
        retry_ms: 10,
        ..StoreConfig::default()
    });
    config
}

/// A store that holds the pages of these prompts, written by an earlier process.
pub fn store_with(prompts: &[&str]) -> Rig {
    let mut writer = Rig::new(with_store(config(64, 64, WT1)));
    for prompt in prompts {
        writer.serve(&t(prompt));
    }
    writer.drain();
    writer.assert_quiet();
    writer
}

/// Takes the whole device once, so that nothing stays on it.
pub fn flush_device(rig: &mut Rig, device: u32) {
    let request = rig.request();
    while rig.alloc(request, device).expect("a live request") != Alloc::Granted {
        rig.drain();
    }
    rig.abort(request).expect("a live request");
}

/// Device pages and host pages that a look-up finds.
pub fn found(rig: &Rig, letters: &str) -> (u32, u32) {
    rig.peek(&t(letters))
}
