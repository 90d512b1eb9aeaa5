//! The page-hash chain of a 32,768-token prompt, and the border that narrows its token ids, each beside its floor in the
//! same run: SHA-256 over one message of as many blocks as the pages of the chain have together, and reading the wide ids
//! and writing as many narrow ones.
#![expect(clippy::unwrap_used, reason = "a bench that cannot go on should stop")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use sha2::{Digest, Sha256};

use sapwood::base::NamespaceId;
use sapwood::key::{Key, hash_pages, tokens_from_i64};

fn hash(c: &mut Criterion) {
    let mut group = c.benchmark_group("hash");
    group.sample_size(20).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    let tokens: Vec<u32> = (0..32_769).map(|i| i * 2_654_435 % 128_000).collect();
    let mut out = Vec::new();
    for page in [16u32, 64] {
        group.throughput(Throughput::Elements(u64::from(32_768 / page)));
        for (name, words) in [("floor-plain", page), ("floor-bigram", 2 * page)] {
            // A page is hashed with the 32 bytes before it, an end mark and a length: whole blocks of 64.
            let blocks = (32 + 4 * words as usize + 9).div_ceil(64) * (32_768 / page) as usize;
            let message = vec![0x5A; blocks * 64 - 9];
            group.bench_function(BenchmarkId::new(name, page), |b| {
                b.iter(|| black_box(Sha256::digest(black_box(&message))));
            });
        }
        for (name, key) in [
            ("plain", Key::new(NamespaceId::DEFAULT, &tokens)),
            ("bigram", Key::bigram(NamespaceId::DEFAULT, &tokens)),
        ] {
            group.bench_function(BenchmarkId::new(name, page), |b| {
                b.iter(|| {
                    out.clear();
                    hash_pages(key, page, None, &mut out);
                    black_box(&out);
                });
            });
        }
    }
    let wide: Vec<i64> = tokens.iter().map(|&t| i64::from(t)).collect();
    let mut narrow = Vec::new();
    group.throughput(Throughput::Elements(32_769));
    group.bench_function("narrow-floor", |b| {
        b.iter(|| {
            black_box(black_box(&wide).iter().fold(0, |all, token| all | token));
            narrow.clear();
            narrow.extend_from_slice(black_box(&tokens));
            black_box(&narrow);
        });
    });
    group
        .bench_function("narrow-i64", |b| b.iter(|| tokens_from_i64(black_box(&wide), &mut narrow).unwrap()));
    group.finish();
}

criterion_group!(benches, hash);
criterion_main!(benches);
