//! Weights in a file against weights in memory: the same bits after every operation.
//!
//! The host alone: a card's tensor of a weight in a file is empty between uses. `tests/card.rs` compares runs whose weights have homes
//! off a card.

mod support;

use candle_core::{DType, Device};
use support::{bits, config_for_files as config, options_in as options, step};
use t5::{EvalContext, Files, GenerateOptions, MicroBatch, T5};
use trainer::checkpoint::Checkpoints;
use trainer::{LayerMajor, Levers, Precision, StepPlan, Trainer};

// Only memory of this allocator can be in a file.
#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

fn plan(layer_major: Option<LayerMajor>) -> StepPlan {
    StepPlan {
        levers: Levers {
            micro_batch_samples: 3,
            recompute_blocks: 9,
            loss_chunk_rows: 64,
            layer_major,
            ..Levers::default()
        },
        longest: None,
    }
}

fn layers(kept_gradient_blocks: usize, files: bool, weights_on_disk: bool) -> LayerMajor {
    LayerMajor {
        kept_gradient_blocks,
        boundaries_on_disk: files,
        gradients_on_disk: files,
        weights_on_disk,
        ..LayerMajor::default()
    }
}

/// An evaluation's loss and a few answers.
fn evaluated(model: &T5, activations: DType) -> (f64, Vec<Vec<u32>>) {
    let [sources, targets]: [[&[u32]; 3]; 2] = [[&[7, 90, 3, 1], &[149, 1], &[1]], [&[4, 1], &[60, 5, 6, 1], &[8, 1]]];
    let batch = MicroBatch::new(&sources, &targets, &[0, 1, 2], model.config(), &Device::Cpu).unwrap();
    let loss = model.loss(&batch, &EvalContext { activations, loss_chunk_rows: 4 }).unwrap();
    (loss, model.generate(&sources, &GenerateOptions { max_new_tokens: 5, activations, ..Default::default() }).unwrap())
}

fn in_files(model: &T5) -> usize {
    model.parameters().iter().filter(|parameter| tensor_storage::is_in_file(&parameter.tensor)).count()
}

#[test]
fn steps_evaluations_and_checkpoints_are_the_same_to_the_bit() {
    let directory = tempfile::tempdir().unwrap();
    for precision in [Precision::F32, Precision::Bf16] {
        // The system has room for changed weights, or none.
        for (unwritten_bytes, kept, in_gradient_files) in
            [(u64::MAX, 0, true), (0, 0, true), (u64::MAX, 0, false), (0, 9, false), (0, 1, true)]
        {
            let files = Files { unwritten_bytes, ..Files::in_directory(directory.path()) };
            let options = options(precision);
            let [mut memory, mut disk] = [None, Some(&files)].map(|files| {
                let model = T5::init_in(&config(), 7, options.parameter_dtype(), &Device::Cpu, files).unwrap();
                let mut trainer = Trainer::new(model, options.clone()).unwrap();
                trainer.offload_to(Files::in_directory(directory.path()));
                trainer
            });
            assert_eq!((in_files(memory.model()), memory.model().is_in_file()), (0, false));
            // Norms and tables of positions are small; in bf16 the matrices of attention are, too.
            let large = if precision == Precision::F32 { 1 + 2 * (4 + 2) + 2 * (8 + 2) } else { 1 + 4 * 2 };
            assert_eq!((in_files(disk.model()), disk.model().is_in_file()), (large, true));
            assert!(bits(&memory) == bits(&disk));

            let plans = [false, true].map(|on_disk| plan(Some(layers(kept, in_gradient_files, on_disk))));
            for seed in 0..3 {
                assert_eq!(step(&mut memory, seed, &plans[0]), step(&mut disk, seed, &plans[1]));
            }
            assert_eq!((in_files(memory.model()), in_files(disk.model())), (0, large));
            assert!(bits(&memory) == bits(&disk));
            let activations = options.precision.activations();
            assert_eq!(evaluated(memory.model(), activations), evaluated(disk.model(), activations));
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);

            let [saved, other] = [&memory, &disk].map(|trainer| {
                let directory = tempfile::tempdir().unwrap();
                Checkpoints::new(directory.path(), 1, 0)
                    .save(trainer, &serde_json::Value::Null, None, &|| false)
                    .unwrap();
                directory
            });
            let found = [&saved, &other].map(|directory| Checkpoints::newest_valid(directory.path()).unwrap().unwrap());
            let weights = found.each_ref().map(|found| std::fs::read(found.path.join("model.safetensors")).unwrap());
            assert!(weights[0] == weights[1]);
            let dtype = options.parameter_dtype();
            let mut resumed =
                Trainer::resume_in(&found[0], options.clone(), dtype, &Device::Cpu, Some(&files)).unwrap();
            assert_eq!(in_files(resumed.model()), large);
            assert_eq!(step(&mut resumed, 5, &plans[1]), step(&mut memory, 5, &plans[0]));
            assert!(bits(&resumed) == bits(&memory));
        }
    }
}

#[test]
fn weights_move_between_steps_where_the_plan_changes() {
    let directory = tempfile::tempdir().unwrap();
    let run = |plans: &[StepPlan], expected: &[bool]| {
        let options = options(Precision::F32);
        let model = T5::init(&config(), 7, options.parameter_dtype(), &Device::Cpu).unwrap();
        let mut trainer = Trainer::new(model, options).unwrap();
        trainer.offload_to(Files::in_directory(directory.path()));
        let mut losses = Vec::new();
        for ((plan, &in_file), seed) in plans.iter().zip(expected).zip(0..) {
            losses.push(step(&mut trainer, seed, plan));
            assert_eq!((trainer.model().is_in_file(), in_files(trainer.model()) > 0), (in_file, in_file));
        }
        (losses, bits(&trainer))
    };
    let [memory, disk] = [false, true].map(|on_disk| plan(Some(layers(0, true, on_disk))));
    let ordinary = plan(None);
    let straight = run(&[memory, memory, ordinary, memory, memory], &[false; 5]);
    assert!(straight == run(&[disk, memory, ordinary, disk, disk], &[true, false, false, true, true]));
}
