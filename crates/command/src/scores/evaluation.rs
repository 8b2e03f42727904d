//! Evaluation on rows, with the same results in the training loop and in `train_low_mem eval`.
//!
//! An evaluation streams the first rows of the validation files in file order. The loss covers all of these rows. The scores of answers
//! cover only the first of them, because generating costs far more than scoring.

use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Once};

use collective::Group;
use dataloader::{Batch, DataLoader, LoaderOptions, MixedTask, Position, Tokenizer};
use parquet_dataset::Dataset;
use planner::{NOTHING_AHEAD, RowCounts, in_file_order};
use t5::{EvalContext, GenerateOptions, T5};
use text_metrics::Metric;
use trainer::RowLabels;
use trainer::contrastive::Contrastive;
use trainer::evaluate::{Answered, Computed, EvaluateOptions, Evaluation, EvaluationBatch, EvaluationReport};
use trainer::preference::Preference;
use trainer::ranking::Ranking;

use crate::config::Config;
use crate::failure::{Failure, Outcome};
use crate::scores::figures::{Figures, Skipped};
use crate::screen::report;
use crate::screen::stop::Stop;

/// Settings of an evaluation.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The rows of one task; `None`: all rows.
    pub task: Option<Range<u64>>,
    /// Rows to evaluate, from the first; 0: all.
    pub samples: u64,
    /// The first of these rows, which are answered; 0: all.
    pub generate_samples: u64,
    /// Rows computed at a time.
    pub micro_batch_samples: usize,
    /// Rows of logits that exist at a time.
    pub loss_chunk_rows: usize,
    /// Options of generation, and the dtype of activations.
    pub generate: GenerateOptions,
    /// The requested scores. BLEU and exact match are always computed.
    pub metrics: Vec<Metric>,
    /// Settings of the scores.
    pub of_metrics: text_metrics::Settings,
    /// Generations to keep for showing.
    pub examples: usize,
    /// Whether wrong answers only are kept.
    pub wrong_examples: bool,
    /// The loss by which right and rejected answers are compared, if rows have both.
    pub preference: Option<Preference>,
    /// The reference of that loss, if it is a model of its own.
    pub reference: Option<Rc<T5>>,
    /// The labels of a classifier.
    pub labels: Option<t5::Labels>,
    /// The loss of vectors, of as many rows at a time.
    pub contrastive: Option<(Contrastive, usize)>,
    /// The loss of rankings, and the tokens that a score is made of.
    pub ranking: Option<(Ranking, Vec<u32>)>,
    /// The stream of rows: objective, lengths, bad rows. Order, epochs and batch size are set here.
    pub loader: LoaderOptions,
}

/// Callbacks of an evaluation, and the processes that share it.
pub struct Watcher<'a> {
    /// Called with each answer, in the order of the rows.
    pub answered: &'a mut dyn FnMut(&AnsweredRow) -> Outcome<()>,
    /// Called with the number of finished rows, and the number of all rows.
    pub progress: &'a mut dyn FnMut(u64, u64),
    /// Processes that divide the rows among them. Each process then has the same results as a single process would.
    pub group: Option<&'a Group>,
}

/// A row and its answer.
pub struct AnsweredRow<'a> {
    /// The row, from 0.
    pub row: u64,
    /// Its prompt, if prompts are kept.
    pub prompt: Option<&'a str>,
    /// The answer, the reference, and the scores.
    pub answered: &'a Answered<'a>,
}

/// Evaluates `model` on the rows of each task, or on all rows if they have no tasks. Returns `None` if a stop was requested meanwhile, or
/// if no task has rows.
pub fn evaluate_each(
    model: &T5,
    rows: (&Arc<Dataset>, &Arc<Tokenizer>),
    settings: Vec<(Option<String>, Settings)>,
    stop: &Stop,
    watcher: &mut Watcher,
) -> Outcome<Option<Figures>> {
    let mut tasks = Vec::new();
    for (name, settings) in settings {
        let Some(figures) = evaluate(model, rows, &settings, stop, watcher)? else { return Ok(None) };
        match name {
            Some(name) => tasks.push((name, figures)),
            None => return Ok(Some(figures)),
        }
    }
    Ok(Figures::of_tasks(tasks))
}

/// Evaluates `model`. Returns `None` if a stop was requested meanwhile; this is checked before every block, token and row.
fn evaluate(
    model: &T5,
    (dataset, tokenizer): (&Arc<Dataset>, &Arc<Tokenizer>),
    settings: &Settings,
    stop: &Stop,
    watcher: &mut Watcher,
) -> Outcome<Option<Figures>> {
    let interrupted = &|| stop.requested();
    let RowCounts { evaluated: rows, answered: generated_rows } = settings.counts(dataset);
    let mut evaluations = [true, false].map(|generate| Evaluation::new(settings.options(generate)));
    let mut loader = settings.loader(dataset, tokenizer)?;
    if watcher.group.is_none() {
        loader.stop_on(stop.flag());
    }
    let (mut seen, mut skipped, mut previous) = (0, Skipped::default(), None);
    // If the tokenizer fails, the evaluation ends after the current batch.
    let failed = std::cell::Cell::new(None);
    let decode = |ids: &[u32]| tokenizer.decode(ids).map_err(|error| failed.set(Some(error))).unwrap_or_default();
    let frame = model.config().frame();
    while seen < rows {
        let mut round = Round::next(&mut loader, watcher.group, (seen, rows, generated_rows))?;
        if round.parts.is_empty() {
            break;
        }
        if settings.preference.is_some_and(|of| of.loss.has_labels()) {
            round.batches.iter_mut().for_each(|batch| previous = mismatch(batch, previous.take()));
        }
        if settings.has_references() {
            round.batches.iter_mut().try_for_each(|batch| as_decoded(batch, tokenizer, &frame))?;
        }
        let Some(computed) = round.compute(model, &evaluations, settings, watcher.group, interrupted)? else {
            return Ok(None);
        };
        for (part, computed) in round.parts.iter().zip(&computed) {
            let (batch, range) = (&round.batches[part.batch], part.range.clone());
            let mut refused = None;
            let show = &mut |answered: &Answered| {
                let at = range.start + answered.sample;
                let row =
                    AnsweredRow { row: batch.rows[at], prompt: batch.prompts.get(at).map(String::as_str), answered };
                if refused.is_none() {
                    refused = (watcher.answered)(&row).err();
                }
            };
            let evaluation = &mut evaluations[usize::from(!part.is_generated)];
            evaluation.add_computed(&settings.part(batch, &range), computed, &decode, show);
            if let Some(failure) = refused {
                return Err(failure);
            }
            if let Some(error) = failed.take() {
                return Err(error.into());
            }
        }
        round.batches.iter().for_each(|batch| skipped.count(batch));
        seen += round.rows;
        (watcher.progress)(seen, rows);
    }
    if watcher.group.is_none() && interrupted() {
        return Ok(None);
    }
    let [generated, scored] = evaluations;
    settings.figures(generated.finish()?, &scored.finish()?, skipped).map(Some)
}

/// Pairs each answer of a batch with that of the row before, which may be in the batch before. The first row has its own. Returns the last
/// answer.
fn mismatch(batch: &mut Batch, previous: Option<Vec<u32>>) -> Option<Vec<u32>> {
    let before = previous.or_else(|| batch.targets.first().cloned());
    batch.rejected = before.iter().chain(&batch.targets).take(batch.targets.len()).cloned().collect();
    batch.targets.last().cloned().or(before)
}

/// Names the model's own settings of answers that those of an evaluation do not follow, if it compares answers.
pub fn warn_of_departures(config: &Config, model: &t5::Config) -> Outcome<()> {
    let (settings, file) = model.answer_settings();
    if model.head != t5::Head::Language || config.train.eval_generate_samples == 0 {
        return Ok(());
    }
    let departures = config.generation.departs_from(settings, file)?;
    if !departures.is_empty() {
        report::warn(&format!(
            "{file} of the model sets {}: the answers of evaluations do not follow it; `generation.*` keys have what this program knows",
            departures.join(", ")
        ));
    }
    Ok(())
}

/// Replaces each reference that has special tokens by the text that its tokens give back, because answers come from the tokenizer, too:
/// special tokens are then in both texts, or in neither. A text with letters that the tokenizer does not know stays as it is: no answer
/// equals it.
fn as_decoded(batch: &mut Batch, tokenizer: &Tokenizer, frame: &[u32]) -> Outcome<()> {
    static WARNING: Once = Once::new();
    let unknown = tokenizer.unknown_id();
    for (text, ids) in batch.texts.iter_mut().zip(&batch.targets) {
        let is_known = ids.iter().all(|id| Some(*id) != unknown);
        if is_known && ids.iter().any(|id| !frame.contains(id) && tokenizer.is_special(*id)) {
            *text = tokenizer.decode(ids)?;
            if let Some(name) = tokenizer.lost_token(ids, frame) {
                WARNING.call_once(|| {
                    report::warn(&format!(
                        "references have special tokens such as `{name}`: answers and references are compared without them; \
                         `--set generation.keep_special_tokens=true` compares them, too"
                    ));
                });
            }
        }
    }
    Ok(())
}

/// One batch for each process to compute.
struct Round {
    batches: Vec<Batch>,
    parts: Vec<Part>,
    rows: u64,
}

/// Rows of a batch that are all generated, or all scored.
struct Part {
    batch: usize,
    range: Range<usize>,
    is_generated: bool,
    /// The number of its first sample among those of the same treatment.
    first: u64,
}

impl Round {
    /// The next batches. `seen` of the `rows` rows are finished, and the first `generated_rows` rows are generated.
    fn next(
        loader: &mut DataLoader,
        group: Option<&Group>,
        (seen, rows, generated_rows): (u64, u64, u64),
    ) -> Outcome<Self> {
        let mut round = Self { batches: Vec::new(), parts: Vec::new(), rows: 0 };
        for batch in 0..group.map_or(1, Group::size) {
            let seen = seen + round.rows;
            let Some(made) = (if seen < rows { loader.next_batch()? } else { None }) else { break };
            let length = made.row_count().min(usize::try_from(rows - seen).unwrap_or(usize::MAX));
            // Generated rows come first, so a batch has at most one border in it.
            let border = usize::try_from(generated_rows.saturating_sub(seen)).unwrap_or(usize::MAX).min(length);
            let parts = [(true, 0..border, seen), (false, border..length, seen.saturating_sub(generated_rows))];
            for (is_generated, range, first) in parts {
                round.parts.push(Part { batch, range, is_generated, first });
            }
            round.rows += length as u64;
            round.batches.push(made);
        }
        // The tokenizer's small blocks do not make room for tensors.
        heap::release_small();
        Ok(round)
    }

    /// The model's results for each part. Each process computes its own batch, and receives the results of the others. `None` if any
    /// process should stop.
    fn compute(
        &self,
        model: &T5,
        evaluations: &[Evaluation; 2],
        settings: &Settings,
        group: Option<&Group>,
        interrupted: &dyn Fn() -> bool,
    ) -> Outcome<Option<Vec<Computed>>> {
        let of = |part: &Part, interrupted: &dyn Fn() -> bool| -> Outcome<Option<Computed>> {
            if part.range.is_empty() {
                return Ok(Some(Computed::default()));
            }
            let (batch, evaluation) = (&self.batches[part.batch], &evaluations[usize::from(!part.is_generated)]);
            Ok(evaluation.compute(model, &settings.part(batch, &part.range), part.first, interrupted)?)
        };
        let Some(group) = group else { return self.parts.iter().map(|part| of(part, interrupted)).collect() };
        if model.has_remote_weights() {
            // Every process asks for the same weights at the same time. So all processes compute the same parts, and stop together.
            let interrupted = || group.any(interrupted()).unwrap_or(true);
            return self.parts.iter().map(|part| of(part, &interrupted)).collect();
        }
        let mine = self.parts.iter().filter(|part| part.batch == group.rank()).map(|part| of(part, interrupted));
        let mine = mine.collect::<Outcome<Vec<_>>>()?;
        let mut said = vec![u8::from(mine.iter().any(Option::is_none) || interrupted())];
        for bytes in mine.iter().flatten().map(Computed::to_bytes) {
            said.extend((bytes.len() as u64).to_le_bytes());
            said.extend(bytes);
        }
        let all = group.gather(&said)?;
        if all.iter().any(|said| said[0] != 0) {
            return Ok(None);
        }
        let mut computed = Vec::new();
        for said in &all {
            let mut rest = &said[1..];
            while let Some((length, after)) = rest.split_first_chunk() {
                let (bytes, next) = after.split_at(u64::from_le_bytes(*length) as usize);
                let of_part = Computed::from_bytes(bytes);
                computed.push(of_part.ok_or_else(|| Failure::internal("evaluation: a message between processes"))?);
                rest = next;
            }
        }
        Ok(Some(computed))
    }
}

impl Settings {
    /// The rows of `dataset` that are evaluated, and the rows that are answered.
    pub fn counts(&self, dataset: &Dataset) -> RowCounts {
        let rows = self.task.as_ref().map_or(dataset.rows(), |rows| rows.end - rows.start);
        RowCounts::new(self.samples, self.generate_samples, Some(rows))
    }

    /// These settings for the rows of each task, with its name: the tasks' rows lie one after the other, as many as `rows` says. Without
    /// tasks, for all rows.
    pub fn of_tasks(self, tasks: Option<&[MixedTask]>, rows: impl Iterator<Item = u64>) -> Vec<(Option<String>, Self)> {
        let Some(tasks) = tasks else { return vec![(None, self)] };
        let mut end = 0;
        let of_tasks = tasks.iter().zip(rows).map(|(task, rows)| {
            end += rows;
            let mut settings = Self { task: Some(end - rows..end), ..self.clone() };
            settings.loader.source_prefix.clone_from(&task.source_prefix);
            (Some(task.name.clone()), settings)
        });
        of_tasks.filter(|(_, settings)| settings.task.as_ref().is_some_and(|rows| !rows.is_empty())).collect()
    }

    fn options(&self, generate: bool) -> EvaluateOptions {
        let mut metrics = [&[Metric::Bleu, Metric::ExactMatch], self.metrics.as_slice()].concat();
        metrics.sort_unstable();
        metrics.dedup();
        EvaluateOptions {
            micro_batch_samples: self.micro_batch_samples,
            context: EvalContext { activations: self.generate.activations, loss_chunk_rows: self.loss_chunk_rows },
            generate: (generate && self.contrastive.is_none() && self.ranking.is_none()).then_some(self.generate),
            metrics,
            settings: self.of_metrics,
            examples: self.examples,
            wrong_examples: self.wrong_examples,
            preference: self.preference,
            reference: self.reference.clone(),
            labels: self.labels.clone(),
            contrastive: self.contrastive.as_ref().map(|(of, _)| of.clone()),
            ranking: self.ranking.clone(),
        }
    }

    /// A loader of rows in file order, which makes batches on demand.
    fn loader(&self, dataset: &Arc<Dataset>, tokenizer: &Arc<Tokenizer>) -> Outcome<DataLoader> {
        let options = in_file_order(&self.loader, self.micro_batch_samples);
        let start = Position { epoch: 0, sample: self.task.as_ref().map_or(0, |rows| rows.start) };
        Ok(DataLoader::new(Arc::clone(dataset), Arc::clone(tokenizer), options, start, NOTHING_AHEAD)?)
    }

    /// Some rows of a batch.
    fn part<'a>(&self, batch: &'a Batch, range: &Range<usize>) -> EvaluationBatch<'a> {
        let lists = batch.lists.get(range.clone()).unwrap_or_default();
        let before: usize = batch.lists.iter().take(range.start).sum();
        let samples = if lists.is_empty() { range.clone() } else { before..before + lists.iter().sum::<usize>() };
        EvaluationBatch {
            sources: &batch.sources[samples.clone()],
            targets: &batch.targets[samples.clone()],
            references: self.has_references().then(|| &batch.texts[samples.clone()]),
            rejected: batch.rejected.get(samples.clone()).unwrap_or_default(),
            labels: RowLabels {
                desirable: batch.labels.get(samples.clone()).unwrap_or_default(),
                lists,
                gains: batch.gains.get(samples).unwrap_or_default(),
            },
        }
    }

    /// Whether a row's last text is the reference itself. A span-corruption target is not a text.
    fn has_references(&self) -> bool {
        self.loader.objective.is_of_texts() && self.contrastive.is_none()
    }

    /// Combines both parts. Each target token has the same weight.
    fn figures(&self, generated: EvaluationReport, scored: &EvaluationReport, skipped: Skipped) -> Outcome<Figures> {
        let target_tokens = generated.target_tokens + scored.target_tokens;
        let loss_sum = |report: &EvaluationReport| {
            #[expect(clippy::cast_precision_loss, reason = "counts of tokens are far below 2^53")]
            if report.target_tokens == 0 { 0.0 } else { report.loss * report.target_tokens as f64 }
        };
        #[expect(clippy::cast_precision_loss, reason = "counts of tokens are far below 2^53")]
        let loss = (loss_sum(&generated) + loss_sum(scored)) / target_tokens as f64;
        let pairs = [generated.pairs.as_slice(), &scored.pairs].concat();
        let preference = self.preference.filter(|_| !pairs.is_empty()).map(|of| of.of_batch(&pairs).1);
        let vectors = [generated.vectors.as_slice(), &scored.vectors].concat();
        let rows = (generated.samples + scored.samples).max(1) as usize;
        let ranked = [generated.ranked.as_slice(), &scored.ranked].concat();
        let of_vectors = || self.contrastive.as_ref().filter(|_| !vectors.is_empty());
        let retrieval = of_vectors().filter(|(of, _)| !of.loss.has_scores()).map(|(of, rows_of_a_step)| {
            of.retrieval(&vectors, vectors.len() / (rows * of.texts_of_a_row()), *rows_of_a_step)
        });
        let agreement = of_vectors().filter(|(of, _)| of.loss.has_scores()).map(|(of, rows_of_a_step)| {
            let scores: Vec<f64> = ranked.iter().map(|row| row.gain).collect();
            of.agreement(&vectors, &scores, *rows_of_a_step)
        });
        let agreement = agreement.transpose()?;
        let ranking = self.ranking.as_ref().filter(|_| !ranked.is_empty()).map(|(of, _)| of.stats(&ranked));
        let of_vectors = retrieval.map(|of| of.loss).or(agreement.map(|of| of.loss));
        let loss = of_vectors.or(ranking.map(|of| of.loss)).unwrap_or(loss);
        let (values, signatures, labels, examples) = match generated.generation {
            Some(answers) => (answers.values, answers.signatures, answers.labels, answers.examples),
            None => Default::default(),
        };
        let (values, wanted) = match agreement {
            Some(of) => (
                vec![(Metric::Pearson, of.pearson), (Metric::Spearman, of.spearman)],
                vec![Metric::Pearson, Metric::Spearman],
            ),
            None => (values, self.metrics.clone()),
        };
        Ok(Figures {
            samples: generated.samples + scored.samples,
            skipped,
            target_tokens,
            loss,
            perplexity: loss.exp(),
            generated_samples: generated.samples,
            values,
            signatures,
            wanted,
            labels,
            examples,
            preference,
            retrieval,
            is_of_pairs: agreement.is_some(),
            ranking,
            tasks: Vec::new(),
        })
    }
}
