//! A model whose blocks' products have quantised weights: a frozen base for adapters, and for answers in less memory.
//!
//! The directory is a Hugging Face directory with two differences. `config.json` has a `quantization_config` whose `quant_method` is
//! `train_low_mem`. Each quantised weight NAME is stored as `NAME.codes` and its scales, one after the other, in the order and
//! with the meaning of [`t5_ops::Quantised`]. Embeddings, head, norms and relative positions are stored as before.
//!
//! Weights go from file to file some rows at a time. Memory holds [`QUANTISED_BYTES`] of a weight, their codes and its scales.

use std::io::Write;
use std::path::Path;

use candle_core::DType;
use t5_ops::{Precision, Quantisation, Quantiser};

use super::load::StoredFiles;
use super::safetensors::{TensorHeader, Writer, part_name};
use super::save::write_configs;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::head::Head;
use crate::parameters::ParameterSpec;

/// Bytes of a weight's rows in f32 that are quantised at a time. A second copy of them is in memory.
const QUANTISED_BYTES: usize = 1 << 20;
const WEIGHTS_FILE: &str = "model.safetensors";

/// The result of [`quantise_with`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantisedWeights {
    /// The number of weights in codes.
    pub quantised: usize,
    /// The number of weights that did not change.
    pub kept: usize,
    /// Bytes of all weights.
    pub bytes: u64,
}

/// Quantises the weights of a model directory. Hands each file of the new one to `file`: its name, and the function that writes it.
/// `metadata` goes into the header of the weights' file.
///
/// # Errors
/// As [`crate::T5::load`]; [`Error::Config`] where the weights are quantised already; [`Error::TensorMismatch`] for a value
/// that is not finite.
pub fn quantise_with<E: From<Error>>(
    source: &Path,
    precision: Precision,
    target: &Path,
    metadata: &[(&str, &str)],
    mut file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
) -> Result<QuantisedWeights, E> {
    let mut config = Config::from_file(&source.join("config.json"))?.with_head(Head::Language)?;
    config.refuse_quantised("a model whose weights are not quantised yet")?;
    let stored = StoredFiles::open(source, &config)?;
    config.tie_word_embeddings = stored.is_tied(&config)?;
    stored.check_names(source, &config, &|_| false)?;
    config.base_precision = Some(precision);
    let (quantised, mut kept): (Vec<_>, Vec<_>) =
        ParameterSpec::all(&config).into_iter().partition(|spec| spec.quantisation.is_some());
    let dtype_of = |spec: &ParameterSpec| match stored.stored_as(stored.name_of(&spec.name)) {
        Ok(DType::F64) => Ok(DType::F32),
        dtype => dtype,
    };
    let dtypes = kept.iter().map(|spec| Ok((spec.name.clone(), dtype_of(spec)?))).collect::<Result<Vec<_>>>()?;
    let size_of = |spec: &ParameterSpec| {
        dtypes.iter().find(|(name, _)| *name == spec.name).map_or(0, |(_, dtype)| dtype.size_in_bytes())
    };
    kept.sort_by_key(|spec| std::cmp::Reverse(size_of(spec)));
    let mut headers = Vec::new();
    for spec in &kept {
        headers.push(TensorHeader { name: spec.name.clone(), dtype: dtype_of(spec)?, shape: spec.shape.clone() });
    }
    for (spec, quantisation) in quantised.iter().filter_map(|spec| Some((spec, spec.quantisation?))) {
        let header = |part: &t5_ops::QuantisedPart| TensorHeader {
            name: part_name(&spec.name, part),
            dtype: part.dtype,
            shape: vec![part.count],
        };
        headers.extend(quantisation.parts().iter().map(header));
    }
    write_configs(target, &config, &mut file)?;
    file(WEIGHTS_FILE, &|sink| {
        let metadata = [&[("format", "pt")], metadata].concat();
        let mut writer = Writer::in_order(&target.join(WEIGHTS_FILE), sink, headers.clone(), &metadata)?;
        for spec in &kept {
            let rows = rows_at_a_time(spec.shape[1..].iter().product());
            writer.write_by_rows(&spec.name, rows, |first, count| {
                stored.rows(stored.name_of(&spec.name), first, count)
            })?;
        }
        for (spec, quantisation) in quantised.iter().filter_map(|spec| Some((spec, spec.quantisation?))) {
            write_codes(&stored, &spec.name, quantisation, &mut writer)?;
        }
        writer.into_sink();
        Ok(())
    })?;
    let bytes = |header: &TensorHeader| (header.shape.iter().product::<usize>() * header.dtype.size_in_bytes()) as u64;
    Ok(QuantisedWeights { quantised: quantised.len(), kept: kept.len(), bytes: headers.iter().map(bytes).sum() })
}

/// Quantises one weight.
fn write_codes<W: Write>(
    stored: &StoredFiles,
    name: &str,
    quantisation: Quantisation,
    writer: &mut Writer<W>,
) -> Result<()> {
    let (rows, cols) = quantisation.shape();
    let names: Vec<String> = quantisation.parts().iter().map(|part| part_name(name, part)).collect();
    writer.write_bytes(&names, |write| {
        let mut quantiser = Quantiser::new(quantisation);
        let mut codes = Vec::new();
        let at_a_time = rows_at_a_time(cols);
        for first in (0..rows).step_by(at_a_time) {
            let values = stored.rows(stored.name_of(name), first, at_a_time.min(rows - first))?;
            let values = values.flatten_all()?.to_vec1::<f32>()?;
            codes.clear();
            quantiser.values(&values, &mut codes).map_err(|error| stored.mismatch(name, "finite values", &error))?;
            write(&codes)?;
        }
        codes.clear();
        quantiser.finish(&mut codes);
        write(&codes)
    })
}

/// The number of rows, of `columns` values each, that are quantised at a time.
fn rows_at_a_time(columns: usize) -> usize {
    (QUANTISED_BYTES / size_of::<f32>() / columns.max(1)).max(1)
}
