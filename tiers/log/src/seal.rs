//! Sealing: a full segment gets its footer, beside the writing of the next one.
//!
//! Order: all its writes have landed, a flush makes them durable, and only then the footer and its trailer are written. So a
//! trailer that recovery believes speaks of durable bytes, however the device orders what is not flushed. The trailer itself
//! is durable with the next flush of its medium (of the next segment, at the latest); a power cut before costs the next
//! start one segment more to walk, and nothing else.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{Result, SegmentId};
use ebbtide_mem::sum::sum;
use futures_channel::oneshot;

use crate::format::record::{Kind, Records};
use crate::format::segment::Trailer;
use crate::format::{PAGE, pages_in};
use crate::log::{HeaderState, Log, Phase};
use crate::place::detach;

impl Log {
    pub(crate) fn spawn_seal(self: &Arc<Self>, id: SegmentId) {
        let log = Arc::clone(self);
        self.env.spawn("seal a segment", Box::pin(async move { log.seal(id).await }));
    }

    async fn seal(self: Arc<Self>, id: SegmentId) {
        while let Some(drained) = self.wait_drained(id) {
            let _ = drained.await;
        }
        let (landed, header, sequence) = {
            let mut state = self.state.lock();
            let sequence = state.segment(id).sequence;
            let writing = state.writing.remove(&id).expect("a segment is written until it is sealed");
            (writing.landed, writing.header, sequence)
        };
        let empty = landed.is_empty();
        let result = match (empty, header) {
            (true, HeaderState::Unsent) => Ok(()),
            // Its header may stand there, and groups that were answered as failed with it: they must not come back.
            (true, _) => self.write(id, 0, &self.header(id, sequence, true)).await,
            (false, _) => {
                self.write_footer(id, sequence, &landed.into_values().collect::<Vec<_>>().concat()).await
            }
        };
        if let Err(error) = result {
            // What landed can be read all the same; the next start walks it.
            tracing::warn!(tier = %self.info.name, segment = ?id, %error, "segment was not sealed");
        }
        let mut state = self.state.lock();
        state.lanes[id.medium()].sealing -= 1;
        match empty {
            true => state.set_free(id),
            false => state.segment(id).phase = Phase::Sealed,
        }
        state.stir();
    }

    /// Seals a segment in which exactly `records` stand: their bytes become durable, then footer and trailer are written.
    pub(crate) async fn write_footer(&self, id: SegmentId, sequence: u64, records: &[u8]) -> Result<()> {
        let medium = &self.media[id.medium()];
        medium.flush().await?;
        let (mut count, mut tombstones, mut value_bytes) = (0, 0, 0);
        for (record, _) in Records::new(records) {
            count += 1;
            tombstones += u32::from(record.kind == Kind::Tombstone);
            value_bytes += pages_in(u64::from(record.stored)) * PAGE;
        }
        let footer_pages = pages_in(records.len() as u64) as u32; // lossless: within a segment
        let footer_page = self.geometry.last_page() - footer_pages;
        let trailer = Trailer {
            store: self.info.store,
            sequence,
            segment: id,
            footer_page,
            footer_bytes: records.len() as u32,
            footer_sum: sum(records),
            records: count,
            tombstones,
            value_bytes,
        };
        let mut bytes = Vec::with_capacity((footer_pages as usize + 1) * PAGE as usize);
        bytes.extend_from_slice(records);
        bytes.resize(footer_pages as usize * PAGE as usize, 0);
        bytes.extend_from_slice(&trailer.encode());
        self.write(id, footer_page, &bytes).await?;
        medium.seal(id.slot()).await?;
        self.stats.segments_sealed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Seals what is open and waits until nothing is being sealed. Writers must have been refused before.
    pub(crate) async fn seal_all(self: &Arc<Self>) {
        loop {
            let full: Vec<SegmentId> = {
                let mut state = self.state.lock();
                let open: Vec<SegmentId> = state.open_segments().collect();
                open.iter().for_each(|id| detach(&mut state, *id));
                open
            };
            full.into_iter().for_each(|id| self.spawn_seal(id));
            let Some(busy) = self.wait_sealing() else { return };
            let _ = busy.await;
        }
    }

    /// Ends when a sealing or an opening does; `None` when there is neither.
    pub(crate) fn wait_sealing(&self) -> Option<oneshot::Receiver<()>> {
        let mut state = self.state.lock();
        state.lanes.iter().any(|lane| lane.opening || lane.sealing > 0).then(|| {
            let (sender, receiver) = oneshot::channel();
            state.idle.push(sender);
            receiver
        })
    }

    /// What to wait for until nothing is in flight to the segment; `None` when nothing is.
    fn wait_drained(&self, id: SegmentId) -> Option<oneshot::Receiver<()>> {
        let mut state = self.state.lock();
        let writing = state.writing.get_mut(&id).expect("a segment is written until it is sealed");
        (writing.in_flight > 0).then(|| {
            let (sender, receiver) = oneshot::channel();
            writing.drained = Some(sender);
            receiver
        })
    }
}
