//! A micro-batch: some samples of an optimizer batch, padded to the longest of them.

use candle_core::{Device, Tensor};
use t5_ops::{Distillation, IGNORED_LABEL, TopLogits};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::head::Head;
use crate::layers::logit_head::LogitHead;
use crate::pooling::{Pooling, VectorGradients};

/// Samples padded to a rectangle. Sources (B, S), targets (B, T); padding is on the right.
///
/// The decoder's inputs are the targets shifted right behind `decoder_start_token_id`. Padded positions
/// hold `pad_token_id`, are masked in attention and have no label.
#[derive(Clone, Debug)]
pub struct MicroBatch<T = Tensor> {
    pub(crate) sources: T,
    pub(crate) source_lengths: Vec<usize>,
    pub(crate) decoder_inputs: T,
    pub(crate) target_lengths: Vec<usize>,
    pub(crate) labels: Vec<u32>,
    pub(crate) samples: Vec<u32>,
    pub(crate) weights: Option<Vec<f64>>,
    pub(crate) class_factors: Option<Vec<f64>>,
    pub(crate) vectors: Option<VectorGradients>,
    pub(crate) taught: Option<Taught<T>>,
    pub(crate) answers: Vec<u32>,
    pub(crate) skips_adapter: bool,
}

/// A teacher's view of a micro-batch.
#[derive(Clone, Debug)]
pub(crate) struct Taught<T> {
    pub by: Teacher<T>,
    pub of: Distillation,
}

/// What a teacher says about a micro-batch.
#[derive(Clone, Debug)]
pub(crate) enum Teacher<T> {
    /// Its decoder's output (B, T, D'), and the head that makes all logits of it.
    States { states: T, head: LogitHead<T> },
    /// The largest logits of each row (B T).
    Top(TopLogits),
}

impl<T> MicroBatch<T> {
    /// The input ids of a stack, (B, T).
    pub(crate) fn ids(&self, decoder: bool) -> &T {
        if decoder { &self.decoder_inputs } else { &self.sources }
    }

    /// Sources alone, for a pass that has no targets.
    pub(crate) fn of_sources(sources: T, source_lengths: Vec<usize>) -> MicroBatch<T>
    where
        T: Clone,
    {
        MicroBatch {
            decoder_inputs: sources.clone(),
            sources,
            source_lengths,
            target_lengths: Vec::new(),
            labels: Vec::new(),
            samples: Vec::new(),
            weights: None,
            class_factors: None,
            vectors: None,
            taught: None,
            answers: Vec::new(),
            skips_adapter: false,
        }
    }

    /// Valid positions of each sample in a stack.
    pub(crate) fn lengths(&self, decoder: bool) -> &[usize] {
        if decoder { &self.target_lengths } else { &self.source_lengths }
    }
}

impl MicroBatch {
    /// Pads `sources` and `targets` (token ids, EOS included). `samples` are the samples' indices in the
    /// whole optimizer batch: dropout masks follow them, so that no cut of the batch changes a mask.
    ///
    /// # Errors
    /// [`Error::Batch`] for no samples, lists of unequal length, an empty source or target, or a token id
    /// outside the vocabulary.
    pub fn new(
        sources: &[&[u32]],
        targets: &[&[u32]],
        samples: &[u32],
        config: &Config,
        device: &Device,
    ) -> Result<MicroBatch> {
        if sources.len() != targets.len() || sources.len() != samples.len() {
            return Err(Error::Batch {
                what: "micro-batch".into(),
                expected: "as many targets and sample indices as sources".into(),
                got: format!("{} sources, {} targets, {} indices", sources.len(), targets.len(), samples.len()),
                hint: BELONG_TOGETHER,
            });
        }
        let (source_lists, (sources, source_lengths)) = (sources, pad(sources, "source", samples, config, device)?);
        if !config.head.is_language() {
            let labels = labels(&config.head, &source_lengths, targets, samples)?;
            let batch = MicroBatch::of_sources(sources, source_lengths);
            if !config.head.has_decoder() {
                return Ok(MicroBatch { labels, samples: samples.to_vec(), ..batch });
            }
            let shifted = |source: &&[u32]| [&[config.decoder_start_token_id], &source[..source.len() - 1]].concat();
            let shifted: Vec<Vec<u32>> = source_lists.iter().map(shifted).collect();
            let shifted: Vec<&[u32]> = shifted.iter().map(Vec::as_slice).collect();
            let (decoder_inputs, target_lengths) = pad(&shifted, "source", samples, config, device)?;
            return Ok(MicroBatch { decoder_inputs, target_lengths, labels, samples: samples.to_vec(), ..batch });
        }
        let longest = check(targets, "target", samples, config)?;
        let mut labels = Vec::with_capacity(targets.len() * longest);
        let mut inputs = Vec::with_capacity(targets.len() * longest);
        for target in targets {
            labels.extend_from_slice(target);
            labels.resize(labels.len() + longest - target.len(), IGNORED_LABEL);
            inputs.push(config.decoder_start_token_id);
            inputs.extend_from_slice(&target[..target.len() - 1]);
            inputs.resize(inputs.len() + longest - target.len(), config.pad_token_id);
        }
        Ok(MicroBatch {
            sources,
            source_lengths,
            decoder_inputs: Tensor::from_vec(inputs, (targets.len(), longest), device)?,
            target_lengths: targets.iter().map(|target| target.len()).collect(),
            labels,
            samples: samples.to_vec(),
            weights: None,
            class_factors: None,
            vectors: None,
            taught: None,
            answers: Vec::new(),
            skips_adapter: false,
        })
    }

    /// The same micro-batch, where a step minimises the sum over its samples of `weights[i]` times the cross-entropy of sample `i`, in
    /// place of the mean over all target tokens. Weights may be negative: that is the gradient of a loss of the samples' log-probabilities.
    ///
    /// # Panics
    /// There are not as many weights as samples.
    #[must_use]
    pub fn weighted(self, weights: Vec<f64>) -> MicroBatch {
        assert_eq!(weights.len(), self.samples.len(), "a weight for each sample");
        MicroBatch { weights: Some(weights), ..self }
    }

    /// The same micro-batch of a classifier, where a step multiplies the loss of each label by its class's factor: of a row whose label is that
    /// class or, where any number of labels may be right, of a row where it is.
    #[must_use]
    pub fn with_class_factors(self, factors: Vec<f64>) -> MicroBatch {
        MicroBatch { class_factors: Some(factors), ..self }
    }

    /// The same micro-batch of sources, where backward begins with the gradient of a loss by the vector of each, which `pooling` makes of the
    /// encoder's output: `gradients` (B, D), one after the other. A step over all micro-batches of a batch then has the gradient of that loss,
    /// which may be any function of all vectors. The step itself counts no loss.
    ///
    /// # Panics
    /// There are not as many gradients as samples.
    #[must_use]
    pub fn pulled(self, pooling: Pooling, gradients: Vec<f64>) -> MicroBatch {
        assert!(
            !gradients.is_empty() && gradients.len().is_multiple_of(self.samples.len()),
            "a gradient for each sample"
        );
        MicroBatch { vectors: Some(VectorGradients { pooling, values: gradients }), ..self }
    }

    /// The same micro-batch of targets of one token, where [`T5::losses_of_step`](crate::T5::losses_of_step) gives the losses of these tokens
    /// of each sample, one after the other, in place of that of its own target.
    #[must_use]
    pub fn with_answers(self, answers: Vec<u32>) -> MicroBatch {
        MicroBatch { answers, ..self }
    }

    /// The same micro-batch, where a step minimises `of` beside the largest logits of a teacher, a row of them for each position of the
    /// rectangle of targets ([`T5::top_logits`](crate::T5::top_logits)).
    #[must_use]
    pub fn taught(self, by: TopLogits, of: Distillation) -> MicroBatch {
        MicroBatch { taught: Some(Taught { by: Teacher::Top(by), of }), ..self }
    }

    /// The same micro-batch, computed as if the model had no adapter. Only for passes that train nothing.
    #[must_use]
    pub fn without_adapter(self) -> MicroBatch {
        MicroBatch { skips_adapter: true, ..self }
    }

    /// The number of samples (B).
    pub fn samples(&self) -> usize {
        self.samples.len()
    }

    /// Tokens that are not padding: (source, target).
    pub fn tokens(&self) -> (u64, u64) {
        let sum = |lengths: &[usize]| lengths.iter().map(|&n| n as u64).sum();
        (sum(&self.source_lengths), sum(&self.target_lengths))
    }

    /// Positions of the rectangles, padding included: (B x S, B x T).
    pub fn padded_tokens(&self) -> (u64, u64) {
        (self.sources.elem_count() as u64, self.decoder_inputs.elem_count() as u64)
    }
}

/// The labels of a model that makes no text: one of each source, or one of each position of the rectangle, or one of each output.
fn labels(head: &Head, lengths: &[usize], targets: &[&[u32]], samples: &[u32]) -> Result<Vec<u32>> {
    let Some(of) = head.labels() else { return Ok(Vec::new()) };
    let entries = if of.is_set() { 2 } else { of.names.len() };
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut labels = Vec::new();
    for ((target, &length), sample) in targets.iter().zip(lengths).zip(samples) {
        let problem = |expected: String, got: String| {
            let what = format!("labels of sample {sample}");
            Err(Error::Batch { what, expected, got, hint: BELONG_TOGETHER })
        };
        let [most, padded] = [length, longest].map(|tokens| head.target_length(tokens).unwrap_or(0));
        if target.len() != most {
            return problem(format!("{most}"), target.len().to_string());
        }
        let is_unknown = |label: &u32| !of.is_number() && *label != IGNORED_LABEL && *label as usize >= entries;
        if let Some(label) = target.iter().find(|label| is_unknown(label)) {
            return problem(format!("labels below {entries}"), label.to_string());
        }
        labels.extend_from_slice(target);
        labels.resize(labels.len() + padded - most, IGNORED_LABEL);
    }
    Ok(labels)
}

/// Checks and pads token lists into one (B, longest) tensor.
pub(crate) fn pad(
    lists: &[&[u32]],
    what: &str,
    samples: &[u32],
    config: &Config,
    device: &Device,
) -> Result<(Tensor, Vec<usize>)> {
    let longest = check(lists, what, samples, config)?;
    let mut ids = Vec::with_capacity(lists.len() * longest);
    for list in lists {
        ids.extend_from_slice(list);
        ids.resize(ids.len() + longest - list.len(), config.pad_token_id);
    }
    let ids = Tensor::from_vec(ids, (lists.len(), longest), device)?;
    Ok((ids, lists.iter().map(|list| list.len()).collect()))
}

const BELONG_TOGETHER: &str = "the tokenizer, the vocabulary size in config.json and the data must belong together";
const CUT: &str = "shorten the text, or have texts cut there: `data.max_source_tokens` and `data.max_target_tokens` of rows, \
                   `--max-source-tokens` of prompts";
const WITHOUT_IMAGES: &str = "the vision tower is not read: leave out the token and the texts about images";

/// Returns the length of the longest list. Refuses lists on which the model cannot run.
fn check(lists: &[&[u32]], what: &str, samples: &[u32], config: &Config) -> Result<usize> {
    let problem = |i: usize, expected: String, got: String, hint| Error::Batch {
        what: format!("{what} of sample {}", samples[i]),
        expected,
        got,
        hint,
    };
    for (i, list) in lists.iter().enumerate() {
        if list.is_empty() {
            return Err(problem(i, "at least one token".into(), "none".into(), BELONG_TOGETHER));
        }
        if let Some(&id) = list.iter().find(|&&id| id as usize >= config.vocab_size) {
            let expected = format!("token ids below the model's vocab_size, {}", config.vocab_size);
            return Err(problem(i, expected, id.to_string(), BELONG_TOGETHER));
        }
    }
    if let Some(gemma) = &config.gemma {
        let most = if what == "source" { gemma.encoder.positions } else { gemma.decoder.positions };
        for (i, list) in lists.iter().enumerate() {
            if list.len() > most {
                let expected = format!("at most max_position_embeddings ({most}) tokens");
                return Err(problem(i, expected, list.len().to_string(), CUT));
            }
            if let Some(id) = list.iter().find(|id| gemma.image_tokens.contains(id)) {
                let got = format!("the token {id}, which stands for one");
                return Err(problem(i, "a text without images".into(), got, WITHOUT_IMAGES));
            }
        }
    }
    lists.iter().map(|list| list.len()).max().ok_or_else(|| Error::Batch {
        what: "micro-batch".into(),
        expected: "at least one sample".into(),
        got: "none".into(),
        hint: BELONG_TOGETHER,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_device::device;

    fn config() -> Config {
        Config { vocab_size: 20, decoder_start_token_id: 3, pad_token_id: 2, ..Config::default() }
    }

    #[test]
    fn targets_are_shifted_right_and_padding_has_no_label() {
        let batch =
            MicroBatch::new(&[&[5, 1], &[6, 7, 1]], &[&[8, 9, 1], &[1]], &[0, 1], &config(), &device()).unwrap();
        assert_eq!(batch.sources.to_vec2::<u32>().unwrap(), [[5, 1, 2], [6, 7, 1]]);
        assert_eq!(batch.decoder_inputs.to_vec2::<u32>().unwrap(), [[3, 8, 9], [3, 2, 2]]);
        assert_eq!(batch.labels, [8, 9, 1, 1, IGNORED_LABEL, IGNORED_LABEL]);
        assert_eq!((batch.tokens(), batch.padded_tokens()), ((5, 4), (6, 6)));
    }

    #[test]
    fn what_no_model_can_run_on_is_refused_by_name() {
        let check = |sources: &[&[u32]], targets: &[&[u32]], samples: &[u32], expected: &str| {
            let error = MicroBatch::new(sources, targets, samples, &config(), &device()).unwrap_err();
            assert_eq!(error.to_string(), expected);
        };
        check(&[], &[], &[], "micro-batch: expected at least one sample, got none");
        check(&[&[4]], &[&[]], &[7], "target of sample 7: expected at least one token, got none");
        check(
            &[&[4, 20]],
            &[&[1]],
            &[7],
            "source of sample 7: expected token ids below the model's vocab_size, 20, got 20",
        );
        check(
            &[&[4]],
            &[&[1]],
            &[],
            "micro-batch: expected as many targets and sample indices as sources, got 1 sources, 1 targets, 0 indices",
        );
    }
}
