//! Layer-major accumulation against the ordinary one: the same gradients, however memory is spent.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use t5::{Config, Error, Files, Gradients, LayerMajor, MicroBatch, Part, Stage, StepContext, T5};

fn relu() -> Config {
    Config {
        vocab_size: 37,
        d_model: 20,
        d_ff: 28,
        d_kv: 6,
        num_heads: 3,
        num_layers: 3,
        num_decoder_layers: 2,
        relative_attention_num_buckets: 8,
        relative_attention_max_distance: 16,
        ..Config::default()
    }
}

fn gated_untied() -> Config {
    let mut config = Config { tie_word_embeddings: false, scale_decoder_outputs: false, ..relu() };
    config.set_feed_forward_proj("gated-gelu").unwrap();
    config
}

/// Seven samples of uneven length in micro-batches of 1, 4 and 2.
fn batches(config: &Config) -> (Vec<MicroBatch>, u64) {
    let list =
        |seed: u32, length: u32| -> Vec<u32> { (0..length).map(|i| 2 + (seed * 31 + i * 7) % 35).chain([1]).collect() };
    let lengths = [(9, 4), (1, 12), (5, 5), (17, 1), (3, 8), (2, 2), (30, 20)];
    let sources: Vec<Vec<u32>> = lengths.iter().enumerate().map(|(i, l)| list(i as u32, l.0)).collect();
    let targets: Vec<Vec<u32>> = lengths.iter().enumerate().map(|(i, l)| list(i as u32 + 50, l.1)).collect();
    let gather = |samples: &[usize]| {
        let sources: Vec<&[u32]> = samples.iter().map(|&i| sources[i].as_slice()).collect();
        let targets: Vec<&[u32]> = samples.iter().map(|&i| targets[i].as_slice()).collect();
        let samples: Vec<u32> = samples.iter().map(|&i| i as u32).collect();
        MicroBatch::new(&sources, &targets, &samples, config, &Device::Cpu).unwrap()
    };
    let batches = [&[6][..], &[3, 0, 2, 4], &[1, 5]].map(gather).to_vec();
    (batches, targets.iter().map(|t| t.len() as u64).sum())
}

type Trained<'a> = &'a dyn Fn(Part) -> bool;

fn ordinary(model: &T5, dtype: DType, trained: Trained) -> (f64, Vec<Option<Tensor>>) {
    let (batches, target_tokens) = batches(model.config());
    let cx = StepContext { dropout: 0.2, recompute_blocks: 2, ..context(target_tokens, dtype) };
    let mut grads = Gradients::new(model, DType::F32, &|parameter| trained(parameter.part));
    let loss = batches.iter().map(|batch| model.forward_backward(batch, &cx, &mut grads).unwrap()).sum();
    (loss, (0..model.parameters().len()).map(|index| grads.get(index).cloned()).collect())
}

/// Loss, and the gradients that each of the two passes hands over.
fn by_layer(
    model: &T5,
    dtype: DType,
    trained: Trained,
    layers: &LayerMajor,
    recompute_blocks: usize,
) -> (f64, [Vec<Option<Tensor>>; 2]) {
    let (batches, target_tokens) = batches(model.config());
    let cx = StepContext { dropout: 0.2, recompute_blocks, ..context(target_tokens, dtype) };
    let mut grads = Gradients::new(model, DType::F32, &|parameter| trained(parameter.part));
    let directory = tempfile::tempdir().unwrap();
    let mut pass = model
        .layer_major_forward(batches, &cx, layers, &Files::in_directory(directory.path()), &mut grads, &|| false)
        .unwrap()
        .unwrap();
    let stages = [Stage::Measure, Stage::Apply].map(|stage| {
        let mut seen = vec![None; model.parameters().len()];
        let mut see = |index: usize, grads: &Gradients| -> Result<(), Error> {
            let gradient = grads.get(index).expect("what is handed over is there").copy()?;
            assert!(seen[index].replace(gradient).is_none(), "{} is handed over twice", model.parameters()[index].name);
            Ok(())
        };
        assert!(model.layer_major_backward(&mut pass, stage, &mut grads, &|| false, &mut see).unwrap());
        seen
    });
    assert_eq!(grads.bytes(), 0);
    (pass.loss_sum(), stages)
}

fn check(config: &Config, dtype: DType, trained: Trained, layers: &LayerMajor, tolerance: f64) {
    let parameters = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let model = T5::init(config, 2, parameters, &Device::Cpu).unwrap();
    let (loss, expected) = ordinary(&model, dtype, trained);
    for recompute_blocks in [0, 2, 99] {
        let (loss_by_layer, stages) = by_layer(&model, dtype, trained, layers, recompute_blocks);
        assert_eq!(loss.to_bits(), loss_by_layer.to_bits());
        for got in &stages {
            for ((parameter, got), expected) in model.parameters().iter().zip(got).zip(&expected) {
                let name = format!("{}, {layers:?}, {recompute_blocks} blocks computed again", parameter.name);
                let (Some(got), Some(expected)) = (got, expected) else {
                    // An accumulator that nothing was added to is not handed over, and not made in the ordinary way either.
                    assert_eq!(got.is_some(), expected.is_some(), "{name}");
                    continue;
                };
                if matches!(parameter.part, Part::Shared | Part::LmHead) {
                    let far = distance(got, expected);
                    assert!(far < tolerance, "{name}: {far:e}");
                } else {
                    assert_eq!(values(got), values(expected), "{name}");
                }
            }
        }
    }
}

const fn layers(kept_gradient_blocks: usize, boundaries_on_disk: bool, gradients_on_disk: bool) -> LayerMajor {
    LayerMajor {
        kept_gradient_blocks,
        heads_kept: false,
        boundaries_on_disk,
        blocks_in_memory: 0,
        gradients_on_disk,
        weights_on_disk: false,
    }
}

const fn with_heads(layers: LayerMajor) -> LayerMajor {
    LayerMajor { heads_kept: true, ..layers }
}

const fn but_for(blocks_in_memory: usize, layers: LayerMajor) -> LayerMajor {
    LayerMajor { blocks_in_memory, ..layers }
}

const EVERYTHING: [LayerMajor; 12] = [
    layers(0, false, false),
    layers(1, false, false),
    layers(3, false, false),
    layers(4, true, false),
    layers(99, false, false),
    layers(0, true, false),
    layers(0, false, true),
    layers(2, true, true),
    with_heads(layers(1, false, false)),
    with_heads(layers(1, true, true)),
    but_for(1, layers(99, true, false)),
    but_for(3, layers(2, true, true)),
];

#[test]
fn gradients_are_those_of_ordinary_accumulation() {
    for config in [relu(), gated_untied()] {
        for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-5), (DType::BF16, 1e-5)] {
            for layers in &EVERYTHING {
                check(&config, dtype, &|_| true, layers, tolerance);
            }
        }
    }
}

#[test]
fn what_is_frozen_has_no_gradient_and_what_trains_has_the_same() {
    let trained: [Trained; 7] = [
        &|part| part.is_decoder(),
        &|part| !matches!(part, Part::Shared) && !part.is_encoder(),
        &|part| matches!(part, Part::Encoder { block: 1 }),
        &|part| matches!(part, Part::DecoderNorm | Part::EncoderNorm),
        &|part| matches!(part, Part::Shared),
        &|part| matches!(part, Part::LmHead | Part::Shared),
        &|part| matches!(part, Part::Decoder { block: 1 } | Part::Encoder { block: 0 }),
    ];
    for config in [relu(), gated_untied()] {
        for layers in &EVERYTHING {
            for trained in trained {
                check(&config, DType::F64, trained, layers, 1e-10);
            }
        }
    }
}

#[test]
fn an_interrupted_pass_ends_before_the_next_micro_batch() {
    let model = T5::init(&relu(), 2, DType::F32, &Device::Cpu).unwrap();
    let (micro_batches, target_tokens) = batches(model.config());
    let cx = context(target_tokens, DType::F32);
    let mut grads = Gradients::new(&model, DType::F32, &|_| true);
    let (layers, directory) = (LayerMajor::default(), tempfile::tempdir().unwrap());
    let files = Files::in_directory(directory.path());
    // Ends at the question of that number; says whether forward did, and how many were asked in it and in all.
    let mut run_until = |last: usize| {
        let asked = std::cell::Cell::new(0);
        let interrupted = || asked.replace(asked.get() + 1) == last;
        let batches = micro_batches.clone();
        let pass = model.layer_major_forward(batches, &cx, &layers, &files, &mut grads, &interrupted).unwrap();
        let in_forward = asked.get();
        let Some(mut pass) = pass else { return (true, in_forward, in_forward) };
        let mut nothing = |_: usize, _: &Gradients| -> Result<(), Error> { Ok(()) };
        let ended =
            model.layer_major_backward(&mut pass, Stage::Measure, &mut grads, &interrupted, &mut nothing).unwrap();
        assert_eq!(ended, asked.get() <= last);
        (false, in_forward, asked.get())
    };
    let (_, in_forward, in_all) = run_until(usize::MAX);
    // Every block and the head, for every micro-batch.
    let config = model.config();
    assert_eq!(in_forward, (config.num_layers + config.num_decoder_layers + 1) * micro_batches.len());
    for last in [0, in_forward / 2, in_forward - 1] {
        assert_eq!(run_until(last), (true, last + 1, last + 1));
    }
    for last in [in_forward, in_all - 1] {
        assert_eq!(run_until(last), (false, in_forward, last + 1));
    }
}
