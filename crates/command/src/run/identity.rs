//! The identity of a run. `--keep-training` compares it with the checkpoint's identity.
//!
//! Six parts determine a run's results: the data (rows, order, lengths), the tokenizer, the model, the weights below an adapter
//! ([`crate::model::sources`]), the batch size and the seed. A
//! checkpoint records them. A run with another part is refused, with the difference, unless `--allow-changed` names the part. Other
//! settings, such as the learning rate, may change when a run resumes, and are only reported.

use dataloader::{Side, Tokenizer};
use memory_policy::plural;
use serde_json::{Map, Value, json};
use trainer::adamw::StatePrecision;

use crate::config::keys::KEYS;
use crate::config::{self, Config};
use crate::failure::{Failure, Outcome};
use crate::model::sources::{PART, STAMPS, Sources};
use crate::run::open::Opened;

/// Texts for people about settings whose values are hard to read. They are not compared.
const ABOUT: &str = "about";

/// The fingerprint of the validation rows. Other ones do not change a step, but scores of before and after are no longer of the same
/// rows: that is said.
const VALIDATION: &str = "validation";

/// The key of the digests of files beside a tokenizer.
const FILES: &str = "files";

/// The file beside a tokenizer that checkpoints of an earlier version do not name. It names the tokens of roles.
const CONFIG: &str = "tokenizer_config.json";

/// The parts and their settings. The parts have the names that `--allow-changed` accepts.
pub fn identity(config: &Config, opened: &Opened, sources: &Sources) -> Value {
    let mut identity = parts(config, opened);
    sources.add_to(&mut identity);
    if let Some(validation) = &opened.validation {
        identity[VALIDATION] = json!(validation.layout().fingerprint());
    }
    // Checkpoints from before there were two optimizers do not name theirs.
    if config.optimizer.row.name != "adafactor" {
        identity["model"]["optimizer.name"] = json!(config.optimizer.row.name);
    }
    if config.optimizer.state_precision == StatePrecision::Int8 {
        identity["model"]["optimizer.state_precision"] = json!("int8");
    }
    if !config.optimizer.groups.is_empty() {
        identity["model"]["optimizer.groups"] = json!(config.optimizer.groups);
    }
    if let Some(mixture) = &opened.mixture {
        identity["data"]["data.tasks"] = json!(mixture.tasks());
    }
    if let Some(preference) = &config.preference {
        identity["model"]["preference.loss"] = json!(preference.loss.name());
    }
    if let Some(embedding) = &config.embedding {
        identity["model"]["embedding"] = json!(embedding);
    }
    if let Some(ranking) = &config.ranking {
        identity["model"]["ranking"] =
            json!({"loss": ranking.of.loss.name(), "answers": ranking.answers, "weights": ranking.of.weights});
    }
    let class_weights = config::class_weights::resolve(config, &opened.model.head);
    if !class_weights.is_empty() {
        identity["model"]["task.class_weights"] = json!(class_weights);
    }
    // Checkpoints from before there were two sides do not name theirs.
    if opened.reading.truncation_side == Side::Left {
        identity["data"]["data.truncation_side"] = json!("left");
    }
    if let Some(precision) = opened.model.base_precision {
        identity["model"]["base_precision"] = json!(precision.name());
    }
    if let Some(lora) = &opened.model.lora {
        // A different seed for the adapter's initial values makes no difference later.
        identity["model"]["lora"] = json!({"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "dora": lora.dora,
            "targets": lora.targets, "rank_pattern": lora.rank_pattern, "alpha_pattern": lora.alpha_pattern,
            "modules_to_save": lora.modules_to_save, "dropout": lora.dropout});
    }
    identity
}

fn parts(config: &Config, opened: &Opened) -> Value {
    let columns = opened.reading.objective.columns();
    json!({
        "data": {
            "data.train": opened.train.layout().fingerprint(),
            "columns": columns,
            "data.objective": opened.reading.objective,
            "data.max_source_tokens": config.data.max_source_tokens,
            "data.max_target_tokens": config.data.max_target_tokens,
            "data.shuffle": config.data.shuffle,
            "data.block_rows": config.data.block_rows,
            "data.window_blocks": config.data.window_blocks,
            "data.bad_rows": if config.data.bad_rows == config::BadRows::Error { "error" } else { "skip" },
        },
        "tokenizer": { "data.tokenizer": opened.tokenizer.fingerprint(), FILES: files_of(&opened.tokenizer) },
        "model": { "config.json": opened.model.to_json(), "train.freeze": config.train.freeze,
                   "optimizer.beta1 is used": config.optimizer.beta1.is_some() },
        "batch-size": { "train.batch_size": config.train.batch_size },
        "seed": { "run.seed": config.run.seed },
        ABOUT: { "data.train": plural(opened.train.rows(), "row") },
    })
}

/// Digests of the files beside the tokenizer's own, which go beside the model. One that was removed meanwhile has none.
fn files_of(tokenizer: &Tokenizer) -> Value {
    let own = tokenizer.companions().iter().filter(|path| path.is_file()).cloned().collect::<Vec<_>>();
    let digests = trainer::digests_of(&own, &trainer::FileDigests::new()).unwrap_or_default();
    let digests = digests.into_iter().map(|(name, digest)| (name, json!(digest.sha256)));
    // A run without the file says so: it must not appear later.
    digests.chain([(CONFIG.to_owned(), json!(tokenizer.config_fingerprint()))]).collect::<Map<_, _>>().into()
}

/// The settings of `now` that a checkpoint of an earlier version lacks are not compared.
fn without_unrecorded(saved: &Value, now: &Value) -> Value {
    let mut now = now.clone();
    if saved.get(PART).is_none() {
        now.as_object_mut().map(|parts| parts.remove(PART));
    }
    let settings = now.get_mut("tokenizer").and_then(Value::as_object_mut);
    if let Some(settings) = settings {
        match saved["tokenizer"].get(FILES) {
            None => drop(settings.remove(FILES)),
            Some(files) if files.get(CONFIG).is_none() => {
                settings.get_mut(FILES).and_then(Value::as_object_mut).map(|files| files.remove(CONFIG));
            }
            Some(_) => {}
        }
    }
    now
}

/// Whether both have validation rows, and not the same ones. A checkpoint of an earlier version does not record them.
pub fn has_other_validation(saved: &Value, now: &Value) -> bool {
    let is_named = |of: &Value| of[VALIDATION].is_string();
    is_named(saved) && is_named(now) && saved[VALIDATION] != now[VALIDATION]
}

/// Whether a checkpoint is of a version that did not record the weights below an adapter, which this run has.
pub fn lacks_sources(saved: &Value, now: &Value) -> bool {
    saved.get(PART).is_none() && now.get(PART).is_some()
}

/// Refuses to resume if a part changed and the change is not allowed.
pub fn check_unchanged(saved: &Value, now: &Value, allowed: &[String], checkpoint: &str) -> Outcome<()> {
    let mut differences = Vec::new();
    let mut parts = Vec::new();
    let compared = without_unrecorded(saved, now);
    let is_compared = |part: &str| ![ABOUT, STAMPS, VALIDATION].contains(&part);
    for (part, settings) in compared.as_object().into_iter().flatten().filter(|(part, _)| is_compared(part)) {
        let found = differences_of(saved.get(part), settings);
        if !found.is_empty() && !allowed.iter().any(|allowed| allowed == part) {
            differences.extend(found);
            parts.push(part.as_str());
        }
    }
    for difference in &mut differences {
        let words =
            |of: &Value| of[ABOUT][difference.split(' ').next().unwrap_or_default()].as_str().map(str::to_owned);
        if let (Some(was), Some(is)) = (words(saved), words(now)) {
            *difference += &format!(" ({was} before, {is} now)");
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    // A quantised copy in the run's directory.
    let is_of_copy = differences.iter().any(|difference| difference.starts_with("OUTPUT/"));
    Err(Failure::usage(format!("cannot resume from {checkpoint}:\n  {}", differences.join("\n  ")))
        .hint("repeat the command that started the run, or start a new run with `--output DIR`")
        .with_hint(is_of_copy.then_some("or remove that directory: it is made again from the model"))
        .hint(format!("to resume anyway, add `--allow-changed {}`", parts.join(","))))
}

/// `name: was X, is Y` for each different setting. Objects are compared key by key.
fn differences_of(was: Option<&Value>, is: &Value) -> Vec<String> {
    let empty = Map::new();
    let was = was.and_then(Value::as_object).unwrap_or(&empty);
    let is = is.as_object().unwrap_or(&empty);
    let mut names: Vec<&String> = was.keys().chain(is.keys()).collect();
    names.sort();
    names.dedup();
    let mut differences = Vec::new();
    for name in names.into_iter().filter(|name| was.get(*name) != is.get(*name)) {
        let (was, is) = (was.get(name), is.get(name));
        match (was, is) {
            (Some(Value::Object(_)), Some(now @ Value::Object(_))) => {
                let inner = differences_of(was, now);
                differences.extend(inner.into_iter().map(|difference| format!("{name}: {difference}")));
            }
            _ => differences.push(format!("{name} was {}, now {}", shown(was), shown(is))),
        }
    }
    differences
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "not set".to_string(),
        Some(Value::String(text)) if text.len() == 64 => format!("{}...", &text[..12]),
        Some(value) => value.to_string(),
    }
}

/// Settings that changed since the checkpoint, and may change: one line each.
pub fn changed_settings(saved_config: &str, config: &Config) -> Vec<String> {
    let Ok(saved) = toml::from_str::<toml::Table>(saved_config) else { return Vec::new() };
    let reported = |name: &str| ["train.", "optimizer.", "schedule."].iter().any(|section| name.starts_with(section));
    KEYS.iter()
        .map(|key| key.name)
        .filter(|name| reported(name))
        .filter_map(|name| {
            let (section, key) = name.split_once('.')?;
            let was = saved.get(section)?.get(key)?;
            let is = &config.values.setting(name).value;
            (was != is).then(|| format!("{name} was {was}, now {is}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(batch_size: u64, d_model: u64) -> Value {
        json!({"batch-size": {"train.batch_size": batch_size}, "model": {"config.json": {"d_model": d_model}}})
    }

    #[test]
    fn the_same_run_goes_on() {
        check_unchanged(&run(8, 64), &run(8, 64), &[], "c").expect("the same run");
    }

    #[test]
    fn other_weights_are_refused_and_a_checkpoint_that_did_not_record_them_is_not() {
        let run = |digest: &str, stamp: u64| json!({"base": {"model.init_from": {"model.safetensors": digest}}, "stamps": stamp, "tokenizer": {"data.tokenizer": "t", "files": {"spiece.model": digest}}});
        check_unchanged(&run("a", 1), &run("a", 2), &[], "c").expect("the same weights elsewhere");
        let failure = check_unchanged(&run("a", 1), &run("b", 1), &["tokenizer".to_string()], "c").expect_err("others");
        assert!(failure.message.contains("model.init_from: model.safetensors was \"a\", now \"b\""), "{failure}");
        assert!(failure.hints[1].contains("--allow-changed base"), "{failure}");
        check_unchanged(&run("a", 1), &run("b", 1), &["tokenizer".to_string(), "base".to_string()], "c")
            .expect("allowed");
        let earlier = json!({"tokenizer": {"data.tokenizer": "t"}});
        check_unchanged(&earlier, &run("b", 1), &[], "c").expect("an earlier version's checkpoint");
        assert!(lacks_sources(&earlier, &run("b", 1)) && !lacks_sources(&run("a", 1), &run("b", 1)));
    }

    #[test]
    fn another_tokenizer_config_is_refused_and_one_that_was_not_recorded_is_not() {
        let run = |files: Value| json!({"tokenizer": {"data.tokenizer": "t", "files": files}});
        let of = |config: Value| run(json!({CONFIG: config, "spiece.model": "s"}));
        let refused = |was: &Value, is: &Value| check_unchanged(was, is, &[], "c").expect_err("another file").message;
        assert!(refused(&of(json!("a")), &of(json!("b"))).contains("tokenizer_config.json was \"a\", now \"b\""));
        assert!(refused(&of(Value::Null), &of(json!("b"))).contains("tokenizer_config.json was not set, now \"b\""));
        check_unchanged(&run(json!({"spiece.model": "s"})), &of(json!("b")), &[], "c").expect("an earlier version's");
        refused(&run(json!({"spiece.model": "r"})), &of(json!("b")));
    }

    #[test]
    fn a_changed_part_is_refused_with_the_difference_unless_allowed() {
        let failure = check_unchanged(&run(8, 64), &run(16, 32), &[], "c").expect_err("another run");
        assert!(failure.message.contains("train.batch_size was 8, now 16"), "{failure}");
        assert!(failure.message.contains("config.json: d_model was 64, now 32"), "{failure}");
        assert!(failure.hints[1].contains("--allow-changed batch-size,model"), "{failure}");
        let failure =
            check_unchanged(&run(8, 64), &run(16, 32), &["batch-size".to_string()], "c").expect_err("another model");
        assert!(!failure.message.contains("batch_size"), "{failure}");
        check_unchanged(&run(8, 64), &run(16, 64), &["batch-size".to_string()], "c").expect("allowed");
    }
}
