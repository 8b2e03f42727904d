//! The opened rows of a run, for its plan and its pace.

use std::sync::Arc;

use dataloader::{BadRows, DataLoader, LoaderOptions, OrderOptions, Position};
use planner::{EvaluatedRows, Feed, NOTHING_AHEAD, Rows};
use run_plan::job::RunData;
use run_plan::pace::SampledRows;

use crate::config::Config;
use crate::data::survival::Survival;
use crate::run::open::{self, Opened};
use crate::run::options;
use crate::run::teacher_logits;

/// Places of the run from which rows are read.
const PLACES: u64 = 4;
/// Rows that are read at each place.
const ROWS: usize = 8;

/// The rows of a run, for its plan.
pub fn describe<'a>(config: &Config, opened: &'a Opened, loader: &'a DataLoader) -> RunData<'a> {
    let evaluated = opened.validation.as_deref().map(|dataset| {
        let loader = open::loader_options(config, opened);
        EvaluatedRows { loader, tokenizer: &opened.tokenizer, dataset }
    });
    let feed = Feed::Rows(Rows {
        dataset: &opened.train,
        loader,
        window_blocks: config.data.shuffle.then_some(config.data.window_blocks),
        read: options::rows_read(config, opened.estimated_rows.unwrap_or_else(|| opened.epoch_samples())),
    });
    let frozen = opened.frozen.as_ref().map(|of| planner::Frozen {
        called: of.called,
        model: &of.config,
        stored: of.stored,
        is_evaluated: config.preference.is_some(),
        kept: teacher_logits::planned(config, opened),
    });
    RunData { feed, evaluated, stored: opened.stored, frozen }
}

/// What the tokenizer does not hold of rows from the whole run, and the number of those rows; `None` for span corruption.
pub fn survival(config: &Config, opened: &Opened) -> Option<(Survival, u64)> {
    const ROWS: usize = 32;
    if !opened.reading.objective.is_of_texts() {
        return None;
    }
    let rows = opened.epoch_samples();
    // No row counts twice.
    let (places, most) = if rows <= ROWS as u64 { (1, rows) } else { (PLACES, (rows / PLACES).min(ROWS as u64)) };
    let options = LoaderOptions {
        batch_size: usize::try_from(most).unwrap_or(ROWS).max(1),
        epochs: Some(1),
        bad_rows: BadRows::Skip,
        order: OrderOptions { shuffle: false, ..OrderOptions::default() },
        keep_texts: true,
        keep_prompts: true,
        ..open::loader_options(config, opened)
    };
    let (mut survival, mut read) = (Survival::default(), 0);
    for place in 0..places {
        let start = Position { epoch: 0, sample: rows / places * place };
        let (dataset, tokenizer) = (Arc::clone(&opened.train), Arc::clone(&opened.tokenizer));
        let loader = DataLoader::new(dataset, tokenizer, options.clone(), start, NOTHING_AHEAD);
        // If a row is bad, the step that reads it reports the error.
        let Some(batch) = loader.ok().and_then(|mut loader| loader.next_batch().ok()).flatten() else { continue };
        read += batch.len() as u64;
        for (is_target, texts) in [(false, &batch.prompts), (true, &batch.texts)] {
            for text in texts {
                let ids = opened.tokenizer.encode(text);
                if let Ok(back) = ids.and_then(|ids| opened.tokenizer.decode(&ids)) {
                    survival.add(is_target, text, &back);
                }
            }
        }
    }
    heap::release_small();
    Some((survival, read))
}

/// Source and target tokens of rows from the whole run; none if they cannot be read.
pub fn sampled_rows(config: &Config, opened: &Opened, steps: Option<u64>) -> SampledRows {
    let samples = steps.unwrap_or(u64::MAX).saturating_mul(config.train.batch_size as u64);
    let samples = samples.min(opened.epoch_samples());
    let options = LoaderOptions {
        batch_size: ROWS.min(usize::try_from(samples / PLACES).unwrap_or(ROWS)).max(1),
        epochs: Some(1),
        bad_rows: BadRows::Skip,
        ..open::loader_options(config, opened)
    };
    let batch = |place: u64| {
        let start = Position { epoch: 0, sample: samples / PLACES * place };
        let (dataset, tokenizer) = (Arc::clone(&opened.train), Arc::clone(&opened.tokenizer));
        let loader = DataLoader::new(dataset, tokenizer, options.clone(), start, NOTHING_AHEAD);
        // If a row is bad, the step that reads it reports the error.
        loader.ok()?.next_batch().ok()?
    };
    let mut sampled_rows = SampledRows { all: opened.epoch_samples(), ..SampledRows::default() };
    for batch in (0..PLACES).filter_map(batch) {
        sampled_rows.cut_sources += batch.cut_sources;
        sampled_rows.cut_targets += batch.cut_targets;
        let (sources, targets, _) = batch.samples();
        let lengths = sources.iter().zip(targets.iter()).map(|(source, target)| (source.len(), target.len()));
        sampled_rows.lengths.extend(lengths);
    }
    sampled_rows
}
