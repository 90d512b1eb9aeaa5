//! Stand-ins for the KV that a model would compute: bytes that only the right prefix can have produced.
//!
//! A rolling 64-bit state runs over namespace and tokens; token `t`'s row of a plane and layer is spread from the
//! state after `t` and a salt of (plane, layer). So a row is a function of (namespace, whole prefix, plane,
//! layer), like attention state is, and a page that is stale, swapped, shifted, torn or of another tenant cannot
//! pass. One multiply per token and one per 8 bytes: filling and checking run at the speed of memory.

use super::tokens::mix;

/// States along one text: `states[t]` covers tokens `0..=t`.
pub(crate) struct Prefix {
    last: u64,
    states: Vec<u64>,
}

impl Prefix {
    /// An empty text of the namespace with this seed.
    pub(crate) fn new(namespace_seed: u64) -> Prefix {
        Prefix { last: mix(namespace_seed), states: Vec::new() }
    }

    /// Appends tokens.
    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        let mut h = self.last;
        self.states.extend(tokens.iter().map(|&t| {
            h = (h ^ u64::from(t)).wrapping_mul(0x9FB2_1C65_1E98_DF25);
            h ^= h >> 29;
            h
        }));
        self.last = h;
    }

    /// States of tokens `from..to`.
    pub(crate) fn range(&self, from: usize, to: usize) -> &[u64] {
        &self.states[from..to]
    }
}

/// Salt of one part (K or V) of one layer of one plane.
pub(crate) fn salt(plane: u8, layer: u32, part: usize) -> u64 {
    mix(0x5A9_00D5 ^ ((part as u64) << 48 | u64::from(plane) << 32 | u64::from(layer)))
}

/// Word `i` of the row of `state`.
#[inline(always)]
fn word(state: u64, salt: u64, i: usize) -> u64 {
    ((state ^ salt).wrapping_add(i as u64)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// Writes one row of `row_bytes` for each state. `out` holds exactly that much.
pub(crate) fn fill(states: &[u64], salt: u64, row_bytes: usize, out: &mut [u8]) {
    for (row, &state) in out.chunks_exact_mut(row_bytes).zip(states) {
        let mut words = row.chunks_exact_mut(8);
        let mut i = 0;
        for bytes in &mut words {
            bytes.copy_from_slice(&word(state, salt, i).to_le_bytes());
            i += 1;
        }
        let tail = words.into_remainder();
        let bytes = word(state, salt, i).to_le_bytes();
        tail.copy_from_slice(&bytes[..tail.len()]);
    }
}

/// Index of the first row that is not the row of its state. `rows` holds one row for each state.
pub(crate) fn first_wrong(states: &[u64], salt: u64, row_bytes: usize, rows: &[u8]) -> Option<usize> {
    rows.chunks_exact(row_bytes).zip(states).position(|(row, &state)| {
        let words = row.chunks_exact(8);
        let tail = words.remainder();
        let whole = words.len();
        // Folds instead of leaving early: a whole run is right nearly always, and this vectorises.
        let wrong = words.enumerate().fold(0, |acc, (i, bytes)| {
            let got = u64::from_le_bytes(bytes.try_into().expect("chunks of 8"));
            acc | (got ^ word(state, salt, i))
        });
        wrong != 0 || *tail != word(state, salt, whole).to_le_bytes()[..tail.len()]
    })
}

/// Seed of the namespace named by `adapter`, or of the default one.
pub(crate) fn namespace_seed(adapter: Option<&str>) -> u64 {
    adapter.map_or(0, |name| name.bytes().fold(1, |h, b| mix(h ^ u64::from(b))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(tokens: &[u32], seed: u64, salt: u64, row_bytes: usize) -> Vec<u8> {
        let mut prefix = Prefix::new(seed);
        prefix.extend(tokens);
        let mut out = vec![0; tokens.len() * row_bytes];
        fill(prefix.range(0, tokens.len()), salt, row_bytes, &mut out);
        out
    }

    #[test]
    fn what_was_filled_checks_and_any_flipped_bit_does_not() {
        for row_bytes in [1, 3, 8, 13, 32] {
            let tokens = [5, 6, 7, 5, 6, 7];
            let mut prefix = Prefix::new(1);
            prefix.extend(&tokens[..2]);
            prefix.extend(&tokens[2..]);
            let good = rows(&tokens, 1, salt(0, 3, 0), row_bytes);
            let states = prefix.range(0, 6);
            assert_eq!(first_wrong(states, salt(0, 3, 0), row_bytes, &good), None);
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(first_wrong(states, salt(0, 3, 0), row_bytes, &bad), Some(bit / 8 / row_bytes));
            }
        }
    }

    #[test]
    fn namespace_prefix_plane_layer_and_part_all_count() {
        let tokens: Vec<u32> = (0..64).collect();
        let base = rows(&tokens, 1, salt(0, 0, 0), 16);
        let all_differ = |other: &[u8], from_token: usize| {
            let rows = base.chunks(16).zip(other.chunks(16)).skip(from_token);
            assert!(rows.into_iter().all(|(a, b)| a[..8] != b[..8] && a[8..] != b[8..]));
        };
        all_differ(&rows(&tokens, namespace_seed(Some("lora")), salt(0, 0, 0), 16), 0);
        all_differ(&rows(&tokens, 1, salt(1, 0, 0), 16), 0);
        all_differ(&rows(&tokens, 1, salt(0, 1, 0), 16), 0);
        all_differ(&rows(&tokens, 1, salt(0, 0, 1), 16), 0);
        let mut changed = tokens.clone();
        changed[10] += 1;
        let other = rows(&changed, 1, salt(0, 0, 0), 16);
        assert_eq!(base[..160], other[..160]);
        all_differ(&other, 10);
    }

    #[test]
    fn poison_and_zeros_are_never_a_row() {
        let mut prefix = Prefix::new(0);
        prefix.extend(&(0..1000).collect::<Vec<u32>>());
        let states = prefix.range(0, 1000);
        for byte in [0, 0xDB, 0xFF] {
            for (t, state) in states.iter().enumerate() {
                assert_eq!(first_wrong(&[*state], salt(0, 0, 0), 16, &[byte; 16]), Some(0), "token {t}");
            }
        }
    }
}
