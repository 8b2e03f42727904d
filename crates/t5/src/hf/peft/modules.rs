//! The modules of a T5, as PEFT sees them in transformers: those that an adapter may change.

use crate::config::Config;
use crate::head::is_of_classifier;
use crate::parameters::ParameterSpec;

const WEIGHT: &str = ".weight";
/// The head: a module of its own even if its weight is the shared table.
pub(super) const LM_HEAD: &str = "lm_head";

/// A linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Linear {
    /// `encoder.block.0.layer.0.SelfAttention.q`.
    pub name: String,
    /// Width of its input.
    pub inputs: usize,
    /// Width of its output.
    pub outputs: usize,
}

/// The model's linear layers in its order, the head last.
pub(super) fn linears(config: &Config) -> Vec<Linear> {
    let linear = |spec: &ParameterSpec| {
        let name = spec.name.strip_suffix(WEIGHT)?;
        let is_head = name == LM_HEAD || name == config.head_name();
        let is_linear = spec.shape.len() == 2 && !is_embedding(name) && !is_head && !is_of_classifier(name);
        is_linear.then(|| Linear { name: name.into(), inputs: spec.shape[1], outputs: spec.shape[0] })
    };
    let mut linears: Vec<Linear> = base_parameters(config).iter().filter_map(linear).collect();
    if config.gemma.is_some() {
        return linears;
    }
    let head = || Linear { name: LM_HEAD.into(), inputs: config.d_model, outputs: config.vocab_size };
    linears.extend(config.head.is_language().then(head));
    linears
}

/// The names of the model's embeddings, whose adapters are of another kind.
pub(super) fn embeddings(config: &Config) -> Vec<String> {
    let mut names: Vec<String> = ["shared", "encoder.embed_tokens", "decoder.embed_tokens"].map(String::from).into();
    let parameters = base_parameters(config);
    let modules = parameters.iter().filter_map(|spec| spec.name.strip_suffix(WEIGHT));
    names.extend(modules.filter(|name| is_embedding(name) && *name != "shared").map(String::from));
    names
}

fn is_embedding(module: &str) -> bool {
    module == "shared" || module.ends_with("relative_attention_bias") || module.ends_with("embed_tokens")
}

/// The parameters of the model without an adapter. They include the head's own, even if it is tied.
pub(super) fn base_parameters(config: &Config) -> Vec<ParameterSpec> {
    ParameterSpec::all(&Config { tie_word_embeddings: false, lora: None, ..config.clone() })
}

/// The parameters of modules whose name ends so. As in `modules_to_save`, the ending may begin anywhere, not only behind a dot.
pub(super) fn below<'a>(parameters: &'a [ParameterSpec], ending: &str) -> Vec<&'a ParameterSpec> {
    let is_below = |spec: &&ParameterSpec| {
        let dots = spec.name.match_indices('.').map(|(at, _)| &spec.name[..at]);
        dots.into_iter().any(|module| module.ends_with(ending))
    };
    parameters.iter().filter(is_below).collect()
}
