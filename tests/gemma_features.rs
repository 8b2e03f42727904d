//! T5Gemma with what T5 has: every lever, adapters beside codes, preferences, classifiers, vectors, and answers in every form.

use serde_json::{Value, json};

use crate::run::{Scene, repository, short};
use crate::serve;

fn numbers(events: &[Value], name: &str) -> Vec<f64> {
    events.iter().map(|event| event[name].as_f64().unwrap_or_else(|| panic!("{name} in {event:#}"))).collect()
}

/// Arguments of a short run with AdamW and these settings.
fn settings(of: &[&str]) -> Vec<String> {
    let usual = ["optimizer.name=adamw", "optimizer.learning_rate=1e-3", "schedule.name=constant"];
    short(&usual.iter().chain(of).flat_map(|setting| ["--set", setting]).collect::<Vec<_>>())
}

fn tiny(of: &[&str]) -> Vec<String> {
    let ends = ["model.config=tiny-gemma", "train.max_steps=3", "train.eval_samples=4", "checkpoint.every_steps=none"];
    settings(&[&ends[..], of].concat())
}

#[test]
fn levers_change_no_loss_and_files_no_bit() {
    let scene = Scene::new();
    let train = |name: &str, of: &[&str]| {
        let output = format!("run.output_dir={name}");
        scene.run(&tiny(&[of, &[output.as_str()]].concat())).expect_code(0);
        (numbers(&scene.events(name, "step"), "loss"), scene.read(&format!("{name}/model/model.safetensors")))
    };
    let (expected, _) = train("plain", &["memory.recompute_blocks=0"]);
    let layers = ["memory.accumulation=layer-major", "memory.recompute_blocks=6", "memory.loss_chunk_rows=32"];
    let (_, by_layers) = train("layers", &layers);
    let in_files = ["memory.weight_offload=disk", "memory.gradient_offload=disk", "memory.optimizer_offload=disk"];
    let kept = ["memory.activation_offload=disk", "memory.attention_heads=keep"];
    for (name, is_by_layers, of) in [
        ("recomputed", false, &["memory.recompute_blocks=6", "memory.loss_chunk_rows=5"][..]),
        ("alone", false, &["memory.micro_batch_samples=1"]),
        ("in-files", true, &in_files),
        ("kept", true, &kept),
    ] {
        let of = if is_by_layers { [&layers[..], of].concat() } else { of.to_vec() };
        let (losses, bits) = train(name, &of);
        for (got, expected) in losses.iter().zip(&expected) {
            assert!((got / expected - 1.0).abs() < 1e-5, "{name}: {losses:?}, {expected:?}");
        }
        assert!(!is_by_layers || bits == by_layers, "{name}: other bits");
    }
    let rounded = ["train.precision=bf16", "train.master_weights=stochastic-rounding"];
    let (losses, bits) = train("rounded", &[&layers[..], &rounded].concat());
    assert!((losses[0] / expected[0] - 1.0).abs() < 2e-2, "{losses:?}, {expected:?}");
    let (_, again) = train("rounded-in-files", &[&layers[..], &rounded, &in_files[..2]].concat());
    assert!(bits == again, "rounding follows the seed");
}

#[test]
fn two_budgets_train_to_the_same_losses_and_a_freeze_leaves_what_it_names() {
    let scene = Scene::new();
    let of = |name: &str, more: &[&str]| {
        let output = format!("run.output_dir={name}");
        let batch = ["train.batch_size=24", "memory.micro_batch_samples=auto", &output];
        tiny(&[&batch[..], more].concat())
    };
    let plan = [vec!["plan".to_owned()], of("x", &[]), vec!["--memory-budget".to_owned(), "10MiB".to_owned()]].concat();
    let refused = scene.run(&plan).expect_code(3).err;
    let least = refused.split("--memory-budget ").nth(1).and_then(|rest| rest.split([' ', ',', '\n']).next());
    let least = least.expect("a budget").to_owned();
    let losses = ["2GiB", &least].map(|budget| {
        scene.run(&[of(budget, &[]), vec!["--memory-budget".to_owned(), budget.to_owned()]].concat()).expect_code(0);
        let predicted = numbers(&scene.events(budget, "plan"), "predicted_peak_bytes")[0];
        (numbers(&scene.events(budget, "step"), "loss"), predicted)
    });
    assert!(losses[0].1 > losses[1].1, "{losses:?}");
    for (one, other) in losses[0].0.iter().zip(&losses[1].0) {
        assert!((one / other - 1.0).abs() < 1e-5, "{losses:?}");
    }
    let model = "model.init_from=2GiB/model";
    scene.run(&settings(&[
        model,
        "train.max_steps=1",
        "run.output_dir=frozen",
        r#"train.freeze=["encoder","shared"]"#,
    ]));
    let [before, after] =
        ["2GiB", "frozen"].map(|run| crate::files::tensors(&scene.read(&format!("{run}/model/model.safetensors"))));
    for (name, bytes) in &before {
        let is_frozen = name.contains(".encoder.") || name.contains("embed_tokens");
        assert_eq!(*bytes == after[name], is_frozen, "{name}");
    }
}

#[test]
fn adapters_train_beside_codes_and_by_preferences_and_every_form_of_answers_is_the_same() {
    let scene = Scene::new();
    scene.run(&tiny(&["run.output_dir=run"])).expect_code(0);
    let model = "model.init_from=run/model";
    let row = |i: usize| format!("{}\n", json!({"prompt": format!("after {i}"), "response": format!("{}", i + 1)}));
    scene.write("rows.jsonl", (0..6).map(row).collect::<String>());
    for (name, of) in [
        ("nf4", &["model.base_precision=nf4", "lora.dora=true"][..]),
        ("int8", &["model.base_precision=int8"]),
        ("in-files", &["memory.accumulation=layer-major", "memory.weight_offload=disk"]),
    ] {
        let output = format!("run.output_dir={name}");
        let rows = ["data.train=rows.jsonl", "train.batch_size=6", "train.dropout=0", "train.max_steps=4"];
        let of = [&[model, &output, "optimizer.learning_rate=0.01"], &rows[..], of].concat();
        scene.run(&[settings(&of), vec!["--lora".to_owned()]].concat()).expect_code(0);
        let losses = numbers(&scene.events(name, "step"), "loss");
        assert!(losses[3] < losses[0], "{name}: {losses:?}");
        scene.run(&["generate", "--model", name, "--max-new-tokens", "4", "after 75"]).expect_code(0);
    }
    let pair = |i: usize| {
        let row = json!({"prompt": format!("after {i}"), "chosen": format!("{}", i + 1), "rejected": format!("{i}")});
        format!("{row}\n")
    };
    scene.write("pairs.jsonl", (0..12).map(pair).collect::<String>());
    for loss in ["dpo", "orpo"] {
        let (output, by) = (format!("run.output_dir={loss}"), format!("preference.loss={loss}"));
        let of = [
            model,
            &by,
            "data.train=pairs.jsonl",
            "train.batch_size=4",
            "train.max_steps=4",
            "train.dropout=0",
            &output,
        ];
        scene.run(&[settings(&of), vec!["--lora".to_owned()]].concat()).expect_code(0);
        let steps = scene.events(loss, "step");
        let expected = if loss == "dpo" { Some(2f64.ln()) } else { None };
        let first = steps[0]["preference_loss"].as_f64().expect("a loss");
        assert!(expected.is_none_or(|expected| (first - expected).abs() < 1e-6), "{first}");
        assert!(numbers(&steps, "preference_loss")[3] < first, "{loss}");
    }
    // Greedy answers and beams of `generate`, of `serve` and of `chat`.
    let generate = |more: &[&str]| {
        let usual = ["generate", "--model", "run", "--max-new-tokens", "8"];
        scene.run(&[&usual[..], more, &["after 75"]].concat()).expect_code(0).out
    };
    let [greedy, beams] = [generate(&[]), generate(&["--num-beams", "3"])];
    let server = serve::start(&scene, &[]);
    for (number, expected) in [(1, &greedy), (3, &beams)] {
        let (status, answer) = server.ask(&json!({"prompt": "after 75", "num_beams": number}));
        let text = answer["choices"][0]["text"].as_str().expect("a text");
        assert_eq!((status, format!("{text}\n")), (200, expected.clone()), "{answer}");
    }
    server.end().expect_code(0);
    scene.write("lines.txt", "after 75\n/set num_beams 3\nafter 75\n");
    let program = env!("CARGO_BIN_EXE_train_low_mem");
    let ran = scene.shell(&format!("'{program}' chat run --max-new-tokens 8 < lines.txt")).expect_code(0);
    assert_eq!(ran.out, format!("{greedy}{beams}"), "{}", ran.err);
}

#[test]
fn classifiers_and_encoders_are_trained_from_the_whole_model_and_have_transformers_classes() {
    let scene = Scene::new();
    let rows = |row: &dyn Fn(usize) -> Value| (0..16).map(|i| format!("{}\n", row(i))).collect::<String>();
    scene.write(
        "labels.jsonl",
        rows(&|i| json!({"text": format!("after {i}"), "label": if i % 2 == 0 { "even" } else { "odd" }})),
    );
    scene.write(
        "words.jsonl",
        rows(
            &|i| json!({"tokens": ["after", i.to_string()], "ner_tags": ["O", if i % 2 == 0 { "B-X" } else { "B-Y" }]}),
        ),
    );
    scene.write("pairs.jsonl", rows(&|i| json!({"query": format!("after {i}"), "positive": format!("{}", i + 1)})));
    for family in ["t5gemma", "t5gemma2"] {
        let (class, is_second) = (if family == "t5gemma" { "T5Gemma" } else { "T5Gemma2" }, family == "t5gemma2");
        let golden = repository().join("crates/t5/tests/goldens/gemma").join(family);
        for file in ["config.json", "model.safetensors"] {
            scene.write(&format!("{family}/{file}"), std::fs::read(golden.join(file)).expect("a file"));
        }
        scene.write(&format!("{family}/tokenizer.json"), letters().to_string());
        for (task, file, suffix, has_decoder) in [
            ("classification", "labels", "ForSequenceClassification", true),
            ("token-classification", "words", "ForTokenClassification", is_second),
            ("embedding", "pairs", if is_second { "Encoder" } else { "EncoderModel" }, is_second),
        ] {
            let run = format!("{family}-{task}");
            let data = [format!("data.train={file}.jsonl"), format!("data.validation={file}.jsonl")];
            let names =
                [format!("task.name={task}"), format!("run.output_dir={run}"), format!("model.init_from={family}")];
            let few = ["train.max_steps=6", "train.batch_size=8", "train.eval_samples=8", "train.dropout=0"];
            let of: Vec<&str> = data.iter().chain(&names).map(String::as_str).chain(few).collect();
            scene.run(&settings(&of)).expect_code(0);
            let losses = numbers(&scene.events(&run, "step"), "loss");
            assert!(losses[5] < losses[0], "{run}: {losses:?}");
            let config: Value = serde_json::from_slice(&scene.read(&format!("{run}/model/config.json"))).expect("JSON");
            assert_eq!(config["architectures"], json!([format!("{class}{suffix}")]), "{run}");
            assert_eq!(config["is_encoder_decoder"].as_bool().unwrap_or(true), has_decoder, "{run}");
            let evaluated = ["eval", "--model", &run, "--data", &format!("{file}.jsonl"), "--json"];
            let loss = scene.run(&evaluated).expect_code(0).json()["loss"].as_f64().expect("a loss");
            assert!(loss < losses[0], "{run}: {loss}, {losses:?}");
            // An adapter, with the classifier beside it.
            let adapted = format!("run.output_dir={run}-lora");
            let of = [&of[..], &[adapted.as_str()]].concat();
            scene.run(&[settings(&of), vec!["--lora".to_owned()]].concat()).expect_code(0);
            let merge =
                ["merge", "--model", family, "--adapter", &format!("{run}-lora"), "-o", &format!("{run}-merged")];
            scene.run(&merge).expect_code(0);
            let losses = [format!("{run}-lora"), format!("{run}-merged")].map(|model| {
                let task = format!("task.name={task}");
                let eval = ["eval", "--model", &model, "--data", &format!("{file}.jsonl"), "--json", "--set", &task];
                let batch = ["--set", "train.batch_size=8"];
                scene.run(&[&eval[..], &batch].concat()).expect_code(0).json()["loss"].as_f64().expect("a loss")
            });
            assert!((losses[0] / losses[1] - 1.0).abs() < 1e-5, "{run}: {losses:?}");
        }
        // The vectors of a whole model are those of its encoder alone.
        scene.write("texts.txt", "after 7\nafter 12\n");
        let vectors = |model: &str, output: &str| {
            let embed = ["embed", "--model", model, "--input", "texts.txt", "--output", output, "--pooling", "mean"];
            scene.run(&embed).expect_code(0);
            scene.read(output)
        };
        assert!(vectors(family, "whole.npy").len() > 2 * 24 * 4);
        vectors(&format!("{family}-embedding"), "encoder.npy");
    }
}

#[test]
fn the_first_screen_names_the_cost_of_a_large_table_and_the_command_that_gives_it_back() {
    let scene = Scene::new();
    let small = "model.overrides={d_model=16, d_ff=16, num_layers=1, num_decoder_layers=1}";
    let few = ["train.max_steps=1", "train.eval_samples=1", "train.eval_generate_samples=0", "model.vocab_size=100000"];
    let ran = scene.run(&settings(&[&few[..], &["model.config=tiny", small, "run.output_dir=whole"]].concat()));
    assert!(!ran.expect_code(0).out.contains("trim-vocab"), "there is nothing to trim in a new model");
    let ran = scene.run(&settings(&[&few[..3], &["model.init_from=whole/model", "run.output_dir=tuned"]].concat()));
    let words = ran.expect_code(0).out.split_whitespace().collect::<Vec<_>>().join(" ");
    for expected in
        ["100,000 entries have 1.6 M of the parameters", "train_low_mem trim-vocab --model whole/model --keep-used"]
    {
        assert!(words.contains(expected), "{words}");
    }
}

/// A tokenizer of letters, whose sources begin with `<bos>`.
fn letters() -> Value {
    let special = ["<pad>", "<eos>", "<bos>", "<unk>", "<eoi>", "<image>"];
    let letters = ('a'..='z').chain('0'..='9').chain(['▁']).map(String::from);
    let all = special.iter().map(ToString::to_string).chain(letters);
    let vocabulary: serde_json::Map<String, Value> = all.zip(0..).map(|(name, id)| (name, json!(id))).collect();
    let added = special.iter().zip(0..).map(|(content, id)| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    });
    let template =
        [json!({"SpecialToken": {"id": "<bos>", "type_id": 0}}), json!({"Sequence": {"id": "A", "type_id": 0}})];
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing", "single": template, "pair": template,
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": "<unk>", "fuse_unk": true,
            "byte_fallback": false, "dropout": null, "continuing_subword_prefix": null, "end_of_word_suffix": null},
    })
}
