//! The allocator against a list of booleans: whatever the order of puts and evictions, pages are had exactly when they
//! are free, belong to one object each, and grow together again when they come back.

use super::*;

/// SplitMix64: a test's dice.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((((z ^ (z >> 31)) >> 32) * u64::from(bound)) >> 32) as u32
    }
}

impl Buddy {
    /// Panics unless tree, page bits, lists and counts tell the same story.
    fn check(&self) {
        let mut free_pages = 0;
        for (index, chunk) in self.chunks.iter().enumerate() {
            let mut free = [0u8; CHUNK_PAGES as usize];
            for node in 1..2 * CHUNK_PAGES {
                if chunk.has(node) {
                    assert!(
                        node == 1 || !chunk.has(node ^ 1),
                        "chunk {index}: two free buddies, node {node}"
                    );
                    let order = ORDER_MAX as u32 - node.ilog2();
                    let offset = ((node << order) - CHUNK_PAGES) as usize;
                    free[offset..offset + (1 << order)].iter_mut().for_each(|count| *count += 1);
                }
            }
            for (page, count) in free.iter().enumerate() {
                let used = (chunk.used[page / 64] >> (page % 64) & 1) as u8;
                assert_eq!(count + used, 1, "chunk {index} page {page}: free in {count} blocks, used {used}");
                free_pages += u32::from(*count);
            }
        }
        assert_eq!(free_pages, self.free_pages);
        (0..ORDERS).for_each(|order| self.check_list(order));
    }

    fn check_list(&self, order: usize) {
        let mut listed = vec![false; self.chunks.len()];
        let (mut chunk, mut previous) = (self.heads[order], NONE);
        assert_eq!(self.orders >> order & 1 == 1, chunk != NONE);
        while chunk != NONE {
            assert_eq!(self.chunks[chunk as usize].links[order].previous, previous);
            assert!(!std::mem::replace(&mut listed[chunk as usize], true), "a list bites its tail");
            (chunk, previous) = (self.chunks[chunk as usize].links[order].next, chunk);
        }
        for (chunk, listed) in self.chunks.iter().zip(listed) {
            assert_eq!(chunk.has_order(order), listed);
        }
    }
}

fn alloc(buddy: &mut Buddy, pages: u32) -> Option<Runs> {
    let mut runs = Runs::new();
    buddy.alloc(pages, &mut runs).then_some(runs)
}

fn run(first: u32, pages: u32) -> Run {
    Run { first, pages }
}

/// The model: who has each page.
struct Model {
    owned: Vec<bool>,
    objects: Vec<Runs>,
}

impl Model {
    fn free_pages(&self) -> u32 {
        self.owned.iter().filter(|owned| !**owned).count() as u32
    }

    fn put(&mut self, runs: Runs, pages: u32) {
        assert_eq!(runs.iter().map(|run| run.pages).sum::<u32>(), pages);
        for run in &runs {
            assert_eq!(
                run.first / REGION_PAGES,
                (run.first + run.pages - 1) / REGION_PAGES,
                "a run crosses a region"
            );
            for page in run.first..run.first + run.pages {
                assert!(
                    !std::mem::replace(&mut self.owned[page as usize], true),
                    "page {page} has two owners"
                );
            }
        }
        self.objects.push(runs);
    }

    fn evict(&mut self, dice: &mut Dice, buddy: &mut Buddy) {
        let victim = self.objects.swap_remove(dice.below(self.objects.len() as u32) as usize);
        for run in victim {
            buddy.free(run);
            self.owned[run.first as usize..(run.first + run.pages) as usize].fill(false);
        }
    }
}

#[test]
fn agrees_with_a_list_of_booleans() {
    let (seeds, steps) = if cfg!(miri) { (1, 20) } else { (40, 2000) };
    for seed in 0..seeds {
        let mut dice = Dice(seed);
        let chunks = if cfg!(miri) { 1 } else { 1 + dice.below(6) };
        let pages_max = [3, 40, 600, 2500][seed as usize % 4];
        let mut buddy = Buddy::new(chunks);
        let mut model = Model { owned: vec![false; (chunks * CHUNK_PAGES) as usize], objects: Vec::new() };
        for _ in 0..steps {
            if dice.below(100) < 55 {
                let pages = 1 + dice.below(pages_max);
                let fits = pages <= model.free_pages();
                match alloc(&mut buddy, pages) {
                    Some(runs) => model.put(runs, pages),
                    None => assert!(!fits, "seed {seed}: {pages} pages refused, {} free", model.free_pages()),
                }
                assert!(fits || buddy.free_pages() == model.free_pages(), "a refusal changed something");
            } else if !model.objects.is_empty() {
                model.evict(&mut dice, &mut buddy);
            }
            assert_eq!(buddy.free_pages(), model.free_pages());
            if !cfg!(miri) {
                buddy.check();
            }
        }
        while !model.objects.is_empty() {
            model.evict(&mut dice, &mut buddy);
        }
        buddy.check();
        assert!(
            buddy.chunks.iter().all(|chunk| chunk.has(1)),
            "seed {seed}: chunks did not grow together again"
        );
    }
}

#[test]
fn an_object_has_its_largest_pieces_first_and_in_one_run() {
    let mut buddy = Buddy::new(4);
    // 512 + 256 + 32: the whole chunk, then the half and the 32nd of the next, without a gap.
    assert_eq!(alloc(&mut buddy, 800).unwrap().as_slice(), [run(0, 800)]);
    // The second leaves the halves alone and takes whole chunks; its 256 fit exactly behind the first's 32.
    assert_eq!(alloc(&mut buddy, 512).unwrap().as_slice(), [run(1024, 512)]);
    assert_eq!(alloc(&mut buddy, 32).unwrap().as_slice(), [run(800, 32)]);
    buddy.check();
}

#[test]
fn splits_the_smallest_block_that_is_large_enough() {
    let mut buddy = Buddy::new(2);
    let whole = alloc(&mut buddy, 512).unwrap();
    assert_eq!(alloc(&mut buddy, 448).unwrap().as_slice(), [run(512, 448)], "leaves 64 of the second chunk");
    whole.into_iter().for_each(|run| buddy.free(run));
    assert_eq!(alloc(&mut buddy, 1).unwrap().as_slice(), [run(960, 1)], "not out of the whole chunk");
    buddy.check();
    assert_eq!(buddy.free_pages(), 512 + 63);
}

#[test]
fn crumbs_hold_an_object_too() {
    let mut buddy = Buddy::new(2);
    let pages: Vec<Runs> = (0..1024).map(|_| alloc(&mut buddy, 1).unwrap()).collect();
    assert_eq!(alloc(&mut buddy, 1), None);
    pages.iter().step_by(2).for_each(|runs| buddy.free(runs[0]));
    buddy.check();
    assert_eq!(alloc(&mut buddy, 513), None);
    let crumbs = alloc(&mut buddy, 512).expect("512 pages are free, though no two of them touch");
    assert_eq!(crumbs.len(), 512);
    crumbs.into_iter().for_each(|run| buddy.free(run));
    pages.iter().skip(1).step_by(2).for_each(|runs| buddy.free(runs[0]));
    buddy.check();
    assert_eq!(alloc(&mut buddy, 1024).unwrap().as_slice(), [run(0, 1024)]);
}

#[test]
#[cfg_attr(miri, ignore = "513 chunks are slow there, and this file has no unsafe code")]
fn a_run_ends_at_the_end_of_a_region() {
    let mut buddy = Buddy::new(REGION_PAGES / CHUNK_PAGES + 1);
    let runs = alloc(&mut buddy, REGION_PAGES + CHUNK_PAGES).unwrap();
    assert_eq!(runs.as_slice(), [run(0, REGION_PAGES), run(REGION_PAGES, CHUNK_PAGES)]);
    // Come back the other way round, they are joined from behind, and still not over the end of the region.
    for chunk in 0..REGION_PAGES / CHUNK_PAGES + 1 {
        buddy.free(run(chunk * CHUNK_PAGES, CHUNK_PAGES));
    }
    let runs = alloc(&mut buddy, REGION_PAGES + CHUNK_PAGES).unwrap();
    assert_eq!(runs.as_slice(), [run(REGION_PAGES, CHUNK_PAGES), run(0, REGION_PAGES)]);
    runs.into_iter().for_each(|run| buddy.free(run));
    buddy.check();
}

#[test]
fn a_part_of_a_run_can_come_back() {
    let mut buddy = Buddy::new(3);
    let runs = alloc(&mut buddy, 1300).unwrap();
    assert_eq!(runs.as_slice(), [run(0, 1300)]);
    buddy.free(run(37, 1000));
    buddy.check();
    buddy.free(run(0, 37));
    buddy.free(run(1037, 263));
    buddy.check();
    assert_eq!(buddy.free_pages(), 3 * CHUNK_PAGES);
    assert!(buddy.chunks.iter().all(|chunk| chunk.has(1)));
}

#[test]
#[should_panic(expected = "freed twice")]
fn a_double_free_is_caught() {
    let mut buddy = Buddy::new(1);
    let runs = alloc(&mut buddy, 7).unwrap();
    buddy.free(runs[0]);
    buddy.free(runs[0]);
}

#[test]
#[should_panic(expected = "freed twice")]
fn a_free_of_one_page_too_many_is_caught() {
    let mut buddy = Buddy::new(1);
    assert_eq!(alloc(&mut buddy, 7).unwrap().as_slice(), [run(0, 7)]);
    buddy.free(run(0, 8));
}

#[test]
#[should_panic(expected = "freed in an arena of 512")]
fn a_free_beyond_the_end_is_caught() {
    Buddy::new(1).free(run(510, 4));
}
