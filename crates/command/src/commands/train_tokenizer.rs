//! `train_low_mem train-tokenizer`: makes a `tokenizer.json` from the texts of row or text files.

use dataloader::{TextFiles, TokenizerTraining};
use memory_policy::{Budget, Bytes, Probe, SystemProbe};

use crate::cli::flag_values;
use crate::cli::row_flags::TrainTokenizerArgs;
use crate::data::data_files;
use crate::failure::{Exit, Failure, Outcome};
use crate::files::outputs;
use crate::screen::report;

/// Trains a tokenizer and writes it.
pub fn train_tokenizer(flags: &TrainTokenizerArgs) -> Outcome<()> {
    if flags.output.exists() && !flags.force {
        return Err(Failure::usage(format!("{} already exists", flags.output.display()))
            .hint("`--force` overwrites it; models that were trained with the old tokenizer cannot use the new one"));
    }
    let training =
        TokenizerTraining { vocab_size: flags.vocab_size, sentinels: flags.sentinels, ..TokenizerTraining::default() };
    training.check()?;
    let budget = flag_values::budget(flags.memory_budget.as_deref())?;
    let files = data_files::files("--input", &flags.input)?;
    let files = TextFiles::open(&files, &flags.columns, &flags.text.options())?;
    let training = within(&training, &files, budget)?;
    let trained = dataloader::train_tokenizer_on_files(&files, &training)?;
    outputs::remove_leftovers_beside(&flags.output);
    durable_files::write_atomic(&flags.output, &trained.json)?;
    report::result(&format!(
        "{}: {} entries from {} texts, {}\n",
        flags.output.display(),
        trained.vocab_size,
        trained.texts,
        Bytes(trained.text_bytes)
    ))?;
    if trained.vocab_size < flags.vocab_size {
        report::warn(&format!(
            "the texts have too few words for {} entries; the vocabulary is smaller",
            flags.vocab_size
        ));
    }
    if trained.pruned {
        report::warn("the distinct words do not fit the memory budget; the rarest were dropped");
    }
    if flags.memory_budget.is_some() {
        report::note(&format!("peak {}", SystemProbe::new().snapshot()?.peak_rss));
    }
    if trained.long_values > 0 {
        report::warn(&format!(
            "{} values are longer than 16 MiB; only the first 16 MiB of each were read",
            trained.long_values
        ));
    }
    Ok(())
}

/// The settings of training with the largest table of words that fits the budget.
fn within(training: &TokenizerTraining, files: &TextFiles, budget: Budget) -> Outcome<TokenizerTraining> {
    let now = SystemProbe::new().snapshot()?;
    let budget = budget.resolve(&now);
    let others = now.rss.0 + files.reading_bytes();
    training.within(budget.0.saturating_sub(others)).map_err(|least| {
        let needed = Bytes(others + least);
        Failure::new(Exit::DoesNotFit, format!("this tokenizer needs at least {needed}; --memory-budget is {budget}"))
            .hint(format!(
                "program {}, reading up to {}, training at least {}",
                now.rss,
                Bytes(files.reading_bytes()),
                Bytes(least)
            ))
            .hint("use a larger `--memory-budget` or a smaller `--vocab-size`")
    })
}
