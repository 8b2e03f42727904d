//! The packages of others in a program: the notices that their licences ask for, and a bill of materials.
//!
//! Both are made from `cargo metadata` of the locked tree and the files of its packages, so no list is kept by hand.
//! Packages for tests and builds alone are not in a program, and not in these files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

/// The package whose program is released.
const PROGRAM: &str = "train-low-mem";

/// How far below a package's root the sources of C libraries lie that it brings along.
const DEPTH: usize = 3;

/// A package of somebody else.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    name: String,
    version: String,
    licence: String,
    authors: Vec<String>,
    directory: PathBuf,
}

/// The packages of others in the program for `target`, by name and version.
struct ThirdParties(Vec<Package>);

/// Writes the notices and the bill of materials of the program for `target` into `directory`. Returns their paths.
///
/// # Errors
/// cargo cannot read the locked tree, a package has no licence, or a file cannot be read or written.
pub fn write(root: &Path, target: &str, features: &[&str], directory: &Path) -> Result<[PathBuf; 2], String> {
    let metadata = super::output(
        Command::new("cargo")
            .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", target])
            .args(features.iter().flat_map(|features| ["--features", features]))
            .current_dir(root),
    )?;
    let metadata: Value = serde_json::from_str(&metadata).map_err(|error| format!("cargo metadata: {error}"))?;
    let parties = ThirdParties::parse(&metadata)?;
    let written = |name: String, text: String| {
        let path = directory.join(name);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok::<_, String>(path)
    };
    Ok([
        written(format!("THIRD-PARTY-NOTICES-{target}.txt"), parties.notices()?)?,
        written(format!("train_low_mem-{target}.cdx.json"), format!("{:#}\n", parties.bill_of_materials(&metadata)))?,
    ])
}

impl ThirdParties {
    fn parse(metadata: &Value) -> Result<Self, String> {
        let by_id = |list: &'static str| -> BTreeMap<&str, &Value> {
            let list = metadata.pointer(list).and_then(Value::as_array);
            list.into_iter().flatten().filter_map(|one| Some((one["id"].as_str()?, one))).collect()
        };
        let (packages, nodes) = (by_id("/packages"), by_id("/resolve/nodes"));
        let program = packages.iter().find(|(_, package)| package["name"] == PROGRAM);
        let mut left = vec![*program.ok_or("cargo metadata: the program's package is missing")?.0];
        let mut seen = BTreeSet::new();
        let mut parties = Vec::new();
        while let Some(id) = left.pop() {
            if !seen.insert(id) {
                continue;
            }
            let dependencies = nodes.get(id).and_then(|node| node["deps"].as_array());
            let is_linked = |dependency: &&Value| {
                dependency["dep_kinds"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
            };
            left.extend(dependencies.into_iter().flatten().filter(is_linked).filter_map(|one| one["pkg"].as_str()));
            if let Some(package) = packages.get(id).filter(|package| !package["source"].is_null()) {
                parties.push(Package::parse(package)?);
            }
        }
        parties.sort();
        Ok(Self(parties))
    }

    /// Every package with its licence, and then each licence's text once, with the packages that have it.
    fn notices(&self) -> Result<String, String> {
        let mut text = "Packages of others in train_low_mem, and their notices.\n\n".to_owned();
        let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for package in &self.0 {
            let Package { name, version, licence, authors, directory } = package;
            text += &format!("{name} {version}: {licence}\n");
            let mut found = Vec::new();
            find_notices(directory, DEPTH, &mut found).map_err(|error| format!("{}: {error}", directory.display()))?;
            if found.is_empty() {
                let notice =
                    format!("Copyright {}. Its package has no text of its licence: {licence}.", authors.join(", "));
                texts.entry(notice).or_default().push(format!("{name} {version}"));
            }
            for path in found {
                let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
                let inside = path.strip_prefix(directory).unwrap_or(&path).display().to_string();
                let notice = String::from_utf8_lossy(&bytes).replace("\r\n", "\n").trim().to_owned();
                texts.entry(notice).or_default().push(format!("{name} {version} ({inside})"));
            }
        }
        for (notice, packages) in texts {
            text += &format!("\n{}\n{}\n\n{notice}\n", "-".repeat(80), packages.join("\n"));
        }
        Ok(text)
    }

    /// A CycloneDX document, version 1.5. Source: <https://cyclonedx.org/docs/1.5/json/>.
    fn bill_of_materials(&self, metadata: &Value) -> Value {
        let packages = metadata["packages"].as_array();
        let version = packages.into_iter().flatten().find(|package| package["name"] == PROGRAM);
        let components = self.0.iter().map(|Package { name, version, licence, .. }| {
            let purl = format!("pkg:cargo/{name}@{version}");
            json!({
                "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
                "licenses": [{ "expression": licence }],
            })
        });
        json!({
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": { "component": {
                "type": "application", "name": "train_low_mem", "version": version.map(|package| &package["version"]),
            } },
            "components": components.collect::<Vec<_>>(),
        })
    }
}

impl Package {
    fn parse(package: &Value) -> Result<Self, String> {
        let text = |key: &str| package[key].as_str().map(str::to_owned);
        let (name, version) = (text("name").unwrap_or_default(), text("version").unwrap_or_default());
        // Before SPDX's "OR" there was a slash.
        let licence = text("license").map(|licence| licence.replace(" / ", " OR ").replace('/', " OR "));
        let licence = licence.ok_or_else(|| format!("{name} {version}: the package names no licence"))?;
        let authors = package["authors"].as_array().into_iter().flatten();
        let manifest = PathBuf::from(text("manifest_path").unwrap_or_default());
        Ok(Self {
            authors: authors.filter_map(|author| author.as_str().map(str::to_owned)).collect(),
            directory: manifest.parent().map(Path::to_owned).unwrap_or_default(),
            name,
            version,
            licence,
        })
    }
}

/// Finds the files with licences and notices in a package, in the order of their paths.
fn find_notices(directory: &Path, depth: usize, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    let mut entries = fs::read_dir(directory)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type()?;
        let name = entry.file_name().to_string_lossy().to_lowercase();
        let is_code = [".rs", ".c", ".h", ".py", ".toml"].iter().any(|end| name.ends_with(end));
        let is_notice = ["license", "licence", "copying", "notice", "unlicense", "copyright"]
            .iter()
            .any(|start| name.starts_with(start));
        if kind.is_file() && is_notice && !is_code {
            found.push(entry.path());
        } else if kind.is_dir() && depth > 0 {
            find_notices(&entry.path(), depth - 1, found)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_and_bill_have_every_linked_package_of_others_once() {
        let root = std::env::temp_dir().join(format!("train-low-mem-notices-{}", std::process::id()));
        let package = |name: &str, licence: Option<&str>, file: &str, text: &str| {
            let directory = root.join(name);
            fs::create_dir_all(directory.join(file).parent().unwrap()).unwrap();
            fs::write(directory.join(file), text).unwrap();
            let source = (name != PROGRAM).then_some("registry");
            json!({
                "id": name, "name": name, "version": "1.0.0", "license": licence, "source": source,
                "authors": ["A. Author"], "manifest_path": directory.join("Cargo.toml"),
            })
        };
        let edge = |to: &str, kind: Option<&str>| json!({ "pkg": to, "dep_kinds": [{ "kind": kind }] });
        let mut metadata = json!({
            "packages": [
                package(PROGRAM, None, "README", ""),
                package("linked", Some("MIT/Apache-2.0"), "LICENSE-MIT", "one text\r\n"),
                package("beside", Some("MIT"), "c/zstd/LICENSE", "one text"),
                package("bare", Some("MIT"), "src/license.rs", "code"),
                package("for-tests", Some("MIT"), "LICENSE", "not linked"),
            ],
            "resolve": { "nodes": [
                { "id": PROGRAM, "deps": [edge("linked", None), edge("for-tests", Some("dev"))] },
                { "id": "linked", "deps": [edge("beside", None), edge("bare", None), edge("linked", None)] },
            ] },
        });
        let parties = ThirdParties::parse(&metadata).unwrap();
        let notices = parties.notices().unwrap();
        assert_eq!(notices.matches("one text").count(), 1);
        assert!(notices.contains("beside 1.0.0 (c/zstd/LICENSE)\nlinked 1.0.0 (LICENSE-MIT)\n\none text"), "{notices}");
        assert!(notices.contains("bare 1.0.0\n\nCopyright A. Author."), "{notices}");
        assert!(!notices.contains("not linked"));
        let bill = parties.bill_of_materials(&metadata);
        let of_bill = |key: &str| -> Vec<&Value> {
            bill["components"].as_array().unwrap().iter().map(|component| &component[key]).collect()
        };
        assert_eq!(of_bill("name"), ["bare", "beside", "linked"]);
        assert_eq!(of_bill("licenses")[2], &json!([{ "expression": "MIT OR Apache-2.0" }]));
        metadata["packages"][1]["license"] = Value::Null;
        assert!(ThirdParties::parse(&metadata).is_err());
        fs::remove_dir_all(&root).unwrap();
    }
}
