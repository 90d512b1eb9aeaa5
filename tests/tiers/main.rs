//! Stories about the tiers, each replayed on the rig: a core with symbolic memories and a manual executor that
//! checks sanity, conservation and stamps after every step. Public bug reports are named by repository and number.

mod backup;
mod common;
mod idle;
mod load;
mod prefetch;
mod storage;
