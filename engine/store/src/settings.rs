//! What someone may want to tune, with defaults and bounds.

use std::time::Duration;

use crate::Policy;

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Shards of the index, a power of two, at least four times the cores.
    pub shards: usize,
    /// Touch rings, a power of two, about twice the cores.
    pub touch_rings: usize,
    /// The order in which objects leave DRAM.
    pub policy: Policy,
    /// Bytes at the cold end of DRAM that are kept free or written below ahead of need, so that a put finds room without
    /// waiting for the device. They stay readable until the room is taken.
    pub clean_ahead_bytes: u64,
    /// Values are handed to the tier below in batches of about this size.
    pub demote_batch_bytes: u64,
    /// Bytes of values on their way below, at most.
    pub demote_bytes_in_flight_max: u64,
    /// Failed writes of one object before it is dropped (and counted).
    pub demote_failures_max: u8,
    /// How long a put waits for room before it is refused as full.
    pub put_wait_max: Duration,
    /// Bytes of values that wait for room, at most; a put over it is refused as full.
    pub put_waiting_bytes_max: u64,
    /// How long a read waits for memory for its result.
    pub read_wait_max: Duration,
    /// The longest value.
    pub object_bytes_max: u64,
    /// Whether values read from below are checked. Off only to measure what the check costs.
    pub verify_reads: bool,
    /// The share of re-inserted bytes in all value bytes written below, at most.
    pub reinsert_share_max: f64,
}

impl Settings {
    /// Defaults for a DRAM tier of `dram_bytes` on `cores` cores.
    pub fn new(dram_bytes: u64, cores: usize) -> Self {
        Settings {
            shards: (4 * cores).next_power_of_two().max(64),
            touch_rings: (2 * cores).next_power_of_two().max(8),
            policy: Policy::Lru,
            clean_ahead_bytes: (dram_bytes / 8).min(64 << 20),
            demote_batch_bytes: 1 << 20,
            demote_bytes_in_flight_max: (dram_bytes / 4).min(32 << 20),
            demote_failures_max: 3,
            put_wait_max: Duration::from_secs(10),
            put_waiting_bytes_max: 256 << 20,
            read_wait_max: Duration::from_secs(10),
            object_bytes_max: 256 << 20,
            verify_reads: true,
            reinsert_share_max: 0.15,
        }
    }
}
