//! The speed of a machine: the measured time of each kind of work of a step, and the prices for a model that follow from it.
//!
//! Kinds of work differ in speed, and models differ in how much of each kind they do. So a speed is kept for each kind, and a model's
//! prices follow from its arithmetic. Prices are rounded to eighths of powers of two, so that the noise of a measurement rarely changes a
//! plan. Times are not rounded this way, because no choice depends on them.

use candle_core::DType;
use memory_policy::MemorySpace;
use serde::{Deserialize, Serialize};
use t5::Levers;
use trainer::TrainerOptions;

use crate::answer_speed::{AnswerSpeed, Elements};
use crate::counted::{Arithmetic, BlockArithmetic, StepCounter};
use crate::error::Result;
use crate::prices::Prices;
use crate::processes::Processes;
use crate::rounding::significant;

/// The speed of a machine with activations of one dtype. Times are picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// A multiply-add of a product with a weight, forward and backward, over many rows.
    pub product_ps: f64,
    /// Fixed cost of a product, in the time of so many rows: packing the weight, and reading and writing its gradient.
    pub product_overhead_rows: f64,
    /// A multiply-add of attention, forward, over many keys.
    pub attention_ps: f64,
    /// Fixed cost of a query of attention, forward, in keys.
    pub attention_overhead_keys: f64,
    /// A multiply-add of attention, backward, over many keys.
    pub attention_backward_ps: f64,
    /// Fixed cost of a query of attention, backward, in keys.
    pub attention_backward_overhead_keys: f64,
    /// A multiply-add of output projection and loss.
    pub head_ps: f64,
    /// Fixed cost of a chunk of the loss, in rows.
    pub head_overhead_rows: f64,
    /// The operations between the products of a block, for each element of its input, forward.
    pub between_ps: f64,
    /// The operations between the products of a block, for each element of its input, backward.
    pub between_backward_ps: f64,
    /// The optimizer's update of a parameter.
    pub update_ps: f64,
    /// A byte that is written to a file and read back while it stays in memory; `None` if no file could be made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_byte_ps: Option<f64>,
    /// The speed of answers.
    pub answers: AnswerSpeed,
    /// Times that only a card has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<CardTimes>,
}

/// Times of a card, in picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardTimes {
    /// A byte copied between the host and a card through pinned memory: the mean of both directions.
    pub bus_byte_ps: f64,
    /// A byte copied between page-locked memory of the host and a card. `None` if the driver locks no memory, and in a file of an earlier
    /// version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked_byte_ps: Option<f64>,
    /// The launch of a short kernel, among many.
    pub launch_ps: f64,
    /// The cast of an element of a weight to bf16.
    pub cast_ps: f64,
    /// The host's times and those of graphs; `None` in a file of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launches: Option<LaunchTimes>,
}

/// Times in which the host launches a card's work, in picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchTimes {
    /// The time to put the launch of a kernel on the stream, without waiting for it.
    pub kernel_ps: f64,
    /// The time to put a matrix product on the stream.
    pub product_ps: f64,
    /// Times of graphs; `None` if the driver cannot record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph: Option<GraphTimes>,
}

/// Times of graphs of short kernels, in picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GraphTimes {
    /// The launch of a graph, without its nodes.
    pub launch_ps: f64,
    /// Each of its nodes.
    pub node_ps: f64,
}

/// The speed of a machine in both precisions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSpeed {
    /// With activations in f32.
    pub f32: Speed,
    /// With activations in bf16.
    pub bf16: Speed,
}

/// Time of attention's products backward, relative to forward.
const ATTENTION_BACKWARD: f64 = 2.5;
/// The operations between the products of a decoder block, relative to an encoder block: a decoder block has three parts, an encoder block
/// two.
pub(crate) const DECODER_BLOCK: f64 = 1.5;

/// The times of a training pass, in picoseconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// Operations that are computed again for backward, except attention outputs.
    again: f64,
    /// Attention outputs that are computed again.
    heads: f64,
    /// Backward.
    backward: f64,
    /// Products with weights.
    products: f64,
    /// The whole pass.
    training: f64,
}

/// The time of a byte that a step writes to a file and reads back, relative to a byte of the few that are measured: those are still in a
/// cache when they are read. Steps of t5-small that write 230 to 610 MB took 1.6 to 2.4 times as long for each byte (`bench pace`, AMD EPYC
/// of 32 MiB).
const FROM_NO_CACHE: f64 = 2.0;
/// [`Prices::weights`] with this factor, from the same steps.
const WEIGHTS: f64 = 3.0;

impl Speed {
    /// Picoseconds of products of `rows` rows with these weights.
    pub fn products_ps(&self, elements: Elements, rows: f64) -> f64 {
        let AnswerSpeed { f32_weights, bf16_weights, .. } = &self.answers;
        elements.f32 * f32_weights.element_ps(rows, self.product_ps)
            + elements.narrow * bf16_weights.element_ps(rows, self.product_ps)
    }

    /// Picoseconds to write a byte to a file and read it back, among many bytes. If no file could be made, the built-in price applies.
    pub(crate) fn byte_in_files_ps(&self) -> f64 {
        self.file_byte_ps.map_or(Prices::vectors().file_byte * self.product_ps, |time| FROM_NO_CACHE * time)
    }

    fn times(&self, model: &t5::Config, tokens: (usize, usize), arithmetic: &Arithmetic) -> Times {
        let [again, heads, backward] = sums(arithmetic);
        let attention_backward = ATTENTION_BACKWARD * heads;
        let in_products = arithmetic.training - arithmetic.head - heads - attention_backward;
        #[expect(clippy::cast_precision_loss, reason = "sizes of a model")]
        let elements = model.d_model as f64
            * (model.num_layers as f64 * tokens.0 as f64
                + DECODER_BLOCK * model.num_decoder_layers as f64 * tokens.1 as f64);
        let (between, between_backward) = (self.between_ps * elements, self.between_backward_ps * elements);
        // Encoder and decoder attend to their own tokens; the decoder also attends to the source.
        #[expect(clippy::cast_precision_loss, reason = "tokens of a sample")]
        let keys = ((tokens.0 + tokens.1) as f64 / 2.0).max(1.0);
        let heads_time = self.attention_ps * (1.0 + self.attention_overhead_keys / keys) * heads;
        let attention_backward_time =
            self.attention_backward_ps * (1.0 + self.attention_backward_overhead_keys / keys) * attention_backward;
        let products = self.product_ps * in_products;
        let backward_time =
            self.product_ps * (backward - attention_backward) + attention_backward_time + between_backward;
        Times {
            again: self.product_ps * (again - heads) + between,
            heads: heads_time,
            backward: backward_time,
            products,
            training: products
                + heads_time
                + attention_backward_time
                + self.head_ps * arithmetic.head
                + between
                + between_backward,
        }
    }

    /// The prices of steps of a model with this arithmetic over samples of at most these lengths.
    fn prices(
        &self,
        model: &t5::Config,
        options: &TrainerOptions,
        tokens: (usize, usize),
        counter: &StepCounter<'_>,
    ) -> Prices {
        let arithmetic = &counter.arithmetic(1);
        let times = self.times(model, tokens, arithmetic);
        let [again, heads, backward] = sums(arithmetic);
        let average = times.training / arithmetic.training;
        let relative = |time: f64, multiply_adds: f64| coarse(time / multiply_adds.max(1.0) / average);
        // A product's rows are tokens of one side, but a micro-batch is counted in tokens of both sides.
        let of_products = 2.0 * self.product_overhead_rows;
        let built_in = match self.card {
            Some(card) => {
                let casts = options.precision.activations() == DType::BF16;
                let weight_cast = if casts { relative(card.cast_ps, 1.0) } else { 0.0 };
                let time = |ps: Option<f64>| ps.map_or(0.0, |ps| relative(ps, 1.0));
                let (launches, graph) = (card.launches, card.launches.and_then(|launches| launches.graph));
                Prices {
                    bus_byte: relative(card.bus_byte_ps, 1.0),
                    locked_bus_byte: time(card.locked_byte_ps),
                    weight_cast,
                    launch: time(launches.map(|launches| launches.kernel_ps)),
                    product_launch: time(launches.map(|launches| launches.product_ps)),
                    graph_launch: time(graph.map(|graph| graph.launch_ps)),
                    graph_node: time(graph.map(|graph| graph.node_ps)),
                    ..Prices::card()
                }
            }
            None => Prices::of_units(options.precision.activations()),
        };
        let (overhead_tokens, again_overhead_tokens) = match self.card {
            Some(card) => (card.fixed(counter, options) / (times.training / (tokens.0 + tokens.1).max(1) as f64), 0.0),
            None => (of_products * times.products / times.training, of_products),
        };
        Prices {
            overhead_tokens: coarse(overhead_tokens),
            again_overhead_tokens: coarse(again_overhead_tokens),
            again: relative(times.again, again - heads),
            heads: relative(times.heads, heads),
            second: relative(times.again + times.heads + times.backward, again + backward),
            file_byte: self.file_byte_ps.map_or(built_in.file_byte, |_| relative(self.byte_in_files_ps(), 1.0)),
            weights: if self.file_byte_ps.is_some() { WEIGHTS } else { built_in.weights },
            overhead_rows: coarse(self.head_overhead_rows),
            multiply_add_ps: Some(significant(average)),
            parameter_ps: Some(significant(self.update_ps)),
            ..built_in
        }
    }
}

impl CardTimes {
    /// The fixed cost of a micro-batch. If the host's launches have their own price, it is the card's own time for as many kernels, which a
    /// graph shows. Otherwise it is the time of the launches, even if a card hides them.
    #[expect(clippy::cast_precision_loss, reason = "requests of a step")]
    fn fixed(self, counter: &StepCounter<'_>, options: &TrainerOptions) -> f64 {
        let levers = Levers { micro_batch_samples: 1, loss_chunk_rows: 256, ..Levers::default() };
        let calls = counter.calls(&levers, options);
        let each = match self.launches {
            Some(launches) => launches.graph.map_or(0.0, |graph| graph.node_ps),
            None => self.launch_ps,
        };
        each * (calls.launches + calls.products) as f64
    }
}

impl MachineSpeed {
    /// The speed with activations of this dtype.
    pub fn in_precision(&self, activations: DType) -> &Speed {
        if activations == DType::BF16 { &self.bf16 } else { &self.f32 }
    }

    /// The prices of steps of a model over samples of at most these lengths, and the time of a step in bf16 relative to the same step in
    /// f32.
    ///
    /// # Errors
    /// An unknown item in `freeze`, or everything frozen.
    pub fn prices(
        &self,
        model: &t5::Config,
        options: &TrainerOptions,
        tokens: (usize, usize),
    ) -> Result<(Prices, f64)> {
        let counter = StepCounter::new(model, options, 1, tokens, &Processes::default())?;
        let place = if self.f32.card.is_some() { MemorySpace::Device } else { MemorySpace::Host };
        let (arithmetic, counter) = (counter.arithmetic(1), counter.at(place, options));
        let [f32, bf16] = [&self.f32, &self.bf16].map(|speed| speed.times(model, tokens, &arithmetic).training);
        let prices = self.in_precision(options.precision.activations()).prices(model, options, tokens, &counter);
        Ok((prices, bf16 / f32))
    }
}

/// Multiply-adds of all blocks: forward a second time, the part of it for attention outputs, and backward.
fn sums(arithmetic: &Arithmetic) -> [f64; 3] {
    let sum = |of: fn(&BlockArithmetic) -> f64| arithmetic.blocks.iter().map(of).sum();
    [sum(|block| block.again), sum(|block| block.heads), sum(|block| block.backward)]
}

/// Rounds to an eighth of a power of two; 0 stays 0.
fn coarse(value: f64) -> f64 {
    let rounded = ((value.max(1e-9).log2() * 8.0).round() / 8.0).exp2();
    if value < 1e-3 { 0.0 } else { significant(rounded) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::speed as even;

    fn prices(speed: &Speed) -> Prices {
        let model = t5::Config::preset("t5-small").unwrap();
        let machine = MachineSpeed { f32: *speed, bf16: *speed };
        machine.prices(&model, &TrainerOptions::default(), (256, 256)).unwrap().0
    }

    #[test]
    fn on_a_machine_of_one_speed_every_multiply_add_has_the_same_price() {
        let prices = prices(&even());
        assert_eq!((prices.again, prices.heads, prices.second), (1.0, 1.0, 1.0));
        assert_eq!((prices.overhead_tokens, prices.overhead_rows), (0.0, 0.0));
        assert_eq!((prices.multiply_add_ps, prices.parameter_ps), (Some(10.0), Some(100.0)));
        assert!((prices.file_byte / (FROM_NO_CACHE * 55.0) - 1.0).abs() < 0.05, "{prices:?}");
        assert_eq!(prices.weights, WEIGHTS);
        let without_files = self::prices(&Speed { file_byte_ps: None, ..even() });
        assert_eq!(without_files.file_byte, Prices::vectors().file_byte);
    }

    #[test]
    fn slow_attention_raises_the_price_of_its_outputs_and_little_else() {
        let slow = prices(&Speed { attention_ps: 30.0, ..even() });
        assert!(slow.heads > 2.4 && slow.heads < 3.1, "{slow:?}");
        assert!((slow.again - 1.0).abs() < 0.1, "{slow:?}");
        assert!(slow.multiply_add_ps.unwrap() > 10.0);
        // Samples have 256 tokens.
        let fixed = prices(&Speed { attention_overhead_keys: 512.0, ..even() });
        assert_eq!(fixed, slow);
    }

    #[test]
    fn a_card_is_priced_by_its_bus_and_its_launches() {
        let card = CardTimes {
            bus_byte_ps: 5000.0,
            locked_byte_ps: Some(900.0),
            launch_ps: 0.0,
            cast_ps: 3.0,
            launches: None,
        };
        let fast = prices(&Speed { card: Some(card), product_overhead_rows: 64.0, ..even() });
        assert!(
            (fast.of_bus(false) / 500.0 - 1.0).abs() < 0.05 && (fast.of_bus(true) / 90.0 - 1.0).abs() < 0.05,
            "{fast:?}"
        );
        assert_eq!((fast.overhead_tokens, fast.again_overhead_tokens), (0.0, 0.0));
        assert_eq!((fast.enough_tokens, fast.never_keeps_logits), (Prices::card().enough_tokens, true));
        // About six hundred launches and products of 4 microseconds, and about 90 million multiply-adds a token.
        let slow = prices(&Speed { card: Some(CardTimes { launch_ps: 4e6, ..card }), ..even() });
        assert!((1.0..8.0).contains(&slow.overhead_tokens), "{slow:?}");
        assert!(slow.are_sound() && !slow.knows_graphs());
        assert_eq!((slow.launch, slow.product_launch, slow.graph_launch, slow.graph_node), (0.0, 0.0, 0.0, 0.0));
        // If launches have their own price, they are no longer a fixed cost. A node of a graph is: the card needs a quarter of the launch
        // time for it.
        let graph = Some(GraphTimes { launch_ps: 8e6, node_ps: 1e6 });
        let launches = Some(LaunchTimes { kernel_ps: 4e6, product_ps: 5e6, graph });
        let priced = prices(&Speed { card: Some(CardTimes { launch_ps: 4e6, launches, ..card }), ..even() });
        assert!((3.9..4.1).contains(&(slow.overhead_tokens / priced.overhead_tokens)), "{priced:?}");
        for (price, ps) in [(priced.launch, 4e6), (priced.product_launch, 5e6), (priced.graph_launch, 8e6)] {
            assert!((price * 10.0 / ps - 1.0).abs() < 0.05, "{priced:?}");
        }
        assert!((priced.graph_node / 1e5 - 1.0).abs() < 0.05 && priced.knows_graphs() && priced.are_sound());
        let without_graphs = Some(LaunchTimes { kernel_ps: 4e6, product_ps: 5e6, graph: None });
        let card = Some(CardTimes { launches: without_graphs, ..card });
        let priced = prices(&Speed { card, ..even() });
        assert!(priced.launch > 0.0 && priced.overhead_tokens == 0.0 && !priced.knows_graphs(), "{priced:?}");
    }

    #[test]
    fn times_and_prices_of_earlier_programs_are_read_and_launches_have_none() {
        let old = r#"{"bus_byte_ps": 5000.0, "launch_ps": 4e6, "cast_ps": 3.0}"#;
        let card: CardTimes = serde_json::from_str(old).unwrap();
        let expected =
            CardTimes { bus_byte_ps: 5000.0, locked_byte_ps: None, launch_ps: 4e6, cast_ps: 3.0, launches: None };
        assert_eq!(card, expected);
        let priced = prices(&Speed { card: Some(card), ..even() });
        assert_eq!(priced.of_bus(true), priced.of_bus(false));
        assert_eq!(serde_json::to_value(card).unwrap(), serde_json::from_str::<serde_json::Value>(old).unwrap());
        // A table without prices of launches is written without them, and can be read again.
        let table = serde_json::to_value(Prices::card()).unwrap();
        assert!(table.get("launch").is_none() && table.get("graph_node").is_none(), "{table}");
        assert_eq!(serde_json::from_value::<Prices>(table).unwrap(), Prices::card());
    }

    #[test]
    fn noise_of_a_measurement_rarely_moves_a_price() {
        for value in [0.5, 1.0, 2.0, 64.0] {
            for noise in [0.97, 1.0, 1.03] {
                assert_eq!(coarse(value * noise), value);
            }
        }
        assert_eq!((coarse(0.0), coarse(1.09), significant(0.012_345)), (0.0, 1.09, 0.0123));
    }

    #[test]
    fn a_model_in_bf16_takes_as_long_as_its_products_do() {
        let half = Speed { product_ps: 5.0, attention_ps: 5.0, attention_backward_ps: 5.0, head_ps: 5.0, ..even() };
        let model = t5::Config::preset("t5-small").unwrap();
        let machine = MachineSpeed { f32: even(), bf16: half };
        let (_, ratio) = machine.prices(&model, &TrainerOptions::default(), (256, 256)).unwrap();
        assert!((ratio - 0.5).abs() < 1e-9, "{ratio}");
        assert_eq!(machine.in_precision(DType::BF16).product_ps, 5.0);
    }
}
