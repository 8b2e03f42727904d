//! A loss of preferences reads a table in a file at most 1.6 times as often as ordinary training with the same samples: its pass before a step
//! goes through the head once for a chunk of rows, of both answers, with the adapter and without it.
//!
//! The system counts the bytes: rows of a table are read with calls, and not mapped.
#![cfg(target_os = "linux")]

use candle_core::{DType, Device};
use t5::{Config, Files, LayerMajor, Levers, Lora, T5, Targets};
use trainer::adamw::AdamwOptions;
use trainer::preference::{Preference, PreferenceLoss};
use trainer::{Batch, OptimizerOptions, StepOutcome, StepPlan, Trainer, TrainerOptions};

// Only memory of this allocator can be in a file.
#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

const SAMPLES: usize = 16;
const TOKENS: usize = 30;

fn config() -> Config {
    Config { vocab_size: 6000, d_model: 64, d_kv: 16, d_ff: 64, num_layers: 1, num_heads: 4, ..Config::default() }
}

/// Bytes that this process has read with calls.
fn read_so_far() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// The bytes that a step reads, the second of two.
fn bytes_of_a_step(config: &Config, loss: Option<PreferenceLoss>) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::in_directory(directory.path());
    let lora = Lora { rank: 2, alpha: 4.0, targets: Targets::AllLinear, ..Lora::default() };
    // The host alone: weights on a device are copied there.
    let model = T5::init_in(config, 7, DType::F32, &Device::Cpu, Some(&files)).unwrap();
    let options = TrainerOptions {
        dropout: 0.0,
        preference: loss.map(Preference::usual),
        optimizer: OptimizerOptions::Adamw(AdamwOptions::default()),
        total_steps: 4,
        ..TrainerOptions::default()
    };
    let mut trainer = Trainer::new(model.with_adapter(lora, 5).unwrap(), options).unwrap();
    trainer.offload_to(files);
    let ids = |seed: usize| (0..TOKENS).map(|i| (2 + (seed * 31 + i * 7) % 5000) as u32).collect::<Vec<u32>>();
    let (sources, targets): (Vec<_>, Vec<_>) = (0..SAMPLES).map(|sample| (ids(sample / 2), ids(sample + 99))).unzip();
    let layer_major = Some(LayerMajor { weights_on_disk: true, weights_by_matrix: true, ..LayerMajor::PLAIN });
    let levers = Levers { micro_batch_samples: 4, loss_chunk_rows: 256, layer_major, ..Levers::default() };
    let plan = StepPlan { levers, longest: None };
    let mut step = || {
        let before = read_so_far();
        let batch = Batch { sources: &sources, targets: &targets };
        let outcome = trainer.step(&batch, &plan, &|| false).unwrap();
        assert!(matches!(outcome, StepOutcome::Done(_)), "{outcome:?}");
        read_so_far() - before
    };
    step();
    step()
}

#[test]
fn pairs_read_a_table_at_most_1_6_times_as_often_as_their_samples_alone() {
    let config = config();
    let alone = bytes_of_a_step(&config, None);
    // Forward and backward of four micro-batches.
    assert!(alone >= 8 * (6000 * 64 * size_of::<f32>()) as u64, "{alone} bytes");
    for loss in [PreferenceLoss::Dpo, PreferenceLoss::Orpo, PreferenceLoss::Simpo] {
        let of_pairs = bytes_of_a_step(&config, Some(loss));
        println!("{loss:?}: {:.3} times {} KiB", of_pairs as f64 / alone as f64, alone >> 10);
        assert!(of_pairs > alone && 10 * of_pairs <= 16 * alone, "{loss:?}: {of_pairs} of {alone}");
    }
}
