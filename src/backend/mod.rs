//! Floor 4: what touches memory, devices, files and sockets.

#[cfg(feature = "host")]
pub mod region;
