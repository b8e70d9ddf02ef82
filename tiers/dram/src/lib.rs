//! The DRAM tier: objects that stay in the arena.
//!
//! What it is: one arena under two budgets, *objects* and *staging*. What it is not: it knows no keys and evicts nothing;
//! the index keeps what is resident, the engine decides what leaves.
//! The decision that shaped it: the arena hands out any n free bytes for n bytes, so a budget alone says whether memory is
//! there, and moving memory from staging to objects (promotion) moves a number and no bytes.

#![forbid(unsafe_code)]

use ebbtide_core::{Budget, Charge, HotTier, HotUsage, Object};
use ebbtide_mem::{Arena, BufMut, CHUNK_BYTES, Region, round_up_to_page};

/// What a resident object takes outside the arena besides its key: the slots (whole cache lines, each with a head of 16
/// bytes) of the object and of its buffer's header.
const OBJECT_OVERHEAD_BYTES: usize = (std::mem::size_of::<Object>() + 16).next_multiple_of(64) + 128;

/// The DRAM tier.
pub struct DramTier {
    arena: Arena,
    objects: Budget,
    staging: Budget,
}

impl DramTier {
    /// A tier over `arena`, which must hold at least [`arena_bytes`] of the two budgets. Panics when it does not.
    pub fn new(arena: Arena, objects_bytes_max: u64, staging_bytes_max: u64) -> Self {
        assert!(
            arena.capacity_bytes() >= objects_bytes_max + staging_bytes_max,
            "the arena of {} bytes is smaller than its budgets",
            arena.capacity_bytes()
        );
        DramTier { arena, objects: Budget::new(objects_bytes_max), staging: Budget::new(staging_bytes_max) }
    }

    fn alloc(&self, budget: &Budget, length: usize, charge: u64) -> Option<(BufMut, Charge)> {
        let charge = budget.try_charge(charge)?;
        // Memory goes back before its charge does (see `Object`), so a charge finds it. But for memory that a device keeps
        // after a timeout: then there is none until the kernel has let go.
        match self.arena.alloc(length) {
            Some(memory) => Some((memory, charge)),
            None => {
                charge.cancel();
                None
            }
        }
    }
}

/// The size of an arena for two budgets.
pub fn arena_bytes(objects_bytes_max: u64, staging_bytes_max: u64) -> u64 {
    (objects_bytes_max + staging_bytes_max).next_multiple_of(CHUNK_BYTES as u64)
}

impl HotTier for DramTier {
    fn alloc_object(&self, length: usize, key_bytes: usize) -> Option<(BufMut, Charge)> {
        self.alloc(&self.objects, length, self.object_bytes(length, key_bytes))
    }

    fn alloc_staging(&self, length: usize) -> Option<(BufMut, Charge)> {
        self.alloc(&self.staging, length, round_up_to_page(length) as u64)
    }

    fn adopt(&self, staging: Charge, length: usize, key_bytes: usize) -> Result<Charge, Charge> {
        match self.objects.try_charge(self.object_bytes(length, key_bytes)) {
            Some(charge) => Ok(charge),
            None => Err(staging),
        }
    }

    fn object_bytes(&self, length: usize, key_bytes: usize) -> u64 {
        (round_up_to_page(length) + key_bytes + OBJECT_OVERHEAD_BYTES) as u64
    }

    fn objects_bytes_max(&self) -> u64 {
        self.objects.limit()
    }

    fn objects_free_bytes(&self) -> u64 {
        self.objects.free()
    }

    fn on_room(&self, hook: Box<dyn Fn() + Send + Sync>) {
        self.objects.on_release(hook);
    }

    fn on_staging(&self, hook: Box<dyn Fn() + Send + Sync>) {
        self.staging.on_release(hook);
    }

    fn regions(&self) -> Vec<Region> {
        self.arena.regions().to_vec()
    }

    fn usage(&self) -> HotUsage {
        HotUsage {
            objects_bytes_max: self.objects.limit(),
            objects_bytes: self.objects.used(),
            objects_bytes_peak: self.objects.peak(),
            staging_bytes_max: self.staging.limit(),
            staging_bytes: self.staging.used(),
            backing: self.arena.backing().to_string(),
            degraded: self.arena.degraded().to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn objects_and_staging_have_their_own_bounds() {
        let tier = DramTier::new(Arena::heap(4 * MIB), 2 * MIB, 2 * MIB);
        let (value, charge) = tier.alloc_object(1 << 20, 16).unwrap();
        assert!(tier.alloc_object(1 << 20, 16).is_none(), "keys and headers count too");
        let staged: Vec<_> = (0..2).map(|_| tier.alloc_staging(1 << 20).unwrap()).collect();
        assert!(tier.alloc_staging(1).is_none());
        drop((value, charge));
        drop(staged);
        assert_eq!((tier.usage().objects_bytes, tier.usage().staging_bytes), (0, 0));
        assert_eq!(tier.usage().objects_bytes_peak, tier.object_bytes(1 << 20, 16));
    }

    #[test]
    fn promotion_moves_the_charge_and_no_bytes() {
        let tier = DramTier::new(Arena::heap(4 * MIB), 2 * MIB, 2 * MIB);
        let (value, staging) = tier.alloc_staging(1 << 20).unwrap();
        let charge = tier.adopt(staging, 1 << 20, 16).unwrap();
        assert_eq!(
            (tier.usage().objects_bytes, tier.usage().staging_bytes),
            (tier.object_bytes(1 << 20, 16), 0)
        );
        let (other, staging) = tier.alloc_staging(1 << 20).unwrap();
        let staging = tier.adopt(staging, 1 << 20, 16).unwrap_err();
        assert_eq!(tier.usage().staging_bytes, MIB);
        drop((value, charge, other, staging));
    }
}
