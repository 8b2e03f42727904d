//! The config's keys: one table of every name, type, default and meaning.
//!
//! This table and the planner's table of levers are the only list of keys in the program. The parser checks against it, suggestions come
//! from it, `resolved.toml` follows its order, and `train_low_mem keys` prints it. So a key cannot be accepted in one place and forgotten
//! in another.

use std::sync::LazyLock;

use planner::Values;
use text_metrics::Metric;
use trainer::contrastive::ContrastiveLoss;
use trainer::preference::PreferenceLoss;
use trainer::ranking::RankingLoss;

use super::task;

/// The values that a key accepts.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Switch,
    /// A whole number, both ends included.
    Integer(i64, i64),
    /// A number, both ends included; a whole number is accepted.
    Number(f64, f64),
    /// Any text, also none.
    Text,
    /// Text that is not empty: a path, or a name.
    Name,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A list of these words.
    Words(&'static [&'static str]),
    /// A list of metrics of texts.
    Metrics,
    /// A list of paths or globs; a single string is accepted as a list of one.
    Paths,
    /// A list of parts, blocks or globs of parameter names; a string is split at its commas.
    Parts,
    /// A number of bytes: `"512MiB"`, `"4GiB"`, `"4G"`, or a whole number that is at least this.
    Size(i64),
    /// A table that is passed on unchanged.
    Table,
    /// A list of tables with these fields, whose values the owner of the key checks.
    Tables(&'static [&'static str]),
}

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// `section.name`.
    pub name: &'static str,
    /// The accepted values.
    pub kind: Kind,
    /// Words accepted instead of a value: `auto` (the program decides), `none` (switched off).
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

/// The changes accepted by `run.allow_changes` and `--allow-changed`.
pub const CHANGES: &[&str] = &["data", "tokenizer", "model", "base", "batch-size", "seed"];

/// The names of a table's rows.
const fn names<T: Copy, const N: usize>(rows: &[(&'static str, T); N]) -> [&'static str; N] {
    let (mut names, mut number) = ([""; N], 0);
    while number < N {
        names[number] = rows[number].0;
        number += 1;
    }
    names
}

static PREFERENCE_LOSSES: [&str; PreferenceLoss::NAMES.len()] = names(&PreferenceLoss::NAMES);
static RANKING_LOSSES: [&str; RankingLoss::NAMES.len()] = names(&RankingLoss::NAMES);
static EMBEDDING_LOSSES: [&str; ContrastiveLoss::NAMES.len()] = names(&ContrastiveLoss::NAMES);

/// Losses, figures of preferences, and what vectors and rankings find, by which evaluations can be compared, beside the metrics of answers.
const FIGURES: [&str; 8] =
    ["loss", "preference_loss", "rewards/accuracies", "rewards/margins", "recall@1", "recall@10", "mrr@10", "ndcg@10"];

/// The values by which evaluations can be compared.
pub static MEASURES: [&str; FIGURES.len() + Metric::ALL.len()] = {
    let (mut names, mut number) = ([""; FIGURES.len() + Metric::ALL.len()], 0);
    while number < names.len() {
        names[number] =
            if number < FIGURES.len() { FIGURES[number] } else { Metric::ALL[number - FIGURES.len()].name() };
        number += 1;
    }
    names
};

const OF_TASKS: &[&str] = &[
    "name",
    "train",
    "validation",
    "source_prefix",
    "weight",
    "prompt_column",
    "response_column",
    "source_template",
    "target_template",
    "source_lang",
    "target_lang",
];
const OF_DENOISERS: &[&str] = &["objective", "mean_span_tokens", "noise_density", "prefix", "weight"];
const OF_GROUPS: &[&str] = &["parameters", "learning_rate_factor", "weight_decay"];

use Kind::{Integer, Metrics, Name, Number, OneOf, Parts, Paths, Size, Switch, Table, Tables, Text, Words};

/// Every key, in the order of `resolved.toml`. Pins of levers come from the planner's table.
pub static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
    let pins = planner::lever_of_a_pin().map(|(lever, values, meaning)| Key {
        // The name is leaked once in a process, because the list is made once.
        name: format!("memory.{lever}").leak(),
        kind: match values {
            Values::Count(least, most) => Integer(least as i64, most as i64),
            Values::Blocks(most) => Integer(0, most as i64),
            Values::Words(words) => OneOf(words),
        },
        words: AUTO,
        default: "\"auto\"",
        meaning: format!("pin: {meaning}").leak(),
    });
    KEYS_WITHOUT_PINS.iter().copied().chain(pins).collect()
});

/// Every key except pins of levers. The last section is that of the pins.
#[rustfmt::skip]
const KEYS_WITHOUT_PINS: &[Key] = &[
    key("run.output_dir", Name, &[], "\"runs/train\"", "directory for all files of the run"),
    key("run.seed", Integer(0, i64::MAX), &[], "42", "seed of initial weights, row order and dropout masks"),
    key("run.device", Name, AUTO, "\"auto\"", "cpu, cuda or cuda:N; auto: a GPU where the measured prices make it faster, else the CPU"),
    key("run.log_every_steps", Integer(1, MANY), AUTO, "\"auto\"", "steps between log lines if the output is not a terminal; auto: the first steps, then every ten seconds"),
    key("run.finetune", Switch, &[], "false", "start from model.init_from and freeze encoder and shared embedding; same as --finetune"),
    key("run.deterministic", Switch, &[], "false", "refuse a resume or replan that would change the bits; false: allow it and print one line"),
    key("run.allow_changes", Words(CHANGES), &[], "[]", "resume even if these changed since the checkpoint; same as --allow-changed"),

    key("model.config", Name, NONE, "\"none\"", "preset or Hugging Face config.json; weights are initialised at random"),
    key("model.init_from", Name, NONE, "\"none\"", "model with the initial weights: a Hugging Face directory, a run, or a hub id in the local cache"),
    key("model.vocab_size", Integer(1, 1 << 24), AUTO, "\"auto\"", "vocabulary size; auto: the tokenizer's for a preset, else that of config.json"),
    key("model.base_precision", OneOf(&["int8", "nf4"]), NONE, "\"none\"", "quantise the frozen weights under an adapter, once, into OUTPUT/base-int8 or OUTPUT/base-nf4; none: use them as they are stored"),
    key("model.overrides", Table, &[], "{}", "config.json keys that override model.config, such as { num_layers = 4 }"),

    key("task.name", OneOf(&task::NAMES), AUTO, "\"auto\"", "what the model makes of a source: text, a label, any number of labels, a number, a label of each word, a vector, or a rank among texts; auto: that of model.init_from, or text-to-text"),

    key("task.class_weights", Table, &[], "{}", "weights of classes in the loss of a classifier, such as { urgent = 3 }; of rankings those of relevant texts (true) and of others (false); a class that is not named has 1"),

    key("data.train", Paths, &[], "[]", "training files: parquet, JSONL, JSON, CSV or TSV, plain, .gz or .zst; files, directories or globs; required"),
    key("data.validation", Paths, &[], "[]", "validation files, as data.train; empty: those that a directory of data.train names so, or no evaluation"),
    key("data.validation_split", Number(0.0, 1e15), NONE, "\"none\"", "rows of data.train that are kept for validation: a share below 1, or a count; the choice depends on run.seed"),
    key("data.prompt_column", Name, AUTO, "\"auto\"", "column of the source text; auto: prompt, or a known form such as chat messages or instructions"),
    key("data.response_column", Name, AUTO, "\"auto\"", "column of the target text; auto: response, or a known form"),
    key("data.chosen_column", Name, AUTO, "\"auto\"", "with preference.loss: column of the chosen answers; auto: chosen"),
    key("data.rejected_column", Name, AUTO, "\"auto\"", "with preference.loss: column of the rejected answers; auto: rejected"),
    key("data.label_column", Name, AUTO, "\"auto\"", "column of labels: with preference.loss=kto, whether an answer is desirable; with task.name=ranking, how relevant a text is; with embedding.loss=cosine or cosent, how near both texts are; auto: label, for rankings also labels or relevance, for scores first score"),
    key("data.query_column", Name, AUTO, "\"auto\"", "with task.name=ranking: column that says which rows, one after the other, are a list; auto: query_id, qid or the query itself; rows with lists need none"),
    key("data.negative_column", Name, NONE, "\"none\"", "with task.name=embedding: column of texts that do not belong to the query; none: the other texts of a step"),
    key("data.source_template", Name, AUTO, "\"auto\"", "source text from several columns, such as \"{subject}\\n{body}\"; {{ for a brace; instead of prompt_column"),
    key("data.target_template", Name, AUTO, "\"auto\"", "target text from several columns, as source_template"),
    key("data.source_lang", Name, AUTO, "\"auto\"", "language of the sources of rows with a column translation, such as en"),
    key("data.target_lang", Name, AUTO, "\"auto\"", "language of the targets"),
    key("data.text_column", Name, AUTO, "\"auto\"", "column of the text for pretraining; auto: text"),
    key("data.encoding", Text, AUTO, "\"auto\"", "encoding of JSON, CSV and TSV: windows-1252, gb18030, shift_jis, utf-16le and others; auto: UTF-8"),
    key("data.quoting", OneOf(&["all", "none"]), AUTO, "\"auto\"", "whether quotes enclose fields of CSV and TSV; auto: of CSV, and in TSV they are ordinary characters"),
    key("data.tasks", Tables(OF_TASKS), &[], "[]", "tasks whose rows are mixed, each with a name, train, and perhaps validation, source_prefix, weight and columns: [{ name = \"sum\", train = \"sum.jsonl\", source_prefix = \"summarize: \" }]; instead of data.train"),
    key("data.mixing", OneOf(&["proportional", "equal", "temperature"]), &[], "\"proportional\"", "how often tasks are drawn: by their rows, equally, or by their rows to the power of 1 / data.mixing_temperature; each times its weight"),
    key("data.mixing_temperature", Number(1.0, 1e6), &[], "2.0", "temperature of data.mixing = \"temperature\": 1 is proportional, higher ones come closer to equal"),
    key("data.mixing_limit", Integer(1, MANY), NONE, "\"none\"", "most rows of a task that count for its rate and for the length of an epoch"),
    key("data.source_prefix", Text, AUTO, "\"auto\"", "text put before every prompt, such as \"summarize: \"; kept in the model's config.json; auto: that of model.init_from, or none"),
    key("data.tokenizer", Name, AUTO, "\"auto\"", "tokenizer.json, spiece.model, vocab.json, or a model that has one; auto: the model's own"),
    key("data.objective", OneOf(&["text-to-text", "span-corruption", "prefix-lm", "ul2"]), AUTO, "\"auto\"", "training task; auto: text-to-text, or span-corruption where files have only a text column; prefix-lm: continue the beginning of a text; ul2: UL2's seven denoisers at FAT5's rates"),
    key("data.denoisers", Tables(OF_DENOISERS), &[], "[]", "pretraining tasks of which each row draws one, such as [{ mean_span_tokens = 3, noise_density = 0.15, prefix = \"[R] \" }, { objective = \"prefix-lm\", prefix = \"[S] \", weight = 2 }]; instead of data.objective"),
    key("data.noise_density", Number(0.001, 0.999), &[], "0.15", "span corruption: share of masked tokens"),
    key("data.mean_span_tokens", Number(1.0, 1000.0), &[], "3.0", "span corruption: mean length of a masked span in tokens"),
    key("data.max_source_tokens", Integer(2, 1 << 20), &[], "256", "truncate sources to this many tokens, EOS included"),
    key("data.max_target_tokens", Integer(2, 1 << 20), &[], "256", "truncate targets to this many tokens, EOS included"),
    key("data.truncation_side", OneOf(&["right", "left"]), AUTO, "\"auto\"", "side on which longer sources are cut; left keeps the prefix and the end; auto: truncation_side of the model's tokenizer_config.json, or right"),
    key("data.shuffle", Switch, &[], "true", "shuffle rows; false: file order, step i has rows [i*batch_size, (i+1)*batch_size)"),
    key("data.block_rows", Integer(1, 1 << 31), &[], "4096", "neighbouring rows that the shuffle moves together"),
    key("data.window_blocks", Integer(1, 1 << 31), &[], "16", "blocks whose rows are mixed with each other"),
    key("data.bad_rows", OneOf(&["error", "skip"]), AUTO, "\"auto\"", "rows that cannot be used: stop with an error, or skip and count them; auto: malformed lines and images stop, null and empty ones are skipped"),

    key("train.batch_size", Integer(1, 1 << 20), AUTO, "\"auto\"", "samples per optimizer step; auto: batch_size_per_device x gradient_accumulation_steps, or 32"),
    key("train.batch_size_per_device", Integer(1, 1 << 20), AUTO, "\"auto\"", "with gradient_accumulation_steps, an alternative to batch_size"),
    key("train.gradient_accumulation_steps", Integer(1, 1 << 20), AUTO, "\"auto\"", "with batch_size_per_device, an alternative to batch_size; the memory plan decides the real micro-batches"),
    key("train.epochs", Integer(1, 1 << 30), NONE, "1", "passes over the data; training stops at epochs or max_steps, whichever comes first. max_steps on the command line replaces it"),
    key("train.max_steps", Integer(1, MANY), NONE, "\"none\"", "optimizer steps; training stops at epochs or max_steps, whichever comes first"),
    key("train.dropout", Number(0.0, 0.99), AUTO, "\"auto\"", "dropout rate; auto: the model's dropout_rate"),
    key("train.precision", OneOf(&["f32", "bf16"]), &[], "\"f32\"", "precision of activations; weights and gradients stay f32 unless master_weights or gradient_precision is set"),
    key("train.master_weights", OneOf(&["f32", "stochastic-rounding", "nearest-rounding"]), &[], "\"f32\"", "with precision bf16: f32 weights, or bf16 weights with stochastic rounding (nearest-rounding: for comparison)"),
    key("train.gradient_precision", OneOf(&["f32", "bf16"]), &[], "\"f32\"", "precision of gradient sums; bf16 halves their memory and rounds after each micro-batch, so the result depends on the cut"),
    key("train.freeze", Parts, AUTO, "\"auto\"", "frozen parameters: encoder, shared, decoder.block.0 or globs; auto: none, or encoder and shared with finetune"),
    key("train.grad_clip_norm", Number(0.0, 1e30), &[], "1.0", "clip gradients to this global norm; 0: off"),
    key("train.z_loss", Number(0.0, 1e3), &[], "0.0", "minimise this times log(Z)^2 of each target token as well; T5's own recipe: 1e-4"),
    key("train.label_smoothing", Number(0.0, 0.999_999), &[], "0.0", "share of each target token that is spread over the vocabulary, as in torch"),
    key("train.max_non_finite_steps", Integer(1, 1 << 30), &[], "5", "stop with exit code 5 after this many skipped non-finite steps in a row"),
    key("train.eval_every_steps", Integer(0, MANY), &[], "500", "steps between evaluations; 0: only before the first step and at the end"),
    key("train.eval_samples", Integer(0, MANY), &[], "256", "validation rows per evaluation, starting with the first; 0: all"),
    key("train.eval_generate_samples", Integer(0, MANY), &[], "64", "rows of each evaluation that are also generated, for BLEU and exact match"),
    key("train.early_stopping_patience", Integer(1, 1 << 30), NONE, "\"none\"", "stop after this many evaluations in a row without a better checkpoint.best_metric; none: train to the end"),
    key("train.early_stopping_min_delta", Number(0.0, 1e30), &[], "0.0", "an evaluation is better if it exceeds the best one by more than this"),
    key("train.eval_max_new_tokens", Integer(1, 1 << 20), AUTO, "\"auto\"", "longest generated answer in tokens; auto: data.max_target_tokens"),
    key("train.eval_metrics", Metrics, &[], "[\"bleu\", \"exact_match\"]", "scores of generated answers: bleu, chrf, chrf++, rouge (or rouge1, rouge2, rougeL, rougeLsum), exact_match, accuracy, micro_f1, macro_f1, matthews, pearson, spearman, span_f1; the default of a classifier is that of its task"),
    key("train.rouge_stemmer", Switch, &[], "false", "stem words for ROUGE, as google's rouge-score does with use_stemmer"),
    key("train.bleu_tokenizer", OneOf(&["auto", "13a", "zh", "char", "none"]), &[], "\"auto\"", "sacreBLEU's tokenizer; auto: by the language of the references"),
    key("train.sample_generations", Integer(0, 1000), &[], "3", "generated answers shown after each evaluation"),

    key("parallel.virtual_shards", Integer(1, 1 << 16), AUTO, "\"auto\"", "parts of a batch whose gradients are summed separately; the same number gives the same bits on any number of processes; auto: one per process"),
    key("parallel.shard", OneOf(&["none", "optimizer", "gradients", "weights"]), &[], "\"none\"", "state that is divided among processes: none, the optimizer state, gradients as well, or weights as well"),
    key("parallel.network_mbit", Number(0.001, 1e9), AUTO, "\"auto\"", "network speed of a process in Mbit/s, which decides between plans; auto: measured when a run starts; 10,000 for `plan` and with virtual shards"),
    key("lora.rank", Integer(1, 1 << 16), NONE, "\"none\"", "rank of a LoRA adapter beside the frozen weights of model.init_from; none: train the weights themselves"),
    key("lora.alpha", Number(1e-6, 1e9), AUTO, "\"auto\"", "the adapter is scaled by alpha / rank; auto: twice the rank"),
    key("lora.dropout", Number(0.0, 0.99), &[], "0.0", "dropout of the adapter's input"),
    key("lora.targets", Parts, &[], "[\"all-linear\"]", "layers with an adapter: q, k, v, o, wi, wi_0, wi_1, wo or longer names; all-linear: all of these"),
    key("lora.rslora", Switch, &[], "false", "scale by alpha / sqrt(rank) instead of alpha / rank"),
    key("lora.dora", Switch, &[], "false", "DoRA: train the magnitude of each output beside its direction"),
    key("lora.init", OneOf(&["kaiming-uniform", "gaussian"]), &[], "\"kaiming-uniform\"", "how A starts, as PEFT names it; B starts at zero"),
    key("lora.modules_to_save", Parts, &[], "[]", "layers whose own weights are trained and saved with the adapter"),
    key("lora.init_from", Name, NONE, "\"none\"", "adapter to continue from: a directory written by PEFT or an earlier run"),

    key("preference.loss", OneOf(&PREFERENCE_LOSSES), NONE, "\"none\"", "loss of rows with a chosen and a rejected answer, or for kto with one answer and a label; dpo and kto compare with the model without its adapter, or with preference.reference; none: the cross-entropy of one answer"),
    key("preference.reference", Name, NONE, "\"none\"", "dpo and kto: model that answers are compared with, read from its files: a Hugging Face directory, a run, or a hub id in the local cache; none: the model without its adapter"),
    key("preference.beta", Number(1e-9, 1e9), AUTO, "\"auto\"", "scale of the comparison; auto: 0.1, and 2 for simpo"),
    key("preference.gamma", Number(0.0, 1e9), AUTO, "\"auto\"", "simpo: by how much a chosen answer should lead; auto: 1"),
    key("preference.desirable_weight", Number(0.0, 1e9), &[], "1.0", "kto: weight of desirable answers"),
    key("preference.undesirable_weight", Number(0.0, 1e9), &[], "1.0", "kto: weight of the other answers"),

    key("distill.teacher", Name, NONE, "\"none\"", "larger model of the same vocabulary whose logits a student learns, read from its files: a Hugging Face directory, a run, or a hub id in the local cache; none: no teacher"),
    key("distill.alpha", Number(0.0, 1.0), &[], "0.5", "share of the teacher in the loss; the cross-entropy has the rest"),
    key("distill.temperature", Number(1e-3, 1e6), &[], "2.0", "logits of student and teacher are divided by this"),
    key("distill.top_k", Integer(1, 1 << 20), NONE, "\"none\"", "learn from so many of the teacher's largest logits of each token alone; a run that reads rows again keeps them in OUTPUT/teacher-logits if that costs less than the teacher, within memory.disk_writes; none: from all logits"),

    key("ranking.loss", OneOf(&RANKING_LOSSES), &[], "\"monot5\"", "loss of rankings: monot5 (one of two answers for each text), or RankT5's, of the logit of one token: pointwise, pairwise, or softmax over the list"),
    key("ranking.answers", Parts, &[], "[]", "tokens that a score is made of; empty: true and false for monot5, or else <extra_id_10>"),
    key("ranking.list_size", Integer(1, 1 << 16), &[], "36", "most texts of a list; a longer one loses those with the lowest labels"),

    key("embedding.loss", OneOf(&EMBEDDING_LOSSES), &[], "\"mnr\"", "loss of vectors: mnr (multiple negatives ranking, InfoNCE) finds the positive among all texts of a step, triplet compares with the row's negative, cosine with the row's score, cosent orders rows as their scores do"),
    key("embedding.temperature", Number(1e-6, 1e6), &[], "0.05", "mnr: cosines are divided by this; 0.05 is a scale of 20"),
    key("embedding.margin", Number(0.0, 1e9), &[], "5.0", "triplet: by how much nearer a positive should be than a negative"),
    key("embedding.largest_score", Number(1e-9, 1e9), &[], "1.0", "cosine: the score of equal texts, which scores are divided by, such as 5 for STS-B"),
    key("embedding.pooling", OneOf(&["mean", "cls", "max", "last"]), &[], "\"mean\"", "how the vectors of a text's tokens become one: their mean, the first, the largest values, or the last"),
    key("embedding.normalize", Switch, &[], "false", "scale each vector to length 1"),
    key("embedding.sizes", Parts, &[], "[]", "Matryoshka: sizes that vectors may be cut to, the loss being summed over them"),

    key("optimizer.name", OneOf(&["adafactor", "adamw", "lion"]), AUTO, "\"auto\"", "auto: adafactor, or adamw for an adapter; with the semantics of transformers.optimization.Adafactor or torch.optim.AdamW; AdamW keeps two values of each parameter, Lion one"),
    key("optimizer.learning_rate", Number(0.0, 1e30), AUTO, "\"auto\"", "learning rate (one-cycle: the first; the peak is div_factor times it); auto: 1e-3, 1e-4 for Lion, or Adafactor's own with relative_step"),
    key("optimizer.relative_step", Switch, &[], "false", "use the learning rate min(1e-2, 1/sqrt(step))"),
    key("optimizer.scale_parameter", Switch, &[], "false", "Adafactor, AdamW: scale a step by the root mean square of its parameter"),
    key("optimizer.warmup_init", Switch, &[], "false", "with relative_step: start at 1e-6 * step"),
    key("optimizer.clip_threshold", Number(1e-30, 1e30), &[], "1.0", "clip an update to this root mean square"),
    key("optimizer.decay_rate", Number(-10.0, 0.0), &[], "-0.8", "decay of the second moment: beta2 = 1 - step^decay_rate"),
    key("optimizer.eps1", Number(0.0, 1.0), &[], "1e-30", "added to the squared gradient; above 0"),
    key("optimizer.eps2", Number(0.0, 1.0), &[], "1e-3", "floor of the parameter scale"),
    key("optimizer.beta1", Number(0.0, 0.9999999), &["auto", "none"], "\"auto\"", "decay of the first moment; Adafactor: one more copy of the parameters, auto is none; AdamW, Lion: auto is 0.9"),
    key("optimizer.beta2", Number(0.0, 0.9999999), AUTO, "\"auto\"", "AdamW: decay of the second moment, auto: 0.999; Lion: decay of its moment, auto: 0.99"),
    key("optimizer.eps", Number(0.0, 1.0), AUTO, "\"auto\"", "AdamW: added to the root of the second moment; auto: 1e-8"),
    key("optimizer.weight_decay", Number(0.0, 1.0), AUTO, "\"auto\"", "decoupled weight decay; auto: 0, and 0.01 for AdamW as in torch"),
    key("optimizer.state_precision", OneOf(&["f32", "int8"]), &[], "\"f32\"", "AdamW: how its moments are held between steps; int8: two bytes a parameter, in blocks of 256, as bitsandbytes quantises them; always in memory; a parameter with fewer than 4096 values keeps f32"),
    key("optimizer.groups", Tables(OF_GROUPS), &[], "[]", "parameters with a learning_rate_factor or a weight_decay of their own, such as [{ parameters = [\"norms\", \"biases\"], weight_decay = 0 }]; the first group that names a parameter has it"),

    key("schedule.name", OneOf(&["constant", "one-cycle", "linear", "cosine", "inverse-sqrt"]), &[], "\"constant\"", "learning rate schedule"),
    key("schedule.warmup_steps", Integer(0, MANY), AUTO, "\"auto\"", "warm-up steps; auto: 0, or 30 % of the steps for one-cycle"),
    key("schedule.warmup_ratio", Number(0.0, 1.0), NONE, "\"none\"", "share of all steps in which the rate rises, in place of warmup_steps"),
    key("schedule.div_factor", Number(1.0, 1e12), &[], "50.0", "one-cycle: peak learning rate divided by the first"),
    key("schedule.final_div_factor", Number(1.0, 1e12), &[], "1e4", "one-cycle: first learning rate divided by the last"),

    key("generation.num_beams", Integer(1, 1 << 10), &[], "1", "beams for each prompt; 1: no beam search"),
    key("generation.length_penalty", Number(-1e3, 1e3), &[], "1.0", "beam search: divide the log-probability of an answer by its length to this power"),
    key("generation.early_stopping", OneOf(&["false", "true", "never"]), &[], "\"false\"", "beam search: when to stop, as in transformers"),
    key("generation.sample", Switch, AUTO, "\"auto\"", "draw tokens at random; auto: where temperature, top_k or top_p is set"),
    key("generation.temperature", Number(0.0, 1e6), &[], "1.0", "sampling: divide the logits by this; 0: no sampling"),
    key("generation.top_k", Integer(0, 1 << 24), &[], "50", "sampling: keep only this many of the most probable tokens; 0: all"),
    key("generation.top_p", Number(0.0, 1.0), &[], "1.0", "sampling: keep the most probable tokens until their probabilities add up to this; 1: all"),
    key("generation.seed", Integer(0, i64::MAX), AUTO, "\"auto\"", "sampling: random seed; auto: run.seed"),
    key("generation.repetition_penalty", Number(1e-6, 1e6), &[], "1.0", "make tokens that have already occurred less probable; 1: off"),
    key("generation.no_repeat_ngram", Integer(0, 1 << 20), &[], "0", "length in tokens of sequences that may not occur twice; 0: off"),
    key("generation.min_new_tokens", Integer(0, 1 << 20), &[], "0", "shortest generated answer in tokens"),
    key("generation.keep_special_tokens", Switch, &[], "false", "keep special tokens such as <extra_id_0> in answers, and in the texts that scores compare"),

    key("checkpoint.every_steps", Integer(1, MANY), NONE, "500", "optimizer steps between checkpoints"),
    key("checkpoint.every_minutes", Number(0.01, 1e9), NONE, "30", "minutes between checkpoints; whichever comes first"),
    key("checkpoint.keep_last", Integer(1, 1 << 20), &[], "2", "newest checkpoints to keep"),
    key("checkpoint.keep_best", Integer(0, 1 << 20), &[], "1", "checkpoints with the best checkpoint.best_metric to keep as well"),
    key("checkpoint.best_metric", OneOf(&MEASURES), &[], "\"loss\"", "metric that ranks checkpoints: loss or preference_loss (lower is better), with preference.loss rewards/accuracies or rewards/margins, of vectors and rankings what they find, or a score of answers"),
    key("checkpoint.model", OneOf(&["final", "best"]), &[], "\"final\"", "checkpoint that becomes OUTPUT/model"),

    key("memory.budget", Size(1), AUTO, "\"auto\"", "memory limit of the whole process; auto: a share of the available memory"),
    key("memory.device_budget", Size(1), AUTO, "\"auto\"", "GPU memory limit; auto: a share of the free memory"),
    key("memory.disk_writes", Size(0), &[], "\"1TiB\"", "limit on bytes written to save memory; 0 forbids them. An offload that you set yourself is not limited"),
    key("memory.prices", Table, &["measured", "measure-again", "built-in"], "\"measured\"", "speed of this machine, which decides between plans: measured (and kept for the next run), measured again, built in, or a table"),
    key("memory.clear_cache_every_steps", Integer(0, MANY), AUTO, "\"auto\"", "return freed memory to the system every N steps; 0: never"),
];

/// Every key as TOML, section by section. `line` writes a key, given its name within the section.
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

/// The default of a key of the table.
pub fn default(name: &str) -> toml::Value {
    let key = find(name).unwrap_or_else(|| panic!("`{name}` is not in the table of keys"));
    key.default.parse().expect("defaults in the table of keys are TOML")
}

/// The fields of a key's tables; none: the key has no tables.
pub fn fields(name: &str) -> &'static [&'static str] {
    if let Some(Key { kind: Tables(fields), .. }) = find(name) { fields } else { &[] }
}

/// Refuses a field that a table of this key does not have.
///
/// # Errors
/// The field, and what was meant, in words.
pub(super) fn check_fields(name: &str, table: &toml::Table) -> Result<(), String> {
    let known = fields(name);
    let Some(field) = table.keys().find(|field| !known.contains(&field.as_str())) else { return Ok(()) };
    let nearest = known.iter().max_by(|a, b| likeness(a, field).total_cmp(&likeness(b, field)));
    let nearest = nearest.filter(|known| likeness(known, field) >= NEAR);
    let meant = nearest.map_or_else(|| format!("one of {}", known.join(", ")), |known| format!("`{known}`"));
    Err(format!("unknown field `{field}`, expected {meant}"))
}

/// The key that a mistyped name means: the only one with its last part (`max_steps` means `train.max_steps`), or the nearest, if that is
/// near.
pub fn nearest(name: &str) -> Option<&'static str> {
    let last = |full: &str| full.rsplit('.').next().unwrap_or("").replace('-', "_").to_lowercase();
    let mut same_ending = KEYS.iter().filter(|key| last(key.name) == last(name));
    if let (Some(only), None) = (same_ending.next(), same_ending.next()) {
        return Some(only.name);
    }
    // Of equal endings, such as `dropout`, the section decides.
    let likeness = |key: &Key| (likeness(&last(key.name), &last(name)), strsim::jaro_winkler(key.name, name));
    let scored = KEYS.iter().map(|key| (likeness(key), key.name)).filter(|((ending, _), _)| *ending >= NEAR);
    scored.max_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))).map(|(_, key)| key)
}

/// The least likeness of a suggestion: at most a third of the letters differ.
pub const NEAR: f64 = 0.66;

/// The share of letters that two names have in common, by the number of edits between them. An abbreviation such as `lr_rate` is as near as
/// a suggestion must be.
pub fn likeness(known: &str, typed: &str) -> f64 {
    let same = strsim::normalized_damerau_levenshtein(known, typed);
    let mut letters = known.chars();
    let is_abbreviation = typed.len() >= 5
        && known.chars().next() == typed.chars().next()
        && typed.chars().all(|letter| letters.any(|other| other == letter));
    if is_abbreviation { same.max(NEAR) } else { same }
}

impl Key {
    /// The key's section, and its name within the section.
    fn split(&self) -> (&'static str, &'static str) {
        self.name.split_once('.').expect("a test holds names to one section")
    }

    /// The accepted values in words, for errors and for `train_low_mem keys`.
    pub fn expected(&self) -> String {
        let value = match self.kind {
            Switch => "true or false".to_string(),
            Integer(low, high) if high >= 1 << 20 => format!("a whole number of at least {low}"),
            Integer(low, high) => format!("a whole number from {low} to {high}"),
            Number(low, high) if high >= 1e6 => format!("a number of at least {low}"),
            Number(low, high) => format!("a number from {low} to {high}"),
            Text => "a string".to_string(),
            Name => "a string that is not empty".to_string(),
            OneOf(words) => format!("one of {}", quoted(words)),
            Words(words) => format!("a list of {}", quoted(words)),
            Metrics => format!("a list of {}", Metric::names()),
            Paths => "a list of paths or globs".to_string(),
            Parts => "a list of parts, blocks or globs of parameter names".to_string(),
            Size(_) => "a size such as \"512MiB\" or \"4GiB\"".to_string(),
            Table => "a table".to_string(),
            Tables(_) => "a list of tables".to_string(),
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
    use crate::config::aliases::{self, Here};

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
            ("model.preset", "model.config"),
        ] {
            let known = match aliases::of_key(typed) {
                Some(Here::Key(key)) => Some(key),
                _ => nearest(typed),
            };
            assert_eq!(known, Some(meant), "{typed}");
        }
        for far in ["zzz.qqq", "memory.pin_memory", "train.num_workers", "data.ultra_low_mem", "run.verbose"] {
            assert_eq!(nearest(far), None, "{far}");
        }
    }

    #[test]
    fn names_are_unique_and_have_one_section() {
        for (index, key) in KEYS.iter().enumerate() {
            assert_eq!(key.name.split('.').count(), 2, "{}", key.name);
            assert!(KEYS[..index].iter().all(|earlier| earlier.name != key.name), "{} is there twice", key.name);
        }
    }
}
