//! Every bound of the crate, with the relations between them checked when it compiles.

/// Largest page size in tokens.
pub const PAGE_SIZE_MAX: u32 = 512;
/// Largest number of pages in one pool: ids are `u32` and the top value is kept as "none".
pub const POOL_PAGES_MAX: u32 = u32::MAX - 1;
/// Largest number of layers in a geometry.
pub const LAYERS_MAX: u32 = 1024;
/// Most planes in a geometry; a set of planes is one `u32`.
pub const PLANES_MAX: usize = 32;
/// Largest page of one plane in bytes.
pub const PAGE_BYTES_MAX: u64 = 1 << 32;
/// Longest namespace field in bytes (adapter name, salt, user key).
pub const NAMESPACE_FIELD_BYTES_MAX: usize = 4096;
/// Most namespaces alive in one cache.
pub const NAMESPACES_MAX: usize = 1 << 20;

const _: () = assert!(PAGE_SIZE_MAX.is_power_of_two());
