//! A run that is killed again and again, by SIGKILL at arbitrary moments, ends with the bits of a run that was not killed.

#![cfg(unix)]

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use candle_core::DType;
use durable_files::RunLock;
use serde_json::json;
use t5::{Config, T5};
use trainer::adafactor::AdafactorOptions;
use trainer::{Batch, Checkpoints, Levers, StepPlan, Trainer, TrainerOptions, export_model};

use self::device::device;

const STEPS: u64 = 24;
/// Set for the child processes: the directory they run in, and how often they save before they wait to be killed.
const OUTPUT: &str = "TRAINER_TEST_OUTPUT";
const SAVES: &str = "TRAINER_TEST_SAVES";

fn options() -> TrainerOptions {
    let adafactor = AdafactorOptions {
        learning_rate: Some(1e-2),
        relative_step: false,
        beta1: Some(0.9),
        ..AdafactorOptions::default()
    };
    TrainerOptions {
        seed: 1,
        dropout: 0.1,
        optimizer: adafactor.into(),
        total_steps: STEPS,
        ..TrainerOptions::default()
    }
}

/// Runs to the end, or until it has saved `saves` times, from the state of the output directory. Saves after every step and prints that.
fn run(output: &Path, saves: u64) {
    let mut lock = RunLock::acquire(output).unwrap();
    lock.own(&["checkpoints"], &trainer::checkpoint::OWN_FILES).unwrap();
    let directory = output.join("checkpoints");
    let mut trainer = match Checkpoints::newest_valid(&directory).unwrap() {
        Some(found) => Trainer::resume(&found, options(), DType::F32, &device()).unwrap(),
        None => {
            let config = Config {
                vocab_size: 60,
                d_model: 16,
                d_kv: 8,
                d_ff: 32,
                num_layers: 2,
                num_decoder_layers: 2,
                num_heads: 2,
                ..Config::default()
            };
            Trainer::new(T5::init(&config, 9, DType::F32, &device()).unwrap(), options()).unwrap()
        }
    };
    let mut checkpoints = Checkpoints::new(&directory, 2, 0);
    let last = trainer.step_count().saturating_add(saves);
    while !trainer.is_done() {
        let n = trainer.step_count() as u32;
        let list =
            |i: u32| -> Vec<u32> { (0..(n + i) % 5).map(|j| 2 + (n * 11 + i * 7 + j) % 58).chain([1]).collect() };
        let (sources, targets): (Vec<_>, Vec<_>) = (0..6).map(|i| (list(i), list(i + 3))).unzip();
        let plan = StepPlan {
            levers: Levers {
                micro_batch_samples: 4,
                recompute_blocks: 0,
                loss_chunk_rows: 16,
                layer_major: None,
                ..Levers::default()
            },
            longest: None,
        };
        trainer.step(&Batch { sources: &sources, targets: &targets }, &plan, &|| false).unwrap();
        checkpoints.save(&trainer, &json!({ "sample": trainer.step_count() * 6 }), None, &|| false).unwrap();
        println!("saved {}", trainer.step_count());
        if trainer.step_count() == last {
            // Nothing is written to this pipe: the process at its other end kills this one.
            let _ = std::io::stdin().read(&mut [0]);
        }
    }
    export_model(trainer.model(), &output.join("model"), None).unwrap();
}

#[test]
fn a_run_killed_at_any_moment_and_resumed_ends_with_the_same_bytes() {
    if let Some(output) = std::env::var_os(OUTPUT) {
        let saves = std::env::var(SAVES).unwrap().parse().unwrap();
        return run(output.as_ref(), saves);
    }
    let directory = tempfile::tempdir().unwrap();
    let (straight, killed) = (directory.path().join("straight"), directory.path().join("killed"));
    run(&straight, u64::MAX);

    let mut saved = 0;
    let mut lives = 0;
    while !killed.join("model").exists() {
        lives += 1;
        let mut left = 1 + lives % 4;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "a_run_killed_at_any_moment_and_resumed_ends_with_the_same_bytes"])
            .env(OUTPUT, &killed)
            // However late the process is killed, it makes one step more than was waited for.
            .env(SAVES, (left + 1).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let reports = BufReader::new(child.stdout.take().unwrap()).lines();
        for step in
            reports.map_while(Result::ok).filter_map(|line| Some(line.split_once("saved ")?.1.parse::<u64>().unwrap()))
        {
            assert!(step > saved, "step {step} was made again though {saved} had been reported saved");
            saved = step;
            left -= 1;
            if left == 0 {
                // The child is somewhere in its next step or save.
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        let found = Checkpoints::newest_valid(&killed.join("checkpoints")).unwrap().unwrap();
        assert!(found.state.step >= saved, "{} is older than the last one reported saved, {saved}", found.state.step);
        assert!(found.notes.is_empty(), "{:?}", found.notes);
        saved = found.state.step;
        assert!(lives < 100, "the run never ends");
    }
    assert!(lives > 3, "the run was never killed");
    let bytes = |output: &Path| fs::read(output.join("model/model.safetensors")).unwrap();
    assert!(bytes(&killed) == bytes(&straight));
}
