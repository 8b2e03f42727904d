//! The files that make a model directory one of sentence-transformers: which modules follow the encoder, and how they make a vector.
//!
//! `modules.json` is written last: without it, the directory is that of an encoder.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use t5::Pooling;

use crate::config;
use crate::failure::{Failure, Outcome};
use crate::files::run_dir;

const MODULES: &str = "modules.json";
const POOLING: &str = "1_Pooling";
const NORMALIZE: &str = "2_Normalize";
/// The largest of these files that is read.
const LARGEST_BYTES: u64 = 1 << 20;
/// sentence-transformers' keys of poolings.
const MODES: [(&str, Pooling); 4] = [
    ("pooling_mode_mean_tokens", Pooling::Mean),
    ("pooling_mode_cls_token", Pooling::Cls),
    ("pooling_mode_max_tokens", Pooling::Max),
    ("pooling_mode_lasttoken", Pooling::Last),
];

/// How a directory makes vectors of its encoder's output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Modules {
    /// How the vectors of tokens become one.
    pub pooling: Pooling,
    /// Whether vectors have length 1.
    pub normalizes: bool,
    /// The most tokens of a text.
    pub max_tokens: Option<usize>,
    /// The directory of a linear layer between both.
    pub dense: Option<PathBuf>,
}

/// A linear layer over vectors, with its activation.
#[derive(Debug)]
pub struct Dense {
    /// (out, in)
    weight: Tensor,
    /// (out)
    bias: Option<Tensor>,
    is_tanh: bool,
}

impl Dense {
    /// Reads the layer in a directory, for vectors of `inputs` numbers.
    ///
    /// # Errors
    /// A file is missing or damaged, the layer has another width, or an activation that is not supported.
    pub fn load(directory: &Path, inputs: usize) -> Outcome<Dense> {
        let config = directory.join("config.json");
        let settings = read(&config)?.unwrap_or_default();
        let activation = text(&settings, "activation_function").rsplit('.').next().unwrap_or_default();
        let is_tanh = match activation {
            "" | "Tanh" => true,
            "Identity" => false,
            other => {
                return Err(Failure::unusable(format!(
                    "{}: the activation `{other}` is not supported",
                    config.display()
                ))
                .hint("Identity and Tanh are"));
            }
        };
        let file = directory.join("model.safetensors");
        let reader = t5::safetensors::Reader::open(&file)?;
        let outputs = match reader.shape("linear.weight") {
            Some(&[outputs, width]) if width == inputs => outputs,
            shape => {
                let problem = format!("{}: `linear.weight` has the shape {shape:?}", file.display());
                return Err(
                    Failure::unusable(problem).hint(format!("expected [N, {inputs}], for the encoder's vectors"))
                );
            }
        };
        let tensor = |name: &str| reader.read(name, DType::F32, &Device::Cpu);
        let bias = match reader.shape("linear.bias") {
            Some(shape) if *shape == [outputs] => Some(tensor("linear.bias")?),
            Some(shape) => {
                return Err(Failure::unusable(format!("{}: `linear.bias` has the shape {shape:?}", file.display())));
            }
            None => None,
        };
        Ok(Dense { weight: tensor("linear.weight")?, bias, is_tanh })
    }

    /// The numbers of a result.
    pub fn width(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Bytes of the layer.
    pub fn bytes(&self) -> u64 {
        (self.weight.elem_count() * size_of::<f32>()) as u64
    }

    /// The results for some vectors, one after the other.
    ///
    /// # Errors
    /// The product fails.
    pub fn forward(&self, vectors: &[f32]) -> Outcome<Vec<f32>> {
        let apply = || -> candle_core::Result<Vec<f32>> {
            let inputs = self.weight.dims()[1];
            let vectors = Tensor::from_slice(vectors, (vectors.len() / inputs, inputs), &Device::Cpu)?;
            let mut results = vectors.matmul(&self.weight.t()?)?; // (n, out)
            if let Some(bias) = &self.bias {
                results = results.broadcast_add(bias)?;
            }
            if self.is_tanh { results.tanh()? } else { results }.flatten_all()?.to_vec1()
        };
        apply().map_err(|error| Failure::internal(format!("a layer over vectors: {error}")))
    }
}

impl Modules {
    /// How vectors are made: as the first run that made one of these says, or else as the model's directory does.
    ///
    /// # Errors
    /// As [`Modules::read`].
    pub fn resolve<'a>(directory: &Path, trained: impl Iterator<Item = &'a Path>) -> Outcome<Modules> {
        match Modules::of_run(trained) {
            Some(modules) => Ok(modules),
            None => Ok(Modules::read(directory)?.unwrap_or_default()),
        }
    }

    /// How the first run that made one of these made vectors; `None`: it made none.
    pub fn of_run<'a>(trained: impl Iterator<Item = &'a Path>) -> Option<Modules> {
        let (_, values) = run_dir::values_of(trained)?.ok()?;
        let of = config::embedding::from_values(&values).ok()??;
        let max_tokens = values.integer("data.max_source_tokens").and_then(|most| usize::try_from(most).ok());
        Some(Modules { pooling: of.pooling, normalizes: of.normalizes, max_tokens, dense: None })
    }

    /// Reads the files of a directory. `None`: they are not there.
    ///
    /// # Errors
    /// A file cannot be read, or names a module that is not supported.
    pub fn read(directory: &Path) -> Outcome<Option<Modules>> {
        let Some(modules) = read(&directory.join(MODULES))? else { return Ok(None) };
        let mut found = Modules::default();
        for module in modules.as_array().into_iter().flatten() {
            let (kind, path) = (text(module, "type"), text(module, "path"));
            match kind.rsplit('.').next().unwrap_or_default() {
                "Transformer" => {
                    let settings = read(&directory.join(path).join("sentence_bert_config.json"))?.unwrap_or_default();
                    found.max_tokens = settings["max_seq_length"].as_u64().and_then(|most| usize::try_from(most).ok());
                }
                "Pooling" => found.pooling = pooling(&directory.join(path).join("config.json"))?,
                "Dense" if found.dense.is_none() && !found.normalizes => found.dense = Some(directory.join(path)),
                "Normalize" => found.normalizes = true,
                other => {
                    let path = directory.join(MODULES);
                    return Err(Failure::unusable(format!(
                        "{}: the module `{other}` is not supported",
                        path.display()
                    ))
                    .hint("Transformer, Pooling, one Dense and Normalize are read, in this order"));
                }
            }
        }
        Ok(Some(found))
    }

    /// Writes the files into a model directory.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, directory: &Path, width: usize) -> Outcome<()> {
        let mut modules = vec![("", "Transformer"), (POOLING, "Pooling")];
        modules.extend(self.normalizes.then_some((NORMALIZE, "Normalize")));
        let of_module = |(index, (path, kind)): (usize, &(&str, &str))| {
            json!({"idx": index, "name": index.to_string(), "path": path,
                "type": format!("sentence_transformers.models.{kind}")})
        };
        let list: Value = modules.iter().enumerate().map(of_module).collect();
        let mut pooling = json!({"word_embedding_dimension": width});
        MODES.iter().for_each(|(key, mode)| pooling[*key] = json!(*mode == self.pooling));
        for (path, _) in &modules[1..] {
            durable_files::create_directories(&directory.join(path))?;
        }
        let settings = json!({"max_seq_length": self.max_tokens, "do_lower_case": false});
        for (path, contents) in [
            (directory.join(POOLING).join("config.json"), pooling),
            (directory.join("sentence_bert_config.json"), settings),
            (directory.join(MODULES), list),
        ] {
            let text = format!("{contents:#}\n");
            durable_files::write_atomic(&path, text.as_bytes())?;
        }
        Ok(())
    }
}

/// The pooling in the settings of a module.
fn pooling(path: &Path) -> Outcome<Pooling> {
    let settings = read(path)?.unwrap_or_default();
    let chosen: Vec<&str> = match settings["pooling_mode"].as_str() {
        Some(mode) => vec![mode],
        None => {
            let entries = settings.as_object().into_iter().flatten();
            let modes = entries.filter(|(key, value)| key.starts_with("pooling_mode_") && **value == json!(true));
            modes.map(|(key, _)| key.as_str()).collect()
        }
    };
    let known = |mode: &str| {
        let of_key = MODES.iter().find(|(key, _)| *key == mode).map(|(_, pooling)| *pooling);
        of_key.or_else(|| Pooling::named(mode.trim_end_matches("token").trim_end_matches("tokens")))
    };
    match chosen.as_slice() {
        [mode] if known(mode).is_some() => Ok(known(mode).unwrap_or_default()),
        [] => Ok(Pooling::Mean),
        modes => {
            let problem = format!("{}: the pooling {} is not supported", path.display(), modes.join(" with "));
            Err(Failure::unusable(problem).hint("name another one: `--pooling mean`, `cls`, `max` or `last`"))
        }
    }
}

fn text<'a>(module: &'a Value, key: &str) -> &'a str {
    module[key].as_str().unwrap_or_default()
}

/// A file of JSON; `None`: it is not there.
fn read(path: &Path) -> Outcome<Option<Value>> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = regular_file::read(path, LARGEST_BYTES).map_err(|error| Failure::io("read it", path, &error))?;
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|error| Failure::unusable(format!("{}: expected JSON: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_a_directory_without_modules_says_nothing() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(Modules::read(directory.path()).unwrap(), None);
        for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Max, Pooling::Last] {
            for normalizes in [false, true] {
                let modules = Modules { pooling, normalizes, max_tokens: Some(77), dense: None };
                modules.write(directory.path(), 16).unwrap();
                assert_eq!(Modules::read(directory.path()).unwrap(), Some(modules));
            }
        }
    }

    #[test]
    fn a_layer_over_vectors_is_their_product_with_its_weight_and_its_activation() {
        let directory = tempfile::tempdir().unwrap();
        let tensor = |values: &[f32], shape: &[usize]| Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
        let (weight, bias) = (tensor(&[1.0, 2.0, -1.0, 0.5, 0.0, 3.0], &[3, 2]), tensor(&[0.5, 0.0, -1.0], &[3]));
        let file = directory.path().join("model.safetensors");
        t5::safetensors::write(&file, &[("linear.weight", &weight), ("linear.bias", &bias)], &[]).unwrap();
        let layer = |activation: &str| {
            let settings = format!("{{\"activation_function\": \"torch.nn.modules.{activation}\"}}");
            std::fs::write(directory.path().join("config.json"), settings).unwrap();
            Dense::load(directory.path(), 2).unwrap()
        };
        let vectors = [2.0, 1.0, 0.0, -1.0];
        let expected = [4.5, -1.5, 2.0, -1.5, -0.5, -4.0];
        assert_eq!(layer("linear.Identity").forward(&vectors).unwrap(), expected);
        let tanh = layer("activation.Tanh").forward(&vectors).unwrap();
        assert!(tanh.iter().zip(expected).all(|(got, of)| (got - of.tanh()).abs() < 1e-6), "{tanh:?}");
        assert!(Dense::load(directory.path(), 4).unwrap_err().message.contains("the shape"));
    }

    #[test]
    fn modules_and_poolings_that_are_not_supported_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let weighted = r#"[{"path": "2_Weighted", "type": "sentence_transformers.models.WeightedLayerPooling"}]"#;
        write(MODULES, weighted);
        assert!(Modules::read(directory.path()).unwrap_err().message.contains("`WeightedLayerPooling`"));
        write(MODULES, r#"[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]"#);
        write("2_Dense/config.json", r#"{"activation_function": "torch.nn.modules.activation.GELU"}"#);
        let dense = Modules::read(directory.path()).unwrap().unwrap().dense.unwrap();
        assert!(Dense::load(&dense, 4).unwrap_err().message.contains("`GELU`"));
        write(MODULES, r#"[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]"#);
        write("1_Pooling/config.json", r#"{"pooling_mode_weightedmean_tokens": true}"#);
        assert!(Modules::read(directory.path()).unwrap_err().message.contains("pooling_mode_weightedmean_tokens"));
        write("1_Pooling/config.json", r#"{"pooling_mode": "lasttoken"}"#);
        assert_eq!(Modules::read(directory.path()).unwrap().unwrap().pooling, Pooling::Last);
    }
}
