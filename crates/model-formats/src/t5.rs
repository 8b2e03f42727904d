//! A T5's description, in terms of its `config.json`, and its parameters by transformers' names.

/// The architecture of a T5, as far as it affects the computation.
#[derive(Clone, Debug, PartialEq)]
pub struct T5 {
    /// A readable name.
    pub name: String,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Size of an attention head.
    pub d_kv: usize,
    /// Inner width of the feed-forward layers.
    pub d_ff: usize,
    /// Attention heads.
    pub heads: usize,
    /// Blocks of the encoder.
    pub encoder_blocks: usize,
    /// Blocks of the decoder.
    pub decoder_blocks: usize,
    /// Rows of a table of relative positions.
    pub buckets: usize,
    /// Distance from which all positions share a bucket.
    pub max_distance: usize,
    /// Whether every block has its own table of relative positions, instead of block 0 having one for all.
    pub has_a_table_in_every_block: bool,
    /// Added to the mean square in every norm.
    pub epsilon: f64,
    /// The activation by transformers' name: `relu`, `gelu_new`, `gelu`, `silu`.
    pub activation: String,
    /// Whether the feed-forward layers have a gate: `wi_0` and `wi_1` in place of `wi`.
    pub is_gated: bool,
    /// Whether the head is the embedding table.
    pub is_tied: bool,
    /// Whether the decoder's output is scaled by `d_model^-0.5` before the head.
    pub scales_logits: bool,
    /// Number of tokens that the model was made for, if its file gives one.
    pub positions: Option<usize>,
    /// The token at padded positions.
    pub pad: u32,
    /// The decoder's first input.
    pub start: u32,
    /// Tokens that end an answer.
    pub ends: Vec<u32>,
}

/// A stack of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stack {
    Encoder,
    Decoder,
}

impl Stack {
    pub(crate) const BOTH: [Stack; 2] = [Stack::Encoder, Stack::Decoder];

    /// The name in transformers and CTranslate2.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Stack::Encoder => "encoder",
            Stack::Decoder => "decoder",
        }
    }
}

/// A parameter: its name in transformers, and its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
}

impl T5 {
    /// The architecture of `t5-small`, for callers to change parts of it.
    pub fn small(name: &str) -> T5 {
        T5 {
            name: name.into(),
            vocab_size: 32128,
            d_model: 512,
            d_kv: 64,
            d_ff: 2048,
            heads: 8,
            encoder_blocks: 6,
            decoder_blocks: 6,
            buckets: 32,
            max_distance: 128,
            has_a_table_in_every_block: false,
            epsilon: 1e-6,
            activation: "relu".into(),
            is_gated: false,
            is_tied: true,
            scales_logits: true,
            positions: None,
            pad: 0,
            start: 0,
            ends: vec![1],
        }
    }

    /// The factor on the decoder's output before the head.
    pub(crate) fn logits_scale(&self) -> f32 {
        if self.scales_logits { (self.d_model as f64).powf(-0.5) as f32 } else { 1.0 }
    }

    pub(crate) fn blocks(&self, stack: Stack) -> usize {
        match stack {
            Stack::Encoder => self.encoder_blocks,
            Stack::Decoder => self.decoder_blocks,
        }
    }

    /// Whether a block has a table of relative positions.
    pub(crate) fn has_table(&self, block: usize) -> bool {
        block == 0 || self.has_a_table_in_every_block
    }

    /// The embedding table.
    pub(crate) fn table(&self) -> Parameter {
        Parameter { name: "shared.weight".into(), shape: vec![self.vocab_size, self.d_model] }
    }

    /// The head's table: its own, or the embedding's.
    pub(crate) fn head(&self) -> Parameter {
        if self.is_tied {
            return self.table();
        }
        Parameter { name: "lm_head.weight".into(), ..self.table() }
    }

    pub(crate) fn last_norm(&self, stack: Stack) -> Parameter {
        Parameter { name: format!("{}.final_layer_norm.weight", stack.name()), shape: vec![self.d_model] }
    }

    /// The norm before layer `layer` of a block.
    pub(crate) fn norm(&self, stack: Stack, block: usize, layer: usize) -> Parameter {
        let name = format!("{}.block.{block}.layer.{layer}.layer_norm.weight", stack.name());
        Parameter { name, shape: vec![self.d_model] }
    }

    /// A matrix of self-attention, or of cross attention if `crosses`: `q`, `k`, `v` or `o`.
    pub(crate) fn attention(&self, stack: Stack, block: usize, crosses: bool, matrix: &str) -> Parameter {
        let inner = self.heads * self.d_kv;
        let shape = if matrix == "o" { vec![self.d_model, inner] } else { vec![inner, self.d_model] };
        let layer = if crosses { "layer.1.EncDecAttention" } else { "layer.0.SelfAttention" };
        Parameter { name: format!("{}.block.{block}.{layer}.{matrix}.weight", stack.name()), shape }
    }

    /// A block's table of relative positions: (buckets, heads).
    pub(crate) fn relative_positions(&self, stack: Stack, block: usize) -> Parameter {
        let name = format!("{}.block.{block}.layer.0.SelfAttention.relative_attention_bias.weight", stack.name());
        Parameter { name, shape: vec![self.buckets, self.heads] }
    }

    /// A matrix of the feed-forward layer: `wi`, `wi_0`, `wi_1` or `wo`.
    pub(crate) fn feed_forward(&self, stack: Stack, block: usize, matrix: &str) -> Parameter {
        let shape = if matrix == "wo" { vec![self.d_model, self.d_ff] } else { vec![self.d_ff, self.d_model] };
        let layer = Self::feed_forward_layer(stack);
        Parameter {
            name: format!("{}.block.{block}.layer.{layer}.DenseReluDense.{matrix}.weight", stack.name()),
            shape,
        }
    }

    /// The index of the feed-forward layer within a block.
    pub(crate) fn feed_forward_layer(stack: Stack) -> usize {
        match stack {
            Stack::Encoder => 1,
            Stack::Decoder => 2,
        }
    }
}
