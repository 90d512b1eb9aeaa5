//! Violations: states that only a bug of ours can produce.
//!
//! A debug, test or `strict` build stops at once. A release build gets the [`Violation`] as a value,
//! refuses the operation and goes on; the owner counts it (see `docs/INVARIANTS.md`).

use std::fmt;

/// A broken rule, with enough detail to find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Short stable name of the rule, e.g. `"backed-up-parent"`.
    pub rule: &'static str,
    /// What was seen.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.detail)
    }
}

impl std::error::Error for Violation {}

/// Makes a [`Violation`], or stops a debug, test or `strict` build. Use through [`invariant!`](crate::invariant).
#[cold]
pub fn violated(rule: &'static str, detail: String) -> Violation {
    if cfg!(any(debug_assertions, feature = "strict")) {
        panic!("invariant violated: {rule}: {detail}");
    }
    Violation { rule, detail }
}

/// `invariant!(cond, "rule", "format", args..)` is `Ok(())` or `Err(Violation)`; a debug, test or
/// `strict` build panics instead of returning the error.
#[macro_export]
macro_rules! invariant {
    ($cond:expr, $rule:expr, $($arg:tt)+) => {
        if $cond { Ok(()) } else { Err($crate::base::invariant::violated($rule, format!($($arg)+))) }
    };
}
