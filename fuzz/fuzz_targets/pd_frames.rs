//! Any bytes: a frame or a typed error; and what is a frame comes back from its own bytes. The checksum is
//! made right on half of the inputs, so that the parser behind it is reached.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sapwood::pd::wire::{Frame, HEAD_BYTES, frame_len};

fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &b in bytes {
        crc ^= u32::from(b);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
        }
    }
    !crc
}

fn check(bytes: &[u8]) {
    let _ = frame_len(bytes);
    if let Ok(frame) = Frame::decode(bytes) {
        assert_eq!(Frame::decode(&frame.to_bytes()), Ok(frame));
    }
}

fuzz_target!(|data: &[u8]| {
    check(data);
    if data.len() >= HEAD_BYTES {
        let mut sealed = data.to_vec();
        sealed[..6].copy_from_slice(b"SWPD\x01\x00");
        let body = (sealed.len() - HEAD_BYTES) as u32;
        sealed[8..12].copy_from_slice(&body.to_le_bytes());
        sealed[12..16].fill(0);
        let crc = crc32c(&sealed);
        sealed[12..16].copy_from_slice(&crc.to_le_bytes());
        check(&sealed);
    }
});
