//! Names of other programs' settings, in one table, and what each is here: a key with the same meaning, or words.
//!
//! The names are those of transformers' `Trainer` and its example scripts, TRL, LLaMA-Factory, MLX-LM, and scripts for training in little
//! memory. `train` and `plan` take the names of keys as flags: `--per_device_train_batch_size 8` sets `train.batch_size_per_device`. As a
//! key of a config or of `--set`, and in the other commands, a name is refused with a hint from this table.

use super::keys::{NEAR, likeness};

/// What a name of another program is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// A key with the same meaning.
    Key(&'static str),
    /// No key: the way to the same thing, or the reason why there is none.
    Said(&'static str),
}

use Here::{Key, Said};

/// Every known name, with `_` between its words.
#[rustfmt::skip]
pub const ALIASES: &[(&str, Here)] = &[
    ("batch_size", Key("train.batch_size")),
    ("train_batch_size", Key("train.batch_size")),
    ("per_device_train_batch_size", Key("train.batch_size_per_device")),
    ("per_gpu_train_batch_size", Key("train.batch_size_per_device")),
    ("batch_size_per_gpu", Key("train.batch_size_per_device")),
    ("gradient_accumulation_steps", Key("train.gradient_accumulation_steps")),
    ("accumulation_steps", Key("train.gradient_accumulation_steps")),
    ("grad_accumulation_steps", Key("train.gradient_accumulation_steps")),
    ("lr", Key("optimizer.learning_rate")),
    ("learn_rate", Key("optimizer.learning_rate")),
    ("weight_decay", Key("optimizer.weight_decay")),
    ("optim", Key("optimizer.name")),
    ("optimizer", Key("optimizer.name")),
    ("adam_beta1", Key("optimizer.beta1")),
    ("adam_beta2", Key("optimizer.beta2")),
    ("adam_epsilon", Key("optimizer.eps")),
    ("num_train_epochs", Key("train.epochs")),
    ("num_epochs", Key("train.epochs")),
    ("steps", Key("train.max_steps")),
    ("iters", Key("train.max_steps")),
    ("train_steps", Key("train.max_steps")),
    ("max_train_steps", Key("train.max_steps")),
    ("dropout", Key("train.dropout")),
    ("precision", Key("train.precision")),
    ("max_grad_norm", Key("train.grad_clip_norm")),
    ("label_smoothing", Key("train.label_smoothing")),
    ("label_smoothing_factor", Key("train.label_smoothing")),
    ("z_loss", Key("train.z_loss")),
    ("simpo_gamma", Key("preference.gamma")),
    ("desirable_weight", Key("preference.desirable_weight")),
    ("undesirable_weight", Key("preference.undesirable_weight")),
    ("eval_steps", Key("train.eval_every_steps")),
    ("steps_per_eval", Key("train.eval_every_steps")),
    ("max_eval_samples", Key("train.eval_samples")),
    ("freeze", Key("train.freeze")),
    ("lr_scheduler_type", Key("schedule.name")),
    ("lr_scheduler", Key("schedule.name")),
    ("warmup_steps", Key("schedule.warmup_steps")),
    ("output", Key("run.output_dir")),
    ("output_dir", Key("run.output_dir")),
    ("out", Key("run.output_dir")),
    ("r", Key("lora.rank")),
    ("lora_r", Key("lora.rank")),
    ("lora_rank", Key("lora.rank")),
    ("rank", Key("lora.rank")),
    ("lora_alpha", Key("lora.alpha")),
    ("lora_dropout", Key("lora.dropout")),
    ("lora_target", Key("lora.targets")),
    ("lora_target_modules", Key("lora.targets")),
    ("target_modules", Key("lora.targets")),
    ("use_dora", Key("lora.dora")),
    ("use_rslora", Key("lora.rslora")),
    ("adapter_name_or_path", Key("lora.init_from")),
    ("resume_adapter_file", Key("lora.init_from")),
    ("seed", Key("run.seed")),
    ("logging_steps", Key("run.log_every_steps")),
    ("steps_per_report", Key("run.log_every_steps")),
    ("save_steps", Key("checkpoint.every_steps")),
    ("save_every", Key("checkpoint.every_steps")),
    ("save_total_limit", Key("checkpoint.keep_last")),
    ("is_finetune", Key("run.finetune")),
    ("model", Key("model.init_from")),
    ("model_name_or_path", Key("model.init_from")),
    ("model_name", Key("model.init_from")),
    ("preset", Key("model.config")),
    ("data", Key("data.train")),
    ("dataset", Key("data.train")),
    ("train_file", Key("data.train")),
    ("train_data", Key("data.train")),
    ("validation", Key("data.validation")),
    ("validation_file", Key("data.validation")),
    ("eval_data", Key("data.validation")),
    ("val_data", Key("data.validation")),
    ("val_size", Key("data.validation_split")),
    ("validation_split", Key("data.validation_split")),
    ("eval_metrics", Key("train.eval_metrics")),
    ("metrics", Key("train.eval_metrics")),
    ("modules_to_save", Key("lora.modules_to_save")),
    ("dropout_rate", Key("train.dropout")),
    ("beta", Key("preference.beta")),
    ("tokenizer", Key("data.tokenizer")),
    ("tokenizer_name", Key("data.tokenizer")),
    ("prompt_column", Key("data.prompt_column")),
    ("response_column", Key("data.response_column")),
    ("summary_column", Key("data.response_column")),
    ("label_column", Key("data.response_column")),
    ("target_column", Key("data.response_column")),
    ("source_template", Key("data.source_template")),
    ("target_template", Key("data.target_template")),
    ("source_lang", Key("data.source_lang")),
    ("target_lang", Key("data.target_lang")),
    ("text_column", Key("data.text_column")),
    ("encoding", Key("data.encoding")),
    ("quoting", Key("data.quoting")),
    ("max_source_length", Key("data.max_source_tokens")),
    ("max_target_length", Key("data.max_target_tokens")),
    ("source_prefix", Key("data.source_prefix")),
    ("memory", Key("memory.budget")),
    ("metric_for_best_model", Key("checkpoint.best_metric")),
    ("early_stopping_patience", Key("train.early_stopping_patience")),
    ("early_stopping_threshold", Key("train.early_stopping_min_delta")),
    ("label_column_name", Key("data.response_column")),
    ("answer_column", Key("data.response_column")),
    ("text_column_name", Key("data.text_column")),
    ("mlm_probability", Key("data.noise_density")),
    ("mean_noise_span_length", Key("data.mean_span_tokens")),
    ("metric_name", Key("train.eval_metrics")),
    ("beam_size", Key("generation.num_beams")),
    ("generation_num_beams", Key("generation.num_beams")),
    ("num_beams", Key("generation.num_beams")),
    ("generation_max_length", Key("train.eval_max_new_tokens")),
    ("val_max_target_length", Key("train.eval_max_new_tokens")),

    ("resume", Said("to resume a run, use `--keep-training` with its `--output`")),
    ("resume_from_checkpoint", Said("to resume a run, use `--keep-training` with its `--output`")),
    ("is_keep_training", Said("use the flag `--keep-training` with the run's `--output`")),
    ("overwrite_output_dir", Said("runs are never overwritten; choose another `--output`")),
    ("force", Said("runs are never overwritten; choose another `--output`")),
    ("quiet", Said("send the lines to a file: `> train.log`; errors still appear on the screen")),
    ("bf16", Said("use `--set train.precision=bf16`")),
    ("fp16", Said("there is no fp16 training; use `--set train.precision=bf16`")),
    ("warmup_ratio", Key("schedule.warmup_ratio")),
    ("gradient_checkpointing", Said("recomputation follows from `--memory-budget`; `plan --explain` shows it")),
    ("grad_checkpoint", Said("recomputation follows from `--memory-budget`; `plan --explain` shows it")),
    ("freeze_encoder", Said("use `--freeze encoder`")),
    ("test", Said("after training, use `train_low_mem eval --model OUTPUT --data FILE`")),
    ("test_file", Said("after training, use `train_low_mem eval --model OUTPUT --data FILE`")),
    ("do_train", Said("leave it out: `train_low_mem` trains")),
    ("train", Said("leave it out: `train_low_mem` trains")),
    ("do_eval", Said("name validation rows: `--validation rows.parquet`")),
    ("do_predict", Said("after training, use `train_low_mem eval --model OUTPUT --data FILE --predictions FILE`")),
    ("evaluation_strategy", Said("use `--set train.eval_every_steps=N`; without `--validation` nothing is evaluated")),
    ("eval_strategy", Said("use `--set train.eval_every_steps=N`; without `--validation` nothing is evaluated")),
    ("save_strategy", Said("use `--set checkpoint.every_steps=N`")),
    ("logging_strategy", Said("use `--set run.log_every_steps=N`")),
    ("predict_with_generate", Said("evaluation generates: see `train.eval_generate_samples` in `train_low_mem keys`")),
    ("load_best_model_at_end", Said("use `--set checkpoint.model=best`")),
    ("greater_is_better", Said("leave it out: the program knows it for each `checkpoint.best_metric`")),
    ("per_device_eval_batch_size", Said("leave it out: evaluation is cut to what the memory budget allows")),
    ("auto_find_batch_size", Said("leave it out: the memory plan cuts each batch to what fits")),
    ("max_train_samples", Said("use `--max-steps N`, or a file with fewer rows")),
    ("max_samples", Said("use `--max-steps N`, or a file with fewer rows")),
    ("max_seq_len", Said("sources and targets have limits of their own: `--set data.max_source_tokens=N --set data.max_target_tokens=N`")),
    ("max_seq_length", Said("sources and targets have limits of their own: `--set data.max_source_tokens=N --set data.max_target_tokens=N`")),
    ("max_length", Said("sources and targets have limits of their own: `--set data.max_source_tokens=N --set data.max_target_tokens=N`")),
    ("cutoff_len", Said("sources and targets have limits of their own: `--set data.max_source_tokens=N --set data.max_target_tokens=N`")),
    ("pad_to_max_length", Said("leave it out: micro-batches hold rows of similar length, padded to the longest of them")),
    ("group_by_length", Said("leave it out: micro-batches hold rows of similar length")),
    ("ignore_pad_token_for_loss", Said("leave it out: padding never counts in the loss")),
    ("mask_prompt", Said("leave it out: the loss counts targets alone")),
    ("ultra_low_mem", Said("rows are read as needed at any budget; `--set memory.dataset_residency=ultra_low_mem` keeps none in memory")),
    ("keep_in_memory", Said("leave it out: rows stay in memory where the budget has room; `--set memory.dataset_residency=in_memory` asks for it")),
    ("num_workers", Said("leave it out: the plan chooses `memory.decode_threads`, which share one copy of the rows")),
    ("num_data_workers", Said("leave it out: the plan chooses `memory.decode_threads`, which share one copy of the rows")),
    ("dataloader_num_workers", Said("leave it out: the plan chooses `memory.decode_threads`, which share one copy of the rows")),
    ("preprocessing_num_workers", Said("leave it out: the plan chooses `memory.decode_threads`, which share one copy of the rows")),
    ("prefetch_factor", Said("leave it out: the plan chooses `memory.prefetch_batches`, the batches ahead in all")),
    ("dataloader_prefetch_factor", Said("leave it out: the plan chooses `memory.prefetch_batches`, the batches ahead in all")),
    ("pin_memory", Said("leave it out: a batch is a few KiB of token ids, and there is nothing to pin")),
    ("dataloader_pin_memory", Said("leave it out: a batch is a few KiB of token ids, and there is nothing to pin")),
    ("logits_to_keep", Said("leave it out: logits never exist whole; `memory.loss_chunk_rows` sets how many rows do")),
    ("cpu_offload", Said("leave it out: `--memory-budget` moves state to files, `--device-memory-budget` from a GPU to the host")),
    ("deepspeed", Said("use `mpirun` with `--set parallel.shard=optimizer`, or one process with a `--memory-budget`")),
    ("deepspeed_stage", Said("use `mpirun` with `--set parallel.shard=optimizer` (1), `gradients` (2) or `weights` (3)")),
    ("zero_stage", Said("use `mpirun` with `--set parallel.shard=optimizer` (1), `gradients` (2) or `weights` (3)")),
    ("fsdp", Said("use `mpirun` with `--set parallel.shard=weights`, or one process with a `--memory-budget`")),
    ("num_processes", Said("use `mpirun -n N train_low_mem ..`; see docs/processes.md")),
    ("multi_gpu", Said("use `mpirun -n N train_low_mem ..`; see docs/processes.md")),
    ("gpu_plan", Said("`train_low_mem jobs run` starts each run of a list as soon as its memory is free; see docs/runs.md")),
    ("omp_num_threads", Said("use `--threads N`, or the variable OMP_NUM_THREADS of the environment")),
    ("mkl_num_threads", Said("use `--threads N`: there are no other threads that compute")),
    ("tokenizers_parallelism", Said("leave it out: `memory.decode_threads` are the threads that tokenize")),
    ("pytorch_cuda_alloc_conf", Said("leave it out: a GPU's memory is planned, and cannot be fragmented by an allocator of PyTorch")),
    ("num_threads", Said("use `--threads N`")),
    ("gpu", Said("use `--device cuda`")),
    ("cpu", Said("use `--device cpu`")),
    ("no_cuda", Said("use `--device cpu`")),
    ("use_cpu", Said("use `--device cpu`")),
    ("adafactor", Said("Adafactor is the default; beside an adapter use `--set optimizer.name=adafactor`")),
    ("load_in_4bit", Said("use `--lora --set model.base_precision=nf4`")),
    ("load_in_8bit", Said("use `--lora --set model.base_precision=int8`")),
    ("quantization_bit", Said("use `--lora --set model.base_precision=int8` (8), or `nf4` (4)")),
    ("use_peft", Said("use `--lora`")),
    ("finetuning_type", Said("use `--lora` for an adapter, `--finetune` for the decoder alone; without them everything trains")),
    ("stage", Said("leave it out: rows with prompts and responses are fine-tuned on, rows with a text column pretrained on")),
    ("adapter_path", Said("leave it out: a run with `--lora` writes OUTPUT/adapter; `--output` chooses the place")),
    ("dataset_name", Said("fetch the files first: `hf download --repo-type dataset ID --local-dir rows`, then `--data rows`")),
    ("dataset_dir", Said("name the directory itself: `--data DIR`")),
    ("config_name", Said("use `--preset NAME` for a shape with new weights")),
    ("cache_dir", Said("set the variable HF_HOME of the environment")),
    ("model_revision", Said("name it with the model: `--model ID@REVISION`")),
    ("trust_remote_code", Said("leave it out: no code of a model is ever run")),
    ("use_fast_tokenizer", Said("leave it out: tokenizer.json and spiece.model both work")),
    ("run_name", Said("use `--output runs/NAME`")),
    ("report_to", Said("leave it out: every run writes files for TensorBoard, and report.html")),
    ("plot_loss", Said("leave it out: every run writes files for TensorBoard, and report.html")),
    ("logging_dir", Said("leave it out: every run writes files for TensorBoard, and report.html")),
    ("logging_first_step", Said("leave it out: the first steps are always logged")),
    ("log_level", Said("leave it out: `metrics.jsonl` has every step")),
    ("disable_tqdm", Said("leave it out: a progress bar is shown on a terminal alone")),
    ("remove_unused_columns", Said("leave it out: columns that are not used are not read")),
    ("label_names", Said("name the column of the answers: `--set data.response_column=NAME`")),
    ("dataloader_drop_last", Said("leave it out: the last batch of an epoch is a step, however small")),
    ("data_seed", Said("leave it out: `--seed` is that of the row order, too")),
    ("full_determinism", Said("leave it out: a plan gives the same bytes; `--set run.deterministic=true` refuses a resume that would not")),
    ("ignore_data_skip", Said("leave it out: resuming seeks to the next row")),
    ("save_only_model", Said("leave it out: OUTPUT/model is the model alone")),
    ("eval_on_start", Said("leave it out: the model is always evaluated before the first step")),
    ("prediction_loss_only", Said("use `--set train.eval_generate_samples=1`: the loss is that of all rows, and one is answered")),
    ("eval_accumulation_steps", Said("leave it out: evaluation is cut to what the memory budget allows")),
    ("bf16_full_eval", Said("leave it out: evaluation computes as training does: `--set train.precision=bf16`")),
    ("fp16_full_eval", Said("leave it out: evaluation computes as training does: `--set train.precision=bf16`")),
    ("tf32", Said("leave it out: f32 is exact; `--set train.precision=bf16` is faster")),
    ("torch_dtype", Said("use `--set train.precision=bf16`, or leave it out for f32")),
    ("dtype", Said("use `--set train.precision=bf16`, or leave it out for f32")),
    ("local_rank", Said("use `mpirun -n N train_low_mem ..`; see docs/processes.md")),
    ("neftune_noise_alpha", Said("there is no noise on embeddings; `--set train.dropout=0.1` regularises")),
    ("sortish_sampler", Said("leave it out: micro-batches hold rows of similar length")),
    ("train_sampling_strategy", Said("leave it out: micro-batches hold rows of similar length")),
    ("generation_config", Said("leave it out: that of the model is used, and `generation.*` keys take its place")),
    ("skip_memory_metrics", Said("leave it out: memory is always measured")),
    ("use_cache", Said("leave it out: answers always keep their keys and values")),
    ("dataset_config_name", Said("fetch the files first: `hf download --repo-type dataset ID --local-dir rows`, then `--data rows`")),
    ("task_name", Said("fetch the task's files first, then `--data FILE --set task.name=classification`")),
    ("do_regression", Said("use `--set task.name=regression`")),
    ("overwrite_cache", Said("leave it out: rows are read again where a file has changed")),
    ("max_predict_samples", Said("after training, use `train_low_mem eval --model OUTPUT --data FILE --samples N`")),
    ("validation_split_percentage", Said("use `--set data.validation_split=0.05` for 5 %")),
    ("text_column_names", Said("several columns make one text by a template: `--set 'data.source_template={title}\\n{body}'`")),
    ("text_column_delimiter", Said("several columns make one text by a template: `--set 'data.source_template={title}\\n{body}'`")),
    ("question_column", Said("question and context make one text by a template: `--set 'data.source_template=question: {question} context: {context}'`")),
    ("context_column", Said("question and context make one text by a template: `--set 'data.source_template=question: {question} context: {context}'`")),
    ("doc_stride", Said("leave it out: longer sources are cut; `--set data.max_source_tokens=N` sets the limit")),
    ("forced_bos_token", Said("set `forced_bos_token_id` in the model's generation_config.json")),
    ("resize_position_embeddings", Said("leave it out: relative positions have no end")),
    ("ignore_mismatched_sizes", Said("leave it out: a new task gets a new head by itself")),
    ("shuffle_train_dataset", Said("leave it out: rows are shuffled; `--set data.shuffle=false` keeps their order")),
    ("lang", Said("name both sides: `--set data.source_lang=en --set data.target_lang=de`")),
    ("token", Said("leave it out: nothing is downloaded here; `hf download` takes the token")),
    ("use_auth_token", Said("leave it out: nothing is downloaded here; `hf download` takes the token")),
    ("low_cpu_mem_usage", Said("leave it out: weights are read as they are needed")),
    ("streaming", Said("leave it out: rows are read as they are needed")),
    ("config_overrides", Said("use `--set 'model.overrides={ num_layers = 4 }'` with `--preset`")),
    ("push_to_hub", Said("leave it out: OUTPUT/model is a Hugging Face directory, which `hf upload` takes")),
];

/// Values of keys as transformers and PyTorch write them: the value with the same meaning, or words.
#[rustfmt::skip]
pub const WORDS: &[(&str, &str, Here)] = &[
    ("optimizer.name", "adamw_torch", Key("adamw")),
    ("optimizer.name", "adamw_torch_fused", Key("adamw")),
    ("optimizer.name", "adamw_apex_fused", Key("adamw")),
    ("optimizer.name", "adamw_hf", Key("adamw")),
    ("optimizer.name", "paged_adamw", Key("adamw")),
    ("optimizer.name", "paged_adamw_32bit", Key("adamw")),
    ("optimizer.name", "lion_32bit", Key("lion")),
    ("optimizer.name", "paged_lion_32bit", Key("lion")),
    ("optimizer.name", "adam", Said("Adam is AdamW without decay: `--set optimizer.name=adamw --set optimizer.weight_decay=0`")),
    ("optimizer.name", "adamw_8bit", Said("use `--set optimizer.name=adamw --set optimizer.state_precision=int8`")),
    ("optimizer.name", "adamw_bnb_8bit", Said("use `--set optimizer.name=adamw --set optimizer.state_precision=int8`")),
    ("optimizer.name", "adamw_torch_8bit", Said("use `--set optimizer.name=adamw --set optimizer.state_precision=int8`")),
    ("optimizer.name", "paged_adamw_8bit", Said("use `--set optimizer.name=adamw --set optimizer.state_precision=int8`")),
    ("optimizer.name", "lion_8bit", Said("use `--set optimizer.name=lion`; its one value of a parameter is f32 here")),
    ("schedule.name", "constant_with_warmup", Key("constant")),
    ("schedule.name", "cosine_with_restarts", Said("there are no restarts; `--set schedule.name=cosine` falls once")),
    ("schedule.name", "polynomial", Said("its default power of 1 is `--set schedule.name=linear`")),
    ("train.precision", "fp32", Key("f32")),
    ("train.precision", "float32", Key("f32")),
    ("train.precision", "bfloat16", Key("bf16")),
    ("train.precision", "fp16", Said("there is no fp16 training; use `--set train.precision=bf16`")),
    ("train.precision", "float16", Said("there is no fp16 training; use `--set train.precision=bf16`")),
];

/// What a value of this key is here.
pub fn of_word(key: &str, word: &str) -> Option<Here> {
    let word = word.to_lowercase().replace('-', "_");
    WORDS.iter().find(|(of, known, _)| *of == key && *known == word).map(|(.., here)| *here)
}

/// Beginnings of names, for what is not in [`ALIASES`].
const FAMILIES: [(&str, &str); 8] = [
    ("hub_", "leave it out: OUTPUT/model is a Hugging Face directory, which `hf upload` takes"),
    ("ddp_", "use `mpirun -n N train_low_mem ..`; see docs/processes.md"),
    ("fsdp_", "use `mpirun` with `--set parallel.shard=weights`, or one process with a `--memory-budget`"),
    ("torch_", "leave it out: nothing here is PyTorch"),
    ("dataloader_", "leave it out: the plan chooses `memory.decode_threads` and `memory.prefetch_batches`"),
    ("gradient_checkpointing_", "recomputation follows from `--memory-budget`; `plan --explain` shows it"),
    ("activation_checkpointing", "recomputation follows from `--memory-budget`; `plan --explain` shows it"),
    ("trackio_", "leave it out: every run writes files for TensorBoard, and report.html"),
];

/// Words of other programs in the place of a command.
const COMMANDS: [(&str, &str); 8] = [
    ("predict", "use `train_low_mem generate --model DIR --input FILE`, or `eval --predictions FILE` with references"),
    ("infer", "use `train_low_mem generate --model DIR --prompt TEXT`"),
    ("test", "use `train_low_mem eval --model DIR --data FILE`"),
    ("evaluate", "use `train_low_mem eval --model DIR --data FILE`"),
    ("finetune", "use `train_low_mem --model DIR --data FILE`; `--finetune` trains the decoder alone"),
    ("sft", "use `train_low_mem --model DIR --data FILE`"),
    ("pretrain", "use `train_low_mem --preset NAME --data FILE`"),
    ("download", "nothing is downloaded here; fetch a model with `hf download ID`"),
];

/// What a flag or a bare name is here: `--num_workers`, `num-workers=4`.
pub fn of_flag(flag: &str) -> Option<Here> {
    let name = flag.split('=').next().unwrap_or(flag).trim_start_matches('-').replace('-', "_").to_lowercase();
    let of_family = || FAMILIES.iter().find(|(start, _)| name.starts_with(start)).map(|(_, words)| Said(words));
    ALIASES.iter().find(|(known, _)| *known == name).map(|(_, here)| *here).or_else(of_family)
}

/// What the last part of a key is here: `train.num_workers`.
pub fn of_key(name: &str) -> Option<Here> {
    of_flag(name.rsplit('.').next().unwrap_or(name))
}

/// The words for a flag that a command does not know, if this table has it. `takes_key` says whether a `--set` of that command has an effect.
pub fn explained(flag: &str, takes_key: &dyn Fn(&str) -> bool) -> Option<String> {
    if let Some((_, words)) = COMMANDS.iter().find(|(command, _)| *command == flag) {
        return Some((*words).to_string());
    }
    match of_flag(flag).filter(|_| flag.starts_with("--"))? {
        Said(words) => Some(words.to_string()),
        Key(key) if takes_key(key) => Some(format!("use `--set {key}=..`")),
        Key(_) => None,
    }
}

/// The accepted flag that is nearest to a mistyped one, if that is near.
pub fn nearest(flag: &str) -> Option<String> {
    let name = flag.split('=').next().unwrap_or(flag).strip_prefix("--")?.replace('-', "_");
    let known = ALIASES.iter().filter(|(_, here)| matches!(here, Key(_))).map(|(known, _)| *known);
    let scored = known.map(|known| (likeness(known, &name), known)).filter(|(likeness, _)| *likeness >= NEAR);
    let nearest = scored.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, known)| known)?;
    Some(format!("--{}", nearest.replace('_', "-")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Values, keys};

    #[test]
    fn every_name_is_there_once_and_stands_for_a_key_or_says_something() {
        for (index, (name, here)) in ALIASES.iter().enumerate() {
            assert!(name.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_'));
            assert!(ALIASES[..index].iter().all(|(earlier, _)| earlier != name), "{name} is there twice");
            match here {
                Key(key) => assert!(keys::find(key).is_some(), "{name}: {key}"),
                Said(words) => assert!(words.len() > 10, "{name}"),
            }
        }
    }

    #[test]
    fn a_value_of_another_program_is_the_one_with_its_meaning_or_explained() {
        for (key, word, here) in WORDS {
            let mut values = Values::defaults();
            let set = values.apply_flag("--x", key, &[(*word).to_owned()]);
            match here {
                Key(value) => {
                    set.unwrap();
                    assert_eq!(values.text(key).as_deref(), Some(*value), "{word}");
                }
                Said(words) => assert_eq!(set.unwrap_err().hints, [*words], "{word}"),
            }
        }
    }

    #[test]
    fn a_key_of_another_program_is_refused_with_the_words_of_its_row() {
        for (name, here) in ALIASES {
            for (typed, section) in [(name.to_string(), ""), (format!("train.{name}"), "[train]\n")] {
                if keys::find(&typed).is_some() {
                    continue;
                }
                let by_flag = Values::defaults().apply_assignment(&format!("{typed}=1")).expect_err(&typed);
                let by_file =
                    Values::defaults().apply_file("c.toml", &format!("{section}{name} = 1\n")).expect_err(&typed);
                for failure in [by_flag, by_file] {
                    let expected = match here {
                        Key(key) => *key,
                        Said(words) => *words,
                    };
                    assert!(failure.hints.iter().any(|hint| hint.contains(expected)), "{typed}: {failure}");
                }
            }
        }
    }

    #[test]
    fn a_flag_of_another_program_is_explained() {
        for (flag, takes_keys, expected) in [
            ("--resume", true, "--keep-training"),
            ("--fp16", true, "train.precision=bf16"),
            ("--prompt_column", true, "use `--set data.prompt_column=..`"),
            ("--load-in-4bit", true, "model.base_precision=nf4"),
            ("--num_workers=4", true, "memory.decode_threads"),
            ("--ultra-low-mem", true, "memory.dataset_residency=ultra_low_mem"),
            ("--gpu-plan", true, "jobs run"),
            ("predict", true, "generate"),
        ] {
            assert!(explained(flag, &|_| takes_keys).expect(flag).contains(expected), "{flag}");
        }
        assert_eq!(explained("--lean-rate", &|_| true), None);
        assert_eq!(explained("--batch-size", &|_| false), None);
    }

    #[test]
    fn a_suggestion_is_made_only_where_it_is_near() {
        for (typed, expected) in [
            ("--modle", Some("--model")),
            ("--batch_sizes", Some("--batch-size")),
            ("--per-device-batch-size", Some("--per-device-train-batch-size")),
            ("--xyz", None),
            ("--verbose", None),
        ] {
            assert_eq!(nearest(typed).as_deref(), expected, "{typed}");
        }
    }
}
