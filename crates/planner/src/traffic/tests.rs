use memory_policy::{Budget, Bytes, MemorySnapshot, Place};
use t5::step::count::BlockArithmetic;
use trainer::TrainerOptions;

use super::*;
use crate::feed::Feed;
use crate::job::{Job, Wanted, Work};
use crate::lever::Pins;
use crate::{Network, Pace, Plan, Value};

/// Half of a pass is the backward of its blocks.
fn arithmetic() -> Arithmetic {
    let block = BlockArithmetic { again: 0.0, heads: 0.0, backward: 25.0 };
    Arithmetic { blocks: vec![block; 2], head: 20.0, training: 100.0 }
}

#[track_caller]
fn check(levers: &Levers, micro_batches: usize, sent: Sent, expected: f64) {
    let step = Computed { time: 1.0, arithmetic: &arithmetic(), levers, micro_batches };
    let exposed = step.exposed(sent, 0.01);
    assert!((exposed - expected).abs() < 1e-9, "{exposed} instead of {expected}");
}

#[test]
fn what_is_on_its_way_is_hidden_as_long_as_something_is_computed() {
    let sent = |behind_backward, behind_all, alone| Sent { behind_backward, behind_all, alone, ..Sent::default() };
    let by_layer =
        |overlaps| Levers { layer_major: Some(LayerMajor { overlaps, ..LayerMajor::default() }), ..Levers::default() };
    check(&by_layer(false), 4, sent(30, 20, 10), 0.6);
    check(&by_layer(true), 4, sent(30, 20, 10), 0.1);
    check(&by_layer(true), 4, sent(60, 0, 10), 0.2);
    check(&by_layer(true), 4, sent(60, 70, 0), 0.1 + 0.2);
    // Micro-batch by micro-batch gradients are complete in the backward of the last.
    check(&Levers::default(), 1, sent(30, 0, 0), 0.0);
    check(&Levers::default(), 5, sent(30, 0, 0), 0.2);
}

/// Calls `f` with the job of t5-small for one of two processes over a network of this rate.
fn with_job<T>(mib: u64, bits_per_second: f64, pins: &Pins, f: impl FnOnce(&Job<'_>, &MemorySnapshot) -> T) -> T {
    let model = t5::Config::preset("t5-small").expect("a preset");
    let options = TrainerOptions { total_steps: 10, ..TrainerOptions::default() };
    let network = Network { bits_per_second };
    let processes = Processes { number: 2, buffers: 12 << 20, network, ..Processes::default() };
    let training =
        Training { options: &options, disk_writes: 0, evaluation: None, wanted: Wanted::All, base: None, processes };
    let job = Job {
        model: &model,
        work: Work::Training(training),
        samples: 16,
        longest: (128, 128),
        place: Place::Host,
        budgets: Budget::Explicit(Bytes::mib(mib)).into(),
        pins,
        feed: Feed::Given,
        process_note: "",
        prices: Prices::vectors(),
    };
    f(&job, &MemorySnapshot { available: Bytes::gib(64), total: Bytes::gib(64), ..MemorySnapshot::default() })
}

fn planned(mib: u64, rate: f64, pins: &Pins) -> Plan {
    with_job(mib, rate, pins, |job, now| crate::plan(job, now).expect("it fits").plan)
}

fn pace(plan: &Plan, rate: f64) -> Pace {
    with_job(4096, rate, &Pins::default(), |job, now| crate::pace(job, now, plan, &[]).expect("a pace"))
}

#[test]
fn plans_follow_the_rate_of_the_network() {
    let (fast_rate, slow_rate) = (1e10, 1e8);
    let (mut other_plans, mut fewer_bytes) = (0, 0);
    for mib in [460, 520, 660, 1000] {
        let [fast, slow] = [fast_rate, slow_rate].map(|rate| planned(mib, rate, &Pins::default()));
        assert!(slow.relative_time > fast.relative_time, "{mib} MiB");
        // Over the slow network, the plan that was made for it waits no longer than the other would.
        let [of_fast, of_slow] = [&fast, &slow].map(|plan| pace(plan, slow_rate));
        let what = || format!("{mib} MiB: {:?} {of_fast:?} {:?} {of_slow:?}", fast.step.levers, slow.step.levers);
        assert!(of_slow.step_waited_seconds <= of_fast.step_waited_seconds, "{}", what());
        other_plans += usize::from(fast.step.levers != slow.step.levers);
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
