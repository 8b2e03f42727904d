//! Settings of a pass over the model: those of an optimizer batch, and those of a stack for its layers.
//!
//! Dropout places are numbered, so that a mask is a function of (seed, step, place, sample, position,
//! channel) alone, and not of how memory is spent. Exact resume depends on the numbers: never renumber them.

use candle_core::DType;
use t5_ops::{Dropout, TokenLoss};

/// Settings of one optimizer batch, the same for each of its micro-batches.
#[derive(Clone, Copy, Debug)]
pub struct StepContext {
    /// Seed of the run.
    pub seed: u64,
    /// The optimizer step: every step draws other dropout masks.
    pub step: u64,
    /// Probability of dropping; 0 switches dropout off.
    pub dropout: f64,
    /// Probability of dropping an element of an adapter's input.
    pub adapter_dropout: f64,
    /// Dtype in which activations are computed and kept.
    pub activations: DType,
    /// How many blocks keep only their input and run forward again in backward: those of the encoder
    /// first, then those of the decoder.
    pub recompute_blocks: usize,
    /// Rows of logits that exist at one time.
    pub loss_chunk_rows: usize,
    /// Target tokens of the whole optimizer batch: the loss is divided by it, so micro-batches just add.
    pub target_tokens: u64,
    /// The terms that are minimised beside the cross-entropy.
    pub token_loss: TokenLoss,
}

impl StepContext {
    /// Settings of a pass without dropout.
    pub fn without_dropout(activations: DType, loss_chunk_rows: usize) -> StepContext {
        StepContext {
            seed: 0,
            step: 0,
            dropout: 0.0,
            adapter_dropout: 0.0,
            activations,
            recompute_blocks: 0,
            loss_chunk_rows,
            target_tokens: 1,
            token_loss: TokenLoss::default(),
        }
    }

    /// The same pass, which measures minus the logit of each target if `is_logit`, in place of its cross-entropy.
    #[must_use]
    pub fn measuring(self, is_logit: bool) -> StepContext {
        StepContext { token_loss: TokenLoss { is_logit, ..self.token_loss }, ..self }
    }
}

/// Settings of a pass without gradients.
#[derive(Clone, Copy, Debug)]
pub struct EvalContext {
    /// Dtype in which activations are computed.
    pub activations: DType,
    /// Rows of logits that exist at one time.
    pub loss_chunk_rows: usize,
}

impl Default for EvalContext {
    fn default() -> Self {
        EvalContext { activations: DType::F32, loss_chunk_rows: 256 }
    }
}

/// Places of dropout inside a block, and beside the blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DropoutSite {
    Embedding = 0,
    FinalNorm = 1,
    SelfProbabilities = 2,
    SelfResidual = 3,
    CrossProbabilities = 4,
    CrossResidual = 5,
    FeedForwardInner = 6,
    FeedForwardResidual = 7,
}

/// The number of a dropout place. `block` is `None` for places outside the blocks.
pub(crate) fn site(decoder: bool, block: Option<usize>, place: DropoutSite) -> u32 {
    let block = block.map_or(0, |block| block as u32 + 1);
    (u32::from(decoder) << 24) | (block << 4) | place as u32
}

/// The number of the dropout place of an adapter's input: of a block's linear layer `linear`, counted from 0, or of the head.
pub(crate) fn adapter_site(decoder: bool, block: Option<usize>, linear: u32) -> u32 {
    let block = block.map_or(0, |block| block as u32 + 1);
    (1 << 25) | (u32::from(decoder) << 24) | (block << 4) | linear
}

/// The number of the dropout place before a layer of a classifier.
pub(crate) fn classifier_site(layer: u32) -> u32 {
    (1 << 26) | layer
}

/// The counter that dropout masks come from: the part that all layers of a pass over a micro-batch share.
#[derive(Clone, Copy)]
pub(crate) struct Noise<'a> {
    pub seed: u64,
    pub step: u64,
    pub dropout: f64,
    /// The probability of dropout in adapters' inputs.
    pub adapter_dropout: f64,
    /// The samples' indices in the optimizer batch.
    pub samples: &'a [u32],
    /// Whether layers compute as if they had no adapter.
    pub skips_adapter: bool,
}

impl<'a> Noise<'a> {
    /// No dropout.
    pub const NONE: Noise<'static> =
        Noise { seed: 0, step: 0, dropout: 0.0, adapter_dropout: 0.0, samples: &[], skips_adapter: false };

    pub fn dropout(&self, site: u32) -> Option<Dropout<'a>> {
        self.dropping(self.dropout, site)
    }

    /// The dropout of an adapter's input.
    pub fn adapter_dropout(&self, site: u32) -> Option<Dropout<'a>> {
        self.dropping(self.adapter_dropout, site)
    }

    fn dropping(&self, probability: f64, site: u32) -> Option<Dropout<'a>> {
        let &Noise { seed, step, samples, .. } = self;
        let probability = probability as f32;
        (probability > 0.0).then_some(Dropout { probability, seed, step, site, samples })
    }
}

/// The inputs of a stack's layers, without activations.
pub(crate) struct LayerContext<'a, T> {
    pub noise: Noise<'a>,
    /// Valid positions of each sample in this stack.
    pub lengths: &'a [usize],
    /// The stack's relative-position bias, (H, 2T-1), if it has one.
    pub bias: Option<&'a T>,
    /// For a decoder: the encoder's output (B, S, D) and its valid positions.
    pub source: Option<(&'a T, &'a [usize])>,
}

impl<'a, T> LayerContext<'a, T> {
    pub fn dropout(&self, site: u32) -> Option<Dropout<'a>> {
        self.noise.dropout(site)
    }

    /// The encoder's output and its valid positions, for the keys and values of cross attention.
    ///
    /// # Panics
    /// In an encoder: only decoder blocks have cross attention.
    pub fn source(&self) -> (&'a T, &'a [usize]) {
        self.source.expect("a decoder is given the encoder's output")
    }
}
