//! Measures the raw ring, the same ring driven bare, and tokio-uring side by side: rate and processor time an operation.
//!
//! `cargo run --release -p ebbtide-device --features uring-tokio --example side_by_side -- FILE [ROUNDS]`
//!
//! FILE is made 4 GiB long, of written extents, and kept. Arms run in adjacent slices, in an order that turns every round; a ratio
//! is the median over the rounds of (rate of the arm / rate of the bare arm in the same round). Processor time is that of all
//! threads of this process, kernel workers included.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebbtide_core::{Batch, BlockDevice, Error, Op, Result, block_on};
use ebbtide_device::{
    BareDrive, BareSpec, Prealloc, UringDevice, UringOptions, UringTokioDevice, preallocate,
};
use ebbtide_mem::{Arena, ArenaOptions, Buf, BufMut};

const FILE_BYTES: u64 = 4 << 30;

#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    write: bool,
    io_bytes: usize,
    /// In flight on the bare arm; the others get twice as many from their caller, in batches.
    depth: usize,
    batch: usize,
    slice_bytes: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Arm {
    Bare,
    BareAgain,
    Uring,
    UringChecked,
    Tokio,
    TokioChecked,
}

const ARMS: [(Arm, &str); 6] = [
    (Arm::Bare, "bare"),
    (Arm::BareAgain, "bare (A/A)"),
    (Arm::Uring, "uring"),
    (Arm::UringChecked, "uring, checked"),
    (Arm::Tokio, "uring-tokio"),
    (Arm::TokioChecked, "uring-tokio, checked"),
];

struct Bench {
    arena: Arena,
    uring: Arc<UringDevice>,
    tokio: Arc<UringTokioDevice>,
    dice: u64,
}

#[derive(Clone, Copy)]
struct Slice {
    rate: f64,
    cpu_us: f64,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().unwrap_or_else(|| "/var/tmp/ebbtide-side-by-side".to_owned());
    let rounds: usize = arguments.next().and_then(|rounds| rounds.parse().ok()).unwrap_or(21);
    preallocate(Path::new(&file), FILE_BYTES, Prealloc::Written, &mut |_, _| {})?;
    let options = ArenaOptions {
        name: format!("side-by-side-{}", std::process::id()),
        bytes: 256 << 20,
        prefault_threads: 2,
        huge_pages: true,
        keep_name: false,
    };
    let arena = Arena::open(&options).map_err(|error| Error::io("open the arena", error))?;
    let uring = Arc::new(UringDevice::open(Path::new(&file), &UringOptions::default())?);
    uring.register(arena.regions())?;
    println!("degraded: {:?}", uring.degraded());
    let tokio = Arc::new(UringTokioDevice::open(Path::new(&file), &UringOptions::default())?);
    let mut bench = Bench { arena, uring, tokio, dice: 1 };
    let kib = 1 << 10;
    for load in [
        Load {
            name: "read 64 KiB",
            write: false,
            io_bytes: 64 * kib,
            depth: 32,
            batch: 16,
            slice_bytes: 128 << 20,
        },
        Load {
            name: "read 1 MiB",
            write: false,
            io_bytes: kib * kib,
            depth: 8,
            batch: 4,
            slice_bytes: 256 << 20,
        },
        Load {
            name: "write 1 MiB",
            write: true,
            io_bytes: kib * kib,
            depth: 8,
            batch: 4,
            slice_bytes: 256 << 20,
        },
        Load {
            name: "write 64 KiB",
            write: true,
            io_bytes: 64 * kib,
            depth: 32,
            batch: 16,
            slice_bytes: 128 << 20,
        },
    ] {
        bench.compare(load, rounds)?;
    }
    Ok(())
}

impl Bench {
    fn compare(&mut self, load: Load, rounds: usize) -> Result<()> {
        let arms: Vec<_> = ARMS
            .into_iter()
            .filter(|(arm, _)| !load.write || !matches!(arm, Arm::UringChecked | Arm::TokioChecked))
            .collect();
        let mut slices = vec![Vec::new(); arms.len()];
        for round in 0..=rounds {
            let mut order: Vec<usize> = (0..arms.len()).collect();
            order.rotate_left(round % arms.len());
            if round % 2 == 1 {
                order.reverse();
            }
            for index in order {
                let slice = self.slice(load, arms[index].0)?;
                if round > 0 {
                    slices[index].push(slice);
                }
            }
        }
        println!("\n{}, depth {}, {rounds} rounds", load.name, load.depth);
        println!("{:<22}{:>10}{:>12}{:>14}", "arm", "MB/s", "ratio", "CPU us/op");
        for (index, (_, name)) in arms.iter().enumerate() {
            let rate = median(slices[index].iter().map(|slice| slice.rate));
            let ratio =
                median(slices[index].iter().zip(&slices[0]).map(|(slice, bare)| slice.rate / bare.rate));
            let cpu = median(slices[index].iter().map(|slice| slice.cpu_us));
            println!("{name:<22}{:>10.0}{ratio:>12.3}{cpu:>14.2}", rate / 1e6);
        }
        Ok(())
    }

    fn slice(&mut self, load: Load, arm: Arm) -> Result<Slice> {
        let operations = load.slice_bytes / load.io_bytes as u64;
        let offsets: Vec<u64> = (0..operations).map(|_| self.offset(load.io_bytes as u64)).collect();
        let count = if matches!(arm, Arm::Bare | Arm::BareAgain) { load.depth } else { load.depth * 2 };
        let buffers: Vec<BufMut> = (0..count).filter_map(|_| self.arena.alloc(load.io_bytes)).collect();
        let (uring, tokio) = (Arc::clone(&self.uring), Arc::clone(&self.tokio));
        let cpu = cpu_time();
        #[expect(clippy::disallowed_methods, reason = "a measurement")]
        let begin = Instant::now();
        match arm {
            Arm::Bare | Arm::BareAgain => {
                uring.drive(BareSpec {
                    write: load.write,
                    io_bytes: load.io_bytes as u32,
                    depth: load.depth as u32,
                    offsets,
                    bytes_max: load.slice_bytes,
                    time_max: Duration::from_secs(60),
                    flush_every_bytes: 0,
                    flush_first_bytes: 0,
                    buffers,
                })?;
            }
            Arm::Uring | Arm::UringChecked => {
                closed_loop(&*uring, load, &offsets, buffers, arm == Arm::UringChecked)?
            }
            Arm::Tokio | Arm::TokioChecked => {
                closed_loop(&*tokio, load, &offsets, buffers, arm == Arm::TokioChecked)?
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        let cpu_us = cpu_time().saturating_sub(cpu).as_secs_f64() * 1e6 / operations as f64;
        Ok(Slice { rate: load.slice_bytes as f64 / seconds, cpu_us })
    }

    fn offset(&mut self, io_bytes: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 20) % (FILE_BYTES / io_bytes) * io_bytes
    }
}

/// Keeps several batches in flight, the next going out as soon as the oldest is back.
fn closed_loop(
    device: &dyn BlockDevice,
    load: Load,
    offsets: &[u64],
    buffers: Vec<BufMut>,
    checked: bool,
) -> Result<()> {
    let mut flying: VecDeque<Batch> = VecDeque::new();
    let (mut free, mut shared): (Vec<BufMut>, Vec<Buf>) = if load.write {
        (Vec::new(), buffers.into_iter().map(BufMut::freeze).collect())
    } else {
        (buffers, Vec::new())
    };
    for places in offsets.chunks(load.batch) {
        if flying.len() == 2 * load.depth / load.batch
            && let Some(batch) = flying.pop_front()
        {
            collect(batch, &mut free)?;
        }
        let ops = places.iter().filter_map(|offset| {
            if load.write {
                shared.rotate_left(1);
                return Some(Op::Write { offset: *offset, from: vec![shared[0].clone()] });
            }
            let check: Option<ebbtide_core::Check> = checked.then(|| {
                Box::new(|buf: &BufMut| {
                    std::hint::black_box(buf.sum_range(0, buf.len()));
                    Ok(())
                }) as ebbtide_core::Check
            });
            Some(Op::Read { offset: *offset, into: free.pop()?, check })
        });
        flying.push_back(device.submit(ops.collect()));
    }
    flying.into_iter().try_for_each(|batch| collect(batch, &mut free))
}

fn collect(batch: Batch, free: &mut Vec<BufMut>) -> Result<()> {
    for done in block_on(batch) {
        done.result?;
        free.extend(done.buf);
    }
    Ok(())
}

/// Time on a processor of all threads of this process, workers of the kernel included.
fn cpu_time() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanos = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanos.sum())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
