//! Floor 4: what touches memory, devices, files and sockets.

#[cfg(feature = "host")]
pub mod device;
#[cfg(feature = "host")]
pub mod host;
#[cfg(feature = "host")]
pub mod region;
