//! Which pages are free: a buddy system inside each chunk of 512 pages.
//!
//! What it is: bookkeeping over page numbers, pure and safe; it holds no pointer and touches no memory of the arena.
//! What it is not: a lock, or a list of who owns what; `arena.rs` has the lock and the owners have the runs.
//! The decision that shaped it: an object is a list of blocks, so any `n` free pages hold an object of `n` pages.
//!
//! It costs 272 B a chunk (0.013 % of the memory), four to five cache lines:
//!
//! ```text
//! blocks  1024 bit  a binary tree of free blocks: node 1 is the chunk, nodes 2n and 2n + 1 are the halves of n,
//!                   nodes 512..1024 are the pages. A bit is set for a block that is free as a whole and whose
//!                   buddy is not (else their parent's bit would stand for both).
//! used     512 bit  one per page: given out. It repeats what the tree says, so that a double free is seen in O(1).
//! links   10 x 8 B  the chunk's place in the list of chunks that have a free block of that order.
//! ```
#![forbid(unsafe_code)]

use std::ops::Range;

use smallvec::SmallVec;

use crate::{CHUNK_BYTES, PAGE_BYTES, REGION_BYTES};

/// Pages of a chunk.
pub(crate) const CHUNK_PAGES: u32 = (CHUNK_BYTES / PAGE_BYTES) as u32;
/// Pages of a registered piece; no run crosses one.
pub(crate) const REGION_PAGES: u32 = (REGION_BYTES / PAGE_BYTES as u64) as u32;
/// The most chunks one allocator keeps, so that a count of pages fits 32 bits.
pub(crate) const CHUNKS_MAX: u64 = (1 << 32) / CHUNK_PAGES as u64 - 1;

/// Block sizes: order 0 is a page, order 9 a chunk.
const ORDERS: usize = 10;
const ORDER_MAX: usize = ORDERS - 1;
/// The end of a list.
const NONE: u32 = u32::MAX;

const _: () = assert!(CHUNK_PAGES == 1 << ORDER_MAX);
const _: () = assert!(REGION_PAGES.is_multiple_of(CHUNK_PAGES));
const _: () = assert!(size_of::<Chunk>() == 272);

/// Pages `first..first + pages`, which lie in one registered piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: u32,
    pub(crate) pages: u32,
}

/// The runs of one object; few unless the arena is in crumbs.
pub(crate) type Runs = SmallVec<[Run; 8]>;

/// The allocator of `chunks.len()` chunks.
pub(crate) struct Buddy {
    chunks: Box<[Chunk]>,
    /// By order: the first chunk of the list of those that have a free block of that order.
    heads: [u32; ORDERS],
    /// Bit `k` is set when list `k` is not empty.
    orders: u32,
    free_pages: u32,
}

impl Buddy {
    /// An allocator of `chunks` chunks, all free. Panics for 0 and for more than [`CHUNKS_MAX`].
    pub(crate) fn new(chunks: u32) -> Self {
        assert!(chunks > 0 && u64::from(chunks) <= CHUNKS_MAX, "{chunks} chunks");
        let empty = Chunk { blocks: [0; 16], used: [0; 8], links: [Link::default(); ORDERS] };
        let mut buddy = Buddy {
            chunks: vec![empty; chunks as usize].into_boxed_slice(),
            heads: [NONE; ORDERS],
            orders: 0,
            free_pages: chunks * CHUNK_PAGES,
        };
        // From the last to the first, so that the lists hand out ascending neighbours, which become one run.
        (0..chunks).rev().for_each(|chunk| buddy.put(chunk, ORDER_MAX, 1));
        buddy
    }

    /// Pages not given out.
    pub(crate) fn free_pages(&self) -> u32 {
        self.free_pages
    }

    /// Gives out `pages` pages and appends them to `runs`; false, with nothing done, when fewer are free.
    ///
    /// Whole chunks first, then the powers of two of the rest. Each piece is a block of that order, or half of the
    /// smallest larger block, or, when nothing as large is free, the largest there is.
    pub(crate) fn alloc(&mut self, pages: u32, runs: &mut Runs) -> bool {
        if pages > self.free_pages {
            return false;
        }
        self.free_pages -= pages;
        let mut left = pages;
        while left > 0 {
            let order = (left.ilog2() as usize).min(ORDER_MAX);
            left -= self.take_at_most(order, runs);
        }
        true
    }

    /// Takes back the pages of `run`, which may be any part of what was given out.
    ///
    /// Panics when any of them is not given out: a double free, or a run of another arena.
    pub(crate) fn free(&mut self, run: Run) {
        let pages_total = self.chunks.len() as u64 * u64::from(CHUNK_PAGES);
        let end = u64::from(run.first) + u64::from(run.pages);
        assert!(end <= pages_total, "pages {}..{end} freed in an arena of {pages_total}", run.first);
        let Run { mut first, pages: mut left } = run;
        while left > 0 {
            // The largest block that starts here and ends in the run.
            let order = first.trailing_zeros().min(left.ilog2()).min(ORDER_MAX as u32);
            self.give(first, order as usize);
            first += 1 << order;
            left -= 1 << order;
        }
        self.free_pages += run.pages;
    }

    /// Takes one block of `order`, or smaller when no block as large is free; returns its pages.
    fn take_at_most(&mut self, order: usize, runs: &mut Runs) -> u32 {
        let large_enough = self.orders >> order;
        let found = match large_enough {
            0 => self.orders.checked_ilog2().expect("alloc counted enough free pages") as usize,
            _ => order + large_enough.trailing_zeros() as usize,
        };
        let order = order.min(found);
        let (chunk, mut node) = self.take(found);
        // Keep the lower half: the next, smaller piece then comes out of the upper one and continues this run.
        for half in (order..found).rev() {
            node *= 2;
            self.put(chunk, half, node + 1);
        }
        let pages = 1 << order;
        let offset = (node << order) - CHUNK_PAGES;
        self.chunks[chunk as usize].mark_used(offset, pages);
        push(runs, Run { first: chunk * CHUNK_PAGES + offset, pages });
        pages
    }

    /// Takes back one block, and joins it with its buddy as often as that one is free.
    fn give(&mut self, first: u32, mut order: usize) {
        let (chunk, offset) = (first / CHUNK_PAGES, first % CHUNK_PAGES);
        self.chunks[chunk as usize].mark_free(first, offset, 1 << order);
        let mut node = (CHUNK_PAGES + offset) >> order;
        while order < ORDER_MAX && self.chunks[chunk as usize].has(node ^ 1) {
            self.remove(chunk, order, node ^ 1);
            node /= 2;
            order += 1;
        }
        self.put(chunk, order, node);
    }

    /// Takes the first free block of `order` there is; the list is not empty.
    fn take(&mut self, order: usize) -> (u32, u32) {
        let chunk = self.heads[order];
        let node = self.chunks[chunk as usize].first_block(order);
        self.remove(chunk, order, node);
        (chunk, node)
    }

    fn put(&mut self, chunk: u32, order: usize, node: u32) {
        let blocks = &mut self.chunks[chunk as usize];
        let known = blocks.has_order(order);
        blocks.blocks[node as usize / 64] |= 1 << (node % 64);
        if !known {
            self.link(chunk, order);
        }
    }

    fn remove(&mut self, chunk: u32, order: usize, node: u32) {
        let blocks = &mut self.chunks[chunk as usize];
        blocks.blocks[node as usize / 64] &= !(1 << (node % 64));
        if !blocks.has_order(order) {
            self.unlink(chunk, order);
        }
    }

    fn link(&mut self, chunk: u32, order: usize) {
        let next = self.heads[order];
        self.chunks[chunk as usize].links[order] = Link { next, previous: NONE };
        if next != NONE {
            self.chunks[next as usize].links[order].previous = chunk;
        }
        self.heads[order] = chunk;
        self.orders |= 1 << order;
    }

    fn unlink(&mut self, chunk: u32, order: usize) {
        let Link { next, previous } = self.chunks[chunk as usize].links[order];
        if next != NONE {
            self.chunks[next as usize].links[order].previous = previous;
        }
        if previous != NONE {
            self.chunks[previous as usize].links[order].next = next;
            return;
        }
        self.heads[order] = next;
        if next == NONE {
            self.orders &= !(1 << order);
        }
    }
}

/// Appends `run`, as part of the one before it when they touch and lie in the same registered piece.
fn push(runs: &mut Runs, run: Run) {
    if let Some(last) = runs.last_mut() {
        if last.first + last.pages == run.first && !run.first.is_multiple_of(REGION_PAGES) {
            last.pages += run.pages;
            return;
        }
        if run.first + run.pages == last.first && !last.first.is_multiple_of(REGION_PAGES) {
            *last = Run { first: run.first, pages: last.pages + run.pages };
            return;
        }
    }
    runs.push(run);
}

#[derive(Clone)]
struct Chunk {
    blocks: [u64; 16],
    used: [u64; 8],
    links: [Link; ORDERS],
}

#[derive(Clone, Copy, Default)]
struct Link {
    next: u32,
    previous: u32,
}

impl Chunk {
    fn has(&self, node: u32) -> bool {
        self.blocks[node as usize / 64] >> (node % 64) & 1 == 1
    }

    fn has_order(&self, order: usize) -> bool {
        if order > 3 {
            return self.blocks[0] & mask_of(order) != 0;
        }
        self.blocks[words_of_order(order)].iter().any(|word| *word != 0)
    }

    /// The lowest free block of `order`; there is one.
    fn first_block(&self, order: usize) -> u32 {
        if order > 3 {
            let word = self.blocks[0] & mask_of(order);
            assert!(word != 0, "a chunk in the list of order {order} has no such block");
            return word.trailing_zeros();
        }
        for index in words_of_order(order) {
            if self.blocks[index] != 0 {
                return index as u32 * 64 + self.blocks[index].trailing_zeros();
            }
        }
        panic!("a chunk in the list of order {order} has no such block");
    }

    fn mark_used(&mut self, offset: u32, pages: u32) {
        let (words, mask) = used_words(offset, pages);
        for word in &mut self.used[words] {
            assert!(*word & mask == 0, "pages given out twice");
            *word |= mask;
        }
    }

    fn mark_free(&mut self, first: u32, offset: u32, pages: u32) {
        let (words, mask) = used_words(offset, pages);
        for word in &mut self.used[words] {
            assert!(*word & mask == mask, "pages {first}..{} freed twice", first + pages);
            *word &= !mask;
        }
    }
}

/// The words of the tree that hold the blocks of `order` 0 to 3, and nothing else.
fn words_of_order(order: usize) -> Range<usize> {
    8 >> order..16 >> order
}

/// The bits of the first word that hold the blocks of `order` 4 to 9.
fn mask_of(order: usize) -> u64 {
    let count = 1 << (ORDER_MAX - order);
    ((1 << count) - 1) << count
}

/// The words and bits of `used` for a block: a power of two of pages, aligned to itself.
fn used_words(offset: u32, pages: u32) -> (Range<usize>, u64) {
    let first = offset as usize / 64;
    match pages {
        64.. => (first..first + pages as usize / 64, u64::MAX),
        _ => (first..first + 1, ((1 << pages) - 1) << (offset % 64)),
    }
}

#[cfg(test)]
mod tests;
