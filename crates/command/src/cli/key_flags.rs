//! Flags of `train` and `plan` that set a key: the shown ones, and the names that other trainers have for it.
//!
//! A flag of a list may be repeated, has one value or several, and all of them add up. Any other flag is given once, by one of its names.

use std::ffi::OsString;

use clap::builder::OsStringValueParser;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::config::aliases::{ALIASES, Here};
use crate::config::keys::{self, Kind};
use crate::config::{Values, paths};
use crate::failure::{Failure, Outcome};

/// A flag with its key and its words, as typed.
#[derive(Clone, Debug)]
pub struct Typed {
    flag: String,
    key: &'static str,
    words: Vec<String>,
}

impl Typed {
    /// A flag that was given these words; `None` if it was not given.
    pub fn new<'a>(flag: &str, key: &'static str, words: impl IntoIterator<Item = &'a String>) -> Option<Typed> {
        let words: Vec<String> = words.into_iter().cloned().collect();
        (!words.is_empty()).then(|| Typed { flag: flag.to_owned(), key, words })
    }

    /// Whether the flag sets this key.
    pub fn sets(&self, key: &str) -> bool {
        self.key == key
    }
}

/// The flags that have a name of another trainer.
#[derive(Clone, Debug, Default)]
pub struct OtherNames {
    given: Vec<Typed>,
}

impl OtherNames {
    /// The given flags.
    pub fn given(&self) -> impl Iterator<Item = Typed> {
        self.given.iter().cloned()
    }
}

/// Sets the keys of these flags.
///
/// # Errors
/// Every wrong value, or two flags for one key that is no list.
pub fn apply(flags: impl IntoIterator<Item = Typed>, values: &mut Values) -> Outcome<()> {
    let mut of_keys: Vec<Typed> = Vec::new();
    for typed in flags {
        match of_keys.iter_mut().find(|earlier| earlier.key == typed.key) {
            None => of_keys.push(typed),
            Some(earlier) if is_list(typed.key) => earlier.words.extend(typed.words),
            Some(Typed { flag, key, .. }) => {
                return Err(
                    Failure::usage(format!("{flag} and {} both set `{key}`", typed.flag)).hint("give one of them")
                );
            }
        }
    }
    let wrong = of_keys.iter().filter_map(|Typed { flag, key, words }| values.apply_flag(flag, key, words).err());
    wrong.reduce(Failure::and).map_or(Ok(()), Err)
}

/// Sets the keys of every `--set`.
///
/// # Errors
/// A wrong value, or a key that is set twice.
pub fn apply_assignments(assignments: &[String], values: &mut Values) -> Outcome<()> {
    let key = |assignment: &str| assignment.split('=').next().unwrap_or_default().trim().to_owned();
    for (place, assignment) in assignments.iter().enumerate() {
        let name = key(assignment);
        if assignments[..place].iter().any(|earlier| key(earlier) == name) {
            let failure = Failure::usage(format!("--set: `{name}` is set twice, and one value would be lost"));
            return Err(if is_list(&name) {
                failure.hint(format!("name all values at once: `--set '{name}=[\"A\", \"B\"]'`"))
            } else {
                failure.hint("leave one of them out")
            });
        }
        values.apply_assignment(assignment)?;
    }
    Ok(())
}

fn is_list(key: &str) -> bool {
    keys::find(key).is_some_and(|key| matches!(key.kind, Kind::Paths | Kind::Parts | Kind::Words(_) | Kind::Metrics))
}

/// The names of the table that set a key, with `-` between their words.
fn names() -> impl Iterator<Item = (String, &'static str)> {
    ALIASES.iter().filter_map(|(name, here)| match here {
        Here::Key(key) => Some((name.replace('_', "-"), *key)),
        Here::Said(_) => None,
    })
}

impl Args for OtherNames {
    fn augment_args(command: Command) -> Command {
        let is_new = |name: &str| {
            command.get_arguments().all(|argument| {
                argument.get_long() != Some(name) && !argument.get_all_aliases().unwrap_or_default().contains(&name)
            })
        };
        let arguments: Vec<Arg> =
            names().filter(|(name, _)| is_new(name)).map(|(name, key)| argument(name, key)).collect();
        command.args(arguments)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn argument(name: String, key: &'static str) -> Arg {
    let id: &'static str = format!("other-{name}").leak();
    let argument = Arg::new(id).long(&*name.leak()).hide(true).value_parser(OsStringValueParser::new());
    match keys::find(key).map(|key| key.kind) {
        _ if is_list(key) => argument.action(ArgAction::Append).num_args(1..),
        Some(Kind::Switch) => argument.action(ArgAction::Set).num_args(0..=1).default_missing_value("true"),
        _ => argument.action(ArgAction::Set),
    }
}

impl FromArgMatches for OtherNames {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let typed = |(name, key): (String, &'static str)| {
            let words = matches.try_get_many::<OsString>(&format!("other-{name}")).ok()??;
            let words: Vec<String> = words.map(|word| paths::to_text(word)).collect();
            Typed::new(&format!("--{name}"), key, &words)
        };
        Ok(Self { given: names().filter_map(typed).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
