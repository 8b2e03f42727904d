//! What layer-major accumulation holds: the walk through its three stretches (forward, the pass that measures,
//! the pass that applies), unit by unit, for a whole optimizer batch of the longest samples.

use std::collections::HashSet;

use super::{CostRow, Pass, Shape, Sizes, Trained, Walk, WeightsOnDisk};
use crate::config::Config;
use crate::layer_major::{Stage, Unit};
use crate::levers::LayerMajor;
use crate::parameters::{ParameterSpec, Part};
use crate::reach::{Keep, Reach};

/// The peak of a layer-major step of `batch_samples` samples beside parameters and optimizer state: what blocks keep of
/// the whole batch (`boundaries`), accumulators (`gradients`), a chunk of logits and its product (`loss`), and the momentary
/// need of one micro-batch in one block (`workspace`), each as it is at the moment of the peak, and what products pack.
/// Where the weights lie in a file, what is resident of them then is a row, too (`parameters`).
///
/// `pass` is a micro-batch; the other micro-batches are as long.
pub fn layer_major(
    config: &Config,
    pass: &Pass,
    batch_samples: usize,
    layers: &LayerMajor,
    trained: &Trained,
    weights: &WeightsOnDisk,
) -> Vec<CostRow> {
    let weights = layers.weights_on_disk.then_some(weights);
    let mut walk = LayerWalk::new(config, pass, batch_samples, layers, trained);
    walk.weights_on_disk = weights;
    walk.step();
    let Live { weights: resident, boundaries, gradients, loss, workspace } = walk.peak;
    let parameters = weights.map(|weights| CostRow { name: "parameters", bytes: weights.always() + resident });
    let mut rows = Vec::from_iter(parameters);
    rows.extend([
        CostRow { name: "boundaries", bytes: boundaries },
        CostRow { name: "gradients", bytes: gradients },
        CostRow { name: "loss", bytes: loss },
        CostRow { name: "workspace", bytes: workspace },
        CostRow { name: super::PACKED, bytes: super::packed(config, pass, true) },
    ]);
    rows
}

/// Bytes that a layer-major step writes to files; the arguments are those of [`layer_major`]. Each is read once or twice.
pub fn layer_major_written(
    config: &Config,
    pass: &Pass,
    batch_samples: usize,
    layers: &LayerMajor,
    trained: &Trained,
) -> u64 {
    let walk = LayerWalk::new(config, pass, batch_samples, layers, trained);
    let boundaries = walk.boundaries_of(batch_samples, &walk.units[walk.in_memory..]);
    if !layers.gradients_on_disk {
        return boundaries;
    }
    let entering = if layers.boundaries_on_disk { walk.entering(false) + walk.entering(true) } else { 0 };
    let dropped: u64 = walk.dropped_parts().map(|part| walk.gradients_of(part)).sum();
    boundaries + entering + walk.gradients_of(walk.head()) + dropped
}

/// What is held at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Live {
    /// Of those in a file.
    weights: u64,
    boundaries: u64,
    gradients: u64,
    loss: u64,
    workspace: u64,
}

impl Live {
    fn total(&self) -> u64 {
        self.weights + self.boundaries + self.gradients + self.loss + self.workspace
    }
}

/// Shape and bytes of a gradient: one that was put aside serves another of its kind.
type Kind<'a> = (&'a [usize], u64);

struct LayerWalk<'a> {
    config: &'a Config,
    /// One micro-batch.
    micro: Pass,
    /// The whole batch, as if it were one.
    whole: Pass,
    layers: &'a LayerMajor,
    /// Where weights lie in a file.
    weights_on_disk: Option<&'a WeightsOnDisk>,
    reach: Reach,
    trained: &'a Trained,
    units: Vec<Unit>,
    /// Gradients of the units that are put aside to be used again.
    spare: Vec<Kind<'a>>,
    /// Units that do not keep their gradients, and those that backward goes through twice.
    dropped: usize,
    again: usize,
    /// Units, from the first, of which what forward keeps is not in a file.
    in_memory: usize,
    live: Live,
    peak: Live,
    /// Between forward and backward.
    boundaries: u64,
    most_gradients: u64,
}

impl<'a> LayerWalk<'a> {
    fn new(
        config: &'a Config,
        pass: &Pass,
        batch_samples: usize,
        layers: &'a LayerMajor,
        trained: &'a Trained,
    ) -> LayerWalk<'a> {
        let reach = trained.reach;
        let units = Unit::all(reach);
        let dropped = Unit::dropped(&units, layers.kept_gradient_blocks);
        let recompute_blocks = layers.recompute_blocks(pass.recompute_blocks, dropped);
        let of = |samples| Pass { shape: Shape { samples, ..pass.shape }, recompute_blocks, ..*pass };
        let (micro, whole) = (of(pass.shape.samples.min(batch_samples)), of(batch_samples));
        let (live, peak, spare) = (Live::default(), Live::default(), Vec::new());
        LayerWalk {
            config,
            micro,
            whole,
            layers,
            weights_on_disk: None,
            reach,
            trained,
            in_memory: layers.in_memory(&units),
            units,
            spare,
            dropped,
            again: layers.again(dropped),
            live,
            peak,
            boundaries: 0,
            most_gradients: 0,
        }
    }

    /// Goes through a step.
    fn step(&mut self) {
        self.forward();
        self.boundaries = self.live.boundaries;
        let units = self.units.clone();
        self.backward(&units, Stage::Measure);
        if self.again > 0 {
            self.backward(&units[..self.again], Stage::Apply);
        }
        if self.layers.gradients_on_disk {
            self.enter_embedding();
            self.read_gradients();
        }
        self.update_the_rest();
    }

    /// Where the gradient of the head's table belongs.
    fn head(&self) -> Part {
        if self.config.tie_word_embeddings { Part::Shared } else { Part::LmHead }
    }

    /// The gradient of a stack's first activations, of the whole batch, where it waits for the tables.
    fn entering(&self, decoder: bool) -> u64 {
        if self.reach.enters_embedding(decoder) { self.sizes(&self.whole, decoder).x } else { 0 }
    }

    /// Parts that do not keep their gradients.
    fn dropped_parts(&self) -> impl Iterator<Item = Part> {
        self.units[..self.dropped].iter().map(|unit| unit.part())
    }

    fn sizes(&self, pass: &Pass, decoder: bool) -> Sizes {
        Walk::new(self.config, pass).sizes(decoder)
    }

    /// Notes a moment at which this much is held beside what is alive.
    fn moment(&mut self, workspace: u64, loss: u64) {
        let now = Live { workspace: self.live.workspace + workspace, loss, ..self.live };
        if now.total() > self.peak.total() {
            self.peak = now;
        }
        self.most_gradients = self.most_gradients.max(self.live.gradients);
    }

    /// What forward keeps of units for `samples` samples.
    fn boundaries_of(&self, samples: usize, units: &[Unit]) -> u64 {
        let sizes = self.sizes_of(samples);
        units.iter().map(|&unit| self.kept_of(unit, &sizes[usize::from(unit.is_decoder())])).sum()
    }

    fn kept_of(&self, unit: Unit, sizes: &Sizes) -> u64 {
        match unit {
            Unit::Norm { .. } => sizes.x,
            Unit::Block { decoder, block } => {
                let walk = self.walk();
                walk.kept(sizes, decoder, walk.keep(self.reach, decoder, block))
            }
        }
    }

    /// A walk through a micro-batch.
    fn walk(&self) -> Walk<'_> {
        Walk { again: self.layers.kept_of_a_block(), ..Walk::new(self.config, &self.micro) }
    }

    /// The encoder's and the decoder's sizes for `samples` samples.
    fn sizes_of(&self, samples: usize) -> [Sizes; 2] {
        let pass = Pass { shape: Shape { samples, ..self.whole.shape }, ..self.whole };
        [false, true].map(|decoder| self.sizes(&pass, decoder))
    }

    /// Bytes of the gradients of the trained parameters of a part.
    fn gradients_of(&self, part: Part) -> u64 {
        self.trained.gradient_bytes_of(part, self.whole.gradients)
    }

    fn gradient_bytes(&self, spec: &ParameterSpec) -> u64 {
        spec.gradient_bytes(self.whole.gradients)
    }

    /// Block by block: the last micro-batch finds what all the others have kept.
    fn forward(&mut self) {
        let at_a_time = self.micro.shape.samples.max(1);
        let micro_batches = self.whole.shape.samples.div_ceil(at_a_time) as u64;
        let (head, mut left) = (self.head(), self.units.len());
        for decoder in [false, true] {
            let (micro, whole) = (self.sizes(&self.micro, decoder), self.sizes(&self.whole, decoder));
            self.live.boundaries += whole.bias * micro_batches + whole.x;
            self.live.weights = self.weights_of(Part::Shared);
            self.moment(self.walk().dropout_copy(micro.x), 0);
            let blocks = if decoder { self.config.num_decoder_layers } else { self.config.num_layers };
            let mut before = None;
            for block in 0..blocks {
                let keep = self.walk().keep(self.reach, decoder, block);
                let kept = |sizes: &Sizes| self.walk().kept(sizes, decoder, keep);
                left -= usize::from(keep != Keep::Nothing);
                let (of_whole, of_micro) = if left < self.in_memory { (kept(&whole), kept(&micro)) } else { (0, 0) };
                // Blocks that keep the same hold the same.
                let extra = match before {
                    Some((other, extra)) if other == keep => extra,
                    _ => self.block_forward(&micro, decoder, keep),
                };
                before = Some((keep, extra));
                self.live.weights = self.weights_of(Unit::Block { decoder, block }.part());
                self.live.boundaries += of_whole - of_micro;
                self.moment(extra, 0);
                self.live.boundaries += of_micro;
            }
            self.live.weights = 0;
            // The final norm's output takes the place of its input, unless that is kept.
            let enters_norm = if decoder { self.reach.decoder.enters_norm() } else { self.reach.encoder.enters_norm() };
            left -= usize::from(enters_norm);
            let (of_whole, of_micro) = if enters_norm && left < self.in_memory { (whole.x, micro.x) } else { (0, 0) };
            self.live.boundaries += of_whole - of_micro;
            self.moment(micro.x + self.walk().dropout_copy(micro.x), 0);
            self.live.boundaries += of_micro;
        }
        self.live.gradients = self.gradients_of(head);
        self.live.weights = self.weights_of(head);
        let (dz, loss) = (self.sizes(&self.micro, true).x, self.walk().loss(true));
        self.moment(dz, loss);
        self.live.weights = 0;
        if self.layers.gradients_on_disk {
            self.live.gradients = 0;
        }
    }

    /// The most that a block of one micro-batch holds beside its input.
    fn block_forward(&self, micro: &Sizes, decoder: bool, keep: Keep) -> u64 {
        let mut walk = self.walk();
        walk.hold(micro.x);
        walk.block_forward(micro, decoder, keep);
        walk.peak - micro.x
    }

    /// What of a part's weights is resident while it is worked on, where they lie in a file.
    fn weights_of(&self, part: Part) -> u64 {
        self.weights_on_disk.map_or(0, |weights| weights.of(part))
    }

    fn backward(&mut self, units: &[Unit], stage: Stage) {
        let again = self.again;
        let whole = [false, true].map(|decoder| self.sizes(&self.whole, decoder));
        let [encoder_x, decoder_x] = [whole[0].x, whole[1].x];
        if stage == Stage::Apply || again == 0 {
            self.live.boundaries -= decoder_x; // the gradient of the decoder's output goes down itself
        }
        let source = if units.iter().any(|unit| !unit.is_decoder()) { encoder_x } else { 0 };
        for (position, &unit) in units.iter().enumerate() {
            let decoder = unit.is_decoder();
            self.live.weights = self.weights_of(unit.part());
            self.live.workspace = if decoder { decoder_x + source } else { encoder_x };
            if position == self.dropped {
                self.release_spare();
            }
            self.add_gradients(unit, position < self.dropped);
            let sizes = self.sizes(&self.micro, decoder);
            // What was kept of this, and the first tensor of the next.
            let kept = self.kept_of(unit, &sizes);
            let from_disk = if position < self.in_memory { 0 } else { kept + sizes.x };
            let extra = match unit {
                Unit::Norm { .. } => 2 * sizes.x,
                Unit::Block { block, .. } => {
                    let mut walk = self.walk();
                    let there = sizes.x + kept;
                    walk.hold(there);
                    walk.block_backward(&sizes, decoder, walk.keep(self.reach, decoder, block));
                    walk.peak - there
                }
            };
            self.moment(extra + from_disk, 0);
            let into_embedding = self.reach.enters_embedding(decoder) && stage == Stage::Measure;
            let is_last = matches!(unit, Unit::Block { block: 0, .. });
            if into_embedding && is_last && self.layers.gradients_on_disk {
                let waits = if self.layers.boundaries_on_disk { 0 } else { self.entering(decoder) };
                self.live.boundaries += waits;
                self.moment(0, 0);
            } else if into_embedding && is_last && !self.has_embedding(decoder) {
                self.live.gradients += self.gradients_of(Part::Shared);
                self.moment(sizes.x, 0);
            }
            if (stage == Stage::Apply || position >= again) && position < self.in_memory {
                self.live.boundaries -= self.kept_of(unit, &whole[usize::from(decoder)]);
            }
        }
        self.live.weights = 0;
        self.release_spare();
    }

    /// The tables come back, and what waited for them enters.
    fn enter_embedding(&mut self) {
        let enters = self.reach.enters_embedding(false) || self.reach.enters_embedding(true);
        let head = self.head();
        self.live.gradients += self.gradients_of(head);
        if enters && head != Part::Shared {
            self.live.gradients += self.gradients_of(Part::Shared);
        }
        // What enters, the next, and either without its dropout.
        let most = [false, true].map(|decoder| self.sizes(&self.micro, decoder).x);
        self.moment(3 * most[0].max(most[1]), 0);
        if !self.layers.boundaries_on_disk {
            self.live.boundaries -= self.entering(false) + self.entering(true);
        }
    }

    /// One gradient that waited after the other, and the next being read.
    fn read_gradients(&mut self) {
        let waiting = self.dropped_parts().flat_map(|part| self.trained.of(part));
        let largest = waiting.map(|spec| self.gradient_bytes(spec)).max().unwrap_or(0);
        self.live.workspace = largest;
        self.live.gradients += largest;
        self.live.weights = self.weights_on_disk.map_or(0, |weights| weights.largest_of(self.dropped_parts()));
        self.moment(0, 0);
        self.live.gradients -= largest;
    }

    /// The gradients that are left, one after the other.
    fn update_the_rest(&mut self) {
        let Some(weights) = self.weights_on_disk else { return };
        self.live.workspace = 0;
        let changed: HashSet<Part> =
            if self.layers.gradients_on_disk { self.dropped_parts().collect() } else { HashSet::new() };
        self.live.weights = weights.largest_of(weights.parts().filter(|part| !changed.contains(part)));
        self.moment(0, 0);
        self.live.weights = 0;
    }

    /// Whether the embedding's gradient was begun before this stack's.
    fn has_embedding(&self, decoder: bool) -> bool {
        self.config.tie_word_embeddings || (!decoder && self.reach.enters_embedding(true))
    }

    fn add_gradients(&mut self, unit: Unit, is_put_aside: bool) {
        if !is_put_aside {
            self.live.gradients += self.gradients_of(unit.part());
            return;
        }
        let trained = self.trained;
        let mut left = self.spare.clone();
        for spec in trained.of(unit.part()) {
            let kind = (spec.shape.as_slice(), self.gradient_bytes(spec));
            if let Some(place) = left.iter().position(|spare| *spare == kind) {
                left.swap_remove(place);
            } else {
                self.live.gradients += kind.1;
                self.spare.push(kind);
            }
        }
    }

    fn release_spare(&mut self) {
        self.live.gradients -= self.spare.drain(..).map(|(_, bytes)| bytes).sum::<u64>();
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::{Error, Files, Gradients, MicroBatch, StepContext, T5};

    /// What is held between forward and backward, and the most that accumulators hold: really, and as predicted.
    fn check(model: &T5, pass: &Pass, batch_samples: usize, layers: &LayerMajor, trained: &dyn Fn(Part) -> bool) {
        let (config, Shape { samples, source_tokens, target_tokens }) = (model.config(), pass.shape);
        let (source, target) = (vec![5; source_tokens], vec![6; target_tokens]);
        let all: Vec<u32> = (0..batch_samples as u32).collect();
        let gather = |samples: &[u32]| {
            let sources = vec![source.as_slice(); samples.len()];
            let targets = vec![target.as_slice(); samples.len()];
            MicroBatch::new(&sources, &targets, samples, config, &Device::Cpu).unwrap()
        };
        let batches = all.chunks(samples).map(gather).collect();
        let cx = StepContext {
            seed: 1,
            step: 1,
            dropout: 0.1,
            activations: pass.activations,
            recompute_blocks: pass.recompute_blocks,
            loss_chunk_rows: 8,
            target_tokens: 1,
        };
        let directory = tempfile::tempdir().unwrap();
        let mut grads = Gradients::new(model, pass.gradients, &|parameter| trained(parameter.part));
        let mut layer_pass = model
            .layer_major_forward(batches, &cx, layers, &Files::in_directory(directory.path()), &mut grads, &|| false)
            .unwrap()
            .unwrap();
        let all = Trained::new(config, &|spec| trained(spec.part));
        let mut walk = LayerWalk::new(config, pass, batch_samples, layers, &all);
        walk.step();
        assert_eq!(layer_pass.bytes(), walk.boundaries, "{layers:?} {pass:?}");
        let mut most = 0;
        for stage in [Stage::Measure, Stage::Apply] {
            let mut see = |_: usize, grads: &Gradients| -> Result<(), Error> {
                most = most.max(grads.bytes());
                Ok(())
            };
            model.layer_major_backward(&mut layer_pass, stage, &mut grads, &|| false, &mut see).unwrap();
        }
        assert_eq!(most, walk.most_gradients, "{layers:?} {pass:?}");
        let written = layer_major_written(config, pass, batch_samples, layers, &all);
        assert_eq!(layer_pass.written_bytes(), written, "{layers:?} {pass:?}");
        assert_eq!(grads.bytes(), 0);
        // What goes down is gone in the end, and no count ever fell below zero on its way.
        let biases = walk.sizes_of(1).map(|sizes| sizes.bias).iter().sum::<u64>();
        let encoded = walk.sizes(&walk.whole, false).x;
        assert_eq!(
            walk.live.boundaries,
            biases * batch_samples.div_ceil(samples) as u64 + encoded,
            "{layers:?} {pass:?}"
        );
        let weights = WeightsOnDisk::new(config, DType::F32);
        let rows = layer_major(config, pass, batch_samples, layers, &all, &weights);
        let of_walk = rows.iter().filter(|row| row.name != crate::costs::PACKED);
        assert_eq!(of_walk.map(|row| row.bytes).sum::<u64>(), walk.peak.total());
    }

    #[test]
    fn what_is_kept_is_what_was_predicted() {
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
        let mut gated = Config { tie_word_embeddings: false, ..relu.clone() };
        gated.set_feed_forward_proj("gated-gelu").unwrap();
        let trained: [&dyn Fn(Part) -> bool; 5] = [
            &|_| true,
            &|part| part.is_decoder(),
            &|part| matches!(part, Part::Encoder { block: 1 }),
            &|part| matches!(part, Part::DecoderNorm),
            &|part| matches!(part, Part::Shared),
        ];
        for (config, activations, gradients) in [
            (&relu, DType::F32, DType::F32),
            (&relu, DType::F64, DType::F64),
            (&gated, DType::BF16, DType::F32),
            (&gated, DType::BF16, DType::BF16),
        ] {
            let dtype = if activations == DType::F64 { DType::F64 } else { DType::F32 };
            let model = T5::init(config, 1, dtype, &Device::Cpu).unwrap();
            for (samples, batch_samples, source_tokens) in [(1, 1, 7), (2, 5, 2), (3, 3, 7)] {
                let shape = Shape { samples, source_tokens, target_tokens: 5 };
                let all_again =
                    Pass { shape, activations, gradients, recompute_blocks: 9, loss_chunk_rows: 8, dropout: true };
                for kept_gradient_blocks in [0, 1, 3, 9] {
                    for kinds in 0..8 {
                        let [heads_kept, boundaries_on_disk, gradients_on_disk] =
                            [1, 2, 4].map(|kind| kinds & kind != 0);
                        let in_memory: &[usize] = if boundaries_on_disk { &[0, 2] } else { &[0] };
                        // Where backward goes through any block twice the number does not count.
                        let goes_once = gradients_on_disk || kept_gradient_blocks > 4;
                        let recomputed: &[usize] = if goes_once { &[0, 2, 9] } else { &[0] };
                        for (&recompute_blocks, &blocks_in_memory) in
                            recomputed.iter().flat_map(|again| in_memory.iter().map(move |blocks| (again, blocks)))
                        {
                            let pass = Pass { recompute_blocks, ..all_again };
                            let layers = LayerMajor {
                                kept_gradient_blocks,
                                heads_kept,
                                boundaries_on_disk,
                                blocks_in_memory,
                                gradients_on_disk,
                                weights_on_disk: false,
                            };
                            for trained in trained {
                                check(&model, &pass, batch_samples, &layers, trained);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_levers_save_and_the_peak_is_far_below_that_of_whole_gradients() {
        let config = Config::preset("chatlm-0.2b").unwrap();
        let trained = Trained::all(&config);
        let shape = Shape { samples: 1, source_tokens: 256, target_tokens: 256 };
        let pass = Pass {
            shape,
            activations: DType::BF16,
            gradients: DType::F32,
            recompute_blocks: 99,
            loss_chunk_rows: 64,
            dropout: true,
        };
        let weights = WeightsOnDisk::new(&config, DType::F32);
        let bytes = |kept_gradient_blocks, boundaries_on_disk| {
            let layers = LayerMajor { kept_gradient_blocks, boundaries_on_disk, ..LayerMajor::default() };
            layer_major(&config, &pass, 16, &layers, &trained, &weights).iter().map(|row| row.bytes).sum::<u64>()
        };
        // The last block spares the second pass, and with it a copy of what goes down.
        let by_kept: Vec<u64> = (0..20).map(|kept| bytes(kept, false)).collect();
        assert!(by_kept.is_sorted(), "{by_kept:?}");
        assert!(bytes(0, true) + (100 << 20) < bytes(0, false));
        let whole = super::super::training(&config, &pass, &trained).iter().map(|row| row.bytes).sum::<u64>()
            + trained.gradient_bytes(DType::F32);
        assert!(bytes(0, false) * 5 < whole * 3, "{} of {whole}", bytes(0, false));
    }
}
