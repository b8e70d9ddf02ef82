//! The block checksum, XXH3-64 (seed 0, default secret), alone and fused with a copy.
//!
//! Not a general hasher (no seed, no streaming; [`XxHash3_64`] has both), and not a guard against
//! forgery: it finds torn writes and rotten bytes.
//!
//! The decision that shaped it: bytes are hashed in the register that stores them, while the lines
//! further on are prefetched. A copy from cold memory waits for memory; a hash that runs inside
//! that wait is free, one that runs after it is not. The same prefetches let the fused loop beat
//! the plain `memcpy`. So there is one kernel, AVX2. Everything else (no AVX2, another
//! architecture, Miri, at most 240 bytes) copies and then hashes what it stored with `twox-hash`.
//!
//! Rates relative to `copy_from_slice` of the whole object, in blocks of 128 KiB, source and target
//! 384 MiB each, objects in random order. (`sum` is relative to a plain loop that adds 64-bit words.)
//! 2026-11-30, a VM with 2 cores (Xeon, model 85, 2.0 GHz, 36 MiB L3), 4 KiB pages, other builds running;
//! one thread, one process, arms in rotating order, median of 15 to 21 per-round ratios in slices of
//! 30 to 60 ms; the base against itself gave 1.000 to 1.003 (`sum`: 1.002 to 1.005). By hand, with a
//! program that is not kept.
//!
//! | arm | 4 KiB | 64 KiB | 1 MiB | 3.27 MB |
//! | --- | --- | --- | --- | --- |
//! | `copy_from_slice` (GB/s) | 3.2 | 3.9 | 4.1 | 3.9 |
//! | [`copy_and_sum`] | 1.02 | 1.27 | 1.27 | 1.30 |
//! | [`copy`] | 1.00 | 1.29 | 1.30 | 1.31 |
//! | [`sum`] | 0.84 | 1.23 | 1.38 | - |
//! | block copied, then `twox-hash` (earlier run) | 0.90 | 0.80 | 0.80 | 0.75 |
//!
//! The column of 4 KiB is from before blocks under 16 KiB were fetched a chunk ahead; what that brought is only measured
//! through the store: a `get_into` of 4 KiB went from 1.4 to 0.66 µs over `copy_from_slice` (`bench dram`, 2026-12-01).
//!
//! Rejected, from earlier and noisier runs at 1 MiB: fused but without prefetch 0.97 (AVX-512 1.02);
//! only the source prefetched 1.16; all prefetched but with AVX-512 1.22 against 1.16 here, yet behind
//! at 64 KiB and 3.27 MB (1.20 against 1.26, 1.11 against 1.15); non-temporal stores with the source
//! prefetched 1.02 to 1.12, and 0.93 to 0.95 when the target is read right after; `rep movsb` in pieces
//! of 4 KiB, each hashed while the next is prefetched, 1.14. Data that is in L1 or L2 already is the
//! price: there [`copy_and_sum`] runs at 0.35 to 0.50 of `copy_from_slice` (about 10 to 12 GB/s).

use twox_hash::XxHash3_64;

/// The longest input of XXH3's short formulas, which `twox-hash` computes here.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const SHORT_BYTES_MAX: usize = 240;

/// The XXH3-64 of `block`. Any length; built for blocks of 4 to 128 KiB in cold memory.
#[must_use]
pub fn sum(block: &[u8]) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if block.len() > SHORT_BYTES_MAX && is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was found and the length checked just above; `block` is readable for its
        // length.
        return unsafe { avx2::sum(block.as_ptr(), block.len()) };
    }
    XxHash3_64::oneshot(block)
}

/// Copies `src` to `dst` and returns the XXH3-64 of the bytes it stored there.
///
/// # Panics
///
/// When the lengths differ; nothing is written then.
#[must_use = "use `copy` when the sum is not needed"]
pub fn copy_and_sum(dst: &mut [u8], src: &[u8]) -> u64 {
    assert_eq!(dst.len(), src.len(), "copy_and_sum: lengths differ");
    // SAFETY: the references are valid for their (equal) lengths, and a `&mut` aliases nothing.
    unsafe { copy_and_sum_raw(dst.as_mut_ptr(), src.as_ptr(), src.len()) }
}

/// [`copy_and_sum`] for memory that cannot be a slice: shared with other processes, or not yet
/// initialized.
///
/// When someone outside this process changes the source meanwhile, what is stored may be a mix of
/// old and new bytes, but the sum is that of the mix: no byte of the source is loaded once for the
/// store and again for the hash.
///
/// # Safety
///
/// `src` is readable and `dst` writable for `len` bytes, they do not overlap, and nobody but the
/// caller touches `dst` until this returns.
#[must_use]
pub(crate) unsafe fn copy_and_sum_raw(dst: *mut u8, src: *const u8, len: usize) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len > SHORT_BYTES_MAX && is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was found and the length checked just above; the rest is our caller's
        // promise, passed on unchanged.
        return unsafe { avx2::copy_and_sum(dst, src, len) };
    }
    // SAFETY: our caller's promise, passed on unchanged.
    unsafe { copy_then_sum(dst, src, len) }
}

/// Copies `src` to `dst`: from 2 KiB on with the same prefetches as
/// [`copy_and_sum`], below it as `copy_from_slice` does.
///
/// # Panics
///
/// When the lengths differ; nothing is written then.
pub fn copy(dst: &mut [u8], src: &[u8]) {
    assert_eq!(dst.len(), src.len(), "copy: lengths differ");
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if src.len() >= COLD_COPY_BYTES_MIN && is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was found just above; the references are valid for their (equal) lengths,
        // and a `&mut` aliases nothing.
        return unsafe { avx2::copy(dst.as_mut_ptr(), src.as_ptr(), src.len()) };
    }
    dst.copy_from_slice(src);
}

/// Asks for the front of `source`, which will be read soon: for a caller who has something else to wait for meanwhile.
pub fn expect_read(source: &[u8]) {
    for line in source.chunks(LINE_BYTES).take(EXPECTED_LINES) {
        expect(&line[0]);
    }
}

/// Asks for the front of `target`, which will be written soon. As [`expect_read`].
pub fn expect_write(target: &mut [u8]) {
    expect_write_at(target.as_mut_ptr(), target.len().min(EXPECTED_LINES * LINE_BYTES));
}

/// Asks for the first `bytes` from `address` on, which will be written soon; they need not be there.
pub(crate) fn expect_write_at(address: *mut u8, bytes: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (0..bytes).step_by(LINE_BYTES) {
        avx2::prefetch_to_write(address.wrapping_add(at));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (address, bytes);
}

/// Asks for the line on which `value` starts, which will be looked at soon.
#[inline]
pub fn expect<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch is a hint: it neither faults nor changes anything. SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            std::ptr::from_ref(value).cast(),
        )
    };
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = value;
}

const LINE_BYTES: usize = 64;
/// Enough for the hardware to go on from, and few enough that a core has room for what it waits for meanwhile.
const EXPECTED_LINES: usize = 4;

/// Where [`copy`] stops being `copy_from_slice`: below it there is too little left to prefetch.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const COLD_COPY_BYTES_MIN: usize = 2 * 1024;

/// The portable fallback: copies, then hashes what the copy stored.
///
/// # Safety
///
/// As [`copy_and_sum_raw`].
unsafe fn copy_then_sum(dst: *mut u8, src: *const u8, len: usize) -> u64 {
    // SAFETY: our caller promises both ranges and that they do not overlap.
    unsafe { copy_opaque(dst, src, len) };
    // SAFETY: the copy initialized all `len` bytes, and our caller lets nobody else touch them.
    XxHash3_64::oneshot(unsafe { std::slice::from_raw_parts(dst, len) })
}

/// A `copy_nonoverlapping` the optimizer cannot see through. It may otherwise read the source
/// again where the code reads the target, and the source may have changed by then.
///
/// # Safety
///
/// As `std::ptr::copy_nonoverlapping`.
unsafe fn copy_opaque(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: our caller's promise, passed on unchanged.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
    std::hint::black_box(dst);
}

/// The kernel, written from the XXH3 specification: 64-byte stripes go into eight 64-bit lanes,
/// sixteen stripes (one kibibyte) at a time, with the lanes scrambled in between.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2 {
    use super::copy_opaque;
    use std::arch::asm;
    use std::arch::x86_64::*;

    const STRIPE_BYTES: usize = 64;
    const CHUNK_BYTES: usize = 1024;
    /// The secret moves on by this much with each stripe of a chunk.
    const SECRET_STEP_BYTES: usize = 8;
    const SECRET_AT_SCRAMBLE: usize = SECRET.0.len() - STRIPE_BYTES;
    const SECRET_AT_LAST: usize = SECRET_AT_SCRAMBLE - 7;
    const SECRET_AT_MERGE: usize = 11;

    /// How far ahead source lines are fetched: one page, because the hardware's prefetcher stops
    /// at each page's end and has to be told of the next.
    const SOURCE_AHEAD_BYTES: usize = 4096;
    /// How far ahead target lines are fetched for writing; later than the source's, so that fewer
    /// of them leave the first-level cache before their store comes.
    const TARGET_AHEAD_BYTES: usize = 2048;
    const _: () = assert!(TARGET_AHEAD_BYTES <= SOURCE_AHEAD_BYTES);
    const _: () = assert!(SOURCE_AHEAD_BYTES.is_multiple_of(CHUNK_BYTES));
    /// Blocks under this size are mostly over before so much of them is fetched: there both are fetched a chunk ahead, and the
    /// first chunk before the loop.
    const FAR_BYTES_MIN: usize = 16 * 1024;

    /// What a loop does with the bytes it visits.
    const SUM: u8 = 1;
    const COPY: u8 = 2;
    const COPY_AND_SUM: u8 = SUM | COPY;

    /// Eight 64-bit lanes: an accumulator, or one stripe of data.
    #[derive(Clone, Copy)]
    struct Lanes {
        low: __m256i,
        high: __m256i,
    }

    /// # Safety
    ///
    /// The machine has AVX2; `src` is readable for `len` bytes, and `len > SHORT_BYTES_MAX`.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn sum(src: *const u8, len: usize) -> u64 {
        let whole = (len - 1) / STRIPE_BYTES * STRIPE_BYTES;
        // SAFETY: our caller promises the source; SUM leaves the target pointer alone.
        let lanes = unsafe { stripes::<SUM>(std::ptr::null_mut(), src, whole) };
        // SAFETY: `len` is more than one stripe, so the last 64 bytes are inside the source.
        let last = unsafe { load(src.add(len - STRIPE_BYTES)) };
        finish(absorb(lanes, last, SECRET_AT_LAST), len)
    }

    /// # Safety
    ///
    /// As `copy_and_sum_raw`; and the machine has AVX2, and `len > SHORT_BYTES_MAX`.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_and_sum(dst: *mut u8, src: *const u8, len: usize) -> u64 {
        // The last stripe has rules of its own even when it is whole, so one byte at least is left
        // for it. It ends with the input and reaches back into bytes that are stored already.
        let whole = (len - 1) / STRIPE_BYTES * STRIPE_BYTES;
        // SAFETY: our caller promises both ranges, and `whole < len`.
        let lanes = unsafe { stripes::<COPY_AND_SUM>(dst, src, whole) };
        let last = if len - whole == STRIPE_BYTES {
            // SAFETY: exactly one stripe is left of both ranges.
            unsafe { transfer(dst.add(whole), src.add(whole)) }
        } else {
            // SAFETY: `len - whole` bytes are left of both ranges, and `len` is more than one
            // stripe. Read back from the target: only there are the bytes that were stored.
            unsafe {
                copy_opaque(dst.add(whole), src.add(whole), len - whole);
                load(dst.add(len - STRIPE_BYTES))
            }
        };
        finish(absorb(lanes, last, SECRET_AT_LAST), len)
    }

    /// # Safety
    ///
    /// The machine has AVX2; `src` is readable and `dst` writable for `len` bytes, and they do not
    /// overlap.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
        let whole = len / STRIPE_BYTES * STRIPE_BYTES;
        // SAFETY: our caller promises both ranges, and `whole <= len`.
        unsafe {
            let _no_sum = stripes::<COPY>(dst, src, whole);
            std::ptr::copy_nonoverlapping(src.add(whole), dst.add(whole), len - whole);
        }
    }

    /// Takes the first `len` bytes, a multiple of the stripe, through `DO`: chunks with prefetch
    /// as long as what is prefetched lies inside, the rest without. (Prefetching past the end
    /// never faults, but would cost a 4 KiB block as much again of memory traffic.)
    ///
    /// # Safety
    ///
    /// The machine has AVX2; `src` is readable for `len` bytes; and if `DO` copies, `dst` is
    /// writable for `len` bytes and the two do not overlap.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn stripes<const DO: u8>(dst: *mut u8, src: *const u8, len: usize) -> Lanes {
        let mut lanes = Lanes::start();
        let chunks_end = len / CHUNK_BYTES * CHUNK_BYTES;
        let far = len >= FAR_BYTES_MIN;
        let ahead_end = chunks_end.saturating_sub(if far { SOURCE_AHEAD_BYTES } else { CHUNK_BYTES });
        if !far {
            for at in (0..len.min(CHUNK_BYTES)).step_by(STRIPE_BYTES) {
                ahead::<DO>(dst.wrapping_add(at), src.wrapping_add(at));
            }
        }
        let mut at = 0;
        while at < ahead_end {
            let (dst, src) = (dst.wrapping_add(at), src.wrapping_add(at));
            // SAFETY: `at` plus a chunk is at most `chunks_end <= len`; our caller promises the rest.
            lanes = unsafe {
                match far {
                    true => chunk::<DO, SOURCE_AHEAD_BYTES, TARGET_AHEAD_BYTES>(lanes, dst, src),
                    false => chunk::<DO, CHUNK_BYTES, CHUNK_BYTES>(lanes, dst, src),
                }
            };
            at += CHUNK_BYTES;
        }
        while at < chunks_end {
            // SAFETY: as above.
            lanes = unsafe { chunk::<DO, 0, 0>(lanes, dst.wrapping_add(at), src.add(at)) };
            at += CHUNK_BYTES;
        }
        let mut secret_at = 0;
        while at < len {
            // SAFETY: both are multiples of the stripe, so a whole one lies before `len`.
            lanes = unsafe { stripe::<DO>(lanes, dst.wrapping_add(at), src.add(at), secret_at) };
            at += STRIPE_BYTES;
            secret_at += SECRET_STEP_BYTES;
        }
        lanes
    }

    /// Asks for one line of each side. A prefetch is a hint: it neither faults nor changes anything.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn ahead<const DO: u8>(dst: *mut u8, src: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(src.cast());
        if DO & COPY != 0 {
            prefetch_to_write(dst);
        }
    }

    /// # Safety
    ///
    /// As [`stripes`], for one chunk.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn chunk<const DO: u8, const SOURCE_AHEAD: usize, const TARGET_AHEAD: usize>(
        mut lanes: Lanes,
        dst: *mut u8,
        src: *const u8,
    ) -> Lanes {
        for index in 0..CHUNK_BYTES / STRIPE_BYTES {
            let at = index * STRIPE_BYTES;
            if SOURCE_AHEAD > 0 {
                ahead::<DO>(dst.wrapping_add(at + TARGET_AHEAD), src.wrapping_add(at + SOURCE_AHEAD));
            }
            // SAFETY: stripe `index` lies inside the chunk our caller promises.
            lanes =
                unsafe { stripe::<DO>(lanes, dst.wrapping_add(at), src.add(at), index * SECRET_STEP_BYTES) };
        }
        if DO & SUM == 0 { lanes } else { scramble(lanes) }
    }

    /// # Safety
    ///
    /// As [`stripes`], for one stripe.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn stripe<const DO: u8>(lanes: Lanes, dst: *mut u8, src: *const u8, secret_at: usize) -> Lanes {
        // SAFETY: our caller promises a readable stripe, and a writable one if `DO` copies.
        let data = unsafe { if DO & COPY == 0 { load(src) } else { transfer(dst, src) } };
        if DO & SUM == 0 { lanes } else { absorb(lanes, data, secret_at) }
    }

    /// # Safety
    ///
    /// The machine has AVX2; `src` is readable for one stripe.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(src: *const u8) -> Lanes {
        // SAFETY: our caller promises the 64 bytes; these loads need no alignment.
        unsafe { Lanes { low: _mm256_loadu_si256(src.cast()), high: _mm256_loadu_si256(src.add(32).cast()) } }
    }

    /// Copies one stripe and returns it in the registers that were stored. In assembly, because
    /// only there one load is sure to stay one load: the sum must be that of the stored bytes even
    /// if the source changes between two instructions.
    ///
    /// # Safety
    ///
    /// The machine has AVX2; `src` is readable and `dst` writable for one stripe.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn transfer(dst: *mut u8, src: *const u8) -> Lanes {
        let (low, high);
        // SAFETY: our caller promises both stripes; the moves need no alignment and touch neither
        // the stack nor the flags. `low` and `high` are written before `dst` and `src` are last
        // read, which is why they are `out` and not `lateout`.
        unsafe {
            asm!(
                "vmovdqu {low}, ymmword ptr [{src}]",
                "vmovdqu {high}, ymmword ptr [{src} + 32]",
                "vmovdqu ymmword ptr [{dst}], {low}",
                "vmovdqu ymmword ptr [{dst} + 32], {high}",
                src = in(reg) src,
                dst = in(reg) dst,
                low = out(ymm_reg) low,
                high = out(ymm_reg) high,
                options(nostack, preserves_flags),
            );
        }
        Lanes { low, high }
    }

    /// Fetches the line of `address` for writing. The intrinsic becomes a plain read prefetch
    /// unless the whole function is compiled for PRFCHW; each x86-64 processor that has AVX2
    /// executes the instruction, if only as a no-op.
    #[inline]
    pub(super) fn prefetch_to_write(address: *mut u8) {
        // SAFETY: a hint, for any address: it does not fault, and changes no memory and no flags.
        unsafe {
            asm!("prefetchw byte ptr [{}]", in(reg) address, options(nostack, preserves_flags, readonly))
        };
    }

    impl Lanes {
        #[inline]
        #[target_feature(enable = "avx2")]
        fn start() -> Self {
            // SAFETY: the array is 64 bytes long.
            unsafe { load(START.as_ptr().cast()) }
        }

        #[inline]
        #[target_feature(enable = "avx2")]
        fn secret(at: usize) -> Self {
            debug_assert!(at <= SECRET.0.len() - STRIPE_BYTES);
            // SAFETY: every caller passes one of the offsets above, or `index * 8` with
            // `index < 16`, so the 64 bytes end within the 192 of the secret.
            unsafe { load(SECRET.0.as_ptr().add(at)) }
        }
    }

    /// One accumulation: each lane gains its neighbour's data, and the product of the two halves
    /// of its own data mixed with the secret.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn absorb(lanes: Lanes, data: Lanes, secret_at: usize) -> Lanes {
        let secret = Lanes::secret(secret_at);
        Lanes {
            low: absorb_half(lanes.low, data.low, secret.low),
            high: absorb_half(lanes.high, data.high, secret.high),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn absorb_half(lanes: __m256i, data: __m256i, secret: __m256i) -> __m256i {
        let mixed = _mm256_xor_si256(data, secret);
        let product = _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed));
        let neighbours = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
        _mm256_add_epi64(_mm256_add_epi64(lanes, neighbours), product)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn scramble(lanes: Lanes) -> Lanes {
        let secret = Lanes::secret(SECRET_AT_SCRAMBLE);
        Lanes { low: scramble_half(lanes.low, secret.low), high: scramble_half(lanes.high, secret.high) }
    }

    /// `(lane ^ lane >> 47 ^ secret) * PRIME32_1`, the 64-bit product put together from two of 32.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn scramble_half(lanes: __m256i, secret: __m256i) -> __m256i {
        let mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64::<47>(lanes)), secret);
        let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
        let low = _mm256_mul_epu32(mixed, prime);
        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
        _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
    }

    /// Folds the lanes into the sum of `len` bytes.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn finish(lanes: Lanes, len: usize) -> u64 {
        let mut words = [0u64; 8];
        // SAFETY: the array is 64 bytes long; these stores need no alignment.
        unsafe {
            _mm256_storeu_si256(words.as_mut_ptr().cast(), lanes.low);
            _mm256_storeu_si256(words.as_mut_ptr().add(4).cast(), lanes.high);
        }
        let mut sum = (len as u64).wrapping_mul(PRIME64_1);
        for (index, pair) in words.chunks_exact(2).enumerate() {
            let at = SECRET_AT_MERGE + index * 16;
            let product = u128::from(pair[0] ^ secret_word(at)) * u128::from(pair[1] ^ secret_word(at + 8));
            sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        sum ^= sum >> 37;
        sum = sum.wrapping_mul(0x1656_6791_9E37_79F9);
        sum ^ (sum >> 32)
    }

    fn secret_word(at: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&SECRET.0[at..at + 8]);
        u64::from_le_bytes(word)
    }

    const PRIME32_1: u64 = 0x9E37_79B1;
    const PRIME32_2: u64 = 0x85EB_CA77;
    const PRIME32_3: u64 = 0xC2B2_AE3D;
    const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
    const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
    const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
    const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
    const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;

    static START: [u64; 8] =
        [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

    /// Aligned, so that half of the offsets (`index * 8`) do not cross a cache line.
    #[repr(align(64))]
    struct Secret([u8; 192]);

    /// The default secret, a constant of the format.
    #[rustfmt::skip]
    static SECRET: Secret = Secret([
        0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
        0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
        0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
        0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
        0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
        0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
        0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
        0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
        0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
        0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
        0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
        0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
    ]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// The same bytes each run (splitmix64), no two stripes alike.
    fn bytes(len: usize) -> Vec<u8> {
        let mut words = Dice(len as u64);
        (0..len).map(|_| words.next() as u8).collect()
    }

    struct Dice(u64);

    impl Dice {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            mixed ^ (mixed >> 31)
        }

        fn below(&mut self, end: usize) -> usize {
            (self.next() % end as u64) as usize
        }
    }

    /// Runs all variants on `src`, each into a target at `offset` with guard bytes around it.
    fn check(src: &[u8], offset: usize, room: &mut Vec<u8>) {
        let want = XxHash3_64::oneshot(src);
        assert_eq!(sum(src), want, "sum of {} bytes", src.len());
        for variant in ["copy_and_sum", "copy", "copy_then_sum"] {
            room.clear();
            room.resize(offset + src.len() + 64, 0xA5);
            let dst = &mut room[offset..offset + src.len()];
            let got = match variant {
                "copy_and_sum" => copy_and_sum(dst, src),
                // SAFETY: two live, equally long slices, one of them a `&mut`.
                "copy_then_sum" => unsafe { copy_then_sum(dst.as_mut_ptr(), src.as_ptr(), src.len()) },
                _ => {
                    copy(dst, src);
                    want
                }
            };
            assert_eq!(got, want, "{variant}, {} bytes, target offset {offset}", src.len());
            assert!(*dst == *src, "{variant}, {} bytes, target offset {offset}", src.len());
            let (before, after) = (&room[..offset], &room[offset + src.len()..]);
            assert!(before.iter().chain(after).all(|byte| *byte == 0xA5), "{variant} wrote outside");
        }
    }

    #[test]
    fn known_sum() {
        assert_eq!(sum(b""), 0x2D06_8005_38D3_94C2);
    }

    #[test]
    fn every_short_length() {
        let (data, mut room) = (bytes(4096 + 64), Vec::new());
        let lengths_max = if cfg!(miri) { 300 } else { 4096 };
        for len in 0..=lengths_max {
            let start = len * 7 % 64;
            check(&data[start..start + len], len * 11 % 64, &mut room);
        }
    }

    #[test]
    fn every_offset() {
        let (data, mut room) = (bytes(9000 + 64), Vec::new());
        // Odd, so that every alignment of words and vectors is met.
        let step = if cfg!(miri) { 17 } else { 5 };
        for start in (0..64).step_by(step) {
            for offset in (0..64).step_by(step) {
                check(&data[start..start + 9000 - (start ^ offset)], offset, &mut room);
            }
        }
    }

    #[test]
    fn blocks_and_random_lengths() {
        let (data, mut room, mut dice) = (bytes(200 * 1024 + 64), Vec::new(), Dice(7));
        // Miri runs the portable path, which is the library's: a few short ones show that the pointers are right.
        let (cases, longest) = if cfg!(miri) { (2, 2048) } else { (300, 200 * 1024) };
        for len in
            [64 << 10, (128 << 10) - 1, 128 << 10, (128 << 10) + 1].into_iter().filter(|len| *len <= longest)
        {
            check(&data[..len], 0, &mut room);
        }
        for _ in 0..cases {
            let (len, start) = (dice.below(longest + 1), dice.below(64));
            check(&data[start..start + len], dice.below(64), &mut room);
        }
    }

    /// A source that changes under the copy tears the stored bytes, but never the sum from them.
    #[test]
    #[cfg_attr(miri, ignore = "a race on purpose, as with another process")]
    fn sum_is_that_of_the_stored_bytes() {
        let words: Vec<AtomicU64> = (0..1024).map(AtomicU64::new).collect();
        let done = AtomicBool::new(false);
        let torn = std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in (0u64..).take_while(|_| !done.load(Ordering::Relaxed)) {
                    words.iter().for_each(|word| word.store(value, Ordering::Relaxed));
                }
            });
            let mut torn = 0;
            for turn in 0..20_000 {
                let len = 8192 - turn % 100 * (turn % 2);
                let mut dst = vec![0u8; len];
                // SAFETY: `words` is 8192 bytes long and lives on; `dst` is ours alone.
                let got = unsafe { copy_and_sum_raw(dst.as_mut_ptr(), words.as_ptr().cast(), len) };
                if got != XxHash3_64::oneshot(&dst) {
                    done.store(true, Ordering::Relaxed);
                    panic!("turn {turn}: the sum is not that of the stored bytes");
                }
                torn += usize::from(dst[..8] != dst[4096..4104]);
            }
            done.store(true, Ordering::Relaxed);
            torn
        });
        assert!(
            torn > 0 || std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1),
            "the source never changed in time"
        );
    }

    #[test]
    #[should_panic(expected = "lengths differ")]
    fn copy_and_sum_refuses_other_lengths() {
        let _ = copy_and_sum(&mut [0; 3], &[0; 4]);
    }

    #[test]
    #[should_panic(expected = "lengths differ")]
    fn copy_refuses_other_lengths() {
        copy(&mut [0; 3], &[0; 4]);
    }
}
