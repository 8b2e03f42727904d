//! Finds the files that a list of paths, directories and globs names.

use std::path::{Path, PathBuf};

use memory_policy::plural;

use crate::config::paths;
use crate::data::splits::{Group, Split};
use crate::failure::{Failure, Outcome};
use crate::screen::shell_words;

/// The files of a list of paths and globs, in the list's order; the files of a glob are sorted by name.
pub fn files(key: &str, patterns: &[String]) -> Outcome<Vec<PathBuf>> {
    Ok(groups(key, patterns)?.into_iter().flat_map(|group| group.files).collect())
}

/// The files of each path or glob of a list. A pattern that names an existing file is that file, even if it has special characters.
pub fn groups(key: &str, patterns: &[String]) -> Outcome<Vec<Group>> {
    let mut groups = Vec::with_capacity(patterns.len());
    for pattern in patterns {
        let path = paths::from_text(pattern);
        let mut group = |below, files| groups.push(Group { pattern: pattern.clone(), below, files });
        if path.is_dir() {
            let files = files_of(key, &path)?;
            group(Some(path), files);
            continue;
        }
        if path.exists() {
            group(None, vec![path]);
            continue;
        }
        if let Some((scheme, _)) = pattern.split_once("://").filter(|(scheme, _)| !scheme.contains(['/', '.'])) {
            let fetch = match scheme {
                "hf" => "`hf download --repo-type dataset ID --local-dir rows`, then `--data rows`".to_owned(),
                "http" | "https" => format!("`curl -LO {pattern}`, then name the file"),
                _ => "name a file of this machine".to_owned(),
            };
            return Err(Failure::usage(format!("`{key}`: `{pattern}`: nothing is fetched from a network"))
                .hint(format!("fetch it first: {fetch}")));
        }
        let matches = glob::glob(pattern).map_err(|error| {
            Failure::usage(format!("`{key}`: `{pattern}` is neither a file nor a glob: {}", error.msg))
                .hint("a glob looks like `rows/train-*.parquet`")
        })?;
        let files: Vec<PathBuf> = matches.filter_map(Result::ok).filter(|path| path.is_file()).collect();
        if files.is_empty() {
            let here = std::env::current_dir().map_or_else(|_| ".".to_string(), |path| path.display().to_string());
            return Err(Failure::unusable(format!("`{key}`: no file matches `{pattern}`"))
                .hint(format!("paths are relative to the directory where the command runs: {here}")));
        }
        let is_fixed = |part: &std::path::Component<'_>| !part.as_os_str().to_string_lossy().contains(['*', '?', '[']);
        group(Some(path.components().take_while(is_fixed).collect()), files);
    }
    Ok(groups)
}

/// Files that Hugging Face datasets store beside their rows.
const ABOUT_ROWS: [&str; 4] = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// The files of a directory that may hold rows, sorted by name; also those in `data` and in directories with the name of a split, as Hugging
/// Face datasets lie. Hidden files, other directories and [`ABOUT_ROWS`] are left out.
fn files_of(key: &str, directory: &Path) -> Outcome<Vec<PathBuf>> {
    let (mut found, others) = listed(directory)?;
    let mut more = Vec::new();
    for path in others {
        let name = path.file_name().map(Path::new).unwrap_or(&path);
        let (files, _) = listed(&path)?;
        match name == Path::new("data") || Split::from_path(name).is_some() {
            true => found.extend(files),
            false if !files.is_empty() => more.push(path),
            false => {}
        }
    }
    if let (true, Some(first)) = (found.is_empty(), more.first()) {
        return Err(Failure::unusable(format!(
            "`{key}`: no file with rows in the directory {}, but in {} below it",
            directory.display(),
            plural(more.len() as u64, "directory")
        ))
        .hint(format!("name the one to read: `{}`", first.display())));
    }
    if found.is_empty() {
        let endings = row_files::FILE_EXTENSIONS.join(", .");
        return Err(Failure::unusable(format!("`{key}`: no file with rows in the directory {}", directory.display()))
            .with_hint(way_to_rows(directory)?)
            .hint(format!("expected files that end in .{endings}, plain, .gz or .zst")));
    }
    found.sort();
    Ok(found)
}

/// The command that makes rows of a directory in another layout: of `datasets.save_to_disk`, or of texts in directories of their labels.
fn way_to_rows(directory: &Path) -> Outcome<Option<String>> {
    let (_, directories) = listed(directory)?;
    let name = |path: &Path| path.file_name().map(PathBuf::from).unwrap_or_default();
    if let Some(train) = directories.iter().find(|path| Split::from_path(&name(path)) == Some(Split::Train)) {
        return way_to_rows(train);
    }
    let has = |directory: &Path, wanted: &str| -> Outcome<bool> {
        let failed = |error| Failure::io("list it", directory, &error);
        let mut paths = regular_file::list(directory).map_err(failed)?;
        Ok(paths.any(|path| path.is_ok_and(|path| path.extension().is_some_and(|extension| extension == wanted))))
    };
    let quoted = shell_words::quoted(directory);
    if has(directory, "arrow")? {
        let load = "from datasets import load_from_disk as l; import sys; l(sys.argv[1]).to_parquet(sys.argv[2])";
        return Ok(Some(format!(
            "`datasets` wrote it as Arrow; as parquet: `python3 -c '{load}' {quoted} rows.parquet`"
        )));
    }
    let texts = directories.iter().map(|directory| has(directory, "txt")).collect::<Outcome<Vec<bool>>>()?;
    let label = "--arg l \"$(basename \"$(dirname \"$file\")\")\" '{text: ., label: $l}'";
    Ok((texts.iter().filter(|has| **has).count() > 1).then(|| {
        format!(
            "texts in directories of their labels become rows by `for file in {quoted}/*/*.txt; do jq -Rsc {label} \"$file\"; done > rows.jsonl`"
        )
    }))
}

/// The files of a directory that may hold rows, and its directories; hidden ones are left out.
fn listed(directory: &Path) -> Outcome<(Vec<PathBuf>, Vec<PathBuf>)> {
    let failed = |error| Failure::io("list it", directory, &error);
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    for path in regular_file::list(directory).map_err(failed)? {
        let path = path.map_err(failed)?;
        let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let may_hold_rows =
            row_files::extension(&path).is_some_and(|extension| row_files::FILE_EXTENSIONS.contains(&&*extension));
        let is_about_rows = path.file_name().is_some_and(|name| ABOUT_ROWS.iter().any(|about| name == *about));
        if is_hidden || is_about_rows {
            continue;
        }
        if path.is_dir() {
            directories.push(path);
        } else if may_hold_rows && path.is_file() {
            files.push(path);
        }
    }
    directories.sort();
    Ok((files, directories))
}
