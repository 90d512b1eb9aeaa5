//! Telling the processor what will be read soon. The one place outside the backends with `unsafe`: a hint reads nothing,
//! cannot fault and changes no result, and the instruction is only `unsafe` because not every processor has it.
//!
//! A plain load in its place does not help: it holds up everything behind it. Evicting one of a million nodes costs 0.25 us
//! without, 0.25 us with loads, and 0.15 us with hints.

/// Size of a cache line in bytes, on every processor that has hints here.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Starts to bring all of `what` close to the processor.
#[cfg(target_arch = "x86_64")]
#[inline]
#[expect(unsafe_code, reason = "a hint that every x86-64 has, and that the compiler asks to be told so")]
pub fn prefetch<T>(what: &T) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    let start = std::ptr::from_ref(what).cast::<i8>();
    for at in (0..size_of::<T>()).step_by(LINE) {
        // SAFETY: SSE is part of x86-64; a prefetch of any address is allowed, and this one lies in `what`.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(at)) };
    }
}

/// Nothing: no stable hint on this processor.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub fn prefetch<T>(_: &T) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_takes_any_size() {
        prefetch(&());
        prefetch(&1u8);
        prefetch(&[0u64; 100]);
    }
}
