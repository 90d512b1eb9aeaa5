//! Integers with their bounds in the type, so that no input is wasted on values that are refused at once.

use arbitrary::{Arbitrary, Result, Unstructured};

/// An integer in `MIN..=MAX`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Int<const MIN: u32, const MAX: u32>(pub u32);

impl<'a, const MIN: u32, const MAX: u32> Arbitrary<'a> for Int<MIN, MAX> {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        u.int_in_range(MIN..=MAX).map(Int)
    }

    fn size_hint(_: usize) -> (usize, Option<usize>) {
        let bytes = if MAX - MIN < 256 { 1 } else { 4 };
        (bytes, Some(bytes))
    }
}
