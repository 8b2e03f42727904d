//! For recorded steps, the peak of tensors on a card is the predicted one. The driver counts it. Steps that cannot be recorded have the bits
//! of others. Runs on a card, or on the emulated one. The tests are a process of their own, because a card counts all tensors of a process.
#![cfg(feature = "cuda")]

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use t5::step::count::{Counter, Precisions, Shape};
use t5::{Config, Error, Files, Gradients, LayerMajor, Levers, MicroBatch, Observer, StepContext, T5};

/// An observer that changes no weight.
struct Nothing;

impl Observer<Tensor, Error> for Nothing {}

/// Held by the test that is allocating on the card.
static ALONE: Mutex<()> = Mutex::new(());

fn card() -> Device {
    cuda_device::open_card(0).expect("a card, or the emulated one")
}

fn config() -> Config {
    Config {
        vocab_size: 900,
        d_model: 64,
        d_ff: 192,
        d_kv: 16,
        num_heads: 4,
        num_layers: 2,
        num_decoder_layers: 2,
        ..Config::default()
    }
}

/// The batch of a step, whose ids differ from step to step.
fn batch(number: u64, shape: Shape, card: &Device) -> MicroBatch {
    let row = |length: usize| (0..length).map(|i| 3 + (i as u64 * 7 + number) as u32 % 800).collect::<Vec<u32>>();
    let (source, target) = (row(shape.source_tokens), row(shape.target_tokens));
    let samples: Vec<u32> = (0..shape.samples as u32).collect();
    let of_each = |row: &'_ [u32]| vec![row.to_vec(); shape.samples];
    let (sources, targets) = (of_each(&source), of_each(&target));
    let [sources, targets] = [&sources, &targets].map(|rows| rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
    MicroBatch::new(&sources, &targets, &samples, &config(), card).unwrap()
}

fn context(step: u64, activations: DType, recompute_blocks: usize) -> StepContext {
    StepContext {
        seed: 5,
        step,
        dropout: 0.1,
        adapter_dropout: 0.0,
        activations,
        recompute_blocks,
        loss_chunk_rows: 16,
        target_tokens: 99,
        token_loss: t5_ops::TokenLoss::default(),
    }
}

#[test]
fn steps_that_cannot_be_recorded_have_the_bits_of_others() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let card = card();
    let shape = Shape { samples: 2, source_tokens: 12, target_tokens: 9 };
    let gradients_of = |repeats: bool| {
        let mut model = T5::init(&config(), 1, DType::F32, &card).unwrap();
        model.repeat_micro_batches(repeats);
        // Sums in bf16 have no kernel. That shows when backward is recorded, after forward has run.
        let mut gradients = Gradients::new(model.parameters(), DType::BF16, &|_| true);
        let files = Files::in_directory(&std::env::temp_dir());
        let step = |number: u64| {
            gradients.clear();
            let (batches, cx) = ([batch(number, shape, &card)], context(number, DType::F32, 0));
            assert!(model.step(&batches, &cx, None, &files, &mut gradients, &mut Nothing).unwrap());
            let bits = |x: &Tensor| {
                let x = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                x.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            gradients.iter().map(|(_, gradient)| bits(gradient)).collect::<Vec<_>>()
        };
        (0..6).map(step).collect::<Vec<_>>()
    };
    let (expected, got) = (gradients_of(false), gradients_of(true));
    for (number, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let other = got.iter().zip(expected).filter(|(got, expected)| got != expected).count();
        assert_eq!(other, 0, "step {number}: {other} of {} gradients have other bits", expected.len());
    }
}

/// An observer that ends a step when it is asked for the so many-th time.
struct EndsAt(usize);

impl Observer<Tensor, Error> for EndsAt {
    fn interrupted(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

#[test]
fn a_step_that_is_given_up_leaves_no_weights_on_the_card() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Weights are larger than the units in which a card gives memory.
    let (card, config) = (card(), Config { d_model: 256, d_ff: 1024, ..config() });
    let files = Files { in_host_memory: true, ..Files::in_directory(&std::env::temp_dir()) };
    let mut model = T5::init(&config, 1, DType::F32, &card).unwrap();
    model.move_weights(Some(&files)).unwrap();
    let tensors = || cuda_device::device_bytes(&card).expect("a card counts");
    for copies_overlap in [false, true] {
        let layers =
            LayerMajor { weights_on_disk: true, in_host_memory: true, copies_overlap, ..LayerMajor::default() };
        let shape = Shape { samples: 1, source_tokens: 5, target_tokens: 4 };
        let step = |observer: &mut dyn Observer<Tensor, Error>| {
            let mut gradients = Gradients::new(model.parameters(), DType::F32, &|_| true);
            let (batches, cx) = ([batch(1, shape, &card), batch(2, shape, &card)], context(1, DType::F32, 0));
            model.step(&batches, &cx, Some(&layers), &files, &mut gradients, observer)
        };
        // Lists are uploaded, and stay.
        assert!(step(&mut Nothing).unwrap());
        cuda_device::release_unused_of_device(&card).unwrap();
        let before = tensors().tensors;
        assert!(step(&mut Nothing).unwrap());
        let most = tensors().tensors_peak - before;
        assert_eq!(tensors().tensors, before);
        for asked in 1.. {
            let is_made = step(&mut EndsAt(asked)).unwrap();
            assert_eq!(tensors().tensors, before, "ended when asked {asked} times, {copies_overlap}");
            if is_made {
                assert!(asked > 12, "blocks ask");
                break;
            }
        }
        // A card of so much memory.
        for part in 1..16 {
            cuda_device::limit_device(&card, before + most * part / 16).unwrap();
            let error = step(&mut Nothing).unwrap_err().to_string();
            assert!(cuda_device::is_out_of_device_memory(&error), "{error}");
            // Lists were forgotten.
            let left = tensors().tensors;
            assert!(left <= before, "{left} bytes instead of {before}, {part} sixteenths, {copies_overlap}");
        }
        cuda_device::limit_device(&card, u64::MAX).unwrap();
        assert!(step(&mut Nothing).unwrap());
    }
}

#[test]
fn recorded_steps_hold_at_their_peak_what_was_predicted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (card, config) = (card(), config());
    let levers = Levers { micro_batch_samples: 3, loss_chunk_rows: 16, repeats: true, ..Levers::default() };
    for (activations, recompute_blocks) in
        [(DType::F32, 0), (DType::F32, 2), (DType::F32, 4), (DType::BF16, 0), (DType::BF16, 1), (DType::BF16, 4)]
    {
        let levers = Levers { recompute_blocks, ..levers };
        let tensors = || cuda_device::device_bytes(&card).expect("a card counts");
        let before = tensors().tensors;
        let mut model = T5::init(&config, 1, DType::F32, &card).unwrap();
        model.repeat_micro_batches(true);
        let mut gradients = Gradients::new(model.parameters(), DType::F32, &|_| true);
        let shape = Shape { samples: 3, source_tokens: 40, target_tokens: 33 };
        let step = |number: u64, gradients: &mut Gradients| {
            let (batch, cx) = (batch(number, shape, &card), context(number, activations, recompute_blocks));
            gradients.clear();
            let files = Files::in_directory(&std::env::temp_dir());
            assert!(model.step(&[batch], &cx, None, &files, gradients, &mut Nothing).unwrap());
        };
        // The first steps run launch by launch, are measured, and are recorded. Those that are counted are launched.
        (0..6).for_each(|number| step(number, &mut gradients));
        cuda_device::release_unused_of_device(&card).unwrap();
        (6..9).for_each(|number| step(number, &mut gradients));
        let counted = tensors().tensors_peak - before;
        let precisions = Precisions { parameters: DType::F32, activations, gradients: DType::F32 };
        let counter = Counter::new(&config, precisions, 0.1, &|_| true).unwrap().on_device(&|_| [0, 0]);
        let (step, beside) = (counter.step(shape, &levers).total(), counter.recorded_beside(shape, &levers));
        // Weights in f32 have the bytes of their gradients: hence twice.
        let predicted = step + beside + 2 * gradients.bytes();
        let share = counted as f64 / predicted as f64;
        println!("graphs hold {} bytes, beside {:?}", model.recorded_bytes(), counter.step(shape, &levers));
        println!(
            "{activations:?}, {recompute_blocks} recomputed: {counted} bytes of {predicted}, {beside} of them for graphs"
        );
        assert!((0.95..=1.0).contains(&share), "{activations:?}: {counted} bytes of {predicted}");
        model.release_micro_batches();
        assert!(tensors().tensors - before < 2 * gradients.bytes() + gradients.bytes() / 10, "memory is given back");
    }
}
