//! Adapters of the rivals, each as its documentation says it is driven.

use std::hint::black_box;

use dynamo_kv_router::protocols as dp;
use kvbm_logical::{BlockManager, BlockRegistry, KvbmSequenceHashProvider, SequenceHash};

use crate::Peer;

pub struct TokenTree(kv_index::TokenTree, kv_index::TenantId);

impl TokenTree {
    pub fn new() -> TokenTree {
        TokenTree(kv_index::TokenTree::new(), "w0".into())
    }
}

impl Peer for TokenTree {
    type Prompt = Vec<u32>;
    const LEAVES_OUT: &'static str = "page ids, locks, tiers; evicts approximately";

    fn page(&self) -> usize {
        16
    }

    fn prepare(&self, tokens: &[u32]) -> Vec<u32> {
        tokens.to_vec()
    }

    fn find(&mut self, prompt: &Vec<u32>) -> usize {
        self.0.match_prefix_with_counts(prompt).matched_token_count
    }

    fn put(&mut self, prompt: &Vec<u32>, _hit: usize) {
        self.0.insert_tokens(prompt, "w0");
    }

    fn evict(&mut self, oldest: &Vec<u32>) {
        let held = self.0.tenant_token_size(&self.1);
        self.0.evict_tenant(&self.1, held.saturating_sub(oldest.len()));
    }
}

pub struct Chain {
    index: kv_index::ChainIndex,
    worker: u32,
    blocks: kv_index::ChainBlockMap,
    page: usize,
}

impl Chain {
    pub fn new(page: usize) -> Chain {
        let index = kv_index::ChainIndex::with_max_workers(64);
        let worker = index.intern_worker("w0").expect("one worker");
        Chain { index, worker, blocks: Default::default(), page }
    }
}

pub struct ChainPrompt {
    content: Vec<kv_index::ContentHash>,
    blocks: Vec<kv_index::StoredBlock>,
    sequence: Vec<kv_index::SequenceHash>,
}

impl Peer for Chain {
    type Prompt = ChainPrompt;
    const LEAVES_OUT: &'static str = "tokens (hashes only), page ids, locks, choice of victims";

    fn page(&self) -> usize {
        self.page
    }

    fn prepare(&self, tokens: &[u32]) -> ChainPrompt {
        let content = kv_index::compute_request_content_hashes(tokens, self.page);
        let sequence = kv_index::request_prefix_hashes(&content);
        let block = |(&content_hash, &seq_hash)| kv_index::StoredBlock { seq_hash, content_hash };
        let blocks = content.iter().zip(&sequence).map(block).collect();
        ChainPrompt { content, blocks, sequence }
    }

    fn find(&mut self, prompt: &ChainPrompt) -> usize {
        let mut best = 0;
        self.index.score_into(&prompt.content, |hash| hash.0, false, |_, score| best = best.max(score));
        best as usize * self.page
    }

    fn put(&mut self, prompt: &ChainPrompt, hit: usize) {
        let known = hit / self.page;
        if known < prompt.blocks.len() {
            let parent = known.checked_sub(1).map(|i| prompt.sequence[i]);
            let stored =
                self.index.apply_stored(self.worker, &prompt.blocks[known..], parent, &mut self.blocks);
            stored.expect("a chain that goes on");
        }
    }

    fn evict(&mut self, oldest: &ChainPrompt) {
        self.index.apply_removed(self.worker, &oldest.sequence, &mut self.blocks);
    }
}

pub struct Dynamo(dynamo_kv_router::RadixTree, usize);

impl Dynamo {
    pub fn new(page: usize) -> Dynamo {
        Dynamo(dynamo_kv_router::RadixTree::new(), page)
    }

    fn event(data: dp::KvCacheEventData) -> dp::RouterEvent {
        dp::RouterEvent::new(1, dp::KvCacheEvent { event_id: 1, dp_rank: 0, data })
    }
}

impl Peer for Dynamo {
    type Prompt = (Vec<dp::LocalBlockHash>, Vec<u64>);
    const LEAVES_OUT: &'static str = "tokens (hashes only), page ids, locks, choice of victims";

    fn page(&self) -> usize {
        self.1
    }

    fn prepare(&self, tokens: &[u32]) -> Self::Prompt {
        let options = dp::BlockHashOptions::default();
        let local = dp::compute_block_hash_for_seq(tokens, self.1 as u32, options);
        let sequence = dp::compute_seq_hash_for_block(&local);
        (local, sequence)
    }

    fn find(&mut self, prompt: &Self::Prompt) -> usize {
        let found = self.0.find_matches(prompt.0.clone(), false);
        found.scores.values().copied().max().unwrap_or(0) as usize * self.1
    }

    fn put(&mut self, prompt: &Self::Prompt, hit: usize) {
        let known = hit / self.1;
        if known == prompt.0.len() {
            return;
        }
        let block = |(&tokens_hash, &hash): (&dp::LocalBlockHash, &u64)| dp::KvCacheStoredBlockData {
            block_hash: dp::ExternalSequenceBlockHash(hash),
            tokens_hash,
            mm_extra_info: None,
        };
        let blocks = prompt.0[known..].iter().zip(&prompt.1[known..]).map(block).collect();
        let parent_hash = known.checked_sub(1).map(|i| dp::ExternalSequenceBlockHash(prompt.1[i]));
        let start_position = Some(known as u32);
        let data = dp::KvCacheStoreData { parent_hash, start_position, blocks };
        self.0.apply_event(Dynamo::event(dp::KvCacheEventData::Stored(data))).expect("a chain that goes on");
    }

    fn evict(&mut self, oldest: &Self::Prompt) {
        let block_hashes = oldest.1.iter().rev().map(|&hash| dp::ExternalSequenceBlockHash(hash)).collect();
        let data = dp::KvCacheRemoveData { block_hashes };
        // A prompt that was never stored is no error here.
        let _ = self.0.apply_event(Dynamo::event(dp::KvCacheEventData::Removed(data)));
    }
}

pub struct Kvbm(BlockManager<()>, usize);

impl Kvbm {
    pub fn new(page: usize, capacity_tokens: usize) -> Kvbm {
        use kvbm_logical::manager::FrequencyTrackingCapacity;
        let tracker = FrequencyTrackingCapacity::default().create_tracker();
        let registry = BlockRegistry::builder().frequency_tracker(tracker).build();
        let builder = BlockManager::<()>::builder().block_count(capacity_tokens / page).block_size(page);
        Kvbm(builder.registry(registry).with_lru_backend().build().expect("a capacity"), page)
    }
}

impl Peer for Kvbm {
    type Prompt = (Vec<dynamo_tokens::TokenBlock>, Vec<SequenceHash>);
    const LEAVES_OUT: &'static str = "tokens (hashes only), a tree; evicts on allocation";

    fn page(&self) -> usize {
        self.1
    }

    fn prepare(&self, tokens: &[u32]) -> Self::Prompt {
        let sequence = dynamo_tokens::TokenBlockSequence::from_slice(tokens, self.1 as u32, Some(1));
        let blocks = sequence.blocks().to_vec();
        let hashes = blocks.iter().map(|block| block.kvbm_sequence_hash()).collect();
        (blocks, hashes)
    }

    fn find(&mut self, prompt: &Self::Prompt) -> usize {
        let found = self.0.match_blocks(&prompt.1);
        let ids: Vec<usize> = found.iter().map(|block| block.block_id()).collect();
        black_box(ids).len() * self.1
    }

    fn put(&mut self, prompt: &Self::Prompt, _hit: usize) {
        let held = self.0.match_blocks(&prompt.1);
        let known = held.len();
        if known == prompt.1.len() {
            return;
        }
        let free = self.0.allocate_blocks(prompt.1.len() - known).expect("the workload fits");
        let complete = |(block, tokens): (_, _)| {
            let block: kvbm_logical::MutableBlock<()> = block;
            block.complete(tokens).ok().expect("a block of this size")
        };
        let registered =
            self.0.register_blocks(free.into_iter().zip(&prompt.0[known..]).map(complete).collect());
        // Tail first, as engines do, so that prefixes outlive suffixes.
        registered.into_iter().rev().for_each(drop);
        held.into_iter().rev().for_each(drop);
    }

    fn evict(&mut self, _oldest: &Self::Prompt) {}
}
