//! sapwood the way a scheduler drives it: look up and lock, allocate (evicting if need be), insert, unlock.

use std::hint::black_box;

use sapwood::base::{NamespaceId, PageId};
use sapwood::key::Key;
use sapwood::pool::PagePool;
use sapwood::tree::{DeviceEviction, InsertComponents, InsertOpts, InsertOut, Tree, TreeConfig, Unbacked};

use crate::Peer;

pub struct Ours {
    tree: Tree,
    pool: PagePool,
    pages: Vec<PageId>,
    out: InsertOut,
    gone: DeviceEviction,
}

fn key(tokens: &[u32]) -> Key<'_> {
    Key::new(NamespaceId::DEFAULT, tokens)
}

impl Ours {
    pub fn new(page: usize, capacity_tokens: usize) -> Ours {
        let config = TreeConfig { page_size: page as u32, ..TreeConfig::default() };
        Ours {
            tree: Tree::new(config).expect("a page size in range"),
            pool: PagePool::new((capacity_tokens / page) as u32),
            pages: Vec::new(),
            out: InsertOut::default(),
            gone: DeviceEviction::default(),
        }
    }

    fn evict_pages(&mut self, pages: u32) {
        self.gone.clear();
        self.tree.evict_device(pages, Unbacked::Delete, &mut self.gone);
        self.pool.free(&self.gone.freed_device).expect("pages of this pool");
    }
}

impl Peer for Ours {
    type Prompt = Vec<u32>;
    const LEAVES_OUT: &'static str = "nothing of the below: tokens, page ids, exact LRU, locks, host state";

    fn page(&self) -> usize {
        self.tree.page_size() as usize
    }

    fn prepare(&self, tokens: &[u32]) -> Vec<u32> {
        tokens.to_vec()
    }

    fn find(&mut self, prompt: &Vec<u32>) -> usize {
        self.pages.clear();
        let (found, lock, _) = self.tree.match_and_lock(key(prompt), &mut self.pages);
        self.tree.unlock(lock).expect("our own lock");
        black_box(&self.pages);
        found.device_pages as usize * self.page()
    }

    fn put(&mut self, prompt: &Vec<u32>, _hit: usize) {
        self.pages.clear();
        let (found, lock, _) = self.tree.match_and_lock(key(prompt), &mut self.pages);
        let need = key(prompt).pages(self.tree.page_size()) - found.device_pages;
        let short = need.saturating_sub(self.pool.free_pages());
        if short > 0 {
            self.evict_pages(short);
        }
        assert!(self.pool.alloc(need, &mut self.pages), "the workload fits");
        let opts = InsertOpts { priority: 0, count_hits_from: Some(found.device_pages), names: None };
        let owned = found.device_pages;
        let components = InsertComponents::default();
        let done =
            self.tree.insert_from(&lock, key(prompt), &self.pages, owned, components, opts, &mut self.out);
        done.expect("a prompt that goes on where the lock ends");
        self.tree.unlock(lock).expect("our own lock");
    }

    fn evict(&mut self, oldest: &Vec<u32>) {
        self.evict_pages((oldest.len() / self.page()) as u32);
    }

    fn held_tokens(&self) -> Option<usize> {
        let s = self.tree.stats();
        let held = s.device_pages_evictable + s.device_pages_protected;
        assert_eq!(
            held + self.pool.free_pages(),
            self.pool.capacity(),
            "tokens in the tree + free = capacity"
        );
        Some(held as usize * self.page())
    }
}
