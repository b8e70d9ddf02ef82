//! The story: a room that imports a stranger ends the layering, and nobody notices until two rooms import each other. So
//! the edges between the crates stand in one table, `docs/architecture.md`, and this test compares it with what cargo says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

type Edges = BTreeMap<String, BTreeSet<String>>;

/// Crates that may import anything: tests and benches.
const BESIDE_THE_HOUSE: [&str; 2] = ["ebbtide-sim", "ebbtide-bench"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace")
}

/// What cargo says: normal dependencies among the crates of the workspace.
fn edges_of_cargo() -> Edges {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let name = |value: &serde_json::Value| value["name"].as_str().expect("a name").to_owned();
    let ours: BTreeSet<String> = packages.iter().map(name).collect();
    let imports = |package: &serde_json::Value| {
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        let normal = dependencies.iter().filter(|dependency| dependency["kind"].is_null());
        normal.map(name).filter(|import| ours.contains(import)).collect()
    };
    packages.iter().map(|package| (name(package), imports(package))).collect()
}

/// What the table says: `| crate | imports |` under `## Edges`.
fn edges_of_table() -> Edges {
    let page = std::fs::read_to_string(root().join("docs/architecture.md")).expect("docs/architecture.md");
    let section = page.split("## Edges").nth(1).expect("a section `## Edges`");
    let section = section.split("\n## ").next().unwrap_or(section);
    let rows = section.lines().filter(|line| line.starts_with('|')).skip(2);
    let names = |cell: &str| -> BTreeSet<String> {
        let names =
            cell.split([',', ' ']).map(|name| name.trim_matches(['`', ' '])).filter(|name| !name.is_empty());
        names.filter(|name| *name != "-").map(str::to_owned).collect()
    };
    rows.map(|row| {
        let mut cells = row.trim_matches('|').split('|');
        let importer = cells.next().map(names).unwrap_or_default();
        let importer = importer.into_iter().next().unwrap_or_else(|| panic!("a row without a crate: {row}"));
        (importer, cells.next().map(names).unwrap_or_default())
    })
    .collect()
}

#[test]
fn the_edges_are_those_of_the_table() {
    let (cargo, mut table) = (edges_of_cargo(), edges_of_table());
    for (importer, imports) in &cargo {
        let allowed = table.remove(importer).unwrap_or_else(|| panic!("{importer} has no row in the table"));
        if !BESIDE_THE_HOUSE.contains(&importer.as_str()) {
            assert_eq!(*imports, allowed, "imports of {importer}: cargo on the left, the table on the right");
        }
    }
    assert!(table.is_empty(), "rows for crates that are not there: {:?}", table.keys());
}

#[test]
fn nothing_imports_what_stands_beside_the_house() {
    for (importer, imports) in edges_of_cargo() {
        assert!(!imports.contains("ebbtide-sim"), "{importer} imports ebbtide-sim");
        assert!(
            importer == "ebbtide" || !imports.contains("ebbtide-bench"),
            "{importer} imports ebbtide-bench: only the binary may"
        );
    }
}
