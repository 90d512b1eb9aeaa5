//! MD5, which the service's protocol names functions and types by. Evaluated by the compiler; it protects
//! nothing.

const SHIFTS: [[u32; 4]; 4] = [[7, 12, 17, 22], [5, 9, 14, 20], [4, 11, 16, 23], [6, 10, 15, 21]];

#[rustfmt::skip]
const SINES: [u32; 64] = [
    0xd76a_a478, 0xe8c7_b756, 0x2420_70db, 0xc1bd_ceee, 0xf57c_0faf, 0x4787_c62a, 0xa830_4613, 0xfd46_9501,
    0x6980_98d8, 0x8b44_f7af, 0xffff_5bb1, 0x895c_d7be, 0x6b90_1122, 0xfd98_7193, 0xa679_438e, 0x49b4_0821,
    0xf61e_2562, 0xc040_b340, 0x265e_5a51, 0xe9b6_c7aa, 0xd62f_105d, 0x0244_1453, 0xd8a1_e681, 0xe7d3_fbc8,
    0x21e1_cde6, 0xc337_07d6, 0xf4d5_0d87, 0x455a_14ed, 0xa9e3_e905, 0xfcef_a3f8, 0x676f_02d9, 0x8d2a_4c8a,
    0xfffa_3942, 0x8771_f681, 0x6d9d_6122, 0xfde5_380c, 0xa4be_ea44, 0x4bde_cfa9, 0xf6bb_4b60, 0xbebf_bc70,
    0x289b_7ec6, 0xeaa1_27fa, 0xd4ef_3085, 0x0488_1d05, 0xd9d4_d039, 0xe6db_99e5, 0x1fa2_7cf8, 0xc4ac_5665,
    0xf429_2244, 0x432a_ff97, 0xab94_23a7, 0xfc93_a039, 0x655b_59c3, 0x8f0c_cc92, 0xffef_f47d, 0x8584_5dd1,
    0x6fa8_7e4f, 0xfe2c_e6e0, 0xa301_4314, 0x4e08_11a1, 0xf753_7e82, 0xbd3a_f235, 0x2ad7_d2bb, 0xeb86_d391,
];

/// Byte `at` of the padded message.
const fn padded(text: &[u8], at: usize, blocks: usize) -> u8 {
    let bits = (text.len() as u64 * 8).to_le_bytes();
    if at < text.len() {
        text[at]
    } else if at == text.len() {
        0x80
    } else if at >= blocks * 64 - 8 {
        bits[at - (blocks * 64 - 8)]
    } else {
        0
    }
}

const fn round(mut state: [u32; 4], words: &[u32; 16]) -> [u32; 4] {
    let mut i = 0;
    while i < 64 {
        let [a, b, c, d] = state;
        let (mix, word) = match i / 16 {
            0 => ((b & c) | (!b & d), i),
            1 => ((d & b) | (!d & c), (5 * i + 1) % 16),
            2 => (b ^ c ^ d, (3 * i + 5) % 16),
            _ => (c ^ (b | !d), (7 * i) % 16),
        };
        let sum = a.wrapping_add(mix).wrapping_add(SINES[i]).wrapping_add(words[word]);
        state = [d, b.wrapping_add(sum.rotate_left(SHIFTS[i / 16][i % 4])), b, c];
        i += 1;
    }
    state
}

/// The first four bytes of the digest of `text`, read as a big-endian number.
pub(super) const fn prefix(text: &[u8]) -> u32 {
    let blocks = (text.len() + 8) / 64 + 1;
    let mut state = [0x6745_2301_u32, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];
    let mut block = 0;
    while block < blocks {
        let mut words = [0_u32; 16];
        let mut i = 0;
        while i < 64 {
            words[i / 4] |= (padded(text, block * 64 + i, blocks) as u32) << (8 * (i % 4));
            i += 1;
        }
        let mixed = round(state, &words);
        let mut j = 0;
        while j < 4 {
            state[j] = state[j].wrapping_add(mixed[j]);
            j += 1;
        }
        block += 1;
    }
    state[0].swap_bytes()
}

#[cfg(test)]
mod tests {
    use super::prefix;

    #[test]
    fn agrees_with_the_published_examples() {
        let cases: [(&[u8], u32); 6] = [
            (b"", 0xd41d_8cd9),
            (b"a", 0x0cc1_75b9),
            (b"abc", 0x9001_5098),
            (b"message digest", 0xf96b_697d),
            (b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", 0xd174_ab98),
            (
                b"12345678901234567890123456789012345678901234567890123456789012345678901234567890",
                0x57ed_f4a2,
            ),
        ];
        for (text, want) in cases {
            assert_eq!(prefix(text), want);
        }
    }
}
