//! Floor 1: pages as numbers. No memory, no I/O.

pub mod layout;
