//! The measurement of a machine's speed: the operations of a step, timed one kind after another.
//!
//! The measurement runs before memory is measured, on threads of its own, and holds one matrix of a block at a time. It frees
//! everything, and its peak is below every plan's. Other programs can only make work slower. So the shortest of several times counts, less
//! the time in which threads waited for a processor.

mod answers;
mod launches;
mod times;

use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use cuda_device::copies::{Download, Upload, WriteBack};
use cuda_device::page_locked::PageLocked;
use serde::{Deserialize, Serialize};
use t5::{Files, ParameterSpec};
use t5_ops::{
    Activation, AdafactorHyper, Attended, Attention, CrossEntropy, Dropout, SecondMoment, SquareSums,
    adafactor_with_sums, attention, attention_backward, dropout, dropout_add, feed_forward_activation,
    feed_forward_activation_backward, linear, linear_backward_input, linear_backward_weight,
    linear_cross_entropy_backward, rms_norm, rms_norm_backward,
};
use tensor_storage::unallocated;

use self::times::{shortest, shortest_on, shortest_without};
use crate::rounding::significant;
use crate::speed::{CardTimes, MachineSpeed, Speed};

/// The measured sizes: those of a model, but no larger than needed for full speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredSizes {
    /// Width of a block.
    pub d_model: usize,
    /// Width of its feed-forward layer.
    pub d_ff: usize,
    /// Heads.
    pub heads: usize,
    /// Size of a head.
    pub d_kv: usize,
    /// Whether weights and gradients come from memory for each use, because no cache holds those of the whole model.
    pub from_memory: bool,
}

impl MeasuredSizes {
    /// The sizes to measure for a model.
    pub fn new(model: &t5::Config) -> Self {
        let d_kv = model.d_kv.min(256);
        Self {
            d_model: model.d_model.min(1024),
            d_ff: model.d_ff.min(2048),
            heads: model.num_heads.min((1024 / d_kv).max(1)),
            d_kv,
            from_memory: 2 * BYTES_OF_A_WEIGHT * ParameterSpec::elements_of_all(model) > MAX_CACHED,
        }
    }

    fn inner(&self) -> usize {
        self.heads * self.d_kv
    }
}

/// Bytes of a weight in f32; its gradient has as many.
const BYTES_OF_A_WEIGHT: u64 = 4;
/// Bytes that a processor's last cache holds, approximately.
const MAX_CACHED: u64 = 32 << 20;

/// The time that one kind of work may take.
const OF_A_KIND: Duration = Duration::from_millis(90);
/// An update reads a gradient twice and a parameter once, and writes the parameter. In this measurement the written values stay in a cache.
/// In a step they are written back to make room for the next ones.
const WRITTEN_BACK: f64 = 4.0 / 3.0;
/// Rows of the shorter of the two products whose times give the fixed cost. With fewer rows some products are computed as their transposes,
/// which packs no weight.
const FEW_ROWS: usize = 192;
/// Rows of the shorter product on a card, for each unit of [`Measured::scale`]: a card needs more rows to be busy.
const FEW_ROWS_OF_CARDS: usize = 64;
/// The largest plausible fixed cost of a product, in rows.
const MAX_OVERHEAD_ROWS: f64 = 256.0;
/// Multiply-adds of the longer product, approximately.
const MANY_MULTIPLY_ADDS: usize = 1 << 30;
/// Words of the measured vocabulary.
const VOCABULARY: usize = 2048;
/// Rows of the two chunks of logits whose times give the fixed cost of a chunk.
const CHUNKS: [usize; 2] = [256, 64];
/// The largest plausible fixed cost of a chunk, in rows.
const MAX_OVERHEAD_CHUNK_ROWS: f64 = 128.0;
/// Tokens of the measured attention, and rows of the measured operations between products.
const TOKENS: usize = 256;
/// Tokens of a sample in the two measurements of attention whose times give the fixed cost of a query.
const ATTENDED: [usize; 2] = [TOKENS, 32];
/// The largest plausible fixed cost of a query, in keys.
const MAX_OVERHEAD_KEYS: f64 = 1024.0;
/// Bytes that are written to a file.
const FILE_BYTES: usize = 4 << 20;
/// [`Measured::scale`] of cards.
const SCALE_OF_CARDS: usize = 8;
/// The factor by which [`Measured::scale`] is larger for fast cards.
const FASTER: usize = 4;
/// A card is fast if its products of a few rows take less than this many seconds, about the time that the host takes to launch them.
/// Measured like other cards, an H200 would have a predicted step time of 1.6 times the real one.
const SHORT: f64 = 2e-3;
/// Free memory that a card needs to be measured as a fast one, in bytes.
const ROOM: u64 = 1 << 30;
/// Bytes that are copied to a card.
const BUS_BYTES: usize = 8 << 20;

/// Measures the machine with operations of these sizes. Files are in `directory`, if it can hold any.
///
/// # Errors
/// An operation failed.
pub fn measure(sizes: MeasuredSizes, directory: &Path) -> candle_core::Result<MachineSpeed> {
    t5_ops::with_temporary_threads(|| {
        let file_byte_ps = file_byte(directory)?.map(significant);
        let of = |dtype| Measured::new(sizes, dtype, &Device::Cpu)?.speed(file_byte_ps, None);
        Ok(MachineSpeed { f32: of(DType::F32)?, bf16: of(DType::BF16)? })
    })
}

/// Measures a card with operations of these sizes. Files are in `directory`, if it can hold any. A card that does not multiply bf16 gets
/// the speed of f32 for bf16.
///
/// # Errors
/// An operation failed.
pub fn measure_card(sizes: MeasuredSizes, device: &Device, directory: &Path) -> candle_core::Result<MachineSpeed> {
    let speed = t5_ops::with_temporary_threads(|| {
        let file_byte_ps = file_byte(directory)?.map(significant);
        let times = [bus_byte(device)?, launch(device)?, weight_cast(device)?];
        let [bus_byte_ps, launch_ps, cast_ps] = times.map(|seconds| significant(seconds * 1e12));
        let locked_byte_ps = pinned_byte(device)?.map(|seconds| significant(seconds * 1e12));
        let launches = Some(launches::times(device)?);
        let card = Some(CardTimes { bus_byte_ps, locked_byte_ps, launch_ps, cast_ps, launches });
        let of = |dtype| Measured::new(sizes, dtype, device)?.speed(file_byte_ps, card);
        let f32 = of(DType::F32)?;
        let has_bf16 = cuda_device::check_dtype(device, DType::BF16).is_ok();
        Ok(MachineSpeed { f32, bf16: if has_bf16 { of(DType::BF16)? } else { f32 } })
    });
    cuda_device::release_unused_of_device(device)?;
    speed
}

/// The measurement of one dtype of activations.
struct Measured<'a> {
    sizes: MeasuredSizes,
    dtype: DType,
    device: &'a Device,
    /// The rows and samples that the device needs to be busy, over those of a processor.
    scale: usize,
}

impl<'a> Measured<'a> {
    fn new(sizes: MeasuredSizes, dtype: DType, device: &'a Device) -> candle_core::Result<Self> {
        let scale = if device.is_cpu() { 1 } else { SCALE_OF_CARDS };
        let measured = Self { sizes, dtype, device, scale };
        let has_room = || cuda_device::device_bytes(device).is_none_or(|bytes| bytes.free > ROOM);
        let is_fast = !device.is_cpu() && has_room() && measured.products(measured.few_rows())? < SHORT;
        Ok(if is_fast { Self { scale: scale * FASTER, ..measured } } else { measured })
    }

    fn speed(&self, file_byte_ps: Option<f64>, card: Option<CardTimes>) -> candle_core::Result<Speed> {
        let few_rows = self.few_rows();
        let few = self.products(few_rows)?;
        let many_rows = self.many_rows(few);
        let many = self.products(many_rows)?;
        let (few_rows, rows) = (few_rows as f64, many_rows as f64);
        // A product over r rows takes `time * (r + overhead)`.
        let a_row = ((many - few) / (rows - few_rows)).clamp(many / (rows + MAX_OVERHEAD_ROWS), many / rows);
        let chunks = CHUNKS.map(|rows| rows * self.scale.min(4));
        let [whole, chunked] = [self.head(chunks[0])?, self.head(chunks[1])?];
        let [long, short] = [self.attention(ATTENDED[0])?, self.attention(ATTENDED[1])?];
        let [attention, attention_backward] =
            [0, 1].map(|pass| with_fixed_cost(ATTENDED, [long[pass], short[pass]], MAX_OVERHEAD_KEYS));
        let [between, between_backward] = self.between()?;
        let ps = |seconds: f64| significant(seconds * 1e12);
        let head = with_fixed_cost(chunks, [whole, chunked], MAX_OVERHEAD_CHUNK_ROWS);
        Ok(Speed {
            product_ps: ps(a_row / self.multiply_adds_of_a_row()),
            product_overhead_rows: significant((many / a_row - rows).max(0.0)),
            attention_ps: ps(attention.0),
            attention_overhead_keys: significant(attention.1),
            attention_backward_ps: ps(attention_backward.0),
            attention_backward_overhead_keys: significant(attention_backward.1),
            head_ps: ps(head.0),
            head_overhead_rows: significant(head.1),
            between_ps: ps(between),
            between_backward_ps: ps(between_backward),
            update_ps: ps(self.update()?),
            file_byte_ps,
            answers: self.answers()?,
            card,
        })
    }

    fn is_fast(&self) -> bool {
        self.scale > SCALE_OF_CARDS
    }

    fn vocabulary(&self) -> usize {
        if self.is_fast() { FASTER * VOCABULARY } else { VOCABULARY }
    }

    /// Random numbers in the dtype of activations.
    fn tensor(&self, shape: &[usize]) -> candle_core::Result<Tensor> {
        self.parameter(shape)?.to_dtype(self.dtype)
    }

    /// Random numbers in f32.
    fn parameter(&self, shape: &[usize]) -> candle_core::Result<Tensor> {
        if self.device.is_cpu() {
            return Tensor::rand(-1f32, 1f32, shape, &Device::Cpu);
        }
        // Copies of one row: random numbers for all rows would take memory on the host.
        let width = shape.last().copied().unwrap_or(1);
        let row = Tensor::rand(-1f32, 1f32, width, &Device::Cpu)?.to_device(self.device)?;
        row.broadcast_as(shape)?.contiguous()
    }

    fn zeros(&self, shape: &[usize]) -> candle_core::Result<Tensor> {
        Tensor::zeros(shape, DType::F32, self.device)
    }

    /// The shortest time of work on weights and their gradients. They come from a cache or from memory, as the model's do.
    fn shortest(
        &self,
        weights: &[&Tensor],
        limit: Duration,
        work: impl FnMut() -> candle_core::Result<()>,
    ) -> candle_core::Result<f64> {
        if !self.device.is_cpu() {
            return shortest_on(self.device, limit, work);
        }
        shortest_without(if self.evicts() { weights } else { &[] }, limit, work)
    }

    /// Whether weights and gradients are evicted from the caches before each use. A card reads them from its memory anyway, as in a step.
    fn evicts(&self) -> bool {
        self.sizes.from_memory && self.device.is_cpu()
    }

    /// The timed products: (output, input) of each, and how often a block has it.
    fn weights(&self) -> [((usize, usize), f64); 3] {
        let MeasuredSizes { d_model, d_ff, .. } = self.sizes;
        let inner = self.sizes.inner();
        [((inner, d_model), 4.0), ((d_ff, d_model), 1.0), ((d_model, d_ff), 1.0)]
    }

    /// Multiply-adds of a block's products for one row, forward and backward.
    fn multiply_adds_of_a_row(&self) -> f64 {
        self.weights().iter().map(|&((n, k), times)| 3.0 * times * (n * k) as f64).sum()
    }

    fn few_rows(&self) -> usize {
        if self.device.is_cpu() { FEW_ROWS } else { FEW_ROWS_OF_CARDS * self.scale }
    }

    /// A number of rows with which the longer product takes its share of the time on any machine.
    fn many_rows(&self, few: f64) -> usize {
        let by_size = (MANY_MULTIPLY_ADDS as f64 / self.multiply_adds_of_a_row()) as usize;
        let few_rows = self.few_rows();
        let by_time = (2.0 * OF_A_KIND.as_secs_f64() / few.max(1e-9) * few_rows as f64) as usize;
        by_size.min(by_time).clamp(3 * few_rows, 8 * few_rows) / 32 * 32
    }

    /// Seconds of a block's products over so many rows, forward and backward.
    fn products(&self, rows: usize) -> candle_core::Result<f64> {
        let mut seconds = 0.0;
        for ((n, k), times) in self.weights() {
            let (x, dy) = (self.tensor(&[rows, k])?, self.tensor(&[rows, n])?);
            let (weight, gradient) = (self.parameter(&[n, k])?, self.zeros(&[n, k])?);
            let forward = || linear(&x, &weight).map(drop);
            let backward_input = || linear_backward_input(&dy, &weight, None).map(drop);
            let backward_weight = || linear_backward_weight(&dy, &x, &gradient, true);
            seconds += times
                * if self.evicts() {
                    // Between two uses of a weight or of its gradient, a step works on all the others.
                    let limit = OF_A_KIND / 6;
                    shortest_without(&[&weight], limit, forward)?
                        + shortest_without(&[&weight], limit, backward_input)?
                        + shortest_without(&[&gradient], limit, backward_weight)?
                } else {
                    // Threads are woken once for all products, as in a step.
                    self.shortest(&[], OF_A_KIND / 2, || {
                        forward().and_then(|()| backward_input()).and_then(|()| backward_weight())
                    })?
                };
        }
        Ok(seconds)
    }

    /// Seconds of a multiply-add of attention, forward and backward, where each sample has `tokens` tokens.
    fn attention(&self, tokens: usize) -> candle_core::Result<[f64; 2]> {
        let MeasuredSizes { heads, .. } = self.sizes;
        let samples = TOKENS * self.scale / tokens;
        let shape = [samples, tokens, self.sizes.inner()];
        let [q, k, v, dout] = [self.tensor(&shape)?, self.tensor(&shape)?, self.tensor(&shape)?, self.tensor(&shape)?];
        let (lengths, numbers) = (vec![tokens; samples], (0..samples as u32).collect::<Vec<_>>());
        let dropout = Some(Dropout { samples: &numbers, ..DROPOUT });
        let of = Attention { dropout, ..Attention::new(heads, &lengths) };
        let forward = self.shortest(&[], OF_A_KIND / 2, || attention(&q, &k, &v, &of).map(drop))?;
        let (out, lse) = attention(&q, &k, &v, &of)?;
        let attended = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let backward =
            self.shortest(&[], OF_A_KIND / 2, || attention_backward(&attended, &dout, &of, None).map(drop))?;
        let product = (samples * tokens * tokens * self.sizes.inner()) as f64;
        Ok([forward / (2.0 * product), backward / (5.0 * product)])
    }

    /// Seconds of a multiply-add of the output projection and the loss, for one chunk of `rows` rows.
    fn head(&self, rows: usize) -> candle_core::Result<f64> {
        let (d_model, vocabulary) = (self.sizes.d_model, self.vocabulary());
        let (x, table) = (self.tensor(&[rows, d_model])?, self.parameter(&[vocabulary, d_model])?);
        let gradient = table.zeros_like()?;
        let labels: Vec<u32> = (0..rows as u32).map(|row| row % vocabulary as u32).collect();
        let c = CrossEntropy { logit_scale: 0.05, gradient_scale: 1e-3, chunk_rows: rows, ..CrossEntropy::default() };
        let seconds = self.shortest(&[&table, &gradient], OF_A_KIND, || {
            linear_cross_entropy_backward(&x, &table, &labels, &c, Some((&gradient, true))).map(drop)
        })?;
        Ok(seconds / (3 * rows * d_model * vocabulary) as f64)
    }

    /// Seconds of an encoder block's other operations, for each element of its input, forward and backward. Products and attention are not
    /// included.
    fn between(&self) -> candle_core::Result<[f64; 2]> {
        let MeasuredSizes { d_model, d_ff, .. } = self.sizes;
        let tokens = TOKENS * self.scale;
        let (x, hidden) = (self.tensor(&[1, tokens, d_model])?, self.tensor(&[1, tokens, d_ff])?);
        let weight = Tensor::ones(d_model, DType::F32, self.device)?;
        let dweight = weight.zeros_like()?;
        let (_, inv_rms) = rms_norm(&x, &weight, 1e-6)?;
        let d = Some(&DROPOUT);
        let forward = self.shortest(&[], OF_A_KIND / 4, || {
            for _ in 0..2 {
                drop(rms_norm(&x, &weight, 1e-6)?);
                drop(dropout_add(&x, &x, d)?);
            }
            feed_forward_activation(&hidden, None, Activation::Relu, d).map(drop)
        })?;
        let backward = self.shortest(&[], OF_A_KIND / 4, || {
            for _ in 0..2 {
                let dy = dropout(&x, d)?;
                drop(rms_norm_backward(&x, &weight, &inv_rms, dy, Some(&x), Some(&dweight))?);
            }
            let (gate, dh) = (dropout(&hidden, None)?.copy()?, hidden.copy()?);
            feed_forward_activation_backward(gate, None, Activation::Relu, d, dh).map(drop)
        })?;
        let elements = (tokens * d_model) as f64;
        Ok([forward / elements, backward / elements])
    }

    /// Seconds to update a parameter, and to add its gradient to the norm.
    fn update(&self) -> candle_core::Result<f64> {
        let MeasuredSizes { d_model, d_ff, .. } = self.sizes;
        // A step updates all parameters with a few launches.
        let rows = if self.is_fast() { 2 * FASTER * d_ff } else { d_ff };
        let [parameter, gradient] = [self.parameter(&[rows, d_model])?, self.parameter(&[rows, d_model])?];
        let second = SecondMoment::Factored { row: self.zeros(&[rows])?, col: self.zeros(&[d_model])? };
        let hyper = AdafactorHyper { beta2: 0.5, scale_parameter: false, ..AdafactorHyper::default() };
        let norm = self.shortest(&[&gradient], OF_A_KIND / 4, || SquareSums::compute(&gradient).map(drop))?;
        let sums = SquareSums::compute(&gradient)?;
        let update = self.shortest(&[&parameter, &gradient], OF_A_KIND / 4, || {
            adafactor_with_sums(&parameter, &gradient, &sums, &second, None, &hyper)
        })?;
        let written_back = if self.evicts() { WRITTEN_BACK } else { 1.0 };
        Ok((norm + update) * written_back / (rows * d_model) as f64)
    }
}

/// Returns the time of a unit of work, and the fixed cost of a piece in units, at most `most`. `in_many` and `in_few` are the times of a
/// unit in a piece of many units and of few: `t (1 + cost / units)`.
fn with_fixed_cost(units: [usize; 2], [in_many, in_few]: [f64; 2], most: f64) -> (f64, f64) {
    let [many, few] = units.map(|units| units as f64);
    let ratio = in_few / in_many;
    let cost = ((ratio - 1.0) / (1.0 / few - ratio / many).max(1e-6)).clamp(0.0, most);
    (in_many / (1.0 + cost / many), cost)
}

/// The dropout of T5, of one sample.
const DROPOUT: Dropout<'static> = Dropout { probability: 0.1, seed: 0, step: 0, site: 0, samples: &[0] };

/// Picoseconds to write a byte to a file in `directory` and read it back; `None` if the directory cannot hold a file.
fn file_byte(directory: &Path) -> candle_core::Result<Option<f64>> {
    let x = Tensor::zeros(FILE_BYTES / 4, DType::F32, &Device::Cpu)?;
    let files = Files::in_directory(directory);
    let round_trip = || files.write_and_read(x.clone()).map(drop).map_err(candle_core::Error::wrap);
    let seconds = shortest(OF_A_KIND, round_trip).ok();
    Ok(seconds.map(|seconds| seconds * 1e12 / FILE_BYTES as f64))
}

/// Seconds to copy a byte to a device or back through pinned memory: the mean of both directions.
fn bus_byte(device: &Device) -> candle_core::Result<f64> {
    let host_copy = Tensor::ones(BUS_BYTES / 4, DType::F32, &Device::Cpu)?;
    bidirectional(&host_copy, device, |there| Download::begin(there)?.complete().map(drop))
}

/// Seconds to copy a byte between page-locked memory of the host and a device. `None`: the driver locks no memory.
fn pinned_byte(device: &Device) -> candle_core::Result<Option<f64>> {
    let host_copy = Tensor::ones(BUS_BYTES / 4, DType::F32, &Device::Cpu)?;
    let lock = PageLocked::lock(&host_copy, device);
    let returned = |there: &Tensor| WriteBack::begin(there, &host_copy)?.map_or(Ok(()), WriteBack::complete);
    lock.map(|_lock| bidirectional(&host_copy, device, returned)).transpose()
}

/// Seconds to copy a byte of `host_copy` to a device, or back with `write_back`: the mean of both directions.
fn bidirectional(
    host_copy: &Tensor,
    device: &Device,
    write_back: impl Fn(&Tensor) -> candle_core::Result<()>,
) -> candle_core::Result<f64> {
    let there = unallocated::unallocated_like(host_copy, device)?;
    let up = || {
        let mut incoming = Upload::begin(&there)?;
        incoming.copy(host_copy)?;
        incoming.complete()
    };
    let up = shortest_on(device, OF_A_KIND, up)?;
    let down = shortest_on(device, OF_A_KIND, || write_back(&there))?;
    Ok((up + down) / (2 * BUS_BYTES) as f64)
}

/// Seconds to launch a kernel.
fn launch(device: &Device) -> candle_core::Result<f64> {
    let x = Tensor::ones(1, DType::F32, device)?;
    shortest_on(device, OF_A_KIND / 4, || (0..launches::LAUNCHES).try_for_each(|_| t5_ops::scaled(&x, 0.5).map(drop)))
        .map(|seconds| seconds / launches::LAUNCHES as f64)
}

/// Seconds to cast an element of a weight to bf16.
fn weight_cast(device: &Device) -> candle_core::Result<f64> {
    let weight = Tensor::ones(BUS_BYTES / 4, DType::F32, device)?;
    let seconds = shortest_on(device, OF_A_KIND / 4, || weight.to_dtype(DType::BF16).map(drop))?;
    Ok(seconds / weight.elem_count() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_gives_a_speed_for_every_kind_of_work() {
        let sizes = MeasuredSizes::new(&t5::Config::preset("tiny").unwrap());
        let speed = measure(sizes, &std::env::temp_dir()).unwrap();
        for Speed {
            product_ps, attention_ps, attention_backward_ps, head_ps, between_ps, update_ps, answers, ..
        } in [speed.f32, speed.bf16]
        {
            for value in [product_ps, attention_ps, attention_backward_ps, head_ps, between_ps, update_ps] {
                assert!(value.is_finite() && value > 0.0, "{speed:?}");
            }
            for few in [answers.f32_weights, answers.bf16_weights] {
                let times = [0.0, few.one_row_ps, few.eight_rows_ps, few.most_rows_ps, f64::MAX];
                assert!(few.one_row_ps > 0.0 && times.is_sorted(), "{speed:?}");
            }
            assert!(answers.query_ps > 0.0 && answers.block_ps + answers.token_ps > 0.0, "{speed:?}");
        }
    }

    #[test]
    fn a_fixed_cost_is_what_few_units_take_longer() {
        let time = |units: f64| 3.0 * (1.0 + 50.0 / units);
        let of = |many: f64, few: f64| with_fixed_cost([256, 32], [many, few], MAX_OVERHEAD_KEYS);
        let (each, cost) = of(time(256.0), time(32.0));
        assert!((each - 3.0).abs() < 1e-9 && (cost - 50.0).abs() < 1e-9);
        assert_eq!(of(2.0, 1.9).1, 0.0);
        assert_eq!(of(1.0, 8.0).1, MAX_OVERHEAD_KEYS);
    }

    #[test]
    fn a_directory_that_takes_no_files_has_no_speed_of_files() {
        assert_eq!(file_byte(&std::env::temp_dir().join("no-such-directory")).unwrap(), None);
    }

    #[test]
    fn large_models_are_measured_with_the_sizes_of_smaller_ones() {
        let of = |name| MeasuredSizes::new(&t5::Config::preset(name).unwrap());
        assert!(!of("tiny").from_memory);
        assert_eq!(of("t5-small"), MeasuredSizes { d_model: 512, d_ff: 2048, heads: 8, d_kv: 64, from_memory: true });
        assert_eq!(of("t5-3b"), MeasuredSizes { d_model: 1024, d_ff: 2048, heads: 8, d_kv: 128, from_memory: true });
    }
}
