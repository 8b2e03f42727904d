//! A CTranslate2 directory: `model.bin`, `config.json` and `shared_vocabulary.json`.
//!
//! ```text
//! model.bin: 6 u32 | "TransformerSpec" | 7 u32 | variables u32
//!   variable: name | rank u8 | dimensions u32 | dtype u8 | bytes u32 | values
//!   aliases u32 | alias, name of a variable ...
//! a name: its length with the zero at its end u16 | bytes | 0
//! ```
//!
//! Variables are in the order of their names. Queries, keys and values of self-attention are one matrix; so are keys and values of
//! cross attention. The embedding tables and a tied head are one variable with aliases, and so are relative positions.
//!
//! Source: `python/ctranslate2/specs/model_spec.py` and `T5Loader` in `python/ctranslate2/converters/transformers.py` of
//! OpenNMT/CTranslate2 4.8. For a trained model, the bytes equal those of its converter.

use std::collections::BTreeMap;
use std::io::Write;

use serde_json::json;

use crate::error::{Error, Unsupported};
use crate::t5::{Parameter, Stack, T5};
use crate::values::{Dtype, Tensor, Weights};
use crate::vocabulary::Vocabulary;

/// The files of a directory.
pub const FILES: [&str; 3] = ["model.bin", "config.json", "shared_vocabulary.json"];

const FORMAT: &str = "CTranslate2";
const VERSION: u32 = 6;
const REVISION: u32 = 7;
const SPEC: &str = "TransformerSpec";

/// A model, ready to be written.
#[derive(Clone, Debug)]
pub struct Model {
    variables: BTreeMap<String, Variable>,
    aliases: BTreeMap<String, String>,
    config: String,
    vocabulary: String,
}

/// A variable of `model.bin`.
#[derive(Clone, Debug)]
enum Variable {
    Matrix(Tensor),
    I8(i8),
    I16(i16),
    I32(i32),
    F32(f32),
}

impl Model {
    /// Prepares a model in f32. With [`Dtype::Int8`], its matrices have 8 bits and a scale for each row.
    ///
    /// # Errors
    /// [`Unsupported`] for a table of relative positions in every block, an activation that CTranslate2 lacks, another dtype, or a
    /// matrix of 4 GiB.
    pub fn new(model: &T5, vocabulary: &Vocabulary, dtype: Dtype) -> Result<Model, Unsupported> {
        let refused = |what: &str, expected: &str, got: String, hint: &str| {
            let (what, expected, hint) = (what.to_owned(), expected.to_owned(), hint.to_owned());
            Unsupported { format: FORMAT, what, expected, got, hint }
        };
        if !matches!(dtype, Dtype::F32 | Dtype::Int8) {
            let hint = "CTranslate2 narrows weights when it loads them: `compute_type=\"bfloat16\"`; 8 bits are `--dtype int8`";
            return Err(refused("`--dtype`", "f32 or int8", dtype.name().into(), hint));
        }
        if model.has_a_table_in_every_block {
            let expected = "one table for each stack, in its first block";
            let hint = "this is UMT5: `--format gguf` can hold it";
            return Err(refused("relative positions", expected, "a table in every block".into(), hint));
        }
        // `Activation` in CTranslate2's `specs/common_spec.py`.
        let activation = match model.activation.as_str() {
            "relu" => 0,
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => 1,
            "silu" | "swish" => 2,
            "gelu" => 3,
            other => {
                let expected = "relu, gelu_new, gelu or silu";
                return Err(refused("`dense_act_fn`", expected, format!("`{other}`"), "no format here can hold it"));
            }
        };
        if let Some(id) = vocabulary.beyond(model.vocab_size) {
            let got = format!("{id} for `{}`", vocabulary.tokens[&id].text);
            let expected = format!("ids below {}, the rows of the model's table", model.vocab_size);
            return Err(refused("an id of the tokenizer", &expected, got, "give the model its own tokenizer"));
        }
        let (Ok(heads), Ok(max_distance)) = (i16::try_from(model.heads), i32::try_from(model.max_distance)) else {
            return Err(refused("`num_heads`", "at most 32767", model.heads.to_string(), "no such T5 is known"));
        };
        let mut built = Model {
            variables: BTreeMap::new(),
            aliases: BTreeMap::new(),
            config: config(model, vocabulary),
            vocabulary: String::new(),
        };
        for stack in Stack::BOTH {
            built.stack(model, stack, dtype, activation, heads, max_distance);
        }
        built.tables(model, dtype);
        let tensors = built.variables.values().filter_map(|variable| match variable {
            Variable::Matrix(tensor) => Some(tensor),
            _ => None,
        });
        if let Some(tensor) = tensors.into_iter().find(|tensor| u32::try_from(tensor.bytes()).is_err()) {
            let got = format!("{} bytes in `{}`", tensor.bytes(), tensor.name);
            return Err(refused("a matrix", "less than 4 GiB", got, "use `--dtype int8`"));
        }
        let names = names(model, vocabulary);
        built.vocabulary = serde_json::to_string_pretty(&names).expect("texts are JSON") + "\n";
        Ok(built)
    }

    /// The text of `config.json`.
    pub fn config(&self) -> &str {
        &self.config
    }

    /// The text of `shared_vocabulary.json`.
    pub fn vocabulary(&self) -> &str {
        &self.vocabulary
    }

    /// The number of matrices and vectors.
    pub fn tensors(&self) -> usize {
        self.variables.values().filter(|variable| matches!(variable, Variable::Matrix(_))).count()
    }

    /// Writes `model.bin`.
    ///
    /// # Errors
    /// Errors of the source; [`Error::Io`]; [`Error::Value`] for a value that is not finite.
    pub fn write<W: Weights>(&self, sink: &mut dyn Write, weights: &W) -> Result<(), W::Error> {
        let scales = self.variables.values().filter(|variable| variable.has_scales()).count();
        let mut start = Vec::new();
        start.extend(VERSION.to_le_bytes());
        text(&mut start, SPEC);
        start.extend(REVISION.to_le_bytes());
        start.extend(((self.variables.len() + scales) as u32).to_le_bytes());
        sink.write_all(&start).map_err(Error::Io)?;
        // The scales of a matrix `weight` are `weight_scale`, which is the next name.
        for (name, variable) in &self.variables {
            let (head, value) = variable.start(name);
            sink.write_all(&head).map_err(Error::Io)?;
            let Variable::Matrix(tensor) = variable else {
                sink.write_all(&value).map_err(Error::Io)?;
                continue;
            };
            let scales = tensor.write(sink, weights)?;
            if variable.has_scales() {
                let head = head_of(&format!("{name}_scale"), &[scales.len()], 0, 4 * scales.len() as u64);
                sink.write_all(&head).map_err(Error::Io)?;
                let values: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
                sink.write_all(&values).map_err(Error::Io)?;
            }
        }
        let mut end = Vec::new();
        end.extend((self.aliases.len() as u32).to_le_bytes());
        for (alias, name) in &self.aliases {
            text(&mut end, alias);
            text(&mut end, name);
        }
        Ok(sink.write_all(&end).map_err(Error::Io)?)
    }

    /// Adds the embeddings and the head.
    fn tables(&mut self, model: &T5, dtype: Dtype) {
        let [decoder, head, encoder] =
            ["decoder/embeddings/weight", "decoder/projection/weight", "encoder/embeddings_0/weight"];
        self.matrix(decoder, vec![model.table()], dtype);
        self.alias(encoder, decoder);
        if model.is_tied {
            self.alias(head, decoder);
        } else {
            self.matrix(head, vec![model.head()], dtype);
        }
        if model.scales_logits {
            self.variables.insert("decoder/scale_outputs".into(), Variable::F32(model.logits_scale()));
        }
    }

    fn stack(&mut self, model: &T5, stack: Stack, dtype: Dtype, activation: i8, heads: i16, max_distance: i32) {
        let name = stack.name();
        let flags: &[(&str, Variable)] = match stack {
            Stack::Encoder => &[("embeddings_merge", Variable::I8(0)), ("multi_query_attention", Variable::I8(0))],
            Stack::Decoder => &[
                ("alibi", Variable::I8(0)),
                ("alibi_use_positive_positions", Variable::I8(0)),
                ("alignment_heads", Variable::I16(1)),
                ("alignment_layer", Variable::I16(-1)),
                ("scale_alibi", Variable::I8(0)),
                ("start_from_zero_embedding", Variable::I8(0)),
            ],
        };
        let shared = [
            ("activation", Variable::I8(activation)),
            ("num_heads", Variable::I16(heads)),
            ("pre_norm", Variable::I8(1)),
            ("scale_embeddings", Variable::I8(0)),
        ];
        for (key, variable) in shared.iter().chain(flags) {
            self.variables.insert(format!("{name}/{key}"), variable.clone());
        }
        self.vector(&format!("{name}/layer_norm/gamma"), model.last_norm(stack));
        for block in 0..model.blocks(stack) {
            let layer = format!("{name}/layer_{block}");
            let of = |crosses: bool, matrix: &str| model.attention(stack, block, crosses, matrix);
            let own = format!("{layer}/self_attention");
            self.vector(&format!("{own}/layer_norm/gamma"), model.norm(stack, block, 0));
            let fused = ["q", "k", "v"].map(|matrix| of(false, matrix)).to_vec();
            self.matrix(&format!("{own}/linear_0/weight"), fused, dtype);
            self.matrix(&format!("{own}/linear_1/weight"), vec![of(false, "o")], dtype);
            self.variables.insert(format!("{own}/queries_scale"), Variable::F32(1.0));
            self.variables.insert(format!("{own}/relative_attention_max_distance"), Variable::I32(max_distance));
            let positions = format!("{own}/relative_attention_bias");
            if block == 0 {
                self.vector(&positions, model.relative_positions(stack, 0));
            } else {
                self.alias(&positions, &format!("{name}/layer_0/self_attention/relative_attention_bias"));
            }
            if stack == Stack::Decoder {
                let crossing = format!("{layer}/attention");
                self.vector(&format!("{crossing}/layer_norm/gamma"), model.norm(stack, block, 1));
                self.matrix(&format!("{crossing}/linear_0/weight"), vec![of(true, "q")], dtype);
                self.matrix(&format!("{crossing}/linear_1/weight"), vec![of(true, "k"), of(true, "v")], dtype);
                self.matrix(&format!("{crossing}/linear_2/weight"), vec![of(true, "o")], dtype);
                self.variables.insert(format!("{crossing}/queries_scale"), Variable::F32(1.0));
            }
            let feed_forward = format!("{layer}/ffn");
            let norm = model.norm(stack, block, T5::feed_forward_layer(stack));
            self.vector(&format!("{feed_forward}/layer_norm/gamma"), norm);
            let linears: &[(&str, &str)] = match model.is_gated {
                true => &[("linear_0", "wi_0"), ("linear_0_noact", "wi_1"), ("linear_1", "wo")],
                false => &[("linear_0", "wi"), ("linear_1", "wo")],
            };
            for (linear, matrix) in linears {
                let parameter = model.feed_forward(stack, block, matrix);
                self.matrix(&format!("{feed_forward}/{linear}/weight"), vec![parameter], dtype);
            }
        }
    }

    /// Adds a matrix that joins the rows of several.
    fn matrix(&mut self, name: &str, parts: Vec<Parameter>, dtype: Dtype) {
        let rows = parts.iter().map(|part| part.shape[0]).sum();
        let shape = vec![rows, parts[0].shape[1]];
        let tensor = Tensor { name: name.into(), shape, parts, factor: 1.0, dtype };
        self.variables.insert(name.into(), Variable::Matrix(tensor));
    }

    /// Adds values that stay in f32.
    fn vector(&mut self, name: &str, parameter: Parameter) {
        self.variables.insert(name.into(), Variable::Matrix(Tensor::single(name, parameter, Dtype::F32)));
    }

    fn alias(&mut self, alias: &str, name: &str) {
        self.aliases.insert(alias.into(), name.into());
    }
}

impl Variable {
    fn has_scales(&self) -> bool {
        matches!(self, Variable::Matrix(tensor) if tensor.dtype == Dtype::Int8)
    }

    /// The bytes before the values of a matrix, and the value of a scalar.
    fn start(&self, name: &str) -> (Vec<u8>, Vec<u8>) {
        let scalar = |dtype: u8, value: &[u8]| (head_of(name, &[], dtype, value.len() as u64), value.to_vec());
        match self {
            Variable::Matrix(tensor) => {
                let dtype = u8::from(tensor.dtype == Dtype::Int8);
                (head_of(name, &tensor.shape, dtype, tensor.bytes()), Vec::new())
            }
            Variable::F32(value) => scalar(0, &value.to_le_bytes()),
            Variable::I8(value) => scalar(1, &value.to_le_bytes()),
            Variable::I16(value) => scalar(2, &value.to_le_bytes()),
            Variable::I32(value) => scalar(3, &value.to_le_bytes()),
        }
    }
}

fn head_of(name: &str, shape: &[usize], dtype: u8, bytes: u64) -> Vec<u8> {
    let mut head = Vec::new();
    text(&mut head, name);
    head.push(shape.len() as u8);
    shape.iter().for_each(|&size| head.extend((size as u32).to_le_bytes()));
    head.push(dtype);
    head.extend((bytes as u32).to_le_bytes());
    head
}

/// Writes a name: its length including the zero at its end, then the name and the zero.
fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u16 + 1).to_le_bytes());
    to.extend(text.as_bytes());
    to.push(0);
}

/// One name for each row of the model's table, all different.
fn names(model: &T5, vocabulary: &Vocabulary) -> Vec<String> {
    vocabulary.rows(model.vocab_size).map(|row| row.map_or_else(|name| name, |token| token.text.clone())).collect()
}

fn config(model: &T5, vocabulary: &Vocabulary) -> String {
    let name = |id: u32| {
        let token = vocabulary.tokens.get(&id).map(|token| token.text.clone());
        token.unwrap_or_else(|| format!("[PAD{id}]"))
    };
    let config = json!({
        "add_source_bos": false,
        "add_source_eos": false,
        "bos_token": name(model.pad),
        "decoder_start_token": name(model.start),
        "eos_token": name(model.ends.first().copied().unwrap_or(vocabulary.end)),
        "layer_norm_epsilon": model.epsilon,
        "multi_query_attention": false,
        "unk_token": vocabulary.unknown.map_or_else(|| "<unk>".to_owned(), name),
    });
    format!("{config:#}\n")
}
