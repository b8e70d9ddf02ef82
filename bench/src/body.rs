//! Values that prove themselves: a body is a function of its key, and so every byte that comes back can be checked.
//!
//! Word i of a body is `base(key) + i × STEP`. Each word depends on the key and on its place, so bytes of another key,
//! shifted, swapped or stale bytes all show; and both making and comparing one are as fast as memory.

use std::array;

use crate::dice::mix;

const WORD: usize = 8;
const WORDS: usize = 8;
const LINE: usize = WORD * WORDS;
/// Odd, so that no two words of one body are equal before 2^64 of them.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Which object of which run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KeyId {
    /// Drawn at the start of a run, so that an older run's objects in the same store are not taken for this one's.
    pub(crate) run: u64,
    /// Counts the objects of the run.
    pub(crate) index: u64,
}

/// The bytes of a key as this bench writes it: run and index in hexadecimal.
pub(crate) type KeyBytes = [u8; 33];

impl KeyId {
    /// The key as bytes.
    pub(crate) fn bytes(self) -> KeyBytes {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut bytes = [b'/'; 33];
        for digit in 0..16 {
            let shift = 60 - 4 * digit;
            bytes[digit] = DIGITS[(self.run >> shift) as usize & 15];
            bytes[17 + digit] = DIGITS[(self.index >> shift) as usize & 15];
        }
        bytes
    }

    fn base(self) -> u64 {
        mix(mix(self.run).wrapping_add(self.index).wrapping_add(STEP))
    }
}

/// Writes the body of `key` over all of `into`.
pub(crate) fn fill(key: KeyId, into: &mut [u8]) {
    let mut lanes = lanes(key.base(), 0);
    let (lines, rest) = into.as_chunks_mut::<LINE>();
    for line in lines {
        let (words, _) = line.as_chunks_mut::<WORD>();
        for at in 0..WORDS {
            words[at] = lanes[at].to_le_bytes();
        }
        advance(&mut lanes);
    }
    for (bytes, word) in rest.chunks_mut(WORD).zip(&lanes) {
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
}

/// The offset of the first byte in `spans`, one after the other, that is not the body of `key`; `None` when all are.
pub(crate) fn first_wrong<'a>(key: KeyId, spans: impl IntoIterator<Item = &'a [u8]>) -> Option<usize> {
    let base = key.base();
    let mut start = 0;
    for span in spans {
        // Spans are whole pages but for the last, so this is the only shape that must be fast.
        let wrong =
            if start % LINE == 0 { wrong_line(base, start, span) } else { wrong_byte(base, start, span) };
        if wrong.is_some() {
            return wrong;
        }
        start += span.len();
    }
    None
}

fn wrong_line(base: u64, start: usize, span: &[u8]) -> Option<usize> {
    let mut lanes = lanes(base, start / WORD);
    let (lines, rest) = span.as_chunks::<LINE>();
    for (index, line) in lines.iter().enumerate() {
        let (words, _) = line.as_chunks::<WORD>();
        let mut difference = 0;
        for at in 0..WORDS {
            difference |= u64::from_le_bytes(words[at]) ^ lanes[at];
        }
        if difference != 0 {
            return wrong_byte(base, start + index * LINE, line);
        }
        advance(&mut lanes);
    }
    wrong_byte(base, start + span.len() - rest.len(), rest)
}

fn wrong_byte(base: u64, start: usize, bytes: &[u8]) -> Option<usize> {
    let right = |at: usize| {
        let word = base.wrapping_add(STEP.wrapping_mul((at / WORD) as u64));
        word.to_le_bytes()[at % WORD]
    };
    (start..).zip(bytes).find(|(at, byte)| right(*at) != **byte).map(|(at, _)| at)
}

#[inline]
fn lanes(base: u64, word: usize) -> [u64; WORDS] {
    array::from_fn(|lane| base.wrapping_add(STEP.wrapping_mul((word + lane) as u64)))
}

#[inline]
fn advance(lanes: &mut [u64; WORDS]) {
    for lane in lanes {
        *lane = lane.wrapping_add(STEP.wrapping_mul(WORDS as u64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: KeyId = KeyId { run: 3, index: 17 };

    fn body(key: KeyId, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        fill(key, &mut bytes);
        bytes
    }

    #[test]
    fn a_body_is_right_however_it_is_cut() {
        for len in [1, 7, 8, 63, 64, 65, 4096, 10_001] {
            let bytes = body(KEY, len);
            assert_eq!(first_wrong(KEY, [bytes.as_slice()]), None, "length {len}");
            for cut in [1, len / 3, len / 2, len - 1] {
                let (head, tail) = bytes.split_at(cut.min(len));
                assert_eq!(first_wrong(KEY, [head, tail]), None, "length {len} cut at {cut}");
            }
        }
    }

    #[test]
    fn any_flipped_byte_is_found_where_it_is() {
        for at in [0, 1, 8, 63, 64, 4095, 4096, 9_999, 10_000] {
            let mut bytes = body(KEY, 10_001);
            bytes[at] ^= 1;
            assert_eq!(first_wrong(KEY, [bytes.as_slice()]), Some(at));
            assert_eq!(first_wrong(KEY, [&bytes[..4096], &bytes[4096..]]), Some(at));
        }
    }

    #[test]
    fn other_keys_shifted_and_swapped_bytes_are_wrong_at_once() {
        let bytes = body(KEY, 8192);
        for other in [KeyId { run: 3, index: 18 }, KeyId { run: 4, index: 17 }, KeyId { run: 4, index: 16 }] {
            assert!(first_wrong(other, [bytes.as_slice()]).is_some_and(|at| at < WORD), "{other:?}");
        }
        for shift in [1, 8, 64, 4096] {
            assert!(first_wrong(KEY, [&bytes[shift..]]).is_some_and(|at| at < WORD), "shift {shift}");
        }
        let (first, second) = bytes.split_at(4096);
        assert!(first_wrong(KEY, [second, first]).is_some_and(|at| at < WORD));
    }

    #[test]
    fn every_word_differs_from_the_same_word_of_another_key() {
        let (one, other) = (body(KEY, 1 << 16), body(KeyId { run: 3, index: 18 }, 1 << 16));
        assert!(one.chunks(WORD).zip(other.chunks(WORD)).all(|(one, other)| one != other));
    }

    #[test]
    fn keys_differ() {
        assert_eq!(&KeyId { run: 0xab, index: 1 }.bytes(), b"00000000000000ab/0000000000000001");
        assert_ne!(KeyId { run: 1, index: 2 }.bytes(), KeyId { run: 2, index: 1 }.bytes());
    }
}
