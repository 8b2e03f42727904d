//! What a T5 costs in bytes, before anything is allocated: pure functions of configuration and shapes.
//!
//! The pass over a micro-batch is walked through tensor by tensor, in the order in which the layers
//! allocate and drop; a test holds what the walk says is kept against the bytes of the real `Saved`s.
//!
//! ```
//! use candle_core::DType;
//! use t5::{Config, costs};
//! let config = Config::preset("t5-small").unwrap();
//! assert_eq!(costs::parameters(&config, DType::F32), 60_506_624 * 4);
//! let shape = costs::Shape { samples: 8, source_tokens: 256, target_tokens: 256 };
//! let pass = costs::Pass {
//!     shape,
//!     activations: DType::F32,
//!     gradients: DType::F32,
//!     recompute_blocks: 0,
//!     loss_chunk_rows: 256,
//!     dropout: true,
//! };
//! let [all, decoder] = [costs::Trained::all(&config), costs::Trained::new(&config, &|spec| spec.part.is_decoder())]
//!     .map(|trained| costs::training(&config, &pass, &trained).iter().map(|row| row.bytes).sum::<u64>());
//! assert!(decoder < all); // a frozen encoder keeps nothing
//! ```

mod arithmetic;
mod layer_major;
mod packed;
mod weights;

use std::ops::Range;

pub use arithmetic::{Arithmetic, BlockArithmetic, arithmetic};
use candle_core::DType;
pub use layer_major::{layer_major, layer_major_written};
pub(crate) use packed::PACKED;
use packed::{packed, packed_along_tokens};
pub use weights::{WeightsOnDisk, largest_parameter, load, parameters, save};

use crate::config::Config;
use crate::generate::FIRST_CAPACITY;
use crate::parameters::{ParameterSpec, Part};
use crate::reach::{Keep, Reach};

/// One line of the bill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostRow {
    /// What it is.
    pub name: &'static str,
    /// How much of it.
    pub bytes: u64,
}

/// A micro-batch's rectangle: samples, and the longest source and target among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Samples (B).
    pub samples: usize,
    /// Tokens of the longest source (S).
    pub source_tokens: usize,
    /// Tokens of the longest target (T).
    pub target_tokens: usize,
}

/// A pass over one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// The micro-batch.
    pub shape: Shape,
    /// Dtype of activations.
    pub activations: DType,
    /// Dtype of the blocks' gradient accumulators, as for [`crate::Gradients::new`].
    pub gradients: DType,
    /// Blocks that keep only their input.
    pub recompute_blocks: usize,
    /// Rows of logits at a time.
    pub loss_chunk_rows: usize,
    /// Whether dropout is on: it needs a copy where it is applied alone.
    pub dropout: bool,
}

/// The parameters that are trained, and how far backward reaches for them: worked out once for many passes.
#[derive(Clone, Debug)]
pub struct Trained {
    specs: Vec<ParameterSpec>,
    /// Which of them are a part's, by the part's index: they follow each other.
    parts: Vec<Range<usize>>,
    /// Bytes of a part's gradients with products in f32, and in bf16.
    part_gradient_bytes: Vec<[u64; 2]>,
    reach: Reach,
}

impl Trained {
    /// Those that `is_trained` says.
    pub fn new(config: &Config, is_trained: &dyn Fn(&ParameterSpec) -> bool) -> Trained {
        let specs: Vec<_> = ParameterSpec::all(config).into_iter().filter(is_trained).collect();
        let reach = Reach::to(config, specs.iter().map(|spec| spec.part));
        let most = specs.iter().map(|spec| spec.part.index() + 1).max().unwrap_or(0);
        let (mut parts, mut part_gradient_bytes) = (vec![0..0; most], vec![[0; 2]; most]);
        for (index, spec) in specs.iter().enumerate() {
            let part = spec.part.index();
            let first = if parts[part].is_empty() { index } else { parts[part].start };
            parts[part] = first..index + 1;
            let [f32, bf16] = [DType::F32, DType::BF16].map(|products| spec.gradient_bytes(products));
            part_gradient_bytes[part] = [part_gradient_bytes[part][0] + f32, part_gradient_bytes[part][1] + bf16];
        }
        Trained { specs, parts, part_gradient_bytes, reach }
    }

    /// Every parameter.
    pub fn all(config: &Config) -> Trained {
        Trained::new(config, &|_| true)
    }

    /// In the order of [`ParameterSpec::all`].
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// Those of a part.
    fn of(&self, part: Part) -> &[ParameterSpec] {
        self.parts.get(part.index()).map_or(&[], |range| &self.specs[range.clone()])
    }

    /// Bytes of the gradients of a part.
    fn gradient_bytes_of(&self, part: Part, products: DType) -> u64 {
        let bytes = || self.part_gradient_bytes.get(part.index()).copied().unwrap_or_default();
        match products {
            DType::F32 => bytes()[0],
            DType::BF16 => bytes()[1],
            _ => self.of(part).iter().map(|spec| spec.gradient_bytes(products)).sum(),
        }
    }

    /// The most blocks that `recompute_blocks` can mean: those that backward enters.
    pub fn blocks(&self) -> usize {
        self.reach.blocks_entered()
    }

    /// Bytes of the gradient accumulators; `products` as for [`crate::Gradients::new`].
    pub fn gradient_bytes(&self, products: DType) -> u64 {
        self.specs.iter().map(|spec| spec.gradient_bytes(products)).sum()
    }
}

/// The peak of one micro-batch's forward and backward beside parameters and gradients: what is kept
/// between the two (`activations`), a chunk of logits and its product (`loss`), and the largest momentary
/// need beyond these (`workspace`).
pub fn training(config: &Config, pass: &Pass, trained: &Trained) -> Vec<CostRow> {
    training_within(config, pass, trained.reach)
}

/// [`training`] where it is known how far backward reaches.
pub(crate) fn training_within(config: &Config, pass: &Pass, reach: Reach) -> Vec<CostRow> {
    let mut walk = Walk::new(config, pass);
    walk.forward(reach);
    let activations = walk.live;
    walk.head();
    walk.backward(reach);
    let loss = walk.loss(true);
    vec![
        CostRow { name: "activations", bytes: activations },
        CostRow { name: "loss", bytes: loss },
        CostRow { name: "workspace", bytes: walk.peak.saturating_sub(activations + loss) },
        CostRow { name: PACKED, bytes: packed(config, pass, true) },
    ]
}

/// The sum of [`training`] without what each thread has for itself: passes compared by it compare alike on any number of
/// threads.
pub(crate) fn training_bytes_within(config: &Config, pass: &Pass, reach: Reach) -> u64 {
    let rows = training_within(config, pass, reach);
    let beside_packed = rows.iter().filter(|row| row.name != PACKED).map(|row| row.bytes).sum::<u64>();
    beside_packed + packed_along_tokens(config, pass)
}

/// The peak of [`crate::T5::loss`] beside the parameters. `recompute_blocks` and `dropout` do not matter.
pub fn evaluation(config: &Config, pass: &Pass) -> Vec<CostRow> {
    let pass = Pass { dropout: false, ..*pass };
    let mut walk = Walk::new(config, &pass);
    walk.forward(Reach::nothing(config));
    let loss = walk.loss(false);
    walk.momentary(loss);
    vec![
        CostRow { name: "loss", bytes: loss },
        CostRow { name: "workspace", bytes: walk.peak.saturating_sub(loss) },
        CostRow { name: PACKED, bytes: packed(config, &pass, false) },
    ]
}

/// The peak of [`crate::T5::generate`] beside the parameters, for one batch of sources.
pub fn generation(config: &Config, shape: &Shape, max_new_tokens: usize, activations: DType) -> Vec<CostRow> {
    let Shape { samples, source_tokens, .. } = *shape;
    let size = activations.size_in_bytes();
    let of = |positions: usize| (samples * positions * config.inner_dim() * size) as u64;
    let cache = |positions: usize| 2 * config.num_decoder_layers as u64 * (of(positions) + of(source_tokens));
    let forward = |source_tokens: usize| {
        let shape = Shape { samples, source_tokens, target_tokens: 1 };
        let pass =
            Pass { shape, activations, gradients: DType::F32, recompute_blocks: 0, loss_chunk_rows: 1, dropout: false };
        let mut walk = Walk::new(config, &pass);
        walk.forward(Reach::nothing(config));
        (walk.peak, packed(config, &pass, false))
    };
    // Sources are encoded before there is a cache; their encoding is there while the cache is begun.
    let ((encoding, packed), (decoding, _)) = (forward(source_tokens), forward(1));
    let encoded = (samples * source_tokens * config.d_model * size) as u64;
    let begun = encoded + cache(max_new_tokens.min(FIRST_CAPACITY));
    // While it grows, one tensor is there in its old size as well.
    let growing = if max_new_tokens > FIRST_CAPACITY { of(max_new_tokens.next_power_of_two() / 2) } else { 0 };
    let logits = (samples * config.vocab_size * (size + 8)) as u64;
    let full = cache(max_new_tokens);
    let peak = encoding.max(begun).max(full + growing.max(decoding + logits));
    vec![
        CostRow { name: "key/value cache", bytes: full.min(peak) },
        CostRow { name: "workspace", bytes: peak - full.min(peak) },
        CostRow { name: PACKED, bytes: packed },
    ]
}

/// Walks through a pass, tensor by tensor. Names are those of the layers' code.
struct Walk<'a> {
    config: &'a Config,
    pass: &'a Pass,
    /// What blocks keep that are computed again.
    again: Keep,
    live: u64,
    peak: u64,
}

/// One stack's sizes in bytes.
#[derive(Clone, Copy)]
struct Sizes {
    /// (B, T, D)
    x: u64,
    /// (B, T, HK)
    q: u64,
    /// (B, S, HK) of the source, in a decoder.
    source_k: u64,
    /// (B, T, F)
    gate: u64,
    /// (B, H, T), f32
    lse: u64,
    /// (H, 2T-1), f32
    bias: u64,
}

impl Sizes {
    /// What the heads of a block's attentions put out, with its statistics.
    fn heads(&self, decoder: bool) -> u64 {
        (1 + u64::from(decoder)) * (self.q + self.lse)
    }
}

impl Walk<'_> {
    fn new<'a>(config: &'a Config, pass: &'a Pass) -> Walk<'a> {
        Walk { config, pass, again: Keep::Input, live: 0, peak: 0 }
    }

    fn sizes(&self, decoder: bool) -> Sizes {
        let Shape { samples, source_tokens, target_tokens } = self.pass.shape;
        let tokens = if decoder { target_tokens } else { source_tokens };
        let size = self.pass.activations.size_in_bytes();
        // Statistics and bias are f32, or f64 in an f64 model.
        let wide = if self.pass.activations == DType::F64 { 8 } else { 4 };
        let of = |tokens: usize, width: usize| (samples * tokens * width * size) as u64;
        Sizes {
            x: of(tokens, self.config.d_model),
            q: of(tokens, self.config.inner_dim()),
            source_k: of(source_tokens, self.config.inner_dim()),
            gate: of(tokens, self.config.d_ff),
            lse: (samples * self.config.num_heads * tokens * wide) as u64,
            bias: (self.config.num_heads * (2 * tokens - 1) * wide) as u64,
        }
    }

    fn hold(&mut self, bytes: u64) {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
    }

    fn free(&mut self, bytes: u64) {
        self.live -= bytes;
    }

    fn momentary(&mut self, bytes: u64) {
        self.hold(bytes);
        self.free(bytes);
    }

    /// A copy, where dropout is applied by itself.
    fn dropout_copy(&self, bytes: u64) -> u64 {
        if self.pass.dropout { bytes } else { 0 }
    }

    fn projections(&self) -> u64 {
        if self.config.is_gated_act { 2 } else { 1 }
    }

    /// What a block keeps, its input included.
    fn kept(&self, s: &Sizes, decoder: bool, keep: Keep) -> u64 {
        let attention = |k: u64| s.x + 2 * s.q + 2 * k + s.lse;
        match keep {
            Keep::Nothing => 0,
            Keep::Input => s.x,
            Keep::Heads => s.x + s.heads(decoder),
            Keep::Everything => {
                let cross = if decoder { attention(s.source_k) } else { 0 };
                attention(s.q) + cross + s.x + self.projections() * s.gate
            }
        }
    }

    /// What the loss holds: a chunk of logits, or a block of them; with gradients their sums, too.
    fn loss(&self, gradients: bool) -> u64 {
        let rows = self.pass.shape.samples * self.pass.shape.target_tokens;
        let head = (self.config.vocab_size, self.config.d_model);
        let Pass { activations, loss_chunk_rows, .. } = *self.pass;
        t5_ops::linear_cross_entropy_bytes(rows, head, activations, loss_chunk_rows, gradients) as u64
    }

    /// Ends with what is kept, the encoder's output and the decoder's output alive.
    fn forward(&mut self, reach: Reach) {
        for decoder in [false, true] {
            let sizes = self.sizes(decoder);
            self.hold(sizes.bias);
            self.hold(sizes.x);
            self.momentary(self.dropout_copy(sizes.x));
            let blocks = if decoder { self.config.num_decoder_layers } else { self.config.num_layers };
            for block in 0..blocks {
                self.block_forward(&sizes, decoder, self.keep(reach, decoder, block));
            }
            self.hold(sizes.x); // the final norm's output
            self.momentary(self.dropout_copy(sizes.x));
            let enters_norm = if decoder { reach.decoder.enters_norm() } else { reach.encoder.enters_norm() };
            if !enters_norm {
                self.free(sizes.x);
            }
        }
    }

    fn keep(&self, reach: Reach, decoder: bool, block: usize) -> Keep {
        let keep = match decoder {
            false => reach.keep_encoder_block(block, self.pass.recompute_blocks),
            true => reach.keep_decoder_block(block, self.pass.recompute_blocks),
        };
        keep.instead_of_input(self.again)
    }

    /// The block's input is alive before; its output, and what it keeps, after.
    fn block_forward(&mut self, s: &Sizes, decoder: bool, keep: Keep) {
        self.attention_forward(s, s.q, keep);
        if matches!(keep, Keep::Input | Keep::Heads) {
            self.hold(s.x); // the input, which the layer has not freed after all
        }
        if decoder {
            self.attention_forward(s, s.source_k, keep);
        }
        self.feed_forward_forward(s, keep == Keep::Everything);
    }

    fn attention_forward(&mut self, s: &Sizes, k: u64, keep: Keep) {
        self.hold(s.x + s.q + 2 * k); // n, q, k, v
        self.free(s.x);
        self.hold(s.q + s.lse); // what the heads put out
        if keep != Keep::Everything {
            self.free(s.q + 2 * k);
        }
        self.hold(s.x); // projected
        if !matches!(keep, Keep::Heads | Keep::Everything) {
            self.free(s.q + s.lse);
        }
        self.hold(s.x); // y
        self.free(s.x + if keep == Keep::Everything { 0 } else { s.x });
    }

    /// Forward again, everything kept; `given` is what the heads put out, where it is there already.
    fn attention_again(&mut self, s: &Sizes, k: u64, given: u64) {
        self.hold(s.x + s.q + 2 * k); // n, q, k, v
        self.free(s.x);
        self.hold(s.q + s.lse - given);
        self.hold(2 * s.x); // projected, y
        self.free(s.x);
    }

    fn feed_forward_forward(&mut self, s: &Sizes, keep: bool) {
        let products = self.projections() * s.gate;
        self.hold(s.x + products);
        self.free(s.x);
        self.hold(s.gate); // h
        if !keep {
            self.free(products);
        }
        self.hold(s.x); // projected
        self.free(s.gate);
        self.hold(s.x); // y
        self.free(s.x + if keep { 0 } else { s.x });
    }

    fn head(&mut self) {
        let z = self.sizes(true).x;
        self.hold(z); // dz
        self.momentary(self.loss(true));
        self.free(z);
    }

    /// Starts with dz of the decoder alive; ends with nothing but what no backward frees.
    fn backward(&mut self, reach: Reach) {
        let encoded = self.sizes(false).x;
        for decoder in [true, false] {
            let sizes = self.sizes(decoder);
            let (enters_norm, blocks) = match decoder {
                true => (reach.decoder.enters_norm(), self.config.num_decoder_layers),
                false => (reach.encoder.enters_norm(), self.config.num_layers),
            };
            if !enters_norm {
                break;
            }
            self.momentary(sizes.x); // the mask's copy, then the norm again
            self.free(sizes.x);
            if decoder && reach.encoder.enters_norm() {
                self.hold(encoded); // the gradient of the encoder's output
            }
            for block in (0..blocks).rev() {
                self.block_backward(&sizes, decoder, self.keep(reach, decoder, block));
            }
            self.momentary(self.dropout_copy(sizes.x)); // the embedding's gradient
            self.free(sizes.x);
            if decoder {
                self.free(encoded);
            }
        }
    }

    /// dy is alive before, dx after; what the block kept is gone.
    fn block_backward(&mut self, s: &Sizes, decoder: bool, keep: Keep) {
        match keep {
            Keep::Nothing => return,
            Keep::Everything => {}
            Keep::Input | Keep::Heads => {
                // Forward again, without the feed-forward's output.
                let given = if keep == Keep::Heads { s.q + s.lse } else { 0 };
                self.attention_again(s, s.q, given);
                if decoder {
                    self.attention_again(s, s.source_k, given);
                }
                self.hold(s.x + self.projections() * s.gate);
                self.free(s.x);
            }
        }
        self.feed_forward_backward(s);
        if decoder {
            self.attention_backward(s, s.source_k);
        }
        self.attention_backward(s, s.q);
    }

    fn feed_forward_backward(&mut self, s: &Sizes) {
        let (dprojected, products) = (self.dropout_copy(s.x), self.projections() * s.gate);
        self.hold(dprojected + s.gate); // dh; then h, dup and dgate lie where gate, up and dh were
        self.free(dprojected + s.gate); // h
        self.momentary(s.x); // n
        self.hold(s.x); // dn
        self.free(products);
        self.free(2 * s.x); // x, dy; dx lies where dn was
    }

    fn attention_backward(&mut self, s: &Sizes, k: u64) {
        let dprojected = self.dropout_copy(s.x);
        self.hold(dprojected + s.q); // dout
        self.free(dprojected);
        self.hold(s.q + 2 * k); // dq, dk, dv
        self.free(3 * s.q + 2 * k + s.lse); // q, k, v, out, lse, dout
        self.momentary(s.x); // n
        self.hold(s.x); // dn
        self.free(s.q + 2 * k);
        self.free(2 * s.x); // x, dy; dx lies where dn was
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{MicroBatch, Part, StepContext, T5};

    /// What forward really keeps, and what the walk says.
    fn kept(model: &T5, pass: &Pass, trained: &dyn Fn(Part) -> bool) -> (u64, u64) {
        let Pass { shape, recompute_blocks, activations, .. } = *pass;
        let config = model.config();
        let (source, target) = (vec![5; shape.source_tokens], vec![6; shape.target_tokens]);
        let sources = vec![source.as_slice(); shape.samples];
        let targets = vec![target.as_slice(); shape.samples];
        let samples: Vec<u32> = (0..shape.samples as u32).collect();
        let batch = MicroBatch::new(&sources, &targets, &samples, config, &Device::Cpu).unwrap();
        let parts = model.parameters().iter().map(|p| p.part).filter(|&part| trained(part));
        let reach = Reach::to(config, parts);
        let cx = StepContext {
            seed: 1,
            step: 1,
            dropout: 0.1,
            activations,
            recompute_blocks,
            loss_chunk_rows: 8,
            target_tokens: 1,
        };
        let real = model.forward(&batch, &cx, reach, &|| false).unwrap().unwrap().bytes();
        (real, training(config, pass, &Trained::new(config, &|spec| trained(spec.part)))[0].bytes)
    }

    #[test]
    fn what_forward_keeps_is_what_was_predicted() {
        let relu = Config {
            vocab_size: 40,
            d_model: 24,
            d_ff: 40,
            d_kv: 5,
            num_heads: 3,
            num_layers: 3,
            num_decoder_layers: 2,
            ..Config::default()
        };
        let mut gated = relu.clone();
        gated.set_feed_forward_proj("gated-gelu").unwrap();
        let shapes = [(1, 1, 1), (2, 7, 5), (3, 4, 9)];
        let trained: [&dyn Fn(Part) -> bool; 4] =
            [&|_| true, &|part| part.is_decoder(), &|part| matches!(part, Part::Encoder { block: 1 }), &|part| {
                matches!(part, Part::DecoderNorm)
            }];
        for (config, activations) in [(&relu, DType::F32), (&relu, DType::F64), (&gated, DType::BF16)] {
            let dtype = if activations == DType::F64 { DType::F64 } else { DType::F32 };
            let model = T5::init(config, 1, dtype, &Device::Cpu).unwrap();
            for (samples, source_tokens, target_tokens) in shapes {
                for recompute_blocks in [0, 1, 4, 9] {
                    let shape = Shape { samples, source_tokens, target_tokens };
                    let pass = Pass {
                        shape,
                        activations,
                        gradients: DType::F32,
                        recompute_blocks,
                        loss_chunk_rows: 8,
                        dropout: true,
                    };
                    for trained in trained {
                        let (real, predicted) = kept(&model, &pass, trained);
                        assert_eq!(real, predicted, "{pass:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_walk_frees_what_it_holds_and_recompute_saves() {
        let config = Config::preset("t5-small").unwrap();
        let shape = Shape { samples: 8, source_tokens: 256, target_tokens: 256 };
        let sum = |recompute_blocks| {
            let pass = Pass {
                shape,
                activations: DType::F32,
                gradients: DType::F32,
                recompute_blocks,
                loss_chunk_rows: 256,
                dropout: true,
            };
            let mut walk = Walk::new(&config, &pass);
            let reach = Trained::all(&config).reach;
            walk.forward(reach);
            walk.head();
            walk.backward(reach);
            assert_eq!(walk.live, walk.sizes(false).bias + walk.sizes(true).bias);
            training(&config, &pass, &Trained::all(&config)).iter().map(|row| row.bytes).sum::<u64>()
        };
        let totals: Vec<u64> = (0..=12).map(sum).collect();
        assert!(totals.is_sorted_by(|a, b| a > b), "{totals:?}");
        assert_eq!(Trained::all(&config).blocks(), 12);
        assert_eq!(Trained::new(&config, &|spec| spec.part.is_decoder()).blocks(), 6);
    }
}
