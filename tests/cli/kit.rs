//! Tests that need a service.

/// A test that cannot run here says so; where everything must run (`SAPWOOD_REQUIRE_SERVICES`), it fails.
pub(crate) fn skip(what: &str) {
    assert!(std::env::var_os("SAPWOOD_REQUIRE_SERVICES").is_none(), "needs {what}");
    println!("SKIPPED: needs {what}");
}
