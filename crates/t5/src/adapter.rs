//! A LoRA adapter beside the base weights (Hu et al. 2021), with PEFT's terms and meaning: which linear layers it changes,
//! and how. Its tensors are parameters of the model like any others.
//!
//! `y = x Wᵀ + scale · dropout(x) Aᵀ Bᵀ`, where A is (rank, in) and B is (out, rank). With DoRA (Liu et al. 2024) the rows of
//! `W + scale · B A` are scaled to lengths that are trained.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::head::is_of_classifier;

/// The head's name. It is in no block, and `all-linear` leaves it out as PEFT does.
pub(crate) const HEAD: &str = "lm_head";
/// The table's name. PEFT leaves it out of T5's passes, so nothing trains it beside an adapter.
pub(crate) const SHARED: &str = "shared";

/// A LoRA adapter. Field names are those of PEFT's `adapter_config.json`, apart from `alpha`, `dropout`, `rslora`, `dora`
/// and `rank`, which have prefixes there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lora {
    /// Rows of A and columns of B.
    pub rank: usize,
    /// The scale is `alpha / rank`.
    pub alpha: f64,
    /// Probability of dropping an element of the adapter's input while training.
    pub dropout: f64,
    /// Rank-stabilised: the scale is `alpha / sqrt(rank)` (Kalajdzievski 2023).
    pub rslora: bool,
    /// Weight-decomposed: each output has a magnitude of its own, which is trained.
    pub dora: bool,
    /// The linear layers that have an adapter.
    pub targets: Targets,
    /// Other ranks for some layers, by the end of their name.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Other alphas for some layers, by the end of their name.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Layers whose own weight is trained as a whole and saved with the adapter: linear ones, norms, relative positions.
    pub modules_to_save: Vec<String>,
    /// The initial values of A. B starts at zero.
    pub init: LoraInit,
}

impl Default for Lora {
    /// Every linear layer of the blocks, rank 16, alpha 32, no dropout.
    fn default() -> Self {
        Lora {
            rank: 16,
            alpha: 32.0,
            dropout: 0.0,
            rslora: false,
            dora: false,
            targets: Targets::AllLinear,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            modules_to_save: Vec::new(),
            init: LoraInit::KaimingUniform,
        }
    }
}

/// The linear layers that have an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Targets {
    /// All linear layers of the blocks: `q k v o wi wi_0 wi_1 wo`, or those of a T5Gemma.
    AllLinear,
    /// Layers that have such a name, or whose name ends with it after a dot.
    Names(Vec<String>),
}

/// The initial values of A.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoraInit {
    /// Uniform within `1 / sqrt(in)`: `kaiming_uniform_(a = sqrt(5))`, PEFT's default.
    KaimingUniform,
    /// Normal with standard deviation `1 / rank`.
    Gaussian,
}

/// The adapter of one linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearLora {
    /// Rows of A and columns of B.
    pub rank: usize,
    /// Factor of `x Aᵀ Bᵀ`.
    pub scale: f64,
}

impl Lora {
    /// The adapter of the linear layer of this name, such as `encoder.block.0.layer.0.SelfAttention.q`, if it has one.
    pub fn linear(&self, linear: &str) -> Option<LinearLora> {
        let is_target = match &self.targets {
            Targets::AllLinear => linear.contains(".block.") || linear.contains(".layers."),
            Targets::Names(names) => names.iter().any(|name| is_named(linear, name)),
        };
        if !is_target || self.saves(linear) {
            return None;
        }
        let rank = pattern(&self.rank_pattern, linear).copied().unwrap_or(self.rank);
        let alpha = pattern(&self.alpha_pattern, linear).copied().unwrap_or(self.alpha);
        let divisor = if self.rslora { (rank as f64).sqrt() } else { rank as f64 };
        Some(LinearLora { rank, scale: alpha / divisor })
    }

    /// Whether the weight of this layer is trained as a whole. A classifier is one module with all of its layers.
    pub fn saves(&self, module: &str) -> bool {
        let whole = module.split('.').next().filter(|_| is_of_classifier(module)).unwrap_or(module);
        self.modules_to_save.iter().any(|name| is_named(module, name) || is_named(whole, name))
    }

    /// Whether a parameter of this name is trained.
    pub fn trains(&self, parameter: &str) -> bool {
        // Only the layers of a classifier have a bias.
        let module = parameter.strip_suffix(".weight").or_else(|| parameter.strip_suffix(".bias"));
        is_of_adapter(parameter) || module.is_some_and(|module| self.saves(module))
    }
}

/// PEFT's rule: the whole name, or the end of it behind a dot.
pub(crate) fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// The first entry that matches.
fn pattern<'a, V>(pattern: &'a BTreeMap<String, V>, module: &str) -> Option<&'a V> {
    pattern.iter().find(|(name, _)| is_named(module, name)).map(|(_, value)| value)
}

/// Whether a parameter of this name is one of an adapter.
pub fn is_of_adapter(parameter: &str) -> bool {
    parameter.contains(".lora_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: &str = "encoder.block.0.layer.0.SelfAttention.q";

    fn names(names: &[&str]) -> Targets {
        Targets::Names(names.iter().map(|&name| name.to_owned()).collect())
    }

    #[test]
    fn all_linear_means_every_layer_but_the_head() {
        let lora = Lora::default();
        assert_eq!(lora.linear(Q), Some(LinearLora { rank: 16, scale: 2.0 }));
        assert_eq!(lora.linear(HEAD), None);
        assert_eq!(Lora { targets: names(&["lm_head"]), ..lora }.linear(HEAD).map(|l| l.rank), Some(16));
    }

    #[test]
    fn a_name_is_a_whole_name_or_the_end_of_one_behind_a_dot() {
        let lora = Lora { targets: names(&["q", "layer.1.DenseReluDense.wo"]), ..Lora::default() };
        assert!(lora.linear(Q).is_some());
        assert!(lora.linear("encoder.block.0.layer.1.DenseReluDense.wo").is_some());
        assert!(lora.linear("decoder.block.0.layer.2.DenseReluDense.wo").is_none());
        assert!(lora.linear("encoder.block.0.layer.0.SelfAttention.k").is_none());
    }

    #[test]
    fn patterns_change_rank_and_alpha_and_rslora_the_divisor() {
        let rank_pattern = [("SelfAttention.q".to_owned(), 4)].into();
        let lora = Lora { rank_pattern, alpha_pattern: [("q".to_owned(), 6.0)].into(), ..Lora::default() };
        assert_eq!(lora.linear(Q), Some(LinearLora { rank: 4, scale: 1.5 }));
        assert_eq!(Lora { rslora: true, ..lora }.linear(Q).unwrap().scale, 3.0);
    }

    #[test]
    fn a_module_to_save_has_no_adapter_and_is_trained_whole() {
        let lora = Lora { modules_to_save: vec!["wo".into()], ..Lora::default() };
        assert_eq!(lora.linear("encoder.block.0.layer.1.DenseReluDense.wo"), None);
        assert!(lora.trains("encoder.block.0.layer.1.DenseReluDense.wo.weight"));
        assert!(lora.trains("encoder.block.0.layer.0.SelfAttention.q.lora_A.weight"));
        assert!(!lora.trains("encoder.block.0.layer.0.SelfAttention.q.weight"));
        let lora = Lora { modules_to_save: vec!["classification_head".into()], ..Lora::default() };
        assert!(lora.trains("classification_head.dense.bias") && lora.trains("classification_head.out_proj.weight"));
        assert!(!lora.trains("classifier.weight"));
    }
}
