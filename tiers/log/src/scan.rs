//! Finding out what a segment holds: from its footer, or group by group where it has none.

use std::sync::Arc;

use ebbtide_core::{BLOCK_BYTES, Identity, Result, SegmentId};
use ebbtide_mem::sum::sum;
use ebbtide_mem::{BufMut, PAGE_BYTES};

use crate::format::group::{Group, Place};
use crate::format::record::{Kind, Record, Records};
use crate::format::segment::Trailer;
use crate::format::{PAGE, pages_in};
use crate::log::{Geometry, Log};

/// The records of a segment.
pub(crate) enum Contents {
    /// Its footer, as read.
    Footer(BufMut),
    /// What a walk found.
    Walked(Walked),
}

impl Contents {
    pub(crate) fn records(&self) -> &[u8] {
        match self {
            Contents::Footer(buf) => buf.spans().next().unwrap_or(&[]), // of the heap, so of one span
            Contents::Walked(walked) => &walked.records,
        }
    }
}

/// What a walk found.
#[derive(Default)]
pub(crate) struct Walked {
    /// Records whose bytes are all there, one behind the other.
    pub(crate) records: Vec<u8>,
    /// Records whose bytes are not.
    pub(crate) torn: u64,
}

impl Log {
    /// The records of a segment that is not being written.
    pub(crate) async fn contents(self: &Arc<Self>, id: SegmentId, sequence: u64) -> Result<Contents> {
        let page = self.read(id, self.geometry.last_page(), PAGE).await?;
        let trailer = page.spans().next().and_then(Trailer::decode);
        let trailer = trailer.filter(|trailer| self.is_mine(trailer, id, sequence));
        if let Some(trailer) = trailer
            && let Some(footer) = footer_place(&trailer, self.geometry)
        {
            // Zero records make no footer, and a read of nothing is none.
            let buf = self.read(id, trailer.footer_page, footer).await?;
            if let Some(footer) = whole_footer(buf, &trailer) {
                return Ok(Contents::Footer(footer));
            }
        }
        Ok(Contents::Walked(self.walk(id, sequence).await?))
    }

    fn is_mine(&self, trailer: &Trailer, id: SegmentId, sequence: u64) -> bool {
        (trailer.store, trailer.segment, trailer.sequence) == (self.info.store, id, sequence)
    }

    /// Reads a whole segment and looks for its groups.
    pub(crate) async fn walk(&self, id: SegmentId, sequence: u64) -> Result<Walked> {
        let segment = self.read(id, 0, self.geometry.segment_bytes).await?;
        let bytes = segment.spans().next().unwrap_or(&[]);
        Ok(walk(bytes, Place { store: self.info.store, sequence, page: 0 }, self.geometry))
    }
}

/// The bytes of a trailer's footer in whole pages; `None` when it has no place between header and trailer.
pub(crate) fn footer_place(trailer: &Trailer, geometry: Geometry) -> Option<u64> {
    let bytes = pages_in(u64::from(trailer.footer_bytes)) * PAGE;
    (bytes > 0 && geometry.holds(trailer.footer_page, bytes)).then_some(bytes)
}

/// The footer in `buf`, cut to its length; `None` unless it is the one that the trailer speaks of.
pub(crate) fn whole_footer(mut buf: BufMut, trailer: &Trailer) -> Option<BufMut> {
    buf.set_len(trailer.footer_bytes as usize);
    let bytes = buf.spans().next()?;
    let mut records = Records::new(bytes);
    let right = sum(bytes) == trailer.footer_sum && records.by_ref().count() == trailer.records as usize;
    (right && records.at_end()).then_some(buf)
}

/// Goes through the bytes of a segment from group to group; where there is none, from page to page, since a group that was
/// lost on the way to the device does not end the segment.
fn walk(segment: &[u8], base: Place, geometry: Geometry) -> Walked {
    let mut found = Walked::default();
    let end = geometry.last_page() as usize * PAGE_BYTES;
    let segment = &segment[..end.min(segment.len())];
    let mut page = 1;
    while page < geometry.last_page() {
        let bytes = segment.get(page as usize * PAGE_BYTES..).unwrap_or(&[]);
        let Some(group) = Group::decode(bytes, Place { page, ..base }) else {
            page += 1;
            continue;
        };
        let values = page + group.run_pages..page + group.pages;
        let mut records = group.records();
        for (record, encoded) in records.by_ref() {
            match record.kind == Kind::Tombstone || value_is_whole(&record, segment, &values) {
                true => found.records.extend_from_slice(encoded),
                false => found.torn += 1,
            }
        }
        page += group.pages;
    }
    found
}

/// True when the bytes that `record` speaks of are in its group and have its sums.
fn value_is_whole(record: &Record<'_>, segment: &[u8], values: &std::ops::Range<u32>) -> bool {
    let end = u64::from(record.page) + pages_in(u64::from(record.stored));
    if record.page < values.start || end > u64::from(values.end) {
        return false;
    }
    let at = record.page as usize * PAGE_BYTES;
    let Some(value) = segment.get(at..at + record.stored as usize) else { return false };
    let identity = Identity::new(record.namespace, record.key, record.generation);
    let mut blocks = value.chunks(BLOCK_BYTES).enumerate();
    blocks.all(|(index, block)| {
        let expected = record.block_sum(index);
        Some(identity.block(record.first_block as usize + index, sum(block))) == expected
    })
}

#[cfg(test)]
mod tests {
    use ebbtide_core::{Generation, NamespaceId};

    use super::*;
    use crate::format::dice::Dice;

    const BASE: Place = Place { store: [1; 16], sequence: 5, page: 0 };

    /// A segment of 1 MiB with three groups, one value of 5000 bytes in each.
    fn segment(geometry: Geometry) -> Vec<u8> {
        let mut segment = vec![0; geometry.segment_bytes as usize];
        for group in 0..3_u32 {
            let page = 1 + group * 3;
            let value: Vec<u8> = (0..5000_u32).map(|i| (i * (group + 1)) as u8).collect();
            let identity = Identity::new(NamespaceId([2; 16]), &[b'k', group as u8], Generation(7));
            let block = identity.block(0, sum(&value));
            let mut records = Vec::new();
            let record = Record {
                kind: Kind::Value,
                namespace: NamespaceId([2; 16]),
                key: &[b'k', group as u8],
                generation: Generation(7),
                length: 5000,
                sum: identity.fold(5000, [block]),
                stored: 5000,
                page: page + 1,
                part: 0,
                parts: 1,
                first_block: 0,
                sums: &block.to_le_bytes(),
            };
            record.encode(&mut records);
            let run = Group { run_pages: 1, pages: 3, count: 1, records: &records }
                .encode(Place { page, ..BASE }, 1);
            let at = page as usize * PAGE_BYTES;
            segment[at..at + PAGE_BYTES].copy_from_slice(&run);
            segment[at + PAGE_BYTES..at + PAGE_BYTES + 5000].copy_from_slice(&value);
        }
        segment
    }

    fn keys(walked: &Walked) -> Vec<u8> {
        Records::new(&walked.records).map(|(record, _)| record.key[1]).collect()
    }

    #[test]
    fn a_walk_finds_what_is_whole_and_skips_what_is_not() {
        let geometry = Geometry::new(1 << 20);
        let good = segment(geometry);
        assert_eq!(keys(&walk(&good, BASE, geometry)), [0, 1, 2]);
        let mut hole = good.clone();
        hole[PAGE_BYTES * 4..PAGE_BYTES * 7].fill(0);
        let walked = walk(&hole, BASE, geometry);
        assert_eq!((keys(&walked), walked.torn), (vec![0, 2], 0));
        let mut torn = good.clone();
        torn[PAGE_BYTES * 5 + 4999] ^= 1;
        let walked = walk(&torn, BASE, geometry);
        assert_eq!((keys(&walked), walked.torn), (vec![0, 2], 1));
        assert!(keys(&walk(&good, Place { sequence: 6, ..BASE }, geometry)).is_empty());
    }

    #[test]
    fn no_bytes_make_it_panic_or_give_a_wrong_value() {
        let geometry = Geometry::new(1 << 20);
        let good = segment(geometry);
        let mut dice = Dice(6);
        for _ in 0..300 {
            let mut bytes = dice.damage(&good[..PAGE_BYTES * 10]);
            bytes.resize(good.len() - dice.roll(2), 0);
            let walked = walk(&bytes, BASE, geometry);
            for (record, _) in Records::new(&walked.records) {
                let at = record.page as usize * PAGE_BYTES;
                assert_eq!(bytes[at..at + 5000], good[at..at + 5000]);
            }
        }
    }
}
