//! Compares evaluations, and decides when they no longer improve.

use serde::{Deserialize, Serialize};
use text_metrics::Metric;
use trainer::preference::PreferenceStats;

use crate::scores::figures::{FOUND, Figures};

/// The value by which evaluations are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measure {
    /// The loss: lower is better.
    #[default]
    Loss,
    /// The loss of preferences: lower is better.
    PreferenceLoss,
    /// The share of pairs whose chosen answer has the larger reward.
    Preferred,
    /// By how much the reward of chosen answers is larger.
    RewardMargin,
    /// What vectors or rankings find first, by its name in events: higher is better.
    Found(&'static str),
    /// A score of the answers: higher is better.
    Answers(Metric),
}

impl Measure {
    /// All but the loss of tokens.
    pub fn scores() -> impl Iterator<Item = Self> {
        let of_preferences = [Self::PreferenceLoss, Self::Preferred, Self::RewardMargin];
        let found = FOUND.into_iter().map(|(name, _)| Self::Found(name));
        of_preferences.into_iter().chain(found).chain(Metric::ALL.into_iter().map(Self::Answers))
    }

    /// The measure of one of these names.
    pub fn from_name(name: &str) -> Self {
        Self::scores().find(|measure| measure.name() == name).unwrap_or_default()
    }

    /// Its name in configs and events.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::PreferenceLoss => "preference_loss",
            Self::Preferred => "rewards/accuracies",
            Self::RewardMargin => "rewards/margins",
            Self::Found(name) => name,
            Self::Answers(metric) => metric.name(),
        }
    }

    /// Its name in tables.
    pub fn title(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::PreferenceLoss => "preference loss",
            Self::Preferred => "chosen preferred",
            Self::RewardMargin => "reward margin",
            Self::Found(name) => FOUND.into_iter().find(|(other, _)| *other == name).map_or(name, |(_, title)| title),
            Self::Answers(metric) => metric.title(),
        }
    }

    /// The score of an evaluation: larger is better. NaN, which is never better, if the evaluation has none.
    pub fn score(self, figures: &Figures) -> f64 {
        let of_preferences = |value: fn(&PreferenceStats) -> Option<f64>| {
            figures.preference.as_ref().and_then(value).unwrap_or(f64::NAN)
        };
        self.score_of(match self {
            Self::Loss => figures.loss,
            Self::PreferenceLoss => of_preferences(|of| Some(of.loss)),
            Self::Preferred => of_preferences(|of| of.accuracy),
            Self::RewardMargin => of_preferences(PreferenceStats::margin),
            Self::Found(name) => figures.found().find(|(other, _)| *other == name).map_or(f64::NAN, |(_, value)| value),
            Self::Answers(metric) => figures.value(metric).unwrap_or(f64::NAN),
        })
    }

    /// The score of a value: larger is better.
    pub fn score_of(self, value: f64) -> f64 {
        if matches!(self, Self::Loss | Self::PreferenceLoss) { -value } else { value }
    }

    /// A value as text.
    pub fn shown(self, value: f64) -> String {
        match self {
            Self::Loss | Self::PreferenceLoss | Self::RewardMargin | Self::Found(_) => format!("{value:.4}"),
            Self::Preferred => format!("{:.1} %", 100.0 * value),
            Self::Answers(metric) => metric.shown(value),
        }
    }
}

/// The number of evaluations without an improvement. A checkpoint holds it, so a resumed run stops at the same step as an uninterrupted
/// one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EarlyStoppingState {
    /// The measure.
    measure: String,
    /// The score that counts as the best, and its step.
    best: Option<(f64, u64)>,
    /// Evaluations since then.
    evaluations: u64,
}

impl EarlyStoppingState {
    /// Notes an evaluation. Its score is better if it exceeds the best one by more than `least`; NaN is never better.
    pub fn note(&mut self, measure: Measure, score: f64, step: u64, least: f64) {
        if self.measure != measure.name() {
            *self = Self { measure: measure.name().to_owned(), ..Self::default() };
        }
        if !score.is_nan() && self.best.is_none_or(|(best, _)| score - best > least) {
            self.best = Some((score, step));
            self.evaluations = 0;
        } else {
            self.evaluations += 1;
        }
    }

    /// The reason to end a run that waits for this many evaluations; `None` if the run continues.
    pub fn ends(&self, measure: Measure, patience: Option<u64>) -> Option<String> {
        let patience = patience.filter(|patience| self.measure == measure.name() && self.evaluations >= *patience)?;
        let (best, step) = self.best?;
        let evaluations =
            if patience == 1 { "1 evaluation".to_owned() } else { format!("{} evaluations", self.evaluations) };
        Some(format!(
            "{} has not improved for {evaluations}; the best is {} at step {step}",
            self.measure,
            measure.shown(measure.score_of(best))
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::keys::MEASURES;

    #[test]
    fn every_measure_is_found_by_its_name() {
        assert!(MEASURES.iter().all(|name| Measure::from_name(name).name() == *name));
        assert_eq!(MEASURES.len(), 1 + Measure::scores().count());
    }

    #[test]
    fn a_run_ends_after_so_many_evaluations_that_are_no_better_and_not_before() {
        let bleu = Measure::from_name("bleu");
        let mut stalled = EarlyStoppingState::default();
        let mut ends = Vec::new();
        for (step, score) in [10.0, 12.0, 12.4, f64::NAN, 13.0, 13.2, 13.4, 13.5].into_iter().enumerate() {
            stalled.note(bleu, score, step as u64, 0.5);
            ends.push(stalled.ends(bleu, Some(3)).is_some());
        }
        assert_eq!(ends, [false, false, false, false, false, false, false, true]);
        let reason = stalled.ends(bleu, Some(3)).unwrap();
        assert_eq!(reason, "bleu has not improved for 3 evaluations; the best is 13.00 at step 4");
        assert!(stalled.ends(bleu, None).is_none() && stalled.ends(Measure::Loss, Some(1)).is_none());
        let saved: EarlyStoppingState = serde_json::from_value(serde_json::to_value(&stalled).unwrap()).unwrap();
        assert_eq!(saved, stalled);
        stalled.note(Measure::Loss, -2.0, 9, 0.0);
        assert!(stalled.ends(Measure::Loss, Some(1)).is_none(), "another measure begins anew");
    }
}
