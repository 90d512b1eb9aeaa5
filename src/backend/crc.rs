//! CRC32C of page payloads, as fast as a copy reads them.
//!
//! Every byte that comes from a store is summed up, so the sum is on the path of every read. The `crc32c` crate runs
//! at 26 GB/s on data in the core's cache (one 8-byte instruction a cycle), which costs a warm read a quarter of its
//! speed. Where the processor multiplies polynomials 64 bytes at a time (AVX-512 with VPCLMULQDQ) the same sum runs at
//! 60 GB/s and more: the data is folded, 256 bytes a step, into 16 bytes of the same remainder, and those are summed.
#![expect(unsafe_code, reason = "calls functions for instructions that the processor was asked about first")]

/// Continues a CRC32C.
#[must_use]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= x86::BYTES_MIN && x86::can() {
        // SAFETY: the processor has every instruction set that `fold` names.
        let (crc, rest) = unsafe { x86::fold(crc, bytes) };
        return crc32c::crc32c_append(crc, rest);
    }
    crc32c::crc32c_append(crc, bytes)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m512i, _mm_clmulepi64_si128, _mm_crc32_u64, _mm_cvtsi32_si128, _mm_cvtsi128_si64,
        _mm_extract_epi64, _mm_set_epi64x, _mm_xor_si128, _mm512_castsi512_si128, _mm512_clmulepi64_epi128,
        _mm512_extracti32x4_epi32, _mm512_loadu_si512, _mm512_set_epi64, _mm512_ternarylogic_epi64,
        _mm512_xor_si512, _mm512_zextsi128_si512,
    };

    /// Below this the other way is as fast.
    pub(super) const BYTES_MIN: usize = 1024;
    /// Bytes of a step: four registers.
    const STEP: usize = 256;

    /// Whether the processor has what [`fold`] needs. The answer is kept by the standard library.
    pub(super) fn can() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("sse4.2")
    }

    /// `x^n` modulo the polynomial of CRC32C, in the order of bits of the sum, shifted up as the carry-less product of
    /// two such numbers wants it.
    const fn power(n: u32) -> i64 {
        let mut value = 0x8000_0000u32;
        let mut i = 0;
        while i < n {
            value = if value & 1 == 1 { (value >> 1) ^ 0x82F6_3B78 } else { value >> 1 };
            i += 1;
        }
        (value as i64) << 1
    }

    /// Multipliers that move 16 bytes forward by so many bits: of the lower and of the upper half.
    const fn forward(bits: u32) -> (i64, i64) {
        (power(bits + 32), power(bits - 32))
    }

    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn wide(bits: (i64, i64)) -> __m512i {
        let (low, high) = bits;
        _mm512_set_epi64(high, low, high, low, high, low, high, low)
    }

    /// `value` moved forward, and `data` added.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn step(value: __m512i, by: __m512i, data: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128(value, by, 0x00);
        let high = _mm512_clmulepi64_epi128(value, by, 0x11);
        // The sum of all three.
        _mm512_ternarylogic_epi64(low, high, data, 0x96)
    }

    /// The sum over all whole steps of `bytes`, at least two of them, and the rest.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    pub(super) fn fold(crc: u32, bytes: &[u8]) -> (u32, &[u8]) {
        const BY_STEP: (i64, i64) = forward(STEP as u32 * 8);
        const BY_REGISTER: (i64, i64) = forward(512);
        const BY_LANE: (i64, i64) = forward(128);
        let (steps, rest) = bytes.as_chunks::<STEP>();
        let load = |step: &[u8; STEP], i: usize| {
            // SAFETY: `i` is below 4, so these are 64 bytes inside of the step; no alignment is asked for.
            unsafe { _mm512_loadu_si512(step.as_ptr().add(i * 64).cast()) }
        };
        let Some((first, steps)) = steps.split_first() else { return (crc, bytes) };
        let begin = _mm512_zextsi128_si512(_mm_cvtsi32_si128(!crc as i32));
        let mut sums =
            [_mm512_xor_si512(load(first, 0), begin), load(first, 1), load(first, 2), load(first, 3)];
        let by = wide(BY_STEP);
        for data in steps {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = step(*sum, by, load(data, i));
            }
        }
        let by = wide(BY_REGISTER);
        let one = sums[1..].iter().fold(sums[0], |sum, next| step(sum, by, *next));
        let lanes = [
            _mm512_castsi512_si128(one),
            _mm512_extracti32x4_epi32(one, 1),
            _mm512_extracti32x4_epi32(one, 2),
            _mm512_extracti32x4_epi32(one, 3),
        ];
        let by = _mm_set_epi64x(BY_LANE.1, BY_LANE.0);
        let last = lanes[1..].iter().fold(lanes[0], |sum, next| {
            let (low, high) = (_mm_clmulepi64_si128(sum, by, 0x00), _mm_clmulepi64_si128(sum, by, 0x11));
            _mm_xor_si128(_mm_xor_si128(low, high), *next)
        });
        let sum = _mm_crc32_u64(0, _mm_cvtsi128_si64(last) as u64);
        let sum = _mm_crc32_u64(sum, _mm_extract_epi64(last, 1) as u64);
        (!(sum as u32), rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit.
    fn slow(crc: u32, bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!crc, |crc, &b| {
            (0..8).fold(crc ^ u32::from(b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0x82F6_3B78 } else { c >> 1 })
        })
    }

    #[test]
    fn it_is_crc32c_at_every_length_place_and_beginning() {
        let mut x = 1u64;
        let data: Vec<u8> = (0..6000)
            .map(|_| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (x >> 33) as u8
            })
            .collect();
        assert_eq!(crc32c_append(0, b"123456789"), 0xE306_9283);
        for len in (0..2100).chain([3000, 4095, 4096, 5000]) {
            for (from, crc) in [(0, 0), (1, 0xDEAD_BEEF), (63, u32::MAX)] {
                let bytes = &data[from..from + len];
                assert_eq!(crc32c_append(crc, bytes), slow(crc, bytes), "{len} bytes from {from}");
            }
        }
        // In two parts.
        for cut in [0, 1, 255, 256, 1024, 1500, 4000] {
            let (a, b) = data.split_at(cut);
            assert_eq!(crc32c_append(crc32c_append(0, a), b), slow(0, &data), "{cut}");
        }
    }
}
