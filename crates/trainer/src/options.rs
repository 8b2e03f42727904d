//! The trainer's options, checked together.

use std::collections::HashSet;

use candle_core::DType;
use serde::{Deserialize, Serialize};
use t5::{Config, Head};
use t5_ops::TokenLoss;

use crate::contrastive::{Contrastive, ContrastiveLoss};
use crate::distillation::Distillation;
use crate::error::{Error, Result};
use crate::groups::Group;
use crate::optimizer::OptimizerOptions;
use crate::preference::Preference;
use crate::ranking::Ranking;
use crate::rule::check_from_zero;
use crate::schedule::Schedule;

/// The dtype of activations. Optimizer state stays in f32; so do gradients and weights, unless [`GradientPrecision`] or
/// [`MasterWeights`] differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Single precision.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// Double precision, with an f64 model: for proofs.
    F64,
}

impl Precision {
    /// The dtype in which activations are computed and kept.
    pub fn activations(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F64 => DType::F64,
        }
    }
}

/// Precision of the weights between two updates, with bf16 activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MasterWeights {
    /// f32, rounded to bf16 when products need them.
    #[default]
    F32,
    /// bf16 alone. An update is computed in f32 and rounded up or down at random, so that its expected value is exact.
    StochasticRounding,
    /// bf16 alone. Updates are rounded to the nearest value, which loses small ones. For comparison.
    NearestRounding,
}

impl MasterWeights {
    /// The word of the config.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::StochasticRounding => "stochastic-rounding",
            Self::NearestRounding => "nearest-rounding",
        }
    }
}

/// The dtype that the gradients of the blocks' matrices are summed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientPrecision {
    /// f32: the sum over micro-batches is exact to its last bits, however the batch is cut.
    #[default]
    F32,
    /// bf16: half the memory; the sum is rounded to nearest after every micro-batch. Tables and vectors stay in f32.
    Bf16,
}

/// The trainer's options. Saved in every checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerOptions {
    /// Seed of the dropout masks.
    pub seed: u64,
    /// Probability of dropping an element.
    pub dropout: f64,
    /// Dtype of activations.
    pub precision: Precision,
    /// Precision of the weights.
    #[serde(default)]
    pub master_weights: MasterWeights,
    /// Precision of gradient sums.
    #[serde(default)]
    pub gradient_precision: GradientPrecision,
    /// The frozen parameters; see [`crate::freeze`].
    pub freeze: Vec<String>,
    /// Global L2 norm that gradients are clipped to; 0 switches clipping off.
    pub grad_clip_norm: f64,
    /// The factor of `(log Z)²` of each target token, which is minimised beside the cross-entropy.
    #[serde(default)]
    pub z_loss: f64,
    /// The share of each label that is divided among all entries of the vocabulary, as in `torch.nn.CrossEntropyLoss`.
    #[serde(default)]
    pub label_smoothing: f64,
    /// The weight of each class in the loss of a classifier, in the order of its labels; none: all are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub class_weights: Vec<f64>,
    /// A loss of preferences in place of the cross-entropy: samples `2 i` and `2 i + 1` of a batch are a chosen and a rejected answer to one
    /// source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preference: Option<Preference>,
    /// A share of the loss beside a teacher, which is [`crate::Trainer::compare_with`]'s model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distillation: Option<Distillation>,
    /// A loss of vectors in place of the cross-entropy, for an encoder: sources are anchors, and targets the texts beside them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contrastive: Option<Contrastive>,
    /// A loss of rankings in place of the cross-entropy: targets are one token, and rows are lists of texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranking: Option<Ranking>,
    /// The optimizer. Checkpoints of earlier versions knew Adafactor alone.
    #[serde(alias = "adafactor")]
    pub optimizer: OptimizerOptions,
    /// Parameters with a learning rate and a weight decay of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
    /// The learning rate's curve.
    pub schedule: Schedule,
    /// The number of optimizer steps after which the schedule ends.
    pub total_steps: u64,
    /// The number of non-finite steps in a row that ends the run; at least 1.
    pub max_non_finite: u32,
}

impl Default for TrainerOptions {
    fn default() -> Self {
        TrainerOptions {
            seed: 0,
            dropout: 0.1,
            precision: Precision::F32,
            master_weights: MasterWeights::F32,
            gradient_precision: GradientPrecision::F32,
            freeze: Vec::new(),
            grad_clip_norm: 1.0,
            z_loss: 0.0,
            label_smoothing: 0.0,
            class_weights: Vec::new(),
            preference: None,
            distillation: None,
            contrastive: None,
            ranking: None,
            optimizer: OptimizerOptions::default(),
            groups: Vec::new(),
            schedule: Schedule::CONSTANT,
            total_steps: 1,
            max_non_finite: 10,
        }
    }
}

impl TrainerOptions {
    /// The terms that are minimised beside the cross-entropy.
    pub fn token_loss(&self) -> TokenLoss {
        let is_logit = self.ranking.is_some_and(|of| of.loss.is_of_logits());
        TokenLoss { z_loss: self.z_loss, label_smoothing: self.label_smoothing, is_logit }
    }

    /// Whether a pass before each step gives each sample's loss a weight.
    pub fn weighs_samples(&self) -> bool {
        self.preference.is_some() || self.ranking.is_some_and(|of| of.weighs())
    }

    /// Whether steps ask a model beside the trained one ([`crate::Trainer::compare_with`]).
    pub fn has_frozen_model(&self) -> bool {
        self.distillation.is_some() || self.preference.is_some_and(|of| of.has_reference_model)
    }

    /// The dtype of the model that these options train.
    pub fn parameter_dtype(&self) -> DType {
        match (self.precision, self.master_weights) {
            (Precision::F64, _) => DType::F64,
            (_, MasterWeights::F32) => DType::F32,
            (_, MasterWeights::StochasticRounding | MasterWeights::NearestRounding) => DType::BF16,
        }
    }

    /// The dtype of the blocks' gradient accumulators, for [`t5::Gradients::new`].
    pub fn gradient_dtype(&self) -> DType {
        match (self.precision, self.gradient_precision) {
            (Precision::F64, _) => DType::F64,
            (_, GradientPrecision::F32) => DType::F32,
            (_, GradientPrecision::Bf16) => DType::BF16,
        }
    }

    /// Checks every option and every pair of options that can contradict each other.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] naming the first invalid one.
    pub fn validate(&self) -> Result<()> {
        self.optimizer.validate()?;
        self.schedule.validate()?;
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::invalid_option("train.dropout", "a number from 0 up and below 1", self.dropout));
        }
        if !(self.grad_clip_norm.is_finite() && self.grad_clip_norm >= 0.0) {
            let expected = "a finite number from 0 up; 0 switches clipping off";
            return Err(Error::invalid_option("train.grad_clip_norm", expected, self.grad_clip_norm));
        }
        if !(self.z_loss.is_finite() && self.z_loss >= 0.0) {
            return Err(Error::invalid_option("train.z_loss", "a finite number from 0 up", self.z_loss));
        }
        if !(0.0..1.0).contains(&self.label_smoothing) {
            let expected = "a number from 0 up and below 1";
            return Err(Error::invalid_option("train.label_smoothing", expected, self.label_smoothing));
        }
        self.validate_preference()?;
        self.validate_distillation()?;
        self.validate_contrastive()?;
        self.validate_ranking()?;
        self.validate_class_weights()?;
        self.groups.iter().try_for_each(validate_group)?;
        if self.master_weights != MasterWeights::F32 && self.precision != Precision::Bf16 {
            let expected = "`f32` unless `train.precision` is `bf16`";
            return Err(Error::invalid_option("train.master_weights", expected, self.master_weights.name()));
        }
        if self.gradient_precision != GradientPrecision::F32 && self.precision == Precision::F64 {
            let expected = "`f32` beside an f64 model";
            return Err(Error::invalid_option("train.gradient_precision", expected, "bf16"));
        }
        if self.max_non_finite == 0 {
            return Err(Error::invalid_option("train.max_non_finite_steps", "at least 1", 0));
        }
        if self.optimizer.has_own_schedule() && !self.schedule.is_constant() {
            let expected =
                "`constant` without warm-up beside `optimizer.relative_step = true`, which is a schedule of its own";
            return Err(Error::invalid_option("schedule.name", expected, self.schedule));
        }
        Ok(())
    }

    /// The loss that `key` chooses is computed without the terms beside the cross-entropy.
    /// Refuses options that this model, of which the parameters of these names train, does not fit.
    pub(crate) fn validate_for(&self, model: &Config, trained: &HashSet<&str>) -> Result<()> {
        if self.preference.is_some_and(|of| of.loss.has_reference() && !of.has_reference_model) {
            // The reference is the model without its adapter: nothing else may have been trained.
            if let Some(name) = trained.iter().find(|name| !t5::is_of_adapter(name)) {
                let expected = "an adapter, and nothing else that trains, for a loss with a reference";
                return Err(Error::invalid_option("preference.loss", expected, format!("`{name}`, which trains")));
            }
        }
        let classes = model.head.labels().map_or(0, |labels| labels.names.len());
        if ![0, classes].contains(&self.class_weights.len()) {
            let expected = format!("a weight of each of the model's {classes} classes");
            return Err(Error::invalid_option("task.class_weights", &expected, self.class_weights.len()));
        }
        if self.contrastive.is_some() != (model.head == Head::Encoder) {
            let got = format!("a {}", model.head.architecture(model.family));
            return Err(Error::invalid_option("embedding.loss", "an encoder, which has no other loss", got));
        }
        Ok(())
    }

    fn validate_no_terms(&self, key: &str) -> Result<()> {
        let terms = [("train.z_loss", self.z_loss), ("train.label_smoothing", self.label_smoothing)];
        match terms.into_iter().find(|(_, value)| *value != 0.0) {
            Some((term, value)) => Err(Error::invalid_option(term, &format!("0 beside `{key}`"), value)),
            None => Ok(()),
        }
    }

    fn validate_contrastive(&self) -> Result<()> {
        let Some(Contrastive { loss, temperature, margin, has_negatives, largest_score, .. }) = self.contrastive else {
            return Ok(());
        };
        if !(temperature.is_finite() && temperature > 0.0) {
            return Err(Error::invalid_option("embedding.temperature", "a finite number above 0", temperature));
        }
        if !(margin.is_finite() && margin >= 0.0) {
            return Err(Error::invalid_option("embedding.margin", "a finite number from 0 up", margin));
        }
        if !(largest_score.is_finite() && largest_score > 0.0) {
            return Err(Error::invalid_option("embedding.largest_score", "a finite number above 0", largest_score));
        }
        if loss.has_scores() && has_negatives {
            return Err(Error::invalid_option(
                "embedding.loss",
                "`mnr` or `triplet` for rows with a negative text",
                loss.name(),
            ));
        }
        if loss == ContrastiveLoss::Triplet && !has_negatives {
            return Err(Error::invalid_option("embedding.loss", "`mnr` for rows without a negative text", loss.name()));
        }
        Ok(())
    }

    fn validate_distillation(&self) -> Result<()> {
        let Some(distillation) = self.distillation else { return Ok(()) };
        distillation.validate()?;
        if self.preference.is_some() || self.contrastive.is_some() {
            return Err(Error::invalid_option("distill.teacher", "the cross-entropy beside it", "another loss"));
        }
        self.validate_no_terms("distill.teacher")
    }

    fn validate_ranking(&self) -> Result<()> {
        let Some(Ranking { weights, .. }) = self.ranking else { return Ok(()) };
        check_from_zero(&weights.map(|weight| ("task.class_weights", weight)))?;
        self.validate_no_terms("ranking.loss")
    }

    fn validate_class_weights(&self) -> Result<()> {
        let key = "task.class_weights";
        self.class_weights.iter().try_for_each(|weight| check_from_zero(&[(key, *weight)]))?;
        if self.class_weights.is_empty() {
            return Ok(());
        }
        if self.class_weights.iter().all(|weight| *weight == 0.0) {
            return Err(Error::invalid_option(key, "a weight above 0", "none"));
        }
        let beside = [("train.z_loss", self.z_loss), ("train.label_smoothing", self.label_smoothing)];
        match beside.into_iter().find(|(_, value)| *value != 0.0) {
            Some((key, value)) => Err(Error::invalid_option(key, "0 beside `task.class_weights`", value)),
            None => Ok(()),
        }
    }

    fn validate_preference(&self) -> Result<()> {
        let Some(Preference { beta, gamma, weights, .. }) = self.preference else { return Ok(()) };
        check_from_zero(&[("preference.desirable_weight", weights[0]), ("preference.undesirable_weight", weights[1])])?;
        if !(beta.is_finite() && beta > 0.0) {
            return Err(Error::invalid_option("preference.beta", "a finite number above 0", beta));
        }
        if !(gamma.is_finite() && gamma >= 0.0) {
            return Err(Error::invalid_option("preference.gamma", "a finite number from 0 up", gamma));
        }
        // The pass that weighs the answers has no dropout, and theirs would be another loss.
        if self.dropout != 0.0 {
            return Err(Error::invalid_option("train.dropout", "0 beside `preference.loss`", self.dropout));
        }
        self.validate_no_terms("preference.loss")
    }
}

fn validate_group(group: &Group) -> Result<()> {
    check_from_zero(&[
        ("optimizer.groups: learning_rate_factor", group.learning_rate_factor),
        ("optimizer.groups: weight_decay", group.weight_decay.unwrap_or(0.0)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adafactor::AdafactorOptions;

    #[test]
    fn options_that_contradict_each_other_are_refused_by_name() {
        let check = |change: &dyn Fn(&mut TrainerOptions), name: &str| {
            let mut options = TrainerOptions::default();
            change(&mut options);
            let error = options.validate().unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        };
        assert!(TrainerOptions::default().validate().is_ok());
        check(&|o| o.dropout = 1.0, "train.dropout");
        check(&|o| o.dropout = f64::NAN, "train.dropout");
        check(&|o| o.master_weights = MasterWeights::StochasticRounding, "train.master_weights");
        check(&|o| o.grad_clip_norm = -1.0, "train.grad_clip_norm");
        check(&|o| o.z_loss = f64::NAN, "train.z_loss");
        check(&|o| o.label_smoothing = 1.0, "train.label_smoothing");
        let contrastive = |of: Contrastive| move |o: &mut TrainerOptions| o.contrastive = Some(of.clone());
        let usual = Contrastive::default;
        check(&contrastive(Contrastive { temperature: 0.0, ..usual() }), "embedding.temperature");
        check(&contrastive(Contrastive { margin: f64::NAN, ..usual() }), "embedding.margin");
        check(&contrastive(Contrastive { largest_score: 0.0, ..usual() }), "embedding.largest_score");
        let cosine = Contrastive { loss: ContrastiveLoss::Cosine, has_negatives: true, ..usual() };
        check(&contrastive(cosine), "embedding.loss");
        check(&contrastive(Contrastive { loss: ContrastiveLoss::Triplet, ..usual() }), "embedding.loss");
        check(&|o| o.class_weights = vec![1.0, -1.0], "task.class_weights");
        check(&|o| o.class_weights = vec![0.0, 0.0], "task.class_weights");
        check(&|o| (o.class_weights, o.label_smoothing) = (vec![1.0, 2.0], 0.1), "train.label_smoothing");
        check(&|o| o.max_non_finite = 0, "train.max_non_finite_steps");
        check(&|o| o.schedule.warmup_steps = Some(10), "schedule.name");
        check(&|o| o.schedule.warmup_steps = Some(10), "got constant after 10 steps of warm-up");
        let no_warmup = Schedule { warmup_steps: Some(0), ..Schedule::CONSTANT };
        TrainerOptions { schedule: no_warmup, ..TrainerOptions::default() }.validate().expect("no warm-up at all");
        let group = |learning_rate_factor, decay| {
            vec![Group { parameters: vec!["*".into()], learning_rate_factor, weight_decay: Some(decay) }]
        };
        check(&|o| o.groups = group(-1.0, 0.0), "optimizer.groups");
        check(&|o| o.groups = group(1.0, f64::NAN), "optimizer.groups");
        let no_rate = AdafactorOptions { relative_step: false, ..AdafactorOptions::default() };
        check(&|o| o.optimizer = no_rate.into(), "optimizer.learning_rate");
    }
}
