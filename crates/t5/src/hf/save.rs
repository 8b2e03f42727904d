//! Writing a model directory. The caller makes this atomic: there is no rename and no temporary name here.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::{DType, Tensor};
use serde_json::Value;

use super::carried::Carried;
use super::safetensors::{PIECE_BYTES, TensorHeader, Writer};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::pager::Pager;
use crate::parameters::{Parameter, Part};

/// Writes `config.json`, `generation_config.json` and `model.safetensors` into an existing directory.
pub(crate) fn save(
    directory: &Path,
    config: &Config,
    weights: (&[Parameter], Option<&dyn Pager<Tensor>>, Option<&Carried>),
) -> Result<()> {
    save_with(directory, config, weights, |name, write| {
        let path = directory.join(name);
        let file = File::create(&path).map_err(Error::io(&path))?;
        let mut file = BufWriter::with_capacity(PIECE_BYTES, file);
        write(&mut file)?;
        file.flush().and_then(|()| file.get_ref().sync_all()).map_err(Error::io(&path))
    })
}

/// Hands each file in turn to `file`: its name, and the function that writes it. Weights that lie elsewhere are fetched one at a time.
/// Carried tensors are copied from their files.
pub(crate) fn save_with<E: From<Error>>(
    directory: &Path,
    config: &Config,
    (parameters, pager, carried): (&[Parameter], Option<&dyn Pager<Tensor>>, Option<&Carried>),
    mut file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
) -> Result<(), E> {
    config.refuse_quantised("a model whose weights are not quantised, to be saved")?;
    let tensors = in_order(config, parameters);
    let mut config = config.clone();
    // The dtype in which transformers computes by default: that of the matrices.
    let is_bf16 = parameters.iter().filter(|p| p.tensor.rank() > 1).all(|p| stored(p) == DType::BF16);
    config.set_stored_dtype(if is_bf16 { "bfloat16" } else { "float32" });
    untie_for_transformers_4(&mut config);
    write_configs(directory, &config, &mut file)?;
    let header = |(name, index): &(Cow<str>, usize)| TensorHeader {
        name: name.to_string(),
        dtype: stored(&parameters[*index]),
        shape: parameters[*index].tensor.dims().to_vec(),
    };
    let mut headers: Vec<(TensorHeader, Option<usize>)> =
        tensors.iter().map(|tensor| (header(tensor), Some(tensor.1))).collect();
    headers.extend(carried.into_iter().flat_map(Carried::headers).map(|header| (header.clone(), None)));
    headers.sort_by_key(|(header, _)| std::cmp::Reverse(header.dtype.size_in_bytes()));
    let name = "model.safetensors";
    file(name, &|sink| {
        // transformers refuses files that do not say which framework wrote them.
        let all = headers.iter().map(|(header, _)| header.clone()).collect();
        let mut writer = Writer::new(&directory.join(name), sink, all, &[("format", "pt")])?;
        for (TensorHeader { name, .. }, index) in &headers {
            let Some(index) = *index else {
                carried.map_or(Ok(()), |carried| carried.write(name, &mut writer))?;
                continue;
            };
            let tensor = &parameters[index].tensor;
            pager.map_or(Ok(()), |pager| pager.page_in(index, tensor))?;
            writer.write(name, tensor)?;
            tensor_storage::page_out(tensor);
            pager.map_or(Ok(()), |pager| pager.page_out(index, tensor))?;
        }
        writer.into_sink();
        Ok(())
    })
}

/// For a process that does not save: asks for the same weights as [`save_with`] does elsewhere, in the same order.
pub(crate) fn serve_weights(config: &Config, parameters: &[Parameter], pager: &dyn Pager<Tensor>) -> Result<()> {
    in_order(config, parameters).into_iter().try_for_each(|(_, index)| {
        pager.page_in(index, &parameters[index].tensor)?;
        pager.page_out(index, &parameters[index].tensor)
    })
}

/// The tensors of a file of weights: their names, and the indices of their parameters.
fn in_order<'a>(config: &Config, parameters: &'a [Parameter]) -> Vec<(Cow<'a, str>, usize)> {
    let mut tensors: Vec<(Cow<str>, usize)> = parameters.iter().map(|p| config.stored_name(&p.name)).zip(0..).collect();
    if is_written_twice(config) {
        let shared = parameters.iter().position(|p| p.part == Part::Shared);
        tensors.extend(shared.map(|shared| ("lm_head.weight".into(), shared)));
    }
    tensors.sort_by_key(|(_, index)| std::cmp::Reverse(stored(&parameters[*index]).size_in_bytes()));
    tensors
}

/// Whether a tied head is written as a separate one. transformers 4 scales the output of every tied head of a T5, so an unscaled one is
/// written with the same values as the table. Version 4 leaves it alone, and 5 finds the two equal and ties them.
fn is_written_twice(config: &Config) -> bool {
    config.tie_word_embeddings && !config.scale_decoder_outputs && config.gemma.is_none()
}

/// Says in the config of a model to be written that its head is a table of its own, where the table is written twice.
pub(super) fn untie_for_transformers_4(config: &mut Config) {
    config.tie_word_embeddings &= !is_written_twice(config);
}

/// The dtype that a parameter is stored in. f64 exists for tests; a saved model is f32 or bf16.
fn stored(parameter: &Parameter) -> DType {
    if parameter.tensor.dtype() == DType::BF16 { DType::BF16 } else { DType::F32 }
}

/// Hands `config.json` and `generation_config.json` to `file`.
pub(super) fn write_configs<E: From<Error>>(
    directory: &Path,
    config: &Config,
    file: &mut impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
) -> Result<(), E> {
    for (name, value) in [("config.json", config.to_json()), ("generation_config.json", config.generation_json())] {
        file(name, &|sink| write_json(&directory.join(name), sink, &value))?;
    }
    Ok(())
}

pub(super) fn write_json(path: &Path, sink: &mut dyn Write, value: &Value) -> Result<()> {
    let mut text =
        serde_json::to_string_pretty(value).map_err(|e| Error::Json { path: path.into(), problem: e.to_string() })?;
    text.push('\n');
    sink.write_all(text.as_bytes()).map_err(Error::io(path))
}
