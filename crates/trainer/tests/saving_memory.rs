//! Bytes that the allocator gives out while a checkpoint is saved, compared with the bill.

mod support;

use t5::{Config, Lora, T5};
use trainer::adamw::{AdamwOptions, StatePrecision};
use trainer::checkpoint::Checkpoints;
use trainer::costs::{SavedFrom, saving};
use trainer::{LayerMajor, Levers, MasterWeights, Precision, StepPlan, Trainer, TrainerOptions};

#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

/// The most bytes that saving holds at a time.
fn held(trainer: &Trainer) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::new(directory.path(), 1, 0);
    heap::count_allocations(true);
    checkpoints.save(trainer, &serde_json::Value::Null, None, &|| false).unwrap();
    heap::count_allocations(false);
    heap::peak_live()
}

#[test]
fn saving_holds_a_piece_of_a_tensor_and_what_the_bill_says() {
    let wide = Config { vocab_size: 3000, d_model: 256, d_kv: 64, d_ff: 512, ..support::config() };
    let lora = Some(Lora { rank: 4, ..Lora::default() });
    let adapted = Config { lora, ..wide.clone() };
    let small = Config { vocab_size: 150, d_model: 64, d_kv: 16, d_ff: 160, ..support::config() };
    let f32 = TrainerOptions { optimizer: AdamwOptions::default().into(), ..support::options() };
    let bf16 =
        TrainerOptions { precision: Precision::Bf16, master_weights: MasterWeights::StochasticRounding, ..f32.clone() };
    let int8 = AdamwOptions { state_precision: StatePrecision::Int8, ..AdamwOptions::default() };
    let int8 = TrainerOptions { optimizer: int8.into(), ..f32.clone() };
    let files = tempfile::tempdir().unwrap();
    let cases = [
        (&wide, &f32, false),
        (&wide, &f32, true),
        (&wide, &int8, false),
        (&wide, &bf16, false),
        (&adapted, &f32, false),
        (&small, &f32, false),
    ];
    for (config, options, moments_in_file) in cases {
        let model = T5::init(config, 7, options.parameter_dtype(), &support::device()).unwrap();
        let mut trainer = Trainer::new(model, options.clone()).unwrap();
        if moments_in_file {
            let layers = LayerMajor { kept_gradient_blocks: 9, optimizer_on_disk: true, ..LayerMajor::default() };
            let levers = Levers {
                micro_batch_samples: 3,
                recompute_blocks: 9,
                loss_chunk_rows: 64,
                layer_major: Some(layers),
                ..Levers::default()
            };
            trainer.offload_to(t5::Files::in_directory(files.path()));
            support::run(&mut trainer, &StepPlan { levers, longest: None }, 7, 0..1);
            let moments = trainer.optimizer().named_state(trainer.model().parameters());
            assert!(moments.filter(|(_, tensor)| tensor_storage::is_in_file(tensor)).count() > 4);
        }
        let held = held(&trainer);
        let from = SavedFrom { device: !support::device().is_cpu(), moments_in_file };
        let predicted = saving(config, options, options.parameter_dtype(), from).unwrap().bytes;
        let what = format!("{held} bytes held, {predicted} predicted, {moments_in_file}");
        // There is no state of the caller here. The copy of a piece on a card is billed beside everything that is made from a piece.
        let spare = if from.device { 768 << 10 } else { 640 << 10 };
        assert!(held <= predicted && predicted < held + spare, "{what}");
        eprintln!("{what}");
    }
}
