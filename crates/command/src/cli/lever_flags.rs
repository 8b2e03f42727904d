//! The flags of `bench` for levers, read from the planner's table.

use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser, ValueParser};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use memory_policy::MemorySpace;
use planner::{Flag, LEVERS, Lever, Pins, Takes, Value, Values};

use crate::failure::{Failure, Outcome};

/// Levers that were set on the command line, and the directories for their files.
#[derive(Clone, Debug, Default)]
pub struct LeverFlags {
    /// The named values.
    pins: Pins,
    /// The given directories, with their flags.
    directories: Vec<(&'static str, PathBuf)>,
}

impl LeverFlags {
    /// The given values. With a place, also the usual values of the other levers there: so a measurement of one lever leaves the others
    /// unchanged.
    pub fn pins(&self, usual_at: Option<MemorySpace>) -> Pins {
        let Some(place) = usual_at else { return self.pins.clone() };
        let others = flags().filter(|(lever, _)| self.pins.value(lever.name).is_none());
        others.fold(self.pins.clone(), |pins, (lever, flag)| match (flag.usual)(&self.pins, place) {
            Some(value) => pins.with(lever.name, value),
            None => pins,
        })
    }

    /// The directory for files: the first given one. The system's own temporary directory is in memory on many machines.
    pub fn directory(&self) -> &Path {
        self.directories.first().map_or(Path::new("."), |(_, directory)| directory)
    }

    /// Refuses a given directory in which no file can be made.
    ///
    /// # Errors
    /// Exit 2.
    pub fn check_directories(&self) -> Outcome<()> {
        self.directories.iter().try_for_each(|(flag, directory)| {
            heap::anonymous_file(directory).map(drop).map_err(|error| {
                let (shown, flag) = (directory.display(), format!("`--{flag}`"));
                Failure::usage(format!("{flag}: `{shown}`: expected a directory to make files in, got: {error}"))
                    .hint(format!("make that directory, or give {flag} another one that can be written to"))
            })
        })
    }

    fn read(&mut self, matches: &ArgMatches) {
        for (lever, flag) in flags() {
            let value = match flag.takes {
                Takes::Value(_) => matches.get_one::<Value>(lever.name).copied(),
                Takes::Nothing => matches.get_flag(lever.name).then(|| lever.values.last()).flatten(),
                Takes::Directory => matches.get_one::<PathBuf>(lever.name).and_then(|directory| {
                    self.directories.push((flag.long, directory.clone()));
                    lever.values.last()
                }),
            };
            if let Some(value) = value {
                self.pins = std::mem::take(&mut self.pins).with(lever.name, value);
            }
        }
    }
}

fn flags() -> impl Iterator<Item = (&'static Lever, Flag)> {
    LEVERS.iter().filter_map(|lever| lever.flag.map(|flag| (*lever, flag)))
}

impl Args for LeverFlags {
    fn augment_args(command: Command) -> Command {
        flags().fold(command, |command, (lever, flag)| {
            let arg = Arg::new(lever.name).long(flag.long).help(flag.help);
            command.arg(match flag.takes {
                Takes::Value(name) => arg.value_name(name).value_parser(value(lever.values)),
                Takes::Nothing => arg.action(ArgAction::SetTrue),
                Takes::Directory => arg.value_name("DIR").value_parser(ValueParser::path_buf()),
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// The parser of these values.
fn value(values: Values) -> ValueParser {
    match values {
        Values::Words(words) => {
            let word = move |text: String| values.word(&text).ok_or("not one of the words");
            ValueParser::new(PossibleValuesParser::new(words).try_map(word))
        }
        Values::Count(least, _) => ValueParser::new(move |text: &str| match text.parse::<usize>() {
            Ok(count) => Ok(Value::Count(count.max(least))),
            Err(_) => Err("expected a whole number"),
        }),
        Values::Blocks(_) => ValueParser::new(|text: &str| match text {
            "none" => Ok(Value::Count(0)),
            "full" => Ok(Value::Count(usize::MAX)),
            number => number.parse().map(Value::Count).map_err(|_| "expected none, full or a number of blocks"),
        }),
    }
}

impl FromArgMatches for LeverFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.read(matches);
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.read(matches);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(flags: &[&str]) -> Result<LeverFlags, clap::Error> {
        let command = LeverFlags::augment_args(Command::new("bench"));
        let matches = command.try_get_matches_from(std::iter::once(&"bench").chain(flags))?;
        LeverFlags::from_arg_matches(&matches)
    }

    #[test]
    fn a_flag_pins_its_lever_and_the_others_have_their_usual_values_only_where_nobody_chooses() {
        let flags = read(&["--offload-weights", "there", "--keep-heads", "--micro-batch", "4"]).unwrap();
        assert_eq!(flags.directory(), Path::new("there"));
        let pins = flags.pins(None);
        assert_eq!(pins.value("weight_offload"), Some(Value::Word("disk")));
        assert_eq!(
            (pins.value("attention_heads"), pins.count("micro_batch_samples")),
            (Some(Value::Word("keep")), Some(4))
        );
        assert_eq!(pins.value("gradient_offload"), None);
        let on_card = flags.pins(Some(MemorySpace::Device)).count("loss_chunk_rows");
        assert_eq!(on_card, Some(1024), "what the planner takes there with an ample budget");
        let pins = flags.pins(Some(MemorySpace::Host));
        assert_eq!(
            (pins.value("gradient_offload"), pins.count("loss_chunk_rows")),
            (Some(Value::Word("none")), Some(256))
        );
        assert_eq!(pins.value("weight_offload"), Some(Value::Word("disk")));
    }

    #[test]
    fn blocks_are_none_all_or_a_number_and_layer_by_layer_all_is_usual() {
        let blocks = |flags: &[&str]| read(flags).unwrap().pins(Some(MemorySpace::Host)).count("recompute_blocks");
        assert_eq!(blocks(&["--recompute", "full"]), Some(usize::MAX));
        assert_eq!(
            (blocks(&["--recompute", "3"]), blocks(&["--recompute", "none"]), blocks(&[])),
            (Some(3), Some(0), Some(0))
        );
        assert_eq!(blocks(&["--accumulation", "layer-major"]), Some(usize::MAX));
        assert!(read(&["--recompute", "some"]).is_err() && read(&["--accumulation", "sideways"]).is_err());
    }
}
