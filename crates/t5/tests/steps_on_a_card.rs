//! For recorded steps, the peak of tensors on a card is the predicted one. The driver counts it. Runs on a card, or on the emulated one.
//! The test is a process of its own, because a card counts all tensors of a process.
#![cfg(feature = "cuda")]

use candle_core::{DType, Tensor};
use t5::step::count::{Counter, Precisions, Shape};
use t5::{Config, Error, Files, Gradients, Levers, MicroBatch, Observer, StepContext, T5};

/// An observer that changes no weight.
struct Nothing;

impl Observer<Tensor, Error> for Nothing {}

#[test]
fn recorded_steps_hold_at_their_peak_what_was_predicted() {
    let card = t5_ops::open_card(0).expect("a card, or the emulated one");
    let config = Config {
        vocab_size: 900,
        d_model: 64,
        d_ff: 192,
        d_kv: 16,
        num_heads: 4,
        num_layers: 2,
        num_decoder_layers: 2,
        ..Config::default()
    };
    let levers = Levers { micro_batch_samples: 3, loss_chunk_rows: 16, repeats: true, ..Levers::default() };
    for (activations, recompute_blocks) in [(DType::F32, 0), (DType::BF16, 0), (DType::F32, 4)] {
        let levers = Levers { recompute_blocks, ..levers };
        let tensors = || t5_ops::device_bytes(&card).expect("a card counts");
        let before = tensors().tensors;
        let mut model = T5::init(&config, 1, DType::F32, &card).unwrap();
        model.repeat_micro_batches(true);
        let mut gradients = Gradients::new(model.parameters(), DType::F32, &|_| true);
        let shape = Shape { samples: 3, source_tokens: 40, target_tokens: 33 };
        let step = |number: u64, gradients: &mut Gradients| {
            let row =
                |length: usize| (0..length).map(|i| 3 + (i as u64 * 7 + number) as u32 % 800).collect::<Vec<u32>>();
            let (source, target) = (row(40), row(33));
            let batch = MicroBatch::new(&[&source[..]; 3], &[&target[..]; 3], &[0, 1, 2], &config, &card).unwrap();
            let cx = StepContext {
                seed: 5,
                step: number,
                dropout: 0.1,
                adapter_dropout: 0.0,
                activations,
                recompute_blocks,
                loss_chunk_rows: 16,
                target_tokens: 99,
            };
            gradients.clear();
            let files = Files::in_directory(&std::env::temp_dir());
            assert!(model.step(&[batch], &cx, None, &files, gradients, &mut Nothing).unwrap());
        };
        // The first steps run launch by launch, are measured, and are recorded. Those that are counted are launched.
        (0..6).for_each(|number| step(number, &mut gradients));
        t5_ops::release_unused_of_device(&card).unwrap();
        (6..9).for_each(|number| step(number, &mut gradients));
        let counted = tensors().tensors_most - before;
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
        // Gaps in the arena are not predicted one by one: a known limit of recorded steps. All else is within 5 %.
        assert!((0.95..=1.08).contains(&share), "{activations:?}: {counted} bytes of {predicted}");
        model.release_micro_batches();
        assert!(tensors().tensors - before < 2 * gradients.bytes() + gradients.bytes() / 10, "memory is given back");
    }
}
