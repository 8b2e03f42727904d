//! The config's keys: one table of every name, type, default and meaning.
//!
//! The table is the only list of keys in the program. The parser checks against it, suggestions come
//! from it, `resolved.toml` is written in its order and `train_low_mem keys` prints it, so a key cannot
//! be accepted in one place and forgotten in another.

/// What a key's value may be.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Switch,
    /// A whole number, both ends included.
    Integer(i64, i64),
    /// A number, both ends included; a whole number is accepted.
    Number(f64, f64),
    /// Any text.
    Text,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A list of these words.
    Words(&'static [&'static str]),
    /// A list of paths or globs; a single string is accepted as a list of one.
    Paths,
    /// A list of parts, blocks or globs of parameter names; a string is split at its commas.
    Parts,
    /// A number of bytes: `"512MiB"`, `"4GiB"`, `"4G"` or a whole number from this one on.
    Size(i64),
    /// A table that is handed on as it is.
    Table,
}

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// `section.name`.
    pub name: &'static str,
    /// What its value may be.
    pub kind: Kind,
    /// Words accepted in place of a value: `auto` (the program decides), `none` (switched off).
    pub words: &'static [&'static str],
    /// The default, as TOML.
    pub default: &'static str,
    /// One sentence for `train_low_mem keys` and `resolved.toml`.
    pub meaning: &'static str,
}

const AUTO: &[&str] = &["auto"];
const NONE: &[&str] = &["none"];
const MANY: i64 = 1 << 40;

const fn key(
    name: &'static str,
    kind: Kind,
    words: &'static [&'static str],
    default: &'static str,
    meaning: &'static str,
) -> Key {
    Key { name, kind, words, default, meaning }
}

/// What `run.allow_changes` and `--allow-changed` may name.
pub const CHANGES: &[&str] = &["data", "tokenizer", "model", "batch-size", "seed"];

use Kind::{Integer, Number, OneOf, Parts, Paths, Size, Switch, Table, Text, Words};

/// Every key, in the order of `resolved.toml`.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key("run.output_dir", Text, &[], "\"runs/train\"", "the directory that holds everything this run writes"),
    key("run.seed", Integer(0, i64::MAX), &[], "42", "fixes the first weights, the order of the rows and the dropout masks"),
    key("run.device", Text, AUTO, "\"auto\"", "auto, cpu, cuda, cuda:N or metal"),
    key("run.log_every_steps", Integer(1, MANY), AUTO, "\"auto\"", "plain lines without a terminal; auto: the first steps, then every ten seconds"),
    key("run.finetune", Switch, &[], "false", "start from model.init_from and freeze encoder and shared embedding; as --finetune"),
    key("run.deterministic", Switch, &[], "false", "refuse to resume, and never replan, where that would change the bits; otherwise one line says so"),
    key("run.allow_changes", Words(CHANGES), &[], "[]", "what --keep-training may find changed since the checkpoint"),

    key("model.config", Text, NONE, "\"none\"", "a preset or a Hugging Face config.json; weights are initialised from scratch"),
    key("model.init_from", Text, NONE, "\"none\"", "a Hugging Face model directory that gives the first weights"),
    key("model.vocab_size", Integer(1, 1 << 24), AUTO, "\"auto\"", "auto: a preset takes the tokenizer's size, a config.json keeps its own"),
    key("model.overrides", Table, &[], "{}", "config.json keys laid over model.config, such as { num_layers = 4 }"),

    key("data.train", Paths, &[], "[]", "parquet files or globs; required"),
    key("data.validation", Paths, &[], "[]", "parquet files or globs; without them nothing is evaluated"),
    key("data.prompt_column", Text, &[], "\"prompt\"", "the source text's column"),
    key("data.response_column", Text, &[], "\"response\"", "the target text's column"),
    key("data.text_column", Text, &[], "\"text\"", "the one column that span-corruption reads"),
    key("data.tokenizer", Text, AUTO, "\"auto\"", "a tokenizer.json; auto: the one beside the model"),
    key("data.objective", OneOf(&["text-to-text", "span-corruption"]), &[], "\"text-to-text\"", "what a row becomes"),
    key("data.noise_density", Number(0.001, 0.999), &[], "0.15", "span-corruption: the share of tokens that is masked"),
    key("data.mean_span_tokens", Number(1.0, 1000.0), &[], "3.0", "span-corruption: the mean length of a masked span in tokens"),
    key("data.max_source_tokens", Integer(2, 1 << 20), &[], "256", "longer sources are cut, EOS included and kept"),
    key("data.max_target_tokens", Integer(2, 1 << 20), &[], "256", "longer targets are cut, EOS included and kept"),
    key("data.shuffle", Switch, &[], "true", "false: file order, rows [i*batch_size, (i+1)*batch_size) make step i"),
    key("data.block_rows", Integer(1, 1 << 31), &[], "4096", "neighbouring rows that the whole-file shuffle moves together"),
    key("data.window_blocks", Integer(1, 1 << 31), &[], "16", "blocks whose rows are shuffled among each other"),
    key("data.bad_rows", OneOf(&["error", "skip"]), &[], "\"skip\"", "null, empty or not UTF-8: stop, or skip and count"),

    key("train.batch_size", Integer(1, 1 << 20), AUTO, "\"auto\"", "samples per optimizer step; auto: per device x accumulation, or 32"),
    key("train.batch_size_per_device", Integer(1, 1 << 20), AUTO, "\"auto\"", "with gradient_accumulation_steps, another way to say batch_size"),
    key("train.gradient_accumulation_steps", Integer(1, 1 << 20), AUTO, "\"auto\"", "factor of batch_size; how the batch is cut is decided by memory"),
    key("train.epochs", Integer(1, 1 << 30), &[], "1", "passes over the data; whichever of epochs and max_steps ends first"),
    key("train.max_steps", Integer(1, MANY), NONE, "\"none\"", "optimizer steps; whichever of epochs and max_steps ends first"),
    key("train.dropout", Number(0.0, 0.99), AUTO, "\"auto\"", "auto: the model's dropout_rate"),
    key("train.precision", OneOf(&["f32", "bf16"]), &[], "\"f32\"", "of activations; gradients and weights are f32 unless gradient_precision and master_weights say else"),
    key("train.master_weights", OneOf(&["f32", "stochastic-rounding", "nearest-rounding"]), &[], "\"f32\"", "with bf16: f32 weights, or bf16 weights alone with updates rounded at random (nearest: for comparison)"),
    key("train.gradient_precision", OneOf(&["f32", "bf16"]), &[], "\"f32\"", "of the sums over micro-batches; bf16 halves them and rounds after each: the result then depends on the cut"),
    key("train.freeze", Parts, AUTO, "\"auto\"", "encoder, shared, decoder.block.0, globs: what does not train; auto: nothing, or encoder and shared with finetune"),
    key("train.grad_clip_norm", Number(0.0, 1e30), &[], "1.0", "global gradient norm above which gradients are scaled down; 0: off"),
    key("train.max_non_finite_steps", Integer(1, 1 << 30), &[], "5", "skipped non-finite steps in a row after which the run stops (exit 5)"),
    key("train.eval_every_steps", Integer(0, MANY), &[], "500", "0: before the first step and at the end only"),
    key("train.eval_samples", Integer(0, MANY), &[], "256", "validation rows per evaluation, from the first; 0: all"),
    key("train.eval_generate_samples", Integer(0, MANY), &[], "64", "of these, rows that are also generated for BLEU and exact match"),
    key("train.eval_max_new_tokens", Integer(1, 1 << 20), AUTO, "\"auto\"", "auto: data.max_target_tokens"),
    key("train.bleu_tokenizer", OneOf(&["13a", "zh", "char", "none"]), &[], "\"13a\"", "sacreBLEU's tokenizer"),
    key("train.sample_generations", Integer(0, 1000), &[], "3", "generations shown after each evaluation"),

    key("optimizer.name", OneOf(&["adafactor"]), &[], "\"adafactor\"", "transformers.optimization.Adafactor's semantics"),
    key("optimizer.learning_rate", Number(0.0, 1e30), AUTO, "\"auto\"", "auto: 1e-3, or Adafactor's own with relative_step"),
    key("optimizer.relative_step", Switch, &[], "false", "the learning rate follows min(1e-2, 1/sqrt(step))"),
    key("optimizer.scale_parameter", Switch, &[], "false", "the learning rate is scaled by each parameter's root mean square"),
    key("optimizer.warmup_init", Switch, &[], "false", "with relative_step: start at 1e-6 * step"),
    key("optimizer.clip_threshold", Number(1e-30, 1e30), &[], "1.0", "root mean square above which an update is clipped"),
    key("optimizer.decay_rate", Number(-10.0, 0.0), &[], "-0.8", "beta2 is 1 - step^decay_rate"),
    key("optimizer.eps1", Number(0.0, 1.0), &[], "1e-30", "added to the squared gradient"),
    key("optimizer.eps2", Number(0.0, 1.0), &[], "1e-3", "floor of the parameter scale"),
    key("optimizer.beta1", Number(0.0, 0.9999999), NONE, "\"none\"", "first moment; costs one more copy of the parameters"),
    key("optimizer.weight_decay", Number(0.0, 1.0), &[], "0.0", "decoupled weight decay"),

    key("schedule.name", OneOf(&["constant", "one-cycle", "linear", "cosine", "inverse-sqrt"]), &[], "\"constant\"", "how the learning rate moves over the steps"),
    key("schedule.warmup_steps", Integer(0, MANY), AUTO, "\"auto\"", "auto: 0; one-cycle: 30 % of the steps"),
    key("schedule.div_factor", Number(1.0, 1e12), &[], "50.0", "one-cycle: peak over first learning rate"),
    key("schedule.final_div_factor", Number(1.0, 1e12), &[], "1e4", "one-cycle: first over last learning rate"),

    key("checkpoint.every_steps", Integer(1, MANY), NONE, "500", "optimizer steps between checkpoints"),
    key("checkpoint.every_minutes", Number(0.01, 1e9), NONE, "30", "minutes between checkpoints; whichever comes first"),
    key("checkpoint.keep_last", Integer(1, 1 << 20), &[], "2", "newest checkpoints that are kept"),
    key("checkpoint.keep_best", Integer(0, 1 << 20), &[], "1", "checkpoints with the lowest validation loss that are kept beside them"),
    key("checkpoint.model", OneOf(&["final", "best"]), &[], "\"final\"", "which one becomes OUTPUT/model"),

    key("memory.budget", Size(1), AUTO, "\"auto\"", "bytes the whole process may hold; auto: a share of what is available"),
    key("memory.device_budget", Size(1), AUTO, "\"auto\"", "bytes of device memory; auto: a share of what is free"),
    key("memory.micro_batch_samples", Integer(1, 1 << 20), AUTO, "\"auto\"", "pin: samples of an optimizer batch computed at a time"),
    key("memory.recompute_blocks", Integer(0, 100_000), AUTO, "\"auto\"", "pin: blocks whose activations are computed again in backward"),
    key("memory.accumulation", OneOf(&["micro-batch-major", "layer-major"]), AUTO, "\"auto\"", "pin: all blocks of a micro-batch before the next, or all micro-batches of a block, whose gradient alone exists"),
    key("memory.kept_gradient_blocks", Integer(0, 100_000), AUTO, "\"auto\"", "pin: layer-major: blocks whose gradients are kept and not computed a second time"),
    key("memory.attention_heads", OneOf(&["recompute", "keep"]), AUTO, "\"auto\"", "pin: layer-major: what attention heads put out is computed again in backward, or kept beside block inputs"),
    key("memory.activation_offload", OneOf(&["none", "disk"]), AUTO, "\"auto\"", "pin: layer-major: what forward keeps of blocks in memory, or in a file in the output directory; auto: within disk_writes"),
    key("memory.blocks_in_memory", Integer(0, 100_000), AUTO, "\"auto\"", "pin: activations on disk: blocks, of those that backward comes to first, whose activations stay in memory nevertheless"),
    key("memory.gradient_offload", OneOf(&["none", "disk"]), AUTO, "\"auto\"", "pin: layer-major: gradients that are not kept are computed a second time, or wait in a file in the output directory; auto: within disk_writes"),
    key("memory.weight_offload", OneOf(&["none", "disk"]), AUTO, "\"auto\"", "pin: layer-major: weights in memory, or in a file in the output directory and those of one block at a time in memory; auto: within disk_writes"),
    key("memory.disk_writes", Size(0), &[], "\"1TiB\"", "bytes that the whole run may write to disk to save memory, where that is not pinned: writing wears a disk out; 0: nothing"),
    key("memory.loss_chunk_rows", Integer(1, 1 << 30), AUTO, "\"auto\"", "pin: rows of logits that exist at a time; below 32 none are kept, they are computed again"),
    key("memory.prefetch_batches", Integer(1, 1 << 20), AUTO, "\"auto\"", "pin: optimizer batches that are made ahead"),
    key("memory.decode_threads", Integer(1, 1024), AUTO, "\"auto\"", "pin: threads that read and tokenize"),
    key("memory.dataset_residency", OneOf(&["in_memory", "row_group_cache", "ultra_low_mem"]), AUTO, "\"auto\"", "pin: how much of the data stays in memory"),
    key("memory.clear_cache_every_steps", Integer(0, MANY), AUTO, "\"auto\"", "steps after which freed memory goes back to the system; 0: never"),
];

/// A text of every key as TOML, section by section: what `line` says of each, given its name within its section.
pub fn by_section(mut line: impl FnMut(&Key, &str) -> String) -> String {
    let mut sections: Vec<String> = Vec::new();
    for keys in KEYS.chunk_by(|a, b| a.split().0 == b.split().0) {
        let lines = keys.iter().map(|key| line(key, key.split().1) + "\n");
        sections.push(format!("[{}]\n{}", keys[0].split().0, lines.collect::<String>()));
    }
    sections.join("\n")
}

/// The key with this full name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The known key that a mistyped name most likely meant: by its last part first (`max_steps` means
/// `train.max_steps`), by edit distance over the whole name otherwise.
pub fn nearest(name: &str) -> Option<&'static Key> {
    let last = |full: &str| full.rsplit('.').next().unwrap_or("").replace('-', "_").to_lowercase();
    let mut same_ending = KEYS.iter().filter(|key| last(key.name) == last(name));
    if let (Some(only), None) = (same_ending.next(), same_ending.next()) {
        return Some(only);
    }
    KEYS.iter()
        .map(|key| {
            let whole = strsim::jaro_winkler(key.name, name);
            let ending = strsim::normalized_damerau_levenshtein(&last(key.name), &last(name));
            (key, whole.max(ending))
        })
        .filter(|(_, likeness)| *likeness > 0.6)
        .max_by(|(_, a), (_, b)| a.total_cmp(b))
        .map(|(key, _)| key)
}

impl Key {
    /// Its section, and its name there.
    fn split(&self) -> (&'static str, &'static str) {
        self.name.split_once('.').expect("a test holds names to one section")
    }

    /// What a value may be, in words, for errors and for `train_low_mem keys`.
    pub fn expected(&self) -> String {
        let value = match self.kind {
            Switch => "true or false".to_string(),
            Integer(low, high) if high >= 1 << 20 => format!("a whole number of at least {low}"),
            Integer(low, high) => format!("a whole number from {low} to {high}"),
            Number(low, high) if high >= 1e6 => format!("a number of at least {low}"),
            Number(low, high) => format!("a number from {low} to {high}"),
            Text => "a string".to_string(),
            OneOf(words) => format!("one of {}", quoted(words)),
            Words(words) => format!("a list of {}", quoted(words)),
            Paths => "a list of paths or globs".to_string(),
            Parts => "a list of parts, blocks or globs of parameter names".to_string(),
            Size(_) => "a size such as \"512MiB\" or \"4GiB\"".to_string(),
            Table => "a table".to_string(),
        };
        if self.words.is_empty() { value } else { format!("{value}, or {}", quoted(self.words)) }
    }
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_key_is_the_one_that_was_meant() {
        for (typed, meant) in [
            ("train.batchsize", "train.batch_size"),
            ("max_steps", "train.max_steps"),
            ("train.max-steps", "train.max_steps"),
            ("optimizer.lr_rate", "optimizer.learning_rate"),
            ("training.epochs", "train.epochs"),
            ("optim.learning_rate", "optimizer.learning_rate"),
            ("data.tokeniser", "data.tokenizer"),
            ("memory.bugdet", "memory.budget"),
            ("checkpoint.every_step", "checkpoint.every_steps"),
        ] {
            assert_eq!(nearest(typed).map(|key| key.name), Some(meant), "{typed}");
        }
        assert!(nearest("zzz.qqq").is_none());
    }

    #[test]
    fn names_are_unique_and_have_one_section() {
        for (index, key) in KEYS.iter().enumerate() {
            assert_eq!(key.name.split('.').count(), 2, "{}", key.name);
            assert!(KEYS[..index].iter().all(|earlier| earlier.name != key.name), "{} is there twice", key.name);
        }
    }
}
