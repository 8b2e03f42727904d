//! The configuration of T5Gemma and T5Gemma 2: a `config.json` with one object for each stack.
//!
//! transformers' rules that files depend on: `layer_types`, or else `sliding_window_pattern` (each such layer is full; 2 in T5Gemma, 6 in
//! T5Gemma 2); `rope_parameters`, or else `rope_theta`, `rope_local_base_freq` and `rope_scaling`; the keys of T5Gemma 2's encoder are in
//! its `text_config`; token ids are the decoder's unless the file itself has them.

use serde_json::{Map, Value, json};

use super::reader::Reader;
use super::{Config, GENERATION_CONFIG, Rest};
use crate::error::Result;
use crate::family::Family;
use crate::head::Head;

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// What T5Gemma has beside T5.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma {
    /// The encoder.
    pub encoder: StackConfig,
    /// The decoder.
    pub decoder: StackConfig,
    /// The soft cap of the logits.
    pub logit_cap: Option<f64>,
    /// The standard deviation of the first values of matrices.
    pub initializer_range: f64,
    /// Tokens that stand for images: they have no embedding of their own.
    pub image_tokens: Vec<u32>,
}

/// One stack of a T5Gemma.
#[derive(Clone, Debug, PartialEq)]
pub struct StackConfig {
    /// `hidden_size` (D).
    pub width: usize,
    /// `intermediate_size` (F).
    pub inner: usize,
    /// Heads of queries (H).
    pub heads: usize,
    /// Heads of keys and values (KH).
    pub key_heads: usize,
    /// Size of a head (K).
    pub head_size: usize,
    /// Factor of scores: `query_pre_attn_scalar^-0.5`.
    pub scale: f64,
    /// The soft cap of scores.
    pub score_cap: Option<f64>,
    /// `sliding_window`.
    pub window: usize,
    /// Whether a window limits the attention of each layer.
    pub is_sliding: Vec<bool>,
    /// Base and factor of rotary positions of full layers, and of sliding ones.
    pub rotary: [(f64, f64); 2],
    /// `rms_norm_eps`.
    pub epsilon: f64,
    /// The longest texts.
    pub positions: usize,
}

impl StackConfig {
    /// Base and factor of the rotary positions of a layer.
    pub(crate) fn rotary(&self, block: usize) -> (f64, f64) {
        self.rotary[usize::from(self.is_sliding[block])]
    }
}

/// transformers' defaults of one generation.
struct Defaults {
    vocab_size: usize,
    pattern: usize,
    positions: usize,
    caps: [Option<f64>; 2],
    bases: [f64; 2],
}

impl Defaults {
    fn for_family(family: Family) -> Defaults {
        match family {
            Family::T5Gemma2 => Defaults {
                vocab_size: 262_208,
                pattern: 6,
                positions: 131_072,
                caps: [None; 2],
                bases: [1_000_000.0, 10_000.0],
            },
            _ => Defaults {
                vocab_size: 256_000,
                pattern: 2,
                positions: 8192,
                caps: [Some(50.0), Some(30.0)],
                bases: [10_000.0; 2],
            },
        }
    }
}

/// The object of a stack.
struct Stack<'a> {
    read: Reader<'a>,
    defaults: &'a Defaults,
}

impl Stack<'_> {
    fn size(&self, key: &str, default: usize) -> Result<usize> {
        let size = self.read.size(&[key], default)?;
        match size {
            0 => Err(self.read.error(key, "a number above 0", self.read.get(key))),
            size => Ok(size),
        }
    }

    /// A soft cap; `null` for none.
    fn cap(&self, key: &str, default: Option<f64>) -> Result<Option<f64>> {
        match self.read.raw.get(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(value) => {
                let cap = value.as_f64().filter(|cap| *cap > 0.0);
                cap.map(Some).ok_or_else(|| self.read.error(key, "a number above 0, or null", Some(value)))
            }
        }
    }

    fn is_sliding(&self, layers: usize) -> Result<Vec<bool>> {
        let Some(kinds) = self.read.get("layer_types") else {
            let pattern = self.size("sliding_window_pattern", self.defaults.pattern)?;
            return Ok((1..=layers).map(|layer| layer % pattern != 0).collect());
        };
        let expected = format!("a list of {layers} names, `sliding_attention` or `full_attention`");
        let of = |kind: &Value| match kind.as_str() {
            Some(SLIDING) => Some(true),
            Some(FULL) => Some(false),
            _ => None,
        };
        let kinds: Option<Vec<bool>> = kinds.as_array().map(|kinds| kinds.iter().map(of).collect()).unwrap_or_default();
        kinds
            .filter(|kinds| kinds.len() == layers)
            .ok_or_else(|| self.read.error("layer_types", &expected, self.read.get("layer_types")))
    }

    /// Base and factor of full layers, and of sliding ones.
    fn rotary(&self, family: Family) -> Result<[(f64, f64); 2]> {
        let old = [
            self.read.number("rope_theta", self.defaults.bases[0])?,
            match family {
                Family::T5Gemma2 => self.read.number("rope_local_base_freq", self.defaults.bases[1])?,
                _ => self.read.number("rope_theta", self.defaults.bases[1])?,
            },
        ];
        let new = self.read.get("rope_parameters");
        let of = |index: usize, settings: Option<&Value>| -> Result<(f64, f64)> {
            let Some(settings) = settings.filter(|settings| !settings.is_null()) else { return Ok((old[index], 1.0)) };
            let number = |key: &str, default: f64| match settings.get(key) {
                None | Some(Value::Null) => Ok(default),
                Some(value) => {
                    let number = value.as_f64().filter(|number| *number > 0.0 && number.is_finite());
                    number.ok_or_else(|| {
                        self.read.error(&format!("rope_parameters.{key}"), "a number above 0", Some(value))
                    })
                }
            };
            let kind = settings.get("rope_type").or(settings.get("type"));
            let factor = match kind.and_then(Value::as_str) {
                None | Some("default") => 1.0,
                Some("linear") => number("factor", 1.0)?,
                _ => return Err(self.read.error("rope_parameters.rope_type", "`default` or `linear`", kind)),
            };
            Ok((number("rope_theta", old[index])?, factor))
        };
        match (new, family) {
            (Some(new), Family::T5Gemma2) => Ok([of(0, new.get(FULL))?, of(1, new.get(SLIDING))?]),
            (Some(new), _) => Ok([of(0, Some(new))?, of(1, Some(new))?]),
            // Scaling is of full layers in T5Gemma 2.
            (None, Family::T5Gemma2) => Ok([of(0, self.read.get("rope_scaling"))?, of(1, None)?]),
            (None, _) => Ok([of(0, self.read.get("rope_scaling"))?, of(1, self.read.get("rope_scaling"))?]),
        }
    }

    fn config(&self, family: Family) -> Result<StackConfig> {
        let layers = self.size("num_hidden_layers", 26)?;
        if layers as u64 > super::LARGEST_LAYERS {
            let expected = format!("a number from 1 to {}", super::LARGEST_LAYERS);
            return Err(self.read.unexpected("num_hidden_layers", &expected));
        }
        let (width, heads, key_heads, head_size) = self.sizes()?;
        if self.read.text("hidden_activation", "gelu_pytorch_tanh")? != "gelu_pytorch_tanh" {
            return Err(self.read.unexpected("hidden_activation", "gelu_pytorch_tanh"));
        }
        if self.read.flag("attention_bias", false)? {
            return Err(self.read.unexpected("attention_bias", "false"));
        }
        let scalar = self.read.number("query_pre_attn_scalar", 256.0)?;
        if !(scalar > 0.0 && scalar.is_finite()) {
            return Err(self.read.unexpected("query_pre_attn_scalar", "a number above 0"));
        }
        let epsilon = self.read.number("rms_norm_eps", 1e-6)?;
        if !(epsilon > 0.0 && epsilon < 1.0) {
            return Err(self.read.unexpected("rms_norm_eps", "a number between 0 and 1"));
        }
        Ok(StackConfig {
            width,
            inner: self.size("intermediate_size", 9216)?,
            heads,
            key_heads,
            head_size,
            scale: scalar.powf(-0.5),
            // T5Gemma 2 has the key, and its attention does not use it.
            score_cap: match family {
                Family::T5Gemma2 => None,
                _ => self.cap("attn_logit_softcapping", self.defaults.caps[0])?,
            },
            window: self.size("sliding_window", 4096)?,
            is_sliding: self.is_sliding(layers)?,
            rotary: self.rotary(family)?,
            epsilon,
            positions: self.size("max_position_embeddings", self.defaults.positions)?,
        })
    }

    /// The width of the stack, its heads, its heads of keys, and the size of a head.
    fn sizes(&self) -> Result<(usize, usize, usize, usize)> {
        let (heads, width) = (self.size("num_attention_heads", 8)?, self.size("hidden_size", 2304)?);
        let key_heads = self.size("num_key_value_heads", 4)?;
        if heads % key_heads != 0 {
            let expected = format!("a divisor of num_attention_heads ({heads})");
            return Err(self.read.unexpected("num_key_value_heads", &expected));
        }
        let head_size = self.size("head_dim", 256)?;
        if !head_size.is_multiple_of(2) {
            return Err(self.read.unexpected("head_dim", "an even number"));
        }
        let most = super::LARGEST_DIMENSION;
        for (key, value) in [("hidden_size", width), ("num_attention_heads", heads), ("head_dim", head_size)] {
            if value as u64 > most {
                return Err(self.read.unexpected(key, &format!("a number up to {most}")));
            }
        }
        if heads as u64 * head_size as u64 > most {
            let expected = format!("num_attention_heads x head_dim of at most {most}");
            return Err(self.read.unexpected("head_dim", &expected));
        }
        Ok((width, heads, key_heads, head_size))
    }
}

/// An object inside another.
fn object<'a>(read: &Reader<'a>, raw: &'a Map<String, Value>, key: &str) -> Result<&'a Map<String, Value>> {
    raw.get(key).and_then(Value::as_object).ok_or_else(|| read.error(key, "an object", raw.get(key)))
}

/// Refuses what no published T5Gemma has.
fn check_as_published(read: &Reader) -> Result<()> {
    if !read.flag("tie_word_embeddings", true)? {
        return Err(read.unexpected("tie_word_embeddings", "true: the head of a published T5Gemma is its table"));
    }
    if read.number("attention_dropout", 0.0)? != 0.0 {
        return Err(read.unexpected("attention_dropout", "0, as in every published T5Gemma"));
    }
    Ok(())
}

/// The ids in a `generation_config.json` with which an answer starts and ends.
fn ids_of_answers(raw: &Map<String, Value>) -> Result<(Option<u32>, Option<Vec<u32>>)> {
    let read = Reader { raw, origin: GENERATION_CONFIG, inside: "" };
    let ends = read.get("eos_token_id").map(|_| read.tokens("eos_token_id", &[])).transpose()?;
    Ok((read.token("decoder_start_token_id")?.map_or_else(|| read.token("bos_token_id"), |id| Ok(Some(id)))?, ends))
}

/// The ids of tokens that stand for an image.
fn image_tokens(read: &Reader) -> Result<Vec<u32>> {
    let encoder = Reader { raw: object(read, read.raw, "encoder")?, origin: read.origin, inside: "encoder." };
    let end = encoder.token("eoi_token_index")?.unwrap_or(256_000);
    Ok(vec![read.token("image_token_index")?.unwrap_or(256_001), end])
}

/// The configuration in a `config.json` of this family, whose `generation_config.json` was read into `answers`.
pub(super) fn read(
    family: Family,
    raw: Map<String, Value>,
    generation: Option<Map<String, Value>>,
    origin: String,
) -> Result<Config> {
    let read = Reader { raw: &raw, origin: &origin, inside: "" };
    let defaults = Defaults::for_family(family);
    let stack = |raw, inside| Stack { read: Reader { raw, origin: &origin, inside }, defaults: &defaults };
    let of_encoder = object(&read, &raw, "encoder")?;
    let encoder = match family {
        Family::T5Gemma2 => {
            let of_encoder = Reader { raw: of_encoder, origin: &origin, inside: "encoder." };
            stack(object(&of_encoder, of_encoder.raw, "text_config")?, "encoder.text_config.")
        }
        _ => stack(of_encoder, "encoder."),
    };
    let decoder = stack(object(&read, &raw, "decoder")?, "decoder.");
    let (of_stack, of_decoder) = ((encoder.config(family)?, decoder.config(family)?), &decoder.read);
    let vocab_size = decoder.size("vocab_size", defaults.vocab_size)?;
    if encoder.size("vocab_size", defaults.vocab_size)? != vocab_size {
        let expected =
            format!("that of the decoder, {vocab_size}: stacks with vocabularies of their own are not supported");
        return Err(encoder.read.unexpected("vocab_size", &expected));
    }
    // Nothing else reads the encoder's ids, since masks tell where a source ends. An id without a row is another model's config.
    for key in ["pad_token_id", "bos_token_id", "eos_token_id"] {
        let ids = encoder.read.tokens(key, &[])?;
        if ids.iter().any(|&id| id as usize >= vocab_size) {
            let expected = format!("a token id below vocab_size ({vocab_size})");
            return Err(encoder.read.error(key, &expected, encoder.read.get(key)));
        }
    }
    if family == Family::T5Gemma2 && of_stack.0.width != of_stack.1.width {
        let expected = format!("that of the decoder, {}", of_stack.1.width);
        return Err(encoder.read.unexpected("hidden_size", &expected));
    }
    check_as_published(&read)?;
    let (answer_start, answer_ends) = generation.as_ref().map_or(Ok((None, None)), ids_of_answers)?;
    // The decoder's ids are those of training; the file's own those of generation.
    let start = of_decoder.token("bos_token_id")?.or(read.token("bos_token_id")?).unwrap_or(2);
    let pad = of_decoder.token("pad_token_id")?.or(read.token("pad_token_id")?).unwrap_or(0);
    let eos_token_ids = match of_decoder.tokens("eos_token_id", &[1])? {
        ids if ids.is_empty() => read.tokens("eos_token_id", &[1])?,
        ids => ids,
    };
    let image_tokens = if family == Family::T5Gemma2 { image_tokens(&read)? } else { Vec::new() };
    let logit_cap = decoder.cap("final_logit_softcapping", defaults.caps[1])?;
    let initializer_range = match read.get("initializer_range") {
        Some(_) => read.number("initializer_range", 0.02)?,
        None => of_decoder.number("initializer_range", 0.02)?,
    };
    let base_precision = read.base_precision()?;
    let dropout_rate = read.number("dropout_rate", 0.0)?;
    let head = Head::from_json(family, &raw);
    let (encoder, decoder) = of_stack;
    let config = Config {
        dropout_rate,
        pad_token_id: pad,
        eos_token_ids,
        decoder_start_token_id: start,
        base_precision,
        rest: Rest { raw, generation, answer_ends, answer_start, origin },
        ..Config::of_gemma(family, vocab_size, Gemma { encoder, decoder, logit_cap, initializer_range, image_tokens })
    };
    let config = config.with_head(head)?;
    config.validate()?;
    Ok(config)
}

impl Gemma {
    /// The smallest model of this kind: a layer in each stack.
    pub fn smallest(&self) -> Gemma {
        let stack = |stack: &StackConfig| StackConfig {
            width: 64,
            inner: 128,
            heads: 2,
            key_heads: 1,
            head_size: 32,
            window: stack.window.min(16),
            is_sliding: vec![stack.is_sliding[0]],
            ..stack.clone()
        };
        Gemma { encoder: stack(&self.encoder), decoder: stack(&self.decoder), image_tokens: Vec::new(), ..self.clone() }
    }
}

/// Sets the dtype in each object that names one.
pub(super) fn set_stored_dtype(object: &mut Map<String, Value>, name: &str) {
    for (key, value) in object {
        match value {
            Value::Object(inner) => set_stored_dtype(inner, name),
            Value::String(dtype) if key == "dtype" || key == "torch_dtype" => *dtype = name.into(),
            _ => {}
        }
    }
}

/// The object of a stack's settings.
fn stack_object(raw: &mut Map<String, Value>, decoder: bool) -> Option<&mut Map<String, Value>> {
    let object = raw.get_mut(if decoder { "decoder" } else { "encoder" })?.as_object_mut()?;
    match object.contains_key("text_config") {
        true => object.get_mut("text_config")?.as_object_mut(),
        false => Some(object),
    }
}

/// Names the rows of the table in each object that has them.
pub(super) fn put_vocab_size(raw: &mut Map<String, Value>, vocab_size: usize) {
    for decoder in [false, true] {
        stack_object(raw, decoder).map(|stack| stack.insert("vocab_size".into(), vocab_size.into()));
    }
    if raw.contains_key("vocab_size") {
        raw.insert("vocab_size".into(), vocab_size.into());
    }
}

impl Config {
    /// A model with these stacks, with transformers' token ids and without dropout.
    pub(crate) fn of_gemma(family: Family, vocab_size: usize, gemma: Gemma) -> Config {
        let Gemma { encoder, decoder, .. } = &gemma;
        Config {
            family,
            vocab_size,
            d_model: encoder.width.max(decoder.width),
            d_kv: encoder.head_size.max(decoder.head_size),
            d_ff: encoder.inner.max(decoder.inner),
            num_layers: encoder.is_sliding.len(),
            num_decoder_layers: decoder.is_sliding.len(),
            num_heads: encoder.heads.max(decoder.heads),
            dropout_rate: 0.0,
            layer_norm_epsilon: decoder.epsilon,
            feed_forward_proj: "gated-gelu".into(),
            dense_act_fn: "gelu_new".into(),
            is_gated_act: true,
            scale_decoder_outputs: false,
            decoder_start_token_id: 2,
            gemma: Some(Box::new(gemma)),
            ..Config::default()
        }
    }

    /// Writes ids that the file leaves out, and that are those of entries of the vocabulary, into the objects where they are looked for.
    pub(super) fn name_ids(&self, gemma: &Gemma, raw: &mut Map<String, Value>) {
        let images = gemma.image_tokens.iter().copied().zip([None, Some("encoder")]);
        for ((id, inside), key) in images.zip(["image_token_index", "eoi_token_index"]) {
            let object = match inside {
                Some(inside) => raw.get_mut(inside).and_then(Value::as_object_mut),
                None => Some(&mut *raw),
            };
            let missing = object.filter(|object| (id as usize) < self.vocab_size && !object.contains_key(key));
            missing.map(|object| object.insert(key.into(), id.into()));
        }
        let ids = [
            ("pad_token_id", self.pad_token_id.into()),
            ("eos_token_id", super::eos_value(&self.eos_token_ids)),
            ("bos_token_id", self.decoder_start_token_id.into()),
        ];
        let Some(decoder) = stack_object(raw, true) else { return };
        for (key, value) in ids {
            if decoder.get(key).is_none_or(Value::is_null) {
                decoder.insert(key.into(), value);
            }
        }
    }

    /// [`Config::to_json`] of a T5Gemma.
    pub(super) fn gemma_json(&self, gemma: &Gemma) -> Value {
        let mut json = self.rest.raw.clone();
        json.insert("model_type".into(), self.family.model_type().into());
        json.insert("architectures".into(), vec![self.head.architecture(self.family)].into());
        json.extend(self.head.entries().into_iter().map(|(key, value)| (key.to_owned(), value)));
        let is_encoder_decoder = self.head.has_decoder() || self.family == Family::T5Gemma2;
        if json.get("is_encoder_decoder").and_then(Value::as_bool).unwrap_or(true) != is_encoder_decoder {
            json.insert("is_encoder_decoder".into(), is_encoder_decoder.into());
        }
        let old = json.get("dropout_rate").and_then(Value::as_f64);
        if old != Some(self.dropout_rate) {
            json.insert("dropout_rate".into(), self.dropout_rate.into());
        }
        if json.is_empty() || !json.contains_key("decoder") {
            self.put_stacks(gemma, &mut json);
        }
        put_vocab_size(&mut json, self.vocab_size);
        self.put_quantisation(&mut json);
        json.remove("auto_map");
        Value::Object(json)
    }

    /// The objects of both stacks, for a model that was read from no file.
    fn put_stacks(&self, gemma: &Gemma, json: &mut Map<String, Value>) {
        let is_second = self.family == Family::T5Gemma2;
        let stack = |stack: &StackConfig, model_type: &str| {
            let kinds = stack.is_sliding.iter().map(|sliding| if *sliding { SLIDING } else { FULL });
            let rope = |(base, factor): (f64, f64)| match factor == 1.0 {
                true => json!({ "rope_type": "default", "rope_theta": base }),
                false => json!({ "rope_type": "linear", "factor": factor, "rope_theta": base }),
            };
            json!({
                "model_type": model_type,
                "vocab_size": self.vocab_size,
                "hidden_size": stack.width,
                "intermediate_size": stack.inner,
                "num_hidden_layers": stack.is_sliding.len(),
                "num_attention_heads": stack.heads,
                "num_key_value_heads": stack.key_heads,
                "head_dim": stack.head_size,
                "query_pre_attn_scalar": stack.scale.powi(-2).round() as u64,
                "attn_logit_softcapping": stack.score_cap,
                "final_logit_softcapping": gemma.logit_cap,
                "sliding_window": stack.window,
                "layer_types": kinds.collect::<Vec<_>>(),
                "rope_parameters": match is_second {
                    true => json!({ FULL: rope(stack.rotary[0]), SLIDING: rope(stack.rotary[1]) }),
                    false => rope(stack.rotary[0]),
                },
                "rms_norm_eps": stack.epsilon,
                "max_position_embeddings": stack.positions,
                "pad_token_id": self.pad_token_id,
                "eos_token_id": super::eos_value(&self.eos_token_ids),
                "bos_token_id": self.decoder_start_token_id,
            })
        };
        let encoder = match is_second {
            // transformers builds a vision tower, whatever the weights have: the smallest.
            true => json!({
                "model_type": "t5gemma2_encoder",
                "text_config": stack(&gemma.encoder, "t5gemma2_text"),
                "mm_tokens_per_image": 4,
                "vision_config": {
                    "model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                    "num_attention_heads": 1, "image_size": 8, "patch_size": 4, "vision_use_head": false,
                },
            }),
            false => stack(&gemma.encoder, "t5_gemma_module"),
        };
        json.insert("encoder".into(), encoder);
        let of_decoder = if is_second { "t5gemma2_decoder" } else { "t5_gemma_module" };
        json.insert("decoder".into(), stack(&gemma.decoder, of_decoder));
        json.insert("initializer_range".into(), gemma.initializer_range.into());
        json.insert("is_encoder_decoder".into(), true.into());
        json.insert("tie_word_embeddings".into(), true.into());
        json.insert("vocab_size".into(), self.vocab_size.into());
        json.insert("pad_token_id".into(), self.pad_token_id.into());
        json.insert("eos_token_id".into(), super::eos_value(&self.eos_token_ids));
        json.insert("bos_token_id".into(), self.decoder_start_token_id.into());
    }
}
