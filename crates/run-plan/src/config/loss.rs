//! A loss beside the plain cross-entropy of tokens, as a row: the key that chooses it, the keys that only it reads, and the settings
//! that it refuses. [`super::LOSSES`] has all.

use trainer::Sharding;

use super::{Config, Objective};
use crate::failure::{Failure, Outcome};

/// A loss beside the plain cross-entropy of tokens.
pub struct Loss {
    /// The key that chooses it.
    pub key: &'static str,
    /// The setting that chooses it, in messages.
    pub setting: &'static str,
    /// The loss in messages, and why it has no terms of the cross-entropy.
    pub has_no_terms: [&'static str; 2],
    /// Whether texts have dropout.
    pub has_dropout: bool,
    /// The keys that have an effect only with it, and why others have none.
    pub keys: (&'static [&'static str], &'static str),
    /// Whether this config chooses it.
    pub is_chosen: fn(&Config) -> bool,
    /// Refuses what contradicts this loss alone.
    pub check: fn(&Config) -> Outcome<()>,
}

impl Loss {
    /// Refuses settings beside which the loss would be another one.
    ///
    /// # Errors
    /// The contradiction.
    pub fn check(&self, config: &Config) -> Outcome<()> {
        if !(self.is_chosen)(config) {
            return Ok(());
        }
        (self.check)(config)?;
        let (values, origin) = (&config.values, config.values.origin(self.key));
        let dropout = [
            ("train.dropout", config.train.dropout.unwrap_or(0.0)),
            ("lora.dropout", config.lora.as_ref().map_or(0.0, |adapter| adapter.lora.dropout)),
        ];
        let terms = [("train.z_loss", config.train.z_loss), ("train.label_smoothing", config.train.label_smoothing)];
        let refused = dropout.into_iter().filter(|_| !self.has_dropout).chain(terms);
        if let Some((key, value)) = refused.into_iter().find(|(_, value)| *value != 0.0) {
            let ([called, why], given) = (self.has_no_terms, values.origin(key));
            return Err(Failure::usage(format!("`{key}` ({given}) is {value}, and {called} ({origin}) {why}"))
                .hint(format!("`--set {key}=0`")));
        }
        if config.parallel.sharding == Sharding::Weights {
            return Err(Failure::usage(format!(
                "`parallel.shard = \"weights\"` ({}) cannot be combined with {} ({origin}) yet",
                values.origin("parallel.shard"),
                self.setting
            ))
            .hint("`--set parallel.shard=gradients` divides all other state"));
        }
        Ok(())
    }

    /// Refuses a task with a loss of its own beside preferences and pretraining.
    ///
    /// # Errors
    /// The contradiction.
    pub fn check_alone(&self, config: &Config) -> Outcome<()> {
        let is_pretraining = config.data.objective == Some(Objective::Denoising);
        let other = config.preference.map(|_| "preference.loss").or(is_pretraining.then_some("data.objective"));
        let Some(key) = other else { return Ok(()) };
        Err(Failure::usage(format!("{} ({}) has no `{key}`", self.setting, config.values.origin(self.key)))
            .hint("leave out one of them"))
    }
}
