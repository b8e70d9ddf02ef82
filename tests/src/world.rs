//! A store with everything under it, from one seed: it starts, crashes, and starts again on what the crash left.

use std::sync::Arc;
use std::time::Duration;

use ebbtide_core::{BlockDevice, Env, HotTier, HotUsage, Medium, RecoverySummary, Result, Tier};
use ebbtide_device::{Faults, SimDisk, SimOptions as DiskOptions};
use ebbtide_engine::{Engine, Parts, Policy, Settings, TidalPlacement};
use ebbtide_media::{BlockMedium, BlockOptions};
use ebbtide_mem::Arena;
use ebbtide_tier_dram::{DramTier, arena_bytes};
use ebbtide_tier_log::{LogOptions, LogTier};

use crate::SimEnv;
use crate::faketier::{FakeDisk, FakeOptions, FakeTier};

/// What lies below DRAM.
#[derive(Clone, Debug)]
pub enum BelowOptions {
    /// Nothing.
    None,
    /// A tier in memory, for the engine alone.
    Fake(FakeOptions),
    /// The log on simulated disks.
    Log {
        /// How many disks.
        disks: u16,
        /// Segments on each.
        segments: u32,
    },
}

/// How a world is made.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// Bytes that objects may take in DRAM.
    pub dram_bytes: u64,
    /// Bytes of the arena for reads and headers.
    pub staging_bytes: u64,
    /// What lies below.
    pub below: BelowOptions,
    /// The order in which objects leave DRAM.
    pub policy: Policy,
    /// What goes wrong on the disks while the store runs; not while it starts.
    pub faults: Faults,
}

impl Default for WorldOptions {
    fn default() -> Self {
        WorldOptions {
            dram_bytes: 4 << 20,
            staging_bytes: 4 << 20,
            below: BelowOptions::Log { disks: 1, segments: 16 },
            policy: Policy::Lru,
            faults: Faults::default(),
        }
    }
}

/// How a process ends without closing its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process is killed; what was written is there.
    Kill,
    /// The power is cut; what was not flushed is torn.
    Power,
}

/// The size of a segment: the least that a medium takes.
pub const SEGMENT_BYTES: u64 = 1 << 20;
const HEADER_BYTES: usize = 64 << 10;
const HEADERS: usize = 8;

/// A store and what it lies on.
pub struct World {
    env: SimEnv,
    options: WorldOptions,
    disks: Disks,
    running: Option<Running>,
}

enum Disks {
    None,
    Fake(FakeDisk),
    Sim(Vec<SimDisk>),
}

struct Running {
    engine: Engine,
    hot: Arc<DramTier>,
    tier: Option<Arc<dyn Tier>>,
    fake: Option<FakeTier>,
}

impl World {
    /// A world whose disks are empty and whose store does not run.
    pub fn new(env: SimEnv, options: WorldOptions) -> Self {
        let disk = |index: u16, segments: u32| {
            SimDisk::new(DiskOptions {
                name: format!("sim{index}"),
                capacity_bytes: u64::from(segments) * SEGMENT_BYTES + SEGMENT_BYTES,
                ..DiskOptions::default()
            })
        };
        let disks = match &options.below {
            BelowOptions::None => Disks::None,
            BelowOptions::Fake(_) => Disks::Fake(FakeDisk::default()),
            BelowOptions::Log { disks, segments } => {
                Disks::Sim((0..*disks).map(|index| disk(index, *segments)).collect())
            }
        };
        World { env, options, disks, running: None }
    }

    /// Opens the store on what the disks hold.
    pub async fn start(&mut self) -> Result<RecoverySummary> {
        let options = &self.options;
        self.set_faults(Faults::default());
        let arena = Arena::heap(arena_bytes(options.dram_bytes, options.staging_bytes));
        let hot = Arc::new(DramTier::new(arena, options.dram_bytes, options.staging_bytes));
        let (tier, fake) = self.open_tier(&hot).await?;
        let parts = Parts {
            env: Arc::new(self.env.clone()),
            hot: Arc::clone(&hot) as Arc<dyn HotTier>,
            tiers: tier.iter().cloned().collect(),
            placement: Box::new(TidalPlacement::default()),
            secret: [self.env.seed(), 1],
        };
        let engine = Engine::new(parts, self.settings());
        let summary = engine.recover().await;
        self.running = Some(Running { engine, hot, tier, fake });
        self.set_faults(self.options.faults);
        summary
    }

    async fn open_tier(&self, hot: &Arc<DramTier>) -> Result<(Option<Arc<dyn Tier>>, Option<FakeTier>)> {
        let disks = match (&self.disks, &self.options.below) {
            (Disks::None, _) => return Ok((None, None)),
            (Disks::Fake(disk), BelowOptions::Fake(options)) => {
                let tier = FakeTier::open(self.env.clone(), disk.clone(), options.clone());
                return Ok((Some(Arc::new(tier.clone())), Some(tier)));
            }
            (Disks::Fake(_), _) => return Ok((None, None)),
            (Disks::Sim(disks), _) => disks,
        };
        let env: Arc<dyn Env> = Arc::new(self.env.clone());
        let mut media: Vec<Arc<dyn Medium>> = Vec::new();
        let mut store = None;
        for (index, disk) in disks.iter().enumerate() {
            let device = disk.open(&env);
            device.register(&hot.regions())?;
            let options = BlockOptions {
                capacity_bytes: device.info().capacity_bytes,
                segment_bytes: Some(SEGMENT_BYTES),
                store,
                index: index as u16,
                count: disks.len() as u16,
            };
            let medium = BlockMedium::open(Arc::new(device), options, &*env).await?;
            store = Some(medium.identity().store);
            media.push(Arc::new(medium));
        }
        let headers = (0..HEADERS).filter_map(|_| hot.alloc_staging(HEADER_BYTES)).collect();
        let tier = LogTier::open(media, LogOptions { name: "ssd".into(), env, headers })?;
        Ok((Some(Arc::new(tier)), None))
    }

    /// Small bounds, so that every one of them is met.
    fn settings(&self) -> Settings {
        Settings {
            shards: 4,
            touch_rings: 2,
            policy: self.options.policy,
            clean_ahead_bytes: self.options.dram_bytes / 8,
            demote_batch_bytes: 256 << 10,
            demote_bytes_in_flight_max: self.options.dram_bytes / 4,
            put_wait_max: Duration::from_secs(10),
            read_wait_max: Duration::from_secs(10),
            reinsert_share_max: 0.3,
            ..Settings::new(self.options.dram_bytes, 1)
        }
    }

    /// Ends the process without a word. Outside of `block_on`.
    pub fn crash(&mut self, crash: Crash) {
        match &self.disks {
            Disks::None => {}
            Disks::Fake(disk) if crash == Crash::Power => disk.cut_power(),
            Disks::Fake(_) => {}
            Disks::Sim(disks) => disks.iter().for_each(|disk| match crash {
                Crash::Kill => disk.kill(&self.env),
                Crash::Power => disk.crash(&self.env),
            }),
        }
        self.env.kill_tasks();
        self.running = None;
    }

    /// Drops a store that was closed. Outside of `block_on`, after the last client.
    pub fn stop(&mut self) {
        self.env.run_until_idle();
        self.running = None;
        self.env.run_until_idle();
    }

    /// Changes what goes wrong on the disks from here on.
    pub fn set_faults(&self, faults: Faults) {
        if let Disks::Sim(disks) = &self.disks {
            disks.iter().for_each(|disk| disk.set_faults(faults));
        }
    }

    /// The clock, dice and tasks.
    pub fn env(&self) -> &SimEnv {
        &self.env
    }

    /// How it was made.
    pub fn options(&self) -> &WorldOptions {
        &self.options
    }

    /// The store. Panics when it does not run.
    pub fn engine(&self) -> &Engine {
        &self.running().engine
    }

    /// The tier below, where there is one.
    pub fn tier(&self) -> Option<&Arc<dyn Tier>> {
        self.running().tier.as_ref()
    }

    /// The fake tier, where the tier below is one.
    pub fn fake(&self) -> Option<&FakeTier> {
        self.running().fake.as_ref()
    }

    /// DRAM.
    pub fn hot(&self) -> &Arc<DramTier> {
        &self.running().hot
    }

    /// What DRAM holds.
    pub fn hot_usage(&self) -> HotUsage {
        self.hot().usage()
    }

    /// Staging that the tier's headers keep for themselves.
    pub fn staging_floor(&self) -> u64 {
        if matches!(self.disks, Disks::Sim(_)) { (HEADERS * HEADER_BYTES) as u64 } else { 0 }
    }

    fn running(&self) -> &Running {
        self.running.as_ref().expect("the store runs")
    }
}
