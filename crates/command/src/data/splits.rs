//! Splits of a data set: which files of a directory or glob are for training, for validation and for tests, by the names that Hugging Face
//! data sets have.
//!
//! A name's words decide: `train`, `validation`, `valid`, `val`, `dev`, `eval` and `test`, in the file's name or else in that of a directory
//! below the one that was named, as in `train-00000-of-00002.parquet`. Only a group of files is divided, and only if its names tell them
//! apart: a file that was named itself is what the user wants it to be.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Outcome};

/// A part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Split {
    /// Rows to train on.
    Train,
    /// Rows for evaluations of a run.
    Validation,
    /// Rows that a run leaves alone.
    Test,
}

impl Split {
    /// The split's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        }
    }

    /// The split that a file's path below the named directory tells.
    pub fn from_path(path: &Path) -> Option<Self> {
        let names = path.components().rev().map(|part| part.as_os_str().to_string_lossy().to_lowercase());
        names.into_iter().find_map(|name| name.split(|c: char| !c.is_alphanumeric()).find_map(Self::of_word))
    }

    fn of_word(word: &str) -> Option<Self> {
        match word.trim_end_matches(|c: char| c.is_ascii_digit()) {
            "train" | "training" => Some(Self::Train),
            "validation" | "valid" | "val" | "dev" | "eval" | "evaluation" => Some(Self::Validation),
            "test" | "testing" => Some(Self::Test),
            _ => None,
        }
    }
}

/// Files that one pattern names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The pattern, as it was typed.
    pub pattern: String,
    /// The directory below which names count, if the files are a group; `None` for a file that was named itself.
    pub below: Option<PathBuf>,
    /// The files.
    pub files: Vec<PathBuf>,
}

/// Files by their use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Divided {
    /// The files that were asked for.
    pub wanted: Vec<PathBuf>,
    /// Files of the same groups for validation, if training files were asked for.
    pub validation: Vec<PathBuf>,
    /// Files of the same groups that are left alone.
    pub left: Vec<PathBuf>,
}

/// What the files are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// `data.train`.
    Training,
    /// `data.validation`.
    Validation,
    /// Scores of a finished model: validation or test.
    Scores,
}

/// A file of another split among training files that were named one by one, as a shell names those of a pattern.
pub fn trains_on(groups: &[Group]) -> Option<&Path> {
    let named = || groups.iter().filter(|group| group.below.is_none()).flat_map(|group| &group.files);
    let split = |file: &&PathBuf| file.file_name().and_then(|name| Split::from_path(Path::new(name)));
    let has_training = named().any(|file| split(&file) == Some(Split::Train));
    let other = |file: &&PathBuf| matches!(split(file), Some(Split::Validation | Split::Test));
    named().find(other).filter(|_| has_training).map(PathBuf::as_path)
}

/// Divides groups of files.
///
/// # Errors
/// The names of a group leave open which files are meant, or no file of a group is.
pub fn divide(groups: Vec<Group>, purpose: Purpose, flag: &str) -> Outcome<Divided> {
    let mut divided = Divided::default();
    for Group { pattern, below, files } in groups {
        if below.as_ref().is_some_and(|below| below.join("resolved.toml").exists()) {
            return Err(Failure::usage(format!("`{pattern}`: is the directory of a run, expected files with rows"))
                .hint(format!("to start from its model: `--model {pattern}`"))
                .hint("its resolved.toml names the rows that it was trained on"));
        }
        let split =
            |file: &Path| below.as_deref().and_then(|below| Split::from_path(file.strip_prefix(below).unwrap_or(file)));
        let found: BTreeSet<Option<Split>> = files.iter().map(|file| split(file)).collect();
        if found.len() < 2 {
            divided.wanted.extend(files);
            continue;
        }
        let has = |wanted: Option<Split>| found.contains(&wanted);
        let one =
            |of: Option<Split>| files.iter().find(|file| split(file) == of).map(|file| file.display().to_string());
        let wanted = match purpose {
            Purpose::Training if has(Some(Split::Train)) && has(None) => {
                let (train, other) = (one(Some(Split::Train)), one(None));
                return Err(Failure::usage(format!(
                    "`{pattern}`: has files of a split, such as {}, and others, such as {}",
                    train.clone().unwrap_or_default(),
                    other.clone().unwrap_or_default()
                ))
                .hint(format!("to train on the split alone: `{flag}{}`", train.unwrap_or_default()))
                .hint(format!("to train on other files too, name each: `{flag}{}`", other.unwrap_or_default())));
            }
            Purpose::Training if has(Some(Split::Train)) => Some(Split::Train),
            Purpose::Validation | Purpose::Scores if has(Some(Split::Validation)) => {
                if let (Purpose::Scores, Some(test)) = (purpose, one(Some(Split::Test))) {
                    return Err(Failure::usage(format!("`{pattern}`: has files for validation and for tests"))
                        .hint(format!("validation: `{flag}{}`", one(Some(Split::Validation)).unwrap_or_default()))
                        .hint(format!("test: `{flag}{test}`")));
                }
                Some(Split::Validation)
            }
            Purpose::Scores if has(Some(Split::Test)) => Some(Split::Test),
            _ if has(None) => None,
            _ => {
                let names: Vec<&str> = found.iter().flatten().map(|split| split.name()).collect();
                return Err(Failure::unusable(format!("`{pattern}`: has only files for {}", names.join(" and ")))
                    .hint(format!("name the files to use: `{flag}{}`", files[0].display())));
            }
        };
        for file in files {
            let of = split(&file);
            let place = match of {
                of if of == wanted => &mut divided.wanted,
                Some(Split::Validation) if purpose == Purpose::Training => &mut divided.validation,
                _ => &mut divided.left,
            };
            place.push(file);
        }
    }
    Ok(divided)
}

/// One line for people: the files that are left alone.
pub fn left_in_words(left: &[PathBuf]) -> String {
    const SHOWN: usize = 4;
    let names: Vec<String> = left.iter().take(SHOWN).map(|path| path.display().to_string()).collect();
    let more = left.len().saturating_sub(SHOWN);
    let others = if more > 0 { format!(" and {more} more") } else { String::new() };
    let name = if left.len() == 1 { "its name" } else { "their names" };
    format!("left alone, by {name}: {}{others}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(names: &[&str]) -> Vec<Group> {
        let files = names.iter().map(|name| Path::new("test/rows").join(name)).collect();
        vec![Group { pattern: "test/rows".to_owned(), below: Some("test/rows".into()), files }]
    }

    #[track_caller]
    fn check(names: &[&str], purpose: Purpose, expected: [&[&str]; 3]) {
        let divided = divide(group(names), purpose, "--data ").unwrap();
        let of = |files: &[PathBuf]| -> Vec<String> {
            files.iter().map(|file| file.strip_prefix("test/rows").unwrap().display().to_string()).collect()
        };
        assert_eq!([of(&divided.wanted), of(&divided.validation), of(&divided.left)], expected.map(|of| of.to_vec()));
    }

    #[test]
    fn files_that_a_shell_named_are_all_trained_on_which_is_said() {
        let named = |names: &[&str]| -> Vec<Group> {
            let one = |name: &&str| Group { pattern: (*name).to_owned(), below: None, files: vec![(*name).into()] };
            names.iter().map(one).collect()
        };
        let found = |names: &[&str]| trains_on(&named(names)).map(|file| file.display().to_string());
        assert_eq!(found(&["r/test.csv", "r/train.csv"]).as_deref(), Some("r/test.csv"));
        assert_eq!(found(&["r/train-1.csv", "r/validation.csv"]).as_deref(), Some("r/validation.csv"));
        assert_eq!(found(&["test/train.csv", "test/more.csv"]), None);
        assert_eq!(found(&["r/test.csv"]), None, "it was meant");
        assert_eq!(trains_on(&group(&["test.csv", "train.csv"])), None);
    }

    #[test]
    fn the_names_of_hugging_face_splits_divide_a_directory() {
        let hub = [
            "data/test-00000-of-00001.parquet",
            "data/train-00000-of-00002.parquet",
            "data/validation-00000-of-00001.parquet",
        ];
        check(&hub, Purpose::Training, [&hub[1..2], &hub[2..], &hub[..1]]);
        check(&hub, Purpose::Validation, [&hub[2..], &[], &hub[..2]]);
        check(&["dev.jsonl", "train.jsonl"], Purpose::Training, [&["train.jsonl"], &["dev.jsonl"], &[]]);
        check(&["rows.csv", "my_test.csv"], Purpose::Training, [&["rows.csv"], &[], &["my_test.csv"]]);
        check(
            &["train/0.parquet", "valid/0.parquet"],
            Purpose::Training,
            [&["train/0.parquet"], &["valid/0.parquet"], &[]],
        );
        check(&["a.test.jsonl", "train1.jsonl"], Purpose::Scores, [&["a.test.jsonl"], &[], &["train1.jsonl"]]);
    }

    #[test]
    fn names_that_do_not_tell_files_apart_divide_nothing() {
        check(&["a.jsonl", "b.jsonl"], Purpose::Training, [&["a.jsonl", "b.jsonl"], &[], &[]]);
        check(&["test.jsonl"], Purpose::Training, [&["test.jsonl"], &[], &[]]);
        check(&["latest.jsonl", "contest.jsonl"], Purpose::Training, [&["latest.jsonl", "contest.jsonl"], &[], &[]]);
        let named = Group { pattern: "test.jsonl".to_owned(), below: None, files: vec!["test.jsonl".into()] };
        assert_eq!(divide(vec![named], Purpose::Training, "").unwrap().wanted, [Path::new("test.jsonl")]);
    }

    #[test]
    fn two_meanings_are_refused_with_a_command_for_each() {
        for (names, purpose, expected) in [
            (["train.jsonl", "rows.jsonl"], Purpose::Training, "--data test/rows/rows.jsonl"),
            (["dev.jsonl", "test.jsonl"], Purpose::Scores, "--data test/rows/test.jsonl"),
            (["dev.jsonl", "test.jsonl"], Purpose::Training, "only files for validation and test"),
        ] {
            let failure = divide(group(&names), purpose, "--data ").unwrap_err().to_string();
            assert!(failure.contains(expected), "{names:?}: {failure}");
        }
    }
}
