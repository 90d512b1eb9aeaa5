//! Tokens as spans: a trace names its content by block ids, so a request is a short list of spans and its
//! token ids are made when they are needed. A whole trace stays a few megabytes that way.

/// A run of tokens of one source. Two spans hold equal tokens at equal offsets exactly when their sources are
/// equal; nothing else (position, request, namespace) enters a token id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Span {
    /// What the tokens are drawn from.
    pub(crate) source: u64,
    /// Offset of the first token in the source.
    pub(crate) first: u32,
    /// Tokens.
    pub(crate) len: u32,
}

/// Sources below this are block ids of a trace file.
pub(crate) const TRACE_ID_END: u64 = 1 << 62;

/// Source of what only request `index` says.
pub(crate) fn unique_source(index: usize) -> u64 {
    (1 << 63) | index as u64
}

/// Source number `n` of a generated workload.
pub(crate) fn generated_source(n: u64) -> u64 {
    TRACE_ID_END | n
}

/// Finaliser of splitmix64: every output bit depends on every input bit.
pub(crate) fn mix(word: u64) -> u64 {
    let z = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Span {
    /// Appends the token ids. They stay below 2^31, so that every embedder's integer type holds them.
    pub(crate) fn expand_into(self, out: &mut Vec<u32>) {
        let base = mix(self.source);
        let end = u64::from(self.first) + u64::from(self.len);
        out.extend((u64::from(self.first)..end).map(|i| (mix(base ^ i) >> 33) as u32));
    }
}

/// The first `tokens` tokens of `spans`.
pub(crate) fn expand(spans: &[Span], tokens: u32, out: &mut Vec<u32>) {
    out.clear();
    out.reserve(tokens as usize);
    let mut left = tokens;
    for span in spans {
        let len = span.len.min(left);
        Span { len, ..*span }.expand_into(out);
        left -= len;
        if left == 0 {
            break;
        }
    }
}

/// Appends `span`, joined to the last one where it continues it.
pub(crate) fn push(spans: &mut Vec<Span>, span: Span) {
    if span.len == 0 {
        return;
    }
    match spans.last_mut() {
        Some(last) if last.source == span.source && last.first + last.len == span.first => {
            last.len += span.len
        }
        _ => spans.push(span),
    }
}

/// Tokens in `spans`.
pub(crate) fn total(spans: &[Span]) -> u32 {
    spans.iter().map(|s| s.len).sum()
}

/// A seeded stream of numbers (splitmix64). Portable, so a seed means the same run everywhere.
#[derive(Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The stream number `stream` of `seed`.
    pub(crate) fn new(seed: u64, stream: u64) -> Rng {
        Rng(mix(seed) ^ mix(stream).rotate_left(32))
    }

    /// Next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Uniform in `low..=high`; `low` if the range is empty.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        let width = high.saturating_sub(low).saturating_add(1);
        low + ((u128::from(self.next()) * u128::from(width)) >> 64) as u64
    }

    /// True with probability `p`.
    pub(crate) fn chance(&mut self, p: f64) -> bool {
        ((self.next() >> 11) as f64) < p * (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_depends_on_source_and_offset_only() {
        let mut whole = Vec::new();
        Span { source: 7, first: 0, len: 512 }.expand_into(&mut whole);
        let mut part = Vec::new();
        Span { source: 7, first: 100, len: 50 }.expand_into(&mut part);
        assert_eq!(part, whole[100..150]);
        let mut other = Vec::new();
        Span { source: 8, first: 0, len: 512 }.expand_into(&mut other);
        assert!(whole.iter().zip(&other).filter(|(a, b)| a == b).count() < 3);
        assert!(whole.iter().all(|&t| t < 1 << 31));
    }

    #[test]
    fn expand_stops_at_the_asked_length() {
        let spans = [Span { source: 1, first: 0, len: 512 }, Span { source: 2, first: 0, len: 512 }];
        let mut out = vec![9; 3];
        expand(&spans, 700, &mut out);
        assert_eq!(out.len(), 700);
        let mut second = Vec::new();
        Span { source: 2, first: 0, len: 188 }.expand_into(&mut second);
        assert_eq!(out[512..], second);
    }

    #[test]
    fn push_joins_what_continues() {
        let mut spans = Vec::new();
        push(&mut spans, Span { source: 1, first: 0, len: 10 });
        push(&mut spans, Span { source: 1, first: 10, len: 5 });
        push(&mut spans, Span { source: 1, first: 20, len: 5 });
        push(&mut spans, Span { source: 2, first: 25, len: 0 });
        assert_eq!(spans, [Span { source: 1, first: 0, len: 15 }, Span { source: 1, first: 20, len: 5 }]);
        assert_eq!(total(&spans), 20);
    }

    #[test]
    fn the_stream_is_pinned_and_fair() {
        let mut rng = Rng::new(1, 2);
        let drawn: Vec<u64> = (0..10_000).map(|_| rng.range(10, 19)).collect();
        assert!(drawn.iter().all(|&d| (10..=19).contains(&d)));
        for value in 10..=19 {
            let n = drawn.iter().filter(|&&d| d == value).count();
            assert!((850..1150).contains(&n), "{value} drawn {n} times");
        }
        let mut again = Rng::new(1, 2);
        assert_eq!(drawn[0], again.range(10, 19));
        let mut rng = Rng::new(3, 0);
        assert!(!(0..1000).any(|_| rng.chance(0.0)));
        assert!((0..1000).all(|_| rng.chance(1.0)));
    }
}
