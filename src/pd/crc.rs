//! CRC-32C of frames, eight bytes a step. This floor may not use the `crc32c` crate (it is behind a
//! feature, and picks instructions at run time); control frames are small, and a METADATA of 10^6 pages
//! still takes only a few milliseconds.

const POLY: u32 = 0x82F6_3B78;

const TABLES: [[u32; 256]; 8] = {
    let mut t = [[0u32; 256]; 8];
    let mut i = 0;
    while i < 256 {
        let mut c = i as u32;
        let mut bit = 0;
        while bit < 8 {
            c = if c & 1 == 1 { (c >> 1) ^ POLY } else { c >> 1 };
            bit += 1;
        }
        t[0][i] = c;
        i += 1;
    }
    let mut k = 1;
    while k < 8 {
        let mut i = 0;
        while i < 256 {
            let prev = t[k - 1][i];
            t[k][i] = (prev >> 8) ^ t[0][(prev & 0xFF) as usize];
            i += 1;
        }
        k += 1;
    }
    t
};

/// CRC-32C of the parts, one after the other.
pub(super) fn crc32c(parts: &[&[u8]]) -> u32 {
    let mut crc = !0u32;
    for part in parts {
        let mut words = part.chunks_exact(8);
        for w in &mut words {
            let lo = crc ^ u32::from_le_bytes([w[0], w[1], w[2], w[3]]);
            let hi = u32::from_le_bytes([w[4], w[5], w[6], w[7]]);
            crc = (0..4).fold(0, |acc, i| {
                let shift = 8 * i as u32;
                acc ^ TABLES[7 - i][((lo >> shift) & 0xFF) as usize]
                    ^ TABLES[3 - i][((hi >> shift) & 0xFF) as usize]
            });
        }
        for &b in words.remainder() {
            crc = (crc >> 8) ^ TABLES[0][((crc ^ u32::from(b)) & 0xFF) as usize];
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn known_values_and_any_split() {
        assert_eq!(crc32c(&[b"123456789"]), 0xE306_9283);
        assert_eq!(crc32c(&[&[0u8; 32]]), 0x8A91_36AA);
        assert_eq!(crc32c(&[&[0xFFu8; 32]]), 0x62A8_AB43);
        let bytes: Vec<u8> = (0..100u8).collect();
        for cut in 0..bytes.len() {
            assert_eq!(crc32c(&[&bytes[..cut], &bytes[cut..]]), crc32c(&[&bytes]));
        }
    }
}
