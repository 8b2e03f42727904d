//! [`BlockDescription`]: a block of a stack as one value. Names, shapes and first values of parameters, layers, their counts and the cache of
//! generation are read from it. T5's dialects, T5Gemma and T5Gemma 2 are such values.
//!
//! Shapes: D width of the stack, H heads of queries, KH heads of keys and values, K size of a head, F inner width of feed-forward.

use std::borrow::Cow;

use t5_ops::Mask;

use crate::config::Config;
use crate::config::gemma::StackConfig;
use crate::family::Family;
use crate::head::{Head, WRAPPED, is_of_classifier};

/// The norms of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NormKind {
    /// Rows are multiplied by `weight + offset`.
    pub offset: f64,
    pub epsilon: f64,
    /// The first value of the weights.
    pub first: f64,
}

/// One stack.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StackDescription {
    pub blocks: usize,
    /// Width of the residual stream (D).
    pub width: usize,
    /// The name of its embedding's table. Stacks may share one.
    pub table: &'static str,
    /// The standard deviation of the table's first values.
    pub table_std: f64,
    /// Factor of the embedding's rows.
    pub embedding_scale: f64,
    /// The name of the norm after the last block.
    pub final_norm: String,
    pub norm: NormKind,
}

/// One block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BlockDescription {
    /// Attention to the block's own positions. In a decoder it may see the encoder's output as well.
    pub own: AttentionDescription,
    /// A decoder's attention to the encoder's output alone.
    pub cross: Option<AttentionDescription>,
    pub feed_forward: FeedForwardDescription,
}

/// A linear layer without a bias.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LinearDescription {
    /// Its name, without `.weight`.
    pub name: String,
    /// (out, in).
    pub shape: [usize; 2],
    /// The standard deviation of its first values.
    pub std: f64,
}

/// Attention, with its norms and its residual.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AttentionDescription {
    pub q: LinearDescription,
    pub k: LinearDescription,
    pub v: LinearDescription,
    pub o: LinearDescription,
    /// The names of the norms before the layer and after it.
    pub norm: String,
    pub norm_after: Option<String>,
    /// The names of the norms of each head of queries and of keys.
    pub head_norms: Option<[String; 2]>,
    pub kind: NormKind,
    pub heads: usize,
    pub key_heads: usize,
    pub head_size: usize,
    /// Factor of scores, and their soft cap.
    pub scale: f64,
    pub soft_cap: Option<f64>,
    pub positions: Positions,
    pub mask: Mask,
    pub keys: Keys,
    /// Whether dropout drops probabilities.
    pub drops_probabilities: bool,
}

/// How attention knows positions.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Positions {
    /// A learned bias for each distance, which this block's table of this name has, or the first block's.
    Bias { table: Option<String> },
    /// Queries and keys are rotated.
    Rotary { base: f64, factor: f64 },
    /// Not at all.
    None,
}

/// The positions that keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// The queries' own.
    Own,
    /// The encoder's output.
    Source,
    /// Both, under one softmax. Keys of the encoder's output are not rotated.
    Merged,
}

/// Feed-forward, with its norms and its residual.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FeedForwardDescription {
    pub gate: LinearDescription,
    /// In gated layers.
    pub up: Option<LinearDescription>,
    pub down: LinearDescription,
    pub norm: String,
    pub norm_after: Option<String>,
    pub kind: NormKind,
}

impl AttentionDescription {
    /// Width of keys and of values (KH K).
    pub fn key_width(&self) -> usize {
        self.key_heads * self.head_size
    }
}

/// The names of T5's table and of the tables of Gemma's stacks, as the published files have them.
const SHARED: &str = "shared.weight";
const TABLES: [&str; 2] = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"];

impl Config {
    /// The name of the table of the encoder's embedding, which is the decoder's as well unless it has its own.
    pub fn shared_table(&self) -> &'static str {
        if self.gemma.is_some() { TABLES[0] } else { SHARED }
    }

    /// The name of the decoder's own table, if it has one.
    pub fn decoder_table(&self) -> Option<&'static str> {
        (self.family == Family::T5Gemma && self.head.has_decoder()).then_some(TABLES[1])
    }

    /// The name in transformers of a module or parameter with this name here.
    pub(crate) fn module_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match name.trim_start_matches("model.").strip_prefix("encoder.") {
            Some(rest) if self.family == Family::T5Gemma2 => format!("model.encoder.text_model.{rest}").into(),
            _ => self.stored_name(name),
        }
    }

    /// The name of a parameter in the model's files.
    pub(crate) fn stored_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match self.head.labels() {
            Some(_) if self.gemma.is_none() && !is_of_classifier(name) => format!("{WRAPPED}{name}").into(),
            _ => name.into(),
        }
    }

    /// The name here of a module or parameter with this name in transformers, in its files or in PEFT's. Those of a T5Gemma may begin with
    /// the stack; and transformers has a module `text_model` in T5Gemma 2's encoder, and not in its files.
    pub(crate) fn own_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        if self.gemma.is_none() {
            return name.into();
        }
        let name: Cow<str> = match name.strip_prefix("text_model.") {
            Some(rest) => format!("encoder.{rest}").into(),
            None if name.contains(".text_model.") => name.replacen(".text_model.", ".", 1).into(),
            None => name.into(),
        };
        let begins_with_stack = ["encoder.", "decoder."].iter().any(|stack| name.starts_with(stack));
        if begins_with_stack { format!("model.{name}").into() } else { name }
    }

    /// The name of the head's linear layer.
    pub fn head_name(&self) -> &'static str {
        if self.gemma.is_some() { "lm_head.out_proj" } else { "lm_head" }
    }

    /// The linear layers of a classifier, which have biases: a hidden one, and that of the outputs.
    pub(crate) fn classifier_layers(&self) -> Option<(Option<LinearDescription>, LinearDescription)> {
        let (labels, width) = (self.head.labels()?, self.stack(self.head.has_decoder()).width);
        let linear = |name: &str, outputs, std| LinearDescription { name: name.into(), shape: [outputs, width], std };
        let (outputs, std) = (labels.names.len(), self.initializer_factor * (width as f64).powf(-0.5));
        Some(match (&self.gemma, &self.head) {
            (Some(gemma), _) => {
                (None, linear("score.out_proj", outputs, gemma.initializer_range * (outputs as f64).powf(-0.5)))
            }
            (None, Head::Sequence(_)) => (
                Some(linear("classification_head.dense", width, std)),
                linear("classification_head.out_proj", outputs, std),
            ),
            (None, _) => (None, linear("classifier", outputs, self.initializer_factor)),
        })
    }

    /// The standard deviation of first values that is `power` in T5.
    fn std(&self, power: f64) -> f64 {
        self.gemma.as_ref().map_or(power * self.initializer_factor, |gemma| gemma.initializer_range)
    }

    fn norm_kind(&self, stack: Option<&StackConfig>) -> NormKind {
        match stack {
            Some(stack) => NormKind { offset: 1.0, epsilon: stack.epsilon, first: 0.0 },
            None => NormKind { offset: 0.0, epsilon: self.layer_norm_epsilon, first: self.initializer_factor },
        }
    }

    /// The settings of one stack of a Gemma.
    fn gemma_stack(&self, decoder: bool) -> Option<&StackConfig> {
        self.gemma.as_deref().map(|gemma| if decoder { &gemma.decoder } else { &gemma.encoder })
    }

    /// The width of the decoder's output.
    pub fn decoder_width(&self) -> usize {
        self.stack(true).width
    }

    pub(crate) fn stack(&self, decoder: bool) -> StackDescription {
        let name = if decoder { "decoder" } else { "encoder" };
        let blocks = if decoder { self.num_decoder_layers } else { self.num_layers };
        let stack = self.gemma_stack(decoder);
        StackDescription {
            blocks,
            width: stack.map_or(self.d_model, |stack| stack.width),
            table: self.decoder_table().filter(|_| decoder).unwrap_or_else(|| self.shared_table()),
            table_std: self.std(1.0),
            embedding_scale: stack.map_or(1.0, |stack| (stack.width as f64).sqrt()),
            final_norm: match stack {
                Some(_) => format!("model.{name}.norm.weight"),
                None => format!("{name}.final_layer_norm.weight"),
            },
            norm: self.norm_kind(stack),
        }
    }

    pub(crate) fn block(&self, decoder: bool, block: usize) -> BlockDescription {
        match self.gemma_stack(decoder) {
            Some(stack) => self.gemma_block(stack, decoder, block),
            None => self.t5_block(decoder, block),
        }
    }

    fn t5_block(&self, decoder: bool, block: usize) -> BlockDescription {
        let Config { d_model, d_kv, d_ff, num_heads, is_gated_act, .. } = *self;
        let layer =
            |layer: usize| format!("{}.block.{block}.layer.{layer}", if decoder { "decoder" } else { "encoder" });
        let (inner, kind) = (num_heads * d_kv, self.norm_kind(None));
        let linear = |name: String, shape: [usize; 2], inputs: usize| LinearDescription {
            name,
            shape,
            std: self.std((inputs as f64).powf(-0.5)),
        };
        let attention = |number: usize, name: &str, positions: Positions, mask: Mask, keys: Keys| {
            let layer = layer(number);
            let linear = |w: &str, shape, inputs| linear(format!("{layer}.{name}.{w}"), shape, inputs);
            AttentionDescription {
                // The query carries the 1/sqrt(K) that T5's attention leaves out.
                q: linear("q", [inner, d_model], d_model * d_kv),
                k: linear("k", [inner, d_model], d_model),
                v: linear("v", [inner, d_model], d_model),
                o: linear("o", [d_model, inner], inner),
                norm: format!("{layer}.layer_norm.weight"),
                norm_after: None,
                head_norms: None,
                kind,
                heads: num_heads,
                key_heads: num_heads,
                head_size: d_kv,
                scale: 1.0,
                soft_cap: None,
                positions,
                mask,
                keys,
                drops_probabilities: true,
            }
        };
        let has_table = block == 0 || self.family.has_a_table_in_every_block();
        let table = has_table.then(|| format!("{}.SelfAttention.relative_attention_bias.weight", layer(0)));
        let last = layer(if decoder { 2 } else { 1 });
        let inward = |w: &str| linear(format!("{last}.DenseReluDense.{w}"), [d_ff, d_model], d_model);
        BlockDescription {
            own: attention(0, "SelfAttention", Positions::Bias { table }, Mask::causal_if(decoder), Keys::Own),
            cross: decoder.then(|| attention(1, "EncDecAttention", Positions::None, Mask::ALL, Keys::Source)),
            feed_forward: FeedForwardDescription {
                gate: inward(if is_gated_act { "wi_0" } else { "wi" }),
                up: is_gated_act.then(|| inward("wi_1")),
                down: linear(format!("{last}.DenseReluDense.wo"), [d_model, d_ff], d_ff),
                norm: format!("{last}.layer_norm.weight"),
                norm_after: None,
                kind,
            },
        }
    }

    fn gemma_block(&self, stack: &StackConfig, decoder: bool, block: usize) -> BlockDescription {
        let layer = format!("model.{}.layers.{block}", if decoder { "decoder" } else { "encoder" });
        let (kind, std, is_second) = (self.norm_kind(Some(stack)), self.std(1.0), self.family == Family::T5Gemma2);
        let linear = |name: &str, shape| LinearDescription { name: format!("{layer}.{name}"), shape, std };
        let source_width = self.gemma_stack(false).map_or(stack.width, |encoder| encoder.width);
        let [inner, of_keys] = [stack.heads, stack.key_heads].map(|heads| heads * stack.head_size);
        let attention = |name: &str, keys: Keys, positions: Positions, mask: Mask| {
            let key_width = if keys == Keys::Source { source_width } else { stack.width };
            let norm = |place: &str| format!("{layer}.{place}_{name}_layernorm.weight");
            AttentionDescription {
                q: linear(&format!("{name}.q_proj"), [inner, stack.width]),
                k: linear(&format!("{name}.k_proj"), [of_keys, key_width]),
                v: linear(&format!("{name}.v_proj"), [of_keys, key_width]),
                o: linear(&format!("{name}.o_proj"), [stack.width, inner]),
                norm: norm("pre"),
                norm_after: Some(norm("post")),
                head_norms: is_second.then(|| ["q_norm", "k_norm"].map(|norm| format!("{layer}.{name}.{norm}.weight"))),
                kind,
                heads: stack.heads,
                key_heads: stack.key_heads,
                head_size: stack.head_size,
                scale: stack.scale,
                soft_cap: stack.score_cap,
                positions,
                mask,
                keys,
                drops_probabilities: false,
            }
        };
        let (base, factor) = stack.rotary(block);
        let own = if decoder && is_second { Keys::Merged } else { Keys::Own };
        let mask = match (stack.is_sliding[block], decoder) {
            (false, decoder) => Mask::causal_if(decoder),
            (true, true) => Mask::causal_window(stack.window),
            // As `sliding_window_mask_function` of T5Gemma 2, and as transformers' windows both ways of T5Gemma.
            (true, false) if is_second => {
                Mask { before: stack.window.div_ceil(2).saturating_sub(1), after: stack.window / 2 }
            }
            (true, false) => Mask { before: stack.window, after: stack.window },
        };
        let cross = decoder && !is_second;
        let norm = |place: &str| format!("{layer}.{place}_feedforward_layernorm.weight");
        BlockDescription {
            own: attention("self_attn", own, Positions::Rotary { base, factor }, mask),
            cross: cross.then(|| attention("cross_attn", Keys::Source, Positions::None, Mask::ALL)),
            feed_forward: FeedForwardDescription {
                gate: linear("mlp.gate_proj", [stack.inner, stack.width]),
                up: Some(linear("mlp.up_proj", [stack.inner, stack.width])),
                down: linear("mlp.down_proj", [stack.width, stack.inner]),
                norm: norm("pre"),
                norm_after: Some(norm("post")),
                kind,
            },
        }
    }
}
