//! The pass that weighs the samples of a batch of pairs, before the step that trains on them ([`crate::preference`]).
//!
//! Sample `2 i` is a chosen answer, sample `2 i + 1` the rejected one. Of rows with a label, sample `2 i` is the row's answer and sample
//! `2 i + 1` that of the row before, as TRL pairs them; only the first takes part in the step. The pass computes the log-probability of each, under the model and
//! without its adapter, and keeps no activations. Micro-batch-major it goes through the step's micro-batches, two at a time. Layer-major it
//! takes all of them through each block together, so that weights in files are read once. A reference that is a model of its own computes
//! one micro-batch at a time.

use t5::{EvalContext, MicroBatch, StepContext, T5};

use crate::error::{Error, Result};
use crate::parallel::Parallel;
use crate::preference::{Pair, Preference, PreferenceStats};
use crate::ranking::RowLabels;
use crate::stats::StepStats;
use crate::trainer::{Batch, StepPlan, Trainer};

/// The last answer of the processes before this one, or of all, among those that have any.
fn last_before(parallel: &Parallel, mine: Option<&Vec<u32>>) -> Result<Option<Vec<u32>>> {
    let said: Vec<u8> = mine.into_iter().flatten().flat_map(|id| id.to_le_bytes()).collect();
    let all = parallel.group().gather(&said).map_err(Error::from)?;
    let (before, after): (&[Vec<u8>], &[Vec<u8>]) = all.split_at(parallel.group().rank());
    let last = after.iter().chain(before).rfind(|said| !said.is_empty());
    Ok(last.map(|said| said.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect()))
}

/// The micro-batches of a step, two at a time: the pass keeps no activations, so it has room for twice the samples, and reads weights that come
/// one by one half as often. No pair is of two shards, so that bits do not depend on the number of processes. A reference that is a model of its
/// own has room for one.
fn joined(cut: &[Vec<usize>], shards: &[usize], preference: &Preference) -> Vec<Vec<usize>> {
    let most = if preference.has_reference_model { 1 } else { 2 };
    let shard_of = |samples: &Vec<usize>| {
        let mut end = 0;
        shards.iter().position(|shard| {
            end += shard;
            samples.first().is_some_and(|sample| *sample < end)
        })
    };
    let of_shards = cut.chunk_by(|one, other| shard_of(one) == shard_of(other));
    of_shards.flat_map(|of_shard| of_shard.chunks(most).map(<[Vec<usize>]>::concat)).collect()
}

impl Trainer {
    /// The log-probabilities of this process's pairs, in a batch that `cut` divides into micro-batches; `None` if `interrupted` returned
    /// true.
    pub(crate) fn compare(
        &self,
        preference: &Preference,
        (batch, labels): (&Batch, &[bool]),
        (cut, first_sample): (&[Vec<usize>], usize),
        plan: &StepPlan,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Pair>>> {
        let cx = EvalContext {
            activations: self.options.precision.activations(),
            loss_chunk_rows: plan.levers.loss_chunk_rows,
        };
        let tokens = |pair: usize| [0, 1].map(|answer| batch.targets[2 * pair + answer].len() as f64);
        let is_desirable = |pair: usize| labels.get(pair).copied().unwrap_or_default();
        let pair = |pair| Pair { tokens: tokens(pair), is_desirable: is_desirable(pair), ..Pair::default() };
        let mut pairs: Vec<Pair> = (0..batch.targets.len() / 2).map(pair).collect();
        for pass in self.passes(batch, (cut, first_sample), plan) {
            let (samples, micro_batches) = pass?;
            let of_model = (micro_batches, plan.levers.layer_major.is_some());
            let models = (&self.model, self.frozen.as_deref());
            let Some(streams) = losses(models, of_model, preference, &cx, interrupted)? else { return Ok(None) };
            for (stream, losses) in streams.into_iter().enumerate() {
                for (&sample, loss) in samples.iter().zip(losses) {
                    pairs[sample / 2].stream(stream)[sample % 2] = -loss;
                }
            }
        }
        Ok(Some(pairs))
    }

    /// As [`Trainer::compare`], for rows with labels: each answer, and that of the row before in the order of the whole batch. The first row
    /// has the answer of the last.
    pub(crate) fn compare_mismatched(
        &self,
        preference: &Preference,
        (batch, labels): (&Batch, &[bool]),
        (shards, first_row): (&[usize], usize),
        plan: &StepPlan,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Pair>>> {
        let before_first = match self.parallel() {
            None => batch.targets.last().cloned(),
            Some(parallel) => last_before(parallel, batch.targets.last())?,
        };
        let before = before_first.iter().chain(batch.targets);
        let pairs = batch.targets.iter().zip(before);
        let targets: Vec<Vec<u32>> = pairs.flat_map(|(own, before)| [own.clone(), before.clone()]).collect();
        let sources: Vec<Vec<u32>> = batch.sources.iter().flat_map(|source| [source.clone(), source.clone()]).collect();
        let pairs = Batch { sources: &sources, targets: &targets };
        let shards: Vec<usize> = shards.iter().map(|rows| 2 * rows).collect();
        let (cut, _) = self.cut_of_shards(&pairs, &shards, plan);
        self.compare(
            preference,
            (&pairs, labels),
            (&joined(&cut, &shards, preference), 2 * first_row),
            plan,
            interrupted,
        )
    }

    /// The weight of each sample of a step of this process, where the loss is one of preferences or of rankings. `None` if `interrupted`
    /// returned true.
    ///
    /// # Errors
    /// The samples of a process are an error. Then all processes fail.
    pub(crate) fn weigh_samples(
        &self,
        (batch, labels): (&Batch, RowLabels),
        (cut, first_sample): (&[Vec<usize>], usize),
        (shards, plan, cx): (&[usize], &StepPlan, &StepContext),
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Weighed>> {
        if let Some(of) = self.options.ranking.as_ref().filter(|of| of.weighs()) {
            let mine = self.rank((batch, labels), (cut, first_sample), (plan, cx), interrupted).transpose();
            let Some(mine) = mine else { return Ok(None) };
            let (loss, weights) = self.weigh_texts(of, mine.map_err(Error::before_any_change))?;
            return Ok(Some(Weighed { weights: Some(weights), ranking: Some(loss), ..Weighed::default() }));
        }
        let Some(of) = &self.options.preference else { return Ok(Some(Weighed::default())) };
        let compared = match of.loss.has_labels() {
            false => self.compare(of, (batch, &[]), (&joined(cut, shards, of), first_sample), plan, interrupted),
            true => self.compare_mismatched(of, (batch, labels.desirable), (shards, first_sample), plan, interrupted),
        };
        let Some(mine) = compared.transpose() else { return Ok(None) };
        let numbers = mine.map_err(Error::before_any_change);
        let numbers = numbers.map(|mine| mine.iter().flat_map(Pair::numbers).collect::<Vec<f64>>());
        let (all, mine) = self.numbers_of_all(numbers)?;
        let all: Vec<Pair> = all.as_chunks().0.iter().copied().map(Pair::from_numbers).collect();
        if all.is_empty() {
            let (weights, preference) = (Some(Vec::new()), Some(PreferenceStats::default()));
            return Ok(Some(Weighed { weights, preference, ..Weighed::default() }));
        }
        let (weights, stats) = of.of_batch(&all);
        let samples = if of.loss.has_labels() { 1 } else { 2 };
        let mine = mine.start / Pair::NUMBERS..mine.end / Pair::NUMBERS;
        let weights = weights[mine].iter().flat_map(|of_pair| &of_pair[..samples]).copied().collect();
        Ok(Some(Weighed { weights: Some(weights), preference: Some(stats), ranking: None }))
    }
}

/// What the pass before a step says.
#[derive(Debug, Default)]
pub(crate) struct Weighed {
    /// The weight of each sample's loss; `None`: the step minimises their mean.
    pub weights: Option<Vec<f64>>,
    preference: Option<PreferenceStats>,
    ranking: Option<f64>,
}

impl Weighed {
    /// Notes the loss of the batch.
    pub fn note(&self, stats: &mut StepStats) {
        if let Some(preference) = self.preference {
            (stats.loss, stats.objective) = (preference.cross_entropy, Some(preference.loss));
            stats.preference = Some(preference);
        }
        if let Some(loss) = self.ranking {
            (stats.loss, stats.objective, stats.ranking) = (loss, None, Some(loss));
        }
    }
}

/// The cross-entropy of each sample of some micro-batches, in their order: under the model and, if the loss compares with it, under the
/// reference: the model without its adapter, or `frozen`. `together`: all micro-batches, and both of the model, in one pass. `None` if
/// `interrupted` returned true.
///
/// # Errors
/// An operation fails; [`Error::InvalidOption`] if the reference is a model that is not there.
pub(crate) fn losses(
    (model, frozen): (&T5, Option<&T5>),
    (of_model, together): (Vec<MicroBatch>, bool),
    preference: &Preference,
    cx: &EvalContext,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Vec<Vec<f64>>>> {
    let count = of_model.len();
    let without_adapter = || of_model.iter().cloned().map(MicroBatch::without_adapter).collect::<Vec<_>>();
    let passes: Vec<(&T5, Vec<MicroBatch>)> = match (preference.loss.has_reference(), preference.has_reference_model) {
        (false, _) => vec![(model, of_model)],
        (true, false) if together => vec![(model, [of_model.clone(), without_adapter()].concat())],
        (true, false) => vec![(model, of_model.clone()), (model, without_adapter())],
        (true, true) => {
            let expected = "a model that the trained one is compared with";
            let frozen = frozen.ok_or_else(|| Error::invalid_option("preference.reference", expected, "none"))?;
            let of_reference = of_model.clone().into_iter().map(|micro_batch| (frozen, vec![micro_batch]));
            std::iter::once((model, of_model)).chain(of_reference).collect()
        }
    };
    let mut losses = Vec::new();
    for (model, pass) in &passes {
        let Some(of_pass) = model.losses_of_samples(pass, cx, interrupted)? else { return Ok(None) };
        losses.extend(of_pass);
    }
    Ok(Some(losses.chunks(count.max(1)).map(<[Vec<f64>]>::concat).collect()))
}
