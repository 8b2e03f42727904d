//! Work that is recorded on a card and launched as one graph gives the bits of the same work launch by launch. Work that cannot be recorded
//! is not recorded. Runs on a card, or on the emulated one: there also in processes whose streams do their work as late as their order
//! allows.
#![cfg(feature = "cuda")]

#[path = "support/tensors.rs"]
mod tensors;

use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError};
use candle_core::{DType, Device, Result, Tensor};
use cuda_device::Replay;
use t5_ops::{Position, Precision, Quantised};

use self::tensors::{bits, is_emulated, tensor, test_alone};

/// A variable of the emulated card (`cuda-kernels/emulation`).
const STREAMS: &str = "LOW_MEM_T5_EMULATED_STREAMS";
const GRAPHS: &str = "LOW_MEM_T5_EMULATED_GRAPHS";
const WIDTH: usize = 24;
const HEADS: usize = 3;
const VOCABULARY: usize = 17;
const SOURCE: usize = 5;

fn card() -> Device {
    cuda_device::open_card(0).expect("a card, or the emulated one")
}

/// Caches of keys and values of rows, with the bias of all positions, and the keys of their sources.
struct Cache {
    both: [Tensor; 2],
    bias: Tensor,
    source: Tensor,
}

impl Cache {
    fn new(rows: usize, capacity: usize, dtype: DType, card: &Device) -> Self {
        let empty = || Tensor::zeros((rows, capacity, WIDTH), dtype, card).unwrap();
        let bias = tensor(2, &[HEADS, 201], DType::F32, card).narrow(1, 101 - capacity, 2 * capacity - 1).unwrap();
        let source = tensor(7, &[rows, SOURCE, WIDTH], dtype, card);
        Self { both: [empty(), empty()], bias: bias.contiguous().unwrap(), source }
    }

    fn grown(&self, card: &Device) -> Self {
        let (rows, capacity, _) = self.both[0].dims3().unwrap();
        let new = Self::new(rows, 2 * capacity, self.both[0].dtype(), card);
        new.both.iter().zip(&self.both).for_each(|(new, old)| new.slice_set(old, 1, 0).unwrap());
        new
    }
}

/// Weights of a block of a decoder: a table, a norm, a projection of f32 and another one in codes.
struct Weights {
    table: Tensor,
    norm: Tensor,
    dense: Tensor,
    codes: Quantised,
}

impl Weights {
    fn new(card: &Device) -> Self {
        let on_card = |seed, shape: &[usize]| tensor(seed, shape, DType::F32, card);
        let codes =
            Quantised::quantise(&tensor(6, &[WIDTH, WIDTH], DType::F32, &Device::Cpu), Precision::Int8).unwrap();
        let codes = Quantised::new(codes.quantisation(), codes.bytes().to_device(card).unwrap()).unwrap();
        Self {
            table: on_card(3, &[VOCABULARY, WIDTH]),
            norm: on_card(4, &[WIDTH]),
            dense: on_card(5, &[WIDTH, WIDTH]),
            codes,
        }
    }

    /// A token of some rows (R, 1): the logits of the next one.
    fn token(&self, ids: &Tensor, cache: &Cache, position: Position) -> Result<Tensor> {
        let Cache { both: [keys, values], bias, source } = cache;
        let x = t5_ops::embedding(ids, &self.table, keys.dtype())?;
        let (n, _) = t5_ops::rms_norm(&x, &self.norm, 1e-6)?;
        let (k, v) = (t5_ops::linear(&n, &self.dense)?, t5_ops::linear(&n, &self.codes)?);
        t5_ops::append([keys, values], [&k, &v], position)?;
        let of_cache = t5_ops::Attention { bias: Some(bias), ..t5_ops::Attention::new(HEADS, &[]) };
        let (own, _) = t5_ops::attention_at(&n, [keys, values], &of_cache, position)?;
        // Rows like those of two caches that are answered together.
        let rows = own.dim(0)?;
        let own = t5_ops::join(&[own.narrow(0, 0, 1)?, own.narrow(0, 1, rows - 1)?])?;
        let key_lengths: Vec<usize> = (0..rows).map(|row| SOURCE - row % 3).collect();
        let a = t5_ops::Attention::new(HEADS, &key_lengths);
        let (of_source, _) = t5_ops::attention(&own, source, source, &a)?;
        let y = t5_ops::dropout_add(&x, &t5_ops::linear(&of_source, &self.dense)?, None)?;
        t5_ops::linear(&t5_ops::scaled(&y.flatten_to(1)?, 0.3)?, &self.table)
    }
}

/// The tokens of a row at a position.
fn ids(rows: usize, position: usize) -> Vec<u32> {
    (0..rows).map(|row| ((position * 7 + row * 5) % VOCABULARY) as u32).collect()
}

/// The logits of each token, launch by launch, and whether it was recorded: caches grow after some tokens.
fn answered(
    rows: usize,
    dtype: DType,
    card: &Device,
    next: &mut dyn FnMut(&Weights, &Cache, usize) -> Result<Tensor>,
) -> Vec<Vec<u32>> {
    let (weights, mut cache) = (Weights::new(card), Cache::new(rows, 8, dtype, card));
    let token = |position: usize| {
        if position == cache.both[0].dim(1).unwrap() {
            cache = cache.grown(card);
        }
        bits(&next(&weights, &cache, position).unwrap())
    };
    (0..27).map(token).collect()
}

#[test]
fn recorded_work_has_the_bits_of_work_launch_by_launch() {
    let card = card();
    // With more than 16 rows, codes become numbers in the arena.
    for (rows, dtype) in [(3, DType::F32), (2, DType::BF16), (18, DType::BF16)] {
        let expected = answered(rows, dtype, &card, &mut |weights, cache, number| {
            let ids = Tensor::new(ids(rows, number), &card)?.reshape((rows, 1))?;
            weights.token(&ids, cache, Position { number, on_card: None })
        });
        assert!(expected.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
        let (mut replay, mut recorded) = (Replay::default(), Vec::new());
        let got = answered(rows, dtype, &card, &mut |weights, cache, number| {
            let numbers = [ids(rows, number), vec![number as u32]].concat();
            let logits = replay.run(&[&cache.both[0], &cache.both[1]], &numbers, |numbers| {
                let (ids, position) = (numbers.narrow(0, 0, rows)?.reshape((rows, 1))?, numbers.narrow(0, rows, 1)?);
                weights.token(&ids, cache, Position { number, on_card: Some(&position) })
            });
            recorded.push(replay.is_recorded());
            logits
        });
        assert!(got == expected, "{rows} rows of {dtype:?}: other bits");
        // After two tokens in each of the caches, 8, 16 and 32 long.
        let expected: Vec<bool> = (0..27).map(|token| !matches!(token, 0 | 1 | 8 | 9 | 16 | 17)).collect();
        let has_graphs = std::env::var(GRAPHS).is_err();
        assert_eq!(recorded, expected.into_iter().map(|is| is && has_graphs).collect::<Vec<_>>(), "{rows} {dtype:?}");
    }
}

/// The sums that work gives in five runs, and whether they were recorded.
fn sums(replay: &mut Replay, x: &Tensor, work: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> (Vec<Vec<f32>>, bool) {
    let mut run = |step: u32| replay.run(&[x], &[step], |step| work(x, step)).and_then(|sum| sum.to_vec1());
    let sums = [3, 1, 4, 1, 5].map(|step| run(step).unwrap());
    (sums.to_vec(), replay.is_recorded())
}

#[test]
fn work_that_cannot_be_recorded_is_done_all_the_same() {
    let card = card();
    let x = Tensor::new(&[1f32, 2., 3.], &card).unwrap();
    // Memory that candle allocates, which would be the graph's, and here also a layout that is uploaded.
    let takes_memory = |x: &Tensor, step: &Tensor| x.broadcast_add(&step.to_dtype(DType::F32)?);
    // A copy to the host, which waits.
    let waits = |x: &Tensor, step: &Tensor| t5_ops::scaled(x, f64::from(step.to_vec1::<u32>()?[0]));
    // A copy from memory of the host that is no longer there when the graph runs.
    let uploads = |x: &Tensor, _: &Tensor| t5_ops::scaled(&(x + Tensor::new(&[2f32; 3], x.device())?)?, 2.0);
    let (got, is_recorded) = sums(&mut Replay::default(), &x, |x, _| x * 3.0);
    assert_eq!((got, is_recorded), (vec![vec![3., 6., 9.]; 5], false));
    let (got, is_recorded) = sums(&mut Replay::default(), &x, takes_memory);
    assert_eq!(
        (got, is_recorded),
        ([3., 1., 4., 1., 5.].map(|step| vec![1. + step, 2. + step, 3. + step]).to_vec(), false)
    );
    let (got, is_recorded) = sums(&mut Replay::default(), &x, waits);
    assert_eq!((got, is_recorded), ([3., 1., 4., 1., 5.].map(|step| vec![step, 2. * step, 3. * step]).to_vec(), false));
    let (got, is_recorded) = sums(&mut Replay::default(), &x, uploads);
    assert_eq!((got, is_recorded), (vec![vec![6., 8., 10.]; 5], false));
    // None of this may be reported by the next call.
    let (got, is_recorded) = sums(&mut Replay::default(), &x, |x, _| t5_ops::scaled(x, 2.0));
    assert_eq!((got, is_recorded), (vec![vec![2., 4., 6.]; 5], std::env::var(GRAPHS).is_err()));
}

#[test]
fn work_by_a_number_of_the_host_is_not_recorded() {
    let (card, rows) = (card(), 2);
    let (weights, cache) = (Weights::new(&card), Cache::new(rows, 8, DType::F32, &card));
    let mut replay = Replay::default();
    for number in 0..5 {
        let work = |ids: &Tensor| weights.token(&ids.reshape((rows, 1))?, &cache, Position { number, on_card: None });
        replay.run(&[&cache.both[0]], &ids(rows, number), work).unwrap();
        assert!(!replay.is_recorded(), "position {number}");
    }
}

#[test]
fn a_capture_is_ended_by_calls_that_it_forbids() {
    let card = card();
    let Device::Cuda(device) = &card else { panic!("a card") };
    let stream = device.cuda_stream();
    let there = Tensor::new(&[1f32, 2.], &card).unwrap();
    let captured = |call: &dyn Fn(&CudaStream) -> std::result::Result<(), DriverError>| {
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        let called = call(&stream).map_err(|error| error.0);
        let ended =
            stream.end_capture(CUgraphInstantiate_flags(0)).map(|graph| graph.is_some()).map_err(|error| error.0);
        (called, ended)
    };
    let unsupported =
        (Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    assert_eq!(captured(&|_| Ok(())), (Ok(()), Ok(true)));
    assert_eq!(captured(&|stream| stream.synchronize()), unsupported);
    // A wait for the whole card counts, too.
    assert_eq!(captured(&|stream| stream.context().synchronize()), unsupported);
    let event = stream.record_event(None).unwrap();
    let isolation = Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    assert_eq!(captured(&|stream| stream.wait(&event)).0, isolation);
    let failed = DriverError(CUresult::CUDA_ERROR_UNKNOWN);
    // A copy to the host is no error. It moves nothing during a recording, so the recording has to detect it.
    assert_eq!(captured(&|_| there.to_vec1::<f32>().map(drop).map_err(|_| failed)), (Ok(()), Ok(true)));
    // No work was done, and the stream continues.
    assert_eq!(there.to_vec1::<f32>().unwrap(), [1.0, 2.0]);
}

#[test]
fn streams_that_do_their_work_late_and_drivers_without_graphs_change_no_bit() {
    let name = "recorded_work_has_the_bits_of_work_launch_by_launch";
    // A real card ignores these variables, and has made recordings where the test expects none.
    if !is_emulated(&card()) {
        return;
    }
    for (variable, value) in [(STREAMS, "early"), (STREAMS, "late"), (GRAPHS, "none")] {
        let ran = test_alone(name, &[(variable, value)]);
        assert!(ran.status.success(), "{variable}={value}: {}", String::from_utf8_lossy(&ran.stdout));
    }
}
