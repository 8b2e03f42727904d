//! A model directory with other rows in its table of embeddings, and in a head of its own: fewer, more, or in another order.
//!
//! Rows that stay keep their bits. A new row is the mean of all rows before, computed in f64: as transformers' `resize_token_embeddings`
//! draws new rows around this mean, but without its noise. Weights go from file to file some rows at a time ([`StoredModel`]).

use std::io::Write;
use std::path::Path;

use candle_core::{Device, Tensor};

use super::merge::{WEIGHTS_FILE, headers, set_stored_dtype, with_carried, write};
use super::safetensors::{TensorHeader, Writer};
use super::save::{untie_for_transformers_4, write_configs};
use super::stored_model::StoredModel;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::parameters::ParameterSpec;

/// The result of [`with_rows`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedRows {
    /// Rows of the table: before, and now.
    pub rows: [usize; 2],
    /// Parameters before and now; a head that is the table counts once.
    pub parameters: [u64; 2],
    /// Bytes of these parameters before and now.
    pub bytes: [u64; 2],
}

/// Changes the rows of a model's tables: `rows[new]` is the row before, `None` a new one. Hands each file of the new model to `file`:
/// its name, and the function that writes it.
///
/// # Errors
/// As [`StoredModel::open`] and [`crate::Config::with_rows`].
pub fn with_rows<E: From<Error>>(
    source: &Path,
    rows: &[Option<u32>],
    target: &Path,
    mut file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
) -> Result<ChangedRows, E> {
    let model = StoredModel::open(source, None)?;
    let mut config = model.config().with_rows(rows)?;
    let weights = |config: &Config| {
        let specs = ParameterSpec::all(config);
        let parameters: u64 = specs.iter().map(ParameterSpec::elements).sum();
        Ok::<_, Error>((parameters, bytes(&headers(&model, specs, None)?)))
    };
    let [before, now] = [weights(model.config())?, weights(&config)?];
    untie_for_transformers_4(&mut config);
    let after = headers(&model, ParameterSpec::all(&config), None)?;
    set_stored_dtype(&mut config, &after);
    let after = with_carried(&model, after)?;
    // Weights with a row for each entry of the vocabulary.
    let head = format!("{}.weight", config.head_name());
    let tables = [Some(config.shared_table()), config.decoder_table(), Some(&head)];
    write_configs(target, &config, &mut file)?;
    file(WEIGHTS_FILE, &|sink| {
        let mut writer = Writer::new(&target.join(WEIGHTS_FILE), sink, after.clone(), &[("format", "pt")])?;
        for header in &after {
            match tables.contains(&Some(&header.name)) {
                true => write_table(&model, header, rows, &mut writer)?,
                false => write(&model, header, &mut writer)?,
            }
        }
        writer.into_sink();
        Ok(())
    })?;
    Ok(ChangedRows {
        rows: [model.config().vocab_size, rows.len()],
        parameters: [before.0, now.0],
        bytes: [before.1, now.1],
    })
}

fn bytes(headers: &[TensorHeader]) -> u64 {
    headers.iter().map(|header| (header.shape.iter().product::<usize>() * header.dtype.size_in_bytes()) as u64).sum()
}

/// Writes a table's rows in their new order.
fn write_table<W: Write>(
    model: &StoredModel,
    header: &TensorHeader,
    rows: &[Option<u32>],
    writer: &mut Writer<W>,
) -> Result<()> {
    let columns = header.shape[1];
    let table = model.parameter(&header.name)?;
    let has_new = rows.iter().any(Option::is_none);
    let mean = if has_new { mean_row(model, &header.name, columns)? } else { Vec::new() };
    writer.write_by_rows(&header.name, StoredModel::rows_at_a_time(columns), |first, count| {
        let mut values: Vec<f32> = Vec::with_capacity(count * columns);
        // Rows that follow each other in both tables are read at once.
        let follows = |one: &Option<u32>, other: &Option<u32>| one.is_some() && one.map(|row| row + 1) == *other;
        for run in rows[first..first + count].chunk_by(follows) {
            match run[0] {
                Some(old) => values.extend(table.rows(old as usize, run.len())?.flatten_all()?.to_vec1::<f32>()?),
                None => values.extend_from_slice(&mean),
            }
        }
        Ok(Tensor::from_vec(values, (count, columns), &Device::Cpu)?)
    })
}

/// The mean of all rows of a table.
fn mean_row(model: &StoredModel, name: &str, columns: usize) -> Result<Vec<f32>> {
    let rows = model.config().vocab_size;
    let mut sums = vec![0_f64; columns];
    model.each_rows(name, &[rows, columns], |values| {
        for row in values.chunks_exact(columns) {
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
        }
        Ok::<_, Error>(())
    })?;
    #[expect(clippy::cast_precision_loss, reason = "a number of rows")]
    let mean = sums.into_iter().map(|sum| (sum / rows as f64) as f32).collect();
    Ok(mean)
}
