//! Flags do what they say: names of models, lists of files, strings.

use crate::run::{Scene, repository, short};

fn rows(scene: &Scene, name: &str, count: usize) {
    let row = |number: usize| {
        format!("{{\"prompt\":\"how many legs have {number} cats\",\"response\":\"{}\"}}\n", 4 * number)
    };
    scene.write(name, (0..count).map(row).collect::<String>());
}

#[test]
fn the_name_of_a_pretrained_model_is_never_a_shape() {
    let scene = Scene::new();
    rows(&scene, "rows.jsonl", 8);
    let names =
        [&["--model", "t5-small"][..], &["--model_name_or_path", "t5-small"], &["--set", "model.init_from=t5-small"]];
    let train = |name: &[&str], output: &str| {
        let run = ["--data", "rows.jsonl", "--max-steps", "1", "--output", output];
        scene.run_under("env HF_HOME=cache", &[name, &run].concat())
    };
    for name in names {
        train(name, "absent").expect_code(4).expect_words(&[
            "no such model",
            "`hf download t5-small`",
            "`--preset t5-small`",
        ]);
    }
    scene.run(&short(&["--max-steps", "2"])).expect_code(0);
    for (number, repository) in ["models--t5-small", "models--google-t5--t5-small"].into_iter().enumerate() {
        let snapshot = format!("cache/hub/{repository}/snapshots/1");
        for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
            scene.write(&format!("{snapshot}/{file}"), scene.read(&format!("run/model/{file}")));
        }
        for (place, name) in names.into_iter().enumerate() {
            let ran = train(name, &format!("run-{number}-{place}")).expect_code(0);
            assert!(ran.out.contains("from t5-small"), "{name:?}: {}", ran.out);
        }
        std::fs::remove_dir_all(scene.path("cache")).expect("the cache");
    }
}

#[test]
fn files_that_are_named_one_after_the_other_add_up() {
    let scene = Scene::new();
    rows(&scene, "a.jsonl", 5);
    rows(&scene, "b.jsonl", 6);
    rows(&scene, "c.jsonl", 7);
    let tokenizer = repository().join("data/sample-tokenizer.json").display().to_string();
    let usual = ["--preset", "tiny", "--tokenizer", &tokenizer, "--max-steps", "1", "--batch-size", "4", "--output"];
    for (number, data) in [
        &["--data", "a.jsonl", "--data", "b.jsonl", "--validation", "c.jsonl"][..],
        &["--data", "a.jsonl", "b.jsonl", "--validation", "c.jsonl"],
        &["--train_file", "a.jsonl", "--data", "b.jsonl", "--validation_file", "c.jsonl"],
        &["--set", "data.train=[\"a.jsonl\", \"b.jsonl\"]", "--set", "data.validation=c.jsonl"],
    ]
    .into_iter()
    .enumerate()
    {
        let output = format!("run-{number}");
        let ran = scene.run(&[&usual[..], &[&output], data].concat()).expect_code(0);
        assert!(ran.out.contains("11 rows, 7 rows for validation"), "{data:?}: {}", ran.out);
    }
    let stray = scene.run(&["--preset", "tiny", "--lr", "1e-3", "b.jsonl", "--data", "a.jsonl"]);
    stray.expect_code(2).expect_words(&["unexpected argument `b.jsonl`", "`--data b.jsonl`"]);
}

#[test]
fn a_prefix_is_kept_to_the_byte_in_every_file_and_when_a_run_is_resumed() {
    let scene = Scene::new();
    rows(&scene, "rows.jsonl", 8);
    scene.write("prefix.toml", "[data]\nsource_prefix = \"summarize: \"\n");
    let check = |run: &str| {
        let config = String::from_utf8(scene.read(&format!("{run}/model/config.json"))).expect("UTF-8");
        let resolved = String::from_utf8(scene.read(&format!("{run}/resolved.toml"))).expect("UTF-8");
        assert!(resolved.contains("source_prefix = \"summarize: \" #"), "{resolved}");
        assert!(config.contains("\"prefix\": \"summarize: \""), "{config}");
    };
    for (number, given) in [
        &["--source_prefix", "summarize: "][..],
        &["--set", "data.source_prefix=summarize: "],
        &["--set", "data.source_prefix = \"summarize: \""],
        &["--config", "prefix.toml"],
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("run-{number}");
        let tokenizer = repository().join("data/sample-tokenizer.json").display().to_string();
        let usual = ["--preset", "tiny", "--tokenizer", &tokenizer, "--data", "rows.jsonl", "--output", &run];
        scene.run(&[&usual[..], given, &["--max-steps", "2"]].concat()).expect_code(0);
        check(&run);
        scene.run(&["--output", &run, "--keep-training", "--max-steps", "3"]).expect_code(0);
        check(&run);
    }
}

#[test]
fn what_cannot_work_is_refused_with_a_way_out() {
    let scene = Scene::new();
    rows(&scene, "rows.jsonl", 4);
    scene.write("rows.csv", "prompt,response\na,b\n");
    let tokenizer = repository().join("data/sample-tokenizer.json").display().to_string();
    let new = ["--preset", "tiny", "--tokenizer", &tokenizer];
    for (arguments, words) in [
        (
            &["--data", "https://example.org/rows.jsonl"][..],
            &["nothing is fetched", "`curl -LO https://example.org/rows.jsonl`"][..],
        ),
        (&["--data", "rows.jsonl", "--model", "m"], &["`model.config` (--preset)", "`model.init_from` (--model)"]),
        (&["--data", "rows.jsonl", "--num_workers", "4"], &["memory.decode_threads"]),
        (&["--data", "rows.jsonl", "--output", ""], &["--output", "expected a string that is not empty"]),
    ] {
        scene.run(&[&new[..], arguments].concat()).expect_code(2).expect_words(words).expect_words(&["hint: "]);
    }
    for (arguments, words) in [
        (&["convert", "rows.csv", "--output", "out.csv"][..], &["writes parquet", "hint: `--output out.parquet`"][..]),
        (&["jobs", "run", "nosuch.toml"], &["nosuch.toml", "hint: `train_low_mem jobs add FILE --output DIR`"]),
        (&["serve", "--listen", "nope", "m"], &["such as 8080", "hint: see `train_low_mem serve --help`"]),
        (&["generate", "hello"], &["expected a model and a prompt", "hint: "]),
        (&["--quiet"], &["> train.log"]),
        (&["--output", "a", "--out", "b"], &["--output and --out both set `run.output_dir`"]),
    ] {
        scene.run(arguments).expect_code(2).expect_words(words);
    }
    assert!(!scene.path("out.csv").exists() && !scene.path("runs").exists());
}

#[test]
fn a_flag_whose_value_is_lost_is_named() {
    let scene = Scene::new();
    let plan = |more: &[&str]| {
        scene.run(
            &[&["plan", "--preset", "tiny", "--batch-size", "4"], more]
                .concat()
                .iter()
                .map(|&word| word.to_owned())
                .collect::<Vec<_>>(),
        )
    };
    let warned = plan(&["--lr", "1e-3", "--set", "optimizer.learning_rate=1e-2"]).expect_code(0);
    assert_eq!(warned.err.matches("`--set optimizer.learning_rate` takes the place of `--lr 0.001`").count(), 1);
    let same = plan(&["--lr", "1e-2", "--set", "optimizer.learning_rate=0.01"]).expect_code(0);
    assert!(!same.err.contains("takes the place"), "{}", same.err);
    let refused = plan(&["--gradient_accumulation_steps", "4"]).expect_code(2);
    refused.expect_words(&["samples of an optimizer step", "`--batch-size 16`"]);
}

#[test]
fn threads_are_those_of_the_flag_or_of_the_environment_and_the_bits_are_the_same() {
    let scene = Scene::new();
    let run = |environment: &str, flags: &[&str], output: &str| {
        let arguments = short(&[&["--max-steps", "2", "--output", output][..], flags].concat());
        let clean = format!("env -u RAYON_NUM_THREADS -u OMP_NUM_THREADS {environment}");
        scene.run_under(clean.trim_end(), &arguments).expect_code(0).out
    };
    assert!(run("OMP_NUM_THREADS=1", &[], "one").contains("CPU, 1 thread (OMP_NUM_THREADS), "));
    assert!(run("OMP_NUM_THREADS=1", &["--threads", "3"], "three").contains("CPU, 3 threads, "));
    assert!(run("", &["-t", "2"], "two").contains("CPU, 2 threads, "));
    let weights = |run: &str| scene.read(&format!("{run}/model/model.safetensors"));
    assert!(weights("one") == weights("three") && weights("one") == weights("two"));
    let both = scene.run_under("env RAYON_NUM_THREADS=1", &["-t", "2", "--max-steps", "1"]);
    both.expect_code(2).expect_words(&["--threads is 2", "RAYON_NUM_THREADS", "hint: "]);
}

#[test]
fn a_model_may_come_first_and_a_plan_needs_only_its_shape() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "1"])).expect_code(0);
    let typed = scene.run(&["generate", "run", "how many legs has a cat", "--max-new-tokens", "3"]).expect_code(0);
    let by_flags = ["generate", "--model", "run", "--prompt", "how many legs has a cat", "--max-new-tokens", "3"];
    assert_eq!(typed.out, scene.run(&by_flags).expect_code(0).out);
    scene.run(&["plan", "--preset", "t5-small", "--lora"]).expect_code(0).expect_words(&["predicted peak"]);
    let huge = scene.run(&["plan", "--preset", "tiny", "--memory-budget", "900TiB"]).expect_code(0);
    assert!(
        huge.err.contains("warning: `memory.budget` (--memory-budget) is 900 TiB, and this machine has "),
        "{}",
        huge.err
    );
}

#[test]
fn a_setting_without_an_effect_is_named() {
    let scene = Scene::new();
    let settings =
        ["--set", "schedule.name=constant", "--set", "schedule.div_factor=3", "--set", "data.noise_density=0.5"];
    for command in [&["plan"][..], &[]] {
        let ran =
            scene.run(&[command, &short(&[])[..].iter().map(String::as_str).collect::<Vec<_>>(), &settings].concat());
        let ran = ran.expect_code(0);
        assert!(
            ran.err.contains("warning: `schedule.div_factor` (--set) has no effect: it is for `schedule.name"),
            "{}",
            ran.err
        );
        assert_eq!(
            ran.err.contains("warning: `data.noise_density` (--set) has no effect: "),
            command.is_empty(),
            "{}",
            ran.err
        );
    }
    // A rate of Adafactor's own beside a warm-up of no steps is what it says.
    let relative = ["optimizer.relative_step=true", "schedule.warmup_steps=0", "schedule.name=constant"];
    let relative: Vec<&str> = relative.iter().flat_map(|setting| ["--set", setting]).collect();
    scene
        .run(&short(&[&relative[..], &["--set", "optimizer.learning_rate=auto", "--output", "relative"]].concat()))
        .expect_code(0);
}

#[test]
fn the_flags_of_transformers_scripts_are_taken_or_refused_all_at_once() {
    let scene = Scene::new();
    let row = |number: usize| format!("{{\"document\": \"a long text {number}\", \"summary\": \"text {number}\"}}\n");
    scene.write("rows.json", (0..8).map(row).collect::<String>());
    let tokenizer = repository().join("data/sample-tokenizer.json").display().to_string();
    let taken = [
        "--preset",
        "tiny",
        "--tokenizer_name",
        &tokenizer,
        "--train_file",
        "rows.json",
        "--validation_file",
        "rows.json",
        "--text_column",
        "document",
        "--summary_column=summary",
        "--source_prefix",
        "summarize: ",
        "--output_dir",
        "run",
        "--per_device_train_batch_size=4",
        "--learning_rate",
        "1e-3",
        "--num_train_epochs=3.0",
        "--lr_scheduler_type",
        "linear",
        "--warmup_ratio=0.1",
        "--max_source_length",
        "16",
        "--max_target_length",
        "16",
        "--num_beams",
        "2",
        "--metric_for_best_model",
        "eval_rouge1",
        "--save_total_limit",
        "1",
    ];
    let refused = ["--do_train", "--do_eval", "True", "--per_device_eval_batch_size=4", "--overwrite_output_dir"];
    let also = ["--predict_with_generate", "--eval_strategy", "epoch", "--report_to", "none", "--ddp_backend=nccl"];
    let ran = scene.run(&[&taken[..], &refused, &also].concat()).expect_code(2);
    let ran = ran.expect_words(&["unexpected arguments: `--do-train`, `--do-eval`, `--per-device-eval-batch-size`"]);
    for flag in refused.iter().chain(&also).filter(|word| word.starts_with("--")) {
        let flag = flag.split('=').next().unwrap_or(flag).replace('_', "-");
        assert!(ran.err.contains(&format!("hint: `{flag}`: ")), "{flag}: {}", ran.err);
    }
    assert!(!scene.path("run").exists());
    scene
        .run(&[&taken[..], &["--dry-run"]].concat())
        .expect_code(0)
        .expect_words(&["prompt from `document`, response from `summary`"]);
}
