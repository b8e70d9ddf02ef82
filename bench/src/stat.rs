//! How noise is kept from deciding: a ratio is the median of ratios of adjacent slices, and an arm against itself
//! stands beside it.

use std::ops::RangeInclusive;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::report::number;

/// An arm against itself outside this range says that noise decides: the run is void, not failed.
pub(crate) const SAME_ARM_RANGE: RangeInclusive<f64> = 0.95..=1.05;

/// The rounds that a ratio needs at least.
pub(crate) const ROUNDS_MIN: usize = 21;

/// Rates of `ARMS` arms, measured next to each other, round by round.
#[derive(Clone, Debug)]
pub(crate) struct Rounds<const ARMS: usize> {
    rates: Vec<[f64; ARMS]>,
}

impl<const ARMS: usize> Rounds<ARMS> {
    pub(crate) fn new() -> Self {
        Rounds { rates: Vec::new() }
    }

    /// The order of the arms in round `index`: there and back, so that a drift of the machine favours none.
    pub(crate) fn order(index: usize) -> [usize; ARMS] {
        std::array::from_fn(|at| if index.is_multiple_of(2) { at } else { ARMS - 1 - at })
    }

    /// Adds a round: the rate of each arm, in any unit.
    pub(crate) fn push(&mut self, rates: [f64; ARMS]) {
        self.rates.push(rates);
    }

    pub(crate) fn len(&self) -> usize {
        self.rates.len()
    }

    /// The median over the rounds of arm `arm` ÷ arm `base`.
    pub(crate) fn ratio(&self, arm: usize, base: usize) -> f64 {
        median(self.rates.iter().map(|rates| rates[arm] / rates[base]))
    }

    /// The median over the rounds of arm `arm` − arm `base`.
    pub(crate) fn difference(&self, arm: usize, base: usize) -> f64 {
        median(self.rates.iter().map(|rates| rates[arm] - rates[base]))
    }

    /// The median rate of an arm.
    pub(crate) fn rate(&self, arm: usize) -> f64 {
        median(self.rates.iter().map(|rates| rates[arm]))
    }

    /// All rates of an arm, in order.
    pub(crate) fn rates(&self, arm: usize) -> Vec<Value> {
        self.rates.iter().map(|rates| number(rates[arm])).collect()
    }

    /// Takes the rounds of `other` too.
    pub(crate) fn extend(&mut self, other: Rounds<ARMS>) {
        self.rates.extend(other.rates);
    }
}

/// The middle of `values`, those that are no numbers left out; NaN when there are none.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[odd / 2],
        even => (values[even / 2 - 1] + values[even / 2]) / 2.0,
    }
}

/// Times of single operations, kept to three digits.
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> Self {
        // From 1 ns to 100 s; longer ones count as 100 s.
        Latencies(Histogram::new_with_bounds(1, 100_000_000_000, 3).expect("the bounds are in order"))
    }

    pub(crate) fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// The time that `percent` of the operations did not exceed, in microseconds; NaN when there were none.
    pub(crate) fn percentile_us(&self, percent: f64) -> f64 {
        if self.0.is_empty() { f64::NAN } else { self.0.value_at_percentile(percent) as f64 / 1000.0 }
    }

    pub(crate) fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("both have the same bounds");
    }

    /// `{p50, p99, count}`, in microseconds.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "p50": number(self.percentile_us(50.0)),
            "p99": number(self.percentile_us(99.0)),
            "count": self.count(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_and_skips_what_is_no_number() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([f64::NAN, 5.0, f64::INFINITY]), 5.0);
        assert!(median([]).is_nan());
    }

    #[test]
    fn a_ratio_is_taken_round_by_round() {
        let mut rounds = Rounds::<2>::new();
        // The machine slows down; the arm is half as fast, but for one round. The ratio of the medians would be 5.
        for (base, arm) in [(1000.0, 500.0), (100.0, 50.0), (10.0, 5.0), (10.0, 100.0), (1.0, 0.5)] {
            rounds.push([base, arm]);
        }
        assert_eq!(rounds.ratio(1, 0), 0.5);
        assert_eq!(rounds.ratio(0, 0), 1.0);
        assert_eq!(rounds.difference(1, 0), -5.0);
    }

    #[test]
    fn the_order_alternates() {
        assert_eq!(Rounds::<3>::order(0), [0, 1, 2]);
        assert_eq!(Rounds::<3>::order(1), [2, 1, 0]);
        assert_eq!(Rounds::<3>::order(2), [0, 1, 2]);
    }

    #[test]
    fn percentiles_come_in_microseconds() {
        let mut latencies = Latencies::new();
        assert!(latencies.percentile_us(50.0).is_nan());
        (1..=100).for_each(|us| latencies.record(Duration::from_micros(us)));
        assert!((latencies.percentile_us(50.0) - 50.0).abs() < 0.1);
        assert!((latencies.percentile_us(99.0) - 99.0).abs() < 0.2);
        latencies.record(Duration::from_secs(1000));
        assert_eq!(latencies.count(), 101);
    }
}
