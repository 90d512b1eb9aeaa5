//! Stories about the tiers, each replayed on the rig: a core with symbolic memories and a manual executor that
//! checks sanity, conservation and stamps after every step. Public bug reports are named by repository and number.

mod anchor;
mod attach;
mod backup;
mod common;
mod foresight;
mod hung;
mod hybrid;
mod idle;
mod load;
mod pacing;
mod policy;
mod prefetch;
mod storage;
mod variants;
