//! What a store is made of, for people: what is in force and what is degraded.

use std::fmt;

use ebbtide_core::{ByteSize, HotUsage, RecoverySummary, TierInfo, TierUsage};

/// The optional parts that this build has.
pub const BUILT_WITH: &[&str] = &[
    #[cfg(feature = "uring-tokio")]
    "uring-tokio",
];

/// What a store is made of.
#[derive(Clone, Debug)]
pub struct Status {
    /// This release.
    pub version: &'static str,
    /// The optional parts that this build has.
    pub built_with: &'static [&'static str],
    /// The name of the namespace; its identity is kept by the client.
    pub namespace: String,
    /// DRAM.
    pub hot: HotUsage,
    /// The tiers below, top down.
    pub tiers: Vec<(TierInfo, TierUsage)>,
    /// How the start went.
    pub recovery: RecoverySummary,
    /// Optional features that are not in force anywhere, each with its reason.
    pub degraded: Vec<String>,
    /// Files in the store's directory that are not the store's.
    pub foreign_files: Vec<String>,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts =
            if self.built_with.is_empty() { "default parts".into() } else { self.built_with.join(", ") };
        writeln!(f, "ebbtide {} ({parts})", self.version)?;
        writeln!(f, "namespace  {} (identity kept by the client)", self.namespace)?;
        let hot = &self.hot;
        let (used, most) = (ByteSize(hot.objects_bytes), ByteSize(hot.objects_bytes_max));
        writeln!(
            f,
            "dram       {used} of {most}, staging {}, {}",
            ByteSize(hot.staging_bytes_max),
            hot.backing
        )?;
        for (info, usage) in &self.tiers {
            let (used, most) = (ByteSize(usage.used_bytes), ByteSize(info.capacity_bytes));
            let live = ByteSize(usage.live_bytes);
            let segments = ByteSize(info.segment_bytes);
            writeln!(
                f,
                "{:<10} {used} of {most} in segments of {segments}, {live} live, on {}",
                info.name, info.on
            )?;
        }
        match self.degraded.as_slice() {
            [] => writeln!(f, "degraded   nothing")?,
            all => all.iter().try_for_each(|what| writeln!(f, "degraded   {what}"))?,
        }
        self.foreign_files
            .iter()
            .try_for_each(|name| writeln!(f, "foreign    {name} is not the store's; left alone"))
    }
}
