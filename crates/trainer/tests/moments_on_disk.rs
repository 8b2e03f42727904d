//! AdamW's moments in a file against moments in memory: the same bits after every operation.

mod support;

use support::{bits, config_for_files as config, step};
use t5::{Files, T5};
use trainer::adamw::AdamwOptions;
use trainer::checkpoint::Checkpoints;
use trainer::costs::{optimizer_state, optimizer_state_on_disk};
use trainer::lion::LionOptions;
use trainer::{LayerMajor, Levers, OptimizerOptions, Precision, StepPlan, Trainer, TrainerOptions};

// Only memory of this allocator can be in a file.
#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

/// The optimizers whose state may be in a file, with the number of its tensors.
fn optimizers() -> [(OptimizerOptions, usize); 3] {
    let scaled = AdamwOptions { scale_parameter: Some(1e-3), ..AdamwOptions::default() };
    [(AdamwOptions::default().into(), 2), (scaled.into(), 2), (LionOptions::default().into(), 1)]
}

fn options(precision: Precision) -> TrainerOptions {
    TrainerOptions { optimizer: AdamwOptions::default().into(), ..support::options_in(precision) }
}

fn plan(optimizer_on_disk: bool) -> StepPlan {
    let layers = LayerMajor { kept_gradient_blocks: 9, optimizer_on_disk, ..LayerMajor::default() };
    let levers = Levers {
        micro_batch_samples: 3,
        recompute_blocks: 9,
        loss_chunk_rows: 64,
        layer_major: Some(layers),
        ..Levers::default()
    };
    StepPlan { levers, longest: None }
}

fn trainer(options: &TrainerOptions, files: &Files) -> Trainer {
    let model = T5::init(&config(), 7, options.parameter_dtype(), &support::device()).unwrap();
    let mut trainer = Trainer::new(model, options.clone()).unwrap();
    trainer.offload_to(files.clone());
    trainer
}

/// Moments that are in a file, and their bytes.
fn in_files(trainer: &Trainer) -> (usize, u64) {
    let state = trainer.optimizer().named_state(trainer.model().parameters()).map(|(_, tensor)| tensor);
    let in_files: Vec<u64> = state
        .filter(|tensor| tensor_storage::is_in_file(tensor))
        .map(|tensor| 4 * tensor.elem_count() as u64)
        .collect();
    (in_files.len(), in_files.iter().sum())
}

#[test]
fn steps_and_checkpoints_are_the_same_to_the_bit_and_the_bill_says_what_stays_in_memory() {
    let directory = tempfile::tempdir().unwrap();
    for (precision, (optimizer, tensors)) in [
        (Precision::F32, optimizers()[0]),
        (Precision::F32, optimizers()[1]),
        (Precision::Bf16, optimizers()[0]),
        (Precision::Bf16, optimizers()[2]),
    ] {
        // The system has room for changed moments, or none.
        for unwritten_bytes in [u64::MAX, 0] {
            let files = Files { unwritten_bytes, ..Files::in_directory(directory.path()) };
            let options = TrainerOptions { optimizer, ..options(precision) };
            let [mut memory, mut disk] = [trainer(&options, &files), trainer(&options, &files)];
            for seed in 0..3 {
                assert_eq!(step(&mut memory, seed, &plan(false)), step(&mut disk, seed, &plan(true)));
            }
            let (large, bytes) = in_files(&disk);
            assert_eq!((in_files(&memory).0, large), (0, tensors * (1 + 2 * (4 + 2) + 2 * (8 + 2))));
            assert!(bits(&memory) == bits(&disk));
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);

            let dtype = options.parameter_dtype();
            let all = optimizer_state(&config(), &options, dtype).unwrap().bytes;
            let bill = optimizer_state_on_disk(&config(), &options, dtype).unwrap().unwrap();
            let largest = 4 * 160 * 64; // wi: the table has fewer rows
            assert_eq!(
                (bill.written, bill.resident, bill.loading),
                (bytes, all - bytes + tensors as u64 * largest, all - bytes + largest)
            );

            let saved = tempfile::tempdir().unwrap();
            let mut checkpoints = Checkpoints::new(saved.path(), 1, 0);
            checkpoints.save(&disk, &serde_json::Value::Null, None, &|| false).unwrap();
            let found = Checkpoints::newest_valid(saved.path()).unwrap().unwrap();
            let mut resumed =
                Trainer::resume_from_files(&found, options, dtype, &support::device(), [None, Some(&files)]).unwrap();
            assert_eq!(in_files(&resumed), (large, bytes));
            resumed.offload_to(files);
            assert_eq!(step(&mut resumed, 5, &plan(true)), step(&mut memory, 5, &plan(false)));
            assert!(bits(&resumed) == bits(&memory));
        }
    }
}

#[test]
fn moments_move_between_steps_where_the_plan_changes() {
    let directory = tempfile::tempdir().unwrap();
    let run = |on_disk: &[bool]| {
        let mut trainer = trainer(&options(Precision::F32), &Files::in_directory(directory.path()));
        let mut losses = Vec::new();
        for (&on_disk, seed) in on_disk.iter().zip(0..) {
            losses.push(step(&mut trainer, seed, &plan(on_disk)));
            assert_eq!(in_files(&trainer).0 > 0, on_disk);
        }
        (losses, bits(&trainer))
    };
    assert!(run(&[false; 5]) == run(&[true, false, false, true, true]));
}

#[test]
fn adafactor_has_no_moments_for_a_file() {
    let options = support::options();
    let bill = optimizer_state_on_disk(&config(), &options, options.parameter_dtype()).unwrap();
    assert_eq!(bill, None);
}
