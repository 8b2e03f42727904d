//! `train_low_mem embed`: a vector of each text, with a model's encoder.
//!
//! Texts are read as a stream, and the vectors are written in the order of the texts. A killed command goes on where it ended.

mod growing_vectors;
mod vector_file;

use std::time::Instant;

use memory_policy::{counted, plural};
use row_files::Template;
use serde_json::json;

use crate::answers::encoder::{Encoder, EncoderFlags};
use crate::answers::prompts::{self, Inputs, Source};
use crate::cli::embed_flags::EmbedArgs;
use crate::failure::Outcome;
use crate::screen::report;
use crate::screen::stop::{self, Stop};
use growing_vectors::GrowingVectors;

/// Writes the vectors.
pub fn embed(flags: &EmbedArgs) -> Outcome<()> {
    let form = vector_file::Form::from_path(&flags.output)?;
    let stop = Stop::on_signals()?;
    stop.ends_with(stop::with_part);
    let encoder = Encoder::open(EncoderFlags {
        model: &flags.model,
        adapter: flags.adapter.as_deref(),
        pooling: flags.pooling.map(t5::Pooling::from),
        normalize: flags.normalize,
        max_source_tokens: Some(flags.max_source_tokens),
        batch_samples: flags.batch_samples,
        precision: flags.precision.into(),
        weights: &flags.weights,
        device: flags.device.as_deref(),
    })?;
    let column = Template::of_column(&flags.text_column);
    let source = Source { flags: "--text-column", given: Some(&column), of_run: None, usual: "text" };
    let inputs = Inputs { typed: &[], file: Some(&flags.input), source, text: &flags.text };
    let (width, window) = (encoder.width(), encoder.window());
    let (planned, limits) = encoder.plan(inputs, form.bytes(width))?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let (model, room) = (planned.load()?, encoder.room(&planned)?);
    let (mut files, settings) = encoder.depends_on()?;
    files.push(flags.input.clone());
    // The texts of a batch follow from what the plan leaves for one.
    let of_batches = (room.tokens(), &flags.source_prefix, &flags.text_column, &flags.text);
    // The debug form is compared with an earlier one, and never shown.
    let depends_on = format!("{settings}{of_batches:?}");
    // Standard input is not there again.
    let goes_on = flags.input.as_os_str() != "-";
    let mut file = GrowingVectors::open(&flags.output, (&depends_on, &files), (width, window), goes_on)?;
    let done = file.rows();
    if done > 0 {
        report::note(&format!("{}: goes on behind {}", file.path().display(), plural(done, "text")));
    }
    let mut sources = encoder.sources(&flags.source_prefix);
    let (mut began, mut tokens_before, mut texts) = (Instant::now(), 0, 0);
    let mut waiting: Vec<Vec<u32>> = Vec::with_capacity(window);
    for text in prompts::prompts(inputs, limits)? {
        let source = sources.source(&text?)?;
        texts += 1;
        if texts <= done {
            (began, tokens_before) = (Instant::now(), sources.tokens);
            continue;
        }
        waiting.push(source);
        if waiting.len() == window {
            file.add(&encoder.compute(&model, &room, &std::mem::take(&mut waiting))?)?;
        }
    }
    file.add(&encoder.compute(&model, &room, &waiting)?)?;
    let seconds = began.elapsed().as_secs_f64();
    let rows = file.finish(form, &flags.output, &stop)?;
    sources.note_cut();
    let (tokens, cut) = (sources.tokens, sources.cut.0);
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens")]
    let rate = (tokens - tokens_before) as f64 / seconds.max(f64::MIN_POSITIVE);
    if flags.json {
        let mut line = json!({
            "rows": rows, "dimensions": width, "tokens": tokens, "cut_rows": cut, "seconds": seconds,
            "tokens_per_second": rate, "output": flags.output.display().to_string(),
        });
        planned.add_peaks(&mut line)?;
        return report::result(&format!("{line}\n"));
    }
    report::note(&format!(
        "{}: {} of {} numbers, {rate:.0} tokens/s",
        flags.output.display(),
        plural(rows, "vector"),
        counted(width as u64)
    ));
    if flags.weights.memory_budget.is_some() {
        report::note(&planned.peaks_in_words()?);
    }
    Ok(())
}
