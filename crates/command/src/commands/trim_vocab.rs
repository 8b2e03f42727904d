//! `train_low_mem trim-vocab`: a model with the entries of its vocabulary that some rows need, and the others gone.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::time::Instant;

use dataloader::{ChangedTokenizer, Tokenizer, Vocabulary};
use memory_policy::{Bytes, Probe, SystemProbe, counted, plural};
use serde_json::json;
use trainer::checkpoint::export_with_rows;

use crate::cli::vocabulary_flags::TrimVocabArgs;
use crate::commands::convert::named_by_flags;
use crate::commands::merge::check_output;
use crate::data::data_files;
use crate::data::file_texts::FileTexts;
use crate::data::row_budget;
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::model::model_directory;
use crate::screen::report;

/// A model whose vocabulary becomes another.
pub(super) struct Whole {
    /// Its directory.
    pub model: PathBuf,
    /// Its config.
    pub config: t5::Config,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The tokenizer's entries.
    pub vocabulary: Vocabulary,
}

impl Whole {
    /// Opens a model, after checking that the new one may be written to `output`.
    pub fn open(named: &Path, output: &Path, force: bool) -> Outcome<Self> {
        let model = model_directory::find(named)?;
        check_output(output, force, &[&model])?;
        let config = t5::Config::from_file(&model.join("config.json"))?;
        let tokenizer = model_directory::tokenizer(&model)?;
        model_directory::check_size(&config, &tokenizer)?;
        let vocabulary = Vocabulary::read(&tokenizer)?;
        Ok(Self { model, config, tokenizer, vocabulary })
    }
}

/// Trims a model's vocabulary.
pub fn trim_vocab(flags: &TrimVocabArgs) -> Outcome<()> {
    let began = Instant::now();
    let Whole { model, config, tokenizer, vocabulary } = Whole::open(&flags.model, &flags.output, flags.result.force)?;
    let of_scripts = vocabulary.of_scripts(&tokenizer, &flags.keep_scripts)?;
    let options = row_budget::options("trim-vocab", flags.memory_budget.as_deref(), flags.text.options())?;
    let open = |files: &[PathBuf]| FileTexts::open(files, (&flags.columns.chosen(), &options), named_by_flags);
    let texts = match flags.keep_used.as_slice() {
        [] => None,
        named => Some(open(&data_files::files("--keep-used", named)?)?),
    };
    let prefix = flags.source_prefix.as_deref().unwrap_or(config.prefix());
    let (used, rows) = match &texts {
        Some(texts) => used(texts, &tokenizer, prefix)?,
        None => (vec![0; tokenizer.vocab_size()], 0),
    };
    let mut always = vocabulary.lasting();
    always.extend(config.named_ids());
    let keep = chosen(&vocabulary, always, (&used, &of_scripts), flags.keep_top)?;
    let trimmed = vocabulary.trimmed(&keep)?;
    // Names an id of the config that has no entry before anything is written.
    config.with_rows(&trimmed.entries)?;
    if let Some(texts) = &texts {
        check_texts(texts, (&tokenizer, prefix), &trimmed)?;
    }
    outputs::make_directory_of(&flags.output)?;
    let changed = export_with_rows(&model, &trimmed.entries, &trimmed.files, &flags.output)?;
    let peak = SystemProbe::new().snapshot()?.peak_rss;
    let entries = [vocabulary.entries(), trimmed.entries.len()];
    let kept_of =
        |kept: bool| used.iter().zip(0..).filter(|(_, id)| !kept || keep.contains(id)).map(|(count, _)| count).sum();
    let (all, kept): (u64, u64) = (kept_of(false), kept_of(true));
    #[expect(clippy::cast_precision_loss, reason = "a share of tokens")]
    let share = if all == 0 { 1.0 } else { kept as f64 / all as f64 };
    let (output, seconds) = (flags.output.display().to_string(), began.elapsed().as_secs_f64());
    if flags.result.json {
        let json = json!({
            "output": output, "model": model.display().to_string(), "rows_read": rows,
            "entries": entries, "table_rows": changed.rows, "parameters": changed.parameters, "bytes": changed.bytes,
            "tokens": all, "tokens_kept": kept, "share_kept": share, "seconds": seconds, "peak_rss_bytes": peak.0,
        });
        return report::result(&format!("{json}\n"));
    }
    let [before, now] = changed.parameters.map(counted);
    let [bytes_before, bytes_now] = changed.bytes.map(Bytes);
    let [entries_before, entries_now] = entries.map(|count| counted(count as u64));
    report::result(&format!(
        "{output}: {entries_now} of {entries_before} entries\n  parameters   {before} before, {now} now\n  bytes        \
         {bytes_before} before, {bytes_now} now\n{}",
        match texts {
            Some(_) =>
                format!("  tokens kept  {:.2} % of {} in {}\n", 100.0 * share, counted(all), plural(rows, "row")),
            None => String::new(),
        }
    ))?;
    report::note(&format!("{seconds:.1} s, peak {peak}"));
    Ok(())
}

/// How often the rows use each id, and the number of rows.
fn used(texts: &FileTexts, tokenizer: &Tokenizer, prefix: &str) -> Outcome<(Vec<u64>, u64)> {
    let mut counts = vec![0_u64; tokenizer.vocab_size()];
    let rows = texts.each(|texts| {
        each_text(texts, prefix, |text| {
            Ok(tokenizer.encode_each(text, |ids| ids.iter().for_each(|id| counts[*id as usize] += 1))?)
        })
    })?;
    if counts.iter().all(|count| *count == 0) {
        return Err(Failure::unusable("--keep-used: the rows have no text: no entry would stay").hint(
            "`train_low_mem inspect FILE` shows their columns; `--prompt-column` and `--response-column` name two",
        ));
    }
    Ok((counts, rows))
}

/// Hands the texts of a row to `each`, the source with its prefix.
fn each_text(texts: &[&str], prefix: &str, mut each: impl FnMut(&str) -> Outcome<()>) -> Outcome<()> {
    for (text, number) in texts.iter().zip(0..) {
        match number == 0 && !prefix.is_empty() {
            true => each(&format!("{prefix}{text}"))?,
            false => each(text)?,
        }
    }
    Ok(())
}

/// The ids that stay: those that always do, the most used ones of the rows, and then those of scripts, as many as there is room for.
fn chosen(
    vocabulary: &Vocabulary,
    always: BTreeSet<u32>,
    (used, of_scripts): (&[u64], &[u32]),
    top: Option<usize>,
) -> Outcome<BTreeSet<u32>> {
    let (mut keep, most) = (always, top.unwrap_or(usize::MAX));
    if keep.len() > most {
        return Err(Failure::usage(format!(
            "--keep-top {most}: special tokens, sentinels, bytes and the ids of the config alone are {}",
            plural(keep.len() as u64, "entry")
        ))
        .hint("use a larger number"));
    }
    let mut ids: Vec<u32> = (0..used.len() as u32).filter(|id| used[*id as usize] > 0).collect();
    ids.sort_by_key(|id| (std::cmp::Reverse(used[*id as usize]), *id));
    for id in ids.into_iter().chain(of_scripts.iter().copied()) {
        let parts: BTreeSet<u32> = vocabulary.parts(id).into_iter().filter(|part| !keep.contains(part)).collect();
        if keep.len() + parts.len() > most {
            break;
        }
        keep.extend(parts);
    }
    Ok(keep)
}

/// Checks that each text of the rows whose entries all stay has the same tokens as before.
fn check_texts(texts: &FileTexts, (before, prefix): (&Tokenizer, &str), trimmed: &ChangedTokenizer) -> Outcome<()> {
    let mut new_ids = vec![None; before.vocab_size()];
    for (old, new) in trimmed.entries.iter().zip(0_u32..) {
        old.iter().for_each(|old| new_ids[*old as usize] = Some(new));
    }
    texts.each(|texts| {
        each_text(texts, prefix, |text| {
            // Digests of the ids, which take no memory for each of them.
            let (mut stay, mut expected, mut got) = (true, DefaultHasher::new(), DefaultHasher::new());
            before.encode_each(text, |ids| {
                for id in ids {
                    match new_ids[*id as usize] {
                        Some(new) => expected.write_u32(new),
                        None => stay = false,
                    }
                }
            })?;
            if stay {
                trimmed.tokenizer.encode_each(text, |ids| ids.iter().for_each(|id| got.write_u32(*id)))?;
            }
            if stay && got.finish() != expected.finish() { Err(changed_text(before.path(), text)) } else { Ok(()) }
        })
    })?;
    Ok(())
}

fn changed_text(path: &Path, text: &str) -> Failure {
    let beginning: String = text.chars().take(60).collect();
    Failure::unusable(format!(
        "{}: without the other entries its tokens of the text `{}` would be others",
        path.display(),
        beginning.escape_debug()
    ))
    .hint("nothing was written: this tokenizer cannot be trimmed")
}
