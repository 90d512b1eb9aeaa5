use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::backend::region::Region;
use crate::pd::ids::Serial;

const P: Incarnation = Incarnation(0xA);
const D: Incarnation = Incarnation(0xD);
const PEER: PeerId = PeerId(3);
const POOL: usize = 1 << 20;

/// The one write of this process that is reported in doubt, whatever became of it.
pub(super) struct Doubt(AtomicU64);

pub(super) static DOUBT: Doubt = Doubt(AtomicU64::new(u64::MAX));

impl Doubt {
    pub(super) fn with_value(&self, xfer: XferId) -> bool {
        self.0.load(Ordering::Relaxed) == xfer.0
    }
}

fn region() -> Memory {
    Memory::new(vec![Arc::new(Region::anonymous(POOL).unwrap())])
}

/// Where the library is, for the tests that need it. Without it they say so, or fail where it must be there.
fn installed() -> bool {
    if std::env::var_os("SAPWOOD_NIXL").is_some() {
        return true;
    }
    assert!(std::env::var_os("SAPWOOD_REQUIRE_SERVICES").is_none(), "SAPWOOD_NIXL is not set");
    eprintln!("SKIPPED: SAPWOOD_NIXL does not say where libnixl_capi.so is");
    false
}

#[test]
fn what_is_missing_is_an_error_value() {
    let folder = tempfile::tempdir().unwrap();
    let fake = folder.path().join("libnixl_capi.so");
    std::fs::write(&fake, b"not a library").unwrap();
    // No file, a folder without one, a file that is none, a library without the functions.
    for path in ["/nowhere/libnixl_capi.so", "/", fake.to_str().unwrap(), "libc.so.6"] {
        let e = NixlTarget::new(D, Some(Path::new(path)), region()).unwrap_err();
        assert!(matches!(&e, NixlError::Library { .. }), "{path}: {e}");
        assert_eq!(probe(Some(Path::new(path))), Err(e));
    }
}

#[test]
fn descriptors_are_read_with_care() {
    let mut blob = 1u64.to_le_bytes().to_vec();
    blob.extend(7u64.to_le_bytes());
    blob.extend(9u64.to_le_bytes());
    blob.extend(b"rest");
    assert_eq!(parse(&blob), Some((vec![(7, 9)], &b"rest"[..])));
    for bad in [&b""[..], &[1; 7], &[255; 8], &blob[..20]] {
        assert_eq!(parse(bad), None);
    }
}

#[test]
fn bytes_arrive_and_odd_calls_are_refused() {
    if !installed() {
        return;
    }
    assert_eq!(probe(None), Ok(()));
    let (src, dst) = (region(), region());
    let noise: Vec<u8> = (0..POOL).map(|i| ((i * 31) >> 3) as u8).collect();
    // SAFETY: nothing else uses the memory yet.
    unsafe { src.write(0, 0, &noise).unwrap() };
    let mut target = NixlTarget::new(D, None, dst.clone()).unwrap();
    let mut writer = NixlWriter::new(P, None, src).unwrap();
    for bad in [&b""[..], &[0; 8], &[255; 64]] {
        assert!(writer.attach(PeerId(9), D, 0, bad).is_err());
    }
    let blob = target.descriptor();
    // A process that is not the one the descriptor was made for.
    assert!(writer.attach(PEER, Incarnation(5), 0, &blob).is_err());
    writer.attach(PEER, D, 0, &blob).unwrap();
    let tag = Tag::new(D, Serial(1));
    target.allow(tag, vec![Span { region: 0, offset: 0, len: POOL as u64 }]).unwrap();
    let page = 4096;
    let copies: Vec<Copy> = (0..100u64)
        .map(|i| Copy {
            src_region: 0,
            src_off: i * page,
            dst_region: 0,
            dst_off: (99 - i) * page,
            len: page,
        })
        .collect();
    writer.submit(XferId(1), PEER, 0, tag, &copies).unwrap();
    let (mut done, limit) = (Vec::new(), Instant::now() + Duration::from_secs(60));
    while done.is_empty() {
        writer.poll(&mut done);
        assert!(Instant::now() < limit, "no outcome");
        std::thread::sleep(Duration::from_micros(200));
    }
    assert_eq!(done, [Done { xfer: XferId(1), outcome: Outcome::Ok { bytes: 100 * page } }]);
    for i in 0..256usize {
        let mut got = vec![0; 4096];
        // SAFETY: the only write has ended.
        unsafe { dst.read(0, i as u64 * page, &mut got).unwrap() };
        let want = if i < 100 { noise[(99 - i) * 4096..(100 - i) * 4096].to_vec() } else { vec![0; 4096] };
        assert!(got == want, "page {i}");
    }
    let out = [Copy { src_region: 0, src_off: 0, dst_region: 0, dst_off: POOL as u64 - 8, len: 16 }];
    assert!(matches!(writer.submit(XferId(2), PEER, 0, tag, &out), Err(TransportError::Range { .. })));
    assert!(matches!(writer.submit(XferId(3), PEER, 1, tag, &copies), Err(TransportError::NotAttached(_))));
    assert_eq!(target.fence(P, 0), Fence::Unproven);
    assert_eq!(target.revoke(tag), Revoked::Pending);
}

/// A write ends in doubt: its agent is torn down, its sources come back, and writes go on with the next agent.
#[test]
fn a_write_in_doubt_costs_the_agent_and_gives_its_sources_back() {
    if !installed() {
        return;
    }
    let (src, dst) = (region(), region());
    // SAFETY: nothing else uses the memory yet.
    unsafe { src.write(0, 0, &[7; POOL]).unwrap() };
    let target = NixlTarget::new(Incarnation(0xD2), None, dst.clone()).unwrap();
    let mut writer = NixlWriter::new(Incarnation(0xA2), None, src).unwrap();
    writer.attach(PEER, Incarnation(0xD2), 0, &target.descriptor()).unwrap();
    let tag = Tag::new(D, Serial(1));
    let whole = [Copy { src_region: 0, src_off: 0, dst_region: 0, dst_off: 0, len: POOL as u64 }];
    let next = |writer: &mut NixlWriter, n: usize| {
        let (mut out, limit) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while out.len() < n {
            writer.poll(&mut out);
            assert!(Instant::now() < limit, "{out:?}");
            std::thread::sleep(Duration::from_micros(200));
        }
        out.into_iter().map(|d: Done| (d.xfer.0, d.outcome)).collect::<Vec<_>>()
    };
    for (good, doubt) in [(9001, 9002), (9003, 9004)] {
        writer.submit(XferId(good), PEER, 0, tag, &whole).unwrap();
        assert_eq!(next(&mut writer, 1), [(good, Outcome::Ok { bytes: POOL as u64 })]);
        DOUBT.0.store(doubt, Ordering::Relaxed);
        writer.submit(XferId(doubt), PEER, 0, tag, &whole).unwrap();
        assert_eq!(next(&mut writer, 2), [(doubt, Outcome::FailedUnknown), (doubt, Outcome::SourcesFree)]);
    }
    writer.submit(XferId(9005), PEER, 0, tag, &whole).unwrap();
    assert_eq!(next(&mut writer, 1), [(9005, Outcome::Ok { bytes: POOL as u64 })]);
    let mut got = vec![0; POOL];
    // SAFETY: no write is under way.
    unsafe { dst.read(0, 0, &mut got).unwrap() };
    assert!(got.iter().all(|b| *b == 7));
}
