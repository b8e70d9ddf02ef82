//! What the allocator promises its users, over long random lives.
//!
//! An allocator of contiguous slots loses 4 to 5 % of its memory here (that is what a peer publishes), and refuses large
//! objects while enough memory is free in small pieces. This one gives an object several spans, so that memory is lost
//! to the last page of each object and to nothing else. `EBBTIDE_LONG=1` runs ten times as long.

use ebbtide_mem::{Arena, BufMut, PAGE_BYTES, round_up_to_page};

const BIG: usize = 3_274_752;
const SMALL: usize = 658_432;

/// SplitMix64: a test's dice.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.roll()) * bound as u128) >> 64) as usize
    }

    /// Between 4 KiB and 32 MiB; each doubling is as likely as the next.
    fn log_uniform(&mut self) -> usize {
        let exponent = 12.0 + 13.0 * (self.roll() >> 11) as f64 / (1u64 << 53) as f64;
        exponent.exp2() as usize
    }
}

fn times_longer() -> usize {
    if std::env::var_os("EBBTIDE_LONG").is_some_and(|value| value == "1") { 10 } else { 1 }
}

fn share(arena: &Arena, live: usize) -> f64 {
    live as f64 / arena.capacity_bytes() as f64
}

/// Fills 1 GiB with groups of objects of `sizes`, then evicts 5 % and fills again, many times. Returns the mean share of
/// the arena that live value bytes take when it is full.
fn utilisation(sizes: &[usize], seed: u64) -> f64 {
    let (arena, mut dice) = (Arena::heap(1 << 30), Dice(seed));
    let group = || sizes.iter().map(|size| arena.alloc(*size)).collect::<Option<Vec<BufMut>>>();
    let group_bytes: usize = sizes.iter().sum();
    let mut live = Vec::new();
    let (mut sum, rounds) = (0.0, 200 * times_longer());
    for _ in 0..rounds {
        while let Some(objects) = group() {
            live.push(objects);
        }
        sum += share(&arena, live.len() * group_bytes);
        for _ in 0..live.len().div_ceil(20) {
            live.swap_remove(dice.below(live.len()));
        }
    }
    sum / rounds as f64
}

#[test]
fn uses_99_percent_for_values_of_one_size() {
    for seed in 0..3 {
        let used = utilisation(&[BIG], seed);
        assert!(used >= 0.99, "seed {seed}: {used:.4} of the arena used");
    }
}

#[test]
fn uses_99_percent_for_pairs() {
    for seed in 0..3 {
        let used = utilisation(&[BIG, SMALL], seed);
        assert!(used >= 0.99, "seed {seed}: {used:.4} of the arena used");
    }
}

/// Both sizes come and go on their own, so that the halves of a pair do not leave the same hole.
#[test]
fn uses_99_percent_when_the_parts_of_pairs_die_apart() {
    let (arena, mut dice) = (Arena::heap(1 << 30), Dice(5));
    let mut live: Vec<BufMut> = Vec::new();
    let (mut sum, rounds) = (0.0, 200 * times_longer());
    for _ in 0..rounds {
        loop {
            let size = if dice.below(2) == 0 { BIG } else { SMALL };
            let Some(buf) = arena.alloc(size).or_else(|| arena.alloc(SMALL)) else { break };
            live.push(buf);
        }
        sum += share(&arena, live.iter().map(BufMut::len).sum());
        for _ in 0..live.len().div_ceil(20) {
            live.swap_remove(dice.below(live.len()));
        }
    }
    let used = sum / rounds as f64;
    assert!(used >= 0.99, "{used:.4} of the arena used");
}

/// The mixed test: a put succeeds whenever that many bytes are free, in whatever pieces.
#[test]
fn enough_free_bytes_are_enough() {
    for (seed, capacity) in [(1, 64 << 20), (2, 1 << 30), (3, (1 << 30) + (6 << 20))] {
        let (arena, mut dice) = (Arena::heap(capacity), Dice(seed));
        let mut live: Vec<BufMut> = Vec::new();
        let (mut live_pages_bytes, mut refused) = (0, 0);
        for step in 0..100_000 * times_longer() {
            if !live.is_empty() && dice.below(5) == 0 {
                let victim = live.swap_remove(dice.below(live.len()));
                live_pages_bytes -= round_up_to_page(victim.len());
            }
            let len = dice.log_uniform();
            let free = arena.free_bytes();
            assert_eq!(free, capacity - live_pages_bytes as u64);
            match arena.alloc(len) {
                Some(buf) => {
                    live_pages_bytes += round_up_to_page(len);
                    live.push(buf);
                }
                None => {
                    // Stricter than the promise, which allows 4 % more: not a byte beyond the last page.
                    let enough = len.div_ceil(PAGE_BYTES) * PAGE_BYTES;
                    assert!(free < enough as u64, "seed {seed} step {step}: {len} B refused, {free} free");
                    refused += 1;
                }
            }
        }
        assert!(refused > 1000, "the arena was never full: the test is too polite");
        live.clear();
        assert_eq!(arena.used_bytes(), 0);
        assert!(arena.alloc(capacity as usize).is_some(), "all of it is one object again");
    }
}
