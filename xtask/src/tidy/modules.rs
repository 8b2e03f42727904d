//! Rules about modules: no module imports another that imports it back, directly or indirectly.
//!
//! A module and the modules inside it count as one unit, within which imports may go in both directions.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::{before_tests, is_test_file};
use super::{Finding, Tree};

/// A module: its crate's folder of sources, and the names from the crate root down.
type Module<'a> = (&'a str, Vec<&'a str>);

/// Modules of a crate have no import cycles.
pub fn modules_import_each_other_in_no_circle(tree: &Tree) -> Vec<Finding> {
    let sources = tree.rust_files().filter(|(path, _)| !is_test_file(path) && !path.contains("/src/bin/"));
    let modules: BTreeMap<Module, (&str, &str)> =
        sources.filter_map(|(path, source)| Some((module(path)?, (path, before_tests(source))))).collect();
    let mut imports: BTreeMap<&Module, BTreeSet<&Module>> =
        modules.iter().map(|(module, (_, source))| (module, imports(module, source, &modules))).collect();
    // A module that imports no remaining module, or that no module imports, is not part of a cycle.
    loop {
        let left: BTreeSet<&Module> = imports.keys().copied().collect();
        let imported: BTreeSet<&Module> = imports.values().flatten().copied().collect();
        imports.values_mut().for_each(|others| others.retain(|other| left.contains(other)));
        imports.retain(|module, others| !others.is_empty() && imported.contains(module));
        if imports.len() == left.len() {
            break;
        }
    }
    let finding = |(module, others): (&&Module, &BTreeSet<&Module>)| {
        let others: Vec<String> = others.iter().map(|(_, names)| names.join("::")).collect();
        Finding::new(modules[*module].0, 0, format!("is in a circle of imports: it imports {}", others.join(", ")))
    };
    imports.iter().map(finding).collect()
}

/// The module of a file, within its crate.
fn module(path: &str) -> Option<Module<'_>> {
    let (folder, file) = path.split_once("/src/")?;
    let names: Vec<&str> = file.strip_suffix(".rs")?.split('/').collect();
    let is_named_by_its_folder = ["lib", "main", "mod"].contains(names.last()?);
    let count = if is_named_by_its_folder { names.len() - 1 } else { names.len() };
    Some((folder, names[..count].to_vec()))
}

/// The modules that a module names.
fn imports<'a>(
    of: &Module<'a>,
    source: &str,
    modules: &'a BTreeMap<Module<'a>, (&str, &str)>,
) -> BTreeSet<&'a Module<'a>> {
    let code: String =
        source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
    let mut paths = Vec::new();
    for statement in code.split(';') {
        match statement.rsplit_once("use ").filter(|(_, tree)| !tree.contains('=')) {
            Some((_, tree)) => expand("", tree, &mut paths),
            None => {
                let words = statement.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
                paths.extend(
                    words.filter(|word| word.starts_with("crate::") || word.starts_with("super::")).map(str::to_owned),
                );
            }
        }
    }
    let is_another = |found: &&Module| !found.1.starts_with(&of.1) && !of.1.starts_with(&found.1);
    paths.iter().filter_map(|path| resolve(of, path, modules)).filter(is_another).collect()
}

/// Expands a tree of imports into paths.
fn expand(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let Some((before, inside)) = tree.split_once('{') else {
        paths.push(format!("{prefix}{}", tree.split(" as ").next().unwrap_or_default().trim()));
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
                expand(&prefix, &inside[start..at], paths);
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// The innermost module on a path, if it is in this crate and not the root.
fn resolve<'a>(of: &Module<'a>, path: &str, modules: &'a BTreeMap<Module<'a>, (&str, &str)>) -> Option<&'a Module<'a>> {
    let mut names = of.1.clone();
    let mut found = None;
    for part in path.split("::") {
        match part.trim() {
            "crate" => names.clear(),
            "self" => {}
            "super" => drop(names.pop()),
            part => {
                let here = modules.keys().find(|(folder, one)| {
                    *folder == of.0 && one.split_last().is_some_and(|(last, above)| *last == part && above == names)
                });
                let Some(here) = here else { break };
                names.clone_from(&here.1);
                found = Some(here);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(files: &[(&str, &str)], expected: &[&str]) {
        let findings = modules_import_each_other_in_no_circle(&Tree::of(files));
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
}
