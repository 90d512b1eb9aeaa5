//! Objects as one buffer, envelope and payload, for backends that hold or send them whole.

use super::batch::{Item, Outcome};
use super::envelope::{Defect, HEADER_BYTES, Header, payload_crc};
use super::regions::HeldSpans;

/// The sealed bytes of an item. O(payload).
pub(super) fn seal(item: &Item, memory: &HeldSpans) -> Vec<u8> {
    let header = Header::new(item.key, item.space, memory.len() as u64, payload_crc(memory.runs()));
    let mut out = Vec::with_capacity(HEADER_BYTES + memory.len());
    out.extend_from_slice(&header.encode());
    memory.append_to(&mut out);
    out
}

/// Checks a sealed object and copies its payload to where the item wants it. O(payload).
pub(super) fn unseal(sealed: &[u8], item: &Item, memory: &HeldSpans) -> Outcome {
    let checked = check(sealed).and_then(|(h, payload)| {
        h.check(&item.key, &item.space)?;
        Ok(payload)
    });
    match checked {
        Ok(payload) if payload.len() != memory.len() => Outcome::SizeMismatch { stored: payload.len() },
        Ok(payload) => {
            memory.fill(0, payload);
            Outcome::Ok(payload.len())
        }
        Err(defect) => outcome_of(defect),
    }
}

/// Checks everything that can be checked without knowing what was asked for.
pub(super) fn check(sealed: &[u8]) -> Result<(Header, &[u8]), Defect> {
    let header = Header::decode(sealed)?;
    let payload = &sealed[HEADER_BYTES..];
    if payload.len() as u64 != header.payload_bytes {
        return Err(Defect::Length);
    }
    if payload_crc([payload]) != header.payload_crc {
        return Err(Defect::PayloadSum);
    }
    Ok((header, payload))
}

/// How a caller sees a defect.
pub(super) fn outcome_of(defect: Defect) -> Outcome {
    match defect {
        Defect::Version(found) => Outcome::VersionMismatch { found },
        // The key holds and the identity is another: a caller's mistake, the object is good.
        Defect::Identity => Outcome::Missing,
        _ => Outcome::Corrupt,
    }
}
