//! What a run says at its end: one JSON object with stable keys, and a table that a person can read.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use comfy_table::presets::UTF8_BORDERS_ONLY;
use comfy_table::{CellAlignment, Table};
use serde_json::{Map, Value, json};

use crate::fail::{Failure, Outcome, Verdict};

/// The version of the JSON object. Grows when a key changes its meaning or goes; new keys do not count.
const SCHEMA: u64 = 1;

/// Figures by dotted path, and rows of a table.
pub(crate) struct Report {
    root: Map<String, Value>,
    rows: Vec<(String, String)>,
    notes: Vec<String>,
    verdict: Verdict,
}

impl Report {
    pub(crate) fn new(command: &str) -> Self {
        let mut report =
            Report { root: Map::new(), rows: Vec::new(), notes: Vec::new(), verdict: Verdict::Good };
        report.set("schema", SCHEMA);
        report.set("command", command);
        report.set("valid", true);
        report.set("invalid_reason", Value::Null);
        report
    }

    /// Sets the figure at `path`; dots nest: "put.gb_per_s" becomes {"put": {"gb_per_s": …}}.
    pub(crate) fn set(&mut self, path: &str, value: impl Into<Value>) {
        let (parents, name) = match path.rsplit_once('.') {
            Some((parents, name)) => (Some(parents), name),
            None => (None, path),
        };
        let mut place = &mut self.root;
        for parent in parents.into_iter().flat_map(|parents| parents.split('.')) {
            let child = place.entry(parent).or_insert_with(|| json!({}));
            place = child.as_object_mut().expect("a figure is not also a group of figures");
        }
        place.insert(name.to_string(), value.into());
    }

    /// Sets a measured number; what is no number becomes null.
    pub(crate) fn measure(&mut self, path: &str, value: f64) {
        self.set(path, number(value));
    }

    /// Says that the figures do not count, and why. The first reason stays first.
    pub(crate) fn void(&mut self, reason: impl AsRef<str>) {
        let reasons = match self.root.get("invalid_reason").and_then(Value::as_str) {
            Some(before) => format!("{before}; {}", reason.as_ref()),
            None => reason.as_ref().to_string(),
        };
        self.set("valid", false);
        self.set("invalid_reason", reasons);
        self.verdict = self.verdict.max(Verdict::Void);
    }

    /// Says that objects were wrong or missing.
    pub(crate) fn wrong(&mut self) {
        self.verdict = Verdict::Wrong;
    }

    pub(crate) fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Adds a row of the table.
    pub(crate) fn row(&mut self, label: impl Into<String>, value: impl Into<String>) {
        self.rows.push((label.into(), value.into()));
    }

    /// Adds a remark, shown under the table and kept in `notes`.
    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// The object, with the notes in it.
    pub(crate) fn to_json(&self) -> Value {
        let mut root = self.root.clone();
        if !self.notes.is_empty() {
            root.insert("notes".to_string(), json!(self.notes));
        }
        Value::Object(root)
    }

    /// Takes the figures of `run` as its own, but for those that say what kind of object it is.
    pub(crate) fn adopt(&mut self, run: &Report) {
        for (key, value) in &run.root {
            if !matches!(key.as_str(), "schema" | "command" | "valid" | "invalid_reason" | "machine") {
                self.root.insert(key.clone(), value.clone());
            }
        }
    }

    /// The table for people, with what makes the figures count or not.
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(UTF8_BORDERS_ONLY);
        for (label, value) in &self.rows {
            table.add_row([label.as_str(), value.as_str()]);
        }
        if let Some(column) = table.column_mut(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        format!("{table}\n{}", self.remarks())
    }

    /// The lines under a table.
    pub(crate) fn remarks(&self) -> String {
        let mut lines: Vec<String> = self.notes.iter().map(|note| format!("note: {note}\n")).collect();
        if let Some(reason) = self.root.get("invalid_reason").and_then(Value::as_str) {
            lines.push(format!("these figures do not count: {reason}\n"));
        }
        lines.concat()
    }

    /// The rows, for a table of several runs.
    pub(crate) fn rows(&self) -> &[(String, String)] {
        &self.rows
    }
}

/// Where the JSON object goes.
pub(crate) enum Sink {
    /// Nowhere: the table is all.
    None,
    /// To standard output, and the table to standard error.
    Stdout,
    /// To a file, and the table to standard output.
    File(PathBuf, File),
}

impl Sink {
    /// Opens `target` ("-" is standard output) before the run, so that a path that cannot be written shows at once.
    pub(crate) fn open(target: Option<&Path>) -> Outcome<Sink> {
        match target {
            None => Ok(Sink::None),
            Some(path) if path == Path::new("-") => Ok(Sink::Stdout),
            // Truncated only when there is something to write.
            Some(path) => match OpenOptions::new().create(true).truncate(false).write(true).open(path) {
                Ok(file) => Ok(Sink::File(path.to_path_buf(), file)),
                Err(error) => Err(Failure::file(format!("--json {}", path.display()), &error)),
            },
        }
    }

    /// Writes both.
    pub(crate) fn emit(self, json: &Value, table: &str) -> Outcome<()> {
        let mut text = serde_json::to_string_pretty(json).expect("a JSON value has no keys but strings");
        text.push('\n');
        // A reader that went away is not our failure: the run is done.
        match self {
            Sink::None => drop(io::stdout().write_all(table.as_bytes())),
            Sink::Stdout => {
                drop(io::stderr().write_all(table.as_bytes()));
                drop(io::stdout().write_all(text.as_bytes()));
            }
            Sink::File(path, mut file) => {
                let written = file.set_len(0).and_then(|()| file.write_all(text.as_bytes()));
                written.map_err(|error| Failure::Broken(format!("write {}: {error}", path.display())))?;
                drop(io::stdout().write_all(table.as_bytes()));
            }
        }
        Ok(())
    }
}

/// A measured number, to six digits; null when it is none.
pub(crate) fn number(value: f64) -> Value {
    if !value.is_finite() {
        return Value::Null;
    }
    let digits = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    let scale = 10f64.powi((5 - digits).clamp(0, 15));
    json!((value * scale).round() / scale)
}

/// A measured number for people; "–" when it is none.
pub(crate) fn shown(value: f64, decimals: usize) -> String {
    if value.is_finite() { format!("{value:.decimals$}") } else { "–".to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_nest_and_neighbours_stay() {
        let mut report = Report::new("bench test");
        report.measure("latency_us.ssd.p50", 1.5);
        report.measure("latency_us.ssd.p99", 2.5);
        report.measure("latency_us.dram.p50", f64::NAN);
        report.set("objects", 7);
        let json = report.to_json();
        assert_eq!(json["latency_us"], json!({"ssd": {"p50": 1.5, "p99": 2.5}, "dram": {"p50": null}}));
        assert_eq!((&json["objects"], &json["schema"], &json["valid"]), (&json!(7), &json!(1), &json!(true)));
        assert_eq!(json["invalid_reason"], Value::Null);
    }

    #[test]
    fn a_void_run_says_why_and_a_wrong_one_outweighs_it() {
        let mut report = Report::new("bench test");
        assert_eq!(report.verdict(), Verdict::Good);
        report.void("noise");
        report.void("no device");
        assert_eq!(report.to_json()["valid"], json!(false));
        assert_eq!(report.to_json()["invalid_reason"], json!("noise; no device"));
        assert_eq!(report.verdict(), Verdict::Void);
        report.wrong();
        report.void("late");
        assert_eq!(report.verdict(), Verdict::Wrong);
        assert!(report.table().contains("noise; no device; late"));
    }

    #[test]
    fn numbers_keep_six_digits() {
        assert_eq!(number(0.912_345_678), json!(0.912_346));
        assert_eq!(number(1_234_567.8), json!(1_234_568.0));
        assert_eq!(number(0.000_012_345_678), json!(0.000_012_345_7));
        assert_eq!(number(0.0), json!(0.0));
        assert_eq!(number(f64::INFINITY), Value::Null);
    }

    #[test]
    fn a_path_that_cannot_be_written_is_named_before_the_run() {
        let failure = Sink::open(Some(Path::new("/proc/no/such/file"))).err().unwrap();
        assert!(matches!(&failure, Failure::Usage(text) if text.contains("/proc/no/such/file")));
    }
}
