//! The most that tensors of answers take on a card, counted by its driver, beside the count. Runs on a card, or on the emulated one; a process
//! of its own, because a card counts for all of it.
#![cfg(feature = "cuda")]

use candle_core::DType;
use t5::step::count::{Counter, Precisions};
use t5::{Beams, Config, GenerateOptions, Search, T5, Watch};

#[test]
fn answers_hold_at_their_peak_what_was_predicted() {
    let card = t5_ops::open_card(0).expect("a card, or the emulated one");
    let config = Config {
        vocab_size: 700,
        d_model: 64,
        d_ff: 128,
        d_kv: 16,
        num_heads: 4,
        num_layers: 2,
        num_decoder_layers: 3,
        ..Config::default()
    };
    let beams = Search::Beams(Beams { count: 3, ..Beams::default() });
    for (search, dtype, samples) in
        [(Search::Greedy, DType::F32, 20), (beams, DType::F32, 6), (Search::Greedy, DType::BF16, 18)]
    {
        let model = T5::init(&config, 1, dtype, &card).unwrap();
        let options = GenerateOptions { search, max_new_tokens: 37, activations: dtype, ..GenerateOptions::default() };
        let sources = vec![&[5u32, 9, 7, 11, 1][..]; samples];
        let tensors = || t5_ops::device_bytes(&card).expect("a card counts");
        // Lists that are kept are there.
        model.answers(&sources, &options, &Watch::default()).unwrap().unwrap();
        t5_ops::release_unused_of_device(&card).unwrap();
        let before = tensors().tensors;
        model.answers(&sources, &options, &Watch::default()).unwrap().unwrap();
        let counted = tensors().tensors_most - before;
        let precisions = Precisions { parameters: dtype, activations: dtype, gradients: DType::F32 };
        let counter = Counter::new(&config, precisions, 0.0, &|_| true).unwrap().on_device(&|_| [0, 0]);
        let predicted = counter.generation(samples, 5, &options.shape()).total();
        let share = counted as f64 / predicted as f64;
        println!("{samples} samples, {search:?}, {dtype:?}: {counted} bytes of {predicted}");
        // A card gives memory in pieces of 512 bytes.
        assert!(
            (0.95..=1.05).contains(&share),
            "{samples} samples, {search:?}, {dtype:?}: {counted} bytes of {predicted}"
        );
    }
}
