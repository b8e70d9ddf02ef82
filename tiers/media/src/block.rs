//! A block device as a medium: a superblock, then segments as slots of equal size.

use std::sync::Arc;

use ebbtide_core::{
    Batch, BlockDevice, BoxFuture, ByteSize, DeviceCounters, Done, Env, Error, META_BYTES_MAX, Medium,
    MediumIdentity, MediumInfo, MediumOp, Op, Result, SegmentId,
};
use ebbtide_mem::{BufMut, PAGE_BYTES, Region};
use futures_util::lock::Mutex as AsyncMutex;
use parking_lot::Mutex;

use crate::superblock::{
    AREA_BYTES, COPY_BYTES, COPY_OFFSETS, Found, Refusal, SEGMENT_BYTES_MIN, SEGMENTS_MIN, Superblock, find,
    segment_bytes_ok,
};

/// The segment size that is chosen when none is given, on media that are large enough.
const SEGMENT_BYTES_DEFAULT: u64 = 64 << 20;
/// How many segments a medium should have when the size of a segment is chosen.
const SEGMENTS_WANTED: u64 = 32;

/// How a block medium is opened.
#[derive(Clone, Debug)]
pub struct BlockOptions {
    /// How much of the device a new medium takes. A medium that exists keeps what it has.
    pub capacity_bytes: u64,
    /// The bytes of a segment, a power of two from 1 MiB to 1 GiB. None: for a new medium the largest up to 64 MiB of
    /// which there are 32.
    pub segment_bytes: Option<u64>,
    /// The store that it must belong to, and that a new one is made for. None: any, and a new store.
    pub store: Option<[u8; 16]>,
    /// Which medium of its tier it is, from 0.
    pub index: u16,
    /// How many media the tier has.
    pub count: u16,
}

/// A block device as a medium for a segment log.
pub struct BlockMedium {
    device: Arc<dyn BlockDevice>,
    info: MediumInfo,
    identity: MediumIdentity,
    copies: Arc<Copies>,
}

impl BlockMedium {
    /// Opens `device`, or makes a new medium of it when its first 64 KiB are zero. Counts the incarnation up, durably.
    ///
    /// The device's memory must be registered before. Whoever calls has made sure that no one else has it open.
    /// Invalid: too small, not ours, another store's, another place in the tier, another segment size. Corrupt: both
    /// copies of the superblock are damaged. Unsupported: written by a newer build. In these cases nothing was written.
    pub async fn open(
        device: Arc<dyn BlockDevice>,
        options: BlockOptions,
        env: &dyn Env,
    ) -> Result<BlockMedium> {
        let name = device.info().name.clone();
        let capacity_bytes = device.info().capacity_bytes;
        if capacity_bytes < AREA_BYTES + u64::from(SEGMENTS_MIN) * SEGMENT_BYTES_MIN {
            return Err(too_small(&name, SEGMENT_BYTES_MIN, capacity_bytes));
        }
        let area =
            read_area(&*device).await.map_err(|error| error.context(format!("superblock of {name}")))?;
        let (superblock, newest, created) = match find(&area) {
            Found::Blank => (new_superblock(&name, capacity_bytes, &options, env)?, 1, true),
            Found::Valid(superblock, newest) => {
                check(&superblock, &name, capacity_bytes, &options)?;
                (superblock, newest, false)
            }
            Found::Refused(refusal) => return Err(refused(&name, &refusal)),
        };
        let info = MediumInfo {
            kind: format!("block({})", device.info().kind),
            segment_bytes: superblock.segment_bytes,
            segments_max: superblock.segments,
            align_bytes: device.info().align_bytes,
            memory_align_bytes: device.info().memory_align_bytes,
            queue_depth: device.info().queue_depth,
            overhead_bytes: capacity_bytes - u64::from(superblock.segments) * superblock.segment_bytes,
            name,
        };
        let identity = MediumIdentity {
            store: superblock.store,
            incarnation: superblock.incarnation + 1,
            secret: superblock.secret,
            created,
        };
        let copies = Arc::new(Copies {
            device: Arc::clone(&device),
            newest: Mutex::new((superblock, newest)),
            writing: AsyncMutex::new(()),
        });
        copies.write(|superblock| superblock.incarnation += 1).await?;
        Ok(BlockMedium { device, info, identity, copies })
    }

    /// The superblock as it stands.
    pub fn superblock(&self) -> Superblock {
        self.copies.newest.lock().0.clone()
    }

    /// What an operation of the log means to the device; the error names why it means nothing.
    fn translate(&self, op: MediumOp) -> std::result::Result<Op, (Error, Option<BufMut>)> {
        let bytes = match &op {
            MediumOp::Read { into, .. } => into.len().next_multiple_of(self.info.align_bytes as usize),
            MediumOp::Write { from, .. } => {
                from.iter().map(|buf| buf.len().next_multiple_of(PAGE_BYTES)).sum()
            }
        };
        let place = |slot: u32, offset: u64| {
            let fits = offset.checked_add(bytes as u64).is_some_and(|end| end <= self.info.segment_bytes);
            let at = AREA_BYTES + u64::from(slot) * self.info.segment_bytes + offset;
            (slot < self.info.segments_max && fits).then_some(at).ok_or_else(|| {
                let MediumInfo { name, segment_bytes, segments_max, .. } = &self.info;
                Error::invalid(format!(
                    "{bytes} bytes at {offset} of segment {slot} of {name}: it has {segments_max} segments of \
                     {segment_bytes} bytes"
                ))
            })
        };
        match op {
            MediumOp::Read { slot, offset, into, check } => match place(slot, offset) {
                Ok(offset) => Ok(Op::Read { offset, into, check }),
                Err(error) => Err((error, Some(into))),
            },
            MediumOp::Write { slot, offset, from } => match place(slot, offset) {
                Ok(offset) => Ok(Op::Write { offset, from }),
                Err(error) => Err((error, None)),
            },
        }
    }
}

impl Medium for BlockMedium {
    fn info(&self) -> &MediumInfo {
        &self.info
    }

    fn identity(&self) -> MediumIdentity {
        self.identity
    }

    fn register(&self, regions: &[Region]) -> Result<()> {
        self.device.register(regions)
    }

    fn submit(&self, ops: Vec<MediumOp>) -> Batch {
        let mut refused: Vec<Option<(Error, Option<BufMut>)>> = Vec::new(); // empty while all is well
        let mut taken = Vec::with_capacity(ops.len());
        for (index, op) in ops.into_iter().enumerate() {
            match self.translate(op) {
                Ok(op) => taken.push(op),
                Err(refusal) => {
                    refused.resize_with(index, || None);
                    refused.push(Some(refusal));
                }
            }
        }
        let batch = self.device.submit(taken);
        if refused.is_empty() {
            return batch;
        }
        Box::pin(async move {
            let mut done = batch.await.into_iter();
            let mut all = Vec::new();
            for refusal in refused {
                match refusal {
                    Some((error, buf)) => all.push(Done { result: Err(error), buf }),
                    None => all.extend(done.next()),
                }
            }
            all.extend(done);
            all
        })
    }

    fn flush(&self) -> BoxFuture<'static, Result<()>> {
        self.device.flush()
    }

    fn create(&self, _slot: u32) -> BoxFuture<'static, Result<()>> {
        Box::pin(std::future::ready(Ok(()))) // a slot is always there
    }

    fn seal(&self, _slot: u32) -> BoxFuture<'static, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn remove(&self, _slot: u32) -> BoxFuture<'static, Result<()>> {
        // The slot's space stays allocated: it is written again soon, and holes would make that slow and could fail.
        Box::pin(std::future::ready(Ok(())))
    }

    fn list(&self) -> BoxFuture<'static, Result<Vec<u32>>> {
        Box::pin(std::future::ready(Ok((0..self.info.segments_max).collect())))
    }

    fn read_meta(&self) -> Vec<u8> {
        self.copies.newest.lock().0.meta.clone()
    }

    fn write_meta(&self, meta: Vec<u8>) -> BoxFuture<'static, Result<()>> {
        let copies = Arc::clone(&self.copies);
        Box::pin(async move {
            if meta.len() > META_BYTES_MAX {
                let len = meta.len();
                return Err(Error::invalid(format!(
                    "state of the log of {len} bytes: at most {META_BYTES_MAX} fit"
                )));
            }
            copies.write(|superblock| superblock.meta = meta).await
        })
    }

    fn counters(&self) -> DeviceCounters {
        self.device.counters()
    }

    fn degraded(&self) -> Vec<String> {
        self.device.degraded()
    }
}

/// The two copies of the superblock.
struct Copies {
    device: Arc<dyn BlockDevice>,
    /// The newest superblock and the copy that holds it.
    newest: Mutex<(Superblock, usize)>,
    /// Held while a copy is written.
    writing: AsyncMutex<()>,
}

impl Copies {
    /// Writes the superblock, changed, over one copy and then over the other, and makes each durable.
    ///
    /// One copy is whole at any time. Both say the same at the end, so that losing one later takes nothing back: neither an
    /// incarnation that was given out nor the word that a checkpoint is void.
    async fn write(&self, change: impl FnOnce(&mut Superblock)) -> Result<()> {
        let _writing = self.writing.lock().await;
        let (mut next, newest) = self.newest.lock().clone();
        change(&mut next);
        next.sequence += 1;
        let context = |error: Error| error.context(format!("superblock of {}", self.device.info().name));
        for target in [1 - newest, newest] {
            let mut page = BufMut::heap(COPY_BYTES);
            page.write_at(0, &next.encode());
            let write = Op::Write { offset: COPY_OFFSETS[target], from: vec![page.freeze()] };
            only(self.device.submit(vec![write]).await).result.map_err(context)?;
            self.device.flush().await.map_err(context)?;
            *self.newest.lock() = (next.clone(), target);
        }
        Ok(())
    }
}

async fn read_area(device: &dyn BlockDevice) -> Result<Vec<u8>> {
    let into = BufMut::heap(AREA_BYTES as usize); // lossless: 64 KiB
    let done = only(device.submit(vec![Op::Read { offset: 0, into, check: None }]).await);
    done.result?;
    let buf = done.buf.ok_or_else(|| Error::unavailable("the device kept the buffer of a read"))?;
    Ok(buf.freeze().to_vec())
}

fn only(done: Vec<Done>) -> Done {
    let lost = || Done { result: Err(Error::internal("a batch of one ended with no result")), buf: None };
    done.into_iter().next().unwrap_or_else(lost)
}

fn new_superblock(
    name: &str,
    device_bytes: u64,
    options: &BlockOptions,
    env: &dyn Env,
) -> Result<Superblock> {
    let wanted = options.capacity_bytes;
    if wanted > device_bytes {
        let (have, need) = (ByteSize(device_bytes), ByteSize(wanted));
        return Err(Error::invalid(format!("{name} is too small: it has {have}, configured are {need}")));
    }
    let (segment_bytes, segments) = geometry(name, wanted, options.segment_bytes)?;
    let mut store = [0; 16];
    store[..8].copy_from_slice(&env.random().to_le_bytes());
    store[8..].copy_from_slice(&env.random().to_le_bytes());
    Ok(Superblock {
        incompatible: 0,
        compatible: 0,
        sequence: 0,
        store: options.store.unwrap_or(store),
        secret: [env.random(), env.random()],
        incarnation: 0,
        index: options.index,
        count: options.count,
        segment_bytes,
        // Lossless: bounded right here.
        segments: segments.min(u64::from(SegmentId::SLOTS_MAX - 1)) as u32,
        created_ms: env.wall_ms(),
        meta: Vec::new(),
    })
}

fn segment_bytes_for(capacity_bytes: u64) -> u64 {
    let largest = (capacity_bytes.saturating_sub(AREA_BYTES) / SEGMENTS_WANTED).max(1);
    (1 << largest.ilog2()).clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_DEFAULT)
}

/// The size and number of segments that a new medium of `capacity_bytes` gets.
///
/// Invalid when it is too small for a log, or `segment_bytes` is no size of a segment. Callers that make the space ask before.
pub fn geometry(name: &str, capacity_bytes: u64, segment_bytes: Option<u64>) -> Result<(u64, u64)> {
    let segment_bytes = match segment_bytes {
        Some(bytes) if segment_bytes_ok(bytes) => bytes,
        Some(bytes) => {
            let bytes = ByteSize(bytes);
            let what = "it must be a power of two from 1MiB to 1GiB";
            return Err(Error::invalid(format!("segment size {bytes} of {name}: {what}")));
        }
        None => segment_bytes_for(capacity_bytes),
    };
    let segments = capacity_bytes.saturating_sub(AREA_BYTES) / segment_bytes;
    if segments < u64::from(SEGMENTS_MIN) {
        return Err(too_small(name, segment_bytes, capacity_bytes));
    }
    Ok((segment_bytes, segments))
}

/// Refuses a medium that is whole but not the one that was asked for.
fn check(superblock: &Superblock, name: &str, device_bytes: u64, options: &BlockOptions) -> Result<()> {
    let refuse = |what: String| Err(Error::invalid(format!("{name}: {what}")));
    if superblock.bytes() > device_bytes {
        let (need, have) = (ByteSize(superblock.bytes()), ByteSize(device_bytes));
        return refuse(format!("its superblock says {need}, but it has {have}: was it truncated"));
    }
    if let Some(bytes) = options.segment_bytes.filter(|bytes| *bytes != superblock.segment_bytes) {
        let (is, want) = (ByteSize(superblock.segment_bytes), ByteSize(bytes));
        return refuse(format!("its segments are of {is}, configured are {want}"));
    }
    if options.store.is_some_and(|store| store != superblock.store) {
        return refuse(format!(
            "it belongs to another store, {:032x}",
            u128::from_be_bytes(superblock.store)
        ));
    }
    if (options.index, options.count) != (superblock.index, superblock.count) {
        let (is, of) = (superblock.index, superblock.count);
        let (want, want_of) = (options.index, options.count);
        return refuse(format!("it is medium {is} of {of} of its tier, configured as {want} of {want_of}"));
    }
    Ok(())
}

fn too_small(name: &str, segment_bytes: u64, have: u64) -> Error {
    let need = ByteSize(AREA_BYTES + u64::from(SEGMENTS_MIN) * segment_bytes);
    let (segment, have) = (ByteSize(segment_bytes), ByteSize(have));
    Error::invalid(format!(
        "{name} is too small: {SEGMENTS_MIN} segments of {segment} need {need}, it has {have}"
    ))
}

fn refused(name: &str, refusal: &Refusal) -> Error {
    let aside = "nothing was changed; move the file away to start anew";
    match refusal {
        Refusal::Foreign(magic) => Error::invalid(format!(
            "superblock of {name} is not readable: it starts with \"{}\", which is not ebbtide's; {aside}",
            magic.escape_ascii()
        )),
        Refusal::Damaged([a, b]) => Error::corrupt(format!(
            "superblock of {name} is not readable (both copies): at 0: {a}, at 32KiB: {b}; {aside}"
        )),
        Refusal::Version(version) => Error::unsupported(format!(
            "{name} has format version {version}, this build reads {}; nothing was changed",
            crate::superblock::VERSION
        )),
        Refusal::Features(bits) => {
            let bits: Vec<String> =
                (0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| bit.to_string()).collect();
            let bits = bits.join(", ");
            Error::unsupported(format!(
                "{name} uses format features that this build does not know: bit {bits}; nothing was changed"
            ))
        }
    }
}
