//! Names of other trainers' settings. A name is accepted if a key has the same meaning, and explained if no key does.
//!
//! `--per_device_train_batch_size 8` of transformers' `Trainer` becomes `--set train.batch_size_per_device=8`. Only `train` and `plan`
//! accept keys, so only their flags are replaced.

use std::ffi::OsString;
use std::path::Path;

/// A flag of another trainer, and the key that it sets here.
const KEYS: [(&str, &str); 66] = [
    ("--batch-size", "train.batch_size"),
    ("--train-batch-size", "train.batch_size"),
    ("--per-device-train-batch-size", "train.batch_size_per_device"),
    ("--gradient-accumulation-steps", "train.gradient_accumulation_steps"),
    ("--lr", "optimizer.learning_rate"),
    ("--weight-decay", "optimizer.weight_decay"),
    ("--optim", "optimizer.name"),
    ("--optimizer", "optimizer.name"),
    ("--num-train-epochs", "train.epochs"),
    ("--num-epochs", "train.epochs"),
    ("--steps", "train.max_steps"),
    ("--iters", "train.max_steps"),
    ("--dropout", "train.dropout"),
    ("--precision", "train.precision"),
    ("--max-grad-norm", "train.grad_clip_norm"),
    ("--eval-steps", "train.eval_every_steps"),
    ("--freeze", "train.freeze"),
    ("--lr-scheduler-type", "schedule.name"),
    ("--lr-scheduler", "schedule.name"),
    ("--warmup-steps", "schedule.warmup_steps"),
    ("--output-dir", "run.output_dir"),
    ("--out", "run.output_dir"),
    ("--lora-r", "lora.rank"),
    ("--lora-rank", "lora.rank"),
    ("--rank", "lora.rank"),
    ("--lora-alpha", "lora.alpha"),
    ("--lora-dropout", "lora.dropout"),
    ("--lora-target", "lora.targets"),
    ("--lora-target-modules", "lora.targets"),
    ("--target-modules", "lora.targets"),
    ("--use-dora", "lora.dora"),
    ("--use-rslora", "lora.rslora"),
    ("--seed", "run.seed"),
    ("--logging-steps", "run.log_every_steps"),
    ("--save-steps", "checkpoint.every_steps"),
    ("--save-total-limit", "checkpoint.keep_last"),
    ("--data", "data.train"),
    ("--dataset", "data.train"),
    ("--train-file", "data.train"),
    ("--train-data", "data.train"),
    ("--validation-file", "data.validation"),
    ("--eval-data", "data.validation"),
    ("--val-data", "data.validation"),
    ("--tokenizer", "data.tokenizer"),
    ("--tokenizer-name", "data.tokenizer"),
    ("--preset", "model.config"),
    ("--prompt-column", "data.prompt_column"),
    ("--response-column", "data.response_column"),
    ("--text-column", "data.text_column"),
    ("--summary-column", "data.response_column"),
    ("--label-column", "data.response_column"),
    ("--target-column", "data.response_column"),
    ("--source-template", "data.source_template"),
    ("--target-template", "data.target_template"),
    ("--source-lang", "data.source_lang"),
    ("--target-lang", "data.target_lang"),
    ("--max-source-length", "data.max_source_tokens"),
    ("--max-target-length", "data.max_target_tokens"),
    ("--source-prefix", "data.source_prefix"),
    ("--memory", "memory.budget"),
    ("--metric-for-best-model", "checkpoint.best_metric"),
    ("--early-stopping-patience", "train.early_stopping_patience"),
    ("--early-stopping-threshold", "train.early_stopping_min_delta"),
    ("--generation-num-beams", "generation.num_beams"),
    ("--num-beams", "generation.num_beams"),
    ("--generation-max-length", "train.eval_max_new_tokens"),
];

/// Flags of other trainers for the name of a model: a directory with weights, or a shape.
const MODELS: [&str; 3] = ["--model", "--model-name-or-path", "--model-name"];

/// Flags without a key of their own, and the equivalent here.
const EXPLAINED: [(&str, &str); 21] = [
    ("--resume", "to resume a run, use `--keep-training` with its `--output`"),
    ("--resume-from-checkpoint", "to resume a run, use `--keep-training` with its `--output`"),
    ("--overwrite-output-dir", "runs are never overwritten; choose another `--output`"),
    ("--bf16", "use `--set train.precision=bf16`"),
    ("--fp16", "there is no fp16 training; use `--set train.precision=bf16`"),
    ("--warmup-ratio", "use `--set schedule.warmup_steps=N`"),
    ("--gradient-checkpointing", "recomputation follows from `--memory-budget`; `plan --explain` shows it"),
    ("--do-train", "leave it out: `train_low_mem` trains"),
    ("--do-eval", "name validation rows: `--set data.validation=rows.parquet`"),
    ("--predict-with-generate", "evaluation generates: see `train.eval_generate_samples` in `train_low_mem keys`"),
    ("--load-best-model-at-end", "use `--set checkpoint.model=best`"),
    ("--gpu", "use `--device cuda`"),
    ("--cpu", "use `--device cpu`"),
    ("--no-cuda", "use `--device cpu`"),
    ("--adafactor", "Adafactor is the default; beside an adapter use `--set optimizer.name=adafactor`"),
    ("--load-in-4bit", "use `--lora --set model.base_precision=nf4`"),
    ("--load-in-8bit", "use `--lora --set model.base_precision=int8`"),
    ("--deepspeed", "use `mpirun` with `--set parallel.shard=optimizer`, or one process with a `--memory-budget`"),
    ("--fsdp", "use `mpirun` with `--set parallel.shard=weights`, or one process with a `--memory-budget`"),
    ("--report-to", "leave it out: every run writes files for TensorBoard, and report.html"),
    ("--push-to-hub", "leave it out: OUTPUT/model is a Hugging Face directory, which `huggingface-cli upload` takes"),
];

/// Replaces the flags of other trainers in a command line, which includes the program's name.
pub fn replaced(arguments: Vec<OsString>) -> Vec<OsString> {
    // Other subcommands have flags of their own, some with the same names.
    let takes_keys = |first: &str| first.starts_with('-') || ["train", "plan"].contains(&first);
    if !arguments.get(1).and_then(|first| first.to_str()).is_some_and(takes_keys) {
        return arguments;
    }
    let mut out: Vec<OsString> = Vec::with_capacity(arguments.len());
    let mut rest = arguments.into_iter().peekable();
    while let Some(argument) = rest.next() {
        let text = argument.to_str().unwrap_or_default();
        let (name, inline) =
            text.split_once('=').map_or((text, None), |(name, value)| (name, Some(OsString::from(value))));
        let name = name.to_owned();
        let is_model = MODELS.contains(&name.as_str());
        let key = KEYS.iter().find(|(flag, _)| *flag == name).map(|(_, key)| *key);
        if key.is_none() && !is_model {
            out.push(argument);
            continue;
        }
        // A flag without a value is an error, and clap reports it.
        let Some(value) = inline.or_else(|| rest.next()) else {
            out.push(argument);
            continue;
        };
        let key = key.unwrap_or_else(|| model_key(Path::new(&value)));
        let mut assignment = OsString::from(format!("{key}="));
        match (key, value.to_str()) {
            // `inverse_sqrt` of transformers is `inverse-sqrt` here.
            ("schedule.name", Some(name)) => assignment.push(name.replace('_', "-")),
            _ => assignment.push(&value),
        }
        out.extend([OsString::from("--set"), assignment]);
    }
    out
}

/// The key for a model of this name: a preset or a `config.json` is a shape; everything else has weights.
fn model_key(name: &Path) -> &'static str {
    let is_shape = name.to_str().is_some_and(|name| t5::Config::preset(name).is_some())
        || name.extension().is_some_and(|end| end == "json");
    if is_shape { "model.config" } else { "model.init_from" }
}

/// The equivalent of another trainer's flag, in words.
pub fn explained(flag: &str) -> Option<String> {
    let name = flag.split('=').next().unwrap_or(flag);
    if let Some((_, words)) = EXPLAINED.iter().find(|(known, _)| *known == name) {
        return Some((*words).to_string());
    }
    KEYS.iter().find(|(known, _)| *known == name).map(|(_, key)| format!("in `train` and `plan`, use `--set {key}=..`"))
}

/// The accepted flag that is most similar to a mistyped one.
pub fn nearest(flag: &str) -> Option<&'static str> {
    let name = flag.split('=').next().unwrap_or(flag);
    let known = KEYS.iter().map(|(known, _)| *known).chain(MODELS);
    let scored = known.map(|known| (strsim::normalized_damerau_levenshtein(known, name), known));
    scored.filter(|(likeness, _)| *likeness >= 0.75).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, known)| known)
}

/// The key for a name without its section, in the spelling of other trainers: `lr`, `num_train_epochs`.
pub fn key(name: &str) -> Option<&'static str> {
    let last = name.rsplit('.').next().unwrap_or(name);
    let flag = format!("--{}", last.replace('_', "-"));
    KEYS.iter().find(|(known, _)| *known == flag).map(|(_, key)| *key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::keys;

    fn line(text: &str) -> String {
        let arguments = std::iter::once("train_low_mem").chain(text.split_whitespace()).map(OsString::from).collect();
        let replaced: Vec<_> = replaced(arguments).iter().map(|word| word.to_string_lossy().into_owned()).collect();
        replaced[1..].join(" ")
    }

    #[test]
    fn every_name_stands_for_a_key_and_none_for_two() {
        let own =
            ["--epochs", "--max-steps", "--learn-rate", "--learning-rate", "--output", "--set", "--config", "--device"];
        for (index, (flag, key)) in KEYS.iter().enumerate() {
            assert!(keys::find(key).is_some(), "{flag}: {key}");
            assert!(KEYS[..index].iter().all(|(earlier, _)| earlier != flag), "{flag} is there twice");
            assert!(!own.contains(flag) && !MODELS.contains(flag), "{flag}");
            assert!(EXPLAINED.iter().all(|(explained, _)| explained != flag), "{flag}");
        }
    }

    #[test]
    fn flags_of_other_trainers_become_keys_of_train_and_plan() {
        for (typed, expected) in [
            ("--batch-size 8 --lr=1e-4", "--set train.batch_size=8 --set optimizer.learning_rate=1e-4"),
            ("plan --num-train-epochs 3", "plan --set train.epochs=3"),
            ("--lr-scheduler-type inverse_sqrt", "--set schedule.name=inverse-sqrt"),
            ("--model t5-small --data a.parquet", "--set model.config=t5-small --set data.train=a.parquet"),
            ("--model-name-or-path google/flan-t5-small", "--set model.init_from=google/flan-t5-small"),
            ("--model my/config.json", "--set model.config=my/config.json"),
            ("eval --model runs/a/model --data b", "eval --model runs/a/model --data b"),
            ("--epochs 2 --lr", "--epochs 2 --lr"),
        ] {
            assert_eq!(line(typed), expected);
        }
    }

    #[test]
    fn the_others_are_explained() {
        assert!(explained("--resume").unwrap().contains("--keep-training"));
        assert!(explained("--fp16").unwrap().contains("train.precision=bf16"));
        assert!(explained("--batch-size").unwrap().contains("train.batch_size"));
        assert!(explained("--load-in-4bit").unwrap().contains("model.base_precision=nf4"));
        assert_eq!(explained("--lean-rate"), None);
        assert_eq!(
            (nearest("--modle"), nearest("--batch_sizes"), nearest("--xyz")),
            (Some("--model"), Some("--batch-size"), None)
        );
        assert_eq!(
            (key("lr"), key("train.lr"), key("nonsense")),
            (Some("optimizer.learning_rate"), Some("optimizer.learning_rate"), None)
        );
    }
}
