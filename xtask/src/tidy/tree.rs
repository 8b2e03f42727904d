//! The tree: every text file of the repository, by its path from the root.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Every text file of the repository, by its path from the root with forward slashes.
///
/// Files that git ignores and files that are not UTF-8 are excluded.
#[derive(Debug, Default)]
pub struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    /// Reads the repository at `root`: files that git tracks or would track. Without git, all files except build
    /// outputs.
    pub fn read(root: &Path) -> Result<Self, String> {
        let paths = match tracked(root) {
            Some(paths) => paths,
            None => {
                let mut paths = Vec::new();
                walk(root, root, &mut paths).map_err(|error| format!("{}: cannot be read: {error}", root.display()))?;
                paths
            }
        };
        // A tracked file may have been deleted from disk, but not yet from the index.
        let read = |path: String| Some((fs::read_to_string(root.join(&path)).ok()?, path));
        let files = paths.into_iter().filter_map(read).map(|(text, path)| (path, text)).collect();
        Ok(Self { files })
    }

    /// A tree of these files, for tests of rules.
    #[cfg(test)]
    pub fn from_files(files: &[(&str, &str)]) -> Self {
        let files = files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect();
        Self { files }
    }

    /// The number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// One file's text.
    pub fn get(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// Whether there is such a file, or a directory with files in it.
    pub fn has(&self, path: &str) -> bool {
        let directory = format!("{}/", path.trim_end_matches('/'));
        let first = self.files.range(directory.clone()..).next();
        self.files.contains_key(path) || first.is_some_and(|(path, _)| path.starts_with(&directory))
    }

    /// Path and text of every file.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Path and text of every Rust file.
    pub fn rust_files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files().filter(|(path, _)| path.ends_with(".rs"))
    }
}

/// The files that git tracks or would track if they were added.
fn tracked(root: &Path) -> Option<Vec<String>> {
    let list = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").arg("-C").arg(root).args(list).output().ok()?;
    let text = output.status.success().then(|| String::from_utf8(output.stdout).ok())??;
    Some(text.split('\0').filter(|path| !path.is_empty()).map(str::to_string).collect())
}

/// Every file below `directory` that is not a build output or git's own.
fn walk(root: &Path, directory: &Path, paths: &mut Vec<String>) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if !["target", ".git"].iter().any(|name| entry.file_name() == *name) {
                walk(root, &path, paths)?;
            }
        } else if let Some(path) = path.strip_prefix(root).ok().and_then(Path::to_str) {
            paths.push(path.replace('\\', "/"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_there_when_a_file_in_it_is() {
        let tree = Tree::from_files(&[("crates/t5/src/lib.rs", ""), ("crates/t5-ops/src/lib.rs", "")]);
        let check = |path: &str, expected: bool| assert_eq!(tree.has(path), expected, "{path}");
        check("crates", true);
        check("crates/t5/", true);
        check("crates/t5/src/lib.rs", true);
        check("crates/t", false);
        check("crates/t5/src/li", false);
        check("docs", false);
    }

    #[test]
    fn with_and_without_git_the_same_sources_are_found() {
        let mut walked = Vec::new();
        let root = crate::root();
        walk(root, &root.join("xtask/src"), &mut walked).unwrap();
        let tree = Tree::read(root).unwrap();
        assert!(walked.iter().any(|path| path == "xtask/src/tidy.rs"), "{walked:?}");
        assert!(walked.iter().all(|path| tree.has(path)), "{walked:?}");
    }
}
