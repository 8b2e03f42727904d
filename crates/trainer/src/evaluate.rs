//! Evaluation: loss and scores of a model on samples that it was not trained on, batch by batch.
//!
//! Invariants:
//! * Token-weighted: losses and token counts are summed over all batches and divided once, so each token has the same weight
//!   in a batch of short answers as in any other. Scores of answers are the corpus's.
//! * Streaming: only counters and the first few examples of a batch are kept, and the vectors of an encoder, which are compared with each
//!   other. No dropout; parameters are only read.
//!
//! ```no_run
//! # fn example(model: &t5::T5, sources: Vec<Vec<u32>>, targets: Vec<Vec<u32>>) -> Result<(), trainer::Error> {
//! use trainer::RowLabels;
//! use trainer::evaluate::{EvaluateOptions, Evaluation, EvaluationBatch};
//! let mut evaluation = Evaluation::new(EvaluateOptions::default());
//! let batch = EvaluationBatch { sources: &sources, targets: &targets, references: None, rejected: &[], labels: RowLabels::default() };
//! evaluation.add(model, &batch, &|ids| format!("{ids:?}"), &|| false)?;
//! println!("loss {}", evaluation.finish()?.loss);
//! # Ok(())
//! # }
//! ```

mod classified;
mod computed;
mod ranked;

use std::rc::Rc;

use t5::{Answer, EvalContext, GenerateOptions, Labels, StepContext, T5, Watch};
use text_metrics::labels::Labels as LabelCounts;
use text_metrics::{Metric, RowScores, Scores, Settings};

use crate::contrastive::Contrastive;
use crate::error::{Error, Result};
use crate::preference::{Pair, Preference};
use crate::ranking::{RankedText, Ranking, RowLabels};
use crate::texts::{self, Texts};
use crate::trainer::{Batch, gather};
use crate::{micro_batches, pairs};
pub use computed::Computed;

/// Options of an evaluation.
#[derive(Clone, Debug)]
pub struct EvaluateOptions {
    /// The most samples that are in memory at one time.
    pub micro_batch_samples: usize,
    /// Dtype of activations and rows of logits.
    pub context: EvalContext,
    /// How answers are generated; `None` measures the loss alone.
    pub generate: Option<GenerateOptions>,
    /// The scores of answers.
    pub metrics: Vec<Metric>,
    /// The metrics' settings.
    pub settings: Settings,
    /// How many generated examples the report shows.
    pub examples: usize,
    /// Whether the examples are wrong answers only.
    pub wrong_examples: bool,
    /// The loss by which right and rejected answers are compared.
    pub preference: Option<Preference>,
    /// The reference of that loss, if it is a model of its own.
    pub reference: Option<Rc<T5>>,
    /// The labels of a classifier, whose answers are labels.
    pub labels: Option<Labels>,
    /// The loss of vectors, for an encoder, which has neither answers nor a loss of tokens.
    pub contrastive: Option<Contrastive>,
    /// The loss of rankings, and the tokens that a score is made of.
    pub ranking: Option<(Ranking, Vec<u32>)>,
}

impl Default for EvaluateOptions {
    fn default() -> Self {
        EvaluateOptions {
            micro_batch_samples: 8,
            context: EvalContext::default(),
            generate: Some(GenerateOptions::default()),
            metrics: vec![Metric::Bleu, Metric::ExactMatch],
            settings: Settings::default(),
            examples: 3,
            wrong_examples: false,
            preference: None,
            reference: None,
            labels: None,
            contrastive: None,
            ranking: None,
        }
    }
}

/// Samples to evaluate on, as token ids with EOS.
#[derive(Clone, Copy, Debug)]
pub struct EvaluationBatch<'a> {
    /// Input of the encoder.
    pub sources: &'a [Vec<u32>],
    /// The right answers.
    pub targets: &'a [Vec<u32>],
    /// The right answers as text; `None` decodes the targets.
    pub references: Option<&'a [String]>,
    /// Where answers are compared ([`EvaluateOptions::preference`]): the rejected ones, or those of other rows where rows have labels.
    pub rejected: &'a [Vec<u32>],
    /// What rows say beside their texts.
    pub labels: RowLabels<'a>,
}

/// One generated answer beside the right one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// The source, decoded.
    pub source: String,
    /// The right answer.
    pub reference: String,
    /// The generated text.
    pub hypothesis: String,
}

/// The answer to a sample of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Answered<'a> {
    /// The index of the sample in the batch.
    pub sample: usize,
    /// The generated text.
    pub hypothesis: &'a str,
    /// The right answer.
    pub reference: &'a str,
    /// The model's score of the answer, if a beam search found it.
    pub model_score: Option<f64>,
    /// The scores of the answer, by the metrics that are defined for one answer.
    pub scores: RowScores,
}

/// The result of an evaluation.
#[derive(Clone, Debug)]
pub struct EvaluationReport {
    /// Samples seen.
    pub samples: u64,
    /// Their target tokens, EOS included.
    pub target_tokens: u64,
    /// Mean loss of a target token; not a number when there were none.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Scores of the generated answers, if any.
    pub generation: Option<GenerationReport>,
    /// The log-probabilities of right and rejected answers, if they were compared.
    pub pairs: Vec<Pair>,
    /// The vectors of the rows' texts, one after the other, if the model makes vectors.
    pub vectors: Vec<f64>,
    /// The texts of lists with their scores, if the model ranks.
    pub ranked: Vec<RankedText>,
}

/// Scores of generated answers.
#[derive(Clone, Debug)]
pub struct GenerationReport {
    /// The value of each metric.
    pub values: Vec<(Metric, f64)>,
    /// The settings of metrics that have some.
    pub signatures: Vec<(Metric, String)>,
    /// The counts of labels, if accuracy or macro-F1 was asked for.
    pub labels: Option<LabelCounts>,
    /// The first few answers.
    pub examples: Vec<Example>,
}

impl GenerationReport {
    /// The value of a metric that was asked for.
    pub fn value(&self, metric: Metric) -> Option<f64> {
        self.values.iter().find(|(other, _)| *other == metric).map(|(_, value)| *value)
    }
}

/// An evaluation in progress.
#[derive(Debug)]
pub struct Evaluation {
    options: EvaluateOptions,
    loss_sum: f64,
    target_tokens: u64,
    samples: u64,
    scores: Scores,
    examples: Vec<Example>,
    pairs: Vec<Pair>,
    vectors: Vec<f64>,
    ranked: Vec<RankedText>,
}

impl Evaluation {
    /// An evaluation to which nothing was added.
    pub fn new(options: EvaluateOptions) -> Self {
        Evaluation {
            scores: Scores::new(&options.metrics, options.settings),
            options,
            loss_sum: 0.0,
            target_tokens: 0,
            samples: 0,
            examples: Vec::new(),
            pairs: Vec::new(),
            vectors: Vec::new(),
            ranked: Vec::new(),
        }
    }

    /// Adds a batch of any size. `decode` turns token ids into text and leaves special tokens out. Nothing more is added once
    /// `interrupted` returns true, and the evaluation must then be dropped. It is asked before every block and every generated token.
    ///
    /// # Errors
    /// [`Error::BatchShape`]; errors of the model.
    pub fn add(
        &mut self,
        model: &T5,
        batch: &EvaluationBatch,
        decode: &dyn Fn(&[u32]) -> String,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<()> {
        self.add_and_show(model, batch, decode, interrupted, &mut |_| {})
    }

    /// [`Evaluation::add`] that shows each answer, in the order of the batch.
    ///
    /// # Errors
    /// As [`Evaluation::add`].
    pub fn add_and_show(
        &mut self,
        model: &T5,
        batch: &EvaluationBatch,
        decode: &dyn Fn(&[u32]) -> String,
        interrupted: &dyn Fn() -> bool,
        show: &mut dyn FnMut(&Answered),
    ) -> Result<()> {
        if let Some(computed) = self.compute(model, batch, self.samples, interrupted)? {
            self.add_computed(batch, &computed, decode, show);
        }
        Ok(())
    }

    /// Computes the results of `model` for a batch whose first sample is number `first` of all. `None` when interrupted.
    ///
    /// # Errors
    /// As [`Evaluation::add`].
    pub fn compute(
        &self,
        model: &T5,
        batch: &EvaluationBatch,
        first: u64,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Computed>> {
        let sources = batch.sources.len();
        let targets = batch.references.map_or(batch.targets.len(), <[String]>::len);
        if batch.targets.len() != sources || targets != sources {
            return Err(Error::BatchShape { sources, targets: targets.min(batch.targets.len()) });
        }
        if let Some(contrastive) = &self.options.contrastive {
            let vectors = self.vectors(model, contrastive, batch, interrupted)?;
            let of_row = |&gain: &f64| RankedText { gain, ..RankedText::default() };
            let ranked = batch.labels.gains.iter().map(of_row).collect();
            return Ok(vectors.map(|vectors| Computed { vectors, ranked, ..Computed::default() }));
        }
        if let Some((ranking, answers)) = &self.options.ranking {
            let ranked = self.rank(model, (ranking, answers), batch, interrupted)?;
            return Ok(ranked.map(|ranked| Computed { ranked, ..Computed::default() }));
        }
        let lengths = batch.sources.iter().zip(batch.targets).enumerate();
        let rejected = |sample: usize| batch.rejected.get(sample).map_or(0, Vec::len);
        let lengths: Vec<_> = lengths
            .map(|(i, (source, target))| model.config().head.lengths(source.len(), target.len().max(rejected(i))))
            .collect();
        let no_answer = Answer { ids: Vec::new(), score: None };
        let answers = if self.options.generate.is_some() { vec![no_answer; sources] } else { Vec::new() };
        let pairs = if self.options.preference.is_some() { vec![Pair::default(); sources] } else { Vec::new() };
        let mut computed = Computed { answers, pairs, ..Computed::default() };
        for samples in micro_batches::cut(&lengths, self.options.micro_batch_samples.max(1)) {
            let loss = match self.options.preference {
                None => self.loss(model, batch, &samples, interrupted)?,
                Some(preference) => {
                    self.compare(model, batch, (&samples, preference), &mut computed.pairs, interrupted)?
                }
            };
            let Some(loss) = loss else { return Ok(None) };
            computed.losses.push(loss);
            if self.options.generate.is_some() && self.options.labels.is_some() {
                for (&i, ids) in samples.iter().zip(self.classify(model, batch, &samples)?) {
                    computed.answers[i].ids = ids;
                }
            } else if let Some(generate) = &self.options.generate {
                let sources: Vec<&[u32]> = samples.iter().map(|&i| batch.sources[i].as_slice()).collect();
                // Random draws for a sample depend on its place among all samples.
                let number = |source: usize| first + samples[source] as u64;
                let watch = Watch { interrupted, number: &number, ..Watch::default() };
                let Some(found) = model.answers(&sources, generate, &watch)? else { return Ok(None) };
                for (&i, found) in samples.iter().zip(found) {
                    computed.answers[i] = found.into_iter().next().expect("at least one answer");
                }
            }
        }
        Ok(Some(computed))
    }

    /// Adds the results of a model for a batch, from this process or another, and shows each answer.
    pub fn add_computed(
        &mut self,
        batch: &EvaluationBatch,
        computed: &Computed,
        decode: &dyn Fn(&[u32]) -> String,
        show: &mut dyn FnMut(&Answered),
    ) {
        computed.losses.iter().for_each(|loss| self.loss_sum += loss);
        self.target_tokens += batch.targets.iter().map(|target| t5::counted_labels(target)).sum::<u64>();
        self.samples += batch.sources.len() as u64;
        self.pairs.extend(&computed.pairs);
        self.vectors.extend(&computed.vectors);
        self.ranked.extend(&computed.ranked);
        // In the order of the batch, so that the examples do not depend on the cut.
        for (sample, answer) in computed.answers.iter().enumerate() {
            self.add_answer(batch, sample, answer, decode, show);
        }
    }

    /// The vectors of all texts of a batch. `None` when interrupted.
    fn vectors(
        &self,
        model: &T5,
        contrastive: &Contrastive,
        batch: &EvaluationBatch,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<f64>>> {
        let texts = Texts::of_rows(batch.sources, batch.targets, batch.rejected);
        let cut = |lengths: &[(usize, usize)]| micro_batches::cut(lengths, self.options.micro_batch_samples.max(1));
        let EvalContext { activations, loss_chunk_rows } = self.options.context;
        let cx = StepContext::without_dropout(activations, loss_chunk_rows);
        texts::vectors(model, contrastive.pooling, &texts.batch(), (&cut(&texts.lengths()), 0), &cx, interrupted)
    }

    /// The sum of token losses of a micro-batch. `None` when interrupted.
    fn loss(
        &self,
        model: &T5,
        batch: &EvaluationBatch,
        samples: &[usize],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<f64>> {
        let micro_batch = gather(&Batch { sources: batch.sources, targets: batch.targets }, samples, 0, model)?;
        Ok(model.loss_unless(&micro_batch, &self.options.context, interrupted)?)
    }

    /// The text of an answer: its labels, or what `decode` makes of its tokens.
    fn text(&self, ids: &[u32], decode: &dyn Fn(&[u32]) -> String) -> String {
        self.options.labels.as_ref().map_or_else(|| decode(ids), |labels| labels.text(ids))
    }

    /// Compares the two answers to each of some samples, a stream of them at a time. Returns the sum of the right answers' losses.
    fn compare(
        &self,
        model: &T5,
        batch: &EvaluationBatch,
        (samples, preference): (&[usize], Preference),
        compared: &mut [Pair],
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<f64>> {
        for (answer, targets) in [batch.targets, batch.rejected].into_iter().enumerate() {
            let of_model = gather(&Batch { sources: batch.sources, targets }, samples, 0, model)?;
            let (models, cx) = ((model, self.options.reference.as_deref()), &self.options.context);
            let streams = pairs::losses(models, (vec![of_model], false), &preference, cx, interrupted)?;
            let Some(streams) = streams else { return Ok(None) };
            for (stream, losses) in streams.into_iter().enumerate() {
                for (&sample, loss) in samples.iter().zip(losses) {
                    compared[sample].is_desirable = batch.labels.desirable.get(sample).copied().unwrap_or_default();
                    compared[sample].tokens[answer] = targets[sample].len() as f64;
                    compared[sample].stream(stream)[answer] = -loss;
                }
            }
        }
        Ok(Some(samples.iter().map(|&sample| -compared[sample].policy[0]).sum()))
    }

    fn add_answer(
        &mut self,
        batch: &EvaluationBatch,
        sample: usize,
        answer: &Answer,
        decode: &dyn Fn(&[u32]) -> String,
        show: &mut dyn FnMut(&Answered),
    ) {
        let hypothesis = self.text(&answer.ids, decode);
        let reference = match batch.references {
            Some(references) => references[sample].clone(),
            None => self.text(&batch.targets[sample], decode),
        };
        let scores = self.scores.add(&hypothesis, &reference);
        let (hypothesis_text, reference_text) = (hypothesis.as_str(), reference.as_str());
        let model_score = answer.score;
        show(&Answered { sample, hypothesis: hypothesis_text, reference: reference_text, model_score, scores });
        let is_shown = !self.options.wrong_examples || hypothesis.trim() != reference.trim();
        if is_shown && self.examples.len() < self.options.examples {
            self.examples.push(Example { source: decode(&batch.sources[sample]), reference, hypothesis });
        }
    }

    /// The figures of all added batches.
    ///
    /// # Errors
    /// [`Error::NoLabels`] where macro-F1 is asked for and the references are not labels.
    pub fn finish(self) -> Result<EvaluationReport> {
        let loss = self.loss_sum / self.target_tokens as f64;
        let generation = match &self.options.generate {
            None => None,
            Some(_) => Some(GenerationReport {
                values: self.scores.values()?,
                signatures: self.scores.signatures(),
                labels: self.scores.labels().cloned(),
                examples: self.examples,
            }),
        };
        Ok(EvaluationReport {
            samples: self.samples,
            target_tokens: self.target_tokens,
            loss,
            perplexity: loss.exp(),
            generation,
            pairs: self.pairs,
            vectors: self.vectors,
            ranked: self.ranked,
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use t5::{Config, MicroBatch};

    use super::*;
    use crate::test_device::device;

    fn model() -> T5 {
        let config = Config {
            vocab_size: 24,
            d_model: 8,
            d_kv: 4,
            d_ff: 12,
            num_layers: 1,
            num_decoder_layers: 1,
            num_heads: 2,
            ..Config::default()
        };
        T5::init(&config, 2, DType::F32, &device()).unwrap()
    }

    fn samples() -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
        let list = |i: u32, length: u32| (0..length).map(|j| 2 + (i * 5 + j * 3) % 22).chain([1]).collect();
        (0..9).map(|i| (list(i, i % 4), list(i + 1, (i * i) % 6))).unzip()
    }

    fn decode(ids: &[u32]) -> String {
        ids.iter().filter(|&&id| id > 1).map(|id| format!("w{id} ")).collect()
    }

    fn options(micro_batch_samples: usize) -> EvaluateOptions {
        let generate = Some(GenerateOptions { max_new_tokens: 6, ..GenerateOptions::default() });
        EvaluateOptions { micro_batch_samples, generate, examples: 2, ..EvaluateOptions::default() }
    }

    /// Evaluates all samples, `batch` at a time.
    fn evaluate(model: &T5, options: EvaluateOptions, batch: usize) -> EvaluationReport {
        let (sources, targets) = samples();
        let mut evaluation = Evaluation::new(options);
        for (sources, targets) in sources.chunks(batch).zip(targets.chunks(batch)) {
            evaluation
                .add(
                    model,
                    &EvaluationBatch {
                        sources,
                        targets,
                        references: None,
                        rejected: &[],
                        labels: RowLabels::default(),
                    },
                    &decode,
                    &|| false,
                )
                .unwrap();
        }
        evaluation.finish().unwrap()
    }

    #[test]
    fn the_loss_is_weighted_by_tokens_however_the_samples_are_cut() {
        let model = model();
        let (sources, targets) = samples();
        let mut loss_sum = 0.0;
        for (source, target) in sources.iter().zip(&targets) {
            let alone = MicroBatch::new(&[source], &[target], &[0], model.config(), model.device()).unwrap();
            loss_sum += model.loss(&alone, &EvalContext::default()).unwrap();
        }
        let tokens: usize = targets.iter().map(Vec::len).sum();
        let expected = loss_sum / tokens as f64;
        for (micro_batch_samples, batch) in [(1, 9), (4, 9), (9, 9), (2, 5), (100, 1)] {
            let report = evaluate(&model, options(micro_batch_samples), batch);
            assert!((report.loss - expected).abs() < 1e-6 * expected, "{} {expected}", report.loss);
            assert_eq!(report.perplexity, report.loss.exp());
            assert_eq!((report.samples, report.target_tokens), (9, tokens as u64));
        }
    }

    #[test]
    fn bleu_exact_match_and_examples_do_not_depend_on_the_cut() {
        let model = model();
        let whole = evaluate(&model, options(9), 9).generation.unwrap();
        for (micro_batch_samples, batch) in [(1, 9), (4, 3), (100, 1)] {
            let cut = evaluate(&model, options(micro_batch_samples), batch).generation.unwrap();
            assert_eq!(cut.values, whole.values);
            assert_eq!(cut.examples, whole.examples);
        }
        assert_eq!(whole.examples.len(), 2);
        assert_eq!(whole.examples[1].source, decode(&samples().0[1]));
        assert_eq!(whole.examples[1].reference, decode(&samples().1[1]));
        assert!(whole.signatures[0].1.contains("tok:13a"));
    }

    #[test]
    fn an_answer_that_is_the_reference_is_an_exact_match_and_scores_a_hundred() {
        let model = model();
        let (sources, targets) = samples();
        // An untrained model may answer with any token, including special ones.
        let decode = |ids: &[u32]| ids.iter().map(|id| format!("w{id} ")).collect::<String>();
        let references: Vec<String> = sources
            .iter()
            .map(|source| decode(&model.generate(&[source], &options(1).generate.unwrap()).unwrap()[0]) + "\n")
            .collect();
        let mut evaluation = Evaluation::new(options(3));
        let batch = EvaluationBatch {
            sources: &sources,
            targets: &targets,
            references: Some(&references),
            rejected: &[],
            labels: RowLabels::default(),
        };
        evaluation.add(&model, &batch, &decode, &|| false).unwrap();
        let generation = evaluation.finish().unwrap().generation.unwrap();
        assert_eq!(generation.value(Metric::ExactMatch), Some(1.0));
        let bleu = generation.value(Metric::Bleu).unwrap();
        assert!((bleu - 100.0).abs() < 1e-9, "{bleu}");
    }

    #[test]
    fn without_generation_only_the_loss_is_measured() {
        let report = evaluate(&model(), EvaluateOptions { generate: None, ..options(4) }, 9);
        assert!(report.generation.is_none() && report.loss.is_finite());
    }

    #[test]
    fn an_evaluation_asks_before_every_block_and_every_token_whether_to_end() {
        let (sources, targets) = samples();
        let batch = EvaluationBatch {
            sources: &sources,
            targets: &targets,
            references: None,
            rejected: &[],
            labels: RowLabels::default(),
        };
        let model = model();
        let mut questions = 0;
        loop {
            let asked = std::cell::Cell::new(0);
            let interrupted = || asked.replace(asked.get() + 1) >= questions;
            let mut evaluation = Evaluation::new(options(9));
            evaluation.add(&model, &batch, &decode, &interrupted).unwrap();
            if evaluation.samples > 0 {
                break;
            }
            assert_eq!(asked.get(), questions + 1, "nothing is computed after the answer");
            questions += 1;
        }
        // The loss goes through two blocks, the encoder for generation through one; then come at most 6 tokens.
        assert!((3 + 1..=3 + 6).contains(&questions), "{questions}");
    }

    #[test]
    fn a_batch_that_does_not_match_is_refused() {
        let (sources, targets) = samples();
        let mut evaluation = Evaluation::new(options(4));
        for (targets, references) in [(&targets[1..], None), (&targets[..], Some(&[String::new()][..]))] {
            let batch =
                EvaluationBatch { sources: &sources, targets, references, rejected: &[], labels: RowLabels::default() };
            assert!(matches!(evaluation.add(&model(), &batch, &decode, &|| false), Err(Error::BatchShape { .. })));
        }
    }
}
