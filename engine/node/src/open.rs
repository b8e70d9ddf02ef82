//! Opening a store: the only place where arena, devices, media and tiers meet by name.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebbtide_core::{
    BlockDevice, Env, Error, HotTier, Medium, NamespaceId, RecoverySummary, Result, Tier, block_on,
};
use ebbtide_device::{DirectDevice, PsyncDevice, UringDevice, UringOptions, open_best, preallocate};
use ebbtide_engine::{Engine, Parts, Settings, TidalPlacement};
use ebbtide_media::superblock::{AREA_BYTES, Found, find};
use ebbtide_media::{BlockMedium, BlockOptions, geometry};
use ebbtide_mem::{Arena, ArenaOptions, PAGE_BYTES};
use ebbtide_tier_dram::{DramTier, arena_bytes};
use ebbtide_tier_log::{LogOptions, LogTier};

use crate::config::{Config, DeviceKind, Prealloc};
use crate::env::RealEnv;
use crate::owner::Owner;
use crate::store::{Progress, Shared, Store};

impl Store {
    /// Opens the store that `config` describes, or makes it.
    ///
    /// Invalid (configuration, directory, device too small), Unavailable (another owner, device), Corrupt (superblock), each
    /// with one line that names the thing. What cannot be opened is left as it was.
    pub fn open(config: Config) -> Result<Store> {
        Store::open_with_progress(config, &|_| {})
    }

    /// As [`open`](Self::open), telling `progress` how far the long parts have come.
    pub fn open_with_progress(config: Config, progress: &dyn Fn(Progress)) -> Result<Store> {
        config.check()?;
        let owner = if config.ssd.0 > 0 { Some(Owner::take(&config.dir)?) } else { None };
        let (env, threads) = RealEnv::start()?;
        let env: Arc<dyn Env> = env;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let store = store_uuid(&config, &*env)?;
        let devices = open_devices(&config, progress)?;
        let hot = open_dram(&config, store, cores, progress)?;
        let tiers = open_tiers(&config, store, &devices, &hot, &env)?;
        let mut settings = Settings::new(config.dram.0, cores);
        apply(&config, &mut settings);
        let parts = Parts {
            env: Arc::clone(&env),
            hot: Arc::clone(&hot),
            tiers,
            placement: Box::new(TidalPlacement { promote: config.promote }),
            secret: [env.random(), env.random()],
        };
        let engine = Engine::new(parts, settings);
        progress(Progress { stage: "recover", done: 0, total: config.ssd.0 });
        let recovery: RecoverySummary = block_on(engine.recover())?;
        progress(Progress { stage: "recover", done: config.ssd.0, total: config.ssd.0 });
        let namespace = namespace_of(&config.namespace);
        let degraded = Vec::new();
        Ok(Store::new(Shared {
            engine,
            namespace,
            config,
            recovery,
            hot,
            devices,
            degraded,
            _threads: threads,
            owner,
        }))
    }
}

fn apply(config: &Config, settings: &mut Settings) {
    settings.policy = config.policy;
    settings.verify_reads = config.verify_reads;
    settings.reinsert_share_max = config.reinsert_share_max;
    settings.object_bytes_max = config.object_bytes_max.0.min(config.dram.0 / 2);
    settings.put_wait_max = Duration::from_millis(config.put_wait_ms_max);
    settings.put_waiting_bytes_max = config.put_waiting_bytes_max.0;
    if let Some(clean_ahead) = config.clean_ahead {
        settings.clean_ahead_bytes = clean_ahead.0.min(config.dram.0);
    }
}

/// The id of an opaque namespace: the first 128 bits of BLAKE3 of its canonical form.
fn namespace_of(name: &str) -> NamespaceId {
    let canonical = format!("{{\"tenant\":\"default\",\"opaque\":{name:?}}}");
    let hash = blake3::hash(canonical.as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&hash.as_bytes()[..16]);
    NamespaceId(id)
}

/// The uuid of the store: the one on its devices, or a new one.
fn store_uuid(config: &Config, env: &dyn Env) -> Result<[u8; 16]> {
    let devices = if config.ssd.0 > 0 { paths(config) } else { Vec::new() };
    for path in devices {
        if let Start::Taken(Some(store)) = start_of(&path)? {
            return Ok(store);
        }
    }
    let mut store = [0; 16];
    store[..8].copy_from_slice(&env.random().to_le_bytes());
    store[8..].copy_from_slice(&env.random().to_le_bytes());
    Ok(store)
}

fn open_dram(
    config: &Config,
    store: [u8; 16],
    cores: usize,
    progress: &dyn Fn(Progress),
) -> Result<Arc<dyn HotTier>> {
    let staging =
        if config.ssd.0 > 0 { config.staging_bytes() } else { config.staging.map_or(0, |bytes| bytes.0) };
    let bytes = arena_bytes(config.dram.0, staging);
    progress(Progress { stage: "prefault", done: 0, total: bytes });
    // The store's name, so that the next start finds and frees what a killed process left. A store without a directory has
    // no next start: its memory loses its name at once.
    let name = store.iter().map(|byte| format!("{byte:02x}")).collect();
    let keep_name = config.ssd.0 > 0;
    let options =
        ArenaOptions { name, bytes, prefault_threads: cores, huge_pages: config.huge_pages, keep_name };
    let arena = Arena::open(&options).map_err(|error| Error::io("arena", error))?;
    progress(Progress { stage: "prefault", done: bytes, total: bytes });
    Ok(Arc::new(DramTier::new(arena, config.dram.0, staging)))
}

/// Header buffers of the log: enough for all groups in flight, a sixteenth of the least staging.
const HEADERS: usize = 32;
const HEADER_BYTES: usize = 64 << 10;

/// The files or devices of the SSD tier.
fn paths(config: &Config) -> Vec<PathBuf> {
    if config.devices.is_empty() { vec![config.dir.join(SSD_FILE)] } else { config.devices.clone() }
}

const SSD_FILE: &str = "ssd-0.ebb";

/// Whether a file of the store's directory is one of the store's.
pub(crate) fn is_ours(config: &Config, name: &str) -> bool {
    paths(config)
        .iter()
        .any(|path| path.parent() == Some(&config.dir) && path.file_name().is_some_and(|own| own == name))
}

fn open_devices(config: &Config, progress: &dyn Fn(Progress)) -> Result<Vec<Arc<dyn DirectDevice>>> {
    if config.ssd.0 == 0 {
        return Ok(Vec::new());
    }
    if config.ssd < config.dram {
        // What is dirty in DRAM at a flush must find room below, or the flush could wait for ever.
        let (ssd, dram) = (config.ssd, config.dram);
        return Err(Error::invalid(format!(
            "ssd = {ssd} is too small: give at least dram = {dram}, or 0 for none"
        )));
    }
    let paths = paths(config);
    let each = config.ssd.0 / paths.len() as u64 / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    paths.iter().map(|path| open_device(config, path, each, progress)).collect()
}

fn open_device(
    config: &Config,
    path: &Path,
    bytes: u64,
    progress: &dyn Fn(Progress),
) -> Result<Arc<dyn DirectDevice>> {
    if matches!(start_of(path)?, Start::Blank) {
        geometry(&path.display().to_string(), bytes, config.segment_bytes.map(|size| size.0))?;
        let how = match config.prealloc {
            Prealloc::Written => ebbtide_device::Prealloc::Written,
            Prealloc::Reserved => ebbtide_device::Prealloc::Reserved,
            Prealloc::Sparse => ebbtide_device::Prealloc::Sparse,
        };
        preallocate(path, bytes, how, &mut |done, total| {
            progress(Progress { stage: "preallocate", done, total })
        })?;
    }
    let mut options =
        UringOptions { io_timeout: Duration::from_millis(config.io_timeout_ms_max), ..Default::default() };
    if let Some(depth) = config.queue_depth {
        options.queue_depth = depth;
    }
    options.sqpoll_idle = config.sqpoll.then_some(Duration::from_millis(50));
    match config.device {
        DeviceKind::Auto => open_best(path, &options),
        DeviceKind::Uring => Ok(Arc::new(UringDevice::open(path, &options)?)),
        DeviceKind::Psync => Ok(Arc::new(PsyncDevice::open(path, &options.psync())?)),
    }
}

/// What stands at the start of a file or device that is to be opened.
enum Start {
    /// It is missing, or a file whose start is zeros: only such a one gets its space made, so that a file named by mistake
    /// keeps its length.
    Blank,
    /// A block device whose start is zeros.
    BlankDevice,
    /// Something; the store's uuid if it is a superblock of ours.
    Taken(Option<[u8; 16]>),
}

/// Whether a file whose start is zeros has anything else behind it, by samples: a store's data would show in its segments'
/// first pages, which lie whole MiB apart.
fn has_data(file: &mut File) -> Result<bool> {
    const SAMPLES: u64 = 4096;
    let look = |error| Error::io("look for data", error);
    let length = file.metadata().map_err(look)?.len();
    let step = (length / SAMPLES).next_multiple_of(1 << 20);
    let mut page = [0; PAGE_BYTES];
    for at in (AREA_BYTES..length.saturating_sub(PAGE_BYTES as u64)).step_by(step.max(1 << 20) as usize) {
        file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut page)).map_err(look)?;
        if page.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn start_of(path: &Path) -> Result<Start> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Start::Blank),
        Err(error) => return Err(Error::io(format_args!("open {}", path.display()), error)),
    };
    let kind =
        file.metadata().map_err(|error| Error::io(format_args!("look at {}", path.display()), error))?;
    let is_device = kind.file_type().is_block_device();
    if !is_device && !kind.is_file() {
        return Err(Error::invalid(format!("{} is neither a file nor a block device", path.display())));
    }
    let mut start = Vec::new();
    let read = file.by_ref().take(AREA_BYTES).read_to_end(&mut start);
    read.map_err(|error| Error::io(format_args!("read {}", path.display()), error))?;
    Ok(match start.iter().all(|byte| *byte == 0) {
        true if is_device => Start::BlankDevice,
        true if has_data(&mut file)? => {
            return Err(Error::invalid(format!(
                "superblock of {}: is blank, but data follows it: move the file away to begin a new store",
                path.display()
            )));
        }
        true => Start::Blank,
        false => match find(&start) {
            Found::Valid(superblock, _) => Start::Taken(Some(superblock.store)),
            _ => Start::Taken(None),
        },
    })
}

fn open_tiers(
    config: &Config,
    store: [u8; 16],
    devices: &[Arc<dyn DirectDevice>],
    hot: &Arc<dyn HotTier>,
    env: &Arc<dyn Env>,
) -> Result<Vec<Arc<dyn Tier>>> {
    if devices.is_empty() {
        return Ok(Vec::new());
    }
    let mut media: Vec<Arc<dyn Medium>> = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        device.register(&hot.regions())?;
        let options = BlockOptions {
            capacity_bytes: device.info().capacity_bytes.min(config.ssd.0 / devices.len() as u64),
            segment_bytes: config.segment_bytes.map(|size| size.0),
            store: Some(store),
            index: index as u16,
            count: devices.len() as u16,
        };
        let device: Arc<dyn BlockDevice> = Arc::<dyn DirectDevice>::clone(device);
        let medium = block_on(BlockMedium::open(device, options, &**env))?;
        media.push(Arc::new(medium));
    }
    let headers = (0..HEADERS).map_while(|_| hot.alloc_staging(HEADER_BYTES)).collect();
    let options = LogOptions { name: "ssd".into(), env: Arc::clone(env), headers };
    Ok(vec![Arc::new(LogTier::open(media, options)?)])
}
