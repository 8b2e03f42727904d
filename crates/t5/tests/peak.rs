//! The most bytes that a real pass holds, counted by the allocator, compared with the count.
//!
//! The host alone: its allocator counts. `peak_on_a_card` is the same on a card.

#[path = "../../t5-ops/tests/support/peak.rs"]
mod held;

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use heap::Allocator;
use t5::costs::{WeightsOnDisk, load};
use t5::step::count::{Counter, Precisions, Shape};
use t5::{
    Beams, Config, EvalContext, Files, GenerateOptions, Gradients, LayerMajor, Levers, Lora, MicroBatch, Observer,
    Parameter, Processors, Sampling, Search, StepContext, StoredWeights, T5, Targets,
};

use self::held::held_at_the_peak;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// The allocator counts for the whole process, so one test allocates at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A batch of samples of these lengths, in micro-batches.
fn batches(model: &T5, shape: Shape, micro_batch_samples: usize) -> Vec<MicroBatch> {
    let Shape { samples, source_tokens, target_tokens } = shape;
    let (source, target) = (vec![5; source_tokens], vec![6; target_tokens]);
    let numbers: Vec<u32> = (0..samples as u32).collect();
    let batch = |numbers: &[u32]| {
        let (sources, targets) = (vec![source.as_slice(); numbers.len()], vec![target.as_slice(); numbers.len()]);
        MicroBatch::new(&sources, &targets, numbers, model.config(), &Device::Cpu).unwrap()
    };
    numbers.chunks(micro_batch_samples).map(batch).collect()
}

fn cx(precisions: Precisions, levers: &Levers) -> StepContext {
    StepContext {
        seed: 1,
        step: 1,
        dropout: 0.1,
        adapter_dropout: 0.0,
        activations: precisions.activations,
        recompute_blocks: levers.recompute_blocks,
        loss_chunk_rows: levers.loss_chunk_rows,
        target_tokens: 1,
        token_loss: t5_ops::TokenLoss::default(),
    }
}

/// The bytes that a pass holds at its peak, beside parameters, gradients and operands that products keep for the next product.
fn peak(model: &T5, precisions: Precisions, shape: Shape, levers: &Levers) -> u64 {
    let cx = cx(precisions, levers);
    let mut gradients = Gradients::new(model.parameters(), precisions.gradients, &|_| true);
    let [batch] = batches(model, shape, shape.samples).try_into().unwrap();
    held_at_the_peak(|| {
        model.forward_backward(&batch, &cx, &mut gradients).unwrap();
    })
}

#[test]
fn a_pass_holds_at_its_peak_what_was_predicted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let config = Config { vocab_size: 6000, ..Config::preset("t5-small").unwrap() };
    let config = Config { num_layers: 2, num_decoder_layers: 2, ..config };
    let model = T5::init(&config, 1, DType::F32, &Device::Cpu).unwrap();
    for (activations, gradients) in
        [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)]
    {
        let precisions = Precisions { parameters: DType::F32, activations, gradients };
        let counter = Counter::new(&config, precisions, 0.1, &|_| true).unwrap();
        for (samples, source_tokens, target_tokens) in [(1, 256, 256), (4, 32, 256), (4, 256, 32), (8, 128, 128)] {
            for recompute_blocks in [0, 2, 4] {
                let shape = Shape { samples, source_tokens, target_tokens };
                let levers = Levers {
                    micro_batch_samples: samples,
                    recompute_blocks,
                    loss_chunk_rows: 64,
                    layer_major: None,
                    ..Levers::default()
                };
                // Operands that products pack are kept by the threads, and existed before.
                let count = counter.step(shape, &levers);
                let predicted = (count.total() - count.packed) as f64;
                let held = peak(&model, precisions, shape, &levers) as f64;
                assert!((predicted / held - 1.0).abs() < 0.08, "{held} bytes, {count:?}: {shape:?} {levers:?}");
            }
        }
    }
}

// A run asks for the bytes of new shapes in each step. The counts took 6 MiB after some hundred steps, which no bill had.
#[test]
fn a_counter_that_is_asked_for_ever_new_shapes_stays_small() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let config = Config { num_layers: 1, num_decoder_layers: 1, ..Config::preset("tiny").unwrap() };
    let precisions = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
    let counter = Counter::new(&config, precisions, 0.1, &|_| true).unwrap();
    heap::release_unused();
    let before = heap::held().live;
    let bytes = |source_tokens| counter.micro_batch(Shape { samples: 2, source_tokens, target_tokens: 3 }, 0, 64);
    let first = bytes(1);
    for source_tokens in 2..500 {
        bytes(source_tokens);
    }
    assert!(heap::held().peak_live - before <= 320 << 10, "{:?} beside {before}", heap::held());
    assert_eq!(bytes(1), first, "counted again after it was forgotten");
}

/// An observer that measures nothing and changes nothing.
struct Nobody;

impl Observer<Tensor, t5::Error> for Nobody {}

#[test]
fn a_step_layer_by_layer_holds_at_its_peak_what_was_predicted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut config = Config { vocab_size: 6000, tie_word_embeddings: false, ..Config::preset("t5-small").unwrap() };
    config.set_feed_forward_proj("gated-gelu").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = Files::in_directory(directory.path());
    let lora = Lora { rank: 16, targets: Targets::AllLinear, ..Lora::default() };
    let shape = Shape { samples: 8, source_tokens: 128, target_tokens: 64 };
    // A feed-forward layer may be wider than bf16 products sum in one piece.
    let sizes = [(2, 2048, DType::F32), (2, 2048, DType::BF16), (1, 2048, DType::BF16), (2, 6144, DType::BF16)];
    for (blocks, d_ff, dtype) in sizes {
        let config = Config { num_layers: blocks, num_decoder_layers: blocks, d_ff, ..config.clone() };
        let model = T5::init(&config, 1, dtype, &Device::Cpu).unwrap().with_adapter(lora.clone(), 1).unwrap();
        let precisions = Precisions { parameters: dtype, activations: dtype, gradients: DType::F32 };
        let counter = Counter::new(model.config(), precisions, 0.1, &|spec| spec.is_of_adapter()).unwrap();
        for (on_disk, recompute_blocks, micro_batch_samples) in
            [(false, 4, 8), (false, 4, 4), (true, 4, 4), (true, 0, 8), (true, 0, 4), (true, 0, 2)]
        {
            let kept_gradient_blocks = if on_disk { 0 } else { 4 };
            let (boundaries_on_disk, gradients_on_disk) = (on_disk, on_disk);
            let layers =
                LayerMajor { kept_gradient_blocks, boundaries_on_disk, gradients_on_disk, ..LayerMajor::PLAIN };
            let layer_major = Some(layers);
            let levers =
                Levers { micro_batch_samples, recompute_blocks, loss_chunk_rows: 64, layer_major, ..Levers::default() };
            let (batches, cx) = (batches(&model, shape, micro_batch_samples), cx(precisions, &levers));
            let trains = |parameter: &Parameter| lora.trains(&parameter.name);
            let mut gradients = Gradients::new(model.parameters(), precisions.gradients, &trains);
            let held = held_at_the_peak(|| {
                model.step(&batches, &cx, Some(&layers), &files, &mut gradients, &mut Nobody).unwrap();
            }) as f64;
            let count = counter.step(shape, &levers);
            let predicted = (count.total() - count.packed) as f64;
            assert!(
                (0.995..1.05).contains(&(predicted / held)),
                "{predicted}, {held} held: {blocks} {d_ff} {levers:?}"
            );
        }
    }
}

#[test]
fn generation_holds_at_its_peak_what_was_predicted_with_beams_too() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let config =
        Config { vocab_size: 6000, num_layers: 2, num_decoder_layers: 3, ..Config::preset("t5-small").unwrap() };
    let model = T5::init(&config, 1, DType::F32, &Device::Cpu).unwrap();
    let source: Vec<u32> = (2..66).collect();
    let sampling = Sampling { top_p: 0.9, ..Sampling::default() };
    // Beams that end too early would hold less than was predicted.
    let processors = Processors { min_new_tokens: 40, ..Processors::default() };
    let beams = |count| Search::Beams(Beams { count, ..Beams::default() });
    for (search, sequences) in [(Search::Greedy, 1), (Search::Sample(sampling), 3), (beams(5), 2)] {
        for (samples, activations) in [(2, DType::F32), (5, DType::BF16)] {
            let options = GenerateOptions {
                max_new_tokens: 40,
                activations,
                search,
                sequences,
                processors,
                scores: false,
                logprobs: None,
            };
            let precisions = Precisions { parameters: DType::F32, activations, gradients: DType::F32 };
            let counter = Counter::new(&config, precisions, 0.0, &|_| false).unwrap();
            let count = counter.generation(samples, source.len(), &options.shape());
            let predicted = (count.total() - count.packed) as f64;
            let sources = vec![source.as_slice(); samples];
            let held = held_at_the_peak(|| drop(model.generate(&sources, &options).unwrap())) as f64;
            let is_close = (predicted / held - 1.0).abs() < 0.08;
            assert!(is_close, "{held} bytes, {count:?}: {samples} samples, {options:?}");
        }
    }
}

/// A matrix may take most memory beside few tensors, and a window of the table beside many.
#[test]
#[cfg(all(target_os = "linux", target_pointer_width = "64", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn answers_and_losses_hold_what_was_predicted_with_the_weights_of_one_operation() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let search = Search::Beams(Beams { count: 4, ..Beams::default() });
    let processors = Processors { min_new_tokens: 32, ..Processors::default() };
    let (source, shape) = ([5; 64], Shape { samples: 2, source_tokens: 64, target_tokens: 32 });
    for (vocab_size, d_ff) in [(6000, 2048), (32_128, 1024), (32_128, 4096)] {
        let config = Config { num_layers: 1, num_decoder_layers: 2, ..Config::preset("t5-small").unwrap() };
        let config = Config { vocab_size, d_ff, ..config };
        let directory = tempfile::tempdir().unwrap();
        T5::init(&config, 1, DType::F32, &Device::Cpu).unwrap().save(directory.path()).unwrap();
        let files = Files { weights_by_matrix: true, ..Files::in_directory(directory.path()) };
        let model = T5::load_in_place(directory.path(), DType::F32, &Device::Cpu, &files).unwrap();
        for activations in [DType::F32, DType::BF16] {
            let precisions = Precisions { parameters: DType::F32, activations, gradients: DType::F32 };
            let counter = Counter::new(&config, precisions, 0.0, &|_| false).unwrap();
            let options = GenerateOptions {
                max_new_tokens: 32,
                activations,
                search,
                sequences: 1,
                processors,
                scores: false,
                logprobs: None,
            };
            let generation = counter.generation(shape.samples, source.len(), &options.shape()).with_weights;
            let held = held_at_the_peak(|| drop(model.generate(&[&source[..]; 2], &options).unwrap()));
            let case = format!("{vocab_size} {d_ff} {activations:?}");
            assert!((held..held + held / 100).contains(&generation), "{generation}, {held} held: {case}");
            let evaluation = counter.evaluation(shape, 64).with_weights;
            let [batch] = batches(&model, shape, shape.samples).try_into().unwrap();
            let cx = EvalContext { activations, loss_chunk_rows: 64 };
            let held = held_at_the_peak(|| assert!(model.loss(&batch, &cx).unwrap().is_finite()));
            // A window of the loss may have fewer rows than is stated.
            let is_window = d_ff == 1024;
            assert!(
                evaluation >= held && (is_window || evaluation < held + held / 100),
                "{evaluation}, {held}: {case}"
            );
        }
    }
}

/// The most bytes beside the model while `f` makes it.
fn beside_the_model(f: impl FnOnce() -> T5) -> u64 {
    heap::release_unused();
    let model = f();
    let held = heap::held();
    drop(model);
    (held.peak_live - held.live) as u64
}

#[test]
fn loading_holds_what_was_predicted_of_the_files_and_no_more_than_was_predicted_of_any() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let tiny = Config::preset("tiny").unwrap();
    let mut untied = tiny.clone();
    untied.tie_word_embeddings = false;
    for (config, stored) in [(&tiny, DType::F32), (&tiny, DType::BF16), (&untied, DType::F32), (&untied, DType::BF16)] {
        let directory = tempfile::tempdir().unwrap();
        T5::init(config, 1, stored, &Device::Cpu).unwrap().save(directory.path()).unwrap();
        let of_files = StoredWeights::read(directory.path(), config).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let read = beside_the_model(|| T5::load(directory.path(), dtype, &Device::Cpu).unwrap());
            let made = beside_the_model(|| T5::init(config, 1, dtype, &Device::Cpu).unwrap());
            let [predicted, of_any] = [Some(&of_files), None].map(|stored| load(config, dtype, stored).bytes);
            let what =
                format!("{read} bytes read, {made} made, {predicted} and {of_any} predicted, {stored:?} as {dtype:?}");
            assert!(read <= predicted && predicted <= read + (64 << 10), "{what}");
            assert!(predicted <= of_any && made <= of_any, "{what}");
        }
    }
}

/// The most resident bytes beyond those before, while `f` makes a model.
#[cfg(target_os = "linux")]
fn resident_at_the_peak(f: impl FnOnce() -> T5) -> u64 {
    let bytes = |name: &str| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
    };
    heap::release_unused();
    // From here on the peak is counted again.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = bytes("VmRSS:");
    let model = f();
    let peak = bytes("VmHWM:") - before;
    // Memory of weights in transit has been given back.
    assert!(bytes("VmRSS:") - before < peak / 4, "{} of {peak} bytes are still resident", bytes("VmRSS:") - before);
    drop(model);
    peak
}

#[test]
#[cfg(target_os = "linux")]
fn weights_on_their_way_to_a_file_are_resident_once_and_as_predicted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !std::path::Path::new("/proc/self/clear_refs").exists() {
        return;
    }
    let config =
        Config { vocab_size: 20_000, num_layers: 1, num_decoder_layers: 1, ..Config::preset("t5-small").unwrap() };
    let directory = tempfile::tempdir().unwrap();
    let files = Files::in_directory(directory.path());
    T5::init(&config, 1, DType::F32, &Device::Cpu).unwrap().save(directory.path()).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let made = resident_at_the_peak(|| T5::init_in(&config, 1, dtype, &Device::Cpu, Some(&files)).unwrap());
        let read = resident_at_the_peak(|| T5::load_in(directory.path(), dtype, &Device::Cpu, Some(&files)).unwrap());
        let predicted = WeightsOnDisk::new(&config, dtype).loading(0);
        let ratio = predicted as f64 / made.max(read) as f64;
        assert!((0.97..1.1).contains(&ratio), "{made} bytes made, {read} read, {predicted} predicted, {dtype:?}");
    }
}
