//! Generation compared with transformers: 100 prompts under many settings, token for token.

use std::path::PathBuf;

use candle_core::DType;
use serde_json::Value;
use t5::{Answer, Beams, EarlyStopping, GenerateOptions, Processors, Sampling, Search, T5, Told, Watch};

use crate::support::*;

fn folder() -> PathBuf {
    goldens().join("generation")
}

/// A T5, and models whose windows are shorter than most sources and answers.
const MODELS: [&str; 3] = ["t5", "t5gemma", "t5gemma2"];

fn golden(file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder().join(file)).unwrap()).unwrap()
}

fn lists(value: &Value) -> Vec<Vec<u32>> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The sources of a model.
fn sources_of(name: &str) -> Vec<Vec<u32>> {
    lists(&golden(&format!("{name}/answers.json"))["sources"])
}

/// The T5.
fn model(settings: &Value) -> T5 {
    model_of("t5", settings)
}

/// A model, with the tokens that end an answer in the settings.
fn model_of(name: &str, settings: &Value) -> T5 {
    let directory = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        std::fs::copy(folder().join(name).join(file), directory.path().join(file)).unwrap();
    }
    if let Some(ends) = settings.get("eos_token_id") {
        let path = directory.path().join("generation_config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["eos_token_id"] = ends.clone();
        std::fs::write(&path, config.to_string()).unwrap();
    }
    T5::load(directory.path(), DType::F32, &device()).unwrap()
}

/// Settings under transformers' names.
fn options(settings: &Value) -> GenerateOptions {
    let number = |name: &str| settings[name].as_f64();
    let count = |name: &str| settings[name].as_u64().map(|count| count as usize);
    let sampling = settings["do_sample"].as_bool().map(|_| Sampling {
        temperature: number("temperature").unwrap_or(1.0) as f32,
        top_k: count("top_k").unwrap_or(0),
        top_p: number("top_p").unwrap_or(1.0) as f32,
        seed: 1,
    });
    let early_stopping = match &settings["early_stopping"] {
        Value::Bool(true) => EarlyStopping::Yes,
        Value::String(_) => EarlyStopping::Never,
        _ => EarlyStopping::No,
    };
    let length_penalty = number("length_penalty").unwrap_or(1.0);
    let search = match (count("num_beams"), sampling) {
        (Some(count), sampling) => Search::Beams(Beams { count, length_penalty, early_stopping, sampling }),
        (None, Some(sampling)) => Search::Sample(sampling),
        (None, None) => Search::Greedy,
    };
    GenerateOptions {
        processors: Processors {
            repetition_penalty: number("repetition_penalty").unwrap_or(1.0) as f32,
            no_repeat_ngram: count("no_repeat_ngram_size").unwrap_or(0),
            min_new_tokens: count("min_new_tokens").unwrap_or(0),
        },
        search,
        sequences: count("num_return_sequences").unwrap_or(1),
        max_new_tokens: golden_length(),
        ..GenerateOptions::default()
    }
}

fn golden_length() -> usize {
    14
}

fn ids(answers: &[Answer]) -> Vec<Vec<u32>> {
    answers.iter().map(|answer| answer.ids.clone()).collect()
}

#[test]
fn a_hundred_prompts_are_answered_token_for_token_as_by_transformers_alone_and_in_padded_batches() {
    MODELS.into_iter().for_each(a_hundred_prompts_are_answered_by);
}

#[track_caller]
fn a_hundred_prompts_are_answered_by(name: &str) {
    let golden = golden(&format!("{name}/answers.json"));
    assert_eq!(golden["max_new_tokens"], golden_length());
    let sources = lists(&golden["sources"]);
    assert_eq!(sources.len(), 100);
    for case in golden["cases"].as_array().unwrap() {
        let settings = &case["settings"];
        let (model, options) = (model_of(name, settings), options(settings));
        // An emulated card is slow.
        let (prompts, batches): (usize, &[usize]) = if device().is_cpu() { (100, &[1, 7, 100]) } else { (14, &[7]) };
        for &batch in batches {
            let mut answered = Vec::new();
            for sources in sources[..prompts].chunks(batch) {
                answered.extend(model.answers(&slices(sources), &options, &Watch::default()).unwrap().unwrap());
            }
            for (number, (answers, expected)) in answered.iter().zip(case["answers"].as_array().unwrap()).enumerate() {
                assert_eq!(ids(answers), lists(expected), "{name}: {settings}, prompt {number}, {batch} at a time");
                for (place, answer) in answers.iter().enumerate().filter(|_| case.get("scores").is_some()) {
                    let (got, expected) = (answer.score.unwrap(), case["scores"][number][place].as_f64().unwrap());
                    assert!(
                        (got - expected).abs() < 2e-5 * expected.abs().max(1.0),
                        "{name}: {settings}, prompt {number}: {got}, expected {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn processors_and_filters_are_those_of_transformers() {
    for case in golden("processors.json").as_array().unwrap() {
        let settings = &case["settings"];
        let options = options(settings);
        let mut scores: Vec<f32> = serde_json::from_value(case["scores"].clone()).unwrap();
        let history: Vec<u32> = serde_json::from_value(case["history"].clone()).unwrap();
        options.processors.apply(&history, &[1], &mut scores);
        match options.search {
            Search::Sample(sampling) => sampling.filter(&mut scores, 1),
            Search::Beams(Beams { sampling: Some(sampling), .. }) => sampling.filter(&mut scores, 2),
            _ => {}
        }
        for (token, (got, expected)) in scores.iter().zip(case["expected"].as_array().unwrap()).enumerate() {
            let expected = expected.as_f64().map_or(f32::NEG_INFINITY, |value| value as f32);
            let is_same = *got == expected || (got - expected).abs() <= 1e-6 * expected.abs();
            assert!(is_same, "{settings}: token {token}: {got}, expected {expected}");
        }
    }
}

#[test]
fn sampled_answers_follow_from_seed_and_number_and_not_from_the_batch() {
    let sources = sources_of("t5");
    let model = model(&Value::Null);
    let sampling = Sampling { temperature: 1.3, top_k: 20, top_p: 0.95, seed: 5 };
    let options =
        GenerateOptions { max_new_tokens: 9, search: Search::Sample(sampling), sequences: 3, ..Default::default() };
    let sampled = |batch: usize, options: &GenerateOptions| -> Vec<Vec<Vec<u32>>> {
        let mut all = Vec::new();
        for (first, sources) in sources[..40].chunks(batch).enumerate() {
            let number = |source: usize| (first * batch + source) as u64;
            let watch = Watch { number: &number, ..Watch::default() };
            all.extend(model.answers(&slices(sources), options, &watch).unwrap().unwrap().iter().map(|all| ids(all)));
        }
        all
    };
    let whole = sampled(40, &options);
    assert_eq!(whole, sampled(1, &options));
    assert_eq!(whole, sampled(7, &options));
    let another = GenerateOptions { search: Search::Sample(Sampling { seed: 6, ..sampling }), ..options };
    assert_ne!(whole, sampled(40, &another));
    assert!(whole.iter().any(|answers| answers[0] != answers[1]), "answers to a source are drawn apart");
    let beams = Beams { count: 3, sampling: Some(sampling), ..Beams::default() };
    let beams = GenerateOptions { search: Search::Beams(beams), ..options };
    assert_eq!(sampled(40, &beams), sampled(3, &beams));
}

#[test]
fn the_first_tokens_of_many_answers_have_the_model_s_distribution() {
    let source = sources_of("t5").swap_remove(0);
    let model = model(&Value::Null);
    let first = |search, sequences, seed_step: u64| {
        let options = GenerateOptions { max_new_tokens: 1, search, sequences, scores: true, ..Default::default() };
        let number = |_: usize| seed_step;
        let watch = Watch { number: &number, ..Watch::default() };
        model.answers(&[&source], &options, &watch).unwrap().unwrap().swap_remove(0)
    };
    // The score of one token is its log-probability.
    let sampling = Sampling { temperature: 1.5, top_k: 12, ..Sampling::default() };
    let (mut counts, mut shares) = (std::collections::BTreeMap::new(), std::collections::BTreeMap::new());
    for number in 0..20 {
        for answer in first(Search::Sample(sampling), 100, number) {
            *counts.entry(answer.ids[0]).or_insert(0u32) += 1;
            shares.insert(answer.ids[0], answer.score.unwrap().exp());
        }
    }
    let total: f64 = shares.values().sum();
    assert!(counts.len() <= 12 && total > 0.97 && total < 1.0 + 1e-6, "{shares:?}");
    let statistic: f64 = counts
        .iter()
        .map(|(token, &count)| (f64::from(count) - 2000.0 * shares[token]).powi(2) / (2000.0 * shares[token]))
        .sum();
    assert!(statistic < 11.0 + 5.0 * 22f64.sqrt(), "{statistic}: {counts:?} {shares:?}");
}

#[test]
fn an_answer_ends_where_the_caller_says_and_progress_is_told_token_by_token() {
    let sources = sources_of("t5");
    let model = model(&Value::Null);
    for search in [Search::Greedy, Search::Beams(Beams::default())] {
        let options = GenerateOptions { max_new_tokens: 14, search, ..Default::default() };
        let plain = model.generate(&slices(&sources[..20]), &options).unwrap();
        let seen = std::cell::RefCell::new(vec![Vec::new(); 20]);
        let progress = |source: usize, answer: &[u32]| {
            let before = seen.borrow()[source].len();
            assert_eq!(answer.len(), before + 1);
            seen.borrow_mut()[source] = answer.to_vec();
        };
        let watch = Watch { is_end: &|answer| answer.len() == 2, progress: &progress, ..Watch::default() };
        let answers = model.answers(&slices(&sources[..20]), &options, &watch).unwrap().unwrap();
        for (answers, plain) in answers.iter().zip(&plain) {
            assert!(answers[0].ids.len() <= 2);
            assert!(search != Search::Greedy || plain.starts_with(&answers[0].ids));
        }
        if search == Search::Greedy {
            assert_eq!(*seen.borrow(), answers.iter().map(|answers| answers[0].ids.clone()).collect::<Vec<_>>());
        }
    }
}

#[test]
fn greedy_answers_with_scores_are_those_without() {
    let sources = sources_of("t5");
    let model = model(&Value::Null);
    let greedy = GenerateOptions { max_new_tokens: 14, ..Default::default() };
    let scored = GenerateOptions { scores: true, ..greedy };
    let answers = model.answers(&slices(&sources), &scored, &Watch::default()).unwrap().unwrap();
    assert_eq!(
        answers.iter().map(|all| all[0].ids.clone()).collect::<Vec<_>>(),
        model.generate(&slices(&sources), &greedy).unwrap()
    );
    assert!(answers.iter().all(|all| all[0].score.is_some_and(|score| score < 0.0)));
}

#[test]
fn sources_that_join_and_leave_between_tokens_are_answered_as_alone() {
    MODELS.into_iter().for_each(join_and_leave);
}

#[track_caller]
fn join_and_leave(name: &str) {
    let sources = sources_of(name);
    let model = std::rc::Rc::new(model_of(name, &Value::Null));
    let sampling = Sampling { temperature: 1.2, top_k: 20, top_p: 0.9, seed: 7 };
    let greedy = GenerateOptions { max_new_tokens: 40, ..Default::default() };
    let all = [
        greedy,
        GenerateOptions { max_new_tokens: 3, ..greedy },
        GenerateOptions { search: Search::Beams(Beams::default()), max_new_tokens: 9, sequences: 2, ..greedy },
        GenerateOptions { search: Search::Sample(sampling), max_new_tokens: 11, sequences: 3, ..greedy },
        GenerateOptions {
            processors: Processors { repetition_penalty: 1.5, ..Processors::default() },
            max_new_tokens: 14,
            ..greedy
        },
    ];
    // A draw depends on the seed alone.
    let number = |_: usize| 0;
    let alone = Watch { number: &number, ..Watch::default() };
    let expected: Vec<Vec<Answer>> = sources[..20]
        .iter()
        .enumerate()
        .map(|(i, source)| model.answers(&[source], &all[i % all.len()], &alone).unwrap().unwrap().swap_remove(0))
        .collect();
    let mut together = t5::ContinuousBatch::new(std::rc::Rc::clone(&model), DType::F32);
    let (mut joined, mut answered, mut told) = (0, vec![Vec::new(); 20], vec![Vec::new(); 20]);
    for step in 0.. {
        // One more source joins before every other token.
        if step % 2 == 0 && joined < 20 {
            assert!(together.join(joined as u64, &sources[joined], &all[joined % all.len()], &|| false).unwrap());
            joined += 1;
        }
        let mut seen = |grown: Told| {
            if grown.choice == 0 {
                told[grown.key as usize] = grown.ids.to_vec();
            }
            false
        };
        // Every third source waits every other time.
        let takes_part = |key: u64| !key.is_multiple_of(3) || step % 4 < 2;
        for grown in together.step_of(takes_part, &mut seen).unwrap() {
            answered[grown.key as usize] = grown.answers.unwrap();
        }
        if joined == 20 && together.is_empty() {
            break;
        }
    }
    for (i, (answers, expected)) in answered.iter().zip(&expected).enumerate() {
        assert_eq!(ids(answers), ids(expected), "{name}: source {i}");
        if all[i % all.len()].search == Search::Greedy {
            assert_eq!(told[i], answers[0].ids, "{name}: source {i}");
        }
    }
    // One source leaves in the middle. The other is answered as if the first had never been there.
    together.join(1, &sources[1], &greedy, &|| false).unwrap();
    together.join(2, &sources[2], &greedy, &|| false).unwrap();
    together.step(&mut |_| false).unwrap();
    together.retain(|key| key == 2);
    let mut last = Vec::new();
    while !together.is_empty() {
        last.extend(together.step(&mut |_| false).unwrap());
    }
    let alone = model.generate(&[&sources[2]], &greedy).unwrap();
    assert_eq!((last.len(), ids(last[0].answers.as_ref().unwrap())), (1, alone));
}

#[test]
fn sources_that_go_on_together_at_their_own_positions_are_answered_as_alone() {
    MODELS.into_iter().for_each(go_on_together);
}

#[track_caller]
fn go_on_together(name: &str) {
    let sources = sources_of(name);
    let model = std::rc::Rc::new(model_of(name, &Value::Null));
    // No answer ends early, so the three go on together for many tokens, past the first capacity of their caches.
    let never_ends = Processors { min_new_tokens: 44, ..Processors::default() };
    let options = GenerateOptions { max_new_tokens: 44, processors: never_ends, ..Default::default() };
    let beams = GenerateOptions { search: Search::Beams(Beams { count: 2, ..Beams::default() }), ..options };
    let all = [options, beams, options];
    let mut together = t5::ContinuousBatch::new(std::rc::Rc::clone(&model), DType::F32);
    let mut answered = vec![Vec::new(); 3];
    for step in 0..60 {
        if let Some(joins) = [0, 3, 7].iter().position(|joins| *joins == step) {
            assert!(together.join(joins as u64, &sources[joins], &all[joins], &|| false).unwrap());
        }
        for grown in together.step(&mut |_| false).unwrap() {
            answered[grown.key as usize] = grown.answers.unwrap();
        }
    }
    for (number, (answers, options)) in answered.iter().zip(&all).enumerate() {
        let alone = model.answers(&[&sources[number]], options, &Watch::default()).unwrap().unwrap();
        assert_eq!(ids(answers), ids(&alone[0]), "{name}: source {number}");
        assert_eq!(answers[0].ids.len(), 44, "{name}: source {number}");
    }
}

#[test]
fn a_group_grows_between_two_blocks_of_another_pass_and_neither_has_other_results() {
    MODELS.into_iter().for_each(grows_between_blocks);
}

#[track_caller]
fn grows_between_blocks(name: &str) {
    let sources = sources_of(name);
    let model = std::rc::Rc::new(model_of(name, &Value::Null));
    let never_ends = Processors { min_new_tokens: 12, ..Processors::default() };
    let options = GenerateOptions { max_new_tokens: 12, processors: never_ends, ..Default::default() };
    let alone = |source: usize| model.answers(&[&sources[source]], &options, &Watch::default()).unwrap().unwrap();
    let together = std::cell::RefCell::new(t5::ContinuousBatch::new(std::rc::Rc::clone(&model), DType::F32));
    assert!(together.borrow_mut().join(0, &sources[0], &options, &|| false).unwrap());
    let answered = std::cell::RefCell::new(vec![Vec::new(); 2]);
    let grow = || {
        for grown in together.borrow_mut().step(&mut |_| false).unwrap() {
            answered.borrow_mut()[grown.key as usize] = grown.answers.unwrap();
        }
    };
    let pauses = std::cell::Cell::new(0);
    let between = || {
        pauses.set(pauses.get() + 1);
        grow();
    };
    let is_interrupted = || {
        between();
        false
    };
    let encoded = t5::ContinuousBatch::encode((&*model, DType::F32), (1, &sources[1]), &options, &is_interrupted);
    together.borrow_mut().add(encoded.unwrap().unwrap());
    let of_encoder = pauses.get();
    assert!(of_encoder >= model.config().num_layers, "{name}: {of_encoder} pauses");
    let vectors =
        |between: &dyn Fn()| model.vectors(&[&sources[2]], t5::Pooling::Mean, true, DType::F32, between).unwrap();
    let paused = vectors(&between);
    assert!(pauses.get() > of_encoder, "{name}");
    assert_eq!(paused, vectors(&|| ()), "{name}");
    (0..12).for_each(|_| grow());
    for (source, answers) in answered.take().iter().enumerate() {
        assert_eq!(ids(answers), ids(&alone(source)[0]), "{name}: source {source}");
    }
}

#[test]
fn given_answers_have_the_log_probabilities_that_the_model_gives_its_own() {
    let sources = sources_of("t5");
    let model = std::rc::Rc::new(model(&Value::Null));
    let options = GenerateOptions { max_new_tokens: 12, scores: true, logprobs: Some(3), ..Default::default() };
    let mut together = t5::ContinuousBatch::new(std::rc::Rc::clone(&model), DType::F32);
    for source in &sources[..4] {
        assert!(together.join(0, source, &options, &|| false).unwrap());
        let (mut own, mut scores) = (Vec::new(), Vec::new());
        while !together.is_empty() {
            let grown = together.step(&mut |told: Told| {
                scores.push(told.score.unwrap().clone());
                false
            });
            own.extend(grown.unwrap().into_iter().flat_map(|grown| grown.answers.unwrap()));
        }
        let [Answer { ids, score }] = &own[..] else { panic!("{own:?}") };
        let mean = scores.iter().map(|score| score.log_probability).sum::<f64>() / ids.len() as f64;
        assert!((mean - score.unwrap()).abs() < 1e-9, "{mean}, {score:?}");
        for (id, score) in ids.iter().zip(&scores) {
            assert_eq!(score.likeliest[0], (*id, score.log_probability), "the likeliest is what was taken");
            assert!(score.likeliest.len() == 3 && score.likeliest[1].1 <= score.likeliest[0].1);
        }
        // The same answer as a given one, beside a shorter and a less likely one.
        let other = ids.iter().map(|id| (id + 1) % 48).collect();
        let given = vec![ids.clone(), ids[..1].to_vec(), other];
        let of = (&*model, DType::F32);
        let encoded = t5::ContinuousBatch::encode_given(of, (1, source), given.clone(), &|| false).unwrap();
        together.add(encoded.unwrap());
        let mut answers = Vec::new();
        while !together.is_empty() {
            let grown = together.step(&mut |_| false).unwrap();
            answers.extend(grown.into_iter().flat_map(|grown| grown.answers.unwrap()));
        }
        assert_eq!(answers.iter().map(|answer| answer.ids.clone()).collect::<Vec<_>>(), given);
        let means: Vec<f64> = answers.iter().map(|answer| answer.score.unwrap()).collect();
        assert!((means[0] - mean).abs() < 1e-5 && (means[1] - scores[0].log_probability).abs() < 1e-5, "{means:?}");
        assert!(means[2] < means[0], "{means:?}");
    }
}
