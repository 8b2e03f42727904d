//! The cases of `bench memory`: models, precisions, lengths, and every lever on and off.

use super::data::Lengths;

/// A measurement of predicted and real peak memory: one child process, or several in sequence.
#[derive(Clone, Debug)]
pub struct Case {
    /// The case's name in the table and for `--filter`.
    pub name: String,
    /// The command under test.
    pub what: What,
    /// Whether the case takes only seconds.
    pub quick: bool,
}

/// The command of a case.
#[derive(Clone, Debug)]
pub enum What {
    /// `train_low_mem bench` with these flags, in which `SCRATCH` stands for a directory.
    Steps(Vec<String>),
    /// `train_low_mem train` of a model, with these settings on these rows.
    Train {
        /// The preset; empty for the embedded default.
        model: &'static str,
        /// Arguments of `--set`.
        set: Vec<String>,
        /// The rows.
        rows: Lengths,
        /// Whether the case is a resumed run. The first run makes 1 step, and the resumed run two more. A process's first
        /// step creates the gradients during backward, when activations are already being freed.
        resume: bool,
    },
    /// Training, resuming, `eval` or `generate` of an adapter beside a new model of this preset.
    Adapter {
        /// `train`, `resume`, `eval` or `generate`.
        command: &'static str,
        /// Preset.
        model: &'static str,
        /// Arguments of `--set`.
        set: Vec<String>,
    },
    /// `eval` or `generate` of a new model of this preset.
    Command {
        /// `eval` or `generate`.
        command: &'static str,
        /// Preset.
        model: &'static str,
        /// The rows of `eval`. The prompts of `generate` have the same length.
        rows: Lengths,
        /// More flags.
        flags: Vec<String>,
    },
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn steps(model: &str, quick: bool, flags: &str) -> Case {
    let what = What::Steps(words(&format!("--model {model} --steps 1 {flags}")));
    let short = words(&flags.replace("--", "").replace("-tokens", "").replace(" SCRATCH", "")).join(" ");
    Case { name: format!("step {model} {short}"), what, quick }
}

fn train(name: &str, model: &'static str, set: &str, rows: Lengths, resume: bool) -> Case {
    let what = What::Train { model, set: words(set), rows, resume };
    Case { name: format!("{} {model} {name}", if resume { "resume" } else { "train" }), what, quick: model == "tiny" }
}

fn command(command: &'static str, model: &'static str, rows: Lengths, flags: &str) -> Case {
    let what = What::Command { command, model, rows, flags: words(flags) };
    Case { name: format!("{command} {model} {}", flags.replace("--", "")), what, quick: model == "tiny" }
}

/// Flags of a step of 8 samples.
const FULL: &str = "--batch 8 --source-tokens 256 --target-tokens 256";

/// Flags of stochastic rounding.
const STOCHASTIC: &str = "--precision bf16 --master-weights stochastic-rounding";

/// Settings of a short run.
const SMALL: &str = "train.batch_size=4 train.max_steps=2 train.eval_samples=4 train.eval_generate_samples=2 \
                 train.eval_max_new_tokens=64 data.max_source_tokens=128 data.max_target_tokens=128";

/// Settings of stochastic rounding.
const ROUNDING: &str = "train.precision=bf16 train.master_weights=stochastic-rounding";

/// Every case.
pub fn all() -> Vec<Case> {
    let mut cases = [precisions(), shapes(), runs(), resumed_runs(), layer_by_layer(), answers()].concat();
    for tokens in [1024, 2048, 4096] {
        cases.extend(long(tokens));
    }
    cases.extend(["tiny", "t5-small", "chatlm-0.2b"].into_iter().flat_map(adapters));
    cases
}

/// A step alone in each precision: the flags set cutting, recomputing and chunking.
fn precisions() -> Vec<Case> {
    let mut cases = Vec::new();
    for precision in ["--precision f32", "--precision bf16", STOCHASTIC] {
        for cut in [
            "--micro-batch 8",
            "--micro-batch 2",
            "--micro-batch 8 --recompute full",
            "--micro-batch 1 --recompute full",
        ] {
            cases.push(steps("t5-small", false, &format!("{FULL} {precision} {cut}")));
        }
        cases.push(steps(
            "t5-small",
            false,
            &format!("--batch 4 --source-tokens 128 --target-tokens 128 {precision} --micro-batch 4"),
        ));
        cases.push(steps(
            "tiny",
            true,
            &format!("--batch 32 --source-tokens 64 --target-tokens 64 {precision} --micro-batch 32"),
        ));
        cases.push(steps(
            "tiny",
            true,
            &format!("--batch 32 --source-tokens 64 --target-tokens 64 {precision} --micro-batch 4 --recompute full"),
        ));
    }
    cases
}

/// A step of other lengths, models and precisions of gradients.
fn shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.push(steps(
        "t5-small",
        false,
        "--batch 4 --source-tokens 512 --target-tokens 64 --micro-batch 4 --recompute 6",
    ));
    cases.push(steps("t5-small", false, "--batch 16 --source-tokens 32 --target-tokens 192 --micro-batch 16"));
    for precision in ["--precision f32", "--precision bf16", STOCHASTIC] {
        let short = "--batch 2 --source-tokens 128 --target-tokens 128";
        cases.push(steps("t5-base", false, &format!("{short} {precision} --micro-batch 1")));
        cases.push(steps("chatlm-0.2b", false, &format!("{short} {precision} --micro-batch 2")));
        cases.push(steps("chatlm-0.2b", false, &format!("{short} {precision} --micro-batch 1 --recompute full")));
    }
    let half = "--gradient-precision bf16";
    cases.push(steps("t5-small", false, &format!("{FULL} --precision f32 {half} --micro-batch 2")));
    cases.push(steps("t5-small", false, &format!("{FULL} --precision bf16 {half} --micro-batch 8")));
    for model in ["t5-base", "chatlm-0.2b"] {
        let long = "--batch 4 --source-tokens 256 --target-tokens 256";
        cases.push(steps(model, false, &format!("{long} {STOCHASTIC} {half} --micro-batch 2")));
    }
    cases
}

/// Runs that evaluate, with one setting changed.
fn runs() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, set) in [
        ("f32", String::new()),
        ("bf16", "train.precision=bf16".to_owned()),
        ("stochastic rounding", ROUNDING.to_owned()),
    ] {
        cases.push(train(name, "t5-small", &format!("{SMALL} {set}"), Lengths::Full, false));
        cases.push(train(name, "tiny", &format!("{SMALL} {set}"), Lengths::Full, false));
    }
    for (name, set) in [
        ("micro-batches of 1", "memory.micro_batch_samples=1"),
        ("every block recomputed", "memory.recompute_blocks=100"),
        ("logits computed again", "memory.loss_chunk_rows=1"),
        ("nothing held of the data", "memory.dataset_residency=ultra_low_mem memory.prefetch_batches=1"),
        ("all data in memory", "memory.dataset_residency=in_memory"),
        (
            "evaluation of long answers",
            "train.eval_samples=32 train.eval_generate_samples=16 train.eval_max_new_tokens=128 memory.micro_batch_samples=1",
        ),
    ] {
        cases.push(train(name, "t5-small", &format!("{SMALL} {set}"), Lengths::Full, false));
    }
    cases
}

/// Runs that are resumed, with weights in memory and in files, and runs of a larger model.
fn resumed_runs() -> Vec<Case> {
    let mut cases = Vec::new();
    let resumed = format!("{SMALL} train.max_steps=3");
    cases.push(train("f32", "t5-small", &resumed, Lengths::Full, true));
    cases.push(train("stochastic rounding", "t5-small", &format!("{resumed} {ROUNDING}"), Lengths::Full, true));
    cases.push(train("f32", "tiny", &resumed, Lengths::Full, true));
    let weights = format!("{resumed} memory.weight_offload=disk memory.gradient_offload=disk");
    cases.push(train("weights in a file", "t5-small", &weights, Lengths::Full, true));
    cases.push(train("weights in a file", "chatlm-0.2b", &format!("{weights} {ROUNDING}"), Lengths::Full, true));
    cases.push(train("f32", "chatlm-0.2b", SMALL, Lengths::Full, false));
    cases.push(train("stochastic rounding", "chatlm-0.2b", &format!("{SMALL} {ROUNDING}"), Lengths::Full, false));
    cases
}

/// Steps layer by layer, with what they put into files.
fn layer_by_layer() -> Vec<Case> {
    let mut cases = Vec::new();
    let by_layer = "--accumulation layer-major --micro-batch 1";
    for (model, precision, more) in [
        ("t5-small", "", ""),
        ("t5-small", "", "--kept-gradient-blocks 6"),
        ("t5-small", "", "--kept-gradient-blocks 12"),
        ("t5-small", "", "--offload SCRATCH"),
        ("t5-small", "", "--offload-gradients SCRATCH"),
        ("t5-small", STOCHASTIC, ""),
        ("t5-small", STOCHASTIC, "--offload SCRATCH"),
        ("t5-small", "--precision bf16 --gradient-precision bf16", "--kept-gradient-blocks 12"),
        ("t5-small", "", "--offload-gradients SCRATCH --recompute none"),
        ("t5-small", "", "--offload-gradients SCRATCH --offload SCRATCH --recompute none"),
        ("t5-small", "", "--kept-gradient-blocks 12 --offload SCRATCH --blocks-in-memory 6 --recompute none"),
        ("t5-small", STOCHASTIC, "--offload-gradients SCRATCH --offload SCRATCH --blocks-in-memory 9 --recompute none"),
        ("t5-small", "--precision bf16", "--offload-gradients SCRATCH --recompute 6 --keep-heads"),
        ("t5-small", STOCHASTIC, "--offload-gradients SCRATCH --offload SCRATCH --recompute none"),
        ("chatlm-0.2b", "", "--offload-gradients SCRATCH --offload SCRATCH --recompute none --loss-chunk-rows 1"),
        ("t5-small", "", "--offload-gradients SCRATCH --offload-weights SCRATCH --recompute none"),
        (
            "t5-small",
            STOCHASTIC,
            "--offload-gradients SCRATCH --offload SCRATCH --offload-weights SCRATCH --loss-chunk-rows 1",
        ),
        ("t5-base", "", "--offload-gradients SCRATCH --offload SCRATCH --offload-weights SCRATCH --recompute none"),
        (
            "chatlm-0.2b",
            "",
            "--offload-gradients SCRATCH --offload SCRATCH --offload-weights SCRATCH --loss-chunk-rows 1",
        ),
        ("chatlm-0.2b", STOCHASTIC, "--offload-weights SCRATCH --kept-gradient-blocks 3"),
        ("chatlm-0.2b", "--precision bf16", ""),
        ("chatlm-0.2b", STOCHASTIC, "--offload SCRATCH"),
    ] {
        cases.push(steps(model, false, &format!("{FULL} {precision} {by_layer} {more}")));
    }
    cases
}

/// `eval` and `generate`.
fn answers() -> Vec<Case> {
    let mut cases = Vec::new();
    for model in ["tiny", "t5-small"] {
        cases.push(command("eval", model, Lengths::Full, "--samples 16 --generate-samples 8 --batch-samples 8"));
        cases.push(command("eval", model, Lengths::Full, "--samples 8 --generate-samples 2 --batch-samples 1"));
        cases.push(command("generate", model, Lengths::Full, "--max-new-tokens 128 --batch-samples 8"));
    }
    cases
}

const IN_FILES: &str = "train.precision=bf16 memory.weight_offload=disk memory.gradient_offload=disk";

/// LoRA and DoRA on a base in each precision, and on a base that stays in its files.
fn adapters(model: &'static str) -> Vec<Case> {
    let mut cases = Vec::new();
    let bases = [
        ("f32", ""),
        ("bf16", "train.precision=bf16"),
        ("int8", "train.precision=bf16 model.base_precision=int8"),
        ("nf4", "train.precision=bf16 model.base_precision=nf4"),
        ("bf16 in files, by block", &format!("{IN_FILES} memory.weights_at_a_time=block")),
        ("bf16 in files, by matrix", &format!("{IN_FILES} memory.weights_at_a_time=matrix")),
    ];
    for (kind, of_kind) in [("LoRA", ""), ("DoRA", "lora.dora=true")] {
        for (base, of_base) in bases {
            for command in ["train", "resume", "eval", "generate"] {
                let set = words(&format!("{of_kind} {of_base}"));
                let name = format!("{command} {model} {kind} {base}");
                cases.push(Case { name, what: What::Adapter { command, model, set }, quick: model == "tiny" });
            }
        }
    }
    cases
}

/// Samples of `tokens` tokens on either side.
fn long(tokens: usize) -> Vec<Case> {
    let stochastic = "--precision bf16 --master-weights stochastic-rounding";
    let step = |flags: &str| {
        let shape = format!("--batch 2 --source-tokens {tokens} --target-tokens {tokens}");
        steps("t5-small", false, &format!("{shape} {flags}"))
    };
    let by_layer = "--accumulation layer-major --micro-batch 1 --offload-gradients SCRATCH --offload SCRATCH";
    let run = format!(
        "train.batch_size=2 train.max_steps=1 train.eval_samples=4 train.eval_generate_samples=2 \
         train.eval_max_new_tokens={tokens} data.max_source_tokens={tokens} data.max_target_tokens={tokens}"
    );
    let evaluated = format!(
        "--samples 4 --generate-samples 2 --batch-samples 2 --set data.max_source_tokens={tokens} \
         --set data.max_target_tokens={tokens} --set train.eval_max_new_tokens={tokens}"
    );
    let asked = format!("--max-source-tokens {tokens} --max-new-tokens {tokens} --batch-samples 2");
    vec![
        step("--micro-batch 1"),
        step(&format!("{stochastic} --micro-batch 2 --recompute full")),
        step(&format!("{stochastic} {by_layer} --recompute none")),
        train(&format!("{tokens} tokens"), "t5-small", &run, Lengths::Long, false),
        command("eval", "t5-small", Lengths::Long, &evaluated),
        command("generate", "t5-small", Lengths::Long, &asked),
    ]
}
