//! The architecture of one T5, as in `config.json`.
//!
//! [`Config`] reads every key that transformers 4 and 5 write for T5, and keeps unknown keys, so a saved file has
//! everything that was loaded. Three rules of transformers are worth naming, because files in the wild depend on them:
//!
//! * `dense_act_fn` and `is_gated_act` are derived from `feed_forward_proj` (`gated-gelu` means the tanh
//!   form, `gelu_new`), and win over it where the file has them.
//! * `scale_decoder_outputs` (transformers 5) says whether the decoder's output is scaled by
//!   `d_model^-0.5` before the head. In some families, `tie_word_embeddings` says so where the key is missing
//!   ([`Family::scales_decoder_outputs`]).
//! * The weights decide whether the head is tied: a separate `lm_head.weight` makes it untied,
//!   whatever the file says. [`crate::T5::load`] sets `tie_word_embeddings` accordingly.
//!
//! ```
//! let config = t5::Config::preset("t5-small").unwrap();
//! assert_eq!(config.inner_dim(), 512);
//! assert_eq!(t5::ParameterSpec::all(&config).iter().map(|p| p.elements()).sum::<u64>(), 60_506_624);
//! ```

pub(crate) mod gemma;
mod reader;
mod token_ids;

use std::path::Path;

use serde_json::{Map, Value, json};
use t5_ops::{Activation, Precision};

use crate::adapter::Lora;
use crate::error::{Error, Result};
use crate::family::Family;
use crate::head::Head;
use crate::stored_dtypes::StoredDtypes;
use gemma::Gemma;
use reader::Reader;

/// No dimension may exceed this: products of two stay far from overflow, and hostile files are refused.
const LARGEST_DIMENSION: u64 = 1 << 24;
/// The largest number of a stack's layers: more than any T5 has, and few enough to count every plan within seconds.
const LARGEST_LAYERS: u64 = 128;
/// The largest number of buckets of relative positions: more than there are distances between the tokens of any input.
const LARGEST_BUCKETS: usize = 1 << 16;

const GENERATION_CONFIG: &str = "generation_config.json";
/// transformers' key for quantised weights, and the method name of this project's own.
const QUANTIZATION: &str = "quantization_config";
const QUANT_METHOD: &str = "train_low_mem";
/// Settings of answers that a `config.json` of an older transformers may have.
const OF_ANSWERS: [&str; 12] = [
    "max_length",
    "max_new_tokens",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bos_token_id",
];

/// The architecture of one T5. Field names are those of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The kind of T5.
    pub family: Family,
    /// Rows of the embedding table: at least the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream (D).
    pub d_model: usize,
    /// Size of one attention head (K). Independent of `d_model`.
    pub d_kv: usize,
    /// Inner width of the feed-forward layers (F).
    pub d_ff: usize,
    /// Blocks of the encoder.
    pub num_layers: usize,
    /// Blocks of the decoder.
    pub num_decoder_layers: usize,
    /// Attention heads (H).
    pub num_heads: usize,
    /// Rows of each relative-position table.
    pub relative_attention_num_buckets: usize,
    /// Distance from which on all positions share the last bucket.
    pub relative_attention_max_distance: usize,
    /// Dropout of the model as published; a training run may choose another.
    pub dropout_rate: f64,
    /// Added to the mean square in every norm.
    pub layer_norm_epsilon: f64,
    /// Factor on every standard deviation of the initialisation.
    pub initializer_factor: f64,
    /// `relu`, `gated-gelu`, ... as written in the file.
    pub feed_forward_proj: String,
    /// The activation's transformers name (`relu`, `gelu_new`, `gelu`, `silu`, ...).
    pub dense_act_fn: String,
    /// Whether the feed-forward layer has a gate (`wi_0`, `wi_1`) or not (`wi`).
    pub is_gated_act: bool,
    /// Whether the head's weight is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether the decoder's output is scaled by `d_model^-0.5` before the head.
    pub scale_decoder_outputs: bool,
    /// Fills padded positions. Never seen by attention or loss.
    pub pad_token_id: u32,
    /// The first one ends training targets. Answers end at [`Config::answer_ends`].
    pub eos_token_ids: Vec<u32>,
    /// First input of the decoder in training. Answers begin with [`Config::answer_start`].
    pub decoder_start_token_id: u32,
    /// The codes of the weights of the blocks' products, if they are quantised. Such a model is frozen.
    pub base_precision: Option<Precision>,
    /// The dtypes that frozen weights are stored in, if they keep them. Not part of the file.
    pub stored: Option<StoredDtypes>,
    /// The adapter beside the base weights, if there is one. Not part of the file.
    pub lora: Option<Lora>,
    /// Both stacks of a T5Gemma. Sizes above are then the larger one of both.
    pub gemma: Option<Box<Gemma>>,
    /// The part above the stacks. A model without a decoder has `num_decoder_layers` 0, and a classifier's head is not tied.
    pub head: Head,
    /// The other entries of the file.
    pub rest: Rest,
}

/// The contents of the file that a [`Config`] came from, beyond its fields. Unknown keys survive a load
/// and a save.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rest {
    /// The file's object, known keys included.
    raw: Map<String, Value>,
    /// `generation_config.json`, if there was one beside the file.
    generation: Option<Map<String, Value>>,
    /// The tokens that `generation_config.json` names for answers.
    answer_ends: Option<Vec<u32>>,
    answer_start: Option<u32>,
    /// The file, for error messages.
    origin: String,
}

impl Default for Config {
    /// transformers' defaults (the shape of `t5-small`).
    fn default() -> Self {
        Config {
            family: Family::T5,
            vocab_size: 32128,
            d_model: 512,
            d_kv: 64,
            d_ff: 2048,
            num_layers: 6,
            num_decoder_layers: 6,
            num_heads: 8,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            dropout_rate: 0.1,
            layer_norm_epsilon: 1e-6,
            initializer_factor: 1.0,
            feed_forward_proj: "relu".into(),
            dense_act_fn: "relu".into(),
            is_gated_act: false,
            tie_word_embeddings: true,
            scale_decoder_outputs: true,
            pad_token_id: 0,
            eos_token_ids: vec![1],
            decoder_start_token_id: 0,
            base_precision: None,
            stored: None,
            lora: None,
            gemma: None,
            head: Head::Language,
            rest: Rest::default(),
        }
    }
}

impl Config {
    /// transformers' defaults for a family.
    fn of_family(family: Family) -> Config {
        let t5 = Config::default();
        match family {
            Family::T5 | Family::T5Gemma | Family::T5Gemma2 => t5,
            Family::Mt5 | Family::Umt5 => Config {
                family,
                vocab_size: 250_112,
                d_ff: 1024,
                num_layers: 8,
                num_heads: 6,
                feed_forward_proj: "gated-gelu".into(),
                ..t5
            },
        }
    }

    /// Reads and validates a `config.json`, and a `generation_config.json` beside it: answers take their tokens and
    /// settings from there, and transformers 5 may keep some token ids only there.
    pub fn from_file(path: &Path) -> Result<Self> {
        let raw = read_object(path, LARGEST_CONFIG_BYTES)?;
        let beside = path.with_file_name("generation_config.json");
        let generation = if beside.exists() { Some(read_object(&beside, LARGEST_CONFIG_BYTES)?) } else { None };
        Self::from_objects(raw, generation, path.display().to_string())
    }

    /// Reads and validates the text of a `config.json`. `origin` names it in errors.
    pub fn from_json(text: &str, origin: &str) -> Result<Self> {
        match serde_json::from_str(text) {
            Ok(Value::Object(raw)) => Self::from_objects(raw, None, origin.into()),
            Ok(_) => Err(Error::Json { path: origin.into(), problem: "expected a JSON object".into() }),
            Err(e) => Err(Error::Json { path: origin.into(), problem: e.to_string() }),
        }
    }

    fn from_objects(raw: Map<String, Value>, generation: Option<Map<String, Value>>, origin: String) -> Result<Self> {
        let read = Reader { raw: &raw, origin: &origin, inside: "" };
        let family = read.family()?;
        if family.is_gemma() {
            return gemma::read(family, raw, generation, origin);
        }
        let default = Config::of_family(family);
        let empty = Map::new();
        let of_answers = Reader { raw: generation.as_ref().unwrap_or(&empty), origin: GENERATION_CONFIG, inside: "" };
        let answer_ends = of_answers.get("eos_token_id").map(|_| of_answers.tokens("eos_token_id", &[])).transpose()?;
        // Where no start is named, transformers uses the token that begins texts.
        let answer_start = match of_answers.token("decoder_start_token_id")? {
            None => of_answers.token("bos_token_id")?,
            start => start,
        };
        let num_layers = read.size(&["num_layers", "num_hidden_layers"], default.num_layers)?;
        let feed_forward_proj = read.text("feed_forward_proj", &default.feed_forward_proj)?;
        let (act, gated) = split_projection(&feed_forward_proj)
            .ok_or_else(|| read.error("feed_forward_proj", "`{ACT}` or `gated-{ACT}`", raw.get("feed_forward_proj")))?;
        let tie_word_embeddings = read.flag("tie_word_embeddings", true)?;
        let pad = read.token("pad_token_id")?.or(of_answers.token("pad_token_id")?).unwrap_or(0);
        let start = read.token("decoder_start_token_id")?.or(of_answers.token("decoder_start_token_id")?);
        let scales = family.scales_decoder_outputs(tie_word_embeddings);
        let head = Head::from_json(family, &raw);
        let config = Config {
            family,
            vocab_size: read.size(&["vocab_size"], default.vocab_size)?,
            d_model: read.size(&["d_model", "hidden_size"], default.d_model)?,
            d_kv: read.size(&["d_kv", "head_dim"], default.d_kv)?,
            d_ff: read.size(&["d_ff"], default.d_ff)?,
            num_layers,
            num_decoder_layers: read.size(&["num_decoder_layers"], num_layers)?,
            num_heads: read.size(&["num_heads", "num_attention_heads"], default.num_heads)?,
            relative_attention_num_buckets: read
                .size(&["relative_attention_num_buckets"], default.relative_attention_num_buckets)?,
            relative_attention_max_distance: read
                .size(&["relative_attention_max_distance"], default.relative_attention_max_distance)?,
            dropout_rate: read.number("dropout_rate", default.dropout_rate)?,
            layer_norm_epsilon: read.number("layer_norm_epsilon", default.layer_norm_epsilon)?,
            initializer_factor: read.number("initializer_factor", default.initializer_factor)?,
            dense_act_fn: read.text("dense_act_fn", &act)?,
            is_gated_act: read.flag("is_gated_act", gated)?,
            feed_forward_proj,
            tie_word_embeddings,
            // An mT5's output is never scaled, whatever its file says.
            scale_decoder_outputs: read.flag("scale_decoder_outputs", scales)? && family != Family::Mt5,
            pad_token_id: pad,
            eos_token_ids: read.tokens("eos_token_id", &default.eos_token_ids)?,
            decoder_start_token_id: start.unwrap_or(pad),
            base_precision: read.base_precision()?,
            stored: None,
            lora: None,
            gemma: None,
            head: Head::Language,
            rest: Rest { raw, generation, answer_ends, answer_start, origin },
        };
        let config = config.with_head(head)?;
        config.validate()?;
        Ok(config)
    }

    /// This model's stacks below another head.
    ///
    /// # Errors
    /// [`Error::Config`] for a head over a decoder that this model does not have, or for text of a model that makes none.
    pub fn with_head(mut self, head: Head) -> Result<Config> {
        let head = head.over(self.family, &self.head);
        let lacks_decoder = head.has_decoder() && !self.head.has_decoder();
        if lacks_decoder || head.is_language() && !self.head.is_language() {
            let [class, expected] = [&self.head, &head].map(|head| head.architecture(self.family));
            let what = if lacks_decoder { "a model with a decoder" } else { "a model that makes text" };
            return Err(self.invalid("architectures", &class, &format!("{what}, such as {expected}")));
        }
        if !head.has_decoder() {
            self.num_decoder_layers = 0;
        }
        self.tie_word_embeddings &= head.is_language();
        self.head = head;
        Ok(self)
    }

    /// Dropout before the layers of a classifier: transformers' `classifier_dropout`, in a T5Gemma `classifier_dropout_rate`.
    pub(crate) fn classifier_dropout(&self) -> f64 {
        let key = if self.gemma.is_some() { "classifier_dropout_rate" } else { "classifier_dropout" };
        self.rest.raw.get(key).and_then(Value::as_f64).unwrap_or_default()
    }

    /// Sets `feed_forward_proj` and the fields that transformers derives from it.
    ///
    /// # Errors
    /// [`Error::Config`] when the projection is not `{ACT}` or `gated-{ACT}` with an activation known here.
    pub fn set_feed_forward_proj(&mut self, projection: &str) -> Result<()> {
        let (act, gated) = split_projection(projection)
            .ok_or_else(|| self.invalid("feed_forward_proj", projection, "`{ACT}` or `gated-{ACT}`"))?;
        self.feed_forward_proj = projection.into();
        self.dense_act_fn = act;
        self.is_gated_act = gated;
        self.activation().map(|_| ())
    }

    /// Refuses values that are invalid for every T5: zero sizes, sizes beyond any T5, odd bucket counts, unknown
    /// activations, token ids outside the vocabulary.
    pub fn validate(&self) -> Result<()> {
        self.validate_sizes()?;
        let (dropout, epsilon, factor) = (self.dropout_rate, self.layer_norm_epsilon, self.initializer_factor);
        let numbers = [
            ("dropout_rate", dropout, (0.0..1.0).contains(&dropout), "a number from 0 to below 1"),
            ("layer_norm_epsilon", epsilon, epsilon > 0.0 && epsilon < 1.0, "a number between 0 and 1"),
            ("initializer_factor", factor, factor.is_finite() && factor > 0.0, "a number above 0"),
        ];
        if let Some((key, value, _, expected)) = numbers.into_iter().find(|(_, _, is_valid, _)| !is_valid) {
            return Err(self.invalid(key, &value.to_string(), expected));
        }
        self.activation()?;
        let ids = [
            ("pad_token_id", self.pad_token_id),
            ("decoder_start_token_id", self.decoder_start_token_id),
            ("decoder_start_token_id", self.answer_start()),
        ];
        let ends = self.eos_token_ids.iter().chain(self.answer_ends()).map(|&id| ("eos_token_id", id));
        if let Some((key, id)) = ids.into_iter().chain(ends).find(|(_, id)| *id as usize >= self.vocab_size) {
            let expected = format!("a token id below vocab_size ({})", self.vocab_size);
            return Err(self.invalid(key, &id.to_string(), &expected));
        }
        Ok(())
    }

    fn validate_sizes(&self) -> Result<()> {
        for (key, value, largest) in [
            ("vocab_size", self.vocab_size, LARGEST_DIMENSION),
            ("d_model", self.d_model, LARGEST_DIMENSION),
            ("d_kv", self.d_kv, LARGEST_DIMENSION),
            ("d_ff", self.d_ff, LARGEST_DIMENSION),
            ("num_heads", self.num_heads, LARGEST_DIMENSION),
            ("num_layers", self.num_layers, LARGEST_LAYERS),
            ("num_decoder_layers", self.num_decoder_layers, LARGEST_LAYERS),
            ("relative_attention_max_distance", self.relative_attention_max_distance, LARGEST_DIMENSION),
        ] {
            let is_absent = key == "num_decoder_layers" && !self.head.has_decoder();
            if value as u64 > largest || (value == 0) != is_absent {
                return Err(self.invalid(key, &value.to_string(), &format!("a number from 1 to {largest}")));
            }
        }
        if self.num_heads as u64 * self.d_kv as u64 > LARGEST_DIMENSION {
            let expected = format!("num_heads x d_kv of at most {LARGEST_DIMENSION}");
            return Err(self.invalid("d_kv", &self.d_kv.to_string(), &expected));
        }
        let buckets = self.relative_attention_num_buckets;
        if !(4..=LARGEST_BUCKETS).contains(&buckets) {
            let expected = format!("a number from 4 to {LARGEST_BUCKETS}");
            return Err(self.invalid("relative_attention_num_buckets", &buckets.to_string(), &expected));
        }
        // Half of the buckets are exact distances; the logarithmic other half must have room beyond them.
        if self.relative_attention_max_distance <= buckets / 2 {
            let got = self.relative_attention_max_distance.to_string();
            let expected = format!("more than half of relative_attention_num_buckets ({buckets})");
            return Err(self.invalid("relative_attention_max_distance", &got, &expected));
        }
        Ok(())
    }

    /// The activation of the feed-forward layers.
    pub fn activation(&self) -> Result<Activation> {
        match self.dense_act_fn.as_str() {
            "relu" => Ok(Activation::Relu),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" | "gelu_accurate" => Ok(Activation::GeluNew),
            "gelu" | "gelu_python" => Ok(Activation::Gelu),
            "silu" | "swish" => Ok(Activation::Silu),
            other => Err(self.invalid("dense_act_fn", other, "one of relu, gelu, gelu_new, silu")),
        }
    }

    /// The soft cap of the logits.
    pub(crate) fn logit_cap(&self) -> Option<f64> {
        self.gemma.as_ref().and_then(|gemma| gemma.logit_cap)
    }

    /// The most tokens of a source, and of a decoder's input, that the model has positions for; `None` for any number.
    pub fn most_positions(&self) -> Option<(usize, usize)> {
        self.gemma.as_ref().map(|gemma| (gemma.encoder.positions, gemma.decoder.positions))
    }

    /// The tokens that stand for images.
    pub fn image_tokens(&self) -> &[u32] {
        self.gemma.as_ref().map_or(&[], |gemma| &gemma.image_tokens)
    }

    /// Width of queries, keys and values: heads x head size.
    pub fn inner_dim(&self) -> usize {
        self.num_heads * self.d_kv
    }

    /// Whether a card has a kernel for each operation of this model. If not, launches cannot be recorded.
    pub(crate) fn has_kernels_on_card(&self) -> bool {
        self.gemma.is_none()
            && self.d_kv <= t5_ops::MAX_HEAD_ON_DEVICE
            && self.lora.as_ref().is_none_or(|lora| !lora.dora)
    }

    /// Blocks of both stacks together.
    pub fn blocks(&self) -> usize {
        self.num_layers + self.num_decoder_layers
    }

    /// The scale on the decoder's output before the head.
    pub fn logit_scale(&self) -> f64 {
        if self.scale_decoder_outputs { (self.d_model as f64).powf(-0.5) } else { 1.0 }
    }

    /// Refuses a model whose weights are quantised, for operations that need their values.
    pub fn refuse_quantised(&self, expected: &str) -> Result<()> {
        let Some(precision) = self.base_precision else { return Ok(()) };
        Err(self.invalid(QUANTIZATION, precision.name(), expected))
    }

    /// The `config.json` of this model: the keys that it was loaded with, in their order, with current values.
    pub fn to_json(&self) -> Value {
        if let Some(gemma) = &self.gemma {
            return self.gemma_json(gemma);
        }
        let mut json = self.rest.raw.clone();
        let mut set = |key: &str, value: Value| {
            // Keeps the file's own spelling of a number that has not changed (`1e-06`, `0` for `0.0`).
            let same =
                json.get(key).is_some_and(|old| old == &value || (old.is_number() && old.as_f64() == value.as_f64()));
            if !same {
                json.insert(key.into(), value);
            }
        };
        set("model_type", self.family.model_type().into());
        set("architectures", vec![self.head.architecture(self.family)].into());
        set("is_encoder_decoder", self.head.has_decoder().into());
        set("vocab_size", self.vocab_size.into());
        set("d_model", self.d_model.into());
        set("d_kv", self.d_kv.into());
        set("d_ff", self.d_ff.into());
        set("num_layers", self.num_layers.into());
        if self.head.has_decoder() {
            set("num_decoder_layers", self.num_decoder_layers.into());
        }
        set("num_heads", self.num_heads.into());
        set("relative_attention_num_buckets", self.relative_attention_num_buckets.into());
        set("relative_attention_max_distance", self.relative_attention_max_distance.into());
        set("dropout_rate", self.dropout_rate.into());
        set("layer_norm_epsilon", self.layer_norm_epsilon.into());
        set("initializer_factor", self.initializer_factor.into());
        set("feed_forward_proj", self.feed_forward_proj.clone().into());
        set("dense_act_fn", self.dense_act_fn.clone().into());
        set("is_gated_act", self.is_gated_act.into());
        self.head.entries().into_iter().for_each(|(key, value)| set(key, value));
        if self.head.is_language() {
            set("tie_word_embeddings", self.tie_word_embeddings.into());
        }
        let implied = self.family.scales_decoder_outputs(self.tie_word_embeddings);
        let is_said = self.rest.raw.contains_key("scale_decoder_outputs") || self.scale_decoder_outputs != implied;
        if is_said && self.head.is_language() {
            set("scale_decoder_outputs", self.scale_decoder_outputs.into());
        }
        set("pad_token_id", self.pad_token_id.into());
        set("eos_token_id", eos_value(&self.eos_token_ids));
        set("decoder_start_token_id", self.decoder_start_token_id.into());
        self.put_quantisation(&mut json);
        // `auto_map` names Python files, which are not written beside this one.
        json.remove("auto_map");
        Value::Object(json)
    }

    /// The entry that says how weights are quantised.
    fn put_quantisation(&self, json: &mut Map<String, Value>) {
        match self.base_precision {
            Some(precision) => {
                let value = json!({ "quant_method": QUANT_METHOD, "base_precision": precision.name() });
                json.insert(QUANTIZATION.into(), value);
            }
            None => drop(json.remove(QUANTIZATION)),
        }
    }

    /// The text that transformers' `prefix` puts before every source; empty for none.
    pub fn prefix(&self) -> &str {
        self.rest.raw.get("prefix").and_then(Value::as_str).unwrap_or_default()
    }

    /// transformers' `n_positions`: the tokens that the model was made for. T5 itself has no limit.
    pub fn positions(&self) -> Option<usize> {
        let positions = self.rest.raw.get("n_positions").and_then(Value::as_u64).filter(|count| *count > 0);
        positions.and_then(|count| u32::try_from(count).ok()).map(|count| count as usize)
    }

    /// Sets the text before every source.
    pub fn set_prefix(&mut self, prefix: &str) {
        match prefix {
            "" => drop(self.rest.raw.remove("prefix")),
            prefix => drop(self.rest.raw.insert("prefix".into(), prefix.into())),
        }
    }

    /// The tokens that end an answer: from `generation_config.json`, or else from `config.json`.
    pub fn answer_ends(&self) -> &[u32] {
        self.rest.answer_ends.as_ref().unwrap_or(&self.eos_token_ids)
    }

    /// The decoder's first input in an answer: from `generation_config.json`, or else from `config.json`.
    pub fn answer_start(&self) -> u32 {
        self.rest.answer_start.unwrap_or(self.decoder_start_token_id)
    }

    /// The model's own settings for answers, and the file that they come from: `generation_config.json`, or, as in
    /// transformers, a `config.json` without one beside it.
    pub fn answer_settings(&self) -> (&Map<String, Value>, &'static str) {
        match &self.rest.generation {
            Some(generation) => (generation, GENERATION_CONFIG),
            None => (&self.rest.raw, "config.json"),
        }
    }

    /// The `generation_config.json` to write beside [`Config::to_json`].
    pub fn generation_json(&self) -> Value {
        let (settings, _) = self.answer_settings();
        let is_kept = |key: &str| self.rest.generation.is_some() || OF_ANSWERS.contains(&key);
        let mut json: Map<String, Value> =
            settings.iter().filter(|(key, _)| is_kept(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
        json.insert("decoder_start_token_id".into(), self.answer_start().into());
        json.insert("eos_token_id".into(), eos_value(self.answer_ends()));
        json.insert("pad_token_id".into(), self.pad_token_id.into());
        Value::Object(json)
    }

    /// Sets the dtype in the file in which the weights beside it are stored, under the key that is there
    /// (`dtype` in transformers 5, `torch_dtype` before; both versions read the latter).
    pub(crate) fn set_stored_dtype(&mut self, name: &str) {
        let key = if self.rest.raw.contains_key("dtype") { "dtype" } else { "torch_dtype" };
        self.rest.raw.insert(key.into(), name.into());
        if self.gemma.is_some() {
            gemma::set_stored_dtype(&mut self.rest.raw, name);
        }
    }

    fn invalid(&self, key: &str, got: &str, expected: &str) -> Error {
        let origin = if self.rest.origin.is_empty() { "model config" } else { &self.rest.origin };
        Error::Config { origin: origin.into(), key: key.into(), got: format!("`{got}`"), expected: expected.into() }
    }
}

/// `gated-gelu` -> (`gelu_new`, gated), as transformers' `T5Config` derives it.
fn split_projection(projection: &str) -> Option<(String, bool)> {
    if projection == "gated-gelu" {
        return Some(("gelu_new".into(), true));
    }
    match projection.split('-').collect::<Vec<_>>()[..] {
        [act] => Some((act.into(), false)),
        ["gated", act] => Some((act.into(), true)),
        _ => None,
    }
}

fn eos_value(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [id] => (*id).into(),
        ids => ids.to_vec().into(),
    }
}

/// The largest `config.json` that is read. Parsed, a file takes up to 50 times its length, and it is kept with the model.
const LARGEST_CONFIG_BYTES: u64 = 256 << 10;

/// A JSON file of at most `max_bytes` that holds one object.
pub(crate) fn read_object(path: &Path, max_bytes: u64) -> Result<Map<String, Value>> {
    let json = |problem: String| Error::Json { path: path.into(), problem };
    let text = match regular_file::read(path, max_bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::FileTooLarge => return Err(json(error.to_string())),
        text => text.map_err(Error::io(path))?,
    };
    match serde_json::from_slice(&text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(json("expected a JSON object".into())),
        Err(e) => Err(json(e.to_string())),
    }
}
