//! A model whose weights hold an adapter: `W + s B A`, or with DoRA `m (W + s B A) / ||W + s B A||` by rows.
//!
//! The weights go from the base's files to the new one some rows at a time: in memory are [`MERGED_BYTES`] of a weight and
//! the adapter of one layer. All arithmetic is in f32.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use candle_core::{D, DType, Device, Tensor};

use super::config::AdaptedLinear;
use super::weights::AdapterDirectory;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::hf::load::StoredFiles;
use crate::hf::safetensors::{TensorHeader, Writer};
use crate::hf::save::write_configs;
use crate::parameters::ParameterSpec;

/// Bytes of a weight's rows in f32 that are merged at a time. Up to four copies of them are in memory.
const MERGED_BYTES: usize = 4 << 20;
const WEIGHTS_FILE: &str = "model.safetensors";
const HEAD: &str = "lm_head.weight";

/// What a merge did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Linear layers that had an adapter.
    pub linears: usize,
    /// Parameters that the adapter replaced.
    pub replaced: usize,
    /// Whether the head, tied to the shared table in the base, has weights of its own now.
    pub parts_head: bool,
    /// Bytes of the weights.
    pub bytes: u64,
}

/// Merges an adapter into the model of a directory, and hands each file of the new model to `file`: its name, and what writes it.
/// Without a `dtype` each weight keeps the one that it is stored in.
///
/// # Errors
/// Those of [`crate::T5::load`] and [`AdapterDirectory::open`]; [`Error::AdapterTensor`] for merged weights that are not finite.
pub fn merge_with<E: From<Error>>(
    base: &Path,
    adapter: &Path,
    dtype: Option<DType>,
    target: &Path,
    mut file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
) -> Result<Merged, E> {
    let merge = Merge::new(base, adapter)?;
    let headers = merge.headers(dtype)?;
    let mut config = merge.config.clone();
    let matrices = headers.iter().filter(|header| header.shape.len() > 1);
    config.set_stored_dtype(match matrices.map(|header| header.dtype).max_by_key(DType::size_in_bytes) {
        Some(DType::BF16) => "bfloat16",
        Some(DType::F16) => "float16",
        _ => "float32",
    });
    write_configs(target, &config, &mut file)?;
    file(WEIGHTS_FILE, &|sink| {
        let mut writer = Writer::new(&target.join(WEIGHTS_FILE), sink, headers.clone(), &[("format", "pt")])?;
        for header in &headers {
            merge.write(header, &mut writer)?;
        }
        writer.into_sink();
        Ok(())
    })?;
    let bytes = |header: &TensorHeader| (header.shape.iter().product::<usize>() * header.dtype.size_in_bytes()) as u64;
    Ok(Merged {
        linears: merge.linears.len(),
        replaced: merge.adapter.layout().saved.len(),
        parts_head: merge.parts_head,
        bytes: headers.iter().map(bytes).sum(),
    })
}

/// A base and its adapter.
struct Merge {
    stored: StoredFiles,
    adapter: AdapterDirectory,
    /// Of the merged model.
    config: Config,
    /// By the name of the weight.
    linears: BTreeMap<String, AdaptedLinear>,
    /// Whether the base's head is its shared table.
    is_tied: bool,
    /// Whether the merged head is another table.
    parts_head: bool,
}

impl Merge {
    fn new(base: &Path, adapter: &Path) -> Result<Merge> {
        let mut config = Config::from_file(&base.join("config.json"))?;
        config.refuse_quantised("the model that these weights were made from: an adapter is merged into that one")?;
        let stored = StoredFiles::open(base)?;
        config.tie_word_embeddings = stored.is_tied_by_rows(&config)?;
        let adapter = AdapterDirectory::open(adapter, &config)?;
        let linears: BTreeMap<String, AdaptedLinear> =
            adapter.layout().linears.iter().map(|linear| (format!("{}.weight", linear.name), linear.clone())).collect();
        let changes_head = linears.contains_key(HEAD) || adapter.layout().saved.iter().any(|(name, _)| name == HEAD);
        let is_tied = config.tie_word_embeddings;
        stored.check_names(base, &config)?;
        // As in `hf::save`: a tied head that is not scaled is written twice, for transformers 4.
        config.tie_word_embeddings &= !changes_head && config.scale_decoder_outputs;
        let merge = Merge { stored, adapter, config, linears, is_tied, parts_head: is_tied && changes_head };
        merge.check_head()?;
        Ok(merge)
    }

    /// The name of a parameter in the base: a head that is tied there is the shared table.
    fn base_name<'a>(&self, name: &'a str) -> &'a str {
        let name = if name == HEAD && self.is_tied { "shared.weight" } else { name };
        self.stored.name_of(name)
    }

    /// The head's weight that PEFT stores below an adapter of it must be the base's.
    fn check_head(&self) -> Result<()> {
        let Some(below) = self.adapter.head_below() else { return Ok(()) };
        let Config { vocab_size, d_model, .. } = self.config;
        let rows = rows_at_a_time(d_model);
        for first in (0..vocab_size).step_by(rows) {
            let count = rows.min(vocab_size - first);
            let one = self.adapter.rows(below, first, count)?;
            let other = self.stored.rows(self.base_name(HEAD), first, count)?;
            if one.ne(&other)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()? != 0.0 {
                return Err(self.adapter.other_head());
            }
        }
        Ok(())
    }

    /// The new file's tensors, the wider ones first.
    fn headers(&self, dtype: Option<DType>) -> Result<Vec<TensorHeader>> {
        let header = |spec: ParameterSpec| {
            let stored = match self.stored.stored_as(self.base_name(&spec.name))? {
                DType::F64 => DType::F32,
                stored => stored,
            };
            let is_vector = spec.shape.len() == 1;
            // The vectors of a narrow model stay in f32, as in every model that is written here.
            let wanted = dtype.map(|dtype| if is_vector { DType::F32 } else { dtype });
            Ok(TensorHeader { name: spec.name, dtype: wanted.unwrap_or(stored), shape: spec.shape })
        };
        let mut headers: Vec<TensorHeader> =
            ParameterSpec::all(&self.config).into_iter().map(header).collect::<Result<_>>()?;
        headers.sort_by_key(|header| std::cmp::Reverse(header.dtype.size_in_bytes()));
        Ok(headers)
    }

    fn write<W: Write>(&self, header: &TensorHeader, writer: &mut Writer<W>) -> Result<()> {
        let name = header.name.as_str();
        let is_saved = self.adapter.layout().saved.iter().any(|(saved, _)| saved == name);
        let factors = self.linears.get(name).map(|linear| Factors::read(&self.adapter, linear)).transpose()?;
        let rows = rows_at_a_time(header.shape[1..].iter().product());
        writer.write_by_rows(name, rows, |first, count| {
            if is_saved {
                return self.adapter.rows(name, first, count);
            }
            let base = self.stored.rows(self.base_name(name), first, count)?;
            let Some(factors) = &factors else { return Ok(base) };
            let merged = factors.merged(&base, first, count)?;
            let stored = merged.to_dtype(header.dtype)?.to_dtype(DType::F32)?;
            if !stored.sum_all()?.to_scalar::<f32>()?.is_finite() {
                let name = format!("{}.lora_B.weight", name.trim_end_matches(".weight"));
                let (expected, got) = ("finite merged weights".into(), format!("others, in {:?}", header.dtype));
                return Err(self.adapter.error(&name, expected, got));
            }
            Ok(merged)
        })
    }
}

/// The adapter of one linear layer in f32.
struct Factors {
    a: Tensor,
    b: Tensor,
    magnitude: Option<Tensor>,
    scale: f64,
}

impl Factors {
    fn read(adapter: &AdapterDirectory, linear: &AdaptedLinear) -> Result<Factors> {
        let read = |what: &str| adapter.read(&format!("{}.{what}", linear.name), DType::F32, &Device::Cpu);
        let magnitude = adapter.layout().dora.then(|| read("lora_magnitude_vector")).transpose()?;
        Ok(Factors { a: read("lora_A.weight")?, b: read("lora_B.weight")?, magnitude, scale: linear.scale })
    }

    /// Some rows of the weight with the adapter: (rows, in).
    fn merged(&self, base: &Tensor, first: usize, count: usize) -> Result<Tensor> {
        let delta = (self.b.narrow(0, first, count)?.matmul(&self.a)? * self.scale)?;
        let sum = (base + delta)?;
        let Some(magnitude) = &self.magnitude else { return Ok(sum) };
        let norm = sum.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?; // (rows, 1)
        let factor = (magnitude.narrow(0, first, count)?.unsqueeze(1)? / norm)?;
        Ok(sum.broadcast_mul(&factor)?)
    }
}

/// Rows of so many values that are merged at a time.
fn rows_at_a_time(columns: usize) -> usize {
    (MERGED_BYTES / size_of::<f32>() / columns.max(1)).max(1)
}
