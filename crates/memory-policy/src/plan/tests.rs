//! Cases and properties of [`plan`]; the offers are small enough to check by hand.

use proptest::prelude::*;

use super::*;
use crate::testing::{ACTIVATIONS, Ahead, Cut, LOADER, PARAMETERS, PROCESS};
use crate::{Group, Name, Phase, undominated};

type Costs = crate::Costs<Cut, Ahead>;
type Plan = crate::Plan<Cut, Ahead>;

const MIB: u64 = 1 << 20;

fn step(samples: usize, repeated: usize, mib: u64, relative_time: f64) -> Choice<Cut> {
    Choice::new(Cut { samples, repeated }, vec![CostRow::new(ACTIVATIONS, mib * MIB, "")], relative_time)
}

fn loader(batches: usize, mib: u64, relative_time: f64) -> Choice<Ahead> {
    Choice::new(Ahead { batches }, vec![CostRow::new(LOADER, mib * MIB, "")], relative_time)
}

/// 200 MiB of fixed rows, steps of 50 to 800 MiB, and loaders of 10 to 300 MiB.
fn costs() -> Costs {
    Costs {
        task: "16 samples a step".into(),
        fixed: vec![CostRow::new(PARAMETERS, 150 * MIB, "f32"), CostRow::new(PROCESS, 50 * MIB, "")],
        past: Vec::new(),
        steps: vec![
            step(1, 12, 50, 1.9),
            step(1, 0, 100, 1.4),
            step(4, 12, 150, 1.35),
            step(4, 0, 400, 1.05),
            step(8, 0, 800, 1.0),
        ],
        loaders: vec![loader(4, 300, 1.0), loader(2, 40, 1.02), loader(1, 10, 1.5)],
    }
}

/// A machine with so much memory that only the budget matters.
fn ample() -> MemorySnapshot {
    MemorySnapshot { total: Bytes::gib(64), available: Bytes::gib(60), ..Default::default() }
}

fn explicit(mib: u64) -> Budget {
    Budget::Explicit(Bytes::mib(mib))
}

#[test]
fn the_fastest_plan_that_fits_is_chosen() {
    let check = |budget_mib: u64, samples: usize, repeated: usize, batches: usize| {
        let plan = plan(&ample(), &costs(), explicit(budget_mib)).unwrap();
        let chosen = (plan.step.samples, plan.step.repeated, plan.loader.batches);
        assert_eq!(chosen, (samples, repeated, batches), "at {budget_mib} MiB:\n{}", plan.bill);
        assert!(plan.required() <= Bytes::mib(budget_mib));
    };
    check(4000, 8, 0, 4);
    check(1365, 8, 0, 4); // 200 + 800 + 300 and 5 %
    check(1364, 8, 0, 2);
    check(1091, 4, 0, 4); // 200 + 400 + 300 and 5 %: 1.05 beats the other pairs' 1.02 x 1.05
    check(944, 4, 0, 2);
    check(671, 4, 12, 2);
    check(400, 1, 0, 2); // 340 and 5 %
    check(356, 1, 12, 2); // 290 and 5 %: 1.9 x 1.02 beats 1.4 x 1.5
    check(304, 1, 12, 1); // 260 and 5 %
}

#[test]
fn what_cannot_fit_is_refused_with_the_smallest_budget_that_would_do() {
    let refusal = plan(&ample(), &costs(), explicit(200)).unwrap_err();
    assert_eq!(refusal.smallest_budget, Bytes::mib(273)); // 200 + 50 + 10 and 5 %
    assert_eq!(refusal.limited_by, Limit::Budget);
    assert_eq!(refusal.smallest_plan.predicted_peak, Bytes::mib(260));
    assert_eq!(refusal.to_string(), "memory budget: expected at least 273 MiB for the smallest plan, got 200 MiB");
    assert_eq!(refusal.hint(), "the smallest budget that works: --memory-budget 274MiB");

    let enough = plan(&ample(), &costs(), Budget::Explicit(refusal.smallest_budget)).unwrap();
    assert_eq!(enough, *refusal.smallest_plan);
    let one_less = Budget::Explicit(Bytes(refusal.smallest_budget.0 - 1));
    assert_eq!(plan(&ample(), &costs(), one_less).unwrap_err().smallest_budget, refusal.smallest_budget);
}

#[test]
fn a_machine_with_less_than_the_budget_is_not_promised_away() {
    let crowded = MemorySnapshot { available: Bytes::mib(330), rss: Bytes::mib(30), ..ample() };
    let tight = plan(&crowded, &costs(), explicit(4000)).unwrap();
    assert_eq!((tight.step.samples, tight.limited_by), (1, Limit::Available));
    assert!(tight.required() <= crowded.ceiling());
    assert_eq!(tight.budget, Bytes::mib(4000));

    let full = MemorySnapshot { available: Bytes::mib(100), rss: Bytes::mib(30), ..ample() };
    let refusal = plan(&full, &costs(), explicit(4000)).unwrap_err();
    assert_eq!((refusal.limit, refusal.limited_by), (Bytes::mib(130), Limit::Available));
    assert_eq!(refusal.to_string(), "available memory: expected at least 273 MiB for the smallest plan, got 130 MiB");
    // A margin of 1 MiB, and of a 24th of what was measured.
    let hint = "free 143 MiB on this machine or raise its limit; then `--memory-budget 276MiB` works";
    assert_eq!(refusal.hint(), hint);
}

#[test]
fn without_a_budget_a_stated_share_of_what_is_available_is_taken_and_own_memory_is_not_counted_against_it() {
    let group = Group { limit: Bytes::mib(1000), used: Bytes::mib(200), ..Default::default() };
    let now = MemorySnapshot { rss: Bytes::mib(150), group: Some(group), ..ample() };
    let plan = plan(&now, &costs(), Budget::ShareOfAvailable).unwrap();
    assert_eq!(plan.budget, Bytes::mib(760)); // 80 % of 1000 - 200 + 150
    let shown = plan.bill.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(shown.contains("of 760.0 MiB (80 % of the available memory); 950.0 MiB available (cgroup)"), "{shown}");
    assert_eq!(plan.step.samples, 4);
}

#[test]
fn with_an_explicit_budget_a_quiet_machine_does_not_change_the_plan() {
    let first = plan(&ample(), &costs(), explicit(700)).unwrap();
    for available in [701, 900, 5000, 50_000] {
        let now = MemorySnapshot { available: Bytes::mib(available), rss: Bytes::mib(3), ..ample() };
        let mut same = plan(&now, &costs(), explicit(700)).unwrap();
        same.bill.available = first.bill.available;
        assert_eq!(first, same);
    }
}

#[test]
fn equal_speed_goes_to_the_smaller_plan_and_equal_plans_to_the_first_offered() {
    let mut costs = costs();
    costs.loaders.truncate(1);
    costs.steps = vec![step(8, 0, 500, 1.0), step(4, 0, 300, 1.0), step(2, 1, 300, 1.0)];
    let plan = plan(&ample(), &costs, explicit(4000)).unwrap();
    assert_eq!((plan.step.samples, plan.step.repeated), (4, 0));
}

#[test]
fn memory_that_buys_no_time_is_not_taken_however_much_there_is() {
    let mut costs = costs();
    costs.loaders.truncate(1);
    costs.steps = vec![step(8, 0, 800, 1.0), step(4, 0, 400, 1.01), step(2, 0, 200, 1.014), step(1, 0, 100, 1.1)];
    let samples = |mib| plan(&ample(), &costs, explicit(mib)).unwrap().step.samples;
    assert_eq!([9000, 2000, 735, 734].map(samples), [2, 2, 2, 1]); // 200 + 200 + 300 and 5 %
}

#[test]
fn the_phase_that_holds_most_is_what_the_bill_shows() {
    let mut costs = costs();
    costs.loaders.truncate(1);
    let rows = vec![CostRow::new(Name::new("key/value cache"), 450 * MIB, "")];
    let evaluation = Phase { name: Name::new("evaluation"), rows };
    costs.steps = vec![Choice { other_phases: vec![evaluation], ..step(4, 0, 400, 1.0) }];
    let plan = plan(&ample(), &costs, explicit(4000)).unwrap();
    assert_eq!((plan.predicted_peak, plan.bill.binding.as_str()), (Bytes::mib(950), "evaluation"));
    assert_eq!(plan.predicted_peak, sum(&plan.bill.rows));
    let of_phases = plan.bill.phase_rows.iter().map(|phase| (phase.name.clone(), sum(&phase.rows)));
    assert!(of_phases.eq(plan.bill.phases.iter().map(|phase| (phase.name.clone(), phase.bytes))));
    assert!(plan.bill.to_string().contains("largest phase: evaluation\n"), "{}", plan.bill);
    let full = plan.bill.in_full().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(full.contains("largest phase: evaluation (training 900.0 MiB)"), "{full}");
}

#[test]
fn a_pinned_lever_is_an_offer_of_that_value_alone() {
    let mut costs = costs();
    costs.steps.retain(|step| step.what.samples == 4);
    costs.loaders.retain(|loader| loader.what.batches == 1);
    let plan = plan(&ample(), &costs, explicit(4000)).unwrap();
    assert_eq!((plan.step.samples, plan.loader.batches), (4, 1));
}

#[test]
fn the_bill_adds_up_and_reads_well() {
    let plan = plan(&ample(), &costs(), explicit(1200)).unwrap();
    let expected = "\
Memory plan       predicted peak 1.02 GiB of 1.17 GiB (--memory-budget); 60.00
                  GiB available (host)
  activations       0.78 GiB  77 %  ██████
  parameters        0.15 GiB  14 %  █         f32
  process           0.05 GiB   5 %
  loader            0.04 GiB   4 %
  total             1.02 GiB
  safety margin     0.05 GiB                  5 % of the predicted peak
Step              16 samples a step, 8 at a time
Speed             this is the fastest plan
";
    assert_eq!(plan.bill.to_string(), expected);
    assert_eq!(plan.predicted_peak, sum(&plan.bill.rows));
}

#[test]
fn a_plan_survives_json() {
    let plan = plan(&ample(), &costs(), explicit(1200)).unwrap();
    let json = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
}

fn any_costs() -> impl Strategy<Value = Costs> {
    let choice = || (0u64..2000 * MIB, 1.0f64..3.0);
    let fixed = prop::collection::vec(0u64..2000 * MIB, 0..3);
    (fixed, prop::collection::vec(choice(), 1..8), prop::collection::vec(choice(), 1..5)).prop_map(
        |(fixed, steps, loaders)| Costs {
            task: "8 samples a step".into(),
            fixed: fixed.into_iter().map(|bytes| CostRow::new(Name::new("fixed"), bytes, "")).collect(),
            past: Vec::new(),
            steps: steps
                .into_iter()
                .enumerate()
                .map(|(i, (bytes, time))| Choice {
                    rows: vec![CostRow::new(ACTIVATIONS, bytes, "")],
                    ..step(i, 0, 0, time)
                })
                .collect(),
            loaders: loaders
                .into_iter()
                .enumerate()
                .map(|(i, (bytes, time))| {
                    let rows = vec![CostRow::new(LOADER, bytes, "")];
                    Choice { rows, ..loader(i, 0, time) }
                })
                .collect(),
        },
    )
}

fn any_snapshot() -> impl Strategy<Value = MemorySnapshot> {
    (0u64..9000, 0u64..3000, prop::option::of((0u64..9000, 0u64..9000, 0u64..9000))).prop_map(
        |(available, rss, group)| MemorySnapshot {
            total: Bytes::gib(16),
            available: Bytes::mib(available),
            rss: Bytes::mib(rss),
            group: group.map(|(limit, used, reclaimable)| Group {
                path: "/".into(),
                limit: Bytes::mib(limit),
                used: Bytes::mib(used),
                reclaimable: Bytes::mib(reclaimable),
            }),
            ..Default::default()
        },
    )
}

proptest! {
    #[test]
    fn no_plan_needs_more_than_the_budget_or_than_there_is(
        costs in any_costs(), now in any_snapshot(), mib in 0u64..8000,
    ) {
        for budget in [explicit(mib), Budget::ShareOfAvailable] {
            match plan(&now, &costs, budget) {
                Ok(plan) => {
                    prop_assert!(plan.required() <= budget.resolve(&now));
                    prop_assert!(plan.predicted_peak + MIN_HEADROOM <= now.ceiling());
                    prop_assert_eq!(plan.predicted_peak, sum(&plan.bill.rows));
                }
                Err(refusal) => prop_assert!(refusal.smallest_budget > refusal.limit),
            }
        }
    }

    #[test]
    fn what_is_dominated_is_no_plan_at_any_budget(costs in any_costs(), mib in 0u64..8000) {
        let kept = costs.steps[0].clone();
        let left = Costs { steps: undominated(costs.steps.clone(), |step| *step == kept), ..costs.clone() };
        prop_assert!(left.steps.contains(&kept));
        prop_assert_eq!(plan(&ample(), &costs, explicit(mib)), plan(&ample(), &left, explicit(mib)));
    }

    #[test]
    fn a_bigger_budget_is_never_slower(costs in any_costs(), mib in 0u64..8000, more in 0u64..4000) {
        let less = plan(&ample(), &costs, explicit(mib));
        let more = plan(&ample(), &costs, explicit(mib + more));
        if let Ok(less) = less {
            prop_assert!(more.unwrap().relative_time <= less.relative_time);
        }
    }

    #[test]
    fn the_smallest_budget_fits_and_one_byte_less_does_not(costs in any_costs()) {
        let refusal = plan(&ample(), &costs, explicit(0)).unwrap_err();
        let fits = |bytes: u64| plan(&ample(), &costs, Budget::Explicit(Bytes(bytes))).is_ok();
        prop_assert!(fits(refusal.smallest_budget.0));
        prop_assert!(!fits(refusal.smallest_budget.0 - 1));
    }

    #[test]
    fn costs_beyond_all_bytes_are_refused_and_do_not_wrap(mib in 0u64..8000) {
        let mut costs = costs();
        costs.fixed = vec![CostRow::new(Name::new("absurd"), u64::MAX, ""), CostRow::new(Name::new("more"), u64::MAX, "")];
        prop_assert!(plan(&ample(), &costs, explicit(mib)).is_err());
    }
}

#[test]
fn nothing_is_fed_while_a_model_is_loaded() {
    let phase = |name: Name, mib: u64| Phase { name, rows: vec![CostRow::new(PARAMETERS, mib * MIB, "")] };
    let costs = |loading: u64| Costs {
        steps: vec![Choice { other_phases: vec![phase(LOADING, loading)], ..step(1, 0, 100, 1.0) }],
        loaders: vec![loader(0, 10, 1.0)],
        ..costs()
    };
    let plan_of = |loading| plan(&ample(), &costs(loading), Budget::Explicit(Bytes::gib(1))).unwrap();
    let (hidden, largest) = (plan_of(110), plan_of(120));
    assert_eq!((hidden.predicted_peak, hidden.bill.binding), (Bytes::mib(310), TRAINING));
    assert_eq!((largest.predicted_peak, largest.bill.binding), (Bytes::mib(320), LOADING));
    let of_bill: Bytes = largest.bill.rows.iter().map(|row| row.bytes).sum();
    assert_eq!(of_bill, largest.predicted_peak);
    // A step with less memory in loading and a higher peak stays beside its opposite: the loader decides between them.
    let lower = Choice { other_phases: vec![phase(LOADING, 130)], ..step(1, 0, 100, 1.0) };
    let higher = Choice { other_phases: vec![phase(LOADING, 100)], ..step(2, 0, 125, 1.0) };
    assert_eq!(undominated([lower, higher], |_| false).len(), 2);
}

#[test]
fn what_a_loader_holds_while_it_feeds_meets_what_a_step_leaves_and_not_its_peak() {
    let phase = |name: Name, mib: u64| Phase { name: FEEDING, rows: vec![CostRow::new(name, mib * MIB, "")] };
    let costs = |feeding: u64| Costs {
        steps: vec![Choice { other_phases: vec![phase(PARAMETERS, 20)], ..step(1, 0, 100, 1.0) }],
        loaders: vec![Choice { other_phases: vec![phase(LOADER, feeding)], ..loader(0, 10, 1.0) }],
        ..costs()
    };
    let plan_of = |feeding| plan(&ample(), &costs(feeding), Budget::Explicit(Bytes::gib(1))).unwrap();
    let (hidden, largest) = (plan_of(80), plan_of(90));
    assert_eq!(hidden.predicted_peak, Bytes::mib(310));
    assert_eq!((hidden.bill.binding, hidden.bill.phases[1].bytes), (TRAINING, Bytes::mib(310)));
    assert_eq!((largest.predicted_peak, largest.bill.binding), (Bytes::mib(320), FEEDING));
    let of_bill: Bytes = largest.bill.rows.iter().map(|row| row.bytes).sum();
    assert_eq!(of_bill, largest.predicted_peak);
    // A step that leaves more memory behind does not replace one with a higher peak.
    let leaves = |mib| Choice { other_phases: vec![phase(PARAMETERS, mib)], ..step(1, 0, 100, 1.0) };
    let larger = Choice { other_phases: vec![phase(PARAMETERS, 20)], ..step(2, 0, 120, 1.0) };
    assert_eq!(undominated([leaves(90), larger], |_| false).len(), 2);
}

#[test]
fn no_budget_below_the_peak_so_far_is_enough_and_the_memory_that_is_left_counts_for_what_comes() {
    let past = |mib: u64| Costs {
        past: vec![CostRow::new(PROCESS, 50 * MIB, ""), CostRow::new(LOADER, (mib - 50) * MIB, "files")],
        ..costs()
    };
    let budget = |mib: u64| Budget::Explicit(Bytes::mib(mib));
    let [lower, higher] = [past(200), past(600)];
    // The smallest plan holds 260 MiB. A lower peak so far changes nothing but the list of phases.
    let plan_of = |costs: &Costs| plan(&ample(), costs, budget(1)).unwrap_err();
    let (without, with) = (plan_of(&costs()), plan_of(&lower));
    assert_eq!(without.smallest_budget, with.smallest_budget);
    assert_eq!(with.smallest_plan.bill.binding, TRAINING);
    assert_eq!(
        (&with.smallest_plan.bill.phases[0].name, with.smallest_plan.bill.phases[0].bytes),
        (&READING, Bytes::mib(200))
    );
    // A higher one is the peak of every plan, with rows of its own.
    let refusal = plan(&ample(), &higher, budget(620)).unwrap_err();
    assert_eq!(refusal.smallest_budget, Bytes::mib(630));
    let fits = plan(&ample(), &higher, budget(630)).unwrap();
    assert_eq!((fits.predicted_peak, &fits.bill.binding), (Bytes::mib(600), &READING));
    assert_eq!(fits.bill.rows, higher.past);
    // The fastest of the plans that the budget allows: their memory is there anyway.
    assert_eq!((fits.step.samples, fits.coming_peak), (4, Bytes::mib(390)));
    // Other programs have taken memory since then. What is over is not needed again.
    let crowded = MemorySnapshot { available: Bytes::mib(450), ..ample() };
    assert_eq!(plan(&crowded, &higher, budget(630)).unwrap().step, fits.step);
    let kept = crate::replan(&crowded, &higher, budget(630), &fits);
    assert_eq!((kept.plan.step, kept.change), (fits.step, None));
}
