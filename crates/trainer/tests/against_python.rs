//! The trainer compared with its references: torch's and transformers' schedules, transformers' Adafactor, and
//! whole training steps. The goldens come from `scripts/make_goldens.py`.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use serde_json::Value;
use t5::safetensors::Reader;
use t5::{Parameter, Part, T5};
use t5_ops::SquareSums;
use trainer::adafactor::AdafactorOptions;
use trainer::adamw::{AdamwOptions, StatePrecision};
use trainer::schedule::{DEFAULT_FINAL_DIV_FACTOR, DEFAULT_PCT_START, Schedule, ScheduleKind};
use trainer::{Batch, Levers, Optimizer, OptimizerOptions, StepOutcome, StepPlan, Trainer, TrainerOptions};

use self::device::device;

fn goldens(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(path)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn counts(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

fn schedule(golden: &Value) -> Schedule {
    let kind =
        match golden["name"].as_str().filter(|_| golden["schedule"].is_null()).or(golden["schedule"].as_str()).unwrap()
        {
            "constant" => ScheduleKind::Constant,
            "linear" => ScheduleKind::Linear,
            "cosine" => ScheduleKind::Cosine,
            "inverse-sqrt" => ScheduleKind::InverseSqrt,
            "one-cycle" => ScheduleKind::OneCycle {
                div_factor: golden["div_factor"].as_f64().unwrap(),
                pct_start: DEFAULT_PCT_START,
                final_div_factor: DEFAULT_FINAL_DIV_FACTOR,
            },
            other => panic!("schedule {other}"),
        };
    Schedule { kind, warmup_steps: golden["warmup_steps"].as_u64() }
}

#[test]
fn schedules_are_those_of_torch_and_transformers() {
    let goldens = json(&goldens("schedules/schedules.json"));
    for golden in goldens.as_array().unwrap() {
        let total_steps = golden["total_steps"].as_u64().unwrap();
        // The goldens give one-cycle's peak; the schedule is relative to the start of the cycle.
        let rate = golden["peak"].as_f64().unwrap() / golden["div_factor"].as_f64().unwrap_or(1.0);
        for (step, expected) in floats(&golden["learning_rates"]).into_iter().enumerate() {
            let got = rate * schedule(golden).factor(step as u64, total_steps);
            let scale = golden["peak"].as_f64().unwrap();
            assert!(
                (got - expected).abs() <= 1e-12 * scale,
                "{}, step {step}: {got}, expected {expected}",
                golden["name"]
            );
        }
    }
}

fn adafactor_options(golden: &Value, learning_rate: Option<f64>) -> AdafactorOptions {
    let default = AdafactorOptions::default();
    let number = |name: &str, default: f64| golden[name].as_f64().unwrap_or(default);
    let flag = |name: &str, default: bool| golden[name].as_bool().unwrap_or(default);
    AdafactorOptions {
        learning_rate,
        eps1: number("eps1", default.eps1),
        eps2: number("eps2", default.eps2),
        clip_threshold: number("clip_threshold", default.clip_threshold),
        decay_rate: number("decay_rate", default.decay_rate),
        beta1: golden["beta1"].as_f64(),
        weight_decay: number("weight_decay", default.weight_decay),
        scale_parameter: flag("scale_parameter", default.scale_parameter),
        relative_step: flag("relative_step", default.relative_step),
        warmup_init: flag("warmup_init", default.warmup_init),
    }
}

/// Every value within `tolerance` of the tensor's largest.
fn tensors_close(got: &Tensor, expected: &Tensor, tolerance: f32, place: &str) {
    assert_eq!(got.dims(), expected.dims(), "{place}");
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (got, expected) = (values(got), values(expected));
    let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert!(
            (got - expected).abs() <= tolerance * largest,
            "{place}[{i}]: {got}, expected {expected} (largest {largest})"
        );
    }
}

#[test]
fn adafactor_is_that_of_transformers_with_every_option() {
    let golden = json(&goldens("adafactor/adafactor.json"));
    let tensors = Reader::open(&goldens("adafactor/adafactor.safetensors")).unwrap();
    let read = |name: &str| tensors.read(name, DType::F32, &device()).unwrap();
    let names: Vec<&String> = golden["parameters"].as_object().unwrap().keys().collect();
    for (case, options) in golden["cases"].as_object().unwrap() {
        let rates: Vec<Option<f64>> = options["learning_rates"].as_array().unwrap().iter().map(Value::as_f64).collect();
        let options = adafactor_options(options, rates[0]);
        let parameters: Vec<Parameter> = names
            .iter()
            .map(|name| Parameter {
                name: (*name).clone(),
                tensor: read(&format!("initial.{name}")),
                part: Part::Shared,
                quantisation: None,
            })
            .collect();
        let gradients: Vec<Tensor> = names.iter().map(|name| read(&format!("gradient.{name}"))).collect();
        let mut adafactor = Optimizer::new(options, &parameters, &vec![true; names.len()]).unwrap();
        for (step, rate) in rates.into_iter().enumerate() {
            let now: Vec<Tensor> = gradients.iter().map(|all| all.get(step).unwrap().contiguous().unwrap()).collect();
            let rate = rate
                .unwrap_or_else(|| OptimizerOptions::from(options).resolved_learning_rate(adafactor.updates(), 1.0));
            let sums: Vec<SquareSums> = now.iter().map(|gradient| SquareSums::compute(gradient).unwrap()).collect();
            for (index, (gradient, sums)) in now.iter().zip(&sums).enumerate() {
                adafactor.update_one(index, &parameters[index].tensor, gradient, sums, rate, 1.0).unwrap();
            }
            adafactor.finish_update();
            if counts(&golden["steps_kept"]).contains(&(step as u64 + 1)) {
                for parameter in &parameters {
                    let place = format!("{case}.step_{}.{}", step + 1, parameter.name);
                    tensors_close(&parameter.tensor, &read(&place), 1e-5, &place);
                }
            }
        }
        let kinds =
            [("exp_avg_sq_row", "row"), ("exp_avg_sq_col", "column"), ("exp_avg_sq", "full"), ("exp_avg", "first")];
        for (name, tensor) in adafactor.named_state(&parameters) {
            let (parameter, kind) = name.split_once('.').unwrap();
            let (_, kind) = kinds.iter().find(|(ours, _)| *ours == kind).unwrap();
            let place = format!("{case}.{kind}.{parameter}");
            tensors_close(tensor, &read(&place), 1e-5, &place);
        }
    }
}

#[test]
fn adamw_is_that_of_torch_over_fifty_steps() {
    let golden = json(&goldens("adamw/adamw.json"));
    let tensors = Reader::open(&goldens("adamw/adamw.safetensors")).unwrap();
    let read = |name: &str| tensors.read(name, DType::F32, &device()).unwrap();
    let names: Vec<&String> = golden["parameters"].as_object().unwrap().keys().collect();
    for (case, options) in golden["cases"].as_object().unwrap() {
        let rates = floats(&options["learning_rates"]);
        let number = |name: &str| options[name].as_f64().unwrap();
        let options = AdamwOptions {
            learning_rate: rates[0],
            beta1: number("beta1"),
            beta2: number("beta2"),
            eps: number("eps"),
            weight_decay: number("weight_decay"),
            ..AdamwOptions::default()
        };
        let parameter = |name: &&String| {
            let tensor = read(&format!("initial.{name}"));
            Parameter { name: (*name).clone(), tensor, part: Part::Shared, quantisation: None }
        };
        let parameters: Vec<Parameter> = names.iter().map(parameter).collect();
        let gradients: Vec<Tensor> = names.iter().map(|name| read(&format!("gradient.{name}"))).collect();
        let mut adamw = Optimizer::new(options, &parameters, &vec![true; names.len()]).unwrap();
        adamw.move_moments(None).unwrap();
        for (step, rate) in rates.into_iter().enumerate() {
            for (index, all) in gradients.iter().enumerate() {
                let gradient = all.get(step).unwrap().contiguous().unwrap();
                let sums = SquareSums::compute(&gradient).unwrap();
                adamw.update_one(index, &parameters[index].tensor, &gradient, &sums, rate, 1.0).unwrap();
            }
            adamw.finish_update();
            if counts(&golden["steps_kept"]).contains(&(step as u64 + 1)) {
                for parameter in &parameters {
                    let place = format!("{case}.step_{}.{}", step + 1, parameter.name);
                    tensors_close(&parameter.tensor, &read(&place), 1e-6, &place);
                }
            }
        }
        for (name, tensor) in adamw.named_state(&parameters) {
            let (parameter, moment) = name.split_once('.').unwrap();
            let place = format!("{case}.{moment}.{parameter}");
            tensors_close(tensor, &read(&place), 1e-6, &place);
        }
    }
}

#[test]
fn whole_steps_are_those_of_transformers() {
    for case in ["fixed_rate", "one_cycle_beta1_decay", "relative_step"] {
        let directory = goldens("train").join(case);
        let golden = json(&directory.join("golden.json"));
        let steps = golden["steps"].as_array().unwrap();
        let schedule = if golden["schedule"].is_null() { Schedule::CONSTANT } else { schedule(&golden["schedule"]) };
        let start = golden["schedule"]["div_factor"].as_f64().unwrap_or(1.0);
        let options = TrainerOptions {
            dropout: 0.0,
            grad_clip_norm: golden["grad_clip_norm"].as_f64().unwrap(),
            optimizer: adafactor_options(
                &golden["adafactor"],
                golden["adafactor"]["learning_rate"].as_f64().map(|rate| rate / start),
            )
            .into(),
            schedule,
            total_steps: steps.len() as u64,
            ..TrainerOptions::default()
        };
        let mut trainer = Trainer::new(T5::load(&directory, DType::F32, &device()).unwrap(), options).unwrap();
        for (i, expected) in steps.iter().enumerate() {
            let ids = |name: &str| -> Vec<Vec<u32>> {
                let lists = expected[name].as_array().unwrap().iter();
                lists.map(|ids| counts(ids).into_iter().map(|id| id as u32).collect()).collect()
            };
            let (sources, targets) = (ids("sources"), ids("targets"));
            let plan = StepPlan {
                levers: Levers {
                    micro_batch_samples: 1 + i % 4,
                    recompute_blocks: i % 3,
                    loss_chunk_rows: 3 + i,
                    layer_major: None,
                    ..Levers::default()
                },
                longest: None,
            };
            let outcome = trainer.step(&Batch { sources: &sources, targets: &targets }, &plan, &|| false).unwrap();
            let StepOutcome::Done(stats) = outcome else { panic!("{case}, step {i}: {outcome:?}") };
            let place = format!("{case}, step {}", i + 1);
            close(stats.loss, expected["loss"].as_f64().unwrap(), 1e-5, &place);
            close(stats.grad_norm, expected["grad_norm"].as_f64().unwrap(), 1e-4, &place);
            if let Some(rate) = expected["learning_rate"].as_f64() {
                close(stats.lr, rate, 1e-9, &place);
            }
        }
        let tensors = Reader::open(&directory.join("golden.safetensors")).unwrap();
        for parameter in trainer.model().parameters() {
            let expected = tensors.read(&format!("final.{}", parameter.name), DType::F32, &device()).unwrap();
            tensors_close(&parameter.tensor, &expected, 1e-5, &format!("{case}, {}", parameter.name));
        }
    }
}

/// Within a relative tolerance, or both (nearly) nothing.
fn close(got: f64, expected: f64, tolerance: f64, place: &str) {
    let error = (got - expected).abs();
    assert!(error <= tolerance * expected.abs().max(1e-3), "{place}: {got}, expected {expected}");
}

#[test]
fn adamw_with_int8_state_is_that_of_bitsandbytes() {
    let tensors = Reader::open(&goldens("adamw8bit/adamw8bit.safetensors")).unwrap();
    let read = |name: &str, dtype| tensors.read(name, dtype, &device()).unwrap();
    let names = ["matrix", "small"];
    let parameters = names.map(|name| Parameter {
        name: name.to_owned(),
        tensor: read(&format!("initial.{name}"), DType::F32),
        part: Part::Shared,
        quantisation: None,
    });
    let options = AdamwOptions {
        learning_rate: 1e-2,
        beta2: 0.99,
        weight_decay: 0.1,
        state_precision: StatePrecision::Int8,
        ..AdamwOptions::default()
    };
    let mut adamw = Optimizer::new(options, &parameters, &[true; 2]).unwrap();
    adamw.move_moments(None).unwrap();
    for step in 1..=12 {
        for (index, parameter) in parameters.iter().enumerate() {
            let gradient = read(&format!("gradient.{}", parameter.name), DType::F32);
            let mut values: Vec<f32> = gradient.flatten_all().unwrap().to_vec1().unwrap();
            let count = values.len();
            values.rotate_right(37 * step % count);
            values.iter_mut().for_each(|value| *value *= 2f32.powi(step as i32 % 4 - 2));
            let gradient = Tensor::from_vec(values, gradient.shape(), &device()).unwrap();
            let sums = SquareSums::compute(&gradient).unwrap();
            adamw.update_one(index, &parameter.tensor, &gradient, &sums, 1e-2, 1.0).unwrap();
        }
        adamw.finish_update();
        if ![1, 12].contains(&step) {
            continue;
        }
        for parameter in &parameters {
            let place = format!("step_{step}.{}", parameter.name);
            // torch multiplies and adds in one rounding. Where a moment is between two numbers of a map, it takes the other one.
            tensors_close(&parameter.tensor, &read(&place, DType::F32), if step == 1 { 1e-6 } else { 2e-3 }, &place);
        }
        for (name, tensor) in adamw.named_state(&parameters).filter(|(name, _)| name.starts_with("matrix")) {
            let place = name.replace("matrix", &format!("step_{step}"));
            let expected = read(&place, tensor.dtype());
            if tensor.dtype() == DType::F32 {
                tensors_close(tensor, &expected, 1e-4, &place);
                continue;
            }
            let codes = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<u8>().unwrap();
            let others =
                codes(tensor).into_iter().zip(codes(&expected)).filter(|(got, expected)| got != expected).count();
            assert!(others <= 4, "{place}: {others} codes of {}", tensor.elem_count());
        }
    }
    // The library's look-up on the CPU turns small second moments into zero, and a few steps of it are a thousand times too long.
    let differences = (&parameters[0].tensor - read("library.matrix", DType::F32)).unwrap().abs().unwrap();
    let mut differences: Vec<f32> = differences.flatten_all().unwrap().to_vec1().unwrap();
    differences.sort_by(f32::total_cmp);
    assert!(differences[differences.len() / 2] < 3e-3, "{}", differences[differences.len() / 2]);
}
