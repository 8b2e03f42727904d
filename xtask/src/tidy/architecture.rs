//! Rules about crates: the tables of ARCHITECTURE.md define them, and the manifests have to follow.
//!
//! The table under `## Allowed edges` has a row for each crate: its name, the project's crates that it may use, and
//! further crates for its tests. The table under `## Who may name which dependency` has a row for each restricted
//! dependency: its names, the crates that may use it, and the crates that may use it in tests or tools.

use std::collections::{BTreeMap, BTreeSet};

use super::{Finding, Tree};

const ARCHITECTURE: &str = "ARCHITECTURE.md";

/// Crates that are not part of the users' program.
const TOOLS: [&str; 3] = ["xtask", "fault-points", "foreign-bytes"];

/// Every member of the workspace has a row in the table of edges, and every row is a member.
pub fn every_crate_is_in_the_table_and_back(tree: &Tree) -> Vec<Finding> {
    let members: BTreeSet<String> = manifests(tree).into_keys().collect();
    let rows: BTreeSet<String> = table(tree, "## Allowed edges")
        .into_iter()
        .filter_map(|row| row.into_iter().next()?.into_iter().next())
        .collect();
    let missing = members.difference(&rows).map(|name| format!("`{name}` has no row under `## Allowed edges`"));
    let left_over = rows.difference(&members).map(|name| format!("`{name}` has a row and is no crate"));
    missing.chain(left_over).map(|what| Finding::new(ARCHITECTURE, 0, what)).collect()
}

/// A crate uses only the crates that the table allows.
pub fn crates_use_allowed_edges_only(tree: &Tree) -> Vec<Finding> {
    let manifests = manifests(tree);
    let allowed: BTreeMap<String, [Vec<String>; 2]> = table(tree, "## Allowed edges")
        .into_iter()
        .filter_map(|row| {
            let mut cells = row.into_iter();
            let name = cells.next()?.into_iter().next()?;
            Some((name, [cells.next().unwrap_or_default(), cells.next().unwrap_or_default()]))
        })
        .collect();
    let mut findings = Vec::new();
    for (name, manifest) in &manifests {
        let Some([uses, tests_use]) = allowed.get(name) else {
            continue;
        };
        for (edge, only_tests) in manifest.dependencies.iter().filter(|(edge, _)| manifests.contains_key(edge)) {
            let is_allowed = uses.contains(edge) || *only_tests && tests_use.contains(edge);
            if !is_allowed {
                let what = format!("uses `{edge}`, which {ARCHITECTURE} does not allow `{name}`");
                findings.push(Finding::new(&manifest.path, 0, what));
            }
        }
    }
    findings
}

/// Every edge of the table is also in the sources: the crate imports the other one.
pub fn every_allowed_edge_is_imported(tree: &Tree) -> Vec<Finding> {
    let (manifests, mut findings) = (manifests(tree), Vec::new());
    for row in table(tree, "## Allowed edges") {
        let [names, uses, tests_use] = [0, 1, 2].map(|cell| row.get(cell).cloned().unwrap_or_default());
        let Some(name) = names.first() else { continue };
        // The program's tests belong to the whole project.
        let folders = match name.as_str() {
            "xtask" => vec!["xtask/".to_owned()],
            "train-low-mem" => vec!["crates/train-low-mem/".to_owned(), "tests/".to_owned()],
            _ => vec![format!("crates/{name}/")],
        };
        for edge in uses.iter().chain(&tests_use) {
            let own = manifests.get(edge).and_then(|manifest| manifest.imported_as.clone());
            let path = format!("{}::", own.unwrap_or_else(|| edge.replace('-', "_")));
            let mut sources =
                tree.rust_files().filter(|(path, _)| folders.iter().any(|folder| path.starts_with(folder)));
            if !sources.any(|(_, source)| source.contains(&path)) {
                findings.push(Finding::new(ARCHITECTURE, 0, format!("`{name}` may use `{edge}`, and does not")));
            }
        }
    }
    findings
}

/// The first drawing has every crate that users run, above the crates that it uses.
pub fn every_crate_is_drawn_above_those_that_it_uses(tree: &Tree) -> Vec<Finding> {
    let manifests = manifests(tree);
    let text = tree.get(ARCHITECTURE).unwrap_or_default();
    let drawing = text.split("```").nth(1).unwrap_or_default();
    let floors: BTreeMap<&str, usize> = drawing
        .lines()
        .enumerate()
        .flat_map(|(floor, line)| line.split_whitespace().map(move |word| (word, floor)))
        .collect();
    let mut findings = Vec::new();
    for (name, manifest) in manifests.iter().filter(|(name, _)| !TOOLS.contains(&name.as_str())) {
        let Some(floor) = floors.get(name.as_str()) else {
            findings.push(Finding::new(ARCHITECTURE, 0, format!("`{name}` is not in the drawing")));
            continue;
        };
        let uses =
            manifest.dependencies.iter().filter(|(edge, only_tests)| !only_tests && manifests.contains_key(edge));
        for (edge, _) in uses.filter(|(edge, _)| floors.get(edge.as_str()).is_some_and(|below| below <= floor)) {
            findings.push(Finding::new(
                ARCHITECTURE,
                0,
                format!("`{name}` uses `{edge}`, which is not drawn below it"),
            ));
        }
    }
    findings
}

/// Only its owners name a dependency that has owners.
pub fn dependencies_are_named_by_their_owners_only(tree: &Tree) -> Vec<Finding> {
    let manifests = manifests(tree);
    let mut findings = Vec::new();
    for row in table(tree, "## Who may name which dependency") {
        let [names, owners, tests_of] = [0, 1, 2].map(|cell| row.get(cell).cloned().unwrap_or_default());
        for (name, manifest) in &manifests {
            for (dependency, only_tests) in &manifest.dependencies {
                let is_tool = *only_tests || TOOLS.contains(&name.as_str());
                let allowed = owners.contains(name) || is_tool && tests_of.contains(name);
                if names.contains(dependency) && !allowed {
                    let what = format!("names `{dependency}`, which is left to `{}`", owners.join("`, `"));
                    findings.push(Finding::new(&manifest.path, 0, what));
                }
            }
        }
    }
    findings
}

/// A dependency's version is stated once, and every crate has the same lints.
pub fn versions_and_lints_come_from_the_workspace(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for manifest in manifests(tree).values() {
        for name in &manifest.with_own_version {
            let what = format!("`{name}`: expected `workspace = true`, the version belongs in the root Cargo.toml");
            findings.push(Finding::new(&manifest.path, 0, what));
        }
        if !manifest.has_workspace_lints {
            let what = "expected `[lints] workspace = true`";
            findings.push(Finding::new(&manifest.path, 0, what));
        }
    }
    findings
}

/// The facts from a crate's Cargo.toml that the rules need.
struct Manifest {
    path: String,
    /// The name of its library, if it differs from the crate's.
    imported_as: Option<String>,
    /// The name of each dependency, and whether only tests use it. A dependency of both kinds is listed twice.
    dependencies: Vec<(String, bool)>,
    with_own_version: Vec<String>,
    has_workspace_lints: bool,
}

/// The manifest of every member of the workspace, by crate name.
fn manifests(tree: &Tree) -> BTreeMap<String, Manifest> {
    let is_member = |path: &str| {
        let crates = path.strip_prefix("crates/").and_then(|path| path.strip_suffix("/Cargo.toml"));
        path == "xtask/Cargo.toml" || crates.is_some_and(|name| !name.contains('/'))
    };
    tree.files().filter(|(path, _)| is_member(path)).filter_map(|(path, text)| manifest(path, text)).collect()
}

fn manifest(path: &str, text: &str) -> Option<(String, Manifest)> {
    let file: toml::Table = text.parse().ok()?;
    let name = file.get("package")?.get("name")?.as_str()?.to_string();
    let mut manifest = Manifest {
        path: path.to_string(),
        imported_as: file.get("lib").and_then(|lib| lib.get("name")?.as_str()).map(str::to_string),
        dependencies: Vec::new(),
        with_own_version: Vec::new(),
        has_workspace_lints: from_workspace(file.get("lints")),
    };
    // Dependencies of one platform count like any others.
    let platforms = file.get("target").and_then(|target| target.as_table()).into_iter().flatten();
    let tables = std::iter::once(&file).chain(platforms.filter_map(|(_, table)| table.as_table()));
    for table in tables {
        for (key, only_tests) in [("dependencies", false), ("build-dependencies", false), ("dev-dependencies", true)] {
            for (name, value) in table.get(key).and_then(|value| value.as_table()).into_iter().flatten() {
                manifest.dependencies.push((name.clone(), only_tests));
                if !from_workspace(Some(value)) {
                    manifest.with_own_version.push(name.clone());
                }
            }
        }
    }
    Some((name, manifest))
}

fn from_workspace(value: Option<&toml::Value>) -> bool {
    value.and_then(|value| value.get("workspace")).and_then(toml::Value::as_bool) == Some(true)
}

/// The rows of the first table under `heading` in ARCHITECTURE.md, as the names in each cell.
fn table(tree: &Tree, heading: &str) -> Vec<Vec<Vec<String>>> {
    let text = tree.get(ARCHITECTURE).unwrap_or_default();
    let section = text.lines().skip_while(|line| line.trim_end() != heading).skip(1);
    let lines = section.take_while(|line| !line.starts_with("## ")).filter(|line| line.starts_with('|'));
    // The first two lines are the header and the rule below it.
    lines.skip(2).map(|line| line.trim_matches('|').split('|').map(names).collect()).collect()
}

/// The texts between backticks.
fn names(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: &str = "\
# Architecture

## Allowed edges

| crate | uses | its tests use |
| --- | --- | --- |
| `base` | | |
| `middle` | `base` | `side` |
| `side` | | |

## Who may name which dependency

| dependency | crates | tests and tools |
| --- | --- | --- |
| `arrow`, `parquet` | `base` | `middle`, `xtask` |
";

    fn manifest(name: &str, rest: &str) -> String {
        format!("[package]\nname = \"{name}\"\n[lints]\nworkspace = true\n{rest}")
    }

    fn tree(base: &str, middle: &str, side: &str) -> Tree {
        Tree::from_files(&[
            ("ARCHITECTURE.md", TABLES),
            ("crates/base/Cargo.toml", &manifest("base", base)),
            ("crates/middle/Cargo.toml", &manifest("middle", middle)),
            ("crates/side/Cargo.toml", &manifest("side", side)),
            ("crates/side/tests/fixture/Cargo.toml", "not a manifest of ours"),
        ])
    }

    fn check(rule: super::super::Rule, tree: &Tree, expected: &[&str]) {
        let findings: Vec<String> = rule(tree).iter().map(Finding::to_string).collect();
        assert_eq!(findings, expected);
    }

    #[test]
    fn an_edge_outside_of_the_table_is_found() {
        let rule = crates_use_allowed_edges_only;
        check(rule, &tree("", "[dependencies]\nbase.workspace = true\nserde.workspace = true", ""), &[]);
        check(rule, &tree("", "[dev-dependencies]\nside.workspace = true", ""), &[]);
        check(
            rule,
            &tree("[dependencies]\nmiddle.workspace = true", "[dependencies]\nside.workspace = true", ""),
            &[
                "crates/base/Cargo.toml: uses `middle`, which ARCHITECTURE.md does not allow `base`",
                "crates/middle/Cargo.toml: uses `side`, which ARCHITECTURE.md does not allow `middle`",
            ],
        );
        check(
            rule,
            &tree("", "", "[target.'cfg(unix)'.dependencies]\nbase.workspace = true"),
            &["crates/side/Cargo.toml: uses `base`, which ARCHITECTURE.md does not allow `side`"],
        );
    }

    #[test]
    fn an_edge_of_the_table_that_no_source_has_is_found() {
        let rule = every_allowed_edge_is_imported;
        let sources = |test: &str| {
            Tree::from_files(&[
                ("ARCHITECTURE.md", TABLES),
                ("crates/middle/src/lib.rs", "use base::Noun;"),
                ("crates/middle/tests/all.rs", test),
            ])
        };
        check(rule, &sources("side::call();"), &[]);
        check(rule, &sources(""), &["ARCHITECTURE.md: `middle` may use `side`, and does not"]);
    }

    #[test]
    fn a_crate_that_is_not_drawn_or_not_above_another_is_found() {
        let rule = every_crate_is_drawn_above_those_that_it_uses;
        let drawn = |drawing: &str| {
            Tree::from_files(&[
                ("ARCHITECTURE.md", drawing),
                ("crates/base/Cargo.toml", &manifest("base", "")),
                ("crates/middle/Cargo.toml", &manifest("middle", "[dependencies]\nbase.workspace = true")),
            ])
        };
        check(rule, &drawn("# A\n```text\n  middle   the middle\n    base\n```\n"), &[]);
        let beside = ["ARCHITECTURE.md: `middle` uses `base`, which is not drawn below it"];
        check(rule, &drawn("```text\nmiddle base\n```\n"), &beside);
        check(rule, &drawn("```text\nmiddle\n```\n"), &["ARCHITECTURE.md: `base` is not in the drawing"]);
    }

    #[test]
    fn a_dependency_named_outside_of_its_owner_is_found() {
        let rule = dependencies_are_named_by_their_owners_only;
        check(rule, &tree("[dependencies]\narrow.workspace = true", "", ""), &[]);
        check(rule, &tree("", "[dev-dependencies]\narrow.workspace = true", ""), &[]);
        check(
            rule,
            &tree("", "[dependencies]\narrow.workspace = true", "[dev-dependencies]\nparquet.workspace = true"),
            &[
                "crates/middle/Cargo.toml: names `arrow`, which is left to `base`",
                "crates/side/Cargo.toml: names `parquet`, which is left to `base`",
            ],
        );
    }

    #[test]
    fn crates_and_the_table_have_to_agree() {
        let rule = every_crate_is_in_the_table_and_back;
        check(rule, &tree("", "", ""), &[]);
        let other = Tree::from_files(&[
            ("ARCHITECTURE.md", TABLES),
            ("crates/base/Cargo.toml", &manifest("base", "")),
            ("crates/middle/Cargo.toml", &manifest("middle", "")),
            ("xtask/Cargo.toml", &manifest("xtask", "")),
        ]);
        check(
            rule,
            &other,
            &[
                "ARCHITECTURE.md: `xtask` has no row under `## Allowed edges`",
                "ARCHITECTURE.md: `side` has a row and is no crate",
            ],
        );
    }

    #[test]
    fn a_version_or_a_lint_of_its_own_is_found() {
        let rule = versions_and_lints_come_from_the_workspace;
        check(rule, &tree("[dependencies]\nserde = { workspace = true, features = [\"rc\"] }", "", ""), &[]);
        let own = "[package]\nname = \"base\"\n[dependencies]\nserde = \"1\"\n";
        check(
            rule,
            &Tree::from_files(&[("crates/base/Cargo.toml", own)]),
            &[
                "crates/base/Cargo.toml: `serde`: expected `workspace = true`, \
                 the version belongs in the root Cargo.toml",
                "crates/base/Cargo.toml: expected `[lints] workspace = true`",
            ],
        );
    }
}
