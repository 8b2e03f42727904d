//! For answers and passes, the peak of tensors on a card is the predicted one. The driver counts it. Runs on a card, or on the emulated
//! one. The test is a process of its own, because a card counts all tensors of a process.
#![cfg(feature = "cuda")]

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device};
use t5::step::count::{Counter, Precisions, Shape};
use t5::{Beams, Config, GenerateOptions, Gradients, Levers, MicroBatch, Search, StepContext, T5, Watch};

/// Held by the test that is allocating on the card.
static ALONE: Mutex<()> = Mutex::new(());

fn card() -> Device {
    cuda_device::open_card(0).expect("a card, or the emulated one")
}

/// A small model with two blocks in its encoder.
fn config(vocab_size: usize, num_decoder_layers: usize) -> Config {
    let sizes = Config { d_model: 64, d_ff: 128, d_kv: 16, num_heads: 4, num_layers: 2, ..Config::default() };
    Config { vocab_size, num_decoder_layers, ..sizes }
}

/// Bytes of tensors at the peak of `work`, above those that exist before it.
fn peak(card: &Device, mut work: impl FnMut()) -> u64 {
    let tensors = || cuda_device::device_bytes(card).expect("a card counts");
    // The first call uploads the lists that are kept: they are not counted.
    work();
    cuda_device::release_unused_of_device(card).unwrap();
    let before = tensors().tensors;
    work();
    tensors().tensors_peak - before
}

/// Fails unless the counted bytes are within 5 % of the predicted ones. They differ because a card gives memory in pieces of 512 bytes.
#[track_caller]
fn assert_close(counted: u64, predicted: u64, what: &str) {
    let share = counted as f64 / predicted as f64;
    println!("{what}: {counted} bytes of {predicted}");
    assert!((0.95..=1.05).contains(&share), "{what}: {counted} bytes of {predicted}");
}

#[test]
fn answers_hold_at_their_peak_what_was_predicted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let card = card();
    let config = config(700, 3);
    let beams = Search::Beams(Beams { count: 3, ..Beams::default() });
    for (search, dtype, samples) in
        [(Search::Greedy, DType::F32, 20), (beams, DType::F32, 6), (Search::Greedy, DType::BF16, 18)]
    {
        let model = T5::init(&config, 1, dtype, &card).unwrap();
        let options = GenerateOptions { search, max_new_tokens: 37, activations: dtype, ..GenerateOptions::default() };
        let sources = vec![&[5u32, 9, 7, 11, 1][..]; samples];
        let counted = peak(&card, || drop(model.answers(&sources, &options, &Watch::default()).unwrap().unwrap()));
        let precisions = Precisions { parameters: dtype, activations: dtype, gradients: DType::F32 };
        let counter = Counter::new(&config, precisions, 0.0, &|_| true).unwrap().on_device(&|_| [0, 0]);
        let predicted = counter.generation(samples, 5, &options.shape()).total();
        assert_close(counted, predicted, &format!("{samples} samples, {search:?}, {dtype:?}"));
    }
}

#[test]
fn a_pass_holds_at_its_peak_what_was_predicted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let card = card();
    let config = config(900, 2);
    let model = T5::init(&config, 1, DType::F32, &card).unwrap();
    for activations in [DType::F32, DType::BF16] {
        let precisions = Precisions { parameters: DType::F32, activations, gradients: DType::F32 };
        let counter = Counter::new(&config, precisions, 0.1, &|_| true).unwrap().on_device(&|_| [0, 0]);
        for (samples, source_tokens, target_tokens) in [(1, 64, 64), (4, 8, 32), (6, 32, 8)] {
            for recompute_blocks in [0, 2, 4] {
                let levers =
                    Levers { micro_batch_samples: samples, recompute_blocks, loss_chunk_rows: 16, ..Levers::default() };
                let cx = StepContext {
                    seed: 1,
                    step: 1,
                    dropout: 0.1,
                    adapter_dropout: 0.0,
                    activations,
                    recompute_blocks,
                    loss_chunk_rows: levers.loss_chunk_rows,
                    target_tokens: 1,
                    token_loss: t5_ops::TokenLoss::default(),
                };
                let (source, target) = (vec![5; source_tokens], vec![6; target_tokens]);
                let (sources, targets) = (vec![source.as_slice(); samples], vec![target.as_slice(); samples]);
                let numbers: Vec<u32> = (0..samples as u32).collect();
                let batch = MicroBatch::new(&sources, &targets, &numbers, &config, &card).unwrap();
                let mut gradients = Gradients::new(model.parameters(), precisions.gradients, &|_| true);
                let counted = peak(&card, || {
                    model.forward_backward(&batch, &cx, &mut gradients).unwrap();
                });
                let predicted = counter.step(Shape { samples, source_tokens, target_tokens }, &levers).total();
                assert_close(counted, predicted, &format!("{samples} x {source_tokens}+{target_tokens}, {levers:?}"));
            }
        }
    }
}
