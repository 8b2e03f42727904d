//! Steps that minimise a loss of preferences: their gradients are the loss's derivatives, and no plan changes them.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use candle_core::{DType, Tensor};
use collective::threads;
use t5::{Config, EvalContext, LayerMajor, Levers, Lora, MicroBatch, T5, Targets};
use trainer::adamw::AdamwOptions;
use trainer::preference::{Pair, Preference, PreferenceLoss, PreferenceStats};
use trainer::{
    Batch, OptimizerOptions, Parallel, Precision, Sharding, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions,
};

use self::device::device;

const VOCABULARY: u32 = 37;
const PAIRS: usize = 4;

fn config() -> Config {
    Config {
        vocab_size: VOCABULARY as usize,
        d_model: 12,
        d_kv: 5,
        d_ff: 20,
        num_layers: 2,
        num_decoder_layers: 2,
        num_heads: 2,
        feed_forward_proj: "gated-gelu".into(),
        ..Config::default()
    }
}

/// A model with an adapter that has left its initial values.
fn model(dtype: DType) -> T5 {
    let lora = Lora { rank: 3, alpha: 5.0, targets: Targets::AllLinear, ..Lora::default() };
    let model = T5::init(&config(), 7, dtype, &device()).unwrap().with_adapter(lora, 5).unwrap();
    for (number, parameter) in model.parameters().iter().enumerate().filter(|(_, p)| t5::is_of_adapter(&p.name)) {
        let values = |count: usize| (0..count).map(move |i| ((i * 37 + number * 11) % 19) as f64 / 19.0 - 0.45);
        let shape = parameter.tensor.shape();
        let noise = Tensor::from_iter(values(shape.elem_count()), &device()).unwrap().reshape(shape).unwrap();
        let changed = (&parameter.tensor + noise.to_dtype(parameter.tensor.dtype()).unwrap() * 0.3).unwrap();
        parameter.tensor.slice_set(&changed, 0, 0).unwrap();
    }
    model
}

fn options(loss: PreferenceLoss, precision: Precision) -> TrainerOptions {
    TrainerOptions {
        dropout: 0.0,
        precision,
        grad_clip_norm: 0.0,
        preference: Some(Preference { gamma: 0.5, ..Preference::usual(loss) }),
        optimizer: OptimizerOptions::Adamw(AdamwOptions { learning_rate: 1e-2, ..AdamwOptions::default() }),
        total_steps: 50,
        ..TrainerOptions::default()
    }
}

/// Pairs of answers of uneven length: samples `2 i` and `2 i + 1` have the same source.
fn samples() -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let ids = |seed: usize, length: usize| -> Vec<u32> {
        (0..length as u32).map(|i| 2 + (seed as u32 * 31 + i * 7) % (VOCABULARY - 2)).chain([1]).collect()
    };
    (0..2 * PAIRS).map(|sample| (ids(sample / 2, 2 + sample / 2), ids(sample + 9, 1 + sample * 5 % 7))).unzip()
}

fn plan(micro_batch_samples: usize, layer_major: Option<LayerMajor>) -> StepPlan {
    let levers = Levers { micro_batch_samples, loss_chunk_rows: 8, layer_major, ..Levers::default() };
    StepPlan { levers, longest: None }
}

fn done(outcome: StepOutcome) -> StepStats {
    match outcome {
        StepOutcome::Done(stats) => stats,
        other => panic!("expected a finished step, got {other:?}"),
    }
}

/// The loss of all pairs under a model, from whole passes of its own.
fn measured(model: &T5, preference: &Preference) -> PreferenceStats {
    let (sources, targets) = samples();
    let cx = EvalContext { activations: DType::F64, loss_chunk_rows: 100 };
    let log_probability = |sample: usize, with_adapter: bool| {
        let batch = MicroBatch::new(&[&sources[sample]], &[&targets[sample]], &[0], model.config(), model.device());
        let batch = if with_adapter { batch.unwrap() } else { batch.unwrap().without_adapter() };
        -model.losses_of_samples(&[batch], &cx, &|| false).unwrap().unwrap()[0][0]
    };
    let pair = |pair: usize| Pair {
        policy: [2 * pair, 2 * pair + 1].map(|sample| log_probability(sample, true)),
        reference: [2 * pair, 2 * pair + 1].map(|sample| log_probability(sample, false)),
        tokens: [2 * pair, 2 * pair + 1].map(|sample| targets[sample].len() as f64),
        is_desirable: false,
    };
    preference.of_batch(&(0..PAIRS).map(pair).collect::<Vec<_>>()).1
}

#[test]
fn a_gradient_is_the_derivative_of_the_loss() {
    // How far the model has moved is a constant in a loss of labels: `recipes.rs` compares its gradients with torch's.
    for loss in PreferenceLoss::all().filter(|loss| !loss.has_labels()) {
        let options = options(loss, Precision::F64);
        let preference = options.preference.unwrap();
        let mut trainer = Trainer::new(model(DType::F64), options).unwrap();
        let expected = measured(trainer.model(), &preference);
        let (sources, targets) = samples();
        let before: Vec<Tensor> = trainer.model().parameters().iter().map(|p| p.tensor.copy().unwrap()).collect();
        let batch = Batch { sources: &sources, targets: &targets };
        let stats = done(trainer.step(&batch, &plan(3, None), &|| false).unwrap());
        let got = stats.preference.unwrap();
        assert!((got.loss - expected.loss).abs() < 1e-12, "{}: {got:?}, not {expected:?}", loss.name());
        assert_eq!((stats.objective, stats.loss), (Some(got.loss), got.cross_entropy));
        let gradients: Vec<(usize, Vec<f64>)> =
            trainer.gradients().iter().map(|(i, g)| (i, g.flatten_all().unwrap().to_vec1().unwrap())).collect();
        assert!(gradients.len() > 30);
        // An element of some parameters, at the values before the step.
        for (index, gradient) in gradients.into_iter().step_by(11) {
            let parameter = &trainer.model().parameters()[index];
            {
                let element = gradient.len() / 2;
                let at = |step: f64| {
                    let mut values: Vec<f64> = before[index].flatten_all().unwrap().to_vec1().unwrap();
                    values[element] += step;
                    let changed = Tensor::from_vec(values, before[index].shape(), before[index].device()).unwrap();
                    for (parameter, before) in trainer.model().parameters().iter().zip(&before) {
                        parameter.tensor.slice_set(before, 0, 0).unwrap();
                    }
                    parameter.tensor.slice_set(&changed, 0, 0).unwrap();
                    measured(trainer.model(), &preference).loss
                };
                let expected = (at(1e-5) - at(-1e-5)) / 2e-5;
                let far = (gradient[element] - expected).abs() / expected.abs().max(1e-3);
                let name = &parameter.name;
                assert!(far < 1e-5, "{}: {name}[{element}]: {}, not {expected}", loss.name(), gradient[element]);
            }
        }
    }
}

/// The labels of some samples, if the loss has any.
fn labels(loss: PreferenceLoss, samples: std::ops::Range<usize>) -> Vec<bool> {
    samples.filter(|_| loss.has_labels()).map(|sample| sample % 3 == 0).collect()
}

#[test]
fn no_plan_changes_the_losses() {
    let losses = |loss, plan: &StepPlan| -> Vec<f64> {
        let mut trainer = Trainer::new(model(DType::F64), options(loss, Precision::F64)).unwrap();
        let (sources, targets) = samples();
        let batch = Batch { sources: &sources, targets: &targets };
        let labels = labels(loss, 0..2 * PAIRS);
        let step = |_| {
            let outcome = trainer.step_of_labels((&batch, &labels), &[2 * PAIRS], plan, &|| false);
            done(outcome.unwrap()).objective.unwrap()
        };
        (0..6).map(step).collect()
    };
    for loss in PreferenceLoss::all() {
        let expected = losses(loss, &plan(100, None));
        assert!(expected[5] < expected[0], "{}: {expected:?}", loss.name());
        let on_disk = LayerMajor { boundaries_on_disk: true, gradients_on_disk: true, ..LayerMajor::PLAIN };
        for plan in [plan(1, None), plan(2, Some(LayerMajor::PLAIN)), plan(3, Some(on_disk))] {
            let got = losses(loss, &plan);
            let far = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-9, "{}: {plan:?}: {got:?}, not {expected:?}", loss.name());
        }
    }
}

#[test]
fn any_number_of_processes_gives_the_same_bits() {
    let run = |processes: usize, loss: PreferenceLoss| -> Vec<(f64, f64)> {
        let mut of_each = threads::run(processes, |group| {
            let mut trainer = Trainer::new(model(DType::F32), options(loss, Precision::F32)).unwrap();
            let parallel = Parallel::new(group, Some(PAIRS)).unwrap();
            let mine: Vec<usize> = parallel.shards().owned_by(parallel.group().rank()).collect();
            trainer.join(parallel, Sharding::None).unwrap();
            let (sources, targets) = samples();
            let range = 2 * mine[0]..2 * (mine[mine.len() - 1] + 1);
            let labels = labels(loss, range.clone());
            let of = |lists: Vec<Vec<u32>>| lists[range.clone()].to_vec();
            let (sources, targets) = (of(sources), of(targets));
            let batch = Batch { sources: &sources, targets: &targets };
            let shards = vec![2; mine.len()];
            let step = |_| {
                let outcome = trainer.step_of_labels((&batch, &labels), &shards, &plan(2, None), &|| false);
                let stats = done(outcome.unwrap());
                (stats.objective.unwrap(), stats.grad_norm)
            };
            (0..4).map(step).collect::<Vec<_>>()
        });
        assert!(of_each.iter().all(|one| *one == of_each[0]));
        of_each.swap_remove(0)
    };
    for loss in [PreferenceLoss::Orpo, PreferenceLoss::Kto] {
        let expected = run(1, loss);
        for processes in [2, 4] {
            assert_eq!(run(processes, loss), expected, "{processes} processes");
        }
    }
}

#[test]
fn what_would_be_another_loss_is_refused() {
    let refused = |options: TrainerOptions, model: T5, expected: &str| {
        let error = Trainer::new(model, options).err().expect("a refusal").to_string();
        assert!(error.contains(expected), "{error}");
    };
    let dpo = || options(PreferenceLoss::Dpo, Precision::F32);
    refused(TrainerOptions { dropout: 0.1, ..dpo() }, model(DType::F32), "train.dropout");
    refused(TrainerOptions { z_loss: 1e-4, ..dpo() }, model(DType::F32), "train.z_loss");
    let plain = T5::init(&config(), 7, DType::F32, &device()).unwrap();
    refused(dpo(), plain, "expected an adapter, and nothing else that trains");
}
