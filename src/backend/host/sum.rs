//! The sum of a page, equal to the one the summing copy kernel makes while it copies.
//!
//! Each 16-byte unit is mixed with its position and the results are added modulo 2^64, so that any number
//! of threads can add in any order. It notices flipped, swapped and moved units; it is no defence against
//! malice.

/// The sum of a page of one plane in the default byte order. The length is a multiple of 16; a rest that
/// is not is padded with zeros. About three multiplications per 16 bytes.
#[must_use]
pub fn page_sum(bytes: &[u8]) -> u64 {
    let (units, rest) = bytes.as_chunks::<16>();
    let mut sum = 0u64;
    let mut position = 0u64;
    for unit in units {
        sum = sum.wrapping_add(mix(u128::from_le_bytes(*unit), position));
        position += 1;
    }
    if !rest.is_empty() {
        let mut unit = [0; 16];
        unit[..rest.len()].copy_from_slice(rest);
        sum = sum.wrapping_add(mix(u128::from_le_bytes(unit), position));
    }
    sum
}

fn mix(unit: u128, position: u64) -> u64 {
    let key = |k: u64, c: u64| position.wrapping_mul(k).wrapping_add(c);
    let x =
        (unit as u64 ^ key(0x9E37_79B9_7F4A_7C15, 0x243F_6A88_85A3_08D3)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let y = ((unit >> 64) as u64 ^ key(0xD6E8_FEB8_6659_FD93, 0x1319_8A2E_0370_7344))
        .wrapping_mul(0x94D0_49BB_1331_11EB);
    let z = (x ^ (x >> 32) ^ y.rotate_left(17)).wrapping_mul(0xD1B5_4A32_D192_ED03);
    z ^ (z >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_and_every_place_counts() {
        let page: Vec<u8> = (0..512u32).map(|i| ((i * 37) >> 2) as u8).collect();
        let whole = page_sum(&page);
        for bit in 0..page.len() * 8 {
            let mut flipped = page.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(page_sum(&flipped), whole, "bit {bit}");
        }
        let mut swapped = page.clone();
        swapped.swap(0, 16);
        (1..16).for_each(|i| swapped.swap(i, 16 + i));
        assert_ne!(page_sum(&swapped), whole, "two units swapped");
        let mut halves = page.clone();
        (0..8).for_each(|i| halves.swap(i, 8 + i));
        assert_ne!(page_sum(&halves), whole, "halves of a unit swapped");
        assert_ne!(page_sum(&[0; 16]), page_sum(&[0; 32]));
        assert_eq!(page_sum(&page[..40]), page_sum(&[&page[..40], &[0; 8]].concat()));
    }
}
