use candle_core::DType;
use memory_policy::{Budgets, Bytes, DeviceMemory, MemorySnapshot};
use t5::{AnswerShape, StoredWeights};
use trainer::TrainerOptions;

use super::*;
use crate::job::{Inference, Training, Wanted};
use crate::processes::Processes;
use crate::{Costs, Feed, LEVERS, Pins, Prices, Value, Values, budget_of, costs};

/// A host of 8 GiB with a card of 6.
fn machine() -> MemorySnapshot {
    let card = DeviceMemory { name: "a card".into(), total: Bytes::gib(6), free: Bytes::gib(6), ..Default::default() };
    let [total, available] = [16, 8].map(Bytes::gib);
    MemorySnapshot { total, available, rss: Bytes::mib(30), device: Some(card), ..Default::default() }
}

/// The choices of training t5-small on a device, where a run may write as much as it likes.
fn training(model: &t5::Config, pins: &Pins, processes: Processes) -> Result<Costs> {
    let options = TrainerOptions { total_steps: 10, ..TrainerOptions::default() };
    let training = Training {
        options: &options,
        disk_writes: 1 << 60,
        evaluation: None,
        wanted: Wanted::All,
        base: None,
        processes,
    };
    let job = Job {
        model,
        work: Work::Training(training),
        samples: 8,
        longest: (64, 64),
        place: Place::Device,
        budgets: Budgets { process: budget_of(None), device: budget_of(None) },
        pins,
        feed: Feed::Given,
        process_note: "",
        prices: Prices::vectors(),
    };
    costs(&job, &machine())
}

/// The plan of t5-base over 64 samples of 512 + 512 tokens in bf16, on a card of `gib` GiB. It has not been opened, and other programs
/// hold 300 MiB of it.
fn on_a_card(gib: u64, prices: Prices) -> crate::Plan {
    let model = t5::Config::preset("t5-base").expect("a preset");
    let options = TrainerOptions { precision: trainer::Precision::Bf16, total_steps: 10, ..TrainerOptions::default() };
    let training = Training {
        options: &options,
        disk_writes: 1 << 60,
        evaluation: None,
        wanted: Wanted::Undominated(None),
        base: None,
        processes: Processes::default(),
    };
    let pins = Pins::default();
    let job = Job {
        model: &model,
        work: Work::Training(training),
        samples: 64,
        longest: (512, 512),
        place: Place::Device,
        budgets: Budgets { process: budget_of(Some(8 << 30)), device: budget_of(Some((gib << 30) - (300 << 20))) },
        pins: &pins,
        feed: Feed::Given,
        process_note: "",
        prices,
    };
    let free = Bytes(gib << 30).saturating_sub(Bytes::mib(300));
    let card = DeviceMemory { name: "a card".into(), total: Bytes::gib(gib), free, ..Default::default() };
    let [total, available] = [64, 48].map(Bytes::gib);
    let now = MemorySnapshot { total, available, rss: Bytes::mib(30), device: Some(card), ..Default::default() };
    crate::plan(&job, &now).unwrap_or_else(|error| panic!("{gib} GiB: {error}")).plan
}

#[test]
fn larger_cards_are_faster_and_use_their_memory() {
    let plans = [4, 6, 12, 20].map(|gib| (gib, on_a_card(gib, Prices::card())));
    for (gib, plan) in &plans {
        assert!(plan.predicted_device_peak < Bytes(gib << 30).saturating_sub(Bytes::mib(300)), "{}", plan.bill);
        // The two largest cards hold all that makes a step faster.
        assert!(*gib >= 12 || plan.predicted_device_peak > Bytes::gib(*gib).percent(80), "{}", plan.bill);
    }
    for (before, after) in plans.iter().zip(&plans[1..]) {
        let is_faster = after.1.relative_time < before.1.relative_time;
        assert!(
            is_faster || before.0 >= 12 && after.1.relative_time <= before.1.relative_time,
            "{}\n{}",
            before.1.bill,
            after.1.bill
        );
    }
    let samples = plans.each_ref().map(|(_, plan)| plan.step.levers.micro_batch_samples);
    // The smallest card keeps its micro-batches large by recomputing blocks.
    assert!(samples.iter().all(|&samples| samples >= 8), "{samples:?}");
}

#[test]
fn a_device_has_rows_for_its_context_and_its_pool_and_makes_its_masks_itself() {
    let plan = on_a_card(12, Prices::card());
    let device = plan.bill.device.as_ref().expect("a device's rows");
    let of = |rows: &[CostRow], name: &memory_policy::Name| -> CostRow {
        rows.iter().find(|row| row.name == *name).cloned().unwrap_or_else(|| panic!("{name}\n{}", plan.bill))
    };
    assert!(of(&device.rows, &CONTEXT).note.starts_with("assumed"));
    assert!(of(&device.rows, &POOL).bytes > device.predicted_peak.percent(2));
    assert!(plan.bill.rows.iter().all(|row| row.name != STAGING), "{}", plan.bill);
    assert_eq!(of(&device.rows, &crate::names::PACKED).bytes, Bytes::ZERO, "the processor alone packs operands");

    let open = DeviceMemory { used: Bytes::mib(500), ..machine().device.expect("a card") };
    let row = context(Place::Device, &MemorySnapshot { device: Some(open), ..machine() }).expect("a row");
    assert_eq!((row.bytes, row.place), (Bytes::mib(500), Place::Device));
    assert!(row.note.starts_with("measured"));
    assert_eq!(context(Place::Host, &machine()), None);
}

#[test]
fn the_processor_does_not_price_a_step_of_a_card() {
    for dtype in [DType::F32, DType::BF16] {
        assert_eq!(Prices::at(Place::Device, dtype), Prices::card());
        assert_eq!(Prices::at(Place::Host, dtype), Prices::of_units(dtype));
    }
    assert!(Prices::card().are_sound() && Prices::card().enough_tokens > Prices::vectors().enough_tokens);
}

fn small() -> t5::Config {
    t5::Config::preset("t5-small").expect("a preset")
}

#[track_caller]
fn refusal(offered: Result<Costs>) -> String {
    match offered {
        Ok(offered) => panic!("{} choices are offered", offered.steps.len()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn no_choice_on_a_device_has_a_file_in_it() {
    let offered = training(&small(), &Pins::default(), Processes::default()).expect("there are choices");
    assert!(offered.steps.len() > 100);
    let with_files = offered.steps.iter().find(|choice| choice.what.levers.uses_files());
    assert_eq!(with_files.map(|choice| choice.what), None);
}

#[test]
fn every_value_of_every_lever_is_offered_on_a_device_or_refused_by_its_names() {
    for lever in LEVERS {
        let values = match lever.values {
            Values::Count(least, _) => vec![Value::Count(least)],
            Values::Blocks(_) => vec![Value::Count(0), Value::Count(1)],
            Values::Words(words) => words.iter().map(|word| Value::Word(word)).collect(),
        };
        for value in values {
            let pins = Pins::default().with(lever.name, value);
            match training(&small(), &pins, Processes::default()) {
                Ok(offered) => {
                    assert!(lever.works_at(Place::Device, value));
                    assert!(offered.steps.iter().all(|choice| !choice.what.levers.uses_files()), "{}", lever.name);
                }
                Err(error) => {
                    assert!(!lever.works_at(Place::Device, value));
                    let text = error.to_string();
                    assert!(text.contains(&format!("memory.{} = ", lever.name)) && text.contains("--"), "{text}");
                }
            }
        }
    }
    let refused = Pins::default().with("activation_offload", Value::Word("disk"));
    let text = refusal(training(&small(), &refused, Processes::default()));
    let expected = "`memory.activation_offload = \"disk\"` (`bench --offload`) works on the CPU alone, and tensors are on a device";
    assert_eq!(text, expected);
}

#[test]
fn a_base_in_codes_and_several_processes_are_refused_on_a_device() {
    let several = Processes { buffers: 1 << 20, ..Processes::default() };
    let text = refusal(training(&small(), &Pins::default(), several));
    assert!(text.starts_with("training by several processes"), "{text}");
    let coded = t5::Config { base_precision: Some(t5::Precision::Int8), ..small() };
    let coded = coded.with_adapter(t5::Lora::default()).expect("an adapter");
    let text = refusal(training(&coded, &Pins::default(), Processes::default()));
    assert!(text.contains("`model.base_precision`"), "{text}");
}

#[test]
fn inference_on_a_device_bills_the_device_and_leaves_no_weights_in_files() {
    let stored = StoredWeights { is_bf16: false, has_duplicates: false, copied_bytes: [0; 2], copying_bytes: [0; 2] };
    let model = small();
    let planned = |pins: &Pins| {
        let inference = Inference {
            activations: DType::F32,
            parameters: DType::F32,
            stored: Some(stored),
            answer: AnswerShape::greedy(32),
            has_targets: true,
            rows: None,
            beside: Vec::new(),
        };
        let budgets = Budgets { process: budget_of(Some(1 << 30)), device: budget_of(None) };
        let job = Job::of_inference(&model, inference, 8, (64, 64), (budgets, pins));
        crate::plan(&Job { place: Place::Device, ..job }, &machine()).map(|planned| planned.plan)
    };
    let plan = planned(&Pins::default()).expect("it fits");
    assert!(!plan.step.levers.uses_files());
    // The parameters of t5-small in f32.
    assert!(plan.predicted_device_peak > Bytes(60_506_624 * 4), "{}", plan.bill);
    assert!(plan.predicted_peak < Bytes::mib(100), "{}", plan.bill);
    let refused = planned(&Pins::default().with("weight_offload", Value::Word("disk"))).unwrap_err();
    assert!(refused.to_string().contains("memory.weight_offload"), "{refused}");
}
