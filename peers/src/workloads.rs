//! Deterministic prompts. Token `i` of stream `seed` is `mix(mix(seed) + i) mod 128000`.

const VOCABULARY: u64 = 128_000;

fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let start = mix(seed);
    (0..n as u64).map(|i| (mix(start.wrapping_add(i)) % VOCABULARY) as u32).collect()
}

/// A number below `n`.
pub fn pick(seed: usize, n: usize) -> usize {
    (mix(seed as u64) % n as u64) as usize
}

/// Sixteen prompts of 32,768 tokens.
pub fn w1_prompts() -> Vec<Vec<u32>> {
    (0..16).map(|k| tokens((1 << 56) + k, 32_768)).collect()
}

/// A prompt that was never seen before.
pub fn w4_prompt(i: usize, len: usize) -> Vec<u32> {
    tokens((4 << 56) + i as u64, len)
}

/// Ten steps of 32 tokens.
pub fn w5_session(s: usize) -> Vec<u32> {
    tokens((5 << 56) + s as u64, 320)
}

const SYSTEMS: usize = 20;
const SYSTEM_LEN: usize = 2_048;
const TURNS: usize = 8;
const TURN_LEN: usize = 200;

/// Chat sessions over twenty system prompts, their turns in a shuffled order.
pub struct Chat {
    pub rows: Vec<Vec<u32>>,
    order: Vec<usize>,
}

impl Chat {
    pub fn new(sessions: usize) -> Chat {
        let rows = (0..sessions)
            .map(|s| {
                let mut row = tokens((2 << 56) + (s % SYSTEMS) as u64, SYSTEM_LEN);
                row.extend(tokens((3 << 56) + s as u64, TURNS * TURN_LEN));
                row
            })
            .collect();
        let mut keyed: Vec<(u64, usize)> =
            (0..sessions * TURNS).map(|i| (mix(mix(7).wrapping_add(i as u64)), i)).collect();
        keyed.sort_unstable();
        Chat { rows, order: keyed.into_iter().map(|(_, i)| i % sessions).collect() }
    }

    pub fn turn_count(&self) -> usize {
        self.order.len()
    }

    /// Session and length of the prompt, turn by turn.
    pub fn turns(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut done = vec![0; self.rows.len()];
        self.order.iter().map(move |&s| {
            done[s] += 1;
            (s, SYSTEM_LEN + done[s] * TURN_LEN)
        })
    }

    pub fn unique_tokens(&self) -> usize {
        SYSTEMS.min(self.rows.len()) * SYSTEM_LEN + self.order.len() * TURN_LEN
    }

    /// Hit rate of a cache that forgets nothing and knows no page size.
    pub fn optimum(&self) -> f64 {
        let asked: usize = self.turns().map(|(_, end)| end).sum();
        (asked - self.unique_tokens()) as f64 / asked as f64
    }
}
