//! Floor 4: what touches memory, devices, files and sockets.

#[cfg(feature = "host")]
pub mod crc;
#[cfg(feature = "host")]
pub mod device;
#[cfg(feature = "host")]
pub mod host;
pub mod identity;
#[cfg(feature = "host")]
pub mod probe;
#[cfg(feature = "host")]
pub mod region;
#[cfg(feature = "host")]
pub mod store;
#[cfg(feature = "host")]
pub mod transport;
