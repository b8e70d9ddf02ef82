//! Values that lie in several places: where their further parts are, and whose part stands where.

use std::collections::BTreeMap;

use ebbtide_core::Location;

/// The further places of a value, in order; the first is its location.
#[derive(Clone, Debug)]
pub(crate) struct Places(pub(crate) Box<[Location]>);

impl Places {
    /// All places of a value of `length` bytes at `first`, each with the bytes that it holds.
    pub(crate) fn with_lengths(
        &self,
        first: Location,
        length: u64,
        part_bytes: u64,
    ) -> impl Iterator<Item = (Location, u64)> {
        let places = std::iter::once(first).chain(self.0.iter().copied());
        places
            .enumerate()
            .map(move |(part, place)| (place, part_bytes.min(length - part as u64 * part_bytes)))
    }
}

/// Both ways between the first place of a value and its further ones. Small: only values longer than a quarter of a
/// segment are in it.
#[derive(Default)]
pub(crate) struct PartsMap {
    further: BTreeMap<Location, Places>,
    first: BTreeMap<Location, Location>,
}

impl PartsMap {
    pub(crate) fn insert(&mut self, first: Location, further: Box<[Location]>) {
        self.first.extend(further.iter().map(|place| (*place, first)));
        self.further.insert(first, Places(further));
    }

    pub(crate) fn remove(&mut self, first: Location) -> Option<Places> {
        let places = self.further.remove(&first)?;
        for place in &places.0 {
            self.first.remove(place);
        }
        Some(places)
    }

    pub(crate) fn get(&self, first: Location) -> Option<&Places> {
        self.further.get(&first)
    }

    /// The first place of the value that has a further part at `place`.
    pub(crate) fn first_of(&self, place: Location) -> Option<Location> {
        self.first.get(&place).copied()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Location, &Places)> {
        self.further.iter().map(|(first, places)| (*first, places))
    }
}
