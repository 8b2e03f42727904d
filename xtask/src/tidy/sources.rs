//! Rules about Rust files.

use super::{Finding, Tree};

/// The crates that may use `unsafe`, which the workspace denies. Drivers and kernels are called like C functions. The last two are a tool, which
/// no crate depends on, and a page, whose functions JavaScript calls by name.
const UNSAFE_CRATES: [&str; 8] = [
    "crates/heap/",
    "crates/tensor-storage/",
    "crates/cuda-device/",
    "crates/t5-ops/",
    "crates/cuda-kernels/",
    "crates/candle-kernels/",
    "crates/fault-points/",
    "crates/will-it-fit/",
];

/// A longer file is probably about more than one thing. One thing may well have 600 lines: a limit that some lines exceed cuts in the wrong place.
const MAX_LINES: usize = 700;

/// Files that may be longer, each with the reason. Ideally empty.
const LONGER: &[(&str, &str)] = &[];

/// Names that do not describe a file's contents.
const EMPTY_NAMES: [&str; 7] = ["utils", "util", "common", "manager", "helper", "helpers", "misc"];

/// Places that may use files by their paths, each with the reason.
const RAW_FILES: &[(&str, &str)] = &[
    ("crates/durable-files/", "the home of these calls"),
    ("crates/fault-points/", "a tool"),
    ("crates/foreign-bytes/", "a tool"),
    ("crates/heap/src/temporary_name.rs", "makes new files only, under names that nobody knows before"),
    ("crates/heap/src/anonymous_file.rs", "removes the name of its own new file, which nobody knows"),
    ("crates/regular-file/", "opens files to read them"),
    ("crates/memory-policy/", "reads the system's own files"),
    ("crates/t5/src/hf/safetensors.rs", "streams tensors into a directory that the caller renames when it is whole"),
    ("crates/t5/src/hf/save.rs", "writes into a directory that the caller renames when it is whole"),
    ("crates/t5/src/model.rs", "makes the directory that a test or a tool names"),
];

/// Where the system's own files are, which no user can exchange.
const OF_THE_SYSTEM: [&str; 2] = ["\"/proc/", "\"/sys/"];

/// Calls that open a file to read it, list a directory, replace a path by one without links, or tell a length, a time or an owner.
/// `regular-file` waits for no pipe, and follows no link that another user planted where that user may not go.
///
/// `exists`, `is_file` and `is_dir` are allowed. They open nothing and tell a kind alone, and nothing is made, replaced or removed by their
/// answer: `durable-files` looks again, through the open directory. Where another user can exchange the name between the two, that user
/// could have exchanged it before the first.
const RAW_READS: [&str; 8] = [
    "File::open(",
    "fs::read(",
    "fs::read_to_string(",
    "read_dir(",
    "canonicalize(",
    "read_link(",
    "fs::metadata(",
    "symlink_metadata(",
];

/// Places that may open files of the system to read them, each with the reason.
const SYSTEM_FILES: &[(&str, &str)] = &[
    ("crates/command/src/commands/doctor/program.rs", "one function for files below /proc and /sys"),
    ("crates/planner/src/measurement/times.rs", "times of threads, below /proc"),
    ("crates/t5-ops/src/cache.rs", "sizes of caches, below /sys"),
    ("crates/cuda-kernels/src/libraries.rs", "libraries beside the program, in its own Python environment"),
];

/// Calls that make, change, lock or remove a file by its path.
const RAW_CALLS: [&str; 15] = [
    "fs::write(",
    "fs::copy(",
    "fs::rename(",
    "fs::remove_file(",
    "fs::remove_dir(",
    "fs::remove_dir_all(",
    "fs::create_dir(",
    "fs::create_dir_all(",
    "fs::hard_link(",
    "fs::set_permissions(",
    "File::create(",
    "File::create_new(",
    "File::options(",
    "OpenOptions::new(",
    "flock(",
];

/// Only the crates of `UNSAFE_CRATES` use `unsafe`: `heap`, storage, devices, `t5-ops`, the kernels, a tool and a page. The compiler denies it
/// elsewhere, and clippy requires a reason.
pub fn unsafe_is_allowed_in_its_crates_only(tree: &Tree) -> Vec<Finding> {
    let others = tree.rust_files().filter(|(path, _)| !UNSAFE_CRATES.iter().any(|home| path.starts_with(home)));
    let what = format!("allows `unsafe`, which is left to {}", UNSAFE_CRATES.join(", "));
    let allowing = |(path, source)| attributes(source, "allow(unsafe_code").map(move |line| (path, line));
    others.flat_map(allowing).map(|(path, line)| Finding::new(path, line, &*what)).collect()
}

/// A file opens with a `//!` comment about its purpose. Files that only contain tests are about the code beside them.
pub fn every_module_opens_with_its_documentation(tree: &Tree) -> Vec<Finding> {
    let undocumented = |(_, source): &(&str, &str)| !source.trim_start().starts_with("//!");
    let finding = |(path, _): (&str, &str)| Finding::new(path, 1, "expected the module's documentation, `//! ...`");
    let sources = tree.rust_files().filter(|(path, _)| !is_test_file(path));
    sources.filter(undocumented).map(finding).collect()
}

/// A file is short enough to be about one thing.
pub fn files_fit_the_length_limit(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, source) in tree.rust_files() {
        let lines = source.lines().count();
        if lines > MAX_LINES && !LONGER.iter().any(|(longer, _)| *longer == path) {
            findings.push(Finding::new(path, 0, format!("expected at most {MAX_LINES} lines, got {lines}")));
        }
    }
    findings
}

/// A file's name describes its contents.
pub fn files_are_named_for_what_they_hold(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, _) in tree.files() {
        let mut words = path.split(|c: char| !c.is_alphanumeric());
        if let Some(word) = words.find(|word| EMPTY_NAMES.contains(word)) {
            findings.push(Finding::new(path, 0, format!("`{word}` does not say what is in it")));
        }
    }
    findings
}

/// Only `durable-files` makes, changes, locks and removes files: elsewhere a crash would leave half a file, or another user could
/// exchange the directory on the way. Only it and `regular-file` open them and list
/// directories.
///
/// `xtask` is exempt: its output is checked in, and can be generated again.
pub fn files_are_changed_by_durable_files_only(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_excepted = |path: &str| RAW_FILES.iter().any(|(excepted, _)| path.starts_with(excepted));
    let sources = tree
        .rust_files()
        .filter(|(path, _)| path.starts_with("crates/") && path.contains("/src/") && !is_test_file(path));
    for (path, source) in sources.filter(|(path, _)| !is_excepted(path)) {
        let source = before_tests(source);
        let is_of_system = |line: usize| {
            let text = source.lines().nth(line - 1).unwrap_or_default();
            OF_THE_SYSTEM.iter().any(|place| text.contains(place)) || SYSTEM_FILES.iter().any(|(file, _)| *file == path)
        };
        let changes = RAW_CALLS.into_iter().map(|raw| (raw, "`durable-files`"));
        for (raw, instead) in changes.chain(RAW_READS.into_iter().map(|raw| (raw, "`regular-file`"))) {
            let is_read = RAW_READS.contains(&raw);
            for line in lines_of_code(source, raw).filter(|line| !(is_read && is_of_system(*line))) {
                let what = format!("`{}` uses a file by its path; use {instead}", raw.trim_end_matches('('));
                findings.push(Finding::new(path, line, what));
            }
        }
    }
    findings
}

/// Everything that a terminal or a log receives is made safe where it is written, so nothing else writes.
pub fn text_is_shown_in_one_place(tree: &Tree) -> Vec<Finding> {
    const WRITERS: [&str; 3] = [
        "crates/command/src/screen/output.rs",
        "crates/command/src/screen/report.rs",
        // Draws rows of `run_report::screen`, which are safe.
        "crates/command/src/commands/watch.rs",
    ];
    const TOOLS: [&str; 2] = ["crates/fault-points/", "crates/foreign-bytes/"];
    let is_shown = |path: &str| path.starts_with("crates/") && path.contains("/src/") && !is_test_file(path);
    let may = |path: &str| WRITERS.contains(&path) || TOOLS.iter().any(|tool| path.starts_with(tool));
    let mut findings = Vec::new();
    for (path, source) in tree.rust_files().filter(|(path, _)| is_shown(path) && !may(path)) {
        for raw in [
            "println!(",
            "print!(",
            "eprintln!(",
            "eprint!(",
            "dbg!(",
            "stdout().lock(",
            "stderr().lock(",
            "stdout().write",
            "stderr().write",
        ] {
            for line in lines_of_code(before_tests(source), raw) {
                findings.push(Finding::new(
                    path,
                    line,
                    format!("`{raw}`: use `report`, which makes text of others safe"),
                ));
            }
        }
    }
    findings
}

/// No test is ignored.
pub fn no_test_is_ignored(tree: &Tree) -> Vec<Finding> {
    let ignored = |(path, source)| attributes(source, "#[ignore").map(move |line| (path, line));
    let finding = |(path, line)| Finding::new(path, line, "`#[ignore]`: a test that does not run");
    tree.rust_files().flat_map(ignored).map(finding).collect()
}

/// Crates whose texts reach users. The others hold tensors, or are tools.
const SPEAKING: [&str; 6] = [
    "crates/command/",
    "crates/run-plan/",
    "crates/planner/",
    "crates/trainer/",
    "crates/row-files/",
    "crates/dataloader/",
];

/// No message prints the debug form of a type of ours, which is Rust and not English. Shapes, dtypes and quoted text may have it; any other
/// use says why in a comment with the words "debug form".
pub fn messages_are_not_in_debug_form(tree: &Tree) -> Vec<Finding> {
    let is_code = |line: &str| !line.trim_start().starts_with("//");
    let is_excused = |lines: &[&str]| {
        let words = [
            "debug form",
            "Debug form",
            "shape",
            "dims()",
            "dtype",
            "lossy",
            "assert",
            "panic!",
            "unreachable!",
            "bail!",
        ];
        lines.iter().any(|line| words.iter().any(|word| line.contains(word)))
    };
    let mut findings = Vec::new();
    for (path, source) in tree.rust_files().filter(|(path, _)| SPEAKING.iter().any(|home| path.starts_with(home))) {
        if is_test_file(path) {
            continue;
        }
        let lines: Vec<&str> = before_tests(source).lines().collect();
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| is_code(line)) {
            let is_debug = line.contains(":?}") || line.contains(":#?}");
            if is_debug && !is_excused(&lines[at.saturating_sub(3)..(at + 3).min(lines.len())]) {
                findings.push(Finding::new(
                    path,
                    at + 1,
                    "prints a debug form; expected `Display`, or a comment with its reason",
                ));
            }
        }
    }
    findings
}

/// The part of `source` before its tests, which come last, in `#[cfg(test)] mod`.
pub fn before_tests(source: &str) -> &str {
    source.find("\n#[cfg(test)]\nmod ").map_or(source, |end| &source[..end])
}

/// Whether a file only contains tests.
pub fn is_test_file(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    ["tests.rs", "testing.rs"].contains(&name) || path.starts_with("tests/") || path.contains("/tests/")
}

/// Lines, counted from 1, that begin as an attribute and contain this word.
fn attributes<'a>(source: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_one = move |line: &str| line.trim_start().starts_with('#') && line.contains(word);
    source.lines().enumerate().filter(move |(_, line)| is_one(line)).map(|(at, _)| at + 1)
}

/// Lines, counted from 1, outside of comments, in which `code` begins a word.
fn lines_of_code<'a>(source: &'a str, code: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_identifier = |c: char| c.is_alphanumeric() || c == '_';
    let begins_here = move |line: &str| line.match_indices(code).any(|(at, _)| !line[..at].ends_with(is_identifier));
    let is_code = |line: &str| !line.trim_start().starts_with("//");
    source.lines().enumerate().filter(move |(_, line)| is_code(line) && begins_here(line)).map(|(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use super::super::check_file;
    use super::*;

    #[test]
    fn a_message_in_debug_form_is_found() {
        let found = |source: &str| {
            messages_are_not_in_debug_form(&Tree::from_files(&[("crates/command/src/a.rs", source)])).len()
        };
        assert_eq!(found("fn a() { format!(\"got {outcome:?}\"); }"), 1);
        assert_eq!(found("fn a() { format!(\"got {:?}\", x.dims()); }"), 0);
        assert_eq!(found("// The debug form is TOML.\nfn a() { format!(\"{number:?}\"); }"), 0);
        assert_eq!(found("fn a() {}\n\n#[cfg(test)]\nmod tests { fn b() { format!(\"{x:?}\"); } }"), 0);
    }

    #[test]
    fn unsafe_is_found_where_a_crate_allows_it_to_itself() {
        let rule = unsafe_is_allowed_in_its_crates_only;
        check_file(rule, "crates/heap/src/lib.rs", "#![allow(unsafe_code)]", &[]);
        check_file(rule, "crates/t5/src/lib.rs", "// no allow(unsafe_code) here\nlet s = \"allow(unsafe_code)\";", &[]);
        let found = [
            "crates/t5/src/lib.rs:1: allows `unsafe`, which is left to crates/heap/, crates/tensor-storage/, \
             crates/cuda-device/, crates/t5-ops/, crates/cuda-kernels/, crates/candle-kernels/, crates/fault-points/, crates/will-it-fit/",
        ];
        check_file(rule, "crates/t5/src/lib.rs", "#![allow(unsafe_code)]", &found);
    }

    #[test]
    fn a_module_without_documentation_is_found() {
        let rule = every_module_opens_with_its_documentation;
        check_file(rule, "a.rs", "//! A noun.\nfn f() {}", &[]);
        check_file(rule, "a.rs", "fn f() {}", &["a.rs:1: expected the module's documentation, `//! ...`"]);
        check_file(rule, "src/noun/tests.rs", "use super::*;", &[]);
        check_file(rule, "a.py", "pass", &[]);
    }

    #[test]
    fn a_long_file_is_found() {
        check_file(files_fit_the_length_limit, "a.rs", &"\n".repeat(700), &[]);
        check_file(
            files_fit_the_length_limit,
            "a.rs",
            &"\n".repeat(701),
            &["a.rs: expected at most 700 lines, got 701"],
        );
    }

    #[test]
    fn an_empty_name_is_found_in_directories_and_compounds() {
        let rule = files_are_named_for_what_they_hold;
        check_file(rule, "crates/t5/src/commonly.rs", "", &[]);
        check_file(rule, "src/string_utils.rs", "", &["src/string_utils.rs: `utils` does not say what is in it"]);
        check_file(rule, "tests/common/mod.rs", "", &["tests/common/mod.rs: `common` does not say what is in it"]);
    }

    #[test]
    fn a_file_that_is_used_by_its_path_is_found_in_sources_and_not_in_tests() {
        let rule = files_are_changed_by_durable_files_only;
        let path = "crates/a/src/lib.rs";
        let found = ["crates/a/src/lib.rs:1: `fs::write` uses a file by its path; use `durable-files`"];
        check_file(rule, path, "std::fs::write(path, text)?;", &found);
        check_file(rule, path, "durable_files::write_atomic(path, text)?;", &[]);
        let opened = ["crates/a/src/lib.rs:1: `File::open` uses a file by its path; use `regular-file`"];
        check_file(rule, path, "File::open(path)?;", &opened);
        check_file(rule, path, "regular_file::open(path)?; fs::read_to_string(\"/proc/self/maps\")", &[]);
        let listed = "directory.read_dir(); std::fs::canonicalize(path); std::fs::read_link(path); \
                      std::fs::metadata(path); path.symlink_metadata()";
        assert_eq!(rule(&Tree::from_files(&[(path, listed)])).len(), 5);
        check_file(
            rule,
            path,
            "regular_file::list(path)?; regular_file::metadata(path)?; file.metadata()?; std::fs::read_dir(\"/sys/devices\")",
            &[],
        );
        check_file(rule, path, "AtomicFile::create(path)?;", &[]);
        check_file(rule, path, "\n#[cfg(test)]\nmod tests { fn f() { std::fs::write(a, b); } }", &[]);
        check_file(rule, "crates/a/src/tests.rs", "std::fs::write(path, text)?;", &[]);
        check_file(rule, "crates/a/tests/all.rs", "std::fs::write(path, text)?;", &[]);
        check_file(rule, "crates/durable-files/src/x.rs", "flock(file);", &[]);
        let calls = "File::create(p); File::create_new(p); fs::remove_dir_all(p); OpenOptions::new(); flock(f)";
        assert_eq!(rule(&Tree::from_files(&[(path, calls)])).len(), 5);
    }

    #[test]
    fn text_that_is_shown_elsewhere_is_found() {
        let rule = text_is_shown_in_one_place;
        let found = ["crates/a/src/lib.rs:1: `println!(`: use `report`, which makes text of others safe"];
        check_file(rule, "crates/a/src/lib.rs", "println!(\"{row}\");", &found);
        check_file(rule, "crates/a/src/lib.rs", "//! println!(\"{row}\");\nwriteln!(text)", &[]);
        check_file(rule, "crates/command/src/screen/report.rs", "std::io::stdout().lock()", &[]);
        assert_eq!(
            rule(&Tree::from_files(&[("crates/a/src/lib.rs", "std::io::stdout().lock().write_all(b);")])).len(),
            1
        );
    }

    #[test]
    fn an_ignored_test_is_found() {
        let rule = no_test_is_ignored;
        check_file(rule, "a.rs", "#[ignore = \"slow\"]\nfn f() {}", &["a.rs:1: `#[ignore]`: a test that does not run"]);
        check_file(rule, "a.rs", "// no #[ignore] here\nfn f() {}", &[]);
    }
}
