//! Bodies: what an object should hold follows from its key and its version, so that every returned object checks itself.

use ebbtide_core::Object;

use crate::dice::{Dice, mix};

/// The key numbered `key`: 8 to 60 bytes.
pub fn key_of(key: u32) -> Vec<u8> {
    format!("{key:08}{}", "k".repeat(mix(u64::from(key)) as usize % 53)).into_bytes()
}

/// How long the value of `key` in `version` is, from the first to the second of `lengths`.
pub fn length_of(key: u32, version: u32, lengths: (u64, u64)) -> usize {
    let mut dice = Dice::new(seed_of(key, version));
    // A few stand on the edges of pages and of checksum blocks.
    let edges = [1, 4095, 4096, 4097, 131_072, 131_073];
    let length = if dice.permille(100) { *dice.pick(&edges) } else { dice.log_uniform(lengths.0, lengths.1) };
    length.min(lengths.1) as usize
}

/// The value of `key` in `version`.
pub fn body_of(key: u32, version: u32, length: usize) -> Vec<u8> {
    let mut body = Vec::with_capacity(length + 8);
    let mut word = seed_of(key, version);
    while body.len() < length {
        word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ 0x5555;
        body.extend_from_slice(&word.to_le_bytes());
    }
    body.truncate(length);
    body
}

/// Whether `object` holds exactly the value of `key` in `version`.
pub fn is_body(object: &Object, key: u32, version: u32, length: usize) -> bool {
    if object.value.len() != length {
        return false;
    }
    let body = body_of(key, version, length);
    let mut at = 0;
    object.value.spans().all(|span| {
        let same = body.get(at..at + span.len()) == Some(span);
        at += span.len();
        same
    })
}

fn seed_of(key: u32, version: u32) -> u64 {
    mix((u64::from(key) << 32) | u64::from(version)) | 1
}
