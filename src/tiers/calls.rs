//! The calls a scheduler makes for a request, from match to finish.

use super::core::{Core, CoreError};
use super::oplog::Op;
use super::outcome::{Alloc, Checkpoint, MatchInfo, Refusal};
use super::request::{HostPart, Request, RequestId};
use crate::base::{Fence, NamespaceId, Tier, Time};
use crate::key::Key;
use crate::tree::{Component, InsertComponents, InsertOpts, TreeError};

impl Core {
    /// Opens a request. It holds nothing until it matches or allocates.
    pub fn request(&mut self, namespace: NamespaceId) -> RequestId {
        self.record(|| Op::Request(namespace));
        RequestId(self.requests.insert(Request::new(namespace)))
    }

    /// The request's page table: pages shared with the tree first, then its own. One page per `page_size` tokens.
    pub fn pages(&self, id: RequestId) -> Result<&[crate::base::PageId], CoreError> {
        Ok(&self.request_ref(id)?.pages)
    }

    /// How many pages at the head of the request's table belong to the tree; the rest is the request's own.
    pub fn shared_pages(&self, id: RequestId) -> Result<u32, CoreError> {
        Ok(self.request_ref(id)?.shared)
    }

    /// The request's namespace.
    pub fn namespace_of(&self, id: RequestId) -> Result<NamespaceId, CoreError> {
        Ok(self.request_ref(id)?.namespace)
    }

    /// Finds the longest cached prefix of `tokens` and holds it for the request: the device part stands in its
    /// page table, the restorable part is pinned until [`load_back`](Core::load_back) or the end of the request.
    /// Whole pages only. Pass one token less than the prompt if at least one must be computed. A request that
    /// matches again gives up what it held before; it must not own pages, unless a load failed under it: those are
    /// then given back. O(tokens).
    pub fn match_prefix(&mut self, id: RequestId, tokens: &[u32]) -> Result<MatchInfo, CoreError> {
        self.record(|| Op::Match(id, tokens.to_vec()));
        let request = self.request_ref(id)?;
        let own_pages = request.own().len() as u32;
        if own_pages > 0 && !request.load_failed {
            return Err(CoreError::RequestHasPages { own_pages });
        }
        let namespace = request.namespace;
        // Room for what it will compute, too.
        let mut pages = Vec::with_capacity(tokens.len() / self.config.page_size as usize + 1);
        let (found, lock, pin) = self.tree.match_and_lock(Key::new(namespace, tokens), &mut pages);
        self.release_holdings(id)?;
        self.note_blocked(found.node);
        self.stats.matched_device_tokens += self.tokens_of(found.device_pages);
        self.stats.matched_host_tokens += self.tokens_of(found.host_pages);
        self.digest.mix(u64::from(found.device_pages) << 32 | u64::from(found.host_pages));
        let depth_tokens = self.tokens_of(found.depth_pages());
        let request = self.request_mut(id)?;
        let lost_tokens = request.counted_on_tokens.saturating_sub(depth_tokens);
        if lost_tokens > 0 {
            (request.prefetch_not_before, request.counted_on_tokens) = (Time::ZERO, 0);
        }
        request.prompt_tokens = request.prompt_tokens.max(tokens.len() as u32);
        request.shared = pages.len() as u32;
        request.pages = pages;
        request.lock = Some(lock);
        request.node = Some(found.node);
        request.host = pin.map(|pin| HostPart { pin, node: found.node, pages: found.host_pages });
        Ok(MatchInfo {
            device_tokens: self.tokens_of(found.device_pages),
            host_tokens: self.tokens_of(found.host_pages),
            node: found.node,
            lost_tokens,
        })
    }

    /// Appends `pages` fresh pages to the request's table, evicting if need be, with as many window pages, and a state
    /// slot if it owns none: a request needs one before it computes, also where it needs no page (after a checkpoint
    /// that published its state). All or nothing; never waits. On a refusal with pages coming, try again after the
    /// next event. O(pages granted + pages evicted x log nodes).
    pub fn alloc(&mut self, id: RequestId, pages: u32) -> Result<Alloc, CoreError> {
        self.record(|| Op::Alloc(id, pages));
        let request = self.request_ref(id)?;
        if request.match_ended {
            return Err(CoreError::MatchEnded);
        }
        let owns_state = request.state.is_some();
        let room = self.make_device_room(pages);
        self.settle_components();
        if !room {
            self.refused(Refusal::NoDevicePages);
            return Ok(Alloc::Refused {
                short_pages: pages - self.device.free_pages(),
                coming_pages: self.backups.held_pages(),
            });
        }
        let (mut window, mut state) = (Vec::new(), Vec::new());
        let windows = if self.components.has(Component::Window) { pages } else { 0 };
        let states = u32::from(self.components.has(Component::State) && !owns_state);
        let granted = self.alloc_component(Component::Window, Tier::Device, windows, &mut window)
            && self.alloc_component(Component::State, Tier::Device, states, &mut state);
        if !granted {
            self.free_component(Component::Window, Tier::Device, &window);
            self.refused(Refusal::NoComponentPages);
            let coming_pages = self.backups.held_copies();
            return Ok(Alloc::Refused { short_pages: windows.max(states), coming_pages });
        }
        self.hold_on(id);
        let request = self.requests.get_mut(id.0).ok_or(CoreError::UnknownRequest)?;
        request.window.append(&mut window);
        request.state = request.state.or(state.pop());
        if !self.device.alloc(pages, &mut request.pages) {
            self.violation("device room was made and is not there");
            return Ok(Alloc::Refused { short_pages: pages, coming_pages: 0 });
        }
        self.let_in(id);
        self.stats.allocated_pages += u64::from(pages);
        self.ahead_due = true;
        self.digest.mix(u64::from(pages));
        Ok(Alloc::Granted)
    }

    /// Publishes the whole pages of `tokens`, whose KV is written once `last_use` has passed, and moves the
    /// request's lock to their end. Pages that the tree had already go back to the pool; the table then names the
    /// tree's. `tokens` are all tokens of the request from its first. Where there are states, the one in the request's
    /// slot must be that at the end of `tokens`; if that is a page border, it is published too. While a load in flight
    /// brings something of what would be published, the checkpoint is refused with [`Refusal::LoadPending`] and the request
    /// keeps its pages: try again when that load has ended. O(tokens).
    pub fn checkpoint(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        last_use: Fence,
    ) -> Result<Checkpoint, CoreError> {
        self.record(|| Op::Checkpoint(id, tokens.to_vec(), last_use));
        self.checkpoint_inner(id, tokens, last_use)
    }

    fn checkpoint_inner(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        last_use: Fence,
    ) -> Result<Checkpoint, CoreError> {
        self.fence = self.fence.and(last_use);
        let request = self.request_ref(id)?;
        request.check_usable()?;
        let page_size = self.config.page_size as usize;
        let whole = (tokens.len() / page_size) as u32;
        let published = request.shared as usize * page_size;
        if tokens.len() < published {
            return Err(CoreError::TokensShorter { tokens: tokens.len(), published });
        }
        let pages = request.pages.len() as u32;
        if whole > pages {
            return Err(CoreError::PagesMissing { tokens: tokens.len(), needed_pages: whole, pages });
        }
        if !request.loads.is_empty() {
            let refused = Some(self.refused(Refusal::LoadPending));
            return Ok(Checkpoint { published_tokens: published as u64, duplicate_pages: 0, refused });
        }
        // A request that only hit still counts: its use is what makes a node due for a backup.
        if whole == request.shared && request.counted >= whole {
            return Ok(Checkpoint { published_tokens: published as u64, duplicate_pages: 0, refused: None });
        }
        let state_fits = tokens.len() == whole as usize * page_size;
        match self.publish(id, &tokens[..whole as usize * page_size], whole, state_fits) {
            Ok(duplicate_pages) => {
                Ok(Checkpoint { published_tokens: self.tokens_of(whole), duplicate_pages, refused: None })
            }
            // Another request loads what this one computed: its pages can only go in when that load has ended.
            Err(CoreError::Tree(TreeError::LoadInFlight(_))) => {
                let refused = Some(self.refused(Refusal::LoadPending));
                Ok(Checkpoint { published_tokens: published as u64, duplicate_pages: 0, refused })
            }
            Err(error) => Err(error),
        }
    }

    /// `state_fits`: the request's state is the one at the end of `tokens`.
    fn publish(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        whole: u32,
        state_fits: bool,
    ) -> Result<u32, CoreError> {
        self.let_in(id);
        let request = self.requests.get_mut(id.0).ok_or(CoreError::UnknownRequest)?;
        let computed = (whole - request.shared) as usize;
        let state = request.state.filter(|_| state_fits && computed > 0);
        let window_from = request.own_window_from();
        let windows = (whole.saturating_sub(window_from) as usize).min(request.window.len());
        let given = InsertComponents { window_from, window: &request.window[..windows], state };
        let key = Key::new(request.namespace, tokens);
        let opts = InsertOpts {
            count_hits_from: Some(request.counted),
            names: request.names.as_ref(),
            ..InsertOpts::default()
        };
        let mut out = std::mem::take(&mut self.scratch.inserted);
        let pages = &request.pages[..whole as usize];
        // What the request holds was compared when it was matched or published.
        let done = match &request.lock {
            Some(held) => self.tree.insert_from(held, key, pages, request.shared, given, opts, &mut out)?,
            None => self.tree.insert_with(key, pages, request.shared, given, opts, &mut out)?,
        };
        request.window.drain(..windows);
        if state.is_some() {
            request.state = None;
        }
        request.pages[request.shared as usize..whole as usize].copy_from_slice(&out.canonical);
        request.shared = whole;
        request.counted = whole;
        request.node = Some(done.node);
        if let Some(session) = request.session
            && self.tree.refer(session, done.node).is_err()
        {
            request.session = None;
        }
        request.lock = match request.lock.take() {
            None => Some(self.tree.lock(done.node)?),
            Some(held) => match self.tree.move_lock(held, done.node) {
                Ok(moved) => Some(moved),
                Err((error, held)) => {
                    request.lock = Some(held);
                    return Err(error.into());
                }
            },
        };
        self.digest.mix(u64::from(done.new_pages) << 32 | u64::from(done.revived_pages));
        self.free_device(&out.returned);
        self.settle_components();
        match done.due {
            Some(node) => self.note_due(node),
            None => self.catch_up_components(done.node),
        }
        self.store_reused(done.node);
        let duplicate_pages = out.returned.len() as u32;
        self.scratch.inserted = out;
        Ok(duplicate_pages)
    }

    /// Publishes as [`checkpoint`](Core::checkpoint), gives back the pages behind the last whole page, lets go of
    /// everything and closes the request.
    pub fn finish(
        &mut self,
        id: RequestId,
        tokens: &[u32],
        last_use: Fence,
    ) -> Result<Checkpoint, CoreError> {
        self.record(|| Op::Finish(id, tokens.to_vec(), last_use));
        let published = self.checkpoint_inner(id, tokens, last_use)?;
        self.foretell(id, tokens.len());
        self.close(id, last_use)?;
        Ok(published)
    }

    /// Lets go of everything without publishing, and closes the request. Loads and prefetches in flight end on
    /// their own; their pages are theirs.
    pub fn abort(&mut self, id: RequestId, last_use: Fence) -> Result<(), CoreError> {
        self.record(|| Op::Abort(id, last_use));
        self.close(id, last_use)
    }

    fn close(&mut self, id: RequestId, last_use: Fence) -> Result<(), CoreError> {
        self.fence = self.fence.and(last_use);
        self.request_ref(id)?;
        self.let_in(id);
        self.release_holdings(id)?;
        if let Some(request) = self.requests.remove(id.0)
            && let Some(op) = request.prefetch
        {
            self.abort_prefetch(op);
        }
        Ok(())
    }

    /// Gives back the request's own window pages below page `first` of its table. What was computed elsewhere comes
    /// with the end of its window only, and pages without content must not be published. O(pages given back).
    pub fn let_window_go(&mut self, id: RequestId, first: u32) -> Result<(), CoreError> {
        self.record(|| Op::LetWindowGo(id, first));
        let request = self.request_mut(id)?;
        let below = first.saturating_sub(request.own_window_from()) as usize;
        let gone: Vec<_> = request.window.drain(..below.min(request.window.len())).collect();
        self.free_component(Component::Window, Tier::Device, &gone);
        Ok(())
    }

    /// Moves what the request `from` owns behind the table of `to`: pages, the window pages that go with them, and the
    /// state, which takes the place of that of `to`. A request whose load failed can thus go on as one that matched
    /// less. `from` keeps what it shares with the tree. O(pages moved).
    pub fn take_over(&mut self, to: RequestId, from: RequestId) -> Result<(), CoreError> {
        self.record(|| Op::TakeOver(to, from));
        if self.request_ref(to)?.match_ended {
            return Err(CoreError::MatchEnded);
        }
        self.hold_on(to);
        let giver = self.request_mut(from)?;
        if to == from {
            return Ok(());
        }
        let pages = giver.pages.split_off(giver.shared as usize);
        let mut window = std::mem::take(&mut giver.window);
        let state = giver.state.take();
        let taker = self.request_mut(to)?;
        let mut gone = Vec::new();
        if window.len() < pages.len() {
            // A window has no holes.
            gone = std::mem::replace(&mut taker.window, window);
        } else {
            taker.window.append(&mut window);
        }
        taker.pages.extend(pages);
        let old = if state.is_some() { std::mem::replace(&mut taker.state, state) } else { None };
        self.free_component(Component::Window, Tier::Device, &gone);
        self.free_component(Component::State, Tier::Device, old.as_slice());
        Ok(())
    }

    /// Tells of computation that no call for a request names: copies issued from now on come after `last_use`. To be
    /// called before a request whose load failed matches again, if anything was launched on its own pages. O(1).
    pub fn launched(&mut self, last_use: Fence) {
        self.record(|| Op::Launched(last_use));
        self.fence = self.fence.and(last_use);
    }

    /// Gives back own pages, lock and pin; the prefetch goes on.
    pub(super) fn release_holdings(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.ahead_due = true;
        self.hold_on(id);
        let request = self.request_mut(id)?;
        request.match_ended = false;
        let own = request.own().to_vec();
        let lock = request.lock.take();
        let host = request.host.take();
        request.pages.clear();
        request.shared = 0;
        request.counted = 0;
        request.node = None;
        request.loads.clear();
        request.load_failed = false;
        let window = std::mem::take(&mut request.window);
        let state = request.state.take();
        self.free_device(&own);
        self.free_component(Component::Window, Tier::Device, &window);
        self.free_component(Component::State, Tier::Device, state.as_slice());
        if let Some(lock) = lock {
            self.tree.unlock(lock)?;
        }
        if let Some(host) = host {
            self.tree.unpin_host(host.pin)?;
        }
        Ok(())
    }
}
