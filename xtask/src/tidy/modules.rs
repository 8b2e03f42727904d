//! Rules about modules: no module imports another that imports it back, directly or indirectly.
//!
//! Modules side by side are compared, each together with all modules inside it. Within such a unit imports may go in both directions between
//! the outer module and those inside. A name that a module passes on (`pub use a::Noun`) belongs to the module that it comes from.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{before_tests, is_test_file};
use super::{Finding, Tree};

/// The files of all crates by their modules. A module is its crate's folder, and the names from the crate's root down: `crates/x::a::b`.
type Files<'a> = BTreeMap<String, File<'a>>;

struct File<'a> {
    path: &'a str,
    /// The paths that its code names.
    paths: Vec<String>,
    /// The names that it imports, with their paths.
    names: BTreeMap<String, String>,
}

/// The most modules that pass a name on, one after the other.
const MAX_PASSED_ON: usize = 8;

/// Modules of a crate have no import cycles.
pub fn modules_import_each_other_in_no_circle(tree: &Tree) -> Vec<Finding> {
    let sources = tree.rust_files().filter(|(path, _)| !is_test_file(path) && !path.contains("/src/bin/"));
    let files: Files =
        sources.filter_map(|(path, source)| Some((module(path)?, File::read(path, before_tests(source))))).collect();
    let imports: Vec<(&str, &str)> = files.iter().flat_map(|(module, file)| file.imports(module, &files)).collect();
    let mut units: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in imports.iter().filter_map(|&(from, to)| units_of(from, to)) {
        units.entry(from).or_default().insert(to);
    }
    // A unit that imports no remaining unit, or that no unit imports, is not part of a cycle.
    loop {
        let left: BTreeSet<&str> = units.keys().copied().collect();
        let imported: BTreeSet<&str> = units.values().flatten().copied().collect();
        units.values_mut().for_each(|others| others.retain(|other| left.contains(other)));
        units.retain(|unit, others| !others.is_empty() && imported.contains(unit));
        if units.len() == left.len() {
            break;
        }
    }
    let is_left = |(from, to): &&(&str, &str)| {
        units_of(from, to).is_some_and(|(from, to)| units.get(from).is_some_and(|others| others.contains(to)))
    };
    let mut circles: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to) in imports.iter().filter(is_left) {
        circles.entry(files[*from].path).or_default().insert(to.split_once("::").map_or(*to, |(_, names)| names));
    }
    let finding = |(path, others): (&str, BTreeSet<&str>)| {
        let others: Vec<&str> = others.into_iter().collect();
        Finding::new(path, 0, format!("is in a circle of imports: it imports {}", others.join(", ")))
    };
    circles.into_iter().map(finding).collect()
}

/// The module of a file.
fn module(path: &str) -> Option<String> {
    let (folder, file) = path.split_once("/src/")?;
    let file = file.strip_suffix(".rs")?;
    let named_by_folder = ["lib", "main", "mod"].into_iter().find_map(|name| file.strip_suffix(name));
    let names = named_by_folder.filter(|rest| rest.is_empty() || rest.ends_with('/')).unwrap_or(file);
    let names = names.split('/').filter(|name| !name.is_empty());
    Some([folder].into_iter().chain(names).collect::<Vec<_>>().join("::"))
}

/// The modules side by side to which these two belong. `None` if one lies inside the other.
fn units_of<'a>(from: &'a str, to: &'a str) -> Option<(&'a str, &'a str)> {
    let unit = |module: &'a str, parts: usize| {
        let end = module.match_indices("::").nth(parts).map_or(module.len(), |(at, _)| at);
        &module[..end]
    };
    let alike = from.split("::").zip(to.split("::")).take_while(|(a, b)| a == b).count();
    let is_inside = [from, to].iter().any(|module| module.split("::").count() == alike);
    (!is_inside).then(|| (unit(from, alike), unit(to, alike)))
}

impl<'a> File<'a> {
    fn read(path: &'a str, source: &str) -> Self {
        let lines = source.lines().map(|line| line.split("//").next().unwrap_or_default());
        let code: String = lines.collect::<Vec<_>>().join("\n");
        let (mut paths, mut names) = (Vec::new(), BTreeMap::new());
        for statement in code.split(';') {
            match statement.rsplit_once("use ").filter(|(_, tree)| !tree.contains('=')) {
                Some((_, tree)) => {
                    let mut imported = Vec::new();
                    expand("", tree, &mut imported);
                    paths.extend(imported.iter().map(|(path, _)| path.clone()));
                    names.extend(imported.into_iter().map(|(path, name)| (name, path)));
                }
                None => {
                    let words = statement.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
                    let is_path = |word: &&str| word.starts_with("crate::") || word.starts_with("super::");
                    paths.extend(words.filter(is_path).map(str::to_owned));
                }
            }
        }
        Self { path, paths, names }
    }

    /// Pairs of this file's module and one that it imports.
    fn imports<'f>(&'f self, module: &'f str, files: &'f Files<'a>) -> impl Iterator<Item = (&'f str, &'f str)> {
        let found = self.paths.iter().filter_map(move |path| resolve(module, path, files, MAX_PASSED_ON));
        found.map(move |other| (module, other))
    }
}

/// Expands a tree of imports into paths, each with the name that it gets.
fn expand(prefix: &str, tree: &str, imported: &mut Vec<(String, String)>) {
    let Some((before, inside)) = tree.split_once('{') else {
        let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
        let path = format!("{prefix}{}", path.trim());
        let own = path.trim_end_matches("::self").rsplit("::").next().unwrap_or_default();
        let name = if name.is_empty() { own.to_owned() } else { name.trim().to_owned() };
        imported.push((path, name));
        return;
    };
    let prefix = format!("{prefix}{}", before.trim());
    let (mut depth, mut start) = (0, 0);
    let inside = inside.rsplit_once('}').map_or(inside, |(inside, _)| inside);
    for (at, c) in inside.char_indices().chain([(inside.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&prefix, &inside[start..at], imported);
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// The innermost module on a path, if it is in this crate and not the root. A name that an outer module passes on leads to where it comes
/// from.
fn resolve<'f>(of: &str, path: &str, files: &'f Files, passed_on: usize) -> Option<&'f str> {
    let mut at = of.to_owned();
    let mut found = None;
    for part in path.split("::") {
        match part.trim() {
            "crate" => at.truncate(at.find("::").unwrap_or(at.len())),
            "self" => {}
            "super" => at.truncate(at.rfind("::").unwrap_or(at.len())),
            part => match files.get_key_value(&format!("{at}::{part}")) {
                Some((inner, _)) => {
                    at.clone_from(inner);
                    found = Some(inner.as_str());
                }
                None => {
                    let is_outer =
                        passed_on > 0 && of.strip_prefix(&*at).is_some_and(|inside| inside.starts_with("::"));
                    let source = files.get(&at).filter(|_| is_outer).and_then(|file| file.names.get(part));
                    return source.and_then(|path| resolve(&at, path, files, passed_on - 1)).or(found);
                }
            },
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(files: &[(&str, &str)], expected: &[&str]) {
        let findings = modules_import_each_other_in_no_circle(&Tree::from_files(files));
        assert_eq!(findings.iter().map(Finding::to_string).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_circle_is_found_however_it_is_written_and_who_only_leads_to_it_is_not() {
        let lib = ("crates/x/src/lib.rs", "mod a;\nmod b;\nmod c;");
        let b = ("crates/x/src/b.rs", "use std::fmt;\npub(crate) use crate::{\n    c::{self, Noun},\n    other,\n};");
        let circle = [
            "crates/x/src/a.rs: is in a circle of imports: it imports b",
            "crates/x/src/b.rs: is in a circle of imports: it imports c",
            "crates/x/src/c.rs: is in a circle of imports: it imports a",
        ];
        let leading = ("crates/x/src/d.rs", "use crate::a;");
        for c in ["use super::a;", "fn f() { crate::a::call() }", "use crate::a as other;"] {
            check(&[lib, ("crates/x/src/a.rs", "use super::b::Noun;"), b, ("crates/x/src/c.rs", c), leading], &circle);
        }
        for c in ["// crate::a::call()", "use a::call;", "\n#[cfg(test)]\nmod tests { use crate::a; }"] {
            check(&[lib, ("crates/x/src/a.rs", "use super::b::Noun;"), b, ("crates/x/src/c.rs", c), leading], &[]);
        }
    }

    #[test]
    fn a_module_and_those_inside_of_it_may_name_each_other() {
        let inner = ("crates/x/src/a/inner.rs", "use super::Noun;\nuse crate::b::Other;");
        check(&[("crates/x/src/a/mod.rs", "mod inner;\nuse self::inner::f;"), inner, ("crates/x/src/b.rs", "")], &[]);
        check(
            &[("crates/x/src/a/mod.rs", ""), inner, ("crates/x/src/b.rs", "use crate::a::inner;")],
            &[
                "crates/x/src/a/inner.rs: is in a circle of imports: it imports b",
                "crates/x/src/b.rs: is in a circle of imports: it imports a::inner",
            ],
        );
    }

    #[test]
    fn a_module_counts_with_those_inside_of_it() {
        let outer = ("crates/x/src/a.rs", "mod first;\nmod second;\nuse first::f;");
        let first = ("crates/x/src/a/first.rs", "use super::Noun;\nuse crate::b::Other;");
        let back = ("crates/x/src/b.rs", "use crate::a::second;");
        let circle = [
            "crates/x/src/a/first.rs: is in a circle of imports: it imports b",
            "crates/x/src/b.rs: is in a circle of imports: it imports a::second",
        ];
        check(&[outer, first, ("crates/x/src/a/second.rs", ""), back], &circle);
        // Modules inside one module are compared as well.
        let second = ("crates/x/src/a/second.rs", "use super::first::f;");
        let first = ("crates/x/src/a/first.rs", "use super::second::g;");
        let circle = [
            "crates/x/src/a/first.rs: is in a circle of imports: it imports a::second",
            "crates/x/src/a/second.rs: is in a circle of imports: it imports a::first",
        ];
        check(&[outer, first, second], &circle);
    }

    #[test]
    fn a_name_that_the_root_passes_on_is_imported_from_its_own_module() {
        let lib = |passes_on| ("crates/x/src/lib.rs", passes_on);
        let (a, b) = (("crates/x/src/a.rs", "use crate::Noun;"), ("crates/x/src/b.rs", "use crate::a;"));
        let circle = [
            "crates/x/src/a.rs: is in a circle of imports: it imports b",
            "crates/x/src/b.rs: is in a circle of imports: it imports a",
        ];
        for passes_on in ["mod a;\nmod b;\npub use b::Noun;", "pub use b::{self, Other as Noun};"] {
            check(&[lib(passes_on), a, b], &circle);
        }
        check(&[lib("mod a;\nmod b;\npub struct Noun;"), a, b], &[]);
        check(&[lib("pub use crate::Noun;"), a, b], &[]);
    }
}
