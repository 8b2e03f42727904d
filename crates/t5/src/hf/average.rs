//! A model directory with the mean of several models' weights: checkpoints of a run, or models that were tuned from the same one. Weights go
//! from the files to the new one some rows at a time ([`StoredModel`]), and are added up in f64 in the order of the models.

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};

use super::carried::is_carried;
use super::merge::{WEIGHTS_FILE, headers, set_stored_dtype, with_carried, write};
use super::safetensors::Writer;
use super::save::{untie_for_transformers_4, write_configs};
use super::stored_model::StoredModel;
use crate::error::{Error, Result};
use crate::parameters::ParameterSpec;

/// The result of [`average_with`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AveragedModels {
    /// Parameters of the model.
    pub parameters: u64,
    /// Bytes of the weights.
    pub bytes: u64,
}

/// Averages the weights of models of one shape. The first one's config and stored dtypes are those of the result. Hands each file of the new
/// model to `file`: its name, and the function that writes it.
///
/// # Errors
/// As [`StoredModel::open`]; [`Error::Directory`] for a model of another shape; [`Error::NotFiniteToSave`] for a mean that is not finite.
///
/// # Panics
/// There is no model.
pub fn average_with<E: From<Error>>(
    models: &[PathBuf],
    target: &Path,
    mut file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
) -> Result<AveragedModels, E> {
    let opened = models.iter().map(|path| StoredModel::open(path, None)).collect::<Result<Vec<_>>>()?;
    let first = opened.first().expect("at least one model");
    for (path, model) in models.iter().zip(&opened) {
        check_shape(path, model, first)?;
    }
    let mut config = first.config().clone();
    untie_for_transformers_4(&mut config);
    let headers = headers(first, ParameterSpec::all(&config), None)?;
    set_stored_dtype(&mut config, &headers);
    let headers = with_carried(first, headers)?;
    write_configs(target, &config, &mut file)?;
    file(WEIGHTS_FILE, &|sink| {
        let path = target.join(WEIGHTS_FILE);
        let mut writer = Writer::new(&path, sink, headers.clone(), &[("format", "pt")])?;
        for header in &headers {
            if is_carried(&header.name, first.config()) {
                write(first, header, &mut writer)?;
                continue;
            }
            let parameters = opened.iter().map(|model| model.parameter(&header.name)).collect::<Result<Vec<_>>>()?;
            let columns = header.shape[1..].iter().product::<usize>();
            writer.write_by_rows(&header.name, StoredModel::rows_at_a_time(columns), |first_row, count| {
                let mut sums = vec![0_f64; count * columns];
                for parameter in &parameters {
                    let values = parameter.rows(first_row, count)?.flatten_all()?.to_vec1::<f32>()?;
                    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(value));
                }
                #[expect(clippy::cast_precision_loss, reason = "a number of models")]
                let mean: Vec<f32> = sums.into_iter().map(|sum| (sum / parameters.len() as f64) as f32).collect();
                if mean.iter().any(|value| !value.is_finite()) {
                    return Err(Error::NotFiniteToSave { path: path.clone(), tensor: header.name.clone() });
                }
                let shape = [&[count], &header.shape[1..]].concat();
                Ok(Tensor::from_vec(mean, shape, &Device::Cpu)?)
            })?;
        }
        writer.into_sink();
        Ok(())
    })?;
    let elements = |shape: &[usize]| shape.iter().product::<usize>() as u64;
    let bytes = |dtype: DType, shape: &[usize]| elements(shape) * dtype.size_in_bytes() as u64;
    Ok(AveragedModels {
        parameters: ParameterSpec::elements_of_all(first.config()),
        bytes: headers.iter().map(|header| bytes(header.dtype, &header.shape)).sum(),
    })
}

/// Refuses a model whose parameters are others than those of the first, or mean something else.
fn check_shape(path: &Path, model: &StoredModel, first: &StoredModel) -> Result<()> {
    let refused = |problem: String| {
        let hint = "average checkpoints of one run, or models that were tuned from the same one".to_owned();
        Err(Error::Directory { path: path.to_owned(), problem, hint })
    };
    let (config, expected) = (model.config(), first.config());
    for (key, got, expected) in [
        ("num_heads", config.num_heads.to_string(), expected.num_heads.to_string()),
        ("feed_forward_proj", config.feed_forward_proj.clone(), expected.feed_forward_proj.clone()),
        ("tie_word_embeddings", config.tie_word_embeddings.to_string(), expected.tie_word_embeddings.to_string()),
    ] {
        if got != expected {
            return refused(format!("`{key}` is {got}, and {expected} in the first model"));
        }
    }
    if config.gemma != expected.gemma {
        return refused("`encoder` or `decoder` differs from the first model's".into());
    }
    let [specs, expected] = [config, expected].map(ParameterSpec::all);
    let named = |specs: &[ParameterSpec], name: &str| {
        specs.iter().find(|spec| spec.name == name).map_or("absent".to_owned(), |spec| format!("{:?}", spec.shape))
    };
    let all = specs.iter().chain(&expected).map(|spec| spec.name.as_str());
    match all.map(|name| (name, named(&specs, name), named(&expected, name))).find(|(_, got, expected)| got != expected)
    {
        Some((name, got, expected)) => refused(format!("`{name}` is {got}, and {expected} in the first model")),
        None => Ok(()),
    }
}
