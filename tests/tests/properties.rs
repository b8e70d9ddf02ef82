//! The story: everything that a store promises, asked of a whole store (engine, DRAM, log, media, disks) that is used by a dozen
//! clients at once and that crashes. A failure names its seed; the seed replays it:
//! `EBBTIDE_SEED=17 cargo test -p ebbtide-sim --test properties replay -- --nocapture`
//! `EBBTIDE_LONG=1` runs more seeds and longer runs; `EBBTIDE_SEEDS` and `EBBTIDE_STEPS` set both.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ebbtide_sim::workload::{Outcome, Plan, run};

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Seeds and steps.
fn depth() -> (u64, u32) {
    let (seeds, steps) = if number("EBBTIDE_LONG").is_some() { (1000, 1000) } else { (200, 300) };
    (number("EBBTIDE_SEEDS").unwrap_or(seeds), number("EBBTIDE_STEPS").map_or(steps, |steps| steps as u32))
}

/// Runs one plan a seed, and says how to replay the first that fails.
fn run_seeds(seeds: std::ops::Range<u64>, plan: fn(u64, u32) -> Plan, replay: &str) -> Vec<Outcome> {
    let (_, steps) = depth();
    let one = |seed| {
        let plan = plan(seed, steps);
        catch_unwind(AssertUnwindSafe(|| run(&plan))).unwrap_or_else(|failure| {
            eprintln!(
                "seed {seed} failed. Replay: EBBTIDE_SEED={seed} EBBTIDE_STEPS={steps} cargo test -p ebbtide-sim \
                 --test properties {replay} -- --nocapture"
            );
            std::panic::resume_unwind(failure)
        })
    };
    seeds.map(one).collect()
}

/// What the workload met, summed: a run that never waits, reclaims or misses proves nothing.
fn summary(outcomes: &[Outcome]) -> [(&'static str, u64); 12] {
    let sum = |get: fn(&Outcome) -> u64| outcomes.iter().map(get).sum();
    [
        ("stored", sum(|o| o.counts.stored)),
        ("hits", sum(|o| o.counts.hits)),
        ("hits_below", sum(|o| o.hits_below)),
        ("misses", sum(|o| o.counts.misses)),
        ("unlucky", sum(|o| o.counts.unlucky)),
        ("flushes", sum(|o| o.counts.flushes)),
        ("puts_waited", sum(|o| o.puts_waited)),
        ("stale_reads", sum(|o| o.stale_reads)),
        ("reclaimed", sum(|o| o.reclaimed)),
        ("reinserted", sum(|o| o.reinserted)),
        ("evicted", sum(|o| o.evicted)),
        ("restarts", sum(|o| u64::from(o.restarts))),
    ]
}

fn half(upper: bool) -> std::ops::Range<u64> {
    let (seeds, _) = depth();
    if upper { seeds / 2..seeds } else { 0..seeds / 2 }
}

fn check_summary(outcomes: &[Outcome]) {
    let summary = summary(outcomes);
    println!("{summary:?}");
    if outcomes.len() < 50 {
        return;
    }
    for (what, count) in summary {
        match what {
            // Rare; `engine.rs` makes one happen.
            "stale_reads" => {}
            "unlucky" => assert_eq!(count, 0, "reads missed what was there"),
            _ => assert!(count > 0, "the workload is too polite: no {what} in {summary:?}"),
        }
    }
}

#[test]
fn a_store_is_a_map_one() {
    check_summary(&run_seeds(half(false), Plan::new, "replay"));
}

#[test]
fn a_store_is_a_map_two() {
    check_summary(&run_seeds(half(true), Plan::new, "replay"));
}

#[test]
fn a_store_on_bad_disks_is_a_map_with_holes() {
    let (seeds, _) = depth();
    check_summary(&run_seeds(0..seeds / 4, Plan::faulty, "bad_replay"));
}

#[test]
fn same_seed_same_run() {
    for seed in [3, 4] {
        assert_eq!(run(&Plan::new(seed, 200)), run(&Plan::new(seed, 200)));
        assert_eq!(run(&Plan::faulty(seed, 200)), run(&Plan::faulty(seed, 200)));
    }
    assert_ne!(run(&Plan::new(3, 200)).fingerprint, run(&Plan::new(4, 200)).fingerprint);
}

#[test]
fn replay() {
    if let Some(seed) = number("EBBTIDE_SEED") {
        let (_, steps) = depth();
        println!("{:#?}", Plan::new(seed, steps));
        println!("{:#?}", run(&Plan::new(seed, steps)));
    }
}

#[test]
fn bad_replay() {
    if let Some(seed) = number("EBBTIDE_SEED") {
        let (_, steps) = depth();
        println!("{:#?}", Plan::faulty(seed, steps));
        println!("{:#?}", run(&Plan::faulty(seed, steps)));
    }
}
