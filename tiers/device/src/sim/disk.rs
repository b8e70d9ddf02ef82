//! What lies on a simulated disk: durable pages, and over them the writes that were not flushed.

use std::collections::BTreeMap;

use ebbtide_mem::Buf;

/// The unit that a crash keeps or loses, and that a write is torn at.
pub(super) const SECTOR_BYTES: usize = 512;
const PAGE_BYTES: usize = 4096;

/// A write that was done and not flushed.
struct Cached {
    offset: u64,
    body: Vec<u8>,
}

/// A write that was started and has not ended.
struct Running {
    offset: u64,
    from: Vec<Buf>,
}

/// Content of a disk. Later writes are over earlier ones.
#[derive(Default)]
pub(super) struct Content {
    durable: BTreeMap<u64, Box<[u8; PAGE_BYTES]>>,
    cached: BTreeMap<u64, Cached>,
    running: BTreeMap<u64, Running>,
    next: u64,
}

/// Random bits, from the simulation's dice.
pub(super) type Dice<'a> = &'a mut dyn FnMut() -> u64;

impl Content {
    /// A write has begun. Returns its number.
    pub(super) fn begin(&mut self, offset: u64, from: &[Buf]) -> u64 {
        self.next += 1;
        self.running.insert(self.next, Running { offset, from: from.to_vec() });
        self.next
    }

    /// A write has ended: what of it `sectors` lets through can be read from here on, and is durable after a flush. Of its
    /// bytes only the first `keep_bytes_max` are kept.
    pub(super) fn end(&mut self, number: u64, keep_bytes_max: u64, sectors: Option<Dice<'_>>) {
        let Some(Running { offset, from }) = self.running.remove(&number) else { return };
        let mut body = Vec::new();
        for span in from.iter().flat_map(Buf::padded_spans) {
            let keep = usize::try_from(keep_bytes_max).unwrap_or(usize::MAX).saturating_sub(body.len());
            body.extend_from_slice(&span[..span.len().min(keep)]);
        }
        match sectors {
            None => {
                self.next += 1;
                self.cached.insert(self.next, Cached { offset, body });
            }
            Some(dice) => each_kept(offset, &body, dice, |at, sector| {
                self.next += 1;
                self.cached.insert(self.next, Cached { offset: at, body: sector.to_vec() });
            }),
        }
    }

    /// The mark that a flush that is called now makes durable.
    pub(super) fn mark(&self) -> u64 {
        self.next
    }

    /// Makes durable what was done before `mark`.
    pub(super) fn flush(&mut self, mark: u64) {
        let later = self.cached.split_off(&(mark + 1));
        for (_, Cached { offset, body }) in std::mem::replace(&mut self.cached, later) {
            put(&mut self.durable, offset, &body);
        }
    }

    /// The power goes: of everything that was not flushed, and of what was still running, each sector stays or not.
    pub(super) fn crash(&mut self, dice: Dice<'_>) {
        self.interrupt(dice);
        for (_, Cached { offset, body }) in std::mem::take(&mut self.cached) {
            each_kept(offset, &body, dice, |at, sector| put(&mut self.durable, at, sector));
        }
    }

    /// Who wrote is gone: of what was still running, each sector is there or not.
    pub(super) fn interrupt(&mut self, dice: Dice<'_>) {
        for number in self.running.keys().copied().collect::<Vec<_>>() {
            self.end(number, u64::MAX, Some(dice));
        }
    }

    /// Fills `target` from `offset` on. Of writes that are running, each sector is there or not.
    pub(super) fn read(&self, offset: u64, target: &mut [u8], dice: Dice<'_>) {
        let mut at = 0;
        while at < target.len() {
            let place = offset + at as u64;
            let (page, skip) = (place / PAGE_BYTES as u64, (place % PAGE_BYTES as u64) as usize);
            let take = (PAGE_BYTES - skip).min(target.len() - at);
            match self.durable.get(&page) {
                Some(bytes) => target[at..at + take].copy_from_slice(&bytes[skip..skip + take]),
                None => target[at..at + take].fill(0),
            }
            at += take;
        }
        for cached in self.cached.values() {
            overlay(target, offset, &cached.body, cached.offset);
        }
        for running in self.running.values() {
            let mut at = running.offset;
            for span in running.from.iter().flat_map(Buf::padded_spans) {
                if at < offset + target.len() as u64 && offset < at + span.len() as u64 {
                    each_kept(at, span, dice, |at, sector| overlay(target, offset, sector, at));
                }
                at += span.len() as u64;
            }
        }
    }

    /// Puts bytes on the disk past every cache, as damage does.
    pub(super) fn poke(&mut self, offset: u64, bytes: &[u8]) {
        self.flush(self.next);
        put(&mut self.durable, offset, bytes);
    }

    /// Bytes of memory that the content takes, about.
    pub(super) fn bytes(&self) -> u64 {
        let cached: usize = self.cached.values().map(|cached| cached.body.len()).sum();
        (self.durable.len() * PAGE_BYTES + cached) as u64
    }
}

/// Calls `keep` with those sectors of `body` that the dice let through.
fn each_kept(offset: u64, body: &[u8], dice: Dice<'_>, mut keep: impl FnMut(u64, &[u8])) {
    let (mut bits, mut left) = (0, 0);
    for (index, sector) in body.chunks(SECTOR_BYTES).enumerate() {
        if left == 0 {
            (bits, left) = (dice(), 64);
        }
        if bits & 1 == 1 {
            keep(offset + (index * SECTOR_BYTES) as u64, sector);
        }
        (bits, left) = (bits >> 1, left - 1);
    }
}

/// Copies what `body` at `body_offset` and `target` at `offset` have in common.
fn overlay(target: &mut [u8], offset: u64, body: &[u8], body_offset: u64) {
    let start = offset.max(body_offset);
    let end = (offset + target.len() as u64).min(body_offset + body.len() as u64);
    if start >= end {
        return;
    }
    let count = (end - start) as usize;
    let (to, from) = ((start - offset) as usize, (start - body_offset) as usize);
    target[to..to + count].copy_from_slice(&body[from..from + count]);
}

fn put(pages: &mut BTreeMap<u64, Box<[u8; PAGE_BYTES]>>, offset: u64, mut bytes: &[u8]) {
    let mut at = offset;
    while !bytes.is_empty() {
        let (page, skip) = (at / PAGE_BYTES as u64, (at % PAGE_BYTES as u64) as usize);
        let take = (PAGE_BYTES - skip).min(bytes.len());
        let target = pages.entry(page).or_insert_with(|| Box::new([0; PAGE_BYTES]));
        target[skip..skip + take].copy_from_slice(&bytes[..take]);
        bytes = &bytes[take..];
        at += take as u64;
    }
}
