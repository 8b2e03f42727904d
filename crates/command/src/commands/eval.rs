//! `train_low_mem eval`: scores a model on rows.

use std::path::{Path, PathBuf};

use candle_core::DType;
use dataloader::LoaderOptions;
use memory_policy::plural;
use planner::{EvaluatedRows, RowCounts};
use serde_json::json;
use toml::Value;

use crate::answers::inference::{Asked, Shape};
use crate::answers::predictions::Predictions;
use crate::cli::answer_flags::EvalArgs;
use crate::cli::flag_values::Precision;
use crate::commands::search;
use crate::config::keys::KEYS;
use crate::config::unused::Circumstances;
use crate::config::{self, Config, Origin, Tasks, Values, paths};
use crate::data::splits::Purpose;
use crate::data::{row_data, unpacked};
use crate::failure::{Failure, Outcome};
use crate::files::run_dir::{self, ROWS, RunDir};
use crate::job;
use crate::machine::device::AUTO;
use crate::machine::stages;
use crate::model::model_directory;
use crate::model::model_directory::Adapted;
use crate::run::open::{self, Opened};
use crate::run::{options, run_data, setup};
use crate::scores::class_scores;
use crate::scores::evaluation::{self, Settings, Watcher, evaluate_each};
use crate::screen::report::RowProgress;
use crate::screen::stop::Stop;
use crate::screen::{report, stop};

/// The key of a mixture's tasks.
const TASKS: &str = "data.tasks";

/// Evaluates a model.
pub fn eval(flags: &EvalArgs) -> Outcome<()> {
    if flags.search.corpus.is_some() {
        return search::eval(flags, &flags.search);
    }
    let stop = Stop::on_signals()?;
    stop.ends_with(stop::without_result);
    let adapted = model_directory::find_as_trained(&flags.model, flags.adapter.as_deref())?;
    let config = config(flags, &adapted)?;
    let Adapted { directory, adapter } = adapted;
    let scratch = stop.remove_at_end(unpacked::scratch, durable_files::Scratch::leftover)?;
    let wanted =
        row_data::Wanted { purpose: Purpose::Scores, resumes: false, to_plan: false, stop: &stop, say: report::note };
    let mut run = RunDir::open_read_only(scratch.path());
    let mut opened = Opened::new(&config, |of| row_data::prepare(&config, of, &mut run, wanted), None)?;
    // The positions of pages determine the memory for reading them.
    opened.train.find_pages()?;
    opened.stages.ends(stages::FOOTERS)?;
    opened.reading.survival = run_data::survival(&config, &opened);
    evaluation::warn_of_departures(&config, &opened.model)?;
    if let Some(words) = opened.reading.texts_in_words() {
        report::note(&words);
    }
    let keep_prompts = flags.predictions.is_some();
    let loader = LoaderOptions { keep_prompts, ..open::loader_options(&config, &opened) };
    let rows = EvaluatedRows { loader: loader.clone(), tokenizer: &opened.tokenizer, dataset: &opened.train };
    let options = options::trainer_options(&config, &opened.model, 1);
    let asked = Asked {
        directory: &directory,
        adapter: adapter.as_deref(),
        config: &opened.model,
        device: (config.run.device != AUTO).then_some(&opened.device),
        prices: config.memory.prices,
        activations: options.precision.activations(),
        parameters: Some(options.parameter_dtype()).filter(|dtype| *dtype == DType::BF16),
        flags: &flags.weights,
        stages: &opened.stages,
    };
    let here = Circumstances {
        is_on_card: config.run.device == AUTO || !opened.device.is_cpu(),
        processes: 1,
        objective: Some(opened.reading.config_objective()),
        has_validation: true,
    };
    // A config file is a run's, with settings of its training.
    let file = flags.config.as_ref().map_or_else(String::new, |path| path.display().to_string());
    config.unused(here, &file).iter().for_each(|warning| report::warn(warning));
    let counts = RowCounts::new(flags.samples, flags.generate_samples, Some(opened.train.rows()));
    let shape = Shape {
        samples: counts.in_a_batch(flags.batch_samples)[0],
        longest: opened.model.head.lengths(config.data.max_source_tokens, config.data.max_target_tokens),
        answer: options::answers(&config).shape(),
        answered: share(counts),
        counts,
        is_served: false,
        prompts: planner::Reading::default(),
        beside: Vec::new(),
    };
    let planned = asked.plan(&shape, Some(rows), (job::budgets(&config), &config.memory.pins))?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let (model, plan) = (planned.load()?, &planned.plan);
    let settings = Settings {
        samples: flags.samples,
        generate_samples: flags.generate_samples,
        examples: flags.show_wrong.unwrap_or(flags.show),
        wrong_examples: flags.show_wrong.is_some(),
        preference: config.preference,
        loader,
        ..options::evaluation(&config, &opened, plan)
    };
    let train = &opened.reading.train;
    let begin = |path: &Path| stop.remove_at_end(|| Predictions::begin(path, train.trace()), Predictions::leftover);
    let mut predictions = flags.predictions.as_deref().map(begin).transpose()?;
    report::note(&format!("evaluating {}", plural(counts.evaluated, "row")));
    let mut progress = RowProgress::new();
    let mut watcher = Watcher {
        group: None,
        answered: &mut |row| predictions.as_mut().map_or(Ok(()), |predictions| predictions.add(row)),
        progress: &mut |done, all| progress.note(done, all),
    };
    let tasks = opened.mixture.as_ref().map(|mixture| mixture.tasks());
    let settings = settings.of_tasks(tasks, tasks.iter().flat_map(|tasks| tasks.iter().map(|task| task.rows)));
    let rows = (&opened.train, &opened.tokenizer);
    let figures = evaluate_each(&model, rows, settings, &stop, &mut watcher)?.ok_or_else(stop::without_result)?;
    progress.finish();
    if figures.samples == 0 {
        let skipped = figures.skipped.in_words(0).unwrap_or_else(|| "there is none".to_owned());
        return Err(Failure::unusable(format!("no row could be evaluated: {skipped}"))
            .hint("`train_low_mem inspect FILE` lists the columns"));
    }
    if let Some(skipped) = figures.skipped.in_words(figures.samples) {
        report::warn(&skipped);
    }
    predictions.map(Predictions::finish).transpose()?;
    if flags.json {
        let mut json = figures.to_json();
        json["reading"] = opened.reading.to_json();
        json["weights"] = json!(if model.is_in_file() { "disk" } else { "memory" });
        json["copied_weight_bytes"] = json!(planned.copied().0);
        planned.add_peaks(&mut json)?;
        report::result(&format!("{json}\n"))?;
        return Ok(());
    }
    let tasks: String = figures.task_lines().map(|line| line + "\n").collect();
    report::result(&format!("{}\n{tasks}{}\n", figures.line(), figures.signature_lines()))?;
    if let Some((classes, _)) = figures.labels.as_ref().and_then(class_scores::compute) {
        report::result(&format!("\n{classes}\n"))?;
    }
    if !figures.examples.is_empty() {
        report::result(&format!("{}\n", figures.examples_text()))?;
    }
    Ok(())
}

/// The share of rows that are answered.
#[expect(clippy::cast_precision_loss, reason = "counts of rows are far below 2^53")]
fn share(counts: RowCounts) -> f64 {
    counts.answered as f64 / counts.evaluated.max(1) as f64
}

/// Takes the columns, lengths, metrics and decoding of the first run that made one of these directories, if any: so its validation rows have the scores
/// that they had in the run.
fn apply_run<'a>(values: &mut Values, trained: impl Iterator<Item = &'a Path>, data: &[String]) -> Outcome<()> {
    const ALSO: [&str; 10] = [
        "data.objective",
        "data.denoisers",
        "data.noise_density",
        "data.mean_span_tokens",
        "data.max_source_tokens",
        "data.max_target_tokens",
        "data.truncation_side",
        "train.eval_metrics",
        "train.bleu_tokenizer",
        "train.rouge_stemmer",
    ];
    // A config of another version may have keys that are no longer known.
    let Some(Ok((run, of_run))) = run_dir::values_of(trained) else { return Ok(()) };
    let is_column = |name: &str| {
        name.starts_with("data.") && ["_column", "_template", "_lang"].iter().any(|ending| name.ends_with(ending))
    };
    // Files that the run made have this program's columns.
    let made = regular_file::real_path(&run.join(ROWS)).ok();
    let is_made = |file: &String| {
        let directory =
            regular_file::real_path(Path::new(file)).ok().and_then(|file| file.parent().map(Path::to_owned));
        directory.is_some() && directory == made
    };
    let has_columns = data.is_empty() || !data.iter().all(is_made);
    let defaults = Values::defaults();
    let decodes =
        |name: &str| name.starts_with("generation.") && of_run.setting(name).value != defaults.setting(name).value;
    // A model says its task, except an encoder: what its vectors are compared by.
    let has_vectors = of_run.text("task.name").is_some_and(|name| name == "embedding");
    // Their loss depends on the number of texts that are compared.
    const OF_VECTORS: [&str; 4] =
        ["task.name", "train.batch_size", "train.batch_size_per_device", "train.gradient_accumulation_steps"];
    let is_of_vectors = |name: &str| has_vectors && (OF_VECTORS.contains(&name) || name.starts_with("embedding."));
    // The same model may be one of texts.
    let ranks = of_run.text("task.name").is_some_and(|name| name == "ranking");
    let is_of_ranking = |name: &str| ranks && (name.starts_with("task.") || name.starts_with("ranking."));
    let is_of_task =
        |name: &str| ALSO.contains(&name) || is_of_preference(name) || is_of_vectors(name) || is_of_ranking(name);
    let is_mixture = |name: &str| name == TASKS && data.is_empty();
    let is_wanted =
        |name: &str| is_of_task(name) || is_mixture(name) || decodes(name) || has_columns && is_column(name);
    if has_vectors && !has_columns && of_run.text("data.negative_column").is_some() {
        values.set(
            "data.negative_column",
            Value::String("rejected".to_owned()),
            Origin::Run("the run of the model"),
        )?;
    }
    for key in KEYS.iter().filter(|key| is_wanted(key.name)) {
        let value = of_run.setting(key.name).value.clone();
        values.set(key.name, value, Origin::Run("the run of the model"))?;
    }
    Ok(())
}

/// Whether a key belongs to rows with a chosen and a rejected answer.
fn is_of_preference(name: &str) -> bool {
    name.starts_with("preference.")
}

/// The flags as a config: the model's own tokenizer, and the data as training rows in file order.
fn config(flags: &EvalArgs, Adapted { directory, adapter }: &Adapted) -> Outcome<Config> {
    let mut values = Values::defaults();
    match &flags.config {
        Some(path) => setup::apply_file(&mut values, path)?,
        None => {
            // The run of the adapter is the later one.
            let trained = adapter.iter().map(PathBuf::as_path).chain([flags.model.as_path()]);
            apply_run(&mut values, trained, &flags.data)?;
            let preference = config::preference::from_values(&values).filter(|of| of.loss.has_reference());
            let has_reference = preference.is_none_or(|of| adapter.is_some() && !of.has_reference_model);
            // Rows whose columns are named have one answer. Neither a merged model nor a whole one has its reference beside it.
            if flags.columns.keys().next().is_some() || !has_reference {
                KEYS.iter().filter(|key| is_of_preference(key.name)).try_for_each(|key| values.reset(key.name))?;
            }
        }
    }
    // The model's and the adapter's own settings apply, even if a run's config has others.
    let of_a_shape = ["model.config", "model.vocab_size", "model.overrides"];
    for key in KEYS.iter().filter(|key| key.name.starts_with("lora.") || of_a_shape.contains(&key.name)) {
        values.reset(key.name)?;
    }
    // A column that is named takes the place of the run's template, and the reverse.
    let pairs = [("data.prompt_column", "data.source_template"), ("data.response_column", "data.target_template")];
    for (key, ..) in flags.columns.keys() {
        for (column, template) in pairs.into_iter().filter(|pair| pair.0 == key || pair.1 == key) {
            [column, template].into_iter().try_for_each(|key| values.reset(key))?;
        }
    }
    let mut set = |key: &str, value: Value, flag: &str| values.set(key, value, Origin::Flag(flag.to_string()));
    set("model.init_from", Value::String(paths::to_text(directory.as_os_str())), "--model")?;
    for (key, flag, text) in flags.columns.keys() {
        set(key, Value::String(text.clone()), flag)?;
    }
    for (key, flag, text) in flags.text.keys() {
        set(key, Value::String(text), flag)?;
    }
    if let Some(adapter) = adapter {
        set("lora.init_from", Value::String(paths::to_text(adapter.as_os_str())), "--adapter")?;
    }
    if !flags.data.is_empty() {
        set("data.train", Value::from(flags.data.clone()), "--data")?;
        set("data.validation", Value::Array(Vec::new()), "--data")?;
        set(TASKS, Value::Array(Vec::new()), "--data")?;
    }
    set("checkpoint.model", Value::String("final".to_string()), "eval")?;
    set("checkpoint.best_metric", Value::String("loss".to_string()), "eval")?;
    set("train.early_stopping_patience", Value::String("none".to_string()), "eval")?;
    if dataloader::Tokenizer::in_directory(directory).is_some() {
        set("data.tokenizer", Value::String("auto".to_string()), "--model")?;
    }
    let metrics = (!flags.metrics.is_empty()).then(|| flags.metrics.join(","));
    for (key, flag, text) in [
        ("memory.budget", "--memory-budget", &flags.weights.memory_budget),
        ("memory.device_budget", "--device-memory-budget", &flags.weights.device_memory_budget),
        ("run.device", "--device", &flags.device),
        ("train.bleu_tokenizer", "--bleu-tokenizer", &flags.bleu_tokenizer),
        ("train.eval_metrics", "--metrics", &metrics),
    ] {
        if let Some(text) = text {
            set(key, Value::String(text.clone()), flag)?;
        }
    }
    if let Some(precision) = flags.precision {
        let name = if precision == Precision::Bf16 { "bf16" } else { "f32" };
        set("train.precision", Value::String(name.to_string()), "--precision")?;
    }
    if flags.rouge_stemmer {
        set("train.rouge_stemmer", Value::Boolean(true), "--rouge-stemmer")?;
    }
    if let Some(tokens) = &flags.max_new_tokens {
        let value = tokens.parse().unwrap_or_else(|_| Value::String(tokens.clone()));
        set("train.eval_max_new_tokens", value, "--max-new-tokens")?;
    }
    flags.decoding.apply(&mut values)?;
    flags.set.iter().try_for_each(|assignment| values.apply_assignment(assignment))?;
    if flags.data.is_empty() && values.tables(TASKS).is_empty() {
        return Err(Failure::usage(
            "`--data` is missing, and neither the model's run nor `--config` has tasks of a mixture",
        )
        .hint("name the rows to score: `--data FILE`"));
    }
    let mut config = Config::resolve(values)?;
    score_validation_rows(&mut config.data.tasks)?;
    Ok(config)
}

/// Leaves the tasks of a mixture that have validation rows, with these alone.
fn score_validation_rows(tasks: &mut Tasks) -> Outcome<()> {
    let is_mixture = !tasks.tasks.is_empty();
    tasks.tasks.retain(|task| !task.validation.is_empty());
    if is_mixture && tasks.tasks.is_empty() {
        return Err(Failure::usage(format!("`{TASKS}`: no task has `validation` files"))
            .hint("name the rows to score: `--data FILE`"));
    }
    for task in &mut tasks.tasks {
        (task.train, task.weight) = (std::mem::take(&mut task.validation), 1.0);
    }
    tasks.mixing = None;
    Ok(())
}
