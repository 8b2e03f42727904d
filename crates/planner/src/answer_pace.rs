//! The pace of answers and losses: the time that a plan takes for them on a machine of measured speed.
//!
//! Only the device is chosen by this pace: plans of inference follow from built-in prices.

use memory_policy::{Bytes, MemorySnapshot, MemorySpace};
use t5::{Levers, ParameterSpec, Part};

use crate::Plan;
use crate::answer_speed::Elements;
use crate::inference::{weight_fetch_time, weights_elsewhere};
use crate::job::{Inference, Job, Work};
use crate::planning::memory_for_reading;
use crate::speed::{DECODER_BLOCK, MachineSpeed, Speed};

/// The samples of a batch, and their lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnsweredBatch {
    /// Samples that are computed together.
    pub samples: usize,
    /// Caches of keys and values: one for all samples, or, in a server, one for each sample.
    pub caches: usize,
    /// Tokens of a source.
    pub source_tokens: usize,
    /// Tokens of a target or of an answer.
    pub target_tokens: usize,
}

/// The time of a batch in inference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InferencePace {
    /// Seconds until the sources have been read: the encoder, and the keys and values of cross attention that the decoder takes from its
    /// output.
    pub reading_seconds: f64,
    /// Seconds of one token of every answer, on average.
    pub token_seconds: f64,
    /// Seconds of the losses of all samples.
    pub loss_seconds: f64,
    /// Tokens of an answer.
    target_tokens: usize,
}

impl InferencePace {
    /// Seconds of all answers of the batch.
    #[expect(clippy::cast_precision_loss, reason = "tokens of an answer")]
    pub fn answers_seconds(&self) -> f64 {
        self.reading_seconds + self.target_tokens as f64 * self.token_seconds
    }
}

/// The pace of an inference plan over such a batch; `None` if the plan trains.
pub fn inference_pace(
    job: &Job<'_>,
    now: &MemorySnapshot,
    plan: &Plan,
    speed: &MachineSpeed,
    batch: AnsweredBatch,
) -> Option<InferencePace> {
    let Work::Inference(inference) = &job.work else { return None };
    let speed = speed.in_precision(inference.activations);
    let pass = Pass { job, inference, speed, batch, products: Products::count(job.model, inference) };
    Some(pass.pace(&plan.step.levers, memory_for_reading(job, now)))
}

/// Elements of the weights of products, grouped by the rows that multiply them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Products {
    /// Weights of the encoder, multiplied with all tokens of a source.
    encoder: Elements,
    /// Weights of cross attention's keys and values, also multiplied with all tokens of a source.
    source: Elements,
    /// Other weights of the decoder, multiplied with the tokens of a target; in an answer, one token after the other.
    decoder: Elements,
    /// Weights of the head, multiplied with the same tokens.
    head: Elements,
}

impl Products {
    fn count(model: &t5::Config, inference: &Inference<'_>) -> Self {
        let mut products = Self::default();
        for spec in ParameterSpec::all(model) {
            let is_of_product = spec.shape.len() == 2 && !spec.name.contains("relative_attention_bias");
            let is_of_source = ["EncDecAttention.k.", "EncDecAttention.v."].iter().any(|name| spec.name.contains(name));
            let to = match spec.part {
                Part::Shared if !model.tie_word_embeddings => continue,
                Part::Shared | Part::LmHead => &mut products.head,
                Part::Encoder { .. } => &mut products.encoder,
                _ if is_of_source => &mut products.source,
                _ => &mut products.decoder,
            };
            if is_of_product {
                *to = to.with(spec.elements(), spec.dtype(inference.parameters));
            }
        }
        products
    }
}

/// The time of a batch.
struct Pass<'a> {
    job: &'a Job<'a>,
    inference: &'a Inference<'a>,
    speed: &'a Speed,
    batch: AnsweredBatch,
    products: Products,
}

#[expect(clippy::cast_precision_loss, reason = "sizes of a model and of a batch")]
impl Pass<'_> {
    fn pace(&self, levers: &Levers, memory: Bytes) -> InferencePace {
        let seconds = |ps: f64| ps * 1e-12;
        let [encoder, decoder] = self.weight_fetch_ps(levers, memory);
        let loss = self.loss_ps(levers.loss_chunk_rows) + decoder;
        let reading = self.reading_ps() + encoder;
        InferencePace {
            reading_seconds: seconds(reading),
            token_seconds: seconds(self.token_ps() + decoder),
            loss_seconds: if self.inference.has_targets { seconds(reading + loss) } else { 0.0 },
            target_tokens: self.batch.target_tokens,
        }
    }

    /// The time of copying weights to the place of computation, for one pass of the encoder and one of the decoder.
    fn weight_fetch_ps(&self, levers: &Levers, memory: Bytes) -> [f64; 2] {
        let Job { model, .. } = self.job;
        let elsewhere = weights_elsewhere(model, &ParameterSpec::all(model), self.inference.parameters, levers);
        let bus = self.speed.card.map_or(0.0, |card| card.bus_byte_ps);
        weight_fetch_time(elsewhere, memory, self.speed.byte_in_files_ps(), bus)
    }

    /// The encoder over all sources, and the keys and values of cross attention.
    fn reading_ps(&self) -> f64 {
        let t5::Config { num_layers, .. } = *self.job.model;
        let tokens = self.source_tokens();
        let products = self.speed.products_ps(self.products.encoder, tokens)
            + self.speed.products_ps(self.products.source, tokens);
        let between = self.between_ps(num_layers as f64, tokens);
        let computed =
            products + self.attention_ps(num_layers, self.batch.source_tokens, self.batch.source_tokens) + between;
        // An encoder block has two parts, a decoder block three.
        self.beside(computed, num_layers as f64 / DECODER_BLOCK * self.speed.answers.block_ps)
    }

    /// The decoder over all targets, and their losses.
    fn loss_ps(&self, chunk_rows: usize) -> f64 {
        let (t5::Config { num_decoder_layers, .. }, speed) = (self.job.model, self.speed);
        let AnsweredBatch { source_tokens, target_tokens, .. } = self.batch;
        let rows = self.target_tokens();
        let chunks = 1.0 + speed.head_overhead_rows / chunk_rows.max(1) as f64;
        let computed = speed.products_ps(self.products.decoder, rows)
            + speed.head_ps * chunks * self.products.head.total() * rows
            + self.attention_ps(*num_decoder_layers, target_tokens, target_tokens + source_tokens)
            + self.between_ps(DECODER_BLOCK * *num_decoder_layers as f64, rows);
        self.beside(computed, *num_decoder_layers as f64 * speed.answers.block_ps)
    }

    /// The time of one token of every answer.
    fn token_ps(&self) -> f64 {
        let (t5::Config { num_decoder_layers, .. }, answers) = (self.job.model, &self.speed.answers);
        let (rows, blocks) = (self.rows(), *num_decoder_layers as f64);
        let products =
            self.speed.products_ps(self.products.decoder, rows) + self.speed.products_ps(self.products.head, rows);
        let attention = answers.query_ps * blocks * self.attended_by_token();
        let computed = products + attention + self.between_ps(DECODER_BLOCK * blocks, rows);
        let further = self.batch.caches.saturating_sub(1) as f64;
        let operations = blocks * (answers.block_ps + further * answers.source_ps) + answers.token_ps;
        self.beside(computed, operations) + self.scores_ps()
    }

    /// The time of arithmetic that takes `computed` and whose operations take `operations`. A card receives the next operation while it
    /// computes.
    fn beside(&self, computed: f64, operations: f64) -> f64 {
        match self.job.place {
            MemorySpace::Host => computed + operations,
            MemorySpace::Device => computed.max(operations),
        }
    }

    /// The time of copying each token's scores from a card, if the host looks at them.
    fn scores_ps(&self) -> f64 {
        let card = self.speed.card.filter(|_| self.inference.answer.looks_at_scores);
        let bytes = self.rows() * self.job.model.vocab_size as f64 * size_of::<f32>() as f64;
        card.map_or(0.0, |card| card.bus_byte_ps * bytes)
    }

    /// Rows of the products of one token.
    fn rows(&self) -> f64 {
        (self.batch.samples * self.inference.answer.rows) as f64
    }

    fn source_tokens(&self) -> f64 {
        (self.batch.samples * self.batch.source_tokens) as f64
    }

    fn target_tokens(&self) -> f64 {
        (self.batch.samples * self.batch.target_tokens) as f64
    }

    /// Multiply-adds of one block's attention for one token of every answer. On average the token sees half of the longest answer.
    fn attended_by_token(&self) -> f64 {
        let keys = self.batch.target_tokens as f64 / 2.0 + self.batch.source_tokens as f64;
        2.0 * self.inner() * self.rows() * keys
    }

    /// The time of attention in `blocks` blocks, forward. `queries` and `keys` are numbers per sample.
    fn attention_ps(&self, blocks: usize, queries: usize, keys: usize) -> f64 {
        let multiply_adds = 2.0 * self.inner() * (self.batch.samples * queries * keys * blocks) as f64;
        self.speed.attention_ps * (1.0 + self.speed.attention_overhead_keys / keys.max(1) as f64) * multiply_adds
    }

    /// The time of the operations between the products of encoder blocks, forward.
    fn between_ps(&self, blocks: f64, rows: f64) -> f64 {
        self.speed.between_ps * blocks * rows * self.job.model.d_model as f64
    }

    fn inner(&self) -> f64 {
        (self.job.model.num_heads * self.job.model.d_kv) as f64
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use memory_policy::{Budget, Bytes};
    use t5::{AnswerShape, Lora};

    use super::*;
    use crate::answer_speed::AnswerSpeed;
    use crate::counted::Counter;
    use crate::lever::{Pins, Value};
    use crate::speed::CardTimes;
    use crate::{RowCounts, plan, testing};

    const BATCH: AnsweredBatch = AnsweredBatch { samples: 4, caches: 1, source_tokens: 48, target_tokens: 32 };

    fn inference(parameters: DType, answer: AnswerShape) -> Inference<'static> {
        Inference {
            activations: DType::F32,
            parameters,
            stored: Some(testing::STORED),
            answer,
            counts: RowCounts::ANY,
            has_targets: true,
            rows: None,
            prompts: crate::Reading::default(),
            beside: Vec::new(),
        }
    }

    fn job<'a>(model: &'a t5::Config, inference: Inference<'a>, pins: &'a Pins) -> Job<'a> {
        let longest = (BATCH.source_tokens, BATCH.target_tokens);
        let budgets = Budget::Explicit(Bytes::gib(2)).into();
        Job::of_inference(model, inference, BATCH.samples, longest, (budgets, pins))
    }

    fn preset(name: &str) -> t5::Config {
        t5::Config::preset(name).expect("a preset")
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "whole numbers")]
    fn the_products_and_the_attention_are_those_that_are_counted() {
        let adapter = Lora { rank: 4, ..Lora::default() };
        let with_adapter = preset("tiny").with_adapter(adapter).expect("an adapter");
        for model in [preset("t5-small"), preset("t5-v1.1-small"), with_adapter] {
            for rows in [1, 3] {
                let answer = AnswerShape { rows, ..AnswerShape::greedy(BATCH.target_tokens) };
                let (inference, pins) = (inference(DType::F32, answer), Pins::default());
                let (job, speed) = (job(&model, inference.clone(), &pins), testing::speed());
                let products = Products::count(&model, &inference);
                let pass = Pass { job: &job, inference: &inference, speed: &speed, batch: BATCH, products };
                let counter = Counter::new(&model, DType::F32, DType::F32, job.longest).expect("a T5");
                let [evaluated, generated] = counter.evaluation([BATCH.samples; 2], 256, answer).multiply_adds;
                let of_source = (products.encoder.total() + products.source.total()) * pass.source_tokens();
                let of_target = products.decoder.total() + products.head.total();
                let attention = |queries, keys| pass.attention_ps(model.num_layers, queries, keys) / speed.attention_ps;
                let (source, target) = (BATCH.source_tokens, BATCH.target_tokens);
                let expected = of_source + of_target * pass.target_tokens() + attention(source, source) + {
                    attention(target, target + source)
                };
                assert_eq!(evaluated, expected);
                // The cache has room for all tokens from the first step on, so it is counted whole.
                let attended = rows as f64 * attention(target, target + source);
                let tokens = pass.rows() * target as f64;
                assert_eq!(generated, of_source + of_target * tokens + attention(source, source) + attended);
            }
        }
    }

    /// The pace of t5-small. Its weights are in memory unless these pins say otherwise.
    fn pace(parameters: DType, answer: AnswerShape, pins: &Pins, place: MemorySpace, speed: Speed) -> InferencePace {
        let model = preset("t5-small");
        let now = testing::machine();
        let now = match place {
            MemorySpace::Host => now,
            MemorySpace::Device => MemorySnapshot {
                device: Some(memory_policy::DeviceMemory {
                    total: Bytes::gib(8),
                    free: Bytes::gib(8),
                    ..Default::default()
                }),
                ..now
            },
        };
        let job = Job { place, ..job(&model, inference(parameters, answer), pins) };
        let plan = plan(&job, &now).expect("it fits").plan;
        let machine = MachineSpeed { f32: speed, bf16: speed };
        inference_pace(&job, &now, &plan, &machine, BATCH).expect("inference")
    }

    #[test]
    fn a_token_takes_the_time_of_the_decoder_s_bytes() {
        let answer = AnswerShape::greedy(BATCH.target_tokens);
        let of = |parameters, speed| pace(parameters, answer, &Pins::default(), MemorySpace::Host, speed);
        let [wide, narrow] = [DType::F32, DType::BF16].map(|dtype| of(dtype, testing::speed()).token_seconds);
        // Six blocks of 4.2 M elements, and a table of 16.4 M. The keys and values of cross attention exist already.
        let elements = 6.0 * (6.0 * 512.0 * 512.0 + 2.0 * 512.0 * 2048.0) + 32_128.0 * 512.0;
        assert!((wide / (elements * 40e-12) - 1.0).abs() < 1e-9, "{wide}");
        assert!((wide / narrow - 2.0).abs() < 1e-9, "{wide} {narrow}");
        let speed = testing::speed();
        let fixed = AnswerSpeed { block_ps: 1e9, token_ps: 5e9, ..speed.answers };
        let slow = of(DType::F32, Speed { answers: fixed, ..speed });
        assert!((slow.token_seconds - wide - 11e-3).abs() < 1e-9, "{slow:?}");
        assert!((slow.answers_seconds() - slow.reading_seconds - 32.0 * slow.token_seconds).abs() < 1e-9);
        assert!(slow.loss_seconds > slow.reading_seconds);
    }

    #[test]
    fn weights_that_wait_off_a_card_cross_the_bus_for_each_token() {
        let answer = AnswerShape::greedy(BATCH.target_tokens);
        let card = CardTimes { bus_byte_ps: 50.0, locked_byte_ps: None, launch_ps: 0.0, cast_ps: 0.0, launches: None };
        let speed = Speed { card: Some(card), file_byte_ps: Some(0.0), ..testing::speed() };
        let of = |pins: &Pins, answer, speed| pace(DType::F32, answer, pins, MemorySpace::Device, speed);
        let there = of(&Pins::default(), answer, speed);
        let off = Pins::default().with("weight_offload", Value::Word("disk"));
        let off = of(&off.with("weight_blocks_in_memory", Value::Count(0)), answer, speed);
        // All weights of the decoder, including the table, and some latency for each of them.
        let bytes = (6 * (8 * 512 * 512 + 2 * 512 * 2048) + 32_128 * 512) as f64 * 4.0;
        let bus_bytes = (off.token_seconds - there.token_seconds) / (bytes * 50e-12);
        assert!((1.0..1.1).contains(&bus_bytes), "{bus_bytes}");
        assert!(off.reading_seconds > there.reading_seconds);
        // If the host looks at scores, they cross the bus, too.
        let looks = of(&Pins::default(), AnswerShape { looks_at_scores: true, ..answer }, speed);
        let scores = 4.0 * 32_128.0 * 4.0 * 50e-12;
        assert!((looks.token_seconds - there.token_seconds - scores).abs() < 1e-9);
        // A card receives the next operation while it computes.
        let fixed = AnswerSpeed { block_ps: 1e6, ..speed.answers };
        let hidden = of(&Pins::default(), answer, Speed { answers: fixed, ..speed });
        assert!((hidden.token_seconds - there.token_seconds).abs() < 1e-12);
    }
}
