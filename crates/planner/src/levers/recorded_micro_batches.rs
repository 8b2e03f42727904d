//! The lever of a card that waits for the host's launches.

use t5::Levers;

use super::words_or;
use crate::lever::{Lever, Space, Value, Values};

/// Micro-batches as graphs.
pub static RECORDED_MICRO_BATCHES: Lever = Lever {
    name: "recorded_micro_batches",
    values: Values::Words(&["none", "all"]),
    meaning: "on a GPU: launch kernels one by one, or record micro-batches of repeated shapes as CUDA graphs, whose memory is kept between steps",
    flag: None,
    layer_major: None,
    device_only: Some(|value| value.is("all")),
    get: |levers| Some(Value::Word(if levers.repeats { "all" } else { "none" })),
    set: |levers, value| levers.repeats = value.is("all"),
    offered: recorded_micro_batches,
    words: |levers: &Levers| levers.repeats.then(|| "micro-batches recorded".to_owned()),
    moves_the_next: false,
};

fn recorded_micro_batches(space: &Space<'_>, levers: &Levers) -> Vec<Value> {
    let Some(graphs) = space.graphs.filter(|_| levers.layer_major.is_none()) else { return vec![Value::Word("none")] };
    match graphs.are_wanted {
        Some(are_wanted) => vec![Value::Word(if are_wanted { "all" } else { "none" })],
        // A plan can compare graphs if launches were measured.
        None if graphs.have_prices => words_or(space, &RECORDED_MICRO_BATCHES, &["all", "none"]),
        None => words_or(space, &RECORDED_MICRO_BATCHES, &["none"]),
    }
}

#[cfg(test)]
mod tests {
    use memory_policy::{Budgets, Bytes, DeviceMemory, MemorySnapshot, MemorySpace, Setting};
    use trainer::TrainerOptions;

    use super::*;
    use crate::job::{Job, Training};
    use crate::{MICRO_BATCH_SAMPLES, Pace, Pins, Plan, Prices, budget_of, names, testing};

    const LONGEST: (usize, usize) = (64, 64);

    /// Prices of a card. `launch` is the host's time for a launch, in multiply-adds. A graph costs two launches, and each of its nodes a
    /// quarter of a launch.
    fn prices(launch: f64) -> Prices {
        let (graph_launch, graph_node) = (2.0 * launch, launch / 4.0);
        let times = Prices { multiply_add_ps: Some(0.02), parameter_ps: Some(1.0), ..Prices::card() };
        Prices { overhead_tokens: 0.0, launch, product_launch: launch, graph_launch, graph_node, ..times }
    }

    /// About 1,500 launches of this price take ten times as long as the arithmetic of 512 tokens of t5-base.
    const SLOW: f64 = 2e9;
    /// A hundredth of [`SLOW`].
    const FAST: f64 = 2e6;

    /// The settings of a plan. `device` is the card's memory for tensors and context, in bytes.
    #[derive(Clone, Copy)]
    struct Asked<'a> {
        prices: Prices,
        pin: Option<&'static str>,
        lengths: &'a [(usize, usize)],
        device: u64,
        casts_weights: bool,
        chunk: Option<usize>,
    }

    impl Default for Asked<'_> {
        fn default() -> Self {
            Self { prices: prices(SLOW), pin: None, lengths: &[], device: 20 << 30, casts_weights: false, chunk: None }
        }
    }

    /// The plan and its pace: t5-base over 4 samples of 64 + 64 tokens in bf16.
    fn planned(asked: Asked) -> (Plan, Pace) {
        let Asked { prices, pin, lengths, device, casts_weights, chunk } = asked;
        let model = t5::Config::preset("t5-base").expect("a preset");
        let master_weights = match casts_weights {
            true => trainer::MasterWeights::F32,
            false => trainer::MasterWeights::StochasticRounding,
        };
        let precision = trainer::Precision::Bf16;
        let options = TrainerOptions { precision, master_weights, total_steps: 10, ..TrainerOptions::default() };
        let training = Training { lengths, ..testing::training(&options) };
        let budgets = Budgets { process: budget_of(Some(8 << 30)), device: budget_of(Some(device)) };
        let pins = Pins::default().with(MICRO_BATCH_SAMPLES.name, Value::Count(4));
        let pins = chunk.map_or(pins.clone(), |rows| pins.with("loss_chunk_rows", Value::Count(rows)));
        let pins =
            pins.with("accumulation", Value::Word("micro-batch-major")).with("recompute_blocks", Value::Count(0));
        let pins = pin.map_or(pins.clone(), |pin| pins.with(RECORDED_MICRO_BATCHES.name, Value::Word(pin)));
        let of = Job {
            samples: 4,
            longest: LONGEST,
            place: MemorySpace::Device,
            budgets,
            prices,
            ..testing::job(&model, training, &pins)
        };
        let gib = Bytes::gib(24);
        let card = DeviceMemory { name: "a card".into(), total: gib, free: gib, ..Default::default() };
        let now = MemorySnapshot { device: Some(card), rss: Bytes::mib(30), ..testing::machine() };
        let plan = crate::plan(&of, &now).unwrap_or_else(|error| panic!("{device} bytes: {error}")).plan;
        let pace = crate::pace(&of, &now, &plan, lengths).expect("a pace");
        (plan, pace)
    }

    fn graphs(plan: &Plan) -> u64 {
        let rows = plan.bill.device.iter().flat_map(|bill| &bill.rows);
        rows.filter(|row| row.name == names::GRAPHS).map(|row| row.bytes.0).sum()
    }

    #[track_caller]
    fn check(asked: Asked, expected: bool) {
        let (plan, _) = planned(asked);
        assert_eq!(plan.step.levers.repeats, expected, "{}", plan.bill);
        assert_eq!(graphs(&plan) > 0, expected, "{}", plan.bill);
        assert_eq!(plan.step.in_words().contains("micro-batches recorded"), expected, "{}", plan.bill);
    }

    #[test]
    fn micro_batches_are_recorded_where_a_card_waits_for_launches() {
        check(Asked::default(), true);
        check(Asked { prices: prices(FAST), ..Asked::default() }, false);
        // A driver that cannot record has no price of graphs, and an old table no price of launches.
        let without_graphs = Prices { graph_launch: 0.0, graph_node: 0.0, ..prices(SLOW) };
        check(Asked { prices: without_graphs, ..Asked::default() }, false);
        check(Asked { prices: Prices::card(), ..Asked::default() }, false);
    }

    #[test]
    fn a_pin_wins_whatever_the_prices_are() {
        let pinned = |pin, prices| Asked { pin: Some(pin), prices, ..Asked::default() };
        for price in [prices(SLOW), prices(FAST), Prices::card()] {
            check(pinned("all", price), true);
            check(pinned("none", price), false);
        }
    }

    #[test]
    fn uneven_rows_are_launched_kernel_by_kernel() {
        let uneven: Vec<(usize, usize)> = (0..32).map(|i| (64 - i, 64 - i / 2)).collect();
        let asked = Asked { lengths: &uneven, ..Asked::default() };
        check(asked, false);
        check(Asked { lengths: &[LONGEST; 32], ..asked }, true);
        // A pin uses the memory of graphs and gains nothing.
        let (plan, pinned) = planned(Asked { pin: Some("all"), ..asked });
        let (_, free) = planned(asked);
        assert!(plan.step.levers.repeats && pinned.step_seconds == free.step_seconds, "{pinned:?} {free:?}");
    }

    #[test]
    fn micro_batches_are_recorded_where_a_card_has_the_memory() {
        // A finer chunk of the loss would make room for graphs.
        let asked = Asked { chunk: Some(256), ..Asked::default() };
        let (none, recorded) = (planned(Asked { pin: Some("none"), ..asked }).0, planned(asked).0);
        let [least, enough] = [&none, &recorded].map(|plan| plan.required_on_device().0);
        assert!(enough > least && graphs(&recorded) > 0, "{}", recorded.bill);
        for (device, expected) in [(least, false), (least.midpoint(enough), false), (enough, true)] {
            check(Asked { device, ..asked }, expected);
        }
    }

    #[test]
    fn a_step_takes_the_longer_one_of_its_arithmetic_and_its_launches() {
        let seconds = |launch, pin| {
            let pace = planned(Asked { prices: prices(launch), pin: Some(pin), ..Asked::default() }).1;
            (pace.step_seconds.expect("measured"), pace.step_launch_seconds)
        };
        let computed = seconds(0.0, "none").0;
        assert_eq!(seconds(0.0, "none").1, None);
        // Launches that a card hides take no time.
        assert_eq!(seconds(FAST, "none").0, computed);
        assert!(seconds(FAST, "none").1.expect("a price") < computed / 20.0);
        let (slow, launching) = seconds(SLOW, "none");
        let is_launching = |seconds: f64, of: Option<f64>| (seconds / of.expect("a price") - 1.0).abs() < 1e-9;
        assert!(is_launching(slow, launching), "nothing but launches: {slow} {launching:?}");
        assert!(slow > 5.0 * computed, "{slow} {computed}");
        // The step no longer waits for launches of blocks. The head and the update are launched kernel by kernel.
        let (graphs, launching) = seconds(SLOW, "all");
        assert!(graphs < slow / 2.0 && graphs > computed && launching.expect("a price") < slow, "{graphs} {slow}");
        assert_eq!(seconds(FAST, "all").0, computed);
    }

    #[test]
    fn copies_of_weights_are_priced_by_the_launches_that_they_spare() {
        let copies = |launch: f64| {
            let prices = Prices { weight_cast: 0.0, graph_node: 0.0, ..prices(launch) };
            planned(Asked { prices, casts_weights: true, ..Asked::default() }).0.step.levers.weight_copies
        };
        assert!(copies(SLOW) && !copies(FAST));
    }
}
