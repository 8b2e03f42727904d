//! Layer-major accumulation against the ordinary one: the same gradients, whatever the memory plan.

use crate::support::*;
use candle_core::{DType, Tensor};
use t5::{Config, Error, Family, Files, Gradients, LayerMajor, MicroBatch, Observer, Part, StepContext, T5};

fn gated_untied() -> Config {
    let mut config = Config { tie_word_embeddings: false, scale_decoder_outputs: false, ..relu() };
    config.set_feed_forward_proj("gated-gelu").unwrap();
    config
}

/// A table of relative positions in every block.
fn tables_everywhere() -> Config {
    Config { family: Family::Umt5, ..relu() }
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
        MicroBatch::new(&sources, &targets, &samples, config, &device()).unwrap()
    };
    let batches = [&[6][..], &[3, 0, 2, 4], &[1, 5]].map(gather).to_vec();
    (batches, targets.iter().map(|t| t.len() as u64).sum())
}

type Trained<'a> = &'a dyn Fn(Part) -> bool;

fn ordinary(model: &T5, dtype: DType, dropout: f64, trained: Trained) -> (f64, Vec<Option<Tensor>>) {
    let (batches, target_tokens) = batches(model.config());
    let cx = StepContext { dropout, recompute_blocks: 2, ..context(target_tokens, dtype) };
    let mut grads = Gradients::new(model.parameters(), DType::F32, &|parameter| trained(parameter.part));
    let loss = batches.iter().map(|batch| model.forward_backward(batch, &cx, &mut grads).unwrap()).sum();
    (loss, (0..model.parameters().len()).map(|index| grads.get(index).cloned()).collect())
}

/// The gradients that a step hands over to be measured, and to be applied.
struct Seen<'a> {
    model: &'a T5,
    loss: f64,
    measured: Vec<Option<Tensor>>,
    applied: Vec<Option<Tensor>>,
}

impl Seen<'_> {
    fn new(model: &T5) -> Seen<'_> {
        let none = vec![None; model.parameters().len()];
        Seen { model, loss: 0.0, measured: none.clone(), applied: none }
    }
}

fn note(seen: &mut [Option<Tensor>], index: usize, gradient: &Tensor, model: &T5) -> Result<(), Error> {
    let earlier = seen[index].replace(gradient.copy()?);
    assert!(earlier.is_none(), "{} is handed over twice", model.parameters()[index].name);
    Ok(())
}

impl Observer<Tensor, Error> for Seen<'_> {
    fn measure(&mut self, index: usize, gradient: &Tensor) -> Result<(), Error> {
        note(&mut self.measured, index, gradient, self.model)
    }

    fn decide(&mut self, losses: t5_ops::LossSums) -> Result<bool, Error> {
        self.loss = losses.cross_entropy;
        Ok(true)
    }

    fn apply(&mut self, index: usize, gradient: &Tensor) -> Result<(), Error> {
        note(&mut self.applied, index, gradient, self.model)
    }
}

/// Loss, and the gradients that a step hands over to be measured and to be applied.
fn by_layer(
    model: &T5,
    dtype: DType,
    dropout: f64,
    trained: Trained,
    layers: &LayerMajor,
    recompute_blocks: usize,
) -> (f64, [Vec<Option<Tensor>>; 2]) {
    let (batches, target_tokens) = batches(model.config());
    let cx = StepContext { dropout, recompute_blocks, ..context(target_tokens, dtype) };
    let mut grads = Gradients::new(model.parameters(), DType::F32, &|parameter| trained(parameter.part));
    let directory = tempfile::tempdir().unwrap();
    let files = Files::in_directory(directory.path());
    let mut seen = Seen::new(model);
    assert!(model.step(&batches, &cx, Some(layers), &files, &mut grads, &mut seen).unwrap());
    assert_eq!(grads.bytes(), 0);
    (seen.loss, [seen.measured, seen.applied])
}

fn check(config: &Config, dtype: DType, trained: Trained, layers: &LayerMajor, tolerance: f64) {
    let parameters = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let model = T5::init(config, 2, parameters, &device()).unwrap();
    for (recompute_blocks, dropout) in [(0, 0.2), (2, 0.2), (99, 0.2), (2, 0.0)] {
        let (loss, expected) = ordinary(&model, dtype, dropout, trained);
        let (loss_by_layer, stages) = by_layer(&model, dtype, dropout, trained, layers, recompute_blocks);
        assert_eq!(loss.to_bits(), loss_by_layer.to_bits());
        for got in &stages {
            for ((parameter, got), expected) in model.parameters().iter().zip(got).zip(&expected) {
                let name = format!("{}, {layers:?}, {recompute_blocks} blocks computed again", parameter.name);
                let (Some(got), Some(expected)) = (got, expected) else {
                    // An accumulator to which nothing was added is not handed over, and the ordinary way makes none either.
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
    LayerMajor { kept_gradient_blocks, boundaries_on_disk, gradients_on_disk, ..LayerMajor::PLAIN }
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
    let configs = [relu(), gated_untied(), tables_everywhere()];
    let dtypes = [(DType::F32, 1e-5), (DType::BF16, 1e-5), (DType::F64, 1e-10)];
    let ways = configs.iter().flat_map(|config| dtypes.map(|of| (config, of)));
    let cases: Vec<_> = ways.flat_map(|way| EVERYTHING.map(|layers| (way, layers))).collect();
    for ((config, (dtype, tolerance)), layers) in cases.into_iter().step_by(every(13)) {
        check(config, dtype, &|_| true, &layers, tolerance);
    }
}

#[test]
fn what_is_frozen_has_no_gradient_and_what_trains_has_the_same() {
    let trained: [Trained; 7] = [
        &|part| part.is_decoder(),
        &|part| !matches!(part, Part::Shared | Part::Encoder { .. } | Part::EncoderNorm),
        &|part| matches!(part, Part::Encoder { block: 1 }),
        &|part| matches!(part, Part::DecoderNorm | Part::EncoderNorm),
        &|part| matches!(part, Part::Shared),
        &|part| matches!(part, Part::LmHead | Part::Shared),
        &|part| matches!(part, Part::Decoder { block: 1 } | Part::Encoder { block: 0 }),
    ];
    let configs = [relu(), gated_untied(), tables_everywhere()];
    let ways = configs.iter().flat_map(|config| EVERYTHING.map(|layers| (config, layers)));
    let cases: Vec<_> = ways.flat_map(|way| trained.map(|trained| (way, trained))).collect();
    for ((config, layers), trained) in cases.into_iter().step_by(every(37)) {
        check(config, DType::F64, trained, &layers, 1e-10);
    }
}

#[test]
fn an_interrupted_pass_ends_before_the_next_micro_batch() {
    let model = T5::init(&relu(), 2, DType::F32, &device()).unwrap();
    let (micro_batches, target_tokens) = batches(model.config());
    let cx = context(target_tokens, DType::F32);
    let mut grads = Gradients::new(model.parameters(), DType::F32, &|_| true);
    let (layers, directory) = (LayerMajor::default(), tempfile::tempdir().unwrap());
    let files = Files::in_directory(directory.path());
    // Interrupts at the question of that number. Returns how many were asked.
    let mut run_until = |last: usize| {
        let mut asked = Asks { asked: 0, last };
        let ended = !model.step(&micro_batches, &cx, Some(&layers), &files, &mut grads, &mut asked).unwrap();
        assert_eq!(ended, asked.asked > last);
        asked.asked
    };
    let in_all = run_until(usize::MAX);
    // Forward asks before every block and the head, each of the two backward passes before every block and norm.
    let config = model.config();
    let blocks = config.num_layers + config.num_decoder_layers;
    assert_eq!(in_all, (blocks + 1 + 2 * (blocks + 2)) * micro_batches.len());
    for last in [0, 5, in_all / 2, in_all - 1] {
        assert_eq!(run_until(last), last + 1);
    }
}

/// Interrupts at the question of that number.
struct Asks {
    asked: usize,
    last: usize,
}

impl Observer<Tensor, Error> for Asks {
    fn interrupted(&mut self) -> bool {
        self.asked += 1;
        self.asked > self.last
    }
}
