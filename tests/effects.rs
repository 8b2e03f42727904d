//! Every key of the config has an effect, or the command says why not.
//!
//! Each row runs the same tiny training twice, without and with the value. Losses, rates, norms, scores, files, weights or the number of
//! lines differ then, or standard error has the key's name. A key whose effect needs another situation names a file that uses it there.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use run_plan::config::keys::{self, KEYS};
use serde_json::Value;

use crate::run::{Scene, repository};

/// A key, a value that must change something, and the settings beside it.
type Row = (&'static str, &'static str, &'static [&'static str]);

const VALID: &str = "data.validation=valid.jsonl";
const SPANS: &str = "data.objective=span-corruption";
const ADAMW: &str = "optimizer.name=adamw";
const SAMPLE: &str = "generation.sample=true";
const CHOSEN: &str = "data.chosen_column=response";
const REJECTED: &str = "data.rejected_column=answer";
const ORPO: &str = "preference.loss=orpo";
const EMBEDDING: &str = "task.name=embedding";
const TASKS: &str = "data.tasks=[{ name = \"a\", train = \"rows.jsonl\" }, { name = \"b\", train = \"valid.jsonl\" }]";
const ONE_TASK: &str =
    "data.tasks=[{ name = \"a\", train = \"rows.jsonl\", prompt_column = \"prompt\", response_column = \"response\" }]";
const TEMPLATES: &str = "data.tasks=[{ name = \"a\", train = \"rows.jsonl\", source_template = \"{prompt}\", target_template = \"{response}\" }]";
const LANGUAGES: &str =
    "data.tasks=[{ name = \"a\", train = \"languages.jsonl\", source_lang = \"en\", target_lang = \"de\" }]";
const DENOISER: &str = "data.denoisers=[{ mean_span_tokens = 2.0 }]";
const TWO: &str = "data.denoisers=[{ mean_span_tokens = 2.0 }, { objective = \"prefix-lm\" }]";
const QUESTION: &str = "data.text_column=question";
const GROUP: &str = "optimizer.groups=[{ parameters = [\"shared\"], learning_rate_factor = 0.5 }]";
const NO_LIST: &str = "data.train=[]";
const STILL: &str = "train.dropout=0";
const OFTEN: &str = "checkpoint.every_steps=1";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    ("run.seed", "7", &[]),
    ("run.device", "cuda:7", &[]),
    ("run.log_every_steps", "2", &[]),
    ("run.finetune", "true", &[]),
    ("model.config", "nosuch", &[]),
    ("model.init_from", "nosuch", &[]),
    ("model.vocab_size", "4200", &[]),
    ("model.base_precision", "nf4", &[]),
    ("model.overrides", "{ num_layers = 1 }", &[]),
    ("data.train", "valid.jsonl", &[]),
    ("data.validation", "valid.jsonl", &[]),
    ("data.validation_split", "3", &[]),
    ("data.prompt_column", "question", &[]),
    ("data.response_column", "answer", &[]),
    ("data.chosen_column", "question", &[ORPO, STILL, CHOSEN, REJECTED]),
    ("data.rejected_column", "question", &[ORPO, STILL, CHOSEN, REJECTED]),
    ("data.source_template", "{prompt} {question}", &["data.target_template={answer}"]),
    ("data.target_template", "{answer}", &["data.source_template={prompt}"]),
    ("data.source_lang", "fr", &["data.train=languages.jsonl", "data.target_lang=de"]),
    ("data.target_lang", "fr", &["data.train=languages.jsonl", "data.source_lang=en"]),
    ("data.text_column", "question", &[SPANS]),
    ("data.encoding", "utf-16le", &[]),
    ("data.quoting", "none", &["data.train=quoted.csv"]),
    ("data.source_prefix", "\"answer: \"", &[]),
    ("data.tasks", "[{ name = \"a\", train = \"valid.jsonl\" }]", &[NO_LIST]),
    ("data.tasks", "[{ name = \"b\", train = \"rows.jsonl\" }, { name = \"b\", train = \"valid.jsonl\" }]", &[TASKS, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"rows.jsonl\" }, { name = \"b\", train = \"valid.jsonl\", weight = 9 }]", &[TASKS, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"rows.jsonl\", prompt_column = \"question\", response_column = \"response\" }]", &[ONE_TASK, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"rows.jsonl\", prompt_column = \"prompt\", response_column = \"answer\" }]", &[ONE_TASK, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"rows.jsonl\", prompt_column = \"prompt\", response_column = \"response\", source_prefix = \"x \" }]", &[ONE_TASK, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"rows.jsonl\", prompt_column = \"prompt\", response_column = \"response\", validation = \"valid.jsonl\" }]", &[ONE_TASK, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"rows.jsonl\", source_template = \"{question}\", target_template = \"{response}\" }]", &[TEMPLATES, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"rows.jsonl\", source_template = \"{prompt}\", target_template = \"{answer}\" }]", &[TEMPLATES, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"languages.jsonl\", source_lang = \"fr\", target_lang = \"de\" }]", &[LANGUAGES, NO_LIST]),
    ("data.tasks", "[{ name = \"a\", train = \"languages.jsonl\", source_lang = \"en\", target_lang = \"fr\" }]", &[LANGUAGES, NO_LIST]),
    ("data.mixing", "equal", &[TASKS, NO_LIST]),
    ("data.mixing_temperature", "9.0", &[TASKS, NO_LIST, "data.mixing=temperature"]),
    ("data.mixing_limit", "2", &[TASKS, NO_LIST]),
    ("data.tokenizer", "nosuch.json", &[]),
    ("data.objective", "span-corruption", &["data.text_column=question"]),
    ("data.denoisers", "[{ mean_span_tokens = 2.0, prefix = \"[R] \" }]", &["data.text_column=question"]),
    ("data.denoisers", "[{ mean_span_tokens = 1.0 }]", &[DENOISER, QUESTION]),
    ("data.denoisers", "[{ mean_span_tokens = 2.0, noise_density = 0.5 }]", &[DENOISER, QUESTION]),
    ("data.denoisers", "[{ mean_span_tokens = 2.0, objective = \"span-corruption\" }, { objective = \"span-corruption\" }]", &[TWO, QUESTION]),
    ("data.denoisers", "[{ mean_span_tokens = 2.0, weight = 0 }, { objective = \"prefix-lm\" }]", &[TWO, QUESTION]),
    ("data.noise_density", "0.5", &[SPANS, "data.text_column=question"]),
    ("data.mean_span_tokens", "1.0", &[SPANS, "data.text_column=question"]),
    ("data.max_source_tokens", "4", &[]),
    ("data.max_target_tokens", "2", &[]),
    ("data.truncation_side", "left", &["data.max_source_tokens=4"]),
    ("data.shuffle", "false", &[]),
    ("data.block_rows", "2", &["data.window_blocks=1", "train.batch_size=4"]),
    ("data.window_blocks", "1", &["data.block_rows=2", "train.batch_size=4"]),
    ("data.bad_rows", "error", &["data.train=holes.jsonl"]),
    ("train.batch_size", "5", &[]),
    ("train.batch_size_per_device", "5", &[]),
    ("train.gradient_accumulation_steps", "2", &["train.batch_size_per_device=4"]),
    ("train.epochs", "2", &[]),
    ("train.max_steps", "1", &[]),
    ("train.dropout", "0.3", &[]),
    ("train.precision", "bf16", &[]),
    ("train.master_weights", "stochastic-rounding", &["train.precision=bf16"]),
    ("train.gradient_precision", "bf16", &["memory.micro_batch_samples=4"]),
    ("train.freeze", "encoder", &[]),
    ("train.grad_clip_norm", "0.01", &["optimizer.name=adamw", "optimizer.eps=0.1"]),
    ("train.z_loss", "0.1", &[]),
    ("train.label_smoothing", "0.2", &[]),
    ("train.eval_every_steps", "1", &[VALID]),
    ("train.eval_samples", "2", &[VALID]),
    ("train.eval_generate_samples", "1", &[VALID]),
    ("train.early_stopping_patience", "1", &[VALID, "train.eval_every_steps=1", "train.epochs=3", "optimizer.learning_rate=0"]),
    ("train.early_stopping_min_delta", "100", &[VALID, "train.eval_every_steps=1", "train.epochs=3", "train.early_stopping_patience=1"]),
    ("train.eval_max_new_tokens", "1", &[VALID]),
    ("train.eval_metrics", "chrf", &[VALID]),
    ("train.rouge_stemmer", "true", &[VALID]),
    ("train.bleu_tokenizer", "char", &[VALID, "train.eval_metrics=chrf"]),
    ("train.sample_generations", "0", &[VALID]),
    ("parallel.virtual_shards", "2", &[]),
    ("parallel.shard", "optimizer", &[]),
    ("parallel.network_mbit", "100", &[]),
    ("lora.rank", "4", &[]),
    ("lora.alpha", "6", &[]),
    ("lora.dropout", "0.1", &[]),
    ("lora.targets", "q", &[]),
    ("lora.rslora", "true", &[]),
    ("lora.dora", "true", &[]),
    ("lora.init", "gaussian", &[]),
    ("lora.modules_to_save", "lm_head", &[]),
    ("lora.init_from", "nosuch", &[]),
    ("task.name", "classification", &[STILL]),
    ("data.negative_column", "prompt", &[STILL, EMBEDDING]),
    ("embedding.loss", "triplet", &[STILL, EMBEDDING, "data.negative_column=prompt"]),
    ("embedding.temperature", "0.5", &[STILL, EMBEDDING]),
    ("embedding.margin", "1", &[STILL, EMBEDDING, "embedding.loss=triplet", "data.negative_column=prompt"]),
    ("embedding.pooling", "last", &[STILL, EMBEDDING]),
    ("embedding.normalize", "true", &[STILL, EMBEDDING, "embedding.loss=triplet", "data.negative_column=prompt"]),
    ("embedding.sizes", "16", &[STILL, EMBEDDING]),
    ("preference.loss", "orpo", &[STILL, CHOSEN, REJECTED]),
    ("preference.beta", "3", &[ORPO, STILL, CHOSEN, REJECTED]),
    ("preference.gamma", "3", &["preference.loss=simpo", STILL, CHOSEN, REJECTED]),
    ("optimizer.name", "adamw", &[]),
    ("optimizer.learning_rate", "0.1", &[]),
    ("optimizer.relative_step", "true", &[]),
    ("optimizer.scale_parameter", "true", &[]),
    ("optimizer.warmup_init", "true", &["optimizer.relative_step=true"]),
    ("optimizer.clip_threshold", "0.01", &[]),
    ("optimizer.decay_rate", "-0.3", &[]),
    ("optimizer.eps1", "0.1", &[]),
    ("optimizer.eps2", "0.9", &["optimizer.scale_parameter=true"]),
    ("optimizer.beta1", "0.5", &[]),
    ("optimizer.beta2", "0.5", &[ADAMW]),
    ("optimizer.eps", "0.1", &[ADAMW]),
    ("optimizer.weight_decay", "0.5", &[]),
    ("optimizer.state_precision", "int8", &[ADAMW]),
    ("optimizer.groups", "[{ parameters = [\"shared\"], learning_rate_factor = 0.5 }]", &[]),
    ("optimizer.groups", "[{ parameters = [\"decoder\"], learning_rate_factor = 0.5 }]", &[GROUP]),
    ("optimizer.groups", "[{ parameters = [\"shared\"], learning_rate_factor = 0.5, weight_decay = 0.5 }]", &[GROUP]),
    ("schedule.name", "linear", &[]),
    ("schedule.warmup_steps", "2", &[]),
    ("schedule.warmup_ratio", "0.5", &[]),
    ("schedule.div_factor", "3", &["schedule.name=one-cycle"]),
    ("schedule.final_div_factor", "7", &["schedule.name=one-cycle"]),
    ("generation.num_beams", "3", &[]),
    ("generation.length_penalty", "5.0", &[VALID]),
    ("generation.early_stopping", "true", &[VALID]),
    ("generation.sample", "true", &[VALID]),
    ("generation.temperature", "50.0", &[VALID, SAMPLE]),
    ("generation.top_k", "1", &[VALID, SAMPLE]),
    ("generation.top_p", "0.0001", &[VALID, SAMPLE]),
    ("generation.seed", "3", &[VALID, SAMPLE]),
    ("generation.repetition_penalty", "50.0", &[VALID]),
    ("generation.no_repeat_ngram", "1", &[VALID]),
    ("generation.keep_special_tokens", "true", &["data.validation=special.jsonl"]),
    ("checkpoint.best_metric", "chrf", &[VALID]),
    ("checkpoint.model", "best", &[]),
    ("checkpoint.every_steps", "1", &[]),
    ("checkpoint.keep_last", "1", &[OFTEN, "train.epochs=2"]),
    ("memory.budget", "1MiB", &[]),
    ("memory.device_budget", "1GiB", &[]),
    ("memory.offload_to", "disk", &[]),
    ("memory.micro_batch_samples", "3", &[]),
    ("memory.accumulation", "layer-major", &["memory.micro_batch_samples=3"]),
    ("memory.copy_overlap", "block", &[]),
    ("memory.weight_copies", "bf16", &[]),
    ("memory.recorded_micro_batches", "all", &[]),
    ("memory.loss_chunk_rows", "17", &[]),
    ("memory.prefetch_batches", "7", &[]),
    ("memory.decode_threads", "2", &[]),
    ("memory.dataset_residency", "in_memory", &[]),
    ("memory.recompute_blocks", "1", &[]),
    ("memory.kept_gradient_blocks", "1", &["memory.micro_batch_samples=3"]),
    ("memory.activation_offload", "disk", &["memory.micro_batch_samples=3"]),
    ("memory.gradient_offload", "disk", &["memory.micro_batch_samples=3"]),
    ("memory.weight_offload", "disk", &["memory.micro_batch_samples=3"]),
    ("memory.optimizer_offload", "disk", &["memory.micro_batch_samples=3"]),
    ("memory.attention_heads", "keep", &["memory.micro_batch_samples=3"]),
    ("memory.blocks_in_memory", "1", &["memory.micro_batch_samples=3"]),
];

/// Keys whose effect needs another situation, such as a resume, minutes, several processes or a trained model, and a file that uses the
/// key for it.
const ELSEWHERE: &[(&str, &str)] = &[
    ("run.output_dir", "tests/flags.rs"),
    ("run.deterministic", "tests/same_bits.rs"),
    ("run.allow_changes", "crates/command/src/cli/mod.rs"),
    ("train.max_non_finite_steps", "tests/training.rs"),
    ("data.label_column", "tests/preferences.rs"),
    ("preference.reference", "tests/preferences.rs"),
    ("preference.desirable_weight", "tests/preferences.rs"),
    ("preference.undesirable_weight", "tests/preferences.rs"),
    ("distill.teacher", "tests/distillation.rs"),
    ("distill.alpha", "tests/distillation.rs"),
    ("distill.temperature", "tests/distillation.rs"),
    ("distill.top_k", "tests/distillation.rs"),
    ("embedding.largest_score", "tests/embedding.rs"),
    ("data.query_column", "tests/ranking.rs"),
    ("ranking.loss", "tests/ranking.rs"),
    ("ranking.answers", "tests/ranking.rs"),
    ("ranking.list_size", "tests/ranking.rs"),
    ("task.class_weights", "tests/ranking.rs"),
    ("generation.min_new_tokens", "crates/run-plan/src/config/generation.rs"),
    ("checkpoint.every_minutes", "crates/run-plan/src/config/mod.rs"),
    ("checkpoint.keep_best", "tests/own_files.rs"),
    ("memory.disk_writes", "tests/situations.rs"),
    ("memory.prices", "tests/prices.rs"),
    ("memory.clear_cache_every_steps", "crates/run-plan/src/config/memory.rs"),
    ("memory.weight_blocks_in_memory", "tests/adapters.rs"),
    ("memory.weights_at_a_time", "tests/adapters.rs"),
    ("memory.communication_overlap", "docs/processes.md"),
];

/// What a run did, without its times and its memory.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    code: Option<i32>,
    events: Vec<BTreeMap<String, Value>>,
    files: Vec<(String, Vec<u8>)>,
    lines: usize,
    plan: Option<Value>,
    err: String,
}

fn scene() -> Scene {
    let scene = Scene::new();
    let row = |number: usize| {
        format!(
            "{{\"prompt\":\"how many legs have {number} cats\",\"response\":\"{} legs\",\"question\":\"what is {number} times four, \
             and why is it so\",\"answer\":\"it is {}\"}}\n",
            4 * number,
            4 * number
        )
    };
    scene.write("rows.jsonl", (0..16).map(row).collect::<String>());
    scene.write("valid.jsonl", (16..20).map(row).collect::<String>());
    let languages = |number: usize| {
        format!(
            "{{\"translation\":{{\"en\":\"{number} cats\",\"de\":\"{number} Katzen\",\"fr\":\"{number} chats noirs\"}}}}\n"
        )
    };
    scene.write("languages.jsonl", (0..16).map(languages).collect::<String>());
    let quoted = |number: usize| format!("\"what is {number}\",\"it is {number}\"\n");
    scene.write(
        "quoted.csv",
        ["prompt,response\n".to_string()].into_iter().chain((0..16).map(quoted)).collect::<String>(),
    );
    scene.write("special.jsonl", "{\"prompt\":\"which\",\"response\":\"<extra_id_0> that\"}\n".repeat(2));
    scene.write(
        "holes.jsonl",
        (0..16).map(row).chain(["{\"prompt\":null,\"response\":\"x\"}\n".into()]).collect::<String>(),
    );
    scene
}

fn see(scene: &Scene, output: &str, settings: &[String]) -> Seen {
    let usual = [
        "model.config=tiny".to_string(),
        format!("data.tokenizer={}", repository().join("data/sample-tokenizer.json").display()),
        "data.train=rows.jsonl".into(),
        "train.batch_size=8".into(),
        "train.dropout=0.1".into(),
        "train.eval_max_new_tokens=6".into(),
        "run.log_every_steps=1".into(),
        format!("run.output_dir={output}"),
    ];
    let name = |setting: &String| setting.split('=').next().unwrap_or_default().to_string();
    // The batch size of the base would contradict its other two keys.
    let is_replaced = |one: &String| {
        settings.iter().any(|other| {
            name(one) == name(other) || name(one) == "train.batch_size" && name(other) == "train.batch_size_per_device"
        })
    };
    let all = usual.iter().filter(|one| !is_replaced(one)).chain(settings);
    let arguments: Vec<&str> = all.flat_map(|setting| ["--set", setting.as_str()]).collect();
    let ran = scene.run(&arguments);
    let is_done = ran.code == Some(0);
    let events = |kind: &str| if is_done { scene.events(output, kind) } else { Vec::new() };
    let is_steady = |key: &str| {
        !["time", "_ms", "seconds", "per_second", "bytes", "pressure", "memory"].iter().any(|word| key.contains(word))
    };
    let steady = |event: Value| -> BTreeMap<String, Value> {
        let fields = event.as_object().cloned().unwrap_or_default();
        fields.into_iter().filter(|(key, _)| is_steady(key)).collect()
    };
    let fields = [
        "micro_batch_samples",
        "recompute_blocks",
        "loss_chunk_rows",
        "layer_major",
        "residency",
        "decode_threads",
        "prefetch_batches",
    ];
    let plan = events("plan").first().map(|plan| fields.iter().map(|field| plan[*field].clone()).collect());
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    if is_done {
        for (path, bytes) in scene.contents(output) {
            let name = path.strip_prefix(scene.path(output)).expect("a file of the run").display().to_string();
            let is_weight = name == "model/model.safetensors";
            files.push((name, if is_weight { bytes } else { Vec::new() }));
        }
    }
    let answers = ran.out.lines().filter(|line| line.starts_with("  ")).map(str::to_owned);
    let lines = ran.out.lines().filter(|line| line.starts_with("step ")).count();
    let kinds = ["step", "eval"].into_iter().flat_map(events).map(steady);
    let shown = BTreeMap::from([(
        "answers".to_string(),
        answers.filter(|line| line.contains(" -> ") || line.contains('=')).collect(),
    )]);
    Seen { code: ran.code, events: kinds.chain([shown]).collect(), files, lines, plan, err: ran.err }
}

#[test]
fn every_key_changes_something_or_the_command_says_why_not() {
    for key in KEYS.iter() {
        let here = ROWS.iter().filter(|row| row.0 == key.name).count();
        let elsewhere = ELSEWHERE.iter().find(|(name, _)| *name == key.name);
        assert_eq!(
            here > 0,
            elsewhere.is_none(),
            "`{}` needs a row that shows its effect, here or elsewhere",
            key.name
        );
        for field in keys::fields(key.name) {
            let has_field = |row: &&Row| row.0 == key.name && row.1.contains(&format!("{field} ="));
            assert!(ROWS.iter().any(|row| has_field(&row)), "the field `{field}` of `{}` needs a row", key.name);
        }
        if let Some((name, file)) = elsewhere {
            let text =
                std::fs::read_to_string(repository().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
            assert!(text.contains(name), "{file} does not have `{name}`");
        }
    }
    let scene = scene();
    let bases: Mutex<BTreeMap<&[&str], Seen>> = Mutex::new(BTreeMap::new());
    let (next, silent) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some((key, value, beside)) = ROWS.get(place) else { return };
            let beside_text: Vec<String> = beside.iter().map(ToString::to_string).collect();
            let known = bases.lock().expect("no panic").get(beside).cloned();
            let base = known.unwrap_or_else(|| {
                let seen = see(&scene, &format!("base-of-{key}-{place}"), &beside_text);
                bases.lock().expect("no panic").insert(beside, seen.clone());
                seen
            });
            let with = [beside_text, vec![format!("{key}={value}")]].concat();
            let seen = see(&scene, &format!("with-{key}-{place}"), &with);
            // A refusal is a change, if the run without the value works; so is a run, if it was refused without the value.
            let is_sound = base.code == Some(0) || seen.code == Some(0);
            let is_changed = Seen { err: String::new(), ..seen.clone() } != Seen { err: String::new(), ..base.clone() };
            if !(is_sound && (is_changed || seen.err.contains(key))) {
                silent.lock().expect("no panic").push(format!(
                    "{key}={value} beside {beside:?}: {:?} {:?} {}{}",
                    base.code, seen.code, base.err, seen.err
                ));
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
    let silent = silent.into_inner().expect("no panic");
    assert!(silent.is_empty(), "{} keys have no effect and no word:\n{}", silent.len(), silent.join("\n"));
}
