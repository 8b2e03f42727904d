//! `adapter_config.json`: PEFT's settings of an adapter.
//!
//! PEFT adds keys with every release. A key that is unknown here is ignored while its value is null, false or empty, and
//! refused otherwise: it may change the adapter's computation.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::entries::{Entries, Layers};
use super::head;
use super::modules::{self, LM_HEAD, Linear};
use super::patterns::{Pattern, Selection, is_end};
use crate::adapter::{Lora, LoraInit, Targets as LoraTargets};
use crate::config::{Config, read_object};
use crate::error::{Error, Result};
use crate::family::Family;
use crate::head::{Head, is_of_classifier};
use crate::parameters::Part;

/// The name of the file.
pub const CONFIG_FILE: &str = "adapter_config.json";

/// The entry in the header of the tensors' file for the text before every source. PEFT has no setting for it, and would warn of one.
pub(super) const SOURCE_PREFIX: &str = "source_prefix";

/// The largest file has a rank for each linear of the deepest model: some 100 bytes each.
const LARGEST_BYTES: u64 = 1 << 20;

/// The settings of an adapter.
#[derive(Clone, Debug)]
pub struct AdapterConfig {
    path: PathBuf,
    /// PEFT's name of the task.
    pub(super) task: Option<String>,
    /// The model that the adapter was trained on, by the name in the file.
    pub base_model: Option<String>,
    /// Rank of the adapters, except where a pattern gives another.
    pub rank: usize,
    /// The scale's numerator.
    pub alpha: f64,
    /// Dropout of the adapters' input.
    pub dropout: f64,
    /// Whether the scale is alpha by the root of the rank.
    pub rslora: bool,
    /// Whether the merged weights' rows have learned norms.
    pub dora: bool,
    /// Whether A starts from a normal distribution.
    pub gaussian: bool,
    targets: Targets,
    exclude: Option<Selection>,
    layers: Option<Layers>,
    rank_pattern: Vec<(String, usize)>,
    alpha_pattern: Vec<(String, f64)>,
    modules_to_save: Vec<String>,
    ensure_weight_tying: bool,
}

#[derive(Clone, Debug)]
enum Targets {
    /// PEFT's own choice for the model's family.
    Usual,
    AllLinear,
    Selected(Selection),
}

/// A linear layer with an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptedLinear {
    /// `encoder.block.0.layer.0.SelfAttention.q`.
    pub name: String,
    /// Width of its input.
    pub inputs: usize,
    /// Width of its output.
    pub outputs: usize,
    /// Rank of the adapter.
    pub rank: usize,
    /// Alpha of the adapter.
    pub alpha: f64,
    /// The factor of `B A`.
    pub scale: f64,
}

/// The changes of an adapter to one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// The linear layers with an adapter, in the model's order.
    pub linears: Vec<AdaptedLinear>,
    /// The parameters that the adapter replaces, by name and shape.
    pub saved: Vec<(String, Vec<usize>)>,
    /// Whether each linear has a magnitude vector.
    pub dora: bool,
}

impl AdapterConfig {
    /// Reads the file of an adapter's directory.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], or [`Error::AdapterConfig`] for a setting that is not supported.
    pub fn read(directory: &Path) -> Result<AdapterConfig> {
        let path = directory.join(CONFIG_FILE);
        let raw = read_object(&path, LARGEST_BYTES)?;
        let file = Entries { path: &path, raw: &raw };
        file.check_kind()?;
        file.check_refused()?;
        let init = file.init()?;
        let targets = match file.get("target_modules") {
            None => Targets::Usual,
            Some(Value::String(text)) if text.eq_ignore_ascii_case("all-linear") => Targets::AllLinear,
            Some(_) => Targets::Selected(file.selection("target_modules")?),
        };
        let layers = file.layers()?;
        if layers.is_some() && !matches!(&targets, Targets::Selected(Selection::Names(_))) {
            return Err(file.error("layers_to_transform", "null where `target_modules` is no list"));
        }
        Ok(AdapterConfig {
            task: head::named_task(&raw),
            base_model: file.get("base_model_name_or_path").and_then(Value::as_str).map(String::from),
            rank: file.get("r").map_or(Ok(8), |value| file.rank("r", value))?,
            alpha: file.get("lora_alpha").map_or(Ok(8.0), |value| file.number("lora_alpha", value))?,
            dropout: file.dropout()?,
            rslora: file.flag("use_rslora")?,
            dora: file.flag("use_dora")?,
            gaussian: init == Some("gaussian"),
            targets,
            exclude: file.get("exclude_modules").map(|_| file.selection("exclude_modules")).transpose()?,
            layers,
            rank_pattern: file.by_pattern("rank_pattern", Entries::rank)?,
            alpha_pattern: file.by_pattern("alpha_pattern", Entries::number)?,
            modules_to_save: file.names("modules_to_save")?,
            ensure_weight_tying: file.flag("ensure_weight_tying")?,
            path,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names in `modules_to_save`.
    pub fn modules_to_save(&self) -> &[String] {
        &self.modules_to_save
    }

    /// The changes of the adapter to a model.
    ///
    /// # Errors
    /// [`Error::AdapterConfig`] where the adapter changes nothing, or something that is not supported.
    pub fn layout(&self, model: &Config) -> Result<Layout> {
        let linears = self.targets(model)?;
        let modules: Vec<Cow<str>> = linears.iter().map(|linear| model.module_name(&linear.name)).collect();
        let (rank, alpha) = (self.ranks(&modules)?, self.alphas(&modules)?);
        drop(modules);
        let linears = linears.into_iter().zip(rank.into_iter().zip(alpha)).map(|(linear, (rank, alpha))| {
            #[expect(clippy::cast_precision_loss, reason = "a rank is small")]
            let divisor = if self.rslora { (rank as f64).sqrt() } else { rank as f64 };
            let Linear { name, inputs, outputs } = linear;
            AdaptedLinear { name, inputs, outputs, rank, alpha, scale: alpha / divisor }
        });
        let layout = Layout { linears: linears.collect(), saved: self.saved(model)?, dora: self.dora };
        let has_head = layout.linears.iter().any(|linear| linear.name == LM_HEAD)
            || layout.saved.iter().any(|(name, _)| name.starts_with(LM_HEAD));
        if self.ensure_weight_tying && has_head && model.tie_word_embeddings {
            let expected = "false: the head of this model has an adapter, its embedding has none";
            return Err(self.error("ensure_weight_tying", "true", expected));
        }
        Ok(layout)
    }

    /// The adapter with this layout, for further training. Its names are those of the file where they mean the same. Otherwise each
    /// layer has its full name.
    pub fn lora(&self, model: &Config, layout: &Layout) -> Lora {
        let linears = modules::linears(model);
        let plain = Lora {
            rank: self.rank,
            alpha: self.alpha,
            dropout: self.dropout,
            rslora: self.rslora,
            dora: self.dora,
            targets: match &self.targets {
                Targets::AllLinear => LoraTargets::AllLinear,
                Targets::Selected(Selection::Names(names)) => LoraTargets::Names(names_in(model, &linears, names)),
                _ => LoraTargets::Names(vec!["q".into(), "v".into()]),
            },
            rank_pattern: self.rank_pattern.iter().cloned().collect(),
            alpha_pattern: self.alpha_pattern.iter().cloned().collect(),
            modules_to_save: self.modules_in(model),
            init: if self.gaussian { LoraInit::Gaussian } else { LoraInit::KaimingUniform },
        };
        let means_the_same = linears.iter().all(|linear| {
            let wanted = layout.linears.iter().find(|wanted| wanted.name == linear.name);
            plain.linear(&linear.name).map(|got| (got.rank, got.scale))
                == wanted.map(|wanted| (wanted.rank, wanted.scale))
        }) && modules::base_parameters(model)
            .iter()
            .all(|spec| plain.trains(&spec.name) == layout.saved.iter().any(|(name, _)| *name == spec.name));
        if means_the_same {
            return plain;
        }
        let linears = || layout.linears.iter();
        let module =
            |(name, _): &(String, Vec<usize>)| match model.head.module(model.family).filter(|_| is_of_classifier(name))
            {
                Some(classifier) => classifier.to_owned(),
                None => name.trim_end_matches(".weight").to_owned(),
            };
        let mut modules_to_save: Vec<String> = layout.saved.iter().map(module).collect();
        modules_to_save.dedup();
        Lora {
            targets: LoraTargets::Names(linears().map(|linear| linear.name.clone()).collect()),
            rank_pattern: linears()
                .filter(|linear| linear.rank != self.rank)
                .map(|linear| (linear.name.clone(), linear.rank))
                .collect(),
            alpha_pattern: linears()
                .filter(|linear| linear.alpha != self.alpha)
                .map(|linear| (linear.name.clone(), linear.alpha))
                .collect(),
            modules_to_save,
            ..plain
        }
    }

    /// The names in `modules_to_save` that a module of the model has, as they are here.
    fn modules_in(&self, model: &Config) -> Vec<String> {
        let parameters = modules::base_parameters(model);
        let names = self.modules_to_save.iter().map(|name| model.own_name(name).into_owned());
        names.filter(|name| !modules::below(&parameters, name).is_empty()).collect()
    }

    fn targets(&self, model: &Config) -> Result<Vec<Linear>> {
        let is_excluded = self.exclusion()?;
        let mut linears = modules::linears(model);
        // Patterns are for the names that the modules have in transformers.
        let module = |name: &str| model.module_name(name).into_owned();
        let selected = match &self.targets {
            Targets::Usual if model.family == Family::Umt5 || model.family.is_gemma() => {
                let expected = format!("names of layers: PEFT has no default for {}", model.family.model_type());
                return Err(self.error("target_modules", "null", &expected));
            }
            Targets::Usual => &Selection::Names(vec!["q".into(), "v".into()]),
            Targets::AllLinear => {
                linears.retain(|linear| linear.name != LM_HEAD);
                &Selection::Names(linears.iter().map(|linear| module(&linear.name)).collect())
            }
            Targets::Selected(selection) => selection,
        };
        let is_target = |module: &str| -> Result<bool> {
            let wrong = |got: String| self.error("target_modules", &got, "names, or a regular expression");
            // PEFT looks at the layer's index only where an ending was named.
            let is_whole = matches!(selected, Selection::Names(names) if names.iter().any(|name| name == module));
            Ok(selected.has(module).map_err(wrong)?
                && (is_whole || self.is_in_layers(module)?)
                && !is_excluded(module)?)
        };
        for embedding in modules::embeddings(model) {
            if is_target(&module(&embedding))? {
                let got = format!("a choice that has the embedding `{embedding}`");
                return Err(self.error(
                    "target_modules",
                    &got,
                    "linear layers: q, k, v, o, wi, wi_0, wi_1, wo, lm_head",
                ));
            }
        }
        let mut targets = Vec::new();
        for linear in linears {
            if is_target(&module(&linear.name))? {
                targets.push(linear);
            }
        }
        if targets.is_empty() {
            let expected = "names of linear layers of this model: q, k, v, o, wi, wi_0, wi_1, wo, lm_head";
            return Err(self.error("target_modules", "a choice without any layer of this model", expected));
        }
        Ok(targets)
    }

    /// Whether a module has no adapter even if it is named: it is excluded, or saved as a whole.
    fn exclusion(&self) -> Result<impl Fn(&str) -> Result<bool>> {
        let wrong = |got: String| self.error("modules_to_save", &got, "names of modules");
        let patterns = self.modules_to_save.iter().map(|name| Pattern::below(name));
        let saved: Vec<Pattern> = patterns.collect::<Result<_, _>>().map_err(wrong)?;
        Ok(move |module: &str| {
            let excluded = self.exclude.as_ref().map_or(Ok(false), |exclude| exclude.has(module));
            if excluded.map_err(|got| self.error("exclude_modules", &got, "names, or a regular expression"))? {
                return Ok(true);
            }
            for pattern in &saved {
                if pattern.matches(module).map_err(wrong)? {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    fn is_in_layers(&self, module: &str) -> Result<bool> {
        let Some(Layers { indices, patterns }) = &self.layers else { return Ok(true) };
        for pattern in patterns {
            let number = pattern.number_in(module);
            if let Some(index) =
                number.map_err(|got| self.error("layers_pattern", &got, "the name of a list of layers"))?
            {
                return Ok(indices.contains(&index));
            }
        }
        Ok(false)
    }

    fn ranks(&self, modules: &[Cow<str>]) -> Result<Vec<usize>> {
        self.by_first_key("rank_pattern", &self.rank_pattern, self.rank, modules)
    }

    fn alphas(&self, modules: &[Cow<str>]) -> Result<Vec<f64>> {
        self.by_first_key("alpha_pattern", &self.alpha_pattern, self.alpha, modules)
    }

    /// For each linear layer, the value of the first key that matches its name in transformers.
    fn by_first_key<T: Copy>(
        &self,
        key: &str,
        patterns: &[(String, T)],
        otherwise: T,
        modules: &[Cow<str>],
    ) -> Result<Vec<T>> {
        let wrong = |got: String| self.error(key, &got, "regular expressions for the names of layers");
        let mut values = vec![None; modules.len()];
        // One compiled pattern at a time, as there may be one for each layer.
        for (text, value) in patterns {
            let pattern = Pattern::of_key(text).map_err(wrong)?;
            for (found, module) in values.iter_mut().zip(modules) {
                if found.is_none() && pattern.matches(module).map_err(wrong)? {
                    *found = Some(*value);
                }
            }
        }
        Ok(values.into_iter().map(|value| value.unwrap_or(otherwise)).collect())
    }

    /// The parameters of `modules_to_save`.
    fn saved(&self, model: &Config) -> Result<Vec<(String, Vec<usize>)>> {
        let parameters = modules::base_parameters(model);
        let mut saved: Vec<(String, Vec<usize>)> = Vec::new();
        for ending in &self.modules_to_save {
            let found = modules::below(&parameters, &model.own_name(ending));
            if found.is_empty() && (head::is_added_by_peft(ending, &model.head) || model.head == Head::Encoder) {
                continue;
            }
            if ["shared", "embed_tokens"].iter().any(|table| table.ends_with(ending.as_str()) && !ending.is_empty()) {
                let got = format!("a list with the shared table (`{ending}`)");
                return Err(self.error(
                    "modules_to_save",
                    &got,
                    "modules whose training PEFT takes into account: lm_head, norms",
                ));
            }
            if model.gemma.is_some()
                && found.iter().any(|spec| spec.part == Part::LmHead && !is_of_classifier(&spec.name))
            {
                let got = format!("a list with the head (`{ending}`), which is the table of a T5Gemma");
                return Err(self.error("modules_to_save", &got, "norms and linear layers of the blocks"));
            }
            if found.is_empty() {
                let got = format!("a list with `{ending}`, which this model has not");
                return Err(self.error("modules_to_save", &got, "names of this model's modules, such as lm_head"));
            }
            for spec in found {
                if !saved.iter().any(|(name, _)| *name == spec.name) {
                    saved.push((spec.name.clone(), spec.shape.clone()));
                }
            }
        }
        Ok(saved)
    }

    fn error(&self, key: &str, got: &str, expected: &str) -> Error {
        Error::AdapterConfig {
            path: self.path.clone(),
            key: key.into(),
            got: got.into(),
            expected: expected.into(),
            hint: "the adapter and the model must belong together",
        }
    }
}

/// The names that some layer has, as they are here: PEFT ignores the others.
fn names_in(model: &Config, linears: &[Linear], names: &[String]) -> Vec<String> {
    let names = names.iter().map(|name| model.own_name(name).into_owned());
    names.filter(|name| linears.iter().any(|linear| is_end(&linear.name, name))).collect()
}
