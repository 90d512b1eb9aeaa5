//! Floor 2: the radix tree. Which prefix lies where, who holds it, who goes next.
//!
//! The tree allocates no page and moves no byte: it is given pages and gives pages back. Whatever needs pages is a plan
//! and a commit. It reads no clock; an integer ticks per call.

mod error;
mod policy;
mod stubs;
mod types;

pub use error::{TreeConfigError, TreeError};
pub use policy::Policy;
pub use stubs::Tree;
pub use types::*;
