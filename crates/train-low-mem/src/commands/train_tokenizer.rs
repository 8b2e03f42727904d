//! `train_low_mem train-tokenizer`: a `tokenizer.json` from the texts of parquet or text files.

use dataloader::TokenizerTraining;
use memory_policy::Bytes;

use crate::cli::TrainTokenizerArgs;
use crate::failure::{Failure, Outcome};
use crate::{open, report};

/// Trains a tokenizer and writes it.
pub fn train_tokenizer(flags: &TrainTokenizerArgs) -> Outcome<()> {
    if flags.output.exists() && !flags.force {
        return Err(Failure::usage(format!("{}: there is a file already", flags.output.display()))
            .hint("`--force` replaces it; a model trained with the old tokenizer cannot use the new one"));
    }
    let files = open::files("--input", &flags.input)?;
    let training =
        TokenizerTraining { vocab_size: flags.vocab_size, sentinels: flags.sentinels, ..TokenizerTraining::default() };
    let trained = dataloader::train_tokenizer(&files, &flags.columns, &training)?;
    trainer::write_atomic(&flags.output, &trained.json)?;
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
        report::warn("there were more different words than fit in memory; the rarest were forgotten");
    }
    Ok(())
}
