use memory_policy::{Budget, Budgets, Bytes, DeviceMemory, MemorySnapshot};
use trainer::TrainerOptions;

use super::*;
use crate::job::{Job, Wanted, Work};
use crate::lever::Pins;
use crate::{Network, Pace, Plan, Value, testing};

/// Half of a pass is the backward of its two blocks, and a fifth is the head.
fn arithmetic() -> Arithmetic {
    let block = BlockArithmetic { again: 0.0, heads: 0.0, backward: 25.0 };
    Arithmetic { blocks: vec![block; 2], head: 20.0, training: 100.0 }
}

#[track_caller]
fn check(levers: &Levers, micro_batches: usize, sent: &Sent, expected: f64) {
    let step = Computed { time: 1.0, arithmetic: &arithmetic(), levers, micro_batches };
    let exposed = step.exposed(sent, 0.01);
    assert!((exposed - expected).abs() < 1e-9, "{exposed} instead of {expected}");
}

fn by_layer(overlaps: bool) -> Levers {
    Levers { layer_major: Some(LayerMajor { overlaps, ..LayerMajor::default() }), ..Levers::default() }
}

/// Gradients of each of the two blocks, and the bytes sent at the end.
fn gradients(of_block: u64, exposed: u64) -> Sent {
    let block = BlockTraffic { gradients: of_block, sums: 1, ..BlockTraffic::default() };
    Sent { blocks: vec![block; 2], exposed, ..Sent::default() }
}

#[test]
fn gradients_of_a_block_are_hidden_behind_the_next_one_and_those_of_the_last_never() {
    check(&by_layer(false), 4, &gradients(15, 10), 0.4);
    // A block takes 0.25. The transfer of the first block's gradients ends before the second block does.
    check(&by_layer(true), 4, &gradients(15, 10), 0.15 + 0.1);
    // The first block's gradients take 0.35 longer than the second block.
    check(&by_layer(true), 4, &gradients(60, 10), 0.35 + 0.6 + 0.1);
    // Gradients of the head are complete early, and have the whole first block to overlap with.
    check(&by_layer(true), 4, &Sent { before: 20, ..gradients(0, 0) }, 0.0);
    check(&by_layer(true), 4, &Sent { before: 20, ..gradients(15, 0) }, 0.15);
    // A second pass sends the recomputed gradients again, within the same time of backward.
    let mut twice = gradients(10, 0);
    twice.blocks[1].sums = 2;
    check(&by_layer(true), 4, &twice, 0.1 + 0.1);
}

#[test]
fn micro_batch_by_micro_batch_the_last_one_alone_hides_gradients() {
    check(&Levers::default(), 1, &gradients(15, 0), 0.15);
    // In the last micro-batch a block takes 0.05. Transfers of 0.3 begin after the first of the two blocks.
    check(&Levers::default(), 5, &gradients(15, 0), 0.25);
    check(&Levers::default(), 5, &gradients(2, 0), 0.02);
}

#[test]
fn weights_come_while_the_block_before_is_worked_on_and_those_of_the_first_are_waited_for() {
    let block = BlockTraffic { weights: 10, gathers: 2, ..BlockTraffic::default() };
    let weights = Sent { blocks: vec![block; 2], head: 5, ..Sent::default() };
    check(&by_layer(true), 1, &weights, 0.1 + 0.1);
    // Forward of a block takes 0.15, backward 0.25.
    let block = BlockTraffic { weights: 30, ..block };
    let longer = Sent { blocks: vec![block; 2], head: 5, ..Sent::default() };
    check(&by_layer(true), 1, &longer, (0.3 + 0.15) + (0.3 + 0.05));
}

/// Calls `f` with the job of t5-small for one of two processes over a network of this rate.
fn with_job<T>(mib: u64, bits_per_second: f64, pins: &Pins, f: impl FnOnce(&Job<'_>, &MemorySnapshot) -> T) -> T {
    with_changed_job(mib, bits_per_second, pins, |_| {}, f)
}

fn with_changed_job<T>(
    mib: u64,
    bits_per_second: f64,
    pins: &Pins,
    change: impl FnOnce(&mut Job<'_>),
    f: impl FnOnce(&Job<'_>, &MemorySnapshot) -> T,
) -> T {
    let model = t5::Config::preset("t5-small").expect("a preset");
    let options = TrainerOptions { total_steps: 10, ..TrainerOptions::default() };
    let network = Network { bits_per_second };
    let processes = Processes { number: 2, buffers: 12 << 20, network, ..Processes::default() };
    let training = Training { wanted: Wanted::All, processes, ..testing::training(&options) };
    let mut job = Job {
        samples: 16,
        longest: (128, 128),
        budgets: Budget::Explicit(Bytes::mib(mib)).into(),
        ..testing::job(&model, training, pins)
    };
    change(&mut job);
    f(&job, &testing::machine())
}

fn planned(mib: u64, rate: f64, pins: &Pins) -> Plan {
    with_job(mib, rate, pins, |job, now| crate::plan(job, now).expect("it fits").plan)
}

fn pace(plan: &Plan, rate: f64) -> Pace {
    with_job(4096, rate, &Pins::default(), |job, now| crate::pace(job, now, plan, &[]).expect("a pace"))
}

#[test]
fn plans_follow_the_rate_of_the_network() {
    // Budgets at which plans differ: those of another processor are others.
    testing::state(testing::AVX2);
    let (fast_rate, slow_rate) = (1e10, 1e8);
    let (mut other_plans, mut fewer_bytes) = (0, 0);
    for mib in [460, 520, 660, 1000] {
        let [fast, slow] = [fast_rate, slow_rate].map(|rate| planned(mib, rate, &Pins::default()));
        assert!(slow.relative_time > fast.relative_time, "{mib} MiB");
        // Over the slow network, the plan made for it does not wait longer than the other plan would.
        let [of_fast, of_slow] = [&fast, &slow].map(|plan| pace(plan, slow_rate));
        let what = || format!("{mib} MiB: {:?} {of_fast:?} {:?} {of_slow:?}", fast.step.levers, slow.step.levers);
        assert!(of_slow.step_waited_seconds <= of_fast.step_waited_seconds, "{}", what());
        other_plans += usize::from(fast.step.levers != slow.step.levers);
        // If no transfer may overlap with computation, the plan with less traffic waits less.
        let waits = Pins::default().with("communication_overlap", Value::Word("none"));
        let [of_fast, of_slow] = [fast_rate, slow_rate].map(|rate| pace(&planned(mib, rate, &waits), slow_rate));
        assert!(of_slow.step_sent_bytes <= of_fast.step_sent_bytes, "{mib} MiB: {of_fast:?} {of_slow:?}");
        fewer_bytes += usize::from(of_slow.step_sent_bytes < of_fast.step_sent_bytes);
    }
    assert!(other_plans > 0 && fewer_bytes > 0, "{other_plans} plans differ, {fewer_bytes} send less");
}

#[test]
fn memory_for_a_block_on_its_way_is_worth_it_where_there_is_some() {
    let by_layer = Pins::default().with("accumulation", Value::Word("layer-major"));
    let overlaps = |plan: &Plan| plan.step.levers.layer_major.is_some_and(|layers| layers.overlaps);
    let plan = planned(4096, 1e9, &by_layer);
    let of_plan = pace(&plan, 1e9);
    assert!(overlaps(&plan) && of_plan.step_waited_seconds < of_plan.step_sent_seconds, "{of_plan:?}");
    let waits = planned(4096, 1e9, &by_layer.with("communication_overlap", Value::Word("none")));
    let of_waiting = pace(&waits, 1e9);
    assert!(!overlaps(&waits) && waits.relative_time > plan.relative_time);
    assert!((of_waiting.step_waited_seconds / of_waiting.step_sent_seconds - 1.0).abs() < 1e-9, "{of_waiting:?}");
    assert!(waits.predicted_peak < plan.predicted_peak, "a block of gradients is on its way");
}

#[test]
fn what_goes_to_others_through_the_host_takes_the_time_of_its_copies_too() {
    let by_layer = Pins::default().with("accumulation", Value::Word("layer-major"));
    let waits = by_layer.with("communication_overlap", Value::Word("none"));
    let of = |between_cards| {
        let on_a_card = |job: &mut Job<'_>| {
            let Work::Training(training) = &mut job.work else { unreachable!("a job that trains") };
            training.processes.between_cards = between_cards;
            job.budgets = Budgets { device: Budget::Explicit(Bytes::gib(8)), ..job.budgets };
            (job.place, job.prices) = (MemorySpace::Device, Prices::card());
        };
        with_changed_job(8192, 1e12, &waits, on_a_card, |job, now| {
            let card = DeviceMemory { total: Bytes::gib(16), free: Bytes::gib(16), ..DeviceMemory::default() };
            let now = MemorySnapshot { device: Some(card), ..now.clone() };
            let plan = crate::plan(job, &now).expect("it fits").plan;
            (crate::pace(job, &now, &plan, &[]).expect("a pace"), plan.relative_time)
        })
    };
    let ((through_the_host, slower), (by_nccl, faster)) = (of(None), of(Some(0)));
    assert!(through_the_host.step_bus_bytes > 0 && by_nccl.step_bus_bytes == 0);
    let copies = through_the_host.step_waited_seconds - by_nccl.step_waited_seconds;
    let byte = Prices::card().bus_byte * MULTIPLY_ADD_PS_ON_A_CARD * 1e-12;
    let expected = byte * through_the_host.step_bus_bytes as f64;
    assert!((copies / expected - 1.0).abs() < 1e-9, "{copies} s instead of {expected}");
    assert!(slower > faster);
}
