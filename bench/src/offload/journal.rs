//! The journal: ranges of objects that were durable when they were written down. And its check after a kill.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use ebbtide_core::ByteSize;
use ebbtide_node::Store;
use serde::{Deserialize, Serialize};

use super::ledger::Ledger;
use super::options::{OffloadOptions, Plan};
use super::read::check;
use crate::fail::{Failure, Outcome};
use crate::place::sizes_under;
use crate::progress::{Progress, Unit};
use crate::report::{Report, Sink};
use crate::store_options;
use crate::{fail::Verdict, machine};

/// Puts between two flushes.
const RANGE_BYTES: u64 = 64 << 20;
/// What is read at once when a journal is verified.
const BATCH_BYTES: u64 = 8 << 20;
/// A journal line is no longer than this.
const LINE_BYTES_MAX: u64 = 4096;
/// Objects behind the journal that are asked for too: what a kill left of them must be right.
const BEYOND_BYTES: u64 = 4 * RANGE_BYTES;

/// A line: objects `first` to `last` of `run` were put and flushed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Line {
    first: u64,
    last: u64,
    value: u64,
    run: u64,
    dram: u64,
    ssd: u64,
}

/// A journal that is being written.
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    template: Line,
}

impl Journal {
    /// Starts an empty journal at `path`. A file that is there is replaced when it is a journal, and refused when not.
    pub(crate) fn create(path: &Path, plan: &Plan) -> Outcome<Self> {
        let fail = |error: std::io::Error| Failure::file(format!("journal {}", path.display()), &error);
        if path.exists() {
            read(path)?;
        }
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(path).map_err(fail)?;
        // The name must be there after a power cut too.
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(fail)?;
        file.sync_all().map_err(fail)?;
        let (dram, ssd) = (plan.dram.0, plan.ssd.0);
        let template = Line { first: 0, last: 0, value: plan.value, run: plan.run, dram, ssd };
        Ok(Journal { path: path.to_path_buf(), file, template })
    }

    /// Cuts `objects` into ranges of 64 MiB.
    pub(crate) fn ranges(&self, objects: Range<u64>) -> Vec<Range<u64>> {
        let step = (RANGE_BYTES / self.template.value).max(1);
        pieces(objects, step).collect()
    }

    /// Writes down that `range` is durable.
    pub(crate) fn append(&mut self, range: Range<u64>) -> Outcome<()> {
        let line = Line { first: range.start, last: range.end - 1, ..self.template.clone() };
        let mut text = serde_json::to_string(&line).expect("a line is numbers");
        text.push('\n');
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|error| Failure::Broken(format!("journal {}: {error}", self.path.display())))
    }
}

/// Cuts `objects` into pieces of `step`; the last may be shorter.
fn pieces(objects: Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
    let starts = (objects.start..objects.end).step_by(step as usize);
    starts.map(move |start| start..(start + step).min(objects.end))
}

/// Reads a journal. A last line that a kill cut short was never said and is left out; any other bad line is refused.
fn read(path: &Path) -> Outcome<Vec<Line>> {
    let fail = |error: std::io::Error| Failure::file(format!("journal {}", path.display()), &error);
    let mut reader = BufReader::new(File::open(path).map_err(fail)?);
    let (mut lines, mut text) = (Vec::new(), Vec::new());
    for number in 1.. {
        text.clear();
        (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut text).map_err(fail)?;
        let whole = text.last() == Some(&b'\n');
        match serde_json::from_slice::<Line>(&text) {
            _ if text.is_empty() => break,
            Ok(line) if whole && line.first <= line.last && line.value > 0 => lines.push(line),
            _ if !whole && number > 1 && (text.len() as u64) < LINE_BYTES_MAX => break,
            _ => return Err(Failure::usage(format!("{}:{number}: not a line of a journal", path.display()))),
        }
    }
    Ok(lines)
}

/// Opens the store again and checks what the journal says, and the books of the tier.
pub(crate) fn verify(options: &OffloadOptions, path: &Path) -> Outcome<Verdict> {
    let lines = read(path)?;
    let Some(last) = lines.last() else {
        return Err(Failure::usage(format!("journal {}: no range in it", path.display())));
    };
    if let Some(line) = lines.iter().find(|line| (line.run, line.value) != (last.run, last.value)) {
        return Err(Failure::usage(format!(
            "journal {}: of two runs ({} and {})",
            path.display(),
            line.run,
            last.run
        )));
    }
    let dir = options.store.dir.clone().expect("--verify-journal requires --dir");
    if !dir.is_dir() {
        return Err(Failure::usage(format!("--dir {}: is not a directory", dir.display())));
    }
    let sink = Sink::open(options.json.as_deref())?;
    let dram = options.store.dram.unwrap_or(ByteSize(last.dram));
    let ssd = options.store.ssd.unwrap_or(ByteSize(last.ssd));
    let progress = Progress::start();
    let store = store_options::open(options.store.config(&dir, dram, ssd)?, &progress)?;
    let ledger = Ledger::new(last.run, last.value);
    let journalled: u64 = lines.iter().map(|line| line.last - line.first + 1).sum();
    progress.stage("verify", journalled * last.value, Unit::Bytes);
    let batch = (BATCH_BYTES / last.value).clamp(1, 64);
    for piece in lines.iter().flat_map(|line| pieces(line.first..line.last + 1, batch)) {
        progress.add((piece.end - piece.start) * last.value);
        let names: Vec<_> = piece.clone().map(|index| ledger.key(index)).collect();
        let names: Vec<&[u8]> = names.iter().map(|name| name.as_slice()).collect();
        piece.zip(store.get_many(&names)).for_each(|(index, answer)| check(&ledger, index, answer));
    }
    let missing = ledger.found().absent.len();
    let beyond = probe_beyond(&store, &ledger, last);
    let (accounted, sizes) = (store.stats().accounted_bytes, sizes_under(&dir));
    store.close()?;
    drop(progress);

    let found = ledger.found();
    let mut report = Report::new("bench offload --verify-journal");
    report.set("machine", machine::facts(&dir));
    report.set("journalled_objects", journalled);
    report.set("objects_beyond", beyond);
    report.set("wrong_objects", found.wrong.len());
    report.set("missing_objects", missing);
    report.set("accounted_bytes", accounted);
    report.set("file_bytes", sizes);
    report.row("objects in the journal", journalled.to_string());
    report.row("present beyond it", beyond.to_string());
    report.row("wrong", found.wrong.len().to_string());
    report.row("missing", missing.to_string());
    report.row("accounted bytes", ByteSize(accounted).to_string());
    report.row("bytes of files", ByteSize(sizes).to_string());
    found.words.iter().for_each(|words| report.note(words));
    if accounted != sizes {
        report.note(format!("accounted_bytes {accounted} is not what the files have: {sizes}"));
    }
    if accounted != sizes || missing > 0 || !found.wrong.is_empty() {
        report.wrong();
    }
    sink.emit(&report.to_json(), &report.table())?;
    Ok(report.verdict())
}

/// Looks for objects behind the journal: they may be there or not, but never wrong. Returns how many are.
fn probe_beyond(store: &Store, ledger: &Ledger, last: &Line) -> u64 {
    let mut present = 0;
    for index in last.last + 1..=last.last + (BEYOND_BYTES / last.value).max(1) {
        match store.get(&ledger.key(index)) {
            Ok(None) => {}
            answer => {
                present += u64::from(answer.is_ok());
                check(ledger, index, answer);
            }
        }
    }
    present
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal_file(text: &str, name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ebbtide-journal-{name}-{}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        path
    }

    const GOOD: &str = "{\"first\":0,\"last\":63,\"value\":1048576,\"run\":9,\"dram\":1,\"ssd\":2}\n";

    #[test]
    fn pieces_cover_all() {
        assert_eq!(pieces(5..12, 3).collect::<Vec<_>>(), [5..8, 8..11, 11..12]);
        assert_eq!(pieces(5..5, 3).count(), 0);
    }

    #[test]
    fn a_line_that_was_cut_short_was_never_said() {
        let path = journal_file(&format!("{GOOD}{{\"first\":64,\"la"), "cut");
        let lines = read(&path).unwrap();
        assert_eq!(lines, [Line { first: 0, last: 63, value: 1 << 20, run: 9, dram: 1, ssd: 2 }]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn another_file_is_refused_by_line() {
        let path = journal_file("#!/bin/sh\n", "other");
        assert!(matches!(read(&path), Err(Failure::Usage(text)) if text.contains(":1: not a line")));
        std::fs::write(&path, format!("{GOOD}nonsense\n{GOOD}")).unwrap();
        assert!(matches!(read(&path), Err(Failure::Usage(text)) if text.contains(":2: not a line")));
        std::fs::write(&path, "").unwrap();
        assert_eq!(read(&path).unwrap(), []);
        std::fs::remove_file(path).unwrap();
    }
}
