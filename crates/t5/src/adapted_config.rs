//! An adapter and its base model: whether they fit.

use crate::adapter::{HEAD, Lora, SHARED, Targets, is_named};
use crate::config::Config;
use crate::error::{Error, Result};

impl Lora {
    /// Checks the numbers, and that every name is the name of a layer of the model.
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
                    return bad("targets", linears_of(config), target.clone());
                }
            }
        }
        let modules = module_names(config);
        let is_table = |name: &str| name == SHARED || name.ends_with("embed_tokens");
        let is_module = |named: &String| modules.iter().any(|name| !is_table(name) && is_named(name, named));
        let has_own = config.gemma.is_none() || config.head.labels().is_some();
        let is_head = |named: &String| has_own && config.head.module(config.family) == Some(named.as_str());
        if let Some(module) = self.modules_to_save.iter().find(|module| !is_module(module) && !is_head(module)) {
            return bad("modules_to_save", "names of layers of this model, and not `shared`", module.clone());
        }
        // Neither PEFT nor this crate reads an adapter without a linear layer.
        if names.filter_map(|name| self.linear(name)).count() == 0 {
            return bad("targets", "at least one linear layer that is not in `lora.modules_to_save`", "none".into());
        }
        Ok(())
    }
}

impl Config {
    /// The model with this adapter. If the adapter saves a head that is tied to the embedding, the head becomes a table of its own,
    /// scaled as before, as in PEFT.
    ///
    /// # Errors
    /// As [`Lora::validate`].
    pub fn with_adapter(&self, lora: Lora) -> Result<Config> {
        lora.validate(self)?;
        let tie_word_embeddings = self.tie_word_embeddings && !lora.saves(HEAD);
        Ok(Config { tie_word_embeddings, lora: Some(lora), ..self.clone() })
    }

    /// The model whose adapter, if it has one, is saved with the layers of a classifier, which train beside it.
    #[must_use]
    pub fn saving_classifier(mut self) -> Config {
        let module = self.head.module(self.family).filter(|_| self.head.labels().is_some());
        if let (Some(module), Some(lora)) = (module, &mut self.lora)
            && !lora.saves(module)
        {
            lora.modules_to_save.push(module.to_owned());
        }
        self
    }
}

/// The ends of the names of a model's linear layers, in words.
fn linears_of(config: &Config) -> &'static str {
    match config.gemma {
        None => "names of linear layers (q, k, v, o, wi, wi_0, wi_1, wo, lm_head)",
        Some(_) => "names of linear layers (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj)",
    }
}

/// The names of a model's linear layers, the head's last.
fn linear_names(config: &Config) -> Vec<String> {
    let mut names = module_names(config);
    let is_in_block = |name: &str| name.contains(".block.") || name.contains(".layers.");
    names.retain(|name| is_in_block(name) && !name.contains("norm") && !name.contains("relative_attention_bias"));
    names.extend((config.head.is_language() && config.gemma.is_none()).then(|| HEAD.to_owned()));
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

    fn names(names: &[&str]) -> Targets {
        Targets::Names(names.iter().map(|&name| name.to_owned()).collect())
    }

    #[test]
    fn names_that_no_layer_has_are_errors_that_say_so() {
        let config = Config { num_layers: 1, num_decoder_layers: 1, ..Config::default() };
        let validate = |lora: Lora| lora.validate(&config).map_err(|error| error.to_string());
        assert_eq!(validate(Lora::default()), Ok(()));
        let error = validate(Lora { targets: names(&["query"]), ..Lora::default() }).unwrap_err();
        assert!(error.contains("query"), "{error}");
        assert_eq!(validate(Lora { modules_to_save: vec!["lm_head".into()], ..Lora::default() }), Ok(()));
        let unknown = Lora { modules_to_save: vec!["head".into()], ..Lora::default() }.validate(&config).unwrap_err();
        assert_eq!(unknown.hint().unwrap(), "set `lora.modules_to_save`");
        let saved_alone = Lora { targets: names(&["wo"]), modules_to_save: vec!["wo".into()], ..Lora::default() };
        assert!(validate(saved_alone).unwrap_err().contains("lora.modules_to_save"));
        assert!(validate(Lora { rank: 0, ..Lora::default() }).is_err());
        assert!(validate(Lora { dropout: 1.0, ..Lora::default() }).is_err());
        assert!(validate(Lora { targets: names(&["wi_0"]), ..Lora::default() }).is_err(), "this model has no gate");
    }
}
