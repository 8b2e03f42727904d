use candle_core::DType;
use memory_policy::{Budgets, Bytes, DeviceMemory, MemorySnapshot};
use t5::{AnswerShape, StoredWeights};
use trainer::TrainerOptions;

use super::*;
use crate::job::{Inference, Training, Wanted};
use crate::processes::Processes;
use crate::{Costs, LEVERS, Pins, Prices, RowCounts, Value, Values, budget_of, costs, testing};

/// A host of 8 GiB with a card of 6.
fn machine() -> MemorySnapshot {
    let card = DeviceMemory { name: "a card".into(), total: Bytes::gib(6), free: Bytes::gib(6), ..Default::default() };
    let [total, available] = [16, 8].map(Bytes::gib);
    MemorySnapshot { total, available, rss: Bytes::mib(30), device: Some(card), ..Default::default() }
}

/// The choices of training t5-small on a device, in a run that may write any number of bytes.
fn training(model: &t5::Config, pins: &Pins, processes: Processes) -> Result<Costs> {
    training_at(MemorySpace::Device, model, pins, processes)
}

fn training_at(place: MemorySpace, model: &t5::Config, pins: &Pins, processes: Processes) -> Result<Costs> {
    let options = TrainerOptions { total_steps: 10, ..TrainerOptions::default() };
    let training = Training { disk_writes: 1 << 60, wanted: Wanted::All, processes, ..testing::training(&options) };
    let budgets = Budgets { process: budget_of(None), device: budget_of(None) };
    let job = Job { place, budgets, ..testing::job(model, training, pins) };
    costs(&job, &machine())
}

/// The plan of t5-base over 64 samples of 512 + 512 tokens in bf16, on a card of `gib` GiB. The card has not been opened, and other
/// programs hold 300 MiB of it.
fn on_a_card(gib: u64, prices: Prices) -> crate::Plan {
    let model = t5::Config::preset("t5-base").expect("a preset");
    let options = TrainerOptions { precision: trainer::Precision::Bf16, total_steps: 10, ..TrainerOptions::default() };
    on_a_machine((gib, 8), &model, &options, (64, (512, 512)), prices)
        .unwrap_or_else(|error| panic!("{gib} GiB: {error}"))
}

/// The plan of training with these budgets of the card and of the process, in GiB.
fn on_a_machine(
    (gib, host_gib): (u64, u64),
    model: &t5::Config,
    options: &TrainerOptions,
    (samples, longest): (usize, (usize, usize)),
    prices: Prices,
) -> Result<crate::Plan> {
    let training = Training {
        // A disk with a small allowance for writes, or, beside an adapter, one that can take the activations.
        disk_writes: if model.lora.is_some() { 1 << 42 } else { 1 << 30 },
        base: model.lora.as_ref().map(|_| STORED),
        ..testing::training(options)
    };
    let pins = Pins::default();
    let host = host_gib << 30;
    let budgets = Budgets { process: budget_of(Some(host)), device: budget_of(Some((gib << 30) - (300 << 20))) };
    let job =
        Job { samples, longest, place: MemorySpace::Device, budgets, prices, ..testing::job(model, training, &pins) };
    let free = Bytes(gib << 30).saturating_sub(Bytes::mib(300));
    let card = DeviceMemory { name: "a card".into(), total: Bytes::gib(gib), free, ..Default::default() };
    let [total, available] = [64, 48].map(Bytes::gib);
    let now = MemorySnapshot { total, available, rss: Bytes::mib(30), device: Some(card), ..Default::default() };
    Ok(crate::plan(&job, &now)?.plan)
}

/// A base in bf16 as it was published.
const STORED: StoredWeights = StoredWeights { is_bf16: true, ..testing::STORED };

/// Bytes of the row "weight copies".
fn copies_of(plan: &crate::Plan) -> u64 {
    let rows = plan.bill.device.iter().flat_map(|bill| &bill.rows);
    rows.filter(|row| row.name == crate::names::WEIGHT_COPIES).map(|row| row.bytes.0).sum()
}

#[test]
fn an_adapter_is_held_in_bf16_too_beside_a_base_that_no_product_casts() {
    let model = t5::Config::preset("t5-base").expect("a preset");
    let adapted = model.with_adapter(t5::Lora::default()).expect("an adapter");
    let matrices = t5::ParameterSpec::all(&adapted).into_iter().filter(t5::ParameterSpec::is_of_adapter);
    let bytes = 2 * matrices.map(|spec| spec.elements()).sum::<u64>();
    let options = TrainerOptions {
        precision: trainer::Precision::Bf16,
        master_weights: trainer::MasterWeights::StochasticRounding,
        optimizer: trainer::adamw::AdamwOptions::default().into(),
        total_steps: 10,
        ..TrainerOptions::default()
    };
    let on_card = |options| on_a_machine((20, 8), &adapted, options, (4, (64, 64)), Prices::card()).expect("it fits");
    let plan = on_card(&options);
    assert!(plan.step.levers.weight_copies && copies_of(&plan) == bytes && bytes > 0, "{}", plan.bill);
    let in_f32 = on_card(&TrainerOptions { precision: trainer::Precision::F32, ..options.clone() });
    assert!(!in_f32.step.levers.weight_copies && copies_of(&in_f32) == 0, "{}", in_f32.bill);
}

#[test]
fn weights_are_held_in_bf16_too_where_casts_are_a_part_of_a_step() {
    let model = t5::Config::preset("t5-base").expect("a preset");
    let copied = t5::ParameterSpec::all(&model).into_iter().filter(|spec| spec.takes_copy(DType::F32, &model));
    let bytes = 2 * copied.map(|spec| spec.elements()).sum::<u64>();
    let options = TrainerOptions { precision: trainer::Precision::Bf16, total_steps: 10, ..TrainerOptions::default() };
    let plan = |weight_cast| {
        let prices = Prices { weight_cast, ..Prices::card() };
        on_a_machine((20, 8), &model, &options, (4, (64, 64)), prices).expect("it fits")
    };
    let copies = plan(Prices::card().weight_cast);
    assert!(copies.step.levers.weight_copies && copies_of(&copies) == bytes, "{}", copies.bill);
    let casts = plan(0.0);
    assert!(!casts.step.levers.weight_copies && copies_of(&casts) == 0, "{}", casts.bill);
    assert!(copies.relative_time < casts.relative_time, "{} {}", copies.relative_time, casts.relative_time);
    // With tens of thousands of tokens, casts are a few thousandths of the time.
    let busy = on_a_card(40, Prices::card());
    assert!(!busy.step.levers.weight_copies, "{}", busy.bill);
}

#[test]
fn each_card_beside_each_host_trains_what_it_can_and_uses_its_memory() {
    let bf16 = TrainerOptions {
        precision: trainer::Precision::Bf16,
        master_weights: trainer::MasterWeights::StochasticRounding,
        total_steps: 1000,
        ..TrainerOptions::default()
    };
    let [base, xl] = ["t5-base", "t5-3b"].map(|name| t5::Config::preset(name).expect("a preset"));
    let mut times = Vec::new();
    for (model, least_host) in [(&base, 8), (&xl, 16)] {
        for gib in [4, 6, 12, 20] {
            for host in [8, 16, 32] {
                let planned = on_a_machine((gib, host), model, &bf16, (16, (256, 256)), Prices::card());
                // Weights and other tensors off the card need about 11 GiB of the larger model.
                let Ok(plan) = planned else {
                    assert!(host < least_host && gib < 12, "{gib} GiB beside {host}: {}", planned.unwrap_err());
                    continue;
                };
                let (device, budget) = (plan.predicted_device_peak, Bytes(gib << 30).saturating_sub(Bytes::mib(300)));
                assert!(device < budget && plan.predicted_peak < Bytes::gib(host), "{}", plan.bill);
                times.push((plan.relative_time, gib, host));
                // A card that is not full gains nothing.
                let more =
                    on_a_machine((gib + 8, host), model, &bf16, (16, (256, 256)), Prices::card()).expect("it fits");
                let is_filled = device > budget.percent(60) || more.relative_time >= 0.97 * plan.relative_time;
                assert!(is_filled, "{gib} GiB beside {host}: {}", plan.bill);
            }
        }
    }
    assert!(times.len() >= 20, "{times:?}");
}

#[test]
fn the_largest_models_train_on_the_smallest_cards() {
    let bf16 = TrainerOptions {
        precision: trainer::Precision::Bf16,
        master_weights: trainer::MasterWeights::StochasticRounding,
        total_steps: 1000,
        ..TrainerOptions::default()
    };
    let xl = t5::Config::preset("t5-3b").expect("a preset");
    let plan = on_a_machine((2, 16), &xl, &bf16, (16, (256, 64)), Prices::card()).expect("all weights in 2 GiB");
    assert!(plan.step.levers.has_weights_on_disk() && plan.step.levers.has_host_memory(), "{}", plan.bill);
    // The shape of flan-t5-xxl.
    let xxl = t5::Config { d_model: 4096, d_ff: 10_240, num_heads: 64, d_kv: 64, tie_word_embeddings: false, ..xl };
    let xxl = t5::Config { feed_forward_proj: "gated-gelu".into(), is_gated_act: true, ..xxl };
    let adapted = xxl.with_adapter(t5::Lora::default()).expect("an adapter");
    let options = TrainerOptions { optimizer: trainer::adamw::AdamwOptions::default().into(), ..bf16 };
    let plan = on_a_machine((2, 1), &adapted, &options, (16, (256, 64)), Prices::card()).expect("an adapter in 2 GiB");
    assert!(plan.step.levers.has_weights_on_disk() && plan.predicted_peak < Bytes::gib(1), "{}", plan.bill);
}

#[test]
fn larger_cards_are_faster_and_use_their_memory() {
    let plans = [4, 6, 12, 20].map(|gib| (gib, on_a_card(gib, Prices::card())));
    for (gib, plan) in &plans {
        assert!(plan.predicted_device_peak < Bytes(gib << 30).saturating_sub(Bytes::mib(300)), "{}", plan.bill);
        // The two largest cards hold all tensors that make a step faster. If copies are free, a card that is not full gains nothing.
        let is_filled = plan.predicted_device_peak > Bytes::gib(*gib).percent(80);
        let gains = || on_a_card(gib + 1, Prices::card()).relative_time < 0.97 * plan.relative_time;
        assert!(*gib >= 12 || is_filled || !gains(), "{}", plan.bill);
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

    // The pool has 32 MiB of the used memory.
    let (used, pool, pool_unit) = (Bytes::mib(532), Bytes::mib(32), Bytes::mib(2));
    let open = DeviceMemory { used, pool, pool_unit, ..machine().device.expect("a card") };
    let open = MemorySnapshot { device: Some(open), ..machine() };
    let row = context(MemorySpace::Device, false, &open).expect("a row");
    assert_eq!((row.bytes, row.place), (Bytes::mib(500), MemorySpace::Device));
    assert!(row.note.starts_with("measured"));
    let [assumed, measured] = [&machine(), &open].map(|now| pool_beside(Bytes::mib(100), now));
    assert_eq!([assumed.bytes, measured.bytes], [Bytes::mib(8), Bytes::mib(6)]);
    assert!(
        assumed.note.starts_with("assumed: 4 MiB of units") && measured.note.starts_with("measured: 2 MiB of units")
    );
    assert_eq!(context(MemorySpace::Host, true, &machine()), None);
    let [without, with] = [false, true].map(|has| context(MemorySpace::Device, has, &machine()).expect("a row").bytes);
    assert!(with > without, "NCCL has buffers of its own");
}

#[test]
fn the_processor_does_not_price_a_step_of_a_card() {
    for dtype in [DType::F32, DType::BF16] {
        assert_eq!(Prices::at(MemorySpace::Device, dtype), Prices::card());
        assert_eq!(Prices::at(MemorySpace::Host, dtype), Prices::of_units(dtype));
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
fn what_is_off_a_card_lies_in_files_or_is_billed_to_the_host() {
    let offered = training(&small(), &Pins::default(), Processes::default()).expect("there are choices");
    let of = |rows: &[CostRow], place: MemorySpace, name: &memory_policy::Name| -> u64 {
        let rows = rows.iter().filter(|row| row.place == place && row.name == *name);
        rows.map(|row| row.bytes.0).sum()
    };
    let (mut in_files, mut on_host) = (0, 0);
    for choice in &offered.steps {
        let levers = &choice.what.levers;
        let bytes = of(&choice.rows, MemorySpace::Host, &OFFLOADED_TO_HOST);
        assert_eq!(bytes > 0, levers.has_host_memory(), "{:?}", choice.what);
        in_files += u32::from(levers.uses_files());
        on_host += u32::from(levers.has_host_memory());
        if levers.has_weights_on_disk() {
            let there = of(&choice.rows, MemorySpace::Device, &crate::names::PARAMETERS);
            assert!(there < 70 << 20, "the table of the vocabulary is the largest part: {there} bytes");
            // The weights of t5-small in f32, except norms and tables of positions.
            assert!(!levers.has_host_memory() || bytes >= (60_506_624 - 32 * 512 - 2 * 32 * 8) * 4, "{bytes}");
        }
    }
    assert!(in_files > 100 && on_host == in_files, "{in_files} with files, {on_host} with the host's memory");
}

#[test]
fn copies_beside_what_is_computed_cost_memory_of_the_card_and_pinned_memory_and_save_time() {
    let model = small();
    let offered = |word| {
        let pins =
            Pins::default().with("copy_overlap", Value::Word(word)).with("accumulation", Value::Word("layer-major"));
        let off = ["activation_offload", "gradient_offload", "weight_offload"];
        let pins = off.into_iter().fold(pins, |pins, lever| pins.with(lever, Value::Word("disk")));
        let pins = pins.with("micro_batch_samples", Value::Count(4)).with("offload_to", Value::Word("host"));
        let pins = pins.with("recompute_blocks", Value::Count(0)).with("kept_gradient_blocks", Value::Count(0));
        training(&model, &pins.with("loss_chunk_rows", Value::Count(64)), Processes::default())
            .expect("there are choices")
            .steps
    };
    let [waits, beside] = ["none", "block"].map(offered);
    assert!(!waits.is_empty() && waits.len() == beside.len());
    let mut more = 0;
    for (waits, beside) in waits.iter().zip(&beside) {
        let of = |choice: &StepChoice, place: MemorySpace, name: Option<&memory_policy::Name>| -> u64 {
            let rows = choice.rows.iter().filter(|row| row.place == place && name.is_none_or(|name| row.name == *name));
            rows.map(|row| row.bytes.0).sum()
        };
        let [before, after] = [waits, beside].map(|choice| of(choice, MemorySpace::Device, None));
        assert!(after >= before, "{:?}", beside.what);
        more += u32::from(after > before);
        let [before, after] = [waits, beside].map(|choice| of(choice, MemorySpace::Host, Some(&STAGING)));
        assert_eq!(after - before, cuda_device::copies::STAGING_BYTES, "{:?}", beside.what);
        assert!(beside.relative_time <= waits.relative_time, "{:?}", beside.what);
    }
    assert!(more > 0, "no peak has one more block");
}

#[test]
fn a_lever_of_cards_is_refused_on_the_processor_by_its_names() {
    let pins = Pins::default().with("offload_to", Value::Word("host"));
    let expected = "`memory.offload_to = \"host\"` (`bench --offload-to`) is for GPUs, and tensors are on the CPU";
    assert_eq!(refusal(training_at(MemorySpace::Host, &small(), &pins, Processes::default())), expected);
}

#[test]
fn every_value_of_every_lever_is_offered_on_a_device() {
    for lever in LEVERS {
        let values = match lever.values {
            Values::Count(least, _) => vec![Value::Count(least)],
            Values::Blocks(_) => vec![Value::Count(0), Value::Count(1)],
            Values::Words(words) => words.iter().map(|word| Value::Word(word)).collect(),
        };
        for value in values {
            let pins = Pins::default().with(lever.name, value);
            let offered = training(&small(), &pins, Processes::default());
            let offered = offered.unwrap_or_else(|error| panic!("{} {value:?}: {error}", lever.name));
            assert!(
                lever.works_at(MemorySpace::Device, value) && !offered.steps.is_empty(),
                "{} {value:?}",
                lever.name
            );
        }
    }
}

#[test]
fn what_cards_of_several_processes_send_each_other_is_billed_in_the_memory_of_the_host() {
    let several = Processes { number: 2, buffers: 16 << 20, ..Processes::default() };
    let of = |processes| {
        let offered = training(&small(), &Pins::default(), processes).expect("there are choices");
        let row = offered.fixed.into_iter().find(|row| row.name == COMMUNICATION);
        row.map(|row| (row.place, row.bytes.0))
    };
    assert_eq!(of(several), Some((MemorySpace::Host, 16 << 20)));
    let by_nccl = Processes { buffers: 0, between_cards: Some(16 << 20), ..several };
    assert_eq!(of(by_nccl), Some((MemorySpace::Device, 16 << 20)));
    assert_eq!(of(Processes::default()), None);
    let least_pinned = |processes| {
        let offered = training(&small(), &Pins::default(), processes).expect("there are choices");
        let of = |choice: &StepChoice| choice.rows.iter().find(|row| row.name == STAGING).map_or(0, |row| row.bytes.0);
        offered.steps.iter().map(of).min()
    };
    assert_eq!(least_pinned(Processes::default()), Some(0));
    assert_eq!(least_pinned(several), Some(cuda_device::STAGING_BYTES));
}

#[test]
fn a_base_in_codes_takes_less_of_a_device() {
    let parameters = |base_precision| {
        let model = t5::Config { base_precision, ..small() }.with_adapter(t5::Lora::default()).expect("an adapter");
        let offered = training(&model, &Pins::default(), Processes::default()).expect("there are choices");
        let row = offered.steps[0].rows.iter().find(|row| row.name == crate::names::PARAMETERS);
        row.filter(|row| row.place == MemorySpace::Device).expect("parameters on the device").bytes.0
    };
    let [whole, int8, nf4] = [None, Some(t5::Precision::Int8), Some(t5::Precision::Nf4)].map(parameters);
    assert!(nf4 < int8 && int8 < whole, "{nf4} {int8} {whole}");
    // Values of the blocks. The 16.4 million values of the table stay in f32.
    let blocks = 44_040_192;
    assert!(whole - int8 > 2 * blocks && whole - nf4 > 3 * blocks, "{nf4} {int8} {whole}");
}

#[test]
fn inference_on_a_device_bills_the_device_and_leaves_weights_in_files_where_it_is_small() {
    let stored = testing::STORED;
    let model = small();
    let planned = |device: Option<u64>, pins: &Pins| {
        let inference = Inference {
            activations: DType::F32,
            parameters: DType::F32,
            stored: Some(stored),
            answer: AnswerShape::greedy(32),
            counts: RowCounts::ANY,
            has_targets: true,
            rows: None,
            prompts: crate::Reading::default(),
            beside: Vec::new(),
        };
        let budgets = Budgets { process: budget_of(Some(1 << 30)), device: budget_of(device) };
        let job = Job::of_inference(&model, inference, 8, (64, 64), (budgets, pins));
        crate::plan(&Job { place: MemorySpace::Device, ..job }, &machine()).map(|planned| planned.plan)
    };
    let plan = planned(None, &Pins::default()).expect("it fits");
    assert!(!plan.step.levers.uses_files());
    // The parameters of t5-small in f32 are on the device alone. The rest of the process depends on its threads.
    let parameters = Bytes(60_506_624 * 4);
    assert!(plan.predicted_device_peak > parameters && plan.predicted_peak < parameters, "{}", plan.bill);
    // The context alone is 416 MiB.
    let small = planned(Some(600 << 20), &Pins::default()).expect("it fits");
    assert!(small.step.levers.has_weights_on_disk() && small.predicted_device_peak < Bytes::mib(600), "{}", small.bill);
    assert!(small.relative_time > plan.relative_time);
}
