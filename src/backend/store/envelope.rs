//! The envelope around every stored page: what it is, how long it is, and a checksum.
//!
//! ```text
//! 0  magic "SAPWOODP"   8 version u16   10 kind u16        12 header crc32c u32
//! 16 payload bytes u64  24 payload crc32c u32              28 place u32
//! 32 key [32]           64 descriptor [32]                 96 namespace [32]       128 payload
//! ```
//! Little endian. The header checksum covers the header with its own four bytes as zero. CRC32C is the
//! cheapest check that finds torn, short, swapped and flipped data: it runs at 26 to 60 GB/s on one core
//! with the instructions for it, several times the speed of any medium here; swaps of whole objects are found by
//! the key. It proves nothing against somebody who can write the store.
//!
//! *Place* is zero where objects have names of their own. In a log it binds the record to its position, so
//! that a payload that looks like a record is not taken for one.

use crate::backend::identity::{DescriptorDigest, NamespaceDigest, Space, StoreKey};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 128;
/// Version written, and the only one read.
pub const VERSION: u16 = 1;
/// First bytes of every object.
pub const MAGIC: [u8; 8] = *b"SAPWOODP";

/// What a record says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The payload is the page.
    Page,
    /// Logs only: the key is gone.
    Removal,
    /// Logs only: everything of the namespace that came before is gone.
    Clearing,
}

/// A header that was read and whose own checksum holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the record says.
    pub kind: Kind,
    /// Where the record may stand; 0 is anywhere.
    pub place: u32,
    /// Key.
    pub key: StoreKey,
    /// Descriptor and namespace.
    pub space: Space,
    /// Payload bytes.
    pub payload_bytes: u64,
    /// CRC32C of the payload.
    pub payload_crc: u32,
}

/// Why an object cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Defect {
    /// Shorter than a header.
    #[error("shorter than a header")]
    Short,
    /// Not the magic.
    #[error("not an object of this store")]
    Magic,
    /// The header's checksum does not hold.
    #[error("header checksum")]
    HeaderSum,
    /// Another format version, with a good checksum.
    #[error("format version {0}")]
    Version(u16),
    /// Not a kind this build knows, or not the kind or place expected here.
    #[error("a record of another kind or place")]
    Kind,
    /// The key is not the one asked for.
    #[error("another key")]
    Key,
    /// Descriptor or namespace is not the one asked for.
    #[error("another identity")]
    Identity,
    /// The payload's checksum does not hold.
    #[error("payload checksum")]
    PayloadSum,
    /// Fewer or more payload bytes than the header says.
    #[error("payload length")]
    Length,
}

fn put(out: &mut [u8; HEADER_BYTES], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

fn take<const N: usize>(from: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&from[at..at + N]);
    out
}

fn header_crc(bytes: &[u8; HEADER_BYTES]) -> u32 {
    let crc = crc32c::crc32c(&bytes[..12]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[16..])
}

impl Header {
    /// The header for a payload.
    #[must_use]
    pub fn new(key: StoreKey, space: Space, payload_bytes: u64, payload_crc: u32) -> Header {
        Header { kind: Kind::Page, place: 0, key, space, payload_bytes, payload_crc }
    }

    /// The header of a log record that has no payload.
    #[must_use]
    pub fn mark(kind: Kind, key: StoreKey, space: Space) -> Header {
        Header { kind, place: 0, key, space, payload_bytes: 0, payload_crc: 0 }
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        put(&mut out, 0, &MAGIC);
        put(&mut out, 8, &VERSION.to_le_bytes());
        put(&mut out, 10, &(self.kind as u16).to_le_bytes());
        put(&mut out, 28, &self.place.to_le_bytes());
        put(&mut out, 16, &self.payload_bytes.to_le_bytes());
        put(&mut out, 24, &self.payload_crc.to_le_bytes());
        put(&mut out, 32, self.key.as_bytes());
        put(&mut out, 64, &self.space.descriptor().0);
        put(&mut out, 96, &self.space.namespace().0);
        let crc = header_crc(&out);
        put(&mut out, 12, &crc.to_le_bytes());
        out
    }

    /// Reads a header. Bytes after the first [`HEADER_BYTES`] are not looked at.
    pub fn decode(bytes: &[u8]) -> Result<Header, Defect> {
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(Defect::Short)?;
        if take::<8>(bytes, 0) != MAGIC {
            return Err(Defect::Magic);
        }
        if u32::from_le_bytes(take(bytes, 12)) != header_crc(bytes) {
            return Err(Defect::HeaderSum);
        }
        let version = u16::from_le_bytes(take(bytes, 8));
        if version != VERSION {
            return Err(Defect::Version(version));
        }
        let kind = match u16::from_le_bytes(take(bytes, 10)) {
            0 => Kind::Page,
            1 => Kind::Removal,
            2 => Kind::Clearing,
            _ => return Err(Defect::Kind),
        };
        Ok(Header {
            kind,
            place: u32::from_le_bytes(take(bytes, 28)),
            key: StoreKey::from_bytes(take(bytes, 32)),
            space: Space::new(DescriptorDigest(take(bytes, 64)), NamespaceDigest(take(bytes, 96))),
            payload_bytes: u64::from_le_bytes(take(bytes, 16)),
            payload_crc: u32::from_le_bytes(take(bytes, 24)),
        })
    }

    /// Whether this is the object asked for.
    pub fn check(&self, key: &StoreKey, space: &Space) -> Result<(), Defect> {
        if self.kind != Kind::Page {
            return Err(Defect::Kind);
        }
        if self.key != *key {
            return Err(Defect::Key);
        }
        if self.space != *space {
            return Err(Defect::Identity);
        }
        Ok(())
    }
}

/// CRC32C of a payload in several runs.
#[must_use]
pub fn payload_crc<'a>(runs: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    runs.into_iter().fold(0, crate::backend::crc::crc32c_append)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let space = Space::new(DescriptorDigest([3; 32]), NamespaceDigest([4; 32]));
        Header::new(space.key(&[5; 32]), space, 1 << 20, 0xDEAD_BEEF)
    }

    #[test]
    fn reads_back_and_every_flipped_bit_is_seen() {
        let good = header().encode();
        assert_eq!(Header::decode(&good), Ok(header()));
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bad).is_err(), "bit {bit}");
        }
        for len in 0..HEADER_BYTES {
            assert_eq!(Header::decode(&good[..len]), Err(Defect::Short));
        }
    }

    #[test]
    fn a_future_version_is_told_apart_from_damage() {
        let mut b = header().encode();
        b[8] = 2;
        assert_eq!(Header::decode(&b), Err(Defect::HeaderSum));
        let crc = header_crc(&b);
        b[12..16].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Header::decode(&b), Err(Defect::Version(2)));
    }

    #[test]
    fn kinds_read_back_and_unknown_ones_are_refused() {
        let h = header();
        for kind in [Kind::Page, Kind::Removal, Kind::Clearing] {
            let mark = Header { place: 77, ..Header::mark(kind, h.key, h.space) };
            assert_eq!(Header::decode(&mark.encode()), Ok(mark));
            assert_eq!(mark.check(&h.key, &h.space).is_ok(), kind == Kind::Page);
        }
        let mut b = h.encode();
        b[10] = 3;
        let crc = header_crc(&b);
        b[12..16].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Header::decode(&b), Err(Defect::Kind));
    }

    #[test]
    fn another_key_or_identity_does_not_pass() {
        let h = header();
        let other = Space::new(DescriptorDigest([9; 32]), h.space.namespace());
        assert_eq!(h.check(&h.key, &h.space), Ok(()));
        assert_eq!(h.check(&h.space.key(&[6; 32]), &h.space), Err(Defect::Key));
        assert_eq!(h.check(&h.key, &other), Err(Defect::Identity));
    }

    #[test]
    fn the_checksum_of_runs_is_that_of_the_whole() {
        let data: Vec<u8> = (0..1000u32).map(|i| i as u8).collect();
        assert_eq!(payload_crc([&data[..]]), payload_crc([&data[..1], &data[1..700], &data[700..]]));
        assert_eq!(crc32c::crc32c(b"123456789"), 0xE306_9283);
    }
}
