//! A store that does not answer.

use sapwood::base::{Tier, Time};
use sapwood::sim::{Call, Pending, Rig};
use sapwood::tiers::{Prefetch, PrefetchPolicy, PrefetchState, Refusal};

use crate::common::{WT1, config, found, store_with, t, t1, with_store};

const HOUR_MS: u64 = 3_600_000;

fn is_store(p: &Pending) -> bool {
    matches!(p, Pending::Query(..) | Pending::Get(..) | Pending::Put(..))
}

/// Ends all copies, no store call.
fn drain_copies(rig: &mut Rig) {
    rig.drain_kind(|p| !is_store(p));
}

/// Every store call hangs, in each state of a prefetch. Others are served, the deadline holds, a bounded number of pages is
/// held, and what comes an hour later, well or not, harms nobody.
#[test]
fn a_hung_store_stops_nobody() {
    for answered in 0..4 {
        for late in [Call::Well, Call::Fails, Call::Each(vec![])] {
            let mut slow = with_store(config(24, 24, WT1));
            slow.prefetch.policy = PrefetchPolicy::Timeout { base_ms: 100, per_ki_token_ms: 0 };
            if let Some(store) = &mut slow.store {
                store.pages_in_flight_max = 4;
            }
            let mut rig = Rig::new(slow);
            rig.inherit_store(&store_with(&["ABCDEFGH"]));
            let request = rig.request();
            assert!(matches!(rig.prefetch(request, &t1("ABCDEFGH")), Ok(Prefetch::Started { .. })));
            for _ in 0..answered {
                rig.complete(0, &Call::Well);
            }
            // From here on the store says nothing. Other requests come and go, and want the host as well.
            let mut now = 0;
            assert_eq!(rig.poll_prefetch(request), Ok(PrefetchState::Pending));
            for prompt in ["IJKL", "MNOP", "QRST", "UVWX", "IJKL", "MNOP"] {
                rig.serve(&t(prompt));
                drain_copies(&mut rig);
                now += 10;
                rig.tick(Time::from_millis(now));
                assert_eq!(rig.poll_prefetch(request), Ok(PrefetchState::Pending), "{now} ms");
            }
            assert_eq!(rig.core.prefetch_deadline(request), Some(Time::from_millis(100)));
            rig.tick(Time::from_millis(100));
            let Ok(PrefetchState::Ended(end)) = rig.poll_prefetch(request) else {
                panic!("the deadline holds")
            };
            assert_eq!(end.reason, Some(Refusal::OutOfTime));
            // It computes what did not come.
            rig.match_prefix(request, &t("ABCDEFGH")).unwrap();
            rig.abort(request).unwrap();
            rig.serve(&t("ABCDEFGH"));
            drain_copies(&mut rig);
            // A window of two batches of two, and four pages of writes: that is all that the store can hold.
            let held: usize = rig
                .pending
                .iter()
                .map(|p| match p {
                    Pending::Get(_, _, items) | Pending::Put(_, _, items) => items.len(),
                    _ => 0,
                })
                .sum();
            assert!(held <= 8, "{held} pages");
            assert!(rig.core.page_counts(Tier::Host).in_flight_pages <= 4);
            for minute in 0..60u64 {
                rig.tick(Time::from_millis(HOUR_MS + minute * 60_000));
                rig.serve(&t(["YZ", "ABCDEFGH", "MNOP"][minute as usize % 3]));
                drain_copies(&mut rig);
            }
            // The store is back, and answers what it was asked an hour ago.
            while let Some(index) = rig.pending.iter().position(is_store) {
                rig.complete(index, &late);
                drain_copies(&mut rig);
                if !rig.pending.iter().any(is_store)
                    && let Some(due) = rig.core.next_timeout()
                {
                    rig.tick(due);
                }
            }
            // `serve` verifies what it is handed.
            rig.serve(&t("ABCDEFGH"));
            assert_eq!(found(&rig, "ABCDEFGH").0, 8);
            while !rig.core.writes_are_idle() || !rig.pending.is_empty() {
                rig.drain();
                if let Some(due) = rig.core.next_timeout() {
                    rig.tick(due);
                }
            }
            rig.assert_stored();
            rig.assert_quiet();
        }
    }
}
