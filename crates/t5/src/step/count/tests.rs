//! A tally compared with the whole step: on counted tensors, and on real ones.

use candle_core::{DType, Tensor};

use super::rehearsal::batch;
use super::*;
use crate::gradients::Gradients;
use crate::ops::{Files, Ledger, Ops};
use crate::parameters::{PagingGranularity, Parameter, Part, Weight};
use crate::step::observer::{Interrupts, Observer, OwnShards};
use crate::step::run::{Offload, Step};
use crate::test_device::device;
use crate::{Error, Family, Lora, StepContext, T5, Targets};

type Trains<'a> = &'a dyn Fn(Part) -> bool;

fn relu() -> Config {
    Config {
        vocab_size: 40,
        d_model: 24,
        d_ff: 40,
        d_kv: 5,
        num_heads: 3,
        num_layers: 3,
        num_decoder_layers: 2,
        relative_attention_num_buckets: 8,
        relative_attention_max_distance: 16,
        ..Config::default()
    }
}

fn gated_untied() -> Config {
    let mut config = Config { tie_word_embeddings: false, ..relu() };
    config.set_feed_forward_proj("gated-gelu").unwrap();
    config
}

/// Ways through a step, each with a number of blocks that are recomputed.
fn ways() -> Vec<(usize, Option<LayerMajor>)> {
    let layers = [
        LayerMajor::PLAIN,
        LayerMajor { kept_gradient_blocks: 2, ..LayerMajor::PLAIN },
        LayerMajor { kept_gradient_blocks: 99, ..LayerMajor::PLAIN },
        LayerMajor { heads_kept: true, kept_gradient_blocks: 1, ..LayerMajor::PLAIN },
        LayerMajor { gradients_on_disk: true, ..LayerMajor::PLAIN },
        LayerMajor { boundaries_on_disk: true, ..LayerMajor::PLAIN },
        LayerMajor { boundaries_on_disk: true, gradients_on_disk: true, heads_kept: true, ..LayerMajor::PLAIN },
        LayerMajor { boundaries_on_disk: true, gradients_on_disk: true, blocks_in_memory: 2, ..LayerMajor::PLAIN },
    ];
    let plain = [0, 1, 4, 9].map(|recompute_blocks| (recompute_blocks, None));
    // Copies that overlap with computation have memory of their own.
    let beside = layers.iter().filter(|layers| layers.boundaries_on_disk || layers.gradients_on_disk);
    let beside: Vec<LayerMajor> = beside.map(|layers| LayerMajor { copies_overlap: true, ..*layers }).collect();
    let by_layer = layers.iter().chain(&beside).flat_map(|layers| [0, 2, 99].map(|blocks| (blocks, Some(*layers))));
    plain.into_iter().chain(by_layer).collect()
}

/// The same ways for one of several processes, where weights that are being fetched may have memory of their own.
fn ways_among() -> Vec<(usize, Option<LayerMajor>)> {
    let overlaps = |(blocks, layers): (usize, Option<LayerMajor>)| {
        (blocks, layers.map(|layers| LayerMajor { overlaps: true, ..layers }))
    };
    ways().into_iter().flat_map(|way| [way, overlaps(way)]).collect()
}

const TRAINED: [Trains; 5] = [
    &|_| true,
    &|part| part.is_decoder(),
    &|part| !matches!(part, Part::Shared | Part::Encoder { .. } | Part::EncoderNorm),
    &|part| matches!(part, Part::Encoder { block: 1 }),
    &|part| matches!(part, Part::DecoderNorm),
];

/// Changes parameters as [`T5::change`] does; those in a file by way of a copy. Other processes hold the gradients of some.
struct Changes<'a>(&'a [Parameter<Counted>], Held<'a>, OwnShards);

/// Whether this process holds the gradient of a parameter of this name.
type Held<'a> = &'a dyn Fn(&str) -> bool;

impl Observer<Counted, Error> for Changes<'_> {
    fn shards(&self) -> OwnShards {
        self.2.clone()
    }

    fn holds(&self, index: usize) -> bool {
        self.1(&self.0[index].name)
    }

    fn receive(&mut self, index: usize) -> Result<()> {
        assert!(!self.holds(index));
        Ok(())
    }

    fn apply(&mut self, index: usize, _: &Counted) -> Result<()> {
        assert!(self.holds(index));
        let tensor = &self.0[index].tensor;
        if tensor.is_in_file() {
            tensor.page_out();
            drop(tensor.copied()?);
        }
        Ok(())
    }
}

/// The whole step on counted tensors: the peak without operands that threads keep, and bytes written.
fn rehearse(
    config: &Config,
    precisions: Precisions,
    dropout: f64,
    trains: Trains,
    shape: Shape,
    levers: &Levers,
) -> (u64, u64) {
    let Rehearsed { peak, written, .. } =
        rehearse_among(config, precisions, dropout, (trains, &|_| true, 1), shape, levers);
    (peak, written)
}

struct Rehearsed {
    peak: u64,
    written: u64,
    /// Bytes of weights that were asked for, where they lie in a file.
    paged_in: u64,
}

/// The whole step by one of several processes, with `shards` shards of equally many micro-batches.
fn rehearse_among(
    config: &Config,
    precisions: Precisions,
    dropout: f64,
    (trains, held, shards): (Trains, Held, usize),
    shape: Shape,
    levers: &Levers,
) -> Rehearsed {
    let ledger = Ledger::default();
    let parameters: Vec<Parameter<Counted>> = ParameterSpec::all(config)
        .into_iter()
        .map(|spec| {
            let dtype = spec.dtype(precisions.parameters);
            let is_kept = LayerMajor::keeps_weights(levers.weight_blocks_in_memory(), spec.part, config);
            let may_lie_there = spec.may_be_offloaded(precisions.parameters);
            let is_in_file = levers.has_weights_on_disk() && may_lie_there && !is_kept;
            let tensor = match is_in_file {
                true => ledger.in_file(&spec.tensor_shape(), dtype),
                false => ledger.beside(&spec.tensor_shape(), dtype),
            };
            Parameter { tensor, name: spec.name, part: spec.part, quantisation: spec.quantisation }
        })
        .collect();
    let network = crate::network::Network::new(
        config,
        &parameters,
        &[],
        levers.layer_major.is_some_and(|layers| layers.weights_by_matrix),
    )
    .unwrap();
    // In a model with an adapter whose base stays in its files, only the adapter trains.
    let base = config.lora.as_ref().filter(|_| levers.has_weights_on_disk());
    let is_trained = |name: &str, part| trains(part) && base.is_none_or(|lora| lora.trains(name));
    let mut grads =
        Gradients::new(&parameters, precisions.gradients, &|parameter| is_trained(&parameter.name, parameter.part));
    if levers.layer_major.is_none() {
        // Micro-batch-major, the accumulators exist from the step before.
        for (index, parameter) in parameters.iter().enumerate() {
            grads
                .accumulator(&Weight {
                    index,
                    tensor: parameter.tensor.clone(),
                    copy: None,
                    quantisation: None,
                    paging: PagingGranularity::Together,
                })
                .unwrap();
        }
    }
    let micro = levers.micro_batch_samples;
    let sizes = (0..shape.samples.div_ceil(micro)).map(|m| micro.min(shape.samples - m * micro));
    let batches: Vec<_> = sizes.map(|samples| batch(&ledger, Shape { samples, ..shape })).collect();
    let cx = StepContext {
        seed: 0,
        step: 0,
        dropout,
        adapter_dropout: config.lora.as_ref().map_or(0.0, |lora| lora.dropout),
        activations: precisions.activations,
        recompute_blocks: levers.recompute_blocks,
        loss_chunk_rows: levers.loss_chunk_rows,
        target_tokens: 1,
        token_loss: TokenLoss::default(),
    };
    let counter = Counter::new(config, precisions, dropout, &|spec| is_trained(&spec.name, spec.part)).unwrap();
    let counter = counter.with_others();
    let outline = counter.outline(levers.recompute_blocks, levers.layer_major.as_ref());
    let files = Files::in_directory(std::path::Path::new("."));
    let offload = levers.layer_major.map(|layers| Offload {
        files: &files,
        activations: layers.boundaries_on_disk,
        gradients: layers.gradients_on_disk,
        copies_overlap: layers.copies_overlap,
    });
    let each = batches.len() / shards;
    let shards: OwnShards = match shards {
        1 => Vec::new(),
        shards => (0..shards).map(|shard| (shard, shard * each..(shard + 1) * each)).collect(),
    };
    let events = outline.training_of_shards(batches.len(), &shards, 0);
    let mut step = Step::new(&network, &parameters, &cx, &batches, offload).unwrap();
    ledger.begin();
    let live = ledger.live();
    assert!(step.run(&events, &mut grads, &mut Changes(&parameters, held, shards)).unwrap());
    Rehearsed { peak: ledger.peak() - live, written: step.written_bytes(), paged_in: ledger.paged_in() }
}

#[test]
fn a_tally_is_a_close_upper_bound_of_the_whole_step_on_counted_tensors() {
    let shapes = [(1, 6, 4), (3, 7, 5), (4, 3, 9), (5, 8, 8)];
    let tables_everywhere = Config { family: Family::Umt5, ..gated_untied() };
    let adapters = [(0.0, false), (0.1, true)].map(|(dropout, dora)| {
        let targets = Targets::Names(["q", "v", "wo"].map(str::to_owned).into());
        Config { lora: Some(Lora { rank: 3, dropout, dora, targets, ..Lora::default() }), ..relu() }
    });
    for config in [relu(), gated_untied(), tables_everywhere].into_iter().chain(adapters) {
        for (activations, dropout) in [(DType::F32, 0.1), (DType::BF16, 0.1), (DType::F32, 0.0)] {
            let precisions = Precisions { parameters: DType::F32, activations, gradients: DType::F32 };
            for trains in TRAINED {
                let counter = Counter::new(&config, precisions, dropout, &|spec| trains(spec.part)).unwrap();
                for (samples, source_tokens, target_tokens) in shapes {
                    let shape = Shape { samples, source_tokens, target_tokens };
                    for micro in [1, 2, samples] {
                        for (recompute_blocks, layer_major) in ways() {
                            let micro_batch_samples = micro.min(samples);
                            let levers = Levers {
                                micro_batch_samples,
                                recompute_blocks,
                                loss_chunk_rows: 8,
                                layer_major,
                                ..Levers::default()
                            };
                            let (peak, written) = rehearse(&config, precisions, dropout, trains, shape, &levers);
                            let count = counter.step(shape, &levers);
                            let counted = count.total() - count.packed;
                            let what = format!("{levers:?} {shape:?} {precisions:?} {count:?}");
                            assert_eq!(counter.written(shape, &levers), written, "{what}");
                            assert!(peak <= counted, "{peak} rehearsed, {counted} counted: {what}");
                            // A unit's accumulators are counted as if all existed from its beginning.
                            let slack = 0.12 * counted as f64;
                            assert!((counted - peak) as f64 <= slack, "{peak} rehearsed, {counted} counted: {what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn gradients_that_other_processes_hold_are_counted_until_they_are_summed() {
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    let shape = Shape { samples: 3, source_tokens: 7, target_tokens: 5 };
    let halves: [Held; 2] =
        [&|name| name.ends_with("wi.weight") || name.contains(".q"), &|name| name == "shared.weight"];
    for config in [relu(), gated_untied()] {
        for (trains, held) in TRAINED.into_iter().flat_map(|trains| halves.map(|held| (trains, held))) {
            let all = Counter::new(&config, precisions, 0.1, &|spec| trains(spec.part)).unwrap();
            let some = Counter::new(&config, precisions, 0.1, &|spec| trains(spec.part)).unwrap();
            let some = some.among(&|spec| held(&spec.name)).with_others();
            for (recompute_blocks, layer_major) in ways_among().into_iter().filter(|(_, layers)| layers.is_some()) {
                let levers = Levers {
                    micro_batch_samples: 2,
                    recompute_blocks,
                    loss_chunk_rows: 8,
                    layer_major,
                    ..Levers::default()
                };
                let Rehearsed { peak, written, .. } =
                    rehearse_among(&config, precisions, 0.1, (trains, held, 1), shape, &levers);
                let count = some.step(shape, &levers);
                let counted = count.total() - count.packed;
                assert_eq!(some.written(shape, &levers), written, "{levers:?}");
                assert!(peak <= counted, "{peak} rehearsed, {counted} counted: {levers:?} {count:?}");
                let slack = 0.15 * counted as f64;
                assert!((counted - peak) as f64 <= slack, "{peak} rehearsed, {counted} counted: {levers:?} {count:?}");
                assert!(count.gradients <= all.step(shape, &levers).gradients, "{levers:?}");
            }
        }
    }
}

#[test]
fn the_sums_of_several_shards_are_counted_layer_by_layer() {
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    let shape = Shape { samples: 8, source_tokens: 6, target_tokens: 5 };
    for config in [relu(), gated_untied()] {
        // While the fourth of 4 shards is computed, three sums exist, because the first two shards were added up.
        for (shards, sums) in [(2, 2), (4, 3)] {
            let counter = Counter::new(&config, precisions, 0.1, &|_| true).unwrap().with_sums(sums).with_others();
            for (recompute_blocks, layer_major) in ways_among() {
                let Some(layers) = layer_major.filter(|layers| !layers.gradients_on_disk) else { continue };
                let layer_major = Some(layers);
                let levers = Levers {
                    micro_batch_samples: 1,
                    recompute_blocks,
                    loss_chunk_rows: 8,
                    layer_major,
                    ..Levers::default()
                };
                let held: Held = &|_| true;
                let Rehearsed { peak, .. } =
                    rehearse_among(&config, precisions, 0.1, (TRAINED[0], held, shards), shape, &levers);
                let count = counter.step(shape, &levers);
                let counted = count.total() - count.packed;
                assert!(peak <= counted, "{peak} rehearsed, {counted} counted: {levers:?} {count:?}");
                let slack = 0.2 * counted as f64;
                assert!((counted - peak) as f64 <= slack, "{peak} rehearsed, {counted} counted: {levers:?} {count:?}");
            }
        }
    }
}

#[test]
fn weights_in_a_file_are_counted_while_they_are_worked_on() {
    let mut config = Config::preset("t5-small").unwrap();
    (config.num_layers, config.num_decoder_layers) = (3, 2);
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    let counter = Counter::new(&config, precisions, 0.1, &|_| true).unwrap();
    for layers in [
        LayerMajor { gradients_on_disk: true, weights_on_disk: true, ..LayerMajor::PLAIN },
        LayerMajor { kept_gradient_blocks: 99, weights_on_disk: true, ..LayerMajor::PLAIN },
        LayerMajor { gradients_on_disk: true, boundaries_on_disk: true, weights_on_disk: true, ..LayerMajor::PLAIN },
    ] {
        let shape = Shape { samples: 4, source_tokens: 64, target_tokens: 64 };
        let levers = Levers {
            micro_batch_samples: 2,
            recompute_blocks: 9,
            loss_chunk_rows: 64,
            layer_major: Some(layers),
            ..Levers::default()
        };
        let (peak, _) = rehearse(&config, precisions, 0.1, &|_| true, shape, &levers);
        let count = counter.step(shape, &levers);
        let counted = count.total() - count.packed - counter.weights_on_disk(&levers).always();
        assert!(peak <= counted, "{peak} rehearsed, {counted} counted: {layers:?} {count:?}");
        assert!((counted - peak) as f64 <= 0.12 * counted as f64, "{peak} rehearsed, {counted} counted: {count:?}");
    }
}

#[test]
fn weights_of_a_base_are_counted_where_they_are_and_as_often_as_they_are_read() {
    for tied in [true, false] {
        let config = with_adapter(tied, Lora::default());
        let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
        let counter = Counter::new(&config, precisions, 0.1, &|spec| spec.is_of_adapter()).unwrap();
        let shape = Shape { samples: 4, source_tokens: 64, target_tokens: 64 };
        let (mut before, of_all) =
            (u64::MAX, counter.weights_on_disk(&Levers::default()).part(Part::Decoder { block: 0 }));
        for weight_blocks_in_memory in [0, 1, 2, 4, 5] {
            // Weights are read twice, or three times where gradients are computed again.
            for (kept_gradient_blocks, gradients_on_disk) in [(0, true), (99, false), (0, false), (3, false)] {
                let layers = LayerMajor { kept_gradient_blocks, gradients_on_disk, ..LayerMajor::PLAIN };
                let layer_major = Some(LayerMajor { weights_on_disk: true, weight_blocks_in_memory, ..layers });
                let levers = Levers {
                    micro_batch_samples: 2,
                    recompute_blocks: 9,
                    loss_chunk_rows: 64,
                    layer_major,
                    ..Levers::default()
                };
                let of_step: (Trains, Held, usize) = (&|_| true, &|_| true, 1);
                let Rehearsed { peak, paged_in, .. } =
                    rehearse_among(&config, precisions, 0.1, of_step, shape, &levers);
                let expected = WeightsRead { frozen: paged_in, ..WeightsRead::default() };
                assert_eq!(counter.weights_read(shape, &levers), expected, "{levers:?}");
                let count = counter.step(shape, &levers);
                let counted = count.total() - count.packed - counter.weights_on_disk(&levers).always();
                assert!(counted.abs_diff(peak) as f64 <= 0.12 * peak as f64, "{peak}, {counted} counted: {levers:?}");
                if gradients_on_disk {
                    assert!(paged_in < before, "{levers:?}");
                    before = paged_in;
                }
            }
        }
        // The head's table alone.
        let table = 32_128 * 512 * 4;
        assert!(before >= table && before < table + of_all, "{before}");
    }
}

/// Three and two blocks as wide as t5-small's, with an adapter.
fn with_adapter(tied: bool, lora: Lora) -> Config {
    let small = Config::preset("t5-small").unwrap();
    let (num_layers, num_decoder_layers) = (3, 2);
    Config { tie_word_embeddings: tied, lora: Some(lora), num_layers, num_decoder_layers, ..small }
}

#[test]
fn weights_of_a_base_that_come_one_by_one_are_read_for_each_micro_batch_and_hold_a_matrix() {
    for (dora, dropout) in [(false, 0.0), (false, 0.1), (true, 0.0), (true, 0.1)] {
        let config = with_adapter(true, Lora { dora, dropout, ..Lora::default() });
        let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
        let counter = Counter::new(&config, precisions, 0.1, &|spec| spec.is_of_adapter()).unwrap();
        let shape = Shape { samples: 4, source_tokens: 64, target_tokens: 64 };
        for (kept_gradient_blocks, gradients_on_disk) in [(0, true), (99, false), (0, false), (3, false)] {
            for (micro_batch_samples, weight_blocks_in_memory) in [(1, 0), (2, 0), (4, 0), (2, 2)] {
                let layers = LayerMajor { kept_gradient_blocks, gradients_on_disk, ..LayerMajor::PLAIN };
                let layers = LayerMajor { weights_on_disk: true, weight_blocks_in_memory, ..layers };
                let [block, matrix] = [false, true].map(|weights_by_matrix| {
                    let layer_major = Some(LayerMajor { weights_by_matrix, ..layers });
                    let levers = Levers { micro_batch_samples, loss_chunk_rows: 64, layer_major, ..Levers::default() };
                    Levers { recompute_blocks: 9, ..levers }
                });
                let of_step: (Trains, Held, usize) = (&|_| true, &|_| true, 1);
                let Rehearsed { peak, paged_in, .. } =
                    rehearse_among(&config, precisions, 0.1, of_step, shape, &matrix);
                let read = counter.weights_read(shape, &matrix);
                // The table is read by rows too, so nothing is read independently of micro-batches.
                assert_eq!((read.trained, read.frozen), (0, 0));
                assert_eq!(read.in_micro_batches(4 / micro_batch_samples), paged_in, "{matrix:?}");
                let count = counter.step(shape, &matrix);
                let counted = count.total() - count.packed - counter.weights_on_disk(&matrix).always();
                assert!(peak <= counted, "{peak} rehearsed, {counted} counted: {matrix:?}");
                assert!((counted - peak) as f64 <= 0.12 * peak as f64, "{peak}, {counted} counted: {matrix:?}");
                let (of_matrix, of_block) = [&matrix, &block]
                    .map(|levers| counter.weights_on_disk(levers).at_once(Part::Decoder { block: 0 }))
                    .into();
                let expected = if weight_blocks_in_memory == 0 { (4 << 20, 16 << 20) } else { (0, 0) };
                assert_eq!((of_matrix, of_block), expected);
            }
        }
    }
}

#[test]
fn fewer_saved_activations_hold_less_and_every_lever_saves() {
    let config = Config::preset("t5-small").unwrap();
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    let counter = Counter::new(&config, precisions, 0.1, &|_| true).unwrap();
    let shape = Shape { samples: 8, source_tokens: 256, target_tokens: 256 };
    let levers = |recompute_blocks, layer_major| Levers {
        micro_batch_samples: 8,
        recompute_blocks,
        loss_chunk_rows: 256,
        layer_major,
        ..Levers::default()
    };
    let totals: Vec<u64> = (0..=12).map(|blocks| counter.step(shape, &levers(blocks, None)).total()).collect();
    assert!(totals.is_sorted_by(|a, b| a > b), "{totals:?}");
    assert_eq!(counter.blocks(), 12);
    let decoder = Counter::new(&config, precisions, 0.1, &|spec| spec.part.is_decoder()).unwrap();
    assert_eq!(decoder.blocks(), 6);
    let by_layer = |layers: LayerMajor| counter.step(shape, &levers(99, Some(layers))).total();
    // Where every block keeps its gradient, there is no second pass and nothing is held for it.
    let by_kept: Vec<u64> = (0..12)
        .map(|kept_gradient_blocks| by_layer(LayerMajor { kept_gradient_blocks, ..LayerMajor::PLAIN }))
        .collect();
    assert!(by_kept.is_sorted(), "{by_kept:?}");
    assert!(by_layer(LayerMajor { boundaries_on_disk: true, ..LayerMajor::PLAIN }) < by_kept[0]);
}

#[test]
fn a_pass_takes_about_three_multiply_adds_a_token_for_each_weight_it_goes_through() {
    let config = Config::preset("t5-small").unwrap();
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    let shape = Shape { samples: 2, source_tokens: 16, target_tokens: 16 };
    let all = Counter::new(&config, precisions, 0.1, &|_| true).unwrap().arithmetic(shape);
    let weights = ParameterSpec::elements_of_all(&config);
    // The table is a weight of the decoder's tokens only; half of cross-attention's weights are used for the source's tokens.
    let encoder = 6.0 * (4.0 * 512.0 * 512.0 + 2.0 * 512.0 * 2048.0);
    let decoder = weights as f64 - encoder;
    let expected = 3.0 * 32.0 * (encoder + decoder);
    assert!((all.training / expected - 1.0).abs() < 0.02, "{} and {expected}", all.training);
    assert!(all.blocks[0].again < all.blocks[11].again, "a block of the decoder has cross-attention as well");
    let decoder = Counter::new(&config, precisions, 0.1, &|spec| spec.part.is_decoder()).unwrap().arithmetic(shape);
    let of = |blocks: &[BlockArithmetic]| blocks.iter().map(|block| block.backward).sum::<f64>();
    assert!((all.training - of(&all.blocks) + of(&decoder.blocks) - decoder.training).abs() < 1.0);
    // A frozen encoder needs no gradient of the source. The first block's trained norm still needs its products' input gradient.
    let to_source = of(&all.blocks[6..]) - of(&decoder.blocks);
    assert!((to_source - 6.0 * 2.0 * 32.0 * 512.0 * 512.0).abs() < 1.0, "{to_source}");
}

#[test]
fn the_narrow_product_of_an_adapter_is_not_computed_again_for_backward() {
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    let shape = Shape { samples: 2, source_tokens: 16, target_tokens: 16 };
    let training = |rank| {
        let config = with_adapter(true, Lora { rank, ..Lora::default() });
        let counter = Counter::new(&config, precisions, 0.1, &|spec| spec.is_of_adapter()).unwrap();
        counter.arithmetic(shape).training
    };
    // Widths of inputs and outputs of a block's layers. Three products go with each: forward, for the input, for the weight.
    let (encoder, decoder) = (4.0 * 1024.0 + 2.0 * 2560.0, 8.0 * 1024.0 + 2.0 * 2560.0);
    // The first blocks need no product for their input.
    let of_a_token = 3.0 * (3.0 * encoder + 2.0 * decoder) - 2.0 * 3.0 * 512.0;
    let more = training(24) - training(16);
    assert!((more - 8.0 * 32.0 * of_a_token).abs() < 1.0, "{more} and {of_a_token}");
}

#[test]
fn below_the_lowest_adapter_backward_computes_nothing() {
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    let shape = Shape { samples: 2, source_tokens: 16, target_tokens: 16 };
    let backward = |names: &[&str]| -> Vec<f64> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let targets = if names.is_empty() { Targets::AllLinear } else { Targets::Names(names) };
        let config = with_adapter(false, Lora { targets, ..Lora::default() });
        let counter = Counter::new(&config, precisions, 0.1, &|spec| spec.is_of_adapter()).unwrap();
        counter.arithmetic(shape).blocks.iter().map(|block| block.backward).collect()
    };
    // The first block needs no gradient of its input. Each of q, k and v computes that gradient by its weight and by A.
    let all = backward(&[]);
    let input = 32.0 * 512.0 * (512.0 + 16.0);
    for first in [0, 3] {
        assert!((all[first + 1] - all[first] - 3.0 * input).abs() < 1.0, "{all:?}");
    }
    // Backward computes nothing in the encoder, and no self-attention below the lowest adapter.
    let of_decoder = backward(&["EncDecAttention.q"]);
    assert_eq!(of_decoder.len(), 2);
    assert!(of_decoder[1] - of_decoder[0] > 4.0 * 32.0 * 512.0 * 512.0, "{of_decoder:?}");
    // Below an adapter of the output projection alone, backward computes no gradients of scores or of the products before them.
    let [output, query] = ["SelfAttention.o", "SelfAttention.q"].map(|name| backward(&[name]));
    assert!(query[0] - output[0] > 32.0 * 512.0 * 512.0, "{output:?} {query:?}");
}

/// Compares the saved activations of a real forward pass with the counted ones.
#[test]
fn real_activations_take_the_bytes_that_were_counted() {
    let shapes = [(1, 6, 4), (2, 7, 5), (3, 4, 9)];
    for (config, activations) in [(relu(), DType::F32), (relu(), DType::F64), (gated_untied(), DType::BF16)] {
        let dtype = if activations == DType::F64 { DType::F64 } else { DType::F32 };
        let model = T5::init(&config, 1, dtype, &device()).unwrap();
        let precisions = Precisions { parameters: dtype, activations, gradients: DType::F32 };
        for trains in TRAINED {
            let counter = Counter::new(&config, precisions, 0.1, &|spec| trains(spec.part)).unwrap();
            for (samples, source_tokens, target_tokens) in shapes {
                let shape = Shape { samples, source_tokens, target_tokens };
                for recompute_blocks in [0, 1, 4, 9] {
                    let levers = Levers { micro_batch_samples: samples, recompute_blocks, ..Levers::default() };
                    let saved = counter.tally(shape, &levers).saved;
                    assert_eq!(saved_by(&model, &counter, shape, recompute_blocks, activations), saved, "{levers:?}");
                }
            }
        }
    }
}

fn saved_by(model: &T5, counter: &Counter, shape: Shape, recompute_blocks: usize, activations: DType) -> u64 {
    let (source, target) = (vec![5; shape.source_tokens], vec![6; shape.target_tokens]);
    let (sources, targets) = (vec![source.as_slice(); shape.samples], vec![target.as_slice(); shape.samples]);
    let samples: Vec<u32> = (0..shape.samples as u32).collect();
    let batch = MicroBatch::new(&sources, &targets, &samples, model.config(), &device()).unwrap();
    let cx = StepContext {
        seed: 1,
        step: 1,
        dropout: 0.1,
        adapter_dropout: 0.0,
        activations,
        recompute_blocks,
        loss_chunk_rows: 8,
        target_tokens: 1,
        token_loss: TokenLoss::default(),
    };
    let events = counter.outline(recompute_blocks, None).accumulation(0..1);
    let until = events.iter().position(|event| matches!(event, crate::step::schedule::Event::Head { .. })).unwrap();
    let batches = [batch];
    let mut step: Step<Tensor> = Step::new(model.network(), model.parameters(), &cx, &batches, None).unwrap();
    step.run(&events[..until], &mut Gradients::none(), &mut Interrupts(&|| false)).unwrap();
    step.slot_bytes()
}

#[test]
fn the_largest_moment_of_a_timeline_is_the_step() {
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    for config in [relu(), gated_untied(), Config::preset("t5-small").unwrap()] {
        for trains in TRAINED {
            let counter = Counter::new(&config, precisions, 0.1, &|spec| trains(spec.part)).unwrap();
            for ((recompute_blocks, layer_major), samples) in ways().into_iter().flat_map(|way| [(way, 2), (way, 3)]) {
                let levers = Levers {
                    micro_batch_samples: samples,
                    recompute_blocks,
                    loss_chunk_rows: 4,
                    layer_major,
                    ..Levers::default()
                };
                let shape = Shape { samples: 5, source_tokens: 8, target_tokens: 6 };
                let step = counter.step(shape, &levers);
                let moments = counter.timeline(shape, &levers);
                let largest = moments.iter().map(|moment| moment.held.total()).max();
                assert_eq!(largest, Some(step.total() - step.packed), "{levers:?}");
                // Layer-major, the rows are those of the peak, where the loss may have ended.
                let micro = Shape { samples, ..shape };
                let loss = counter.rehearsal.head(micro, levers.loss_chunk_rows).loss;
                let head = moments.iter().find(|moment| moment.pass == "loss").unwrap();
                assert_eq!(head.held.loss, loss, "{levers:?}");
                assert!(step.loss == loss || (layer_major.is_some() && step.loss == 0), "{levers:?}");
            }
        }
    }
}
