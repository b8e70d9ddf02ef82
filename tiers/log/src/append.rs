//! Writing: objects are cut into pieces, pieces packed into groups, groups placed in open segments and sent.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ebbtide_core::{
    BLOCK_BYTES, Error, Intent, KEY_BYTES_MAX, Location, MediumOp, Object, Result, SegmentId, SharedObject,
    blocks_in,
};
use ebbtide_mem::{Buf, round_up_to_page};
use smallvec::SmallVec;

use crate::flight::Flight;
use crate::format::group::{Group, Place};
use crate::format::record::{Kind, Record};
use crate::format::segment::{Header, Use};
use crate::format::{PAGE, pages_in};
use crate::log::Log;
use crate::place::Placement;
use crate::reclaim::Grave;
use crate::room::Purpose;

/// What one record will stand for.
pub(crate) struct Piece {
    body: Body,
    /// Bytes of a value; 0 for a tombstone.
    pub(crate) stored: u64,
    pub(crate) record_bytes: usize,
}

enum Body {
    /// Part `part` of `parts` of the object with this index in its batch.
    Value {
        object: usize,
        part: u16,
        parts: u16,
    },
    Grave(Grave),
}

impl Log {
    /// Writes `objects`; result i belongs to object i.
    pub(crate) async fn put_many(
        self: Arc<Self>,
        objects: Vec<SharedObject>,
        intent: Intent,
    ) -> Vec<Result<Location>> {
        let purpose = match intent {
            Intent::Demote => Purpose::Demote,
            Intent::Reinsert => Purpose::Reinsert,
        };
        let mut results: Vec<Option<Error>> = Vec::new();
        let mut pieces = Vec::with_capacity(objects.len());
        for (index, object) in objects.iter().enumerate() {
            results.push(self.cut(index, object, &mut pieces).err());
        }
        let mut flights: Vec<Flight> = Vec::new();
        let mut next = 0;
        while next < pieces.len() {
            match self.place(&pieces[next..], purpose, &mut flights).await {
                Ok(placement) => {
                    let group = &pieces[next..next + placement.count];
                    next += group.len();
                    flights.push(self.send(placement, group, &objects));
                }
                Err(error) => {
                    for piece in &pieces[next..] {
                        let Body::Value { object, .. } = piece.body else { continue };
                        results[object] = Some(error.clone());
                    }
                    break;
                }
            }
        }
        let mut places: Vec<SmallVec<[Location; 1]>> = vec![SmallVec::new(); objects.len()];
        let mut sent = pieces.iter();
        for flight in &mut flights {
            let landed = flight.land().await;
            for (location, piece) in flight.locations.iter().zip(sent.by_ref()) {
                let Body::Value { object, .. } = piece.body else { continue };
                match &landed {
                    Ok(()) => places[object].push(*location),
                    Err(error) => results[object] = Some(error.clone()),
                }
            }
        }
        let finish = |((object, places), error): ((&SharedObject, SmallVec<_>), Option<Error>)| match error {
            Some(error) => Err(error), // parts of it that did land are dead space
            None => Ok(self.finish(object, &places, intent)),
        };
        // The flights, and with them the holds on their segments, end behind the last count.
        objects.iter().zip(places).zip(results).map(finish).collect()
    }

    /// Adds the pieces of an object.
    fn cut(&self, index: usize, object: &Object, pieces: &mut Vec<Piece>) -> Result<()> {
        let length = object.length();
        if length > self.info.object_bytes_max || object.key.len() > KEY_BYTES_MAX || object.key.is_empty() {
            let max = self.info.object_bytes_max;
            return Err(Error::invalid(format!(
                "tier {}: value of {length} bytes, at most {max}",
                self.info.name
            )));
        }
        let part_bytes = self.geometry.part_bytes;
        // Lossless: 4 GiB in parts of at least 128 KiB are 32768.
        let parts = self.geometry.parts_of(length) as u16;
        pieces.extend((0..parts).map(|part| {
            let stored = part_bytes.min(length - u64::from(part) * part_bytes);
            let record_bytes = Record::bytes_for(stored, object.key.len());
            Piece { body: Body::Value { object: index, part, parts }, stored, record_bytes }
        }));
        Ok(())
    }

    /// Counts an object whose groups have landed, and answers where it starts.
    fn finish(&self, object: &Object, places: &[Location], intent: Intent) -> Location {
        let (length, part_bytes) = (object.length(), self.geometry.part_bytes);
        for (part, place) in places.iter().enumerate() {
            self.count_live(place.segment, part_bytes.min(length - part as u64 * part_bytes));
        }
        let written = match intent {
            Intent::Demote => &self.stats.admitted_value_bytes,
            Intent::Reinsert => &self.stats.reinserted_value_bytes,
        };
        written.fetch_add(length, Ordering::Relaxed);
        if places.len() > 1 {
            self.parts.lock().insert(places[0], places[1..].into());
        }
        places[0]
    }

    /// Writes tombstones. On return they survive the process.
    pub(crate) async fn bury(self: Arc<Self>, graves: Vec<Grave>, purpose: Purpose) -> Result<()> {
        let piece = |grave: Grave| {
            let record_bytes = Record::bytes_for(0, grave.key.len());
            Piece { body: Body::Grave(grave), stored: 0, record_bytes }
        };
        let pieces: Vec<Piece> = graves.into_iter().map(piece).collect();
        let mut flights: Vec<Flight> = Vec::new();
        let mut next = 0;
        while next < pieces.len() {
            let placement = self.place(&pieces[next..], purpose, &mut flights).await?;
            let group = &pieces[next..next + placement.count];
            next += group.len();
            flights.push(self.send(placement, group, &[]));
        }
        for flight in &mut flights {
            flight.land().await?;
        }
        Ok(())
    }

    /// Encodes a group and starts its write.
    fn send(self: &Arc<Self>, placement: Placement, pieces: &[Piece], objects: &[SharedObject]) -> Flight {
        let Placement { segment, sequence, latest, page, run_pages, pages, count, first } = placement;
        let mut records = Vec::with_capacity(pieces.iter().map(|piece| piece.record_bytes).sum());
        let mut values = Vec::with_capacity(pieces.len() + 1);
        let mut locations = Vec::with_capacity(pieces.len());
        let (mut value_page, mut tombstones) = (page + run_pages, 0);
        for piece in pieces {
            match &piece.body {
                Body::Value { object, part, parts } => {
                    let object = &*objects[*object];
                    self.encode_value(object, *part, *parts, piece.stored, value_page, &mut records);
                    values.push(self.stored_part(object, *part, piece.stored));
                    locations.push(Location { segment, page: value_page });
                    value_page += pages_in(piece.stored) as u32; // lossless: within a segment
                }
                Body::Grave(grave) => {
                    grave.encode(latest, &mut records);
                    tombstones += 1;
                }
            }
        }
        let place = Place { store: self.info.store, sequence, page };
        let group = Group { run_pages, pages, count: count as u32, records: &records };
        let run = group.encode(place, self.info.incarnation);
        let header = match first {
            true => [self.header(segment, sequence, false).as_slice(), &run].concat(),
            false => run,
        };
        let start = page - u32::from(first);
        values.insert(0, self.headers.load(&header));
        self.stats.written_bytes.fetch_add(u64::from(page + pages - start) * PAGE, Ordering::Relaxed);
        let op = MediumOp::Write { slot: segment.slot(), offset: u64::from(start) * PAGE, from: values };
        let batch = self.media[segment.medium()].submit(vec![op]);
        Flight::new(Arc::clone(self), &placement, batch, records, locations, tombstones)
    }

    /// The header page of a segment.
    pub(crate) fn header(&self, segment: SegmentId, sequence: u64, free: bool) -> [u8; PAGE as usize] {
        let header = Header {
            store: self.info.store,
            used_for: Use::Log,
            free,
            incarnation: self.info.incarnation,
            sequence,
            segment,
            created_ms: self.env.wall_ms(),
        };
        header.encode()
    }

    fn encode_value(
        &self,
        object: &Object,
        part: u16,
        parts: u16,
        stored: u64,
        page: u32,
        target: &mut Vec<u8>,
    ) {
        let blocks_per_part = (self.geometry.part_bytes / BLOCK_BYTES as u64) as usize;
        let first_block = usize::from(part) * blocks_per_part;
        let blocks = blocks_in(stored);
        let sums = object.block_sums();
        let sum = object.identity().fold(object.length(), sums.0.iter().copied());
        let sums: SmallVec<[u8; 64]> =
            sums.0[first_block..first_block + blocks].iter().flat_map(|sum| sum.to_le_bytes()).collect();
        let record = Record {
            kind: if parts == 1 { Kind::Value } else { Kind::Part },
            namespace: object.namespace,
            key: &object.key,
            generation: object.generation,
            length: object.length(),
            sum,
            stored: stored as u32, // lossless: within a segment
            page,
            part,
            parts,
            first_block: first_block as u32,
            sums: &sums,
        };
        record.encode(target);
    }

    /// The memory of one part, whole pages and no more.
    fn stored_part(&self, object: &Object, part: u16, stored: u64) -> Buf {
        let (at, stored) = (u64::from(part) * self.geometry.part_bytes, stored as usize);
        let bytes: usize = object.value.raw_spans().iter().map(|span| span.bytes as usize).sum();
        match at == 0 && bytes == round_up_to_page(stored) {
            true => object.value.clone(),
            false => object.value.slice(at as usize, stored),
        }
    }
}
