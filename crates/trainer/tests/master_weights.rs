//! Weights in bf16 alone: nothing in f32 beside them, the same bits when repeated, and resume to the bit.

mod support;

use candle_core::DType;
use support::{bits, config, device, new};
use trainer::{Checkpoints, Levers, MasterWeights, Precision, StepPlan, Trainer, TrainerOptions, export_model};

fn options(master_weights: MasterWeights) -> TrainerOptions {
    TrainerOptions { precision: Precision::Bf16, master_weights, ..support::options() }
}

const PLAN: StepPlan = StepPlan {
    levers: Levers {
        micro_batch_samples: 2,
        recompute_blocks: 0,
        loss_chunk_rows: 8,
        layer_major: None,
        weight_copies: false,
        repeats: false,
    },
    longest: None,
};

fn run(trainer: &mut Trainer, from: u32, to: u32) -> Vec<f64> {
    support::run(trainer, &PLAN, 4, from..to)
}

#[test]
fn parameters_are_what_the_bill_says_and_nothing_is_kept_beside_them() {
    let trainer = new(options(MasterWeights::StochasticRounding));
    let parameters = trainer.model().parameters();
    let bytes = |t: &candle_core::Tensor| (t.elem_count() * t.dtype().size_in_bytes()) as u64;
    let held: u64 = parameters.iter().map(|parameter| bytes(&parameter.tensor)).sum();
    assert_eq!(held, t5::costs::parameters(&config(), DType::BF16));
    assert!(parameters.iter().all(|p| (p.tensor.dtype() == DType::BF16) == (p.tensor.rank() > 1)));
    let state: u64 = trainer.optimizer().named_state(parameters).map(|(_, tensor)| bytes(tensor)).sum();
    let stated = trainer::costs::optimizer_state(&config(), trainer.options(), DType::BF16).unwrap();
    assert_eq!(state, stated.bytes);
}

#[test]
fn the_same_seed_gives_the_same_bits_and_another_seed_other_noise() {
    let run = |seed| {
        // Without dropout, the seed only affects the noise of the rounding.
        let mut trainer = new(TrainerOptions { seed, dropout: 0.0, ..options(MasterWeights::StochasticRounding) });
        run(&mut trainer, 0, 3);
        bits(&trainer)
    };
    assert!(run(3) == run(3));
    assert!(run(3) != run(4));
}

#[test]
fn going_on_from_a_checkpoint_gives_the_bits_of_a_run_that_never_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let mut straight = new(options(MasterWeights::StochasticRounding));
    run(&mut straight, 0, 6);
    let mut stopped = new(options(MasterWeights::StochasticRounding));
    run(&mut stopped, 0, 3);
    Checkpoints::new(directory.path(), 1, 0).save(&stopped, &serde_json::Value::Null, None, &|| false).unwrap();
    let found = Checkpoints::newest_valid(directory.path()).unwrap().unwrap();
    let options = found.state.options.clone();
    let dtype = options.parameter_dtype();
    let mut resumed = Trainer::resume(&found, options, dtype, &device()).unwrap();
    assert!(bits(&resumed) == bits(&stopped));
    run(&mut resumed, 3, 6);
    assert!(bits(&resumed) == bits(&straight));
}

#[test]
fn the_exported_model_is_a_bf16_model_of_half_the_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let size = |master_weights| {
        let target = directory.path().join("model");
        export_model(new(options(master_weights)).model(), &target, None).unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(target.join("config.json")).unwrap()).unwrap();
        (json["torch_dtype"].clone(), std::fs::metadata(target.join("model.safetensors")).unwrap().len())
    };
    let ((whole, whole_bytes), (half, half_bytes)) =
        (size(MasterWeights::F32), size(MasterWeights::StochasticRounding));
    assert_eq!((whole, half), ("float32".into(), "bfloat16".into()));
    assert!(half_bytes < whole_bytes * 6 / 10, "{half_bytes} of {whole_bytes}");
}

#[test]
fn small_updates_are_learnt_with_stochastic_rounding_and_frozen_parts_do_not_move_by_a_bit() {
    let freeze = vec!["encoder".to_owned()];
    let mut trainer = new(TrainerOptions { freeze, ..options(MasterWeights::StochasticRounding) });
    let before = bits(&trainer);
    let losses = run(&mut trainer, 0, 60);
    assert!(losses[57..].iter().sum::<f64>() < 0.9 * losses[..3].iter().sum::<f64>(), "{losses:?}");
    for ((before, after), parameter) in before.iter().zip(bits(&trainer)).zip(trainer.model().parameters()) {
        assert_eq!(*before == after, parameter.name.starts_with("encoder."), "{}", parameter.name);
    }
}
