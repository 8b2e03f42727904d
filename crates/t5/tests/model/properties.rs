//! Properties that do not depend on the memory plan: cuts, recompute, chunks, freezing, padding, saving.

use crate::support::*;
use candle_core::{DType, Tensor};
use t5::{Config, EvalContext, GenerateOptions, Gradients, MicroBatch, Part, StepContext, T5};

fn data() -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let list = |seed: u32, length: u32| (0..length).map(|i| 2 + (seed * 31 + i * 7) % 35).chain([1]).collect();
    let lengths = [(9, 4), (1, 12), (5, 5), (17, 1), (3, 8)];
    let sources = lengths.iter().enumerate().map(|(i, l)| list(i as u32, l.0)).collect();
    let targets = lengths.iter().enumerate().map(|(i, l)| list(i as u32 + 50, l.1)).collect();
    (sources, targets)
}

/// Gradients of the whole batch, cut into micro-batches of these samples.
fn cut(model: &T5, cuts: &[&[usize]], cx: &StepContext) -> (f64, Vec<(String, Tensor)>) {
    let (sources, targets) = data();
    let mut grads = Gradients::new(model.parameters(), DType::F32, &|_| true);
    let mut loss = 0.0;
    for cut in cuts {
        let sources: Vec<&[u32]> = cut.iter().map(|&i| sources[i].as_slice()).collect();
        let targets: Vec<&[u32]> = cut.iter().map(|&i| targets[i].as_slice()).collect();
        let samples: Vec<u32> = cut.iter().map(|&i| i as u32).collect();
        let batch = MicroBatch::new(&sources, &targets, &samples, model.config(), &device()).unwrap();
        loss += model.forward_backward(&batch, cx, &mut grads).unwrap();
    }
    let named = grads.iter().map(|(i, g)| (model.parameters()[i].name.clone(), g.copy().unwrap())).collect();
    (loss, named)
}

fn target_tokens() -> u64 {
    data().1.iter().map(|t| t.len() as u64).sum()
}

fn largest_distance(a: &[(String, Tensor)], b: &[(String, Tensor)]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|((_, a), (_, b))| distance(a, b)).fold(0.0, f64::max)
}

#[test]
fn micro_batching_does_not_change_the_gradient() {
    for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
        let model = T5::init(&relu(), 2, dtype, &device()).unwrap();
        let cx = StepContext { dropout: 0.2, ..context(target_tokens(), dtype) };
        let (loss, whole) = cut(&model, &[&[0, 1, 2, 3, 4]], &cx);
        let cuts: [&[&[usize]]; 3] = [&[&[0], &[1], &[2], &[3], &[4]], &[&[3, 0], &[2, 4, 1]], &[&[4, 3, 2, 1], &[0]]];
        for cuts in cuts {
            let (loss_of_cut, grads) = cut(&model, cuts, &cx);
            assert!((loss_of_cut / loss - 1.0).abs() < tolerance);
            let far = largest_distance(&grads, &whole);
            assert!(far < tolerance, "{dtype:?}: a cut changes a gradient by {far:e}");
        }
    }
}

#[test]
fn a_weighted_gradient_is_the_weighted_sum_of_the_samples_gradients() {
    let weights = [0.5, -0.25, 0.0, 2.0, -1.0];
    for tie_word_embeddings in [true, false] {
        let config = Config { tie_word_embeddings, ..relu() };
        let model = T5::init(&config, 2, DType::F64, &device()).unwrap();
        // Alone and divided by one token, a sample has the gradient of its summed cross-entropy.
        let alone: Vec<_> = (0..5).map(|sample| cut(&model, &[&[sample]], &context(1, DType::F64))).collect();
        let mut expected: Vec<Tensor> = Vec::new();
        for (weight, (_, gradients)) in weights.iter().zip(&alone) {
            let scaled =
                gradients.iter().map(|(_, gradient)| (gradient.to_dtype(DType::F64).unwrap() * *weight).unwrap());
            expected = match expected.is_empty() {
                true => scaled.collect(),
                false => expected.iter().zip(scaled).map(|(sum, one)| (sum + one).unwrap()).collect(),
            };
        }
        let (sources, targets) = data();
        let batch = micro_batch(&sources, &targets, model.config());
        let (loss, weighted) = gradients(&model, &batch.clone().weighted(weights.to_vec()), &context(7, DType::F64));
        let far = weighted.iter().zip(&expected).map(|((_, a), b)| distance(a, b)).fold(0.0, f64::max);
        assert!(far < 1e-6, "tied: {tie_word_embeddings}: {far:e}");
        // The sum of losses is that of cross-entropies, whatever the weights.
        let of_samples: Vec<f64> = alone.iter().map(|(loss, _)| *loss).collect();
        assert!((loss / of_samples.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let cx = EvalContext { activations: DType::F64, loss_chunk_rows: 7 };
        let two = [batch.clone(), batch];
        let measured = model.losses_of_samples(&two, &cx, &|| false).unwrap().expect("nobody interrupts");
        for (got, expected) in measured.iter().flatten().zip(of_samples.iter().cycle()) {
            assert!((got / expected - 1.0).abs() < 1e-12, "{got}, not {expected}");
        }
        assert_eq!(measured.iter().flatten().count(), 10);
        assert!(model.losses_of_samples(&two, &cx, &|| true).unwrap().is_none());
    }
}

#[test]
fn recompute_gives_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let model = T5::init(&relu(), 2, DType::F32, &device()).unwrap();
        let cx = StepContext { dropout: 0.2, ..context(target_tokens(), dtype) };
        let (loss, kept) = cut(&model, &[&[0, 1, 2], &[3, 4]], &cx);
        for recompute_blocks in [1, 3, 4, 5, 99] {
            let cx = StepContext { recompute_blocks, ..cx };
            let (loss_again, recomputed) = cut(&model, &[&[0, 1, 2], &[3, 4]], &cx);
            assert_eq!(loss.to_bits(), loss_again.to_bits());
            for ((name, a), (_, b)) in kept.iter().zip(&recomputed) {
                assert_eq!(values(a), values(b), "{recompute_blocks} blocks recomputed: {name}");
            }
        }
    }
}

#[test]
fn the_loss_chunk_changes_rounding_only() {
    let model = T5::init(&relu(), 2, DType::F64, &device()).unwrap();
    let cx = context(target_tokens(), DType::F64);
    let (loss, grads) = cut(&model, &[&[0, 1, 2, 3, 4]], &cx);
    for loss_chunk_rows in [1, 3, 1000] {
        let (other, other_grads) = cut(&model, &[&[0, 1, 2, 3, 4]], &StepContext { loss_chunk_rows, ..cx });
        assert!((other / loss - 1.0).abs() < 1e-12);
        assert!(largest_distance(&other_grads, &grads) < 1e-11);
    }
}

#[test]
fn a_step_or_a_sample_of_another_number_draws_another_mask() {
    let model = T5::init(&relu(), 2, DType::F32, &device()).unwrap();
    let cx = StepContext { dropout: 0.2, ..context(target_tokens(), DType::F32) };
    let loss = |cx: &StepContext| cut(&model, &[&[0, 1, 2, 3, 4]], cx).0;
    assert_eq!(loss(&cx), loss(&cx));
    assert_ne!(loss(&cx), loss(&StepContext { step: 6, ..cx }));
    assert_ne!(loss(&cx), loss(&StepContext { seed: 4, ..cx }));
    assert_ne!(loss(&cx), loss(&StepContext { dropout: 0.0, ..cx }));
}

#[test]
fn bf16_activations_give_nearly_the_same_loss_and_gradient() {
    let model = T5::init(&relu(), 2, DType::F32, &device()).unwrap();
    let (loss, grads) = cut(&model, &[&[0, 1, 2, 3, 4]], &context(target_tokens(), DType::F32));
    let (half, half_grads) = cut(&model, &[&[0, 1, 2, 3, 4]], &context(target_tokens(), DType::BF16));
    assert!((half / loss - 1.0).abs() < 0.01, "{half} instead of {loss}");
    assert!(half_grads.iter().all(|(_, g)| g.dtype() == DType::F32));
    // Over all gradients together, as in a step.
    let norm = |values: Vec<f64>| values.iter().map(|v| v * v).sum::<f64>();
    let square: f64 = grads.iter().map(|(_, g)| norm(values(g))).sum();
    let difference = |((_, a), (_, b)): (&(String, Tensor), &(String, Tensor))| {
        norm(values(a).iter().zip(values(b)).map(|(a, b)| a - b).collect())
    };
    let far = (grads.iter().zip(&half_grads).map(difference).sum::<f64>() / square).sqrt();
    assert!(far < 0.05, "gradients differ by {far}");
}

#[test]
fn frozen_parameters_cost_no_memory_and_leave_the_others_gradients_alone() {
    let model = T5::init(&relu(), 2, DType::F64, &device()).unwrap();
    let cx = StepContext { dropout: 0.2, ..context(target_tokens(), DType::F64) };
    let (loss, all) = cut(&model, &[&[0, 1, 2, 3, 4]], &cx);
    let check = |what: &str, trained: &dyn Fn(&t5::Parameter) -> bool| {
        let (sources, targets) = data();
        let batch = micro_batch(&sources, &targets, model.config());
        let mut grads = Gradients::new(model.parameters(), DType::F32, trained);
        assert_eq!(grads.bytes(), 0);
        let some = model.forward_backward(&batch, &cx, &mut grads).unwrap();
        assert_eq!(some.to_bits(), loss.to_bits(), "{what}");
        for (index, parameter) in model.parameters().iter().enumerate() {
            assert_eq!(grads.is_trainable(index), trained(parameter));
            match grads.get(index) {
                None => assert!(!trained(parameter), "{what}: no gradient of {}", parameter.name),
                Some(grad) => {
                    assert!(trained(parameter), "{what}: {} is frozen and has a gradient", parameter.name);
                    let far = distance(grad, &all[index].1);
                    assert!(far < 1e-12, "{what}: gradient of {} differs by {far:e}", parameter.name);
                }
            }
        }
    };
    check("finetune", &|p| p.part.is_decoder());
    check("encoder only", &|p| matches!(p.part, Part::Encoder { .. } | Part::EncoderNorm));
    check("embedding only", &|p| p.part == Part::Shared);
    check("one encoder block", &|p| p.part == Part::Encoder { block: 1 });
    check("last decoder block", &|p| p.part == Part::Decoder { block: 1 });
    check("tables", &|p| p.name.contains("relative_attention_bias"));
    check("norms", &|p| p.name.ends_with("layer_norm.weight"));
    check("feed-forward of the first blocks", &|p| p.name.contains("block.0") && p.name.contains("Dense"));
    check("cross attention's keys", &|p| p.name.contains("EncDecAttention.k"));
    check("nothing", &|_| false);
}

#[test]
fn padding_changes_nothing() {
    let model = T5::init(&relu(), 2, DType::F64, &device()).unwrap();
    let (sources, targets) = data();
    let cx = EvalContext { activations: DType::F64, loss_chunk_rows: 4 };
    let together = model.loss(&micro_batch(&sources, &targets, model.config()), &cx).unwrap();
    let alone: f64 = (0..sources.len())
        .map(|i| model.loss(&micro_batch(&sources[i..=i], &targets[i..=i], model.config()), &cx).unwrap())
        .sum();
    assert!((together / alone - 1.0).abs() < 1e-12);
}

/// Greedy generation by running the whole model again for every token.
fn generate_without_cache(model: &T5, source: &[u32], max_new_tokens: usize) -> Vec<u32> {
    let mut answer = Vec::new();
    while answer.len() < max_new_tokens && answer.last() != Some(&1) {
        // The last target's id does not matter: inputs are targets shifted right.
        let target = [answer.clone(), vec![0]].concat();
        let batch = micro_batch(&[source.to_vec()], &[target], model.config());
        let row = model.logits(&batch).unwrap().squeeze(0).unwrap().get(answer.len()).unwrap();
        let row = values(&row);
        let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap();
        answer.push(best as u32);
    }
    answer
}

#[test]
fn generation_with_a_cache_is_generation_without_one() {
    for (seed, projection) in [(2, "relu"), (3, "gated-gelu"), (4, "relu")] {
        let mut config = Config { eos_token_ids: vec![1], ..relu() };
        config.set_feed_forward_proj(projection).unwrap();
        let model = T5::init(&config, seed, DType::F64, &device()).unwrap();
        let (sources, _) = data();
        // Beyond the first capacity of the cache, and not a multiple of it.
        let options = GenerateOptions { max_new_tokens: 75, activations: DType::F64, ..Default::default() };
        let batched = model.generate(&slices(&sources), &options).unwrap();
        for (source, answer) in sources.iter().zip(&batched) {
            assert_eq!(answer, &generate_without_cache(&model, source, 75));
        }
    }
}

#[test]
fn generation_stops_at_any_eos_while_others_go_on() {
    let model = T5::init(&relu(), 2, DType::F64, &device()).unwrap();
    let (sources, _) = data();
    let options = |max_new_tokens| GenerateOptions { max_new_tokens, activations: DType::F64, ..Default::default() };
    let free = model.generate(&slices(&sources), &options(40)).unwrap();
    // Makes generated tokens the ends of answers: these must be the same up to their first end.
    let eos: Vec<u32> = vec![free[0][3], free[1][10], free[2][0]];
    let ended = T5::init(&Config { eos_token_ids: eos.clone(), ..relu() }, 2, DType::F64, &device()).unwrap();
    let answers = ended.generate(&slices(&sources), &options(40)).unwrap();
    for (free, answer) in free.iter().zip(&answers) {
        let end = free.iter().position(|id| eos.contains(id)).map_or(free.len(), |end| end + 1);
        assert_eq!(answer, &free[..end]);
    }
    assert!(answers.iter().any(|answer| answer.len() < 5));
    assert_eq!(model.generate(&slices(&sources), &options(0)).unwrap(), vec![Vec::<u32>::new(); 5]);
    assert!(model.generate(&[], &options(4)).unwrap().is_empty());
    assert!(model.generate(&[&[]], &options(4)).is_err());
}
