//! Where objects go by default: every victim is written below, what is read again comes back up.

use ebbtide_core::{Candidate, Placement, TierView};

/// The default placement.
#[derive(Clone, Copy, Debug)]
pub struct TidalPlacement {
    /// Whether reads make objects resident again.
    pub promote: bool,
}

impl Default for TidalPlacement {
    fn default() -> Self {
        TidalPlacement { promote: true }
    }
}

impl Placement for TidalPlacement {
    fn demote(&self, candidate: &Candidate, below: &TierView) -> bool {
        below.up && candidate.length <= below.object_bytes_max
    }

    fn promote(&self, candidate: &Candidate, in_arena: bool) -> bool {
        // A value that went straight into the caller's memory would have to be read into the arena as well; the second
        // read shows that it is worth that.
        self.promote && (in_arena || candidate.reads > 1)
    }

    fn reinsert(&self, candidate: &Candidate, budget_bytes: u64) -> bool {
        candidate.reads > 0 && candidate.length <= budget_bytes
    }
}
