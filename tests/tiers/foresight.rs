//! What a scheduler knows of the future, and what it does to the order of eviction.

use sapwood::sim::Rig;
use sapwood::tiers::{CoreConfig, CoreError, Eviction, RequestId, WritePolicy};
use sapwood::tree::TreeError;

use crate::common::{config, found, t};

fn rig(eviction: Eviction) -> Rig {
    Rig::new(CoreConfig { eviction, ..config(8, 0, WritePolicy::None) })
}

/// A request from its arrival to its end; `told` is what is known of it before it computes.
fn turn(rig: &mut Rig, prompt: &str, told: impl FnOnce(&mut Rig, RequestId)) {
    let request = rig.request();
    told(rig, request);
    rig.match_prefix(request, &t(prompt)).expect("a fresh request");
    let want = prompt.len() - rig.core.pages(request).expect("a live request").len();
    rig.alloc(request, want as u32).expect("a live request");
    rig.compute(request, &t(prompt), sapwood::base::NamespaceId::DEFAULT);
    rig.finish(request, &t(prompt)).expect("pages for every token");
}

/// A conversation whose user is still typing outlives what came after it, turn by turn, until its session is closed.
#[test]
fn an_open_session_keeps_its_prefix() {
    for eviction in [Eviction::Lru, Eviction::Adaptive] {
        let mut rig = rig(eviction);
        let session = rig.core.open_session();
        let of_session = |rig: &mut Rig, request| rig.core.set_session(request, session).unwrap();
        turn(&mut rig, "AB", of_session);
        for other in ["MNO", "PQR", "STU"] {
            turn(&mut rig, other, |_, _| ());
        }
        assert_eq!(found(&rig, "AB"), (2, 0), "{eviction:?}");
        turn(&mut rig, "ABCD", of_session);
        for other in ["MNO", "PQR", "STU"] {
            turn(&mut rig, other, |_, _| ());
        }
        assert_eq!(found(&rig, "ABCD"), (4, 0), "{eviction:?}: the later turn is kept, too");
        rig.core.close_session(session).unwrap();
        for other in ["MNO", "PQR", "STU"] {
            turn(&mut rig, other, |_, _| ());
        }
        assert_eq!(found(&rig, "ABCD"), (0, 0), "{eviction:?}");
        let late = rig.core.close_session(session);
        assert_eq!(late, Err(CoreError::Tree(TreeError::UnknownSession(session))));
        // A turn of a session that is closed keeps nothing, and nobody minds.
        turn(&mut rig, "AB", of_session);
        rig.assert_quiet();
    }
}

/// What nobody will come back for goes before what is older.
#[test]
fn what_will_not_return_goes_first_under_an_order_that_learns() {
    let mut rig = rig(Eviction::Adaptive);
    turn(&mut rig, "AB", |_, _| ());
    turn(&mut rig, "CD", |rig, request| rig.core.will_not_return(request).unwrap());
    turn(&mut rig, "EF", |_, _| ());
    turn(&mut rig, "MNOP", |_, _| ());
    assert_eq!(["AB", "CD", "EF"].map(|prompt| found(&rig, prompt).0), [2, 0, 2]);
    rig.assert_quiet();
}

/// What a waiting request will use outlives what is used after it, whether it is there when the request begins to wait or
/// another one brings it later, until the request is let in or gives up.
#[test]
fn what_a_queue_waits_for_goes_last() {
    for eviction in [Eviction::Lru, Eviction::Adaptive] {
        let mut rig = rig(eviction);
        let crowd = |rig: &mut Rig| ["MNO", "PQR", "STU"].map(|other| turn(rig, other, |_, _| ()));
        turn(&mut rig, "AB", |_, _| ());
        let waits = ["ABX", "CDY"].map(|prompt| {
            let request = rig.request();
            rig.core.expect_prefix(request, &t(prompt)).unwrap();
            request
        });
        turn(&mut rig, "CDE", |_, _| ());
        crowd(&mut rig);
        assert_eq!(["AB", "CD", "CDE"].map(|prompt| found(&rig, prompt).0), [2, 2, 2], "{eviction:?}");
        // To ask is not to be let in.
        rig.match_prefix(waits[0], &t("AB")).unwrap();
        rig.match_prefix(waits[0], &[]).unwrap();
        crowd(&mut rig);
        assert_eq!(["AB", "CD"].map(|prompt| found(&rig, prompt).0), [2, 2], "{eviction:?}");
        rig.match_prefix(waits[0], &t("AB")).unwrap();
        rig.alloc(waits[0], 1).unwrap();
        rig.compute(waits[0], &t("ABX"), sapwood::base::NamespaceId::DEFAULT);
        rig.finish(waits[0], &t("ABX")).unwrap();
        rig.abort(waits[1]).unwrap();
        crowd(&mut rig);
        assert_eq!(["AB", "CD"].map(|prompt| found(&rig, prompt).0), [0, 0], "{eviction:?}: nobody waits");
        rig.assert_quiet();
    }
}
