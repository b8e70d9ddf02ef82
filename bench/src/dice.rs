//! Dice with a seed: the same seed, the same run.

/// SplitMix64: small, fast, and good enough to shuffle and to draw.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Dice(seed)
    }

    /// Sixty-four random bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number under `bound` (its bias is under 2^-32 for the bounds used here). Zero for a bound of zero.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.next()) * u128::from(bound);
        (wide >> 64) as u64
    }

    /// A number in 0.0..1.0.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A waiting time with this mean, as between events that know nothing of each other.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.unit()).ln() * mean
    }

    /// Puts `items` in random order.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// Spreads every bit of `word` over all bits of the result; no two words give the same.
pub(crate) fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Draws ranks of which the first are asked for most: rank r with weight (r + 1)^-exponent.
pub(crate) struct Zipf {
    cumulated: Vec<f64>,
}

impl Zipf {
    pub(crate) fn new(ranks: u64, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weigh = |rank: u64| {
            sum += ((rank + 1) as f64).powf(-exponent);
            sum
        };
        Zipf { cumulated: (0..ranks).map(weigh).collect() }
    }

    pub(crate) fn draw(&self, dice: &mut Dice) -> u64 {
        let at = dice.unit() * self.cumulated.last().copied().unwrap_or(0.0);
        let rank = self.cumulated.partition_point(|sum| *sum <= at);
        rank.min(self.cumulated.len().saturating_sub(1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_keeps_everything_and_moves_most() {
        let mut items: Vec<u64> = (0..1000).collect();
        Dice::new(7).shuffle(&mut items);
        let kept = items.iter().enumerate().filter(|(at, item)| *at as u64 == **item).count();
        assert!(kept < 20, "{kept} of 1000 stayed in place");
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn zipf_prefers_the_first_ranks_as_much_as_it_says() {
        let zipf = Zipf::new(100, 1.0);
        let mut dice = Dice::new(1);
        let mut counts = [0u32; 100];
        (0..100_000).for_each(|_| counts[zipf.draw(&mut dice) as usize] += 1);
        // The harmonic number of 100 is 5.187: rank 0 has 19.3 %, rank 9 a tenth of that.
        assert!((18_500..20_100).contains(&counts[0]), "{}", counts[0]);
        assert!((1_700..2_200).contains(&counts[9]), "{}", counts[9]);
        assert!(counts[99] > 100);
    }
}
