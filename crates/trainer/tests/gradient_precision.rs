//! Gradients summed in bf16, if asked for: their memory, their accuracy, and resume to the bit.

mod support;

use candle_core::DType;
use support::device::every;
use support::{bits, config, device, new, values};
use t5::Config;
use t5::costs::Trained;
use trainer::{
    Checkpoints, GradientPrecision, LayerMajor, Levers, MasterWeights, Precision, StepPlan, Trainer, TrainerOptions,
};

fn options(precision: Precision, gradient_precision: GradientPrecision) -> TrainerOptions {
    TrainerOptions { precision, gradient_precision, ..support::options() }
}

const SAMPLES: u32 = 16;

fn plan(micro_batch_samples: usize, layer_major: Option<LayerMajor>) -> StepPlan {
    StepPlan {
        levers: Levers {
            micro_batch_samples,
            recompute_blocks: 0,
            loss_chunk_rows: 8,
            layer_major,
            ..Levers::default()
        },
        longest: None,
    }
}

fn run(trainer: &mut Trainer, plan: &StepPlan, from: u32, to: u32) -> Vec<f64> {
    support::run(trainer, plan, SAMPLES, from..to)
}

#[test]
fn accumulators_hold_what_the_bill_says() {
    for (gradients, dtype) in [(GradientPrecision::F32, DType::F32), (GradientPrecision::Bf16, DType::BF16)] {
        let mut trainer = new(options(Precision::F32, gradients));
        run(&mut trainer, &plan(2, None), 0, 1);
        assert_eq!(trainer.gradients().bytes(), Trained::all(&config()).gradient_bytes(dtype));
    }
    let bytes = |dtype| Trained::all(&Config::preset("t5-base").unwrap()).gradient_bytes(dtype);
    // All but the table's 94 MiB are halved.
    assert_eq!((bytes(DType::F32) >> 20, bytes(DType::BF16) >> 20), (850, 472));
}

#[test]
fn sums_in_bf16_are_near_those_in_f32_however_many_micro_batches_they_have() {
    for micro_batch_samples in [16, 4, 1] {
        let gradients = |gradient_precision| {
            let mut trainer = new(options(Precision::F32, gradient_precision));
            run(&mut trainer, &plan(micro_batch_samples, None), 0, 1);
            let gradients = trainer.gradients().iter().map(|(_, gradient)| (gradient.dtype(), values(gradient)));
            gradients.collect::<Vec<_>>()
        };
        // Half a unit in the last place of eight bits, once for each addition, in random directions.
        let unit = 2f64.powi(-8);
        let additions = f64::from(SAMPLES) / micro_batch_samples as f64;
        let mut in_bf16 = 0;
        for ((dtype, got), (_, expected)) in
            gradients(GradientPrecision::Bf16).iter().zip(&gradients(GradientPrecision::F32))
        {
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let error = norm(&mut got.iter().zip(expected).map(|(a, b)| a - b));
            let of = norm(&mut expected.iter().copied());
            if *dtype == DType::BF16 {
                in_bf16 += 1;
                assert!(error < of * unit * additions.sqrt(), "{error} of {of}, {additions} additions");
            } else {
                assert!(error <= of * 1e-6, "{error} of {of}");
            }
        }
        // Four matrices of an attention, two of a feed-forward.
        assert_eq!(in_bf16, 2 * (4 + 2) + 2 * (8 + 2));
    }
}

#[test]
fn layer_by_layer_and_through_a_file_the_step_is_the_same() {
    // One step: rounding to bf16 turns differences in the last bits, of tables added to in another order, into larger ones.
    let after = |layer_major| {
        let mut trainer = new(options(Precision::F32, GradientPrecision::Bf16));
        run(&mut trainer, &plan(4, layer_major), 0, 1);
        trainer.model().parameters().iter().map(|p| values(&p.tensor)).collect::<Vec<_>>()
    };
    let expected = after(None);
    for (kept_gradient_blocks, gradients_on_disk) in [(0, false), (2, false), (99, false), (0, true)] {
        let layers = LayerMajor { kept_gradient_blocks, gradients_on_disk, ..LayerMajor::default() };
        for (a, b) in after(Some(layers)).iter().flatten().zip(expected.iter().flatten()) {
            assert!((a - b).abs() < 1e-6, "{a} {b}, {layers:?}");
        }
    }
}

#[test]
fn going_on_from_a_checkpoint_gives_the_bits_of_a_run_that_never_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let options = TrainerOptions {
        master_weights: MasterWeights::StochasticRounding,
        ..options(Precision::Bf16, GradientPrecision::Bf16)
    };
    let mut straight = new(options.clone());
    run(&mut straight, &plan(2, None), 0, 6);
    let mut stopped = new(options);
    run(&mut stopped, &plan(2, None), 0, 3);
    Checkpoints::new(directory.path(), 1, 0).save(&stopped, &serde_json::Value::Null, None, &|| false).unwrap();
    let found = Checkpoints::newest_valid(directory.path()).unwrap().unwrap();
    let options = found.state.options.clone();
    assert_eq!(options.gradient_precision, GradientPrecision::Bf16);
    let dtype = options.parameter_dtype();
    let mut resumed = Trainer::resume(&found, options, dtype, &device()).unwrap();
    run(&mut resumed, &plan(2, None), 3, 6);
    assert!(bits(&resumed) == bits(&straight));
}

#[test]
fn half_the_gradient_learns_as_the_whole() {
    let [whole, half] = [GradientPrecision::F32, GradientPrecision::Bf16].map(|gradient_precision| {
        let mut trainer = new(options(Precision::F32, gradient_precision));
        // On a card one micro-batch of all samples, because an emulated card is slow.
        let losses = run(&mut trainer, &plan(every(SAMPLES as usize), None), 0, 60);
        losses[57..].iter().sum::<f64>() / 3.0
    });
    assert!((half / whole - 1.0).abs() < 0.01, "{half} {whole}");
}
