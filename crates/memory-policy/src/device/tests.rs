//! Plans under two budgets, made from scripted probes: the tensors are on a card, and the data on the host.

use proptest::prelude::*;

use super::*;
use crate::testing::{ACTIVATIONS, Ahead, Cut, LOADER, PARAMETERS, PROCESS};
use crate::{Change, Choice, Limit, Name, Phase, Probe, ScriptedProbe, plan, replan};

type Costs = crate::Costs<Cut, Ahead>;

const MIB: u64 = 1 << 20;

fn step(samples: usize, mib: u64, relative_time: f64) -> Choice<Cut> {
    let evaluation = Phase {
        name: Name::new("evaluation"),
        rows: vec![CostRow::new(Name::new("key/value cache"), 900 * MIB, "").at(MemorySpace::Device)],
    };
    Choice {
        what: Cut { samples, repeated: 0 },
        rows: vec![CostRow::new(ACTIVATIONS, mib * MIB, "").at(MemorySpace::Device)],
        other_phases: vec![evaluation],
        relative_time,
    }
}

/// The device holds 500 MiB of parameters, and activations of 1 to 8 GiB, or 900 MiB in an evaluation. The host holds 300 MiB, and a loader
/// of 40 or 800 MiB.
fn costs() -> Costs {
    let loader = |mib: u64, relative_time: f64| {
        Choice::new(Ahead { batches: mib as usize }, vec![CostRow::new(LOADER, mib * MIB, "")], relative_time)
    };
    Costs {
        task: "8 samples a step".into(),
        fixed: vec![
            CostRow::new(PROCESS, 300 * MIB, ""),
            CostRow::new(PARAMETERS, 500 * MIB, "").at(MemorySpace::Device),
        ],
        past: Vec::new(),
        steps: vec![step(8, 8 << 10, 1.0), step(4, 4 << 10, 1.1), step(2, 2 << 10, 1.3), step(1, 1 << 10, 1.6)],
        loaders: vec![loader(800, 1.0), loader(40, 1.05)],
    }
}

fn host(available_mib: u64) -> MemorySnapshot {
    MemorySnapshot { total: Bytes::gib(32), available: Bytes::mib(available_mib), ..Default::default() }
}

fn card(total_gib: u64, free_mib: u64, used_mib: u64) -> DeviceMemory {
    DeviceMemory {
        name: "a card".into(),
        total: Bytes::gib(total_gib),
        free: Bytes::mib(free_mib),
        used: Bytes::mib(used_mib),
        ..DeviceMemory::default()
    }
}

fn with_card(free_mib: u64) -> MemorySnapshot {
    MemorySnapshot { device: Some(card(24, free_mib, 0)), ..host(20_000) }
}

fn explicit(process_mib: u64, device_mib: u64) -> Budgets {
    let [process, device] = [process_mib, device_mib].map(|mib| Budget::Explicit(Bytes::mib(mib)));
    Budgets { process, device }
}

#[test]
fn a_plan_fits_both_budgets_and_each_bounds_its_own_rows() {
    let check = |process_mib: u64, device_mib: u64, samples: usize, loader_mib: usize| {
        let plan = plan(&with_card(24_000), &costs(), explicit(process_mib, device_mib)).unwrap();
        assert_eq!((plan.step.samples, plan.loader.batches), (samples, loader_mib), "{}", plan.bill);
        assert!(plan.required() <= Bytes::mib(process_mib));
        let device = plan.bill.device.unwrap();
        assert_eq!(device.predicted_peak, plan.predicted_device_peak);
        assert!(device.predicted_peak + device.headroom <= Bytes::mib(device_mib));
        assert!(plan.bill.rows.iter().all(|row| row.place.is_host()));
    };
    check(4000, 20_000, 8, 800);
    check(400, 20_000, 8, 40);
    check(4000, 9_127, 8, 800); // 500 + 8192 and 5 %
    check(4000, 9_126, 4, 800);
    check(400, 2_700, 2, 40);
    check(400, 1_601, 1, 40); // 500 + 1024 and 5 %
}

#[test]
fn the_phase_that_holds_most_on_the_device_is_what_its_bill_shows() {
    let mut costs = costs();
    costs.steps = vec![step(1, 100, 1.0)];
    let plan = plan(&with_card(24_000), &costs, explicit(4000, 4000)).unwrap();
    assert_eq!(plan.predicted_device_peak, Bytes::mib(1400)); // 500 and the evaluation's 900
    let shown = plan.bill.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    let first =
        "Device memory predicted peak 1.37 GiB of 3.91 GiB (--device-memory-budget; 23.44 GiB of 24 GiB free (a card))";
    assert!(shown.contains(first), "{shown}");
    assert!(shown.contains("key/value cache 0.88 GiB 64 %"), "{shown}");
}

#[test]
fn what_does_not_fit_the_device_is_refused_with_the_device_budget_that_would_do() {
    let refusal = plan(&with_card(24_000), &costs(), explicit(4000, 1000)).unwrap_err();
    assert_eq!((refusal.limited_by, refusal.limit), (Limit::DeviceBudget, Bytes::mib(1000)));
    let hint = refusal.hint();
    assert!(hint.starts_with("the smallest budget that works: --device-memory-budget 160"), "{hint}");
    let enough = Budgets { device: Budget::Explicit(refusal.smallest_budget), ..explicit(4000, 0) };
    assert_eq!(plan(&with_card(24_000), &costs(), enough).unwrap().step.samples, 1);

    let full = plan(&with_card(1200), &costs(), explicit(4000, 8000)).unwrap_err();
    assert_eq!((full.limited_by, full.limit), (Limit::DeviceAvailable, Bytes::mib(1200)));
    assert!(full.to_string().starts_with("free device memory: expected at least 1.56 GiB"), "{full}");

    let host_is_short = plan(&with_card(24_000), &costs(), explicit(100, 8000)).unwrap_err();
    assert_eq!(host_is_short.limited_by, Limit::Budget);
}

#[test]
fn without_a_device_budget_a_share_of_what_is_free_is_taken_and_an_unknown_device_is_bounded_by_nothing() {
    let budget = Budget::Explicit(Bytes::mib(4000));
    let plan_of = |now: &MemorySnapshot| plan(now, &costs(), budget).unwrap();
    assert_eq!(plan_of(&with_card(6000)).step.samples, 2); // the share is 4800; 500 + 4096 and 5 % are more
    assert_eq!(plan_of(&with_card(6100)).step.samples, 4);
    let unknown = plan_of(&host(20_000));
    assert_eq!((unknown.step.samples, unknown.bill.device.as_ref().unwrap().budget), (4, None)); // a guest leaves memory that gains 10 %
    assert!(unknown.bill.to_string().contains("the device's memory is unknown"), "{}", unknown.bill);
}

#[test]
fn a_faster_plan_is_named_with_the_budget_of_the_device_and_with_the_other_where_that_is_too_small() {
    let next = |process_mib: u64, device: Budget| {
        let process = Budget::Explicit(Bytes::mib(process_mib));
        plan(&with_card(24_000), &costs(), Budgets { process, device }).unwrap().bill.next
    };
    let of_mib = |mib: u64| Budget::Explicit(Bytes::mib(mib));
    // 500 + 2048 MiB and 5 %.
    let first = next(4000, of_mib(1_601));
    assert!(first.contains("faster with --device-memory-budget 2676MiB (2 at a time)"), "{first}");
    let guest = next(4000, Budget::ShareOfAvailable);
    assert!(guest.starts_with("--device-memory-budget is not set, so the plan is small"), "{guest}");
    let mut costs = costs();
    costs.steps[0].rows.push(CostRow::new(ACTIVATIONS, 500 * MIB, ""));
    let both = plan(&with_card(24_000), &costs, explicit(400, 9_000)).unwrap().bill.next;
    assert!(both.contains("--device-memory-budget 9127MiB --memory-budget 882MiB"), "{both}");
}

#[test]
fn tensors_on_the_host_leave_the_device_alone() {
    let mut costs = costs();
    let to_host = |rows: &mut Vec<CostRow>| rows.iter_mut().for_each(|row| row.place = MemorySpace::Host);
    to_host(&mut costs.fixed);
    for step in &mut costs.steps {
        to_host(&mut step.rows);
        step.other_phases.iter_mut().for_each(|phase| to_host(&mut phase.rows));
    }
    let plan = plan(&with_card(0), &costs, explicit(4000, 1)).unwrap();
    assert_eq!((plan.predicted_device_peak, &plan.bill.device), (Bytes::ZERO, &None));
}

#[test]
fn the_requirement_documents_cards_are_plans_from_scripted_probes() {
    for (total_gib, samples) in [(4, 2), (6, 2), (12, 8), (20, 8)] {
        let now = MemorySnapshot { device: Some(card(total_gib, total_gib * 1024 - 300, 0)), ..host(1434) };
        let probe = ScriptedProbe::new(vec![now]);
        let plan = plan(&probe.snapshot().unwrap(), &costs(), Budget::ShareOfAvailable).unwrap();
        assert!(plan.predicted_device_peak < Bytes::gib(total_gib));
        assert!(plan.predicted_peak < Bytes::mib(1434));
        assert_eq!(plan.step.samples, samples, "{total_gib} GiB\n{}", plan.bill);
    }
}

#[test]
fn others_on_the_card_shrink_the_plan_and_it_grows_back() {
    let budgets = explicit(4000, 10_000);
    let mut current = plan(&with_card(12_000), &costs(), budgets).unwrap();
    assert_eq!(current.step.samples, 8);
    let mut follow = |free_mib: u64| {
        let replanned = replan(&with_card(free_mib), &costs(), budgets, &current);
        current = replanned.plan;
        (current.step.samples, replanned.change)
    };
    let (samples, change) = follow(5000);
    assert_eq!(samples, 4);
    assert_eq!(change, Some(Change::Shrunk { needed: Bytes::mib(500 + (8 << 10)), available: Bytes::mib(5000) }));
    let back: Vec<usize> = (0..crate::GROW_AFTER_REPLANS).map(|_| follow(12_000).0).collect();
    assert_eq!((back[0], back[back.len() - 1]), (4, 8));
}

proptest! {
    #[test]
    fn no_plan_needs_more_of_the_device_than_its_budget_or_than_there_is(
        free_mib in 0u64..20_000, used_mib in 0u64..4000, budget_mib in 0u64..20_000,
    ) {
        let now = MemorySnapshot { device: Some(card(24, free_mib, used_mib)), ..host(20_000) };
        match plan(&now, &costs(), explicit(4000, budget_mib)) {
            Ok(plan) => {
                prop_assert!(plan.predicted_device_peak + headroom(plan.predicted_device_peak) <= Bytes::mib(budget_mib));
                prop_assert!(plan.predicted_device_peak <= Bytes::mib(free_mib + used_mib));
            }
            Err(refusal) => prop_assert!(refusal.smallest_budget > refusal.limit),
        }
    }

    #[test]
    fn a_bigger_device_budget_is_never_slower(mib in 1_700u64..12_000, more in 0u64..8_000) {
        let time = |mib| plan(&with_card(24_000), &costs(), explicit(4000, mib)).unwrap().relative_time;
        prop_assert!(time(mib + more) <= time(mib));
    }
}
