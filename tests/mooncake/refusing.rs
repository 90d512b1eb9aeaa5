//! A store that refuses the n-th registration, by itself or by asking the real client for something it refuses.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

use sapwood::backend::identity::{NamespaceDigest, StoreKey};
use sapwood::backend::region::{Region, Sharing};
use sapwood::backend::store::{
    Call, Caps, Health, Item, Outcome, RegionToken, RegisterError, Store, StoreEpoch, StoreError, StoreStats,
};

/// See the module.
#[derive(Debug)]
pub(crate) struct Refusing<S> {
    inner: S,
    nth: usize,
    asked: AtomicUsize,
    registered: AtomicUsize,
    /// Hands over read-only memory instead of refusing.
    read_only: bool,
}

impl<S: Store> Refusing<S> {
    pub(crate) fn nth(inner: S, nth: usize) -> Refusing<S> {
        let (asked, registered) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Refusing { inner, nth, asked, registered, read_only: false }
    }

    /// Registrations that stand.
    pub(crate) fn registered(&self) -> usize {
        self.registered.load(SeqCst)
    }
}

impl Refusing<sapwood::backend::store::mem::MemStore> {
    pub(crate) fn into_inner(self: Arc<Self>) -> sapwood::backend::store::mem::MemStore {
        Arc::into_inner(self).unwrap().inner
    }
}

impl Refusing<Shared> {
    pub(crate) fn read_only_nth(inner: Arc<dyn Store>, nth: usize) -> Refusing<Shared> {
        Refusing { read_only: true, ..Refusing::nth(Shared(inner), nth) }
    }
}

/// A store behind an `Arc` is a store.
#[derive(Debug)]
pub(crate) struct Shared(Arc<dyn Store>);

macro_rules! forward {
    ($ty:ty, $($generics:tt)*) => {
        impl $($generics)* Store for $ty {
            fn caps(&self) -> Caps {
                self.inner().caps()
            }
            fn register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
                self.on_register(region)
            }
            fn unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
                self.on_unregister(token)
            }
            fn query(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
                self.inner().query(keys, call)
            }
            fn get(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
                self.inner().get(items, call)
            }
            fn put(&self, items: &[Item], call: &Call) -> Vec<Outcome> {
                self.inner().put(items, call)
            }
            fn remove(&self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
                self.inner().remove(keys, call)
            }
            fn clear(&self, namespace: NamespaceDigest, call: &Call) -> Result<u64, StoreError> {
                self.inner().clear(namespace, call)
            }
            fn sync(&self, call: &Call) -> Result<(), StoreError> {
                self.inner().sync(call)
            }
            fn health(&self) -> Health {
                self.inner().health()
            }
            fn stats(&self) -> StoreStats {
                self.inner().stats()
            }
            fn epoch(&self) -> StoreEpoch {
                self.inner().epoch()
            }
            fn close(&self, deadline: Instant) -> Result<(), StoreError> {
                self.inner().close(deadline)
            }
        }
    };
}

impl Shared {
    fn inner(&self) -> &dyn Store {
        &*self.0
    }

    fn on_register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        self.0.register(region)
    }

    fn on_unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.0.unregister(token)
    }
}

impl<S: Store> Refusing<S> {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    fn on_register(&self, region: &Arc<Region>) -> Result<RegionToken, RegisterError> {
        let refuse = self.asked.fetch_add(1, SeqCst) + 1 == self.nth;
        if refuse && !self.read_only {
            return Err(RegisterError::Refused { code: -1 });
        }
        let token = match refuse {
            true => self.inner.register(&crate::kit::region(region.len(), Sharing::SharedReadOnly))?,
            false => self.inner.register(region)?,
        };
        self.registered.fetch_add(1, SeqCst);
        Ok(token)
    }

    fn on_unregister(&self, token: RegionToken) -> Result<(), RegisterError> {
        self.inner.unregister(token)?;
        self.registered.fetch_sub(1, SeqCst);
        Ok(())
    }
}

forward!(Shared,);
forward!(Refusing<S>, <S: Store>);
