//! Namespaces: who may share a prefix with whom.

use sha2::{Digest as _, Sha256};

use crate::base::NamespaceId;
use crate::base::containers::Map;
use crate::base::limits::{NAMESPACE_FIELD_BYTES_MAX, NAMESPACES_MAX};

/// The identity that separates tenants. Each field is absent, empty or set, and the three never coincide.
///
/// Without a `user_key` the hash-chain seed is byte-compatible with the reference's (`extra_key` = `adapter`,
/// `cache_salt` = `salt`). A `user_key` has a frame of its own: free text must never reach the KV of an adapter whose
/// name it spells (sgl#24638), so an embedder whose `extra_key` is free text chooses here what it meant.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Namespace {
    /// Adapter (LoRA) the KV was computed with.
    pub adapter: Option<String>,
    /// Tenant salt.
    pub salt: Option<String>,
    /// Free text of the caller.
    pub user_key: Option<String>,
}

/// Why a namespace was not interned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NamespaceError {
    /// A field is longer than the limit.
    #[error("namespace field of {bytes} bytes, limit {NAMESPACE_FIELD_BYTES_MAX}")]
    FieldTooLong {
        /// Its length.
        bytes: usize,
    },
    /// The table is full.
    #[error("more than {NAMESPACES_MAX} namespaces")]
    TooMany,
}

/// Interner of namespaces. Ids are handed out in order of first use, so equal histories give equal ids.
#[derive(Clone, Debug)]
pub struct Namespaces {
    ids: Map<Namespace, NamespaceId>,
    all: Vec<(Namespace, Option<[u8; 32]>)>,
}

impl Default for Namespaces {
    fn default() -> Self {
        Namespaces::new()
    }
}

impl Namespaces {
    /// An interner that knows [`NamespaceId::DEFAULT`] (all fields absent).
    #[must_use]
    pub fn new() -> Namespaces {
        let mut ids = Map::default();
        ids.insert(Namespace::default(), NamespaceId::DEFAULT);
        Namespaces { ids, all: vec![(Namespace::default(), None)] }
    }

    /// The id of `ns`, made on first use. O(bytes of the fields).
    ///
    /// # Errors
    /// A field too long, or too many namespaces; nothing is changed.
    pub fn intern(&mut self, ns: &Namespace) -> Result<NamespaceId, NamespaceError> {
        if let Some(&id) = self.ids.get(ns) {
            return Ok(id);
        }
        for field in [&ns.adapter, &ns.salt, &ns.user_key].into_iter().flatten() {
            if field.len() > NAMESPACE_FIELD_BYTES_MAX {
                return Err(NamespaceError::FieldTooLong { bytes: field.len() });
            }
        }
        if self.all.len() >= NAMESPACES_MAX {
            return Err(NamespaceError::TooMany);
        }
        let id = NamespaceId(self.all.len() as u32);
        self.all.push((ns.clone(), seed_of(ns)));
        self.ids.insert(ns.clone(), id);
        Ok(id)
    }

    /// The fields behind an id.
    #[must_use]
    pub fn get(&self, id: NamespaceId) -> Option<&Namespace> {
        self.all.get(id.0 as usize).map(|(ns, _)| ns)
    }

    /// Seed of the page-hash chain; `None` for the default namespace (its chain starts without one) and for an id
    /// that was never handed out.
    #[must_use]
    pub fn seed(&self, id: NamespaceId) -> Option<[u8; 32]> {
        self.all.get(id.0 as usize).and_then(|(_, seed)| *seed)
    }

    /// Number of namespaces, the default one included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Never true: the default namespace is always there.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }
}

pub(super) fn frame(hasher: &mut Sha256, field: Option<&str>) {
    match field {
        None => hasher.update([0u8]),
        Some(text) => {
            hasher.update([1u8]);
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
}

/// The reference frames (extra_key, cache_salt); a user key adds a third field under a tag of ours.
fn seed_of(ns: &Namespace) -> Option<[u8; 32]> {
    if *ns == Namespace::default() {
        return None;
    }
    let mut hasher = Sha256::new();
    if ns.user_key.is_some() {
        hasher.update(b"sapwood-user-namespace-v1");
        frame(&mut hasher, ns.user_key.as_deref());
    } else {
        hasher.update(b"sglang-cache-namespace-v1");
    }
    frame(&mut hasher, ns.adapter.as_deref());
    frame(&mut hasher, ns.salt.as_deref());
    Some(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ns(adapter: Option<&str>, salt: Option<&str>, user_key: Option<&str>) -> Namespace {
        let own = |s: Option<&str>| s.map(str::to_owned);
        Namespace { adapter: own(adapter), salt: own(salt), user_key: own(user_key) }
    }

    #[test]
    fn absent_empty_and_set_never_meet() {
        let fields = [None, Some(""), Some("a"), Some("b"), Some("ab")];
        let mut table = Namespaces::new();
        let mut seeds = std::collections::BTreeSet::new();
        let mut count = 0;
        for a in fields {
            for s in fields {
                for u in fields {
                    let id = table.intern(&ns(a, s, u)).unwrap();
                    assert_eq!(table.intern(&ns(a, s, u)), Ok(id));
                    assert_eq!(table.get(id), Some(&ns(a, s, u)));
                    assert!(seeds.insert(table.seed(id)), "seed of {a:?} {s:?} {u:?} is not its own");
                    count += 1;
                }
            }
        }
        assert_eq!(table.len(), count);
        assert_eq!(table.get(NamespaceId(count as u32)), None);
    }

    #[test]
    fn long_fields_are_refused() {
        let mut table = Namespaces::new();
        let long = "x".repeat(NAMESPACE_FIELD_BYTES_MAX + 1);
        assert_eq!(
            table.intern(&ns(None, Some(&long), None)),
            Err(NamespaceError::FieldTooLong { bytes: NAMESPACE_FIELD_BYTES_MAX + 1 })
        );
        assert_eq!(table.len(), 1);
    }
}
