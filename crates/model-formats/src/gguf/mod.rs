//! GGUF, version 3: a header of keys and tensors, then the tensors' bytes, each at a multiple of 32.
//!
//! ```text
//! "GGUF" | version u32 | tensors u64 | keys u64
//! key: name, type u32, value
//! tensor: name, dimensions u32, each u64 (the innermost first), type u32, offset u64
//! padding | values | padding | values ...
//! ```
//!
//! Two dialects of names are in use. llama.cpp, and transformers' `gguf_file`, use llama.cpp's names and need the tokenizer in the
//! file ([`File::for_llama_cpp`]). candle's `quantized_t5` uses transformers' names, and reads the rest from separate files beside
//! it ([`File::with_hugging_face_names`]).
//!
//! Source: `docs/gguf.md` in ggml-org/ggml; `gguf-py/gguf/constants.py`, `conversion/t5.py` and `src/models/t5.cpp` in
//! ggml-org/llama.cpp.

mod header;
mod names;
mod tokenizer;

use std::io::Write;

use crate::error::{Error, Unsupported};
use crate::t5::T5;
use crate::values::{Dtype, Q8_0_BLOCK, Tensor, Weights};
use crate::vocabulary::Vocabulary;
use header::{Key, Value};

/// The format's name in messages.
pub(crate) const FORMAT: &str = "GGUF";
const ALIGNMENT: u64 = 32;
/// llama.cpp's graph supports no other distance.
const MAX_DISTANCE: usize = 128;
/// The number of positions if a T5's file does not give one, as in llama.cpp's converter.
const POSITIONS: usize = 512;
/// `GGML_QNT_VERSION`.
const QUANTIZATION_VERSION: u32 = 2;

/// A file, ready to be written.
#[derive(Clone, Debug)]
pub struct File {
    header: Vec<u8>,
    tensors: Vec<Tensor>,
}

impl File {
    /// Prepares a model with the names, keys and tokenizer that llama.cpp reads.
    ///
    /// llama.cpp's graph does not scale the decoder's output. If a model scales it, the scale is multiplied into the head's
    /// values. That head is written separately from the embedding table, even if it is tied.
    ///
    /// # Errors
    /// [`Unsupported`] for an activation, a maximum distance or a tokenizer that llama.cpp does not support.
    pub fn for_llama_cpp(model: &T5, vocabulary: &Vocabulary, dtype: Dtype) -> Result<File, Unsupported> {
        check_dtype(dtype)?;
        let known = if model.is_gated { ["gated-gelu", "gelu_new"] } else { ["relu", "relu"] };
        if model.activation != known[1] {
            let gate = if model.is_gated { "gated-" } else { "" };
            return Err(Unsupported {
                format: FORMAT,
                what: "`feed_forward_proj`".into(),
                expected: "`relu` or `gated-gelu`, the two that llama.cpp computes".into(),
                got: format!("`{gate}{}`", model.activation),
                hint: "CTranslate2 can hold it: `--format ctranslate2`".into(),
            });
        }
        if model.max_distance != MAX_DISTANCE {
            return Err(Unsupported {
                format: FORMAT,
                what: "`relative_attention_max_distance`".into(),
                expected: format!("{MAX_DISTANCE}, the only one that llama.cpp computes"),
                got: model.max_distance.to_string(),
                hint: "CTranslate2 can hold it: `--format ctranslate2`".into(),
            });
        }
        let mut keys = general(model, dtype);
        keys.extend(shape(model));
        keys.extend(tokenizer::keys(model, vocabulary)?);
        Ok(File::new(&keys, names::llama_cpp(model, |columns| narrow(dtype, columns))))
    }

    /// Prepares a model with transformers' names, without a tokenizer, for candle's `quantized_t5`.
    ///
    /// # Errors
    /// [`Unsupported`] for a dtype that GGUF does not have.
    pub fn with_hugging_face_names(model: &T5, dtype: Dtype) -> Result<File, Unsupported> {
        check_dtype(dtype)?;
        let mut keys = general(model, dtype);
        keys.extend(shape(model));
        Ok(File::new(&keys, names::hugging_face(model, |columns| narrow(dtype, columns))))
    }

    fn new(keys: &[(String, Value)], tensors: Vec<Tensor>) -> File {
        let keys: Vec<Key> = keys.iter().map(|(name, value)| Key { name, value }).collect();
        let mut header = header::bytes(&keys, &tensors);
        pad(&mut header);
        File { header, tensors }
    }

    /// The length of the file in bytes.
    pub fn bytes(&self) -> u64 {
        let values = self.tensors.iter().map(|tensor| tensor.bytes().next_multiple_of(ALIGNMENT));
        self.header.len() as u64 + values.sum::<u64>()
    }

    /// The number of tensors.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Errors of the source; [`Error::Io`]; [`Error::Value`] for a value that the dtype cannot hold.
    pub fn write<W: Weights>(&self, sink: &mut dyn Write, weights: &W) -> Result<(), W::Error> {
        sink.write_all(&self.header).map_err(Error::Io)?;
        for tensor in &self.tensors {
            tensor.write(sink, weights)?;
            let padding = tensor.bytes().next_multiple_of(ALIGNMENT) - tensor.bytes();
            sink.write_all(&[0; ALIGNMENT as usize][..padding as usize]).map_err(Error::Io)?;
        }
        Ok(())
    }
}

fn check_dtype(dtype: Dtype) -> Result<(), Unsupported> {
    if dtype != Dtype::Int8 {
        return Ok(());
    }
    Err(Unsupported {
        format: FORMAT,
        what: "`--dtype`".into(),
        expected: "f32, f16, bf16 or q8_0".into(),
        got: dtype.name().into(),
        hint: "8 bits are called q8_0 there: `--dtype q8_0`".into(),
    })
}

/// The dtype of a matrix with `columns` values per row, as llama.cpp's converter chooses it.
fn narrow(dtype: Dtype, columns: usize) -> Dtype {
    if dtype == Dtype::Q8_0 && !columns.is_multiple_of(Q8_0_BLOCK) { Dtype::F16 } else { dtype }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
}

fn general(model: &T5, dtype: Dtype) -> Vec<(String, Value)> {
    // `LLAMA_FTYPE_*` in llama.cpp's `include/llama.h`.
    let file_type = match dtype {
        Dtype::F32 | Dtype::Int8 => 0,
        Dtype::F16 => 1,
        Dtype::Q8_0 => 7,
        Dtype::BF16 => 32,
    };
    vec![
        ("general.architecture".into(), Value::Text("t5".into())),
        ("general.type".into(), Value::Text("model".into())),
        ("general.name".into(), Value::Text(model.name.clone())),
        ("general.file_type".into(), Value::U32(file_type)),
        ("general.quantization_version".into(), Value::U32(QUANTIZATION_VERSION)),
    ]
}

fn shape(model: &T5) -> Vec<(String, Value)> {
    let size = |name: &str, size: usize| (format!("t5.{name}"), Value::U32(size as u32));
    let number = |name: &str, number: f64| (format!("t5.{name}"), Value::F32(number as f32));
    vec![
        size("context_length", model.positions.unwrap_or(POSITIONS)),
        size("embedding_length", model.d_model),
        size("feed_forward_length", model.d_ff),
        size("block_count", model.encoder_blocks),
        size("decoder_block_count", model.decoder_blocks),
        size("attention.head_count", model.heads),
        size("attention.key_length", model.d_kv),
        size("attention.value_length", model.d_kv),
        number("attention.layer_norm_epsilon", model.epsilon),
        size("attention.relative_buckets_count", model.buckets),
        number("attention.layer_norm_rms_epsilon", model.epsilon),
        size("decoder_start_token_id", model.start as usize),
    ]
}
