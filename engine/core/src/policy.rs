//! The contracts of policies: plain, pure, synchronous; no I/O and no clock of their own.

/// What a policy knows an object by: small, dense, reused after removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId(pub u32);

/// What an object costs to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Bytes that its departure frees.
    pub bytes: u64,
    /// A hash of its identity, by which a policy may remember it after it left.
    pub tag: u64,
}

/// Where an object enters the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rank {
    /// It was just put, or read in from below.
    New,
    /// It was out of the order and was touched meanwhile.
    Hot,
    /// It was out of the order and was not touched: it is next to go.
    Cold,
}

/// The order in which objects leave a tier.
///
/// One owner calls it; touches reach it in batches, in order.
pub trait Eviction: Send {
    /// The policy's name: "lru", "s3fifo".
    fn name(&self) -> &'static str;

    /// Takes `id` into the order. An `id` that is in it already is an error of the caller and is ignored.
    fn insert(&mut self, id: ObjectId, cost: Cost, rank: Rank);

    /// `id` will be inserted or touched very soon: a hint for a policy whose memory of it may be far away.
    fn expect(&self, _id: ObjectId) {}

    /// `id` was used. Unknown ids are ignored: touches may come late.
    fn touch(&mut self, id: ObjectId);

    /// Takes `id` out of the order and says how to put it back; `None` when it was not in it.
    fn remove(&mut self, id: ObjectId) -> Option<Rank>;

    /// Takes objects of at least `bytes` in all (or all there are) out of the order, coldest first, onto `out`. Returns
    /// their bytes. Costs in proportion to what it takes out.
    fn victims(&mut self, bytes: u64, out: &mut Vec<ObjectId>) -> u64;

    /// How many objects are in the order.
    fn len(&self) -> usize;

    /// True when no object is in the order.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A tier below DRAM as a policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierView {
    /// False while it takes no writes.
    pub up: bool,
    /// The longest value it takes.
    pub object_bytes_max: u64,
    /// Its size.
    pub capacity_bytes: u64,
}

/// An object about to move, as a policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its length.
    pub length: u64,
    /// How often it was read below DRAM since it was written there (saturating at 3).
    pub reads: u8,
}

/// Where objects go.
pub trait Placement: Send + Sync {
    /// True when a victim of DRAM is to be written to the tier below; false drops it.
    fn demote(&self, candidate: &Candidate, below: &TierView) -> bool;

    /// True when a value that was read below, straight into the caller's memory or not, should become resident.
    /// `in_arena`: its bytes are in arena memory anyway, so that no copy is needed.
    fn promote(&self, candidate: &Candidate, in_arena: bool) -> bool;

    /// True when a live row of a segment under reclaim is to be written again. `budget_bytes` is what re-insertion may
    /// still write.
    fn reinsert(&self, candidate: &Candidate, budget_bytes: u64) -> bool;
}
