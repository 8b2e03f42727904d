//! A LoRA adapter beside the base weights (Hu et al. 2021), with PEFT's terms and meaning: which linear layers it changes,
//! and how. Its tensors are parameters of the model like any others.
//!
//! `y = x Wᵀ + scale · dropout(x) Aᵀ Bᵀ`, where A is (rank, in) and B is (out, rank). With DoRA (Liu et al. 2024) the rows of
//! `W + scale · B A` are brought to a length that is trained.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::{Error, Result};

/// The head's name. It is in no block, and `all-linear` leaves it out as PEFT does.
const HEAD: &str = "lm_head";
/// The table's name. PEFT leaves it out of T5's passes, so nothing trains it beside an adapter.
const SHARED: &str = "shared";

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
    /// Layers whose own weight is trained whole and saved with the adapter: linear ones, norms, relative positions.
    pub modules_to_save: Vec<String>,
    /// How A starts. B starts at zero.
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
    /// All of the blocks: `q k v o wi wi_0 wi_1 wo`.
    AllLinear,
    /// Those with such a name, or whose name ends with it after a dot.
    Names(Vec<String>),
}

/// How A starts.
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
    pub fn of(&self, linear: &str) -> Option<LinearLora> {
        let is_target = match &self.targets {
            Targets::AllLinear => linear.contains(".block."),
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

    /// Whether the weight of this layer is trained whole.
    pub fn saves(&self, module: &str) -> bool {
        self.modules_to_save.iter().any(|name| is_named(module, name))
    }

    /// Whether a parameter of this name is trained.
    pub fn trains(&self, parameter: &str) -> bool {
        is_of_adapter(parameter) || parameter.strip_suffix(".weight").is_some_and(|module| self.saves(module))
    }

    /// Checks the numbers, and that every name is of a layer of the model.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field.
    pub fn validate(&self, config: &Config) -> Result<()> {
        let bad = |field: &str, expected: &str, got: String| {
            let (origin, key) = ("adapter".to_owned(), format!("lora.{field}"));
            Err(Error::Config { origin, key, got, expected: expected.into() })
        };
        let linears = linear_names(config);
        let names = linears.iter().map(String::as_str);
        if !(0.0..1.0).contains(&self.dropout) {
            return bad("dropout", "at least 0 and less than 1", self.dropout.to_string());
        }
        let ranks = || self.rank_pattern.values().chain([&self.rank]);
        if let Some(rank) = ranks().find(|rank| !(1..=1 << 16).contains(*rank)) {
            return bad("rank", "1 to 65536", rank.to_string());
        }
        let alphas = || self.alpha_pattern.values().chain([&self.alpha]);
        if let Some(alpha) = alphas().find(|alpha| !(alpha.is_finite() && **alpha > 0.0)) {
            return bad("alpha", "more than 0", alpha.to_string());
        }
        if let Targets::Names(targets) = &self.targets {
            for target in targets {
                if !names.clone().any(|name| is_named(name, target)) {
                    return bad(
                        "targets",
                        "names of linear layers (q, k, v, o, wi, wi_0, wi_1, wo, lm_head)",
                        target.clone(),
                    );
                }
            }
        }
        let modules = module_names(config);
        let is_module = |named: &String| modules.iter().any(|name| name != SHARED && is_named(name, named));
        if let Some(module) = self.modules_to_save.iter().find(|module| !is_module(module) && *module != HEAD) {
            return bad("modules_to_save", "names of layers of this model, and not `shared`", module.clone());
        }
        if names.filter_map(|name| self.of(name)).count() == 0 && self.modules_to_save.is_empty() {
            return bad("targets", "at least one linear layer", "none".into());
        }
        Ok(())
    }
}

impl Config {
    /// The model with this adapter. A head that is tied to the embedding and saved with the adapter is a table of its own from then on,
    /// scaled as before, as it is in PEFT.
    ///
    /// # Errors
    /// Those of [`Lora::validate`].
    pub fn with_adapter(&self, lora: Lora) -> Result<Config> {
        lora.validate(self)?;
        let tie_word_embeddings = self.tie_word_embeddings && !lora.saves(HEAD);
        Ok(Config { tie_word_embeddings, lora: Some(lora), ..self.clone() })
    }
}

/// PEFT's rule: the whole name, or the end of it behind a dot.
fn is_named(module: &str, name: &str) -> bool {
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

/// The names of a model's linear layers, the head's last.
fn linear_names(config: &Config) -> Vec<String> {
    let mut names = module_names(config);
    names.retain(|name| {
        name.contains(".block.") && !name.contains("layer_norm") && !name.contains("relative_attention_bias")
    });
    names.push(HEAD.to_owned());
    names
}

/// The names of a model's layers that have a weight of their own.
fn module_names(config: &Config) -> Vec<String> {
    let specs = crate::ParameterSpec::all(&Config { lora: None, ..config.clone() });
    specs.iter().filter_map(|spec| spec.name.strip_suffix(".weight").map(str::to_owned)).collect()
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
        assert_eq!(lora.of(Q), Some(LinearLora { rank: 16, scale: 2.0 }));
        assert_eq!(lora.of(HEAD), None);
        assert_eq!(Lora { targets: names(&["lm_head"]), ..lora }.of(HEAD).map(|l| l.rank), Some(16));
    }

    #[test]
    fn a_name_is_a_whole_name_or_the_end_of_one_behind_a_dot() {
        let lora = Lora { targets: names(&["q", "layer.1.DenseReluDense.wo"]), ..Lora::default() };
        assert!(lora.of(Q).is_some());
        assert!(lora.of("encoder.block.0.layer.1.DenseReluDense.wo").is_some());
        assert!(lora.of("decoder.block.0.layer.2.DenseReluDense.wo").is_none());
        assert!(lora.of("encoder.block.0.layer.0.SelfAttention.k").is_none());
    }

    #[test]
    fn patterns_change_rank_and_alpha_and_rslora_the_divisor() {
        let rank_pattern = [("SelfAttention.q".to_owned(), 4)].into();
        let lora = Lora { rank_pattern, alpha_pattern: [("q".to_owned(), 6.0)].into(), ..Lora::default() };
        assert_eq!(lora.of(Q), Some(LinearLora { rank: 4, scale: 1.5 }));
        assert_eq!(Lora { rslora: true, ..lora }.of(Q).unwrap().scale, 3.0);
    }

    #[test]
    fn a_module_to_save_has_no_adapter_and_is_trained_whole() {
        let lora = Lora { modules_to_save: vec!["wo".into()], ..Lora::default() };
        assert_eq!(lora.of("encoder.block.0.layer.1.DenseReluDense.wo"), None);
        assert!(lora.trains("encoder.block.0.layer.1.DenseReluDense.wo.weight"));
        assert!(lora.trains("encoder.block.0.layer.0.SelfAttention.q.lora_A.weight"));
        assert!(!lora.trains("encoder.block.0.layer.0.SelfAttention.q.weight"));
    }

    #[test]
    fn names_that_no_layer_has_are_errors_that_say_so() {
        let config = Config { num_layers: 1, num_decoder_layers: 1, ..Config::default() };
        let validate = |lora: Lora| lora.validate(&config).map_err(|error| error.to_string());
        assert_eq!(validate(Lora::default()), Ok(()));
        let error = validate(Lora { targets: names(&["query"]), ..Lora::default() }).unwrap_err();
        assert!(error.contains("query"), "{error}");
        assert_eq!(validate(Lora { modules_to_save: vec!["lm_head".into()], ..Lora::default() }), Ok(()));
        assert!(validate(Lora { modules_to_save: vec!["head".into()], ..Lora::default() }).is_err());
        assert!(validate(Lora { rank: 0, ..Lora::default() }).is_err());
        assert!(validate(Lora { dropout: 1.0, ..Lora::default() }).is_err());
        assert!(validate(Lora { targets: names(&["wi_0"]), ..Lora::default() }).is_err(), "this model has no gate");
    }
}
