//! Measures what the first pass of writes over a new file costs, by how its space was made.
//!
//! `cargo run --release -p ebbtide-device --example first_pass -- DIRECTORY [ROUNDS]`
//!
//! Each round makes a file of 1 GiB each way, writes it once from end to end (64 KiB at depth 32, 1 MiB at depth 8), writes it
//! again, and removes it. The figures are medians over the rounds.

use std::path::Path;
use std::time::{Duration, Instant};

use ebbtide_core::{BlockDevice, Error, Result};
use ebbtide_device::{BareDrive, BareSpec, Prealloc, UringDevice, UringOptions, preallocate};
use ebbtide_mem::{Arena, ArenaOptions};

const FILE_BYTES: u64 = 1 << 30;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().unwrap_or_else(|| "/var/tmp".to_owned());
    let rounds: usize = arguments.next().and_then(|rounds| rounds.parse().ok()).unwrap_or(5);
    let options = ArenaOptions {
        name: format!("first-pass-{}", std::process::id()),
        bytes: 64 << 20,
        prefault_threads: 2,
        huge_pages: true,
        keep_name: false,
    };
    let arena = Arena::open(&options).map_err(|error| Error::io("open the arena", error))?;
    println!(
        "{:<34}{:>12}{:>16}{:>17}{:>14}",
        "", "made in s", "1st pass MB/s", "2nd pass MB/s", "1st / 2nd"
    );
    for (io_bytes, depth) in [(64 << 10, 32), (1 << 20, 8)] {
        let mut figures = [const { Vec::new() }; 2];
        for round in 0..rounds {
            for turn in 0..2 {
                let index = (round + turn) % 2;
                let how = [Prealloc::Reserved, Prealloc::Written][index];
                let path = Path::new(&directory).join(format!("ebbtide-first-pass-{}", std::process::id()));
                let figure = pass(&path, how, &arena, io_bytes, depth);
                let _ = std::fs::remove_file(&path);
                figures[index].push(figure?);
            }
        }
        for (how, figures) in ["reserved", "written"].iter().zip(&figures) {
            let of = |pick: fn(&(f64, f64, f64)) -> f64| median(figures.iter().map(pick));
            let (made, first, second) = (of(|it| it.0), of(|it| it.1), of(|it| it.2));
            let ratio = of(|it| it.1 / it.2);
            let name = format!("{how}, {} KiB at depth {depth}", io_bytes >> 10);
            println!("{name:<34}{made:>12.2}{first:>16.0}{second:>17.0}{ratio:>14.2}");
        }
    }
    Ok(())
}

/// Seconds to make the file, and MB/s of the first and the second pass.
fn pass(path: &Path, how: Prealloc, arena: &Arena, io_bytes: u32, depth: u32) -> Result<(f64, f64, f64)> {
    #[expect(clippy::disallowed_methods, reason = "a measurement")]
    let begin = Instant::now();
    preallocate(path, FILE_BYTES, how, &mut |_, _| {})?;
    let made = begin.elapsed().as_secs_f64();
    let device = UringDevice::open(path, &UringOptions::default())?;
    device.register(arena.regions())?;
    let mut rates = [0.0; 2];
    for rate in &mut rates {
        let spec = BareSpec {
            write: true,
            io_bytes,
            depth,
            offsets: (0..FILE_BYTES / u64::from(io_bytes)).map(|index| index * u64::from(io_bytes)).collect(),
            bytes_max: FILE_BYTES,
            time_max: Duration::from_secs(120),
            flush_every_bytes: 64 << 20,
            flush_first_bytes: 0,
            buffers: (0..depth).filter_map(|_| arena.alloc(io_bytes as usize)).collect(),
        };
        let result = device.drive(spec)?;
        *rate = result.bytes as f64 / result.seconds / 1e6;
    }
    Ok((made, rates[0], rates[1]))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
