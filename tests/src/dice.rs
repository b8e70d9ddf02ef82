//! Dice: a generator of random numbers that a seed determines.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Dice whose every throw follows from `seed`.
    pub fn new(seed: u64) -> Self {
        Dice(mix(seed ^ 0x6562_6274_6964_6521))
    }

    /// Sixty-four random bits.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number under `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The remainder prefers small numbers by 2^-32 at most: nothing that a test could feel.
        self.roll() % bound
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True `share` times out of a thousand.
    pub fn permille(&mut self, share: u64) -> bool {
        self.below(1000) < share
    }

    /// One of `choices`, which are not none.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// A length whose logarithm is even between those of `low` and `high`: as many small as large ones.
    pub fn log_uniform(&mut self, low: u64, high: u64) -> u64 {
        let (low, high) = (low as f64, high as f64);
        let at = self.below(1 << 32) as f64 / (1u64 << 32) as f64;
        (low.ln() + (high.ln() - low.ln()) * at).exp().round().clamp(low, high) as u64
    }
}

/// The finaliser of SplitMix64: a bijection that spreads every bit.
pub(crate) fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_determines_every_throw_and_bounds_hold() {
        let throws = |seed| {
            let mut dice = Dice::new(seed);
            (0..100).map(|_| dice.roll()).collect::<Vec<_>>()
        };
        assert_eq!(throws(7), throws(7));
        assert_ne!(throws(7), throws(8));
        let mut dice = Dice::new(1);
        for _ in 0..10_000 {
            assert!((3..=9).contains(&dice.between(3, 9)));
            assert!((1..=600_000).contains(&dice.log_uniform(1, 600_000)));
        }
    }
}
