//! sgl#38486, sgl#39108: host memory has two producers, write-through and the refill from a store, and only the first
//! published what it brought, while every removal was published; routers believed the worker held nothing once the device
//! copy had gone. An index that follows the events must hold exactly what each tier holds.

use std::collections::BTreeSet;

use crate::rig::{P, Rig, key, row};
use sapwood::base::Tier;
use sapwood::key::PageHash;
use sapwood::tree::*;

struct Router(BTreeSet<(Tier, PageHash)>);

impl Router {
    /// Follows the events. Of one tier, a page comes after the page before it.
    fn follow(&mut self, rig: &mut Rig) {
        let mut events = Vec::new();
        rig.tree.take_events(&mut events);
        for event in events {
            match event {
                TreeEvent::Stored { tier, parent, hashes, .. } => {
                    assert!(parent.is_none_or(|above| self.0.contains(&(tier, above))), "a child first");
                    hashes.into_iter().for_each(|hash| assert!(self.0.insert((tier, hash)), "stored twice"));
                }
                TreeEvent::Removed { tier, hashes } => {
                    hashes
                        .into_iter()
                        .for_each(|hash| assert!(self.0.remove(&(tier, hash)), "removed twice"));
                }
                TreeEvent::Cleared => self.0.clear(),
            }
        }
    }

    /// Pages on the device and on the host.
    fn pages(&self) -> (usize, usize) {
        let on = |tier: Tier| self.0.iter().filter(|page| page.0 == tier).count();
        (on(Tier::Device), on(Tier::Host))
    }
}

#[test]
fn both_producers_and_every_removal_are_told() {
    let mut rig = Rig::with(TreeConfig { page_size: P, events: true, ..TreeConfig::default() }, 16, 16);
    let mut router = Router(BTreeSet::new());
    let mut step = |rig: &mut Rig, device: usize, host: usize| {
        router.follow(rig);
        assert_eq!(router.pages(), (device, host));
    };
    let node = rig.ins("ABCD");
    step(&mut rig, 4, 0);
    // In flight is not readable; a split says nothing.
    let op = rig.begin_backup(node);
    rig.ins("ABX");
    step(&mut rig, 5, 0);
    rig.end_backup(op, true);
    step(&mut rig, 5, 4);
    // The second producer.
    let tokens = row("ABCDEF");
    let (_, lock, _) = rig.tree.match_and_lock(key(&tokens), &mut Vec::new());
    assert_eq!(rig.refill(node, 4, key(&tokens)).attached_pages, 2);
    rig.tree.unlock(lock).unwrap();
    step(&mut rig, 5, 6);
    // Demoted, deleted, in part gone from the host.
    let gone = rig.evict(5, Unbacked::Delete);
    assert_eq!((gone.demoted_pages, gone.deleted_pages), (4, 1));
    step(&mut rig, 0, 6);
    assert_eq!(rig.evict_host(1), 1);
    step(&mut rig, 0, 5);
    // Back to the device, and everything away at once.
    let found = rig.hit("ABCDE");
    let mut load = LoadPlan::default();
    rig.tree.plan_load(found.node, &mut load).unwrap();
    let (mut pages, op) = (Vec::new(), rig.op());
    assert!(rig.device.alloc(5, &mut pages));
    rig.tree.begin_load(op, &load, pages).unwrap();
    step(&mut rig, 0, 5);
    rig.tree.end_load(op, true, &mut Vec::new()).unwrap();
    step(&mut rig, 5, 5);
    rig.tree.reset(&mut Vec::new(), &mut Vec::new()).unwrap();
    step(&mut rig, 0, 0);
}
