//! The engine: what it holds, how an object is put, removed and evicted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ebbtide_core::Candidate;
use ebbtide_core::{
    BlockSums, Charge, Cost, Env, Error, Eviction, Fingerprint, Fingerprinter, Generation, HotTier, Identity,
    NamespaceId, Object, ObjectId, Placement, Rank, Result, SharedObject, Tier, TierView, check_key,
};
use ebbtide_mem::{BufMut, Pool, sum};
use futures_util::future::{Either, select};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::index::{Hot, Index, Place, Row, RowSlot, Shard, State};
use crate::mover::Mover;
use crate::reasons::{Departures, Gone};
use crate::reclaim::Reclaimer;
use crate::room::{For, Grant, Room};
use crate::settings::Settings;
use crate::stats::Counters;
use crate::touch::{Event, Touches, apply};

/// The answer to a put that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The value was stored and can be read from now on.
    Stored,
    /// An object of this key was present; nothing was changed.
    AlreadyStored,
}

/// What an engine is made of.
pub struct Parts {
    /// Clock, dice, spawn.
    pub env: Arc<dyn Env>,
    /// DRAM.
    pub hot: Arc<dyn HotTier>,
    /// The tiers below it, top down. This release moves objects to and from the first.
    pub tiers: Vec<Arc<dyn Tier>>,
    /// Where objects go.
    pub placement: Box<dyn Placement>,
    /// The secret of fingerprints, when no tier below keeps one.
    pub secret: [u64; 2],
}

/// The tier manager. Cloning shares it.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) env: Arc<dyn Env>,
    pub(crate) hot: Arc<dyn HotTier>,
    pub(crate) tiers: Vec<Arc<dyn Tier>>,
    pub(crate) placement: Box<dyn Placement>,
    pub(crate) settings: Settings,
    pub(crate) fingerprinter: Fingerprinter,
    incarnation: u32,
    writes: AtomicU64,
    pub(crate) index: Index,
    /// Where resident objects' bookkeeping lies.
    pub(crate) object_pool: Pool<Object>,
    pub(crate) touches: Touches,
    pub(crate) order: Mutex<Order>,
    /// Bytes of departing objects; changed under the order's lock.
    departing_bytes: AtomicU64,
    pub(crate) objects: Room,
    pub(crate) staging: Room,
    pub(crate) departures: Departures,
    pub(crate) counters: Counters,
    pub(crate) mover: Arc<Mover>,
    pub(crate) reclaimer: Arc<Reclaimer>,
    pub(crate) closed: AtomicBool,
}

/// The order in which objects leave DRAM. Lock it before any shard, never after.
pub(crate) struct Order {
    pub(crate) policy: Box<dyn Eviction>,
    /// Clean objects that left the policy's order, coldest first: still readable, dropped when room is needed.
    departing: VecDeque<(ObjectId, u32)>,
}

/// An object taken out of the order to be written below.
pub(crate) struct Outgoing {
    pub(crate) id: ObjectId,
    pub(crate) stay: u32,
    pub(crate) object: SharedObject,
}

/// Objects whose residence ended; dropped after all locks, so that memory goes back with none held.
pub(crate) type Dropped = SmallVec<[SharedObject; 4]>;

impl Engine {
    /// An engine over `parts`, empty; [`recover`](Self::recover) finds what the tiers below hold.
    pub fn new(parts: Parts, settings: Settings) -> Self {
        let below = parts.tiers.first().map(|tier| tier.info().clone());
        let (secret, incarnation) = below.map_or((parts.secret, 1), |info| (info.secret, info.incarnation));
        let order = Order {
            policy: settings.policy.build(parts.hot.usage().objects_bytes_max),
            departing: VecDeque::new(),
        };
        let inner = Arc::new(Inner {
            index: Index::new(settings.shards),
            object_pool: Pool::new(),
            touches: Touches::new(settings.touch_rings),
            order: Mutex::new(order),
            departing_bytes: AtomicU64::new(0),
            objects: Room::new(For::Object, Arc::clone(&parts.hot)),
            staging: Room::new(For::Staging, Arc::clone(&parts.hot)),
            departures: Departures::default(),
            counters: Counters::default(),
            mover: Arc::default(),
            reclaimer: Arc::default(),
            closed: AtomicBool::new(false),
            fingerprinter: Fingerprinter::new(secret),
            incarnation,
            writes: AtomicU64::new(0),
            env: parts.env,
            hot: parts.hot,
            tiers: parts.tiers,
            placement: parts.placement,
            settings,
        });
        let engine = Engine { inner };
        engine.wire();
        engine
    }

    /// Memory that comes back is handed to whoever waits for it; movement runs in tasks of its own.
    fn wire(&self) {
        let inner = Arc::downgrade(&self.inner);
        let serve_objects = move || inner.upgrade().into_iter().for_each(|inner| inner.objects.serve());
        self.inner.hot.on_room(Box::new(serve_objects));
        let inner = Arc::downgrade(&self.inner);
        let serve_staging = move || inner.upgrade().into_iter().for_each(|inner| inner.staging.serve());
        self.inner.hot.on_staging(Box::new(serve_staging));
        if !self.inner.tiers.is_empty() {
            Inner::start_mover(&self.inner);
            Inner::start_reclaimer(&self.inner);
        }
    }

    /// Stores `value` under `key`; waits for room up to `put_wait_max`.
    ///
    /// The value is copied, and its checksum taken from what was stored. Errors: Invalid (key or value out of bounds), Full
    /// (no room in time, or too many bytes wait), Closed. A refused put has no effect. Cancel-safe: a dropped put stores nothing.
    pub async fn put(&self, namespace: NamespaceId, key: &[u8], value: &[u8]) -> Result<Put> {
        let inner = &self.inner;
        let Some(fingerprint) = inner.begin_put(namespace, key, value.len())? else {
            return Ok(Put::AlreadyStored);
        };
        let grant = match inner.take_room(value.len(), key.len()) {
            Some(grant) => grant,
            None => inner.wait_for_room(value.len(), key.len()).await?,
        };
        Ok(inner.store(namespace, key, fingerprint, value, grant))
    }

    /// As [`put`](Self::put), but `None` instead of waiting for room.
    pub fn try_put(&self, namespace: NamespaceId, key: &[u8], value: &[u8]) -> Option<Result<Put>> {
        let inner = &self.inner;
        // The lookup waits for memory; what the copy will need comes meanwhile.
        sum::expect_read(value);
        let fingerprint = match inner.begin_put(namespace, key, value.len()) {
            Ok(Some(fingerprint)) => fingerprint,
            Ok(None) => return Some(Ok(Put::AlreadyStored)),
            Err(error) => return Some(Err(error)),
        };
        let grant = inner.take_room(value.len(), key.len())?;
        Some(Ok(inner.store(namespace, key, fingerprint, value, grant)))
    }

    /// Whether each key is present. No side effects.
    pub fn exists(&self, namespace: NamespaceId, keys: &[&[u8]]) -> Vec<bool> {
        let present = |key: &&[u8]| {
            let fingerprint = self.inner.fingerprinter.fingerprint(namespace, key);
            self.inner.index.lock_for(fingerprint).find(fingerprint).is_some()
        };
        keys.iter().map(present).collect()
    }

    /// Marks present keys as used, without moving a byte; answers which are present.
    pub fn touch(&self, namespace: NamespaceId, keys: &[&[u8]]) -> Vec<bool> {
        keys.iter()
            .map(|key| self.inner.touch(self.inner.fingerprinter.fingerprint(namespace, key)))
            .collect()
    }

    /// Removes an object from every tier; true when there was one.
    ///
    /// On return it stays removed over a crash of the process, and over a power cut after the next flush. Unavailable when
    /// that could not be written: it is gone now, and may come back with a restart. Readers in flight keep their bytes.
    pub async fn remove(&self, namespace: NamespaceId, key: &[u8]) -> Result<bool> {
        check_key(key)?;
        let fingerprint = self.inner.fingerprinter.fingerprint(namespace, key);
        let Some(row) = self.inner.forget(fingerprint, None, Gone::Removed) else { return Ok(false) };
        let Some(tier) = self.inner.tiers.first() else { return Ok(true) };
        if let Some(location) = row.below() {
            tier.free(location, row.length());
        }
        // Also when the row names no copy below: one may be on its way there, and a segment that is not free yet may hold
        // one that reclaim gave up, of this write or of an earlier one.
        tier.bury(vec![(namespace, key.into(), row.generation)]).await?;
        Ok(true)
    }
}

impl Inner {
    /// Checks a put; `None` when the key is present.
    fn begin_put(&self, namespace: NamespaceId, key: &[u8], length: usize) -> Result<Option<Fingerprint>> {
        check_key(key)?;
        if length == 0 {
            return Err(Error::invalid("value is empty: a value has at least 1 byte"));
        }
        if length as u64 > self.settings.object_bytes_max {
            let most = self.settings.object_bytes_max;
            return Err(Error::invalid(format!("value of {length} bytes is over object_bytes_max ({most})")));
        }
        let whole = self.hot.objects_bytes_max();
        if self.hot.object_bytes(length, key.len()) > whole {
            return Err(Error::invalid(format!(
                "value of {length} bytes is larger than the DRAM tier ({whole} bytes)"
            )));
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::closed("the store is closed"));
        }
        let fingerprint = self.fingerprinter.fingerprint(namespace, key);
        if self.index.lock_for(fingerprint).find(fingerprint).is_some() {
            self.touches.mine().put_present.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        }
        Ok(Some(fingerprint))
    }

    /// Room at once, evicting clean objects on this thread; `None` when only the device can make some.
    pub(crate) fn take_room(&self, length: usize, key_bytes: usize) -> Option<Grant> {
        if let Some(grant) = self.objects.try_take(length, key_bytes) {
            return Some(grant);
        }
        let need = self.hot.object_bytes(length, key_bytes);
        // Each round evicts what is missing; a reader may hold what was evicted, so a few more are tried.
        for _ in 0..4 {
            if self.objects.waiting_bytes() > 0 || self.evict(need) == 0 {
                return None;
            }
            if let Some(grant) = self.objects.try_take(length, key_bytes) {
                return Some(grant);
            }
        }
        None
    }

    /// Waits for room in the queue, with the deadline of puts.
    pub(crate) async fn wait_for_room(&self, length: usize, key_bytes: usize) -> Result<Grant> {
        let most = self.settings.put_waiting_bytes_max;
        let Some(granted) = self.objects.enqueue(length, key_bytes, most) else {
            self.counters.puts_refused.fetch_add(1, Ordering::Relaxed);
            return Err(Error::full(format!(
                "more than put_waiting_bytes_max ({most}) bytes wait for room in DRAM"
            )));
        };
        self.counters.puts_waited.fetch_add(1, Ordering::Relaxed);
        self.make_room();
        self.mover.signal.raise();
        match select(granted, self.env.sleep(self.settings.put_wait_max)).await {
            Either::Left((Ok(grant), _)) => Ok(grant),
            Either::Left((Err(_), _)) => {
                Err(Error::closed("the store was closed while a put waited for room"))
            }
            Either::Right(((), granted)) => {
                // Who gave up is out of the line at once: the next one may need less.
                drop(granted);
                self.objects.serve();
                self.make_room();
                self.counters.puts_refused.fetch_add(1, Ordering::Relaxed);
                let waited = self.settings.put_wait_max;
                Err(Error::full(format!("no room in DRAM within {waited:?} (put_wait_max)")))
            }
        }
    }

    fn store(
        &self,
        namespace: NamespaceId,
        key: &[u8],
        fingerprint: Fingerprint,
        value: &[u8],
        grant: Grant,
    ) -> Put {
        let (mut memory, charge) = grant;
        memory.expect_write();
        let generation = self.next_generation();
        let identity = Identity::new(namespace, key, generation);
        let sums = identity.fill(&mut memory, value);
        let sum = identity.fold(value.len() as u64, sums.0.iter().copied());
        let put = self.commit(Write { namespace, key, fingerprint, generation, memory, charge, sums, sum });
        let mine = self.touches.mine();
        match put {
            Put::Stored => {
                mine.puts.fetch_add(1, Ordering::Relaxed);
                mine.put_bytes.fetch_add(value.len() as u64, Ordering::Relaxed);
                self.look_ahead();
            }
            Put::AlreadyStored => {
                mine.put_present.fetch_add(1, Ordering::Relaxed);
            }
        }
        put
    }

    /// Adds the row. Of two attempts on one key the first to come here wins.
    fn commit(&self, write: Write<'_>) -> Put {
        let object = self.object_pool.keep(Object {
            value: write.memory.freeze(),
            charge: write.charge,
            namespace: write.namespace,
            key: write.key.into(),
            generation: write.generation,
            sums: write.sums,
        });
        let cost = cost_of(&object, write.fingerprint);
        let length = object.length();
        let shard_number = self.index.shard_of(write.fingerprint);
        let mut shard = self.index.lock(shard_number);
        if shard.find(write.fingerprint).is_some() {
            drop(shard);
            return Put::AlreadyStored;
        }
        let row = shard.insert(Row::new(write.fingerprint, write.generation, length, write.sum));
        let slot = shard.warm(row, object, State::Dirty);
        drop(shard);
        self.announce(Event::Insert(self.index.object_id(shard_number, slot), cost));
        self.serve_waiting();
        Put::Stored
    }

    pub(crate) fn next_generation(&self) -> Generation {
        Generation::new(self.incarnation, self.writes.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Tells the policy, by way of this thread's ring. A touch that finds no room is dropped and counted.
    pub(crate) fn announce(&self, event: Event) {
        let Err(event) = self.touches.mine().push(event) else { return };
        let order = match event {
            Event::Insert(..) => Some(self.order.lock()),
            Event::Touch(..) => self.order.try_lock(),
        };
        match order {
            Some(mut order) => {
                self.touches.drain(&mut *order.policy);
                apply(&mut *order.policy, event);
            }
            None => {
                self.touches.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn touch(&self, fingerprint: Fingerprint) -> bool {
        let shard_number = self.index.shard_of(fingerprint);
        let mut shard = self.index.lock(shard_number);
        let Some(row) = shard.find(fingerprint) else { return false };
        match shard.hot_mut(row) {
            Some(hot) => {
                let (in_order, seat) = (note_use(hot), hot.seat);
                drop(shard);
                if in_order {
                    self.announce(Event::Touch(self.index.object_id(shard_number, seat)));
                }
            }
            None => {
                let first = shard.row_mut(row).count_read();
                let row = *shard.row(row);
                drop(shard);
                self.tell_wanted(&row, first);
            }
        }
        true
    }

    /// Tells the tier that a value in it was asked for the first time since it was written.
    pub(crate) fn tell_wanted(&self, row: &Row, first: bool) {
        if let (true, Some(location), Some(tier)) = (first, row.below(), self.tiers.first()) {
            tier.wanted(location, row.length());
        }
    }

    /// Takes a row out of the index (when `generation` is given: only that write's); says what it was.
    pub(crate) fn forget(
        &self,
        fingerprint: Fingerprint,
        generation: Option<Generation>,
        why: Gone,
    ) -> Option<Row> {
        let mut order = self.order.lock();
        // Events of the object that leaves are applied before its slot can be another's.
        self.touches.drain(&mut *order.policy);
        let shard_number = self.index.shard_of(fingerprint);
        let mut shard = self.index.lock(shard_number);
        let slot = shard.find(fingerprint)?;
        if generation.is_some_and(|generation| shard.row(slot).generation != generation) {
            return None;
        }
        let (row, hot) = shard.remove(slot);
        drop(shard);
        if let Some(hot) = &hot {
            order.policy.remove(self.index.object_id(shard_number, hot.seat));
        }
        if let Some(hot) = hot.as_ref().filter(|hot| hot.place == Place::Departing) {
            // Its entry in the queue finds nobody.
            self.departing_bytes.fetch_sub(hot.object.charge.bytes(), Ordering::AcqRel);
        }
        drop(order);
        drop(hot);
        self.departures.record(fingerprint, row.length(), why, self.env.wall_ms());
        Some(row)
    }

    /// Ends the residence of at least `bytes` of clean objects (or of all that no tier takes), coldest first, and queues
    /// what must be written. Returns the bytes ended; readers may hold their memory a little longer.
    pub(crate) fn evict(&self, bytes: u64) -> u64 {
        let mut dropped = Dropped::new();
        let mut outgoing = Vec::new();
        let mut order = self.order.lock();
        let mut freed = self.drop_departing(&mut order, bytes, &mut dropped);
        if freed < bytes && self.mover.has_room(&self.settings) {
            self.touches.drain(&mut *order.policy);
            freed += self.take_victims(&mut order, bytes - freed, End::Now(&mut dropped), &mut outgoing);
        }
        self.mover.add(outgoing);
        drop(order);
        drop(dropped);
        freed
    }

    /// Drops departing objects of at least `bytes`, those excepted that were read meanwhile.
    fn drop_departing(&self, order: &mut Order, bytes: u64, dropped: &mut Dropped) -> u64 {
        let mut freed = 0;
        while freed < bytes
            && let Some((id, stay)) = order.departing.pop_front()
        {
            let (shard_number, slot) = self.index.place_of(id);
            let mut shard = self.index.lock(shard_number);
            let departs = |at: &(RowSlot, u32, &mut Hot)| at.1 == stay && at.2.place == Place::Departing;
            let Some((row, _, hot)) = shard.seated(slot).filter(departs) else {
                continue;
            };
            let bytes = hot.object.charge.bytes();
            self.departing_bytes.fetch_sub(bytes, Ordering::AcqRel);
            let touched = std::mem::take(&mut hot.touched);
            if touched || hot.state != State::Clean {
                // Read meanwhile, or the copy below was reclaimed: it goes back into the order.
                hot.place = Place::InOrder;
                let fingerprint = shard.row(row).fingerprint;
                drop(shard);
                let rank = if touched { Rank::Hot } else { Rank::Cold };
                order.policy.insert(id, Cost { bytes, tag: fingerprint.low }, rank);
                continue;
            }
            freed += bytes;
            dropped.extend(shard.cool(row).map(|hot| hot.object));
        }
        freed
    }

    /// Takes victims of at least `bytes` out of the order: clean ones end as `end` says, dirty ones are to be written, or
    /// dropped (and counted) when no tier takes them. Returns the bytes whose residence ended.
    pub(crate) fn take_victims(
        &self,
        order: &mut Order,
        bytes: u64,
        mut end: End<'_>,
        outgoing: &mut Vec<Outgoing>,
    ) -> u64 {
        let mut ids = Vec::new();
        order.policy.victims(bytes, &mut ids);
        let mut freed = 0;
        for id in ids {
            let (shard_number, slot) = self.index.place_of(id);
            let mut shard = self.index.lock(shard_number);
            let Some((row, stay, hot)) = shard.seated(slot) else { continue };
            let bytes = hot.object.charge.bytes();
            match hot.state {
                State::Writing => hot.place = Place::Out,
                State::Clean => match &mut end {
                    End::Departing => {
                        hot.place = Place::Departing;
                        self.depart(order, id, stay, bytes);
                    }
                    End::Now(dropped) => {
                        dropped.extend(shard.cool(row).map(|hot| hot.object));
                        freed += bytes;
                    }
                },
                State::Dirty => match self.refusal(&hot.object) {
                    None => outgoing.push(start_writing(id, stay, hot, Place::Out)),
                    Some(why) => {
                        let object = self.drop_unwritten(&mut shard, row, why);
                        drop(shard);
                        freed += bytes;
                        if let End::Now(dropped) = &mut end {
                            dropped.extend(object);
                        }
                    }
                },
            }
        }
        freed
    }

    /// Why a dirty victim will not be written below; `None` when it will.
    fn refusal(&self, object: &Object) -> Option<Gone> {
        let Some(tier) = self.tiers.first() else { return Some(Gone::Evicted) };
        let candidate = Candidate { length: object.length(), reads: 0 };
        let info = tier.info();
        let view = TierView {
            up: true,
            object_bytes_max: info.object_bytes_max,
            capacity_bytes: info.capacity_bytes,
        };
        (!self.placement.demote(&candidate, &view)).then_some(Gone::NotAdmitted)
    }

    /// Drops an object of which this was the only copy, and counts why.
    pub(crate) fn drop_unwritten(&self, shard: &mut Shard, row: RowSlot, why: Gone) -> Option<SharedObject> {
        let (row, hot) = shard.remove(row);
        self.departures.record(row.fingerprint, row.length(), why, self.env.wall_ms());
        hot.map(|hot| hot.object)
    }

    /// Makes room for those who wait, as far as that can be done without the device.
    pub(crate) fn make_room(&self) {
        loop {
            let wanted = self.objects.wanted_first();
            if wanted == 0 {
                return;
            }
            self.objects.serve();
            if self.objects.wanted_first() == wanted && self.evict(wanted) == 0 {
                return;
            }
            self.objects.serve();
        }
    }

    /// Lets a clean object that is out of the order (its place says so) go when room is needed.
    pub(crate) fn depart(&self, order: &mut Order, id: ObjectId, stay: u32, bytes: u64) {
        order.departing.push_back((id, stay));
        self.departing_bytes.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Bytes that are free, will be as soon as somebody asks, or are on their way below to become so.
    pub(crate) fn ready_bytes(&self) -> u64 {
        self.hot.objects_free_bytes()
            + self.departing_bytes.load(Ordering::Acquire)
            + self.mover.backlog_bytes()
    }

    /// Wakes the mover when a whole batch is missing under the watermark.
    fn look_ahead(&self) {
        let settings = &self.settings;
        if !self.tiers.is_empty()
            && self.ready_bytes() + settings.demote_batch_bytes <= settings.clean_ahead_bytes
        {
            self.mover.signal.raise();
        }
    }

    /// Makes a value that was read from below resident. False when its row moved on meanwhile.
    pub(crate) fn warm_read(&self, fingerprint: Fingerprint, object: &SharedObject) -> bool {
        let shard_number = self.index.shard_of(fingerprint);
        let mut shard = self.index.lock(shard_number);
        let Some(slot) = shard.find(fingerprint) else { return false };
        let row = shard.row(slot);
        if row.generation != object.generation || shard.hot(slot).is_some() || row.below().is_none() {
            return false;
        }
        let hot = shard.warm(slot, object.clone(), State::Clean);
        drop(shard);
        let cost = cost_of(object, fingerprint);
        self.announce(Event::Insert(self.index.object_id(shard_number, hot), cost));
        self.serve_waiting();
        true
    }

    /// An object came into the order: those who found nothing to evict when they began to wait look again.
    fn serve_waiting(&self) {
        if self.objects.waiting_bytes() > 0 {
            self.make_room();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The tasks that wait find nobody and end.
        self.mover.signal.raise();
        self.reclaimer.signal.raise();
    }
}

/// A write about to be committed.
struct Write<'a> {
    namespace: NamespaceId,
    key: &'a [u8],
    fingerprint: Fingerprint,
    generation: Generation,
    memory: BufMut,
    charge: Charge,
    sums: BlockSums,
    sum: u64,
}

/// How the residence of a clean victim ends.
pub(crate) enum End<'a> {
    /// At once: room is needed.
    Now(&'a mut Dropped),
    /// When room is needed.
    Departing,
}

pub(crate) fn start_writing(id: ObjectId, stay: u32, hot: &mut Hot, place: Place) -> Outgoing {
    hot.state = State::Writing;
    hot.place = place;
    Outgoing { id, stay, object: hot.object.clone() }
}

/// Notes that a resident object was used; true when the policy is to hear of it.
pub(crate) fn note_use(hot: &mut Hot) -> bool {
    if hot.place == Place::InOrder {
        return true;
    }
    hot.touched = true;
    false
}

/// What an object's departure frees.
pub(crate) fn cost_of(object: &Object, fingerprint: Fingerprint) -> Cost {
    Cost { bytes: object.charge.bytes(), tag: fingerprint.low }
}
