//! `train_low_mem report`: a run as an HTML page, or several runs side by side.

use std::path::{Path, PathBuf};

use memory_policy::Bytes;
use run_report::{Run, page};

use crate::cli::view_flags::ReportArgs;
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::files::run_dir::{self, PAGE, RESOLVED, RunDir};
use crate::screen::report::result;

/// The most bytes of a config that are read; a page shows less.
const MAX_SHOWN_BYTES: u64 = 1 << 20;

/// Reads the runs' files and writes the page.
pub fn report(flags: &ReportArgs) -> Outcome<()> {
    if flags.runs.len() > page::MAX_RUNS {
        let most = page::MAX_RUNS;
        return Err(Failure::usage(format!("report: expected at most {most} runs, got {}", flags.runs.len()))
            .hint("make a page for each group of runs that you want to compare"));
    }
    // A shell's pattern names the logs beside the runs as well.
    let is_run = |root: &&PathBuf| flags.runs.len() == 1 || !root.is_file();
    let mut runs = flags.runs.iter().filter(is_run).map(|root| read(root)).collect::<Outcome<Vec<Run>>>()?;
    let names: Vec<String> = runs.iter().map(|run| run.name().to_owned()).collect();
    runs.iter_mut().zip(apart(&names)).for_each(|(run, name)| run.set_name(name));
    let (html, default) = match (runs.as_slice(), flags.runs.as_slice()) {
        ([run], [root]) => (page::of_run(run), root.join(PAGE)),
        (runs, _) => (page::of_runs(runs), PathBuf::from(PAGE)),
    };
    let path = flags.output.clone().unwrap_or(default);
    write_page(&path, &html)?;
    result(&format!("wrote {} ({})\n", path.display(), Bytes(html.len() as u64)))
}

/// The names of several runs without the directories that all of them share.
fn apart(names: &[String]) -> impl Iterator<Item = &str> {
    let first = names.first().map_or("", String::as_str);
    let is_shared = |end: &usize| names.len() > 1 && names.iter().all(|name| name.starts_with(&first[..*end]));
    let shared = first.rmatch_indices('/').map(|(at, _)| at + 1).find(is_shared).unwrap_or(0);
    names.iter().map(move |name| &name[shared..])
}

/// Reads the run in this directory.
pub fn read(root: &Path) -> Outcome<Run> {
    let metrics = RunDir::open_read_only(root).metrics();
    let mut run = run_report::read(&metrics, &root.display().to_string()).map_err(|error| {
        Failure::unusable(error.to_string())
            .hint("a run is the directory that `--output` named; its metrics.jsonl is written from the start on")
    })?;
    let config = run_dir::read(root, RESOLVED, MAX_SHOWN_BYTES).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    config.iter().for_each(|config| run.set_config(config));
    Ok(run)
}

/// Writes a page. Replaces an existing file only if this program wrote it.
pub fn write_page(path: &Path, html: &str) -> Outcome<()> {
    let is_ours = |text: &[u8]| text.windows(MARK.len()).take(4096).any(|window| window == MARK);
    match regular_file::read(path, page::MAX_BYTES as u64) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Ok(text) if is_ours(&text) => {}
        Err(error) if error.kind() != std::io::ErrorKind::FileTooLarge => {
            return Err(Failure::usage(format!("{}: {error}", path.display())).hint("name another file"));
        }
        _ => {
            return Err(Failure::usage(format!("{}: exists, and was not made by this command", path.display()))
                .hint("name another file, or remove this one"));
        }
    }
    outputs::remove_leftovers_beside(path);
    Ok(durable_files::write_atomic(path, html.as_bytes())?)
}

/// A line in the head of every page.
const MARK: &[u8] = br#"<meta name="generator" content="train_low_mem">"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_runs_leave_out_what_they_share() {
        let check = |names: &[&str], expected: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            assert_eq!(apart(&names).collect::<Vec<_>>(), expected);
        };
        check(&["runs/sweep/a", "runs/sweep/ab"], &["a", "ab"]);
        check(&["runs/a", "b"], &["runs/a", "b"]);
        check(&["runs/a"], &["runs/a"]);
        check(&["x/a/1", "x/b/1"], &["a/1", "b/1"]);
    }
}
