//! Replays with real services as the store: nothing wrong, and what one run stored the next one finds.

#[cfg(any(feature = "redis", feature = "object"))]
#[expect(dead_code, reason = "the contract suite shares servers between tests, these tests do not")]
#[path = "../store_contract/services.rs"]
mod services;

#[cfg(feature = "mooncake")]
#[path = "../mooncake/service.rs"]
mod service;

use serde_json::Value;

#[cfg(any(feature = "redis", feature = "object"))]
use crate::kit::skip;
use crate::{hits, number};

/// 500 requests, twice: the second run begins with empty device and host, as after a restart, and has the store that
/// the first one left. `SAPWOOD_TRACE` names a trace to use instead of the built-in workload.
fn survives_a_restart(store: &str, more: &str) {
    let trace = std::env::var("SAPWOOD_TRACE").map(|path| format!("--trace {path}")).unwrap_or_default();
    let line = format!("--requests 500 --prefetch wait-complete --store {store} {trace} {more}");
    let run = || -> Value { crate::replay(&line) };
    let (first, second) = (run(), run());
    let from_store = |report: &Value| number(report, "/hit_tokens/store");
    assert!(from_store(&second) > 0 && from_store(&second) > from_store(&first), "{second}");
    assert!(hits(&second) > hits(&first));
    for report in [&first, &second] {
        assert_eq!(number(report, "/counters/store_corrupt_pages"), 0);
        assert_eq!(number(report, "/counters/store_put_failed_pages"), 0);
    }
}

#[cfg(feature = "redis")]
#[test]
fn redis_over_tcp_and_over_a_socket() {
    let Some(server) = services::start_redis() else { return skip("redis-server") };
    survives_a_restart(&format!("redis://127.0.0.1:{}", server.port), "");
    let again = crate::replay(&format!(
        "--requests 100 --prefetch wait-complete --store redis://{}",
        server.socket().display()
    ));
    assert!(number(&again, "/hit_tokens/store") > 0);
}

#[cfg(feature = "object")]
#[test]
fn a_bucket_of_an_s3_server() {
    let Some(server) = services::start_s3() else {
        return skip("localbucket (target/l3/bin/localbucket or SAPWOOD_LOCALBUCKET)");
    };
    // A request an object, and this server takes 40 ms for each: larger pages, so fewer of them.
    let store = format!("s3://pages?endpoint=http://127.0.0.1:{}", server.port);
    survives_a_restart(&store, "--page-size 512 --device-pages 200 --host-pages 400");
}

#[cfg(feature = "mooncake")]
#[test]
fn mooncake_with_a_draft_beside_the_target() {
    let Some(service) = service::Service::start("1 GB") else { return };
    survives_a_restart(&format!("mooncake://{}", service.address()), "--draft sidecar");
}
