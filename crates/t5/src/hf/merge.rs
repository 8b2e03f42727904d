//! A model directory whose weights have an adapter merged into them. The weights go from the base's files to the new one some rows at a
//! time ([`StoredModel`]).

use std::io::Write;
use std::path::Path;

use candle_core::DType;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::hf::carried::is_carried;
use crate::hf::safetensors::{TensorHeader, Writer};
use crate::hf::save::{untie_for_transformers_4, write_configs};
use crate::hf::stored_model::StoredModel;
use crate::parameters::ParameterSpec;

pub(super) const WEIGHTS_FILE: &str = "model.safetensors";

/// The result of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergedAdapter {
    /// Linear layers that had an adapter.
    pub linears: usize,
    /// Parameters that the adapter replaced.
    pub replaced: usize,
    /// Whether the head, tied to the shared table in the base, has weights of its own now.
    pub parts_head: bool,
    /// Bytes of the weights.
    pub bytes: u64,
}

/// Merges an adapter into the model of a directory. Hands each file of the new model to `file`: its name, and the function that writes
/// it. Without a `dtype` each weight keeps its stored dtype.
///
/// # Errors
/// The model's directory lacks what the adapter is beside; [`Error::AdapterTensor`] for merged weights that are not finite.
pub fn merge_adapter_with<E: From<Error>>(
    base: &Path,
    adapter: &Path,
    dtype: Option<DType>,
    target: &Path,
    mut file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
) -> Result<MergedAdapter, E> {
    let model = StoredModel::below(base, adapter)?;
    let mut config = model.config().clone();
    untie_for_transformers_4(&mut config);
    let specs = ParameterSpec::all(&config);
    let headers = headers(&model, specs, dtype)?;
    set_stored_dtype(&mut config, &headers);
    let headers = with_carried(&model, headers)?;
    write_configs(target, &config, &mut file)?;
    file(WEIGHTS_FILE, &|sink| {
        let stored = |header: &TensorHeader| TensorHeader { name: stored_name(&model, header), ..header.clone() };
        let stored = headers.iter().map(stored).collect();
        let mut writer = Writer::new(&target.join(WEIGHTS_FILE), sink, stored, &[("format", "pt")])?;
        for header in &headers {
            write(&model, header, &mut writer)?;
        }
        writer.into_sink();
        Ok(())
    })?;
    let bytes = |header: &TensorHeader| (header.shape.iter().product::<usize>() * header.dtype.size_in_bytes()) as u64;
    Ok(MergedAdapter {
        linears: model.adapted_linears(),
        replaced: model.replaced(),
        parts_head: model.parts_head(),
        bytes: headers.iter().map(bytes).sum(),
    })
}

/// Names the widest dtype of the matrices in the config.
pub(super) fn set_stored_dtype(config: &mut Config, headers: &[TensorHeader]) {
    let matrices = headers.iter().filter(|header| header.shape.len() > 1);
    config.set_stored_dtype(match matrices.map(|header| header.dtype).max_by_key(DType::size_in_bytes) {
        Some(DType::BF16) => "bfloat16",
        Some(DType::F16) => "float16",
        _ => "float32",
    });
}

/// The new file's tensors, the wider ones first.
pub(super) fn headers(
    model: &StoredModel,
    specs: Vec<ParameterSpec>,
    dtype: Option<DType>,
) -> Result<Vec<TensorHeader>> {
    let header = |spec: ParameterSpec| {
        let stored = match model.stored_as(&spec.name)? {
            DType::F64 => DType::F32,
            stored => stored,
        };
        let is_vector = spec.shape.len() == 1;
        // The vectors of a narrow model stay in f32, as in every model that this crate writes.
        let wanted = dtype.map(|dtype| if is_vector { DType::F32 } else { dtype });
        Ok(TensorHeader { name: spec.name, dtype: wanted.unwrap_or(stored), shape: spec.shape })
    };
    let mut headers: Vec<TensorHeader> = specs.into_iter().map(header).collect::<Result<_>>()?;
    headers.sort_by_key(|header| std::cmp::Reverse(header.dtype.size_in_bytes()));
    Ok(headers)
}

/// These tensors of the new file, and those that no text uses, the wider ones first.
pub(super) fn with_carried(model: &StoredModel, mut headers: Vec<TensorHeader>) -> Result<Vec<TensorHeader>> {
    headers.extend(model.files().carried(model.config())?);
    headers.sort_by_key(|header| std::cmp::Reverse(header.dtype.size_in_bytes()));
    Ok(headers)
}

/// The name of a parameter in the new file.
fn stored_name(model: &StoredModel, header: &TensorHeader) -> String {
    model.config().stored_name(&header.name).into_owned()
}

/// Writes a tensor of [`with_carried`].
pub(super) fn write<W: Write>(model: &StoredModel, header: &TensorHeader, writer: &mut Writer<W>) -> Result<()> {
    if is_carried(&header.name, model.config()) {
        return model.files().write_carried(&header.name, writer);
    }
    let parameter = model.parameter(&header.name)?;
    let rows = StoredModel::rows_at_a_time(header.shape[1..].iter().product());
    writer.write_by_rows(&stored_name(model, header), rows, |first, count| {
        let values = parameter.rows(first, count)?;
        if let Some(error) = parameter.not_finite(header.dtype) {
            let stored = values.to_dtype(header.dtype)?.to_dtype(DType::F32)?;
            if !stored.sum_all()?.to_scalar::<f32>()?.is_finite() {
                return Err(error);
            }
        }
        Ok(values)
    })
}
