//! What a page of a group leaves under its own name: a link, which says where the bytes of the page are and how
//! they sum up.
//!
//! ```text
//! 0 magic "SAPWOODL"   8 version u16   10 members u16   12 zero u32   16 descriptor [32]   48 namespace [32]
//! 80 a member: key [32]   payload bytes u32   payload crc32c u32
//! ```
//! Little endian. All pages of a group have the same link. The group is named by the digest of it, so a link can
//! not lead to other bytes than those it was written with.

use sha2::{Digest as _, Sha256};

use crate::backend::identity::{DescriptorDigest, LINKS, NamespaceDigest, Space, StoreKey};
use crate::backend::store::batch::Item;

const MAGIC: [u8; 8] = *b"SAPWOODL";
const VERSION: u16 = 1;
const HEAD_BYTES: usize = 80;
const MEMBER_BYTES: usize = 40;

/// Pages of a group at most.
pub(super) const MEMBERS_MAX: usize = 64;

/// Pages of so many bytes that a group may have. Each of them leaves a link that names all of them, so the links of a
/// group grow with the square of it: they shall not be more than an eighth of its bytes.
pub(super) fn members_max(page_bytes: usize) -> usize {
    (page_bytes / (8 * MEMBER_BYTES)).min(MEMBERS_MAX)
}

/// The identity of links. Whose they are, the tag in their key says.
pub(super) fn space() -> Space {
    Space::new(LINKS, NamespaceDigest::DEFAULT)
}

/// Bytes of the link to a group of so many pages.
fn bytes_of(members: usize) -> usize {
    HEAD_BYTES + members * MEMBER_BYTES
}

/// Whether a link can have so many bytes.
pub(super) fn is_length(bytes: usize) -> bool {
    (2..=MEMBERS_MAX).contains(&(bytes.saturating_sub(HEAD_BYTES) / MEMBER_BYTES))
        && bytes_of((bytes - HEAD_BYTES) / MEMBER_BYTES) == bytes
}

/// A page of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Member {
    pub(super) key: StoreKey,
    pub(super) payload_bytes: u32,
    pub(super) payload_crc: u32,
}

/// A group: pages of one space, one behind the other in one object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Group {
    /// Identity of the pages.
    pub(super) page_space: Space,
    pub(super) members: Vec<Member>,
    /// Name of the object.
    pub(super) key: StoreKey,
    /// Identity of the object.
    pub(super) space: Space,
}

impl Group {
    pub(super) fn of(page_space: Space, members: Vec<Member>) -> Group {
        let digest = Sha256::new()
            .chain_update(b"sapwood-group-v1")
            .chain_update(page_space.descriptor().0)
            .finalize();
        let space = Space::new(DescriptorDigest(digest.into()), page_space.namespace());
        let mut group = Group { page_space, members, key: StoreKey::from_bytes([0; 32]), space };
        group.key = space.key(&Sha256::digest(group.link()).into());
        group
    }

    /// Bytes of the object.
    pub(super) fn bytes(&self) -> usize {
        self.members.iter().map(|m| m.payload_bytes as usize).sum()
    }

    pub(super) fn position(&self, key: &StoreKey) -> Option<usize> {
        self.members.iter().position(|m| m.key == *key)
    }

    /// Whether the page at this position is what the item asks for.
    pub(super) fn is(&self, position: usize, item: &Item) -> bool {
        self.page_space == item.space && self.members[position].payload_bytes as usize == item.len()
    }

    pub(super) fn link_bytes(&self) -> usize {
        bytes_of(self.members.len())
    }

    /// The link that each of its pages leaves.
    pub(super) fn link(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.link_bytes());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        // At most [`MEMBERS_MAX`].
        out.extend_from_slice(&(self.members.len() as u16).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.page_space.descriptor().0);
        out.extend_from_slice(&self.page_space.namespace().0);
        for m in &self.members {
            out.extend_from_slice(m.key.as_bytes());
            out.extend_from_slice(&m.payload_bytes.to_le_bytes());
            out.extend_from_slice(&m.payload_crc.to_le_bytes());
        }
        out
    }

    /// Reads a link found under `key`. Whatever is not exactly one is `None`.
    pub(super) fn read(link: &[u8], key: &StoreKey) -> Option<Group> {
        let array = |at: usize| link.get(at..).and_then(|b| b.first_chunk::<32>()).copied();
        let word = |at: usize| link.get(at..).and_then(|b| b.first_chunk()).map(|b| u32::from_le_bytes(*b));
        if !is_length(link.len())
            || link[..8] != MAGIC
            || link[8..10] != VERSION.to_le_bytes()
            || word(12)? != 0
        {
            return None;
        }
        let count = (link.len() - HEAD_BYTES) / MEMBER_BYTES;
        if link[10..12] != (count as u16).to_le_bytes() {
            return None;
        }
        let page_space = Space::new(DescriptorDigest(array(16)?), NamespaceDigest(array(48)?));
        let members = (0..count)
            .map(|i| {
                let at = HEAD_BYTES + i * MEMBER_BYTES;
                let key = StoreKey::from_bytes(array(at)?);
                Some(Member { key, payload_bytes: word(at + 32)?, payload_crc: word(at + 36)? })
            })
            .collect::<Option<Vec<_>>>()?;
        let group = Group::of(page_space, members);
        group.position(key).map(|_| group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(n: usize) -> Group {
        let space = Space::new(DescriptorDigest([3; 32]), NamespaceDigest([4; 32]));
        let member = |i: usize| Member {
            key: space.key(&[i as u8; 32]),
            payload_bytes: 1000 + i as u32,
            payload_crc: 77 * i as u32,
        };
        Group::of(space, (0..n).map(member).collect())
    }

    #[test]
    fn links_read_back_under_the_names_of_their_pages_only() {
        for n in [2, 3, 64] {
            let g = group(n);
            let link = g.link();
            assert!(link.len() == g.link_bytes() && is_length(link.len()));
            for m in &g.members {
                assert_eq!(Group::read(&link, &m.key).as_ref(), Some(&g));
            }
            assert_eq!(Group::read(&link, &g.key), None);
        }
        for n in [0, 1, 65] {
            assert!(!is_length(bytes_of(n)));
        }
        for len in (0..HEAD_BYTES).chain([bytes_of(3) - 1, bytes_of(3) + 1, 4096, 65_536, usize::MAX]) {
            assert!(!is_length(len), "{len}");
        }
    }

    #[test]
    fn no_byte_of_a_link_can_change_and_lead_to_the_same_group() {
        let g = group(3);
        let (good, key) = (g.link(), g.members[0].key);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(Group::read(&bad, &key).is_none_or(|other| other.key != g.key), "byte {at}");
            assert_eq!(Group::read(&good[..at], &key), None);
        }
    }

    #[test]
    fn links_stay_small_beside_their_pages() {
        assert_eq!([0, 600, 640, 4096, 65_536, 1 << 20].map(members_max), [0, 1, 2, 12, 64, 64]);
        for page_bytes in [640, 1000, 4096, 20_000, 65_536] {
            let n = members_max(page_bytes);
            assert!(n * n * MEMBER_BYTES <= n * page_bytes / 8);
        }
    }

    /// Written by an independent implementation (hashlib) of the documented bytes.
    #[test]
    fn golden_name() {
        assert_eq!(group(2).key.hex(), GOLDEN);
    }

    const GOLDEN: &str = "d0a03409fb940f31c4780d68538c0febce5043c9e9b9b418bd6e0f710d273213";
}
