//! The attacks of another user, as one table: what that user plants, exchanges or holds, and the command that root then runs.
//!
//! Words in a command or a script: `SHARED`, the directory in which the other user may make names; `VICTIM`, a private directory of root;
//! `MODEL` and `ADAPTER`, finished runs of root; `ROWS` and `TOKENIZER`, root's files. `NAME=VALUE` before a command is a variable of its
//! environment.

mod caches;

/// A run of one small step.
const RUN: &str = "--max-steps 1 --output SHARED/run --set train.batch_size=2 --set train.eval_samples=0 \
                   --set model.overrides={num_layers=1,num_decoder_layers=1,d_model=16,d_ff=32,d_kv=8,num_heads=2}";
/// A run of one small step on rows that are converted.
const CONVERTING: &str = "--max-steps 1 --output SHARED/run --set train.batch_size=2 --set train.eval_samples=0 \
                          --set data.train=ROWS --set model.config=tiny --set data.tokenizer=TOKENIZER \
                          --set model.overrides={num_layers=1,num_decoder_layers=1,d_model=16,d_ff=32,d_kv=8,num_heads=2}";
const RESUME: &str = "--keep-training --max-steps 2 --output SHARED/run";
/// A plan that converts rows in the directory for temporary files.
const PLAN: &str = "plan --set data.train=ROWS --set model.config=tiny --set data.tokenizer=TOKENIZER";
const CONVERT: &str = "convert ROWS --force --output SHARED/x.parquet";
const REPORT: &str = "report SHARED/run --output SHARED/x.html";
const EVAL: &str = "eval --model MODEL --data ROWS --samples 2 --generate-samples 0 --predictions SHARED/p.jsonl";
const SEARCH: &str = "eval --model MODEL --corpus SHARED/c.jsonl --queries SHARED/c.jsonl --qrels SHARED/j.tsv";
const SERVE: &str = "serve MODEL --listen 127.0.0.1:0 --access-log SHARED/log";
const EMBED: &str = "embed --model MODEL --input ROWS --text-column prompt --output SHARED/v.npy";
const SCORE: &str =
    "score --model MODEL --pairs ROWS --template {prompt}{response} --answers a,b --output SHARED/s.jsonl";
/// A step whose weights are in files.
const BENCH: &str = "bench --model tiny --batch 1 --source-tokens 4 --target-tokens 4 --steps 1 --offload SHARED";
/// Commands that use no file of this machine.
pub const WITHOUT_FILES: [&str; 2] = ["keys", "completions"];
/// A leftover's name.
const LEFT: &str = ".train_low_mem-tmp-0123456789abcdef";
/// Exchanges a directory for a link, again and again, until it is killed.
const EXCHANGES: &str = "while :; do mv -T A B 2>/dev/null && ln -s VICTIM A; rm -f A; mv -T B A 2>/dev/null; done";

/// The beginning of a model of another user, in which FILE is a link.
const LINKED_FILE: &str = "cp -r MODEL/model m; rm m/FILE; ln -s VICTIM/copy/FILE m/FILE";
/// What a refused link is called.
const LINK: &str = "is a symbolic link of user 65534";

/// An attack, and the command that it is made on.
pub struct Attack {
    /// The name, by which a try is found again.
    pub name: String,
    /// A command of root before, whose run everyone may then change.
    pub ahead: Option<&'static str>,
    /// What the other user does first, in the shared directory.
    pub before: String,
    /// What the other user does meanwhile.
    pub meanwhile: Option<String>,
    /// The command of root.
    pub command: String,
    /// Permissions of the shared directory.
    pub mode: u32,
    /// Whether the shared directory belongs to the other user.
    pub is_theirs: bool,
    /// The promised end.
    pub expected: Expected,
}

/// The end of a command that is attacked.
#[derive(Clone, Copy)]
pub enum Expected {
    /// Any documented one.
    Any,
    /// A refusal with these words.
    Refused(&'static str),
    /// A report of what was found, which can be a warning.
    Findings,
}

impl Attack {
    fn new(name: impl Into<String>, before: impl Into<String>, command: impl Into<String>) -> Self {
        let (name, before, command) = (name.into(), before.into(), command.into());
        let (ahead, meanwhile, expected) = (None, None, Expected::Any);
        Self { name, ahead, before, meanwhile, command, mode: 0o1777, is_theirs: false, expected }
    }

    /// The subcommand that is attacked.
    pub fn subcommand(&self) -> &str {
        match variables(&self.command).1.next() {
            Some(word) if !word.starts_with('-') => word,
            _ => "train",
        }
    }

    fn after(self, command: &'static str) -> Self {
        Self { ahead: Some(command), ..self }
    }

    fn meanwhile(self, script: impl Into<String>) -> Self {
        Self { meanwhile: Some(script.into()), ..self }
    }

    fn in_their_directory(self) -> Self {
        Self { is_theirs: true, mode: 0o777, ..self }
    }

    fn findings(self) -> Self {
        Self { expected: Expected::Findings, ..self }
    }

    fn refused(self, words: &'static str) -> Self {
        Self { expected: Expected::Refused(words), ..self }
    }
}

/// The variables `NAME=VALUE` at the beginning of a command, and its words behind them.
pub fn variables(command: &str) -> (impl Iterator<Item = (&str, &str)>, impl Iterator<Item = &str>) {
    let variable = |word: &'_ str| !word.starts_with('-') && word.contains('=');
    let words = || command.split_whitespace();
    let variables = words().take_while(move |word| variable(word)).filter_map(|word| word.split_once('='));
    (variables, words().skip_while(move |word| variable(word)))
}

/// All attacks, by what they are made on.
pub fn all() -> Vec<(&'static str, Vec<Attack>)> {
    vec![
        ("ledger", ledgers()),
        ("temporary files", temporary()),
        ("outputs", outputs()),
        ("a run that goes on", resumed()),
        ("answers that go on", caches::answers()),
        ("caches", caches::caches()),
        ("files that are read", read()),
        ("files", written()),
        ("every other path", named()),
        ("pipes in the place of links", pipes()),
    ]
}

/// The attacks with a link on a file that is read, with a pipe in its place: nothing waits for a writer.
fn pipes() -> Vec<Attack> {
    let with_pipe = |attack: Attack| {
        let (ahead, link) = attack.before.rsplit_once("ln -s VICTIM/")?;
        let name = link.split_once(' ').filter(|(_, name)| !name.contains(' '))?.1;
        let before = format!("{ahead}mkfifo {name}");
        Some(Attack { before, ..attack }.refused("error: "))
    };
    read()
        .into_iter()
        .chain(named())
        .filter(|attack| matches!(attack.expected, Expected::Refused(_)))
        .filter_map(with_pipe)
        .collect()
}

fn exchange(a: &str, b: &str) -> String {
    EXCHANGES.replace('A', a).replace('B', b)
}

fn ledgers() -> Vec<Attack> {
    let ledger = "mkdir train_low_mem-0 && cd train_low_mem-0";
    let of_another = "expected a directory of this user alone";
    vec![
        Attack::new("a link for the lock", format!("{ledger} && ln -s VICTIM/new lock"), "jobs").refused(of_another),
        Attack::new("a pipe for the lock", format!("{ledger} && mkfifo lock"), "jobs").refused(of_another),
        Attack::new("a lock that is held", format!("{ledger} && touch lock"), "jobs")
            .meanwhile("exec flock train_low_mem-0/lock sleep 60")
            .refused(of_another),
        Attack::new("a link to a directory of root", "ln -s VICTIM train_low_mem-0", "jobs").refused(of_another),
    ]
}

fn temporary() -> Vec<Attack> {
    let inside = format!("mkdir -p {LEFT}-run/checkpoints");
    vec![
        Attack::new("a link for an abandoned directory", format!("ln -s VICTIM {LEFT}-run"), PLAN),
        Attack::new(
            "an abandoned directory with a link",
            format!("mkdir {LEFT}-run && ln -s VICTIM {LEFT}-run/model"),
            PLAN,
        ),
        Attack::new("an abandoned directory that is exchanged", inside, PLAN)
            .meanwhile(exchange(&format!("{LEFT}-run/checkpoints"), &format!("{LEFT}-run/y"))),
        Attack::new("a directory that everyone may change", "true", PLAN)
            .in_their_directory()
            .refused("other users could exchange temporary files"),
        Attack::new("private rows", "true", PLAN).meanwhile(
            "while :; do cat .train_low_mem-tmp-*/data/*.parquet 2>/dev/null | grep -q . && touch was-read; done",
        ),
    ]
}

/// Entries of a new run's directory.
fn outputs() -> Vec<Attack> {
    let mut attacks = Vec::new();
    for name in [
        "metrics.jsonl",
        "report.html",
        "events.out.tfevents.0.train_low_mem",
        "resolved.toml",
        "finished.json",
        "page-map.bin",
        "checkpoints",
        "model",
        "data",
        "sample-data",
        ".lock",
    ] {
        let command = if name == "data" { CONVERTING } else { RUN };
        for (kind, plant) in [("link", "ln -s VICTIM/precious"), ("pipe", "mkfifo"), ("file", "touch")] {
            let before = format!("mkdir -m 777 run && {plant} run/{name}");
            attacks.push(Attack::new(format!("a {kind} for {name}"), before, command));
        }
    }
    attacks.push(Attack::new(
        "a link for data to a directory",
        "mkdir -m 777 run && ln -s VICTIM run/data",
        CONVERTING,
    ));
    attacks.push(
        Attack::new("an output that is exchanged", "true", RUN).in_their_directory().meanwhile(exchange("run", "y")),
    );
    attacks.push(Attack::new("a link to a directory of root", "ln -s VICTIM/step-00000001 run", RUN).refused(LINK));
    attacks
}

/// Entries of the directory of a run that root resumes, which everyone may change.
fn resumed() -> Vec<Attack> {
    let mut attacks = Vec::new();
    for name in [
        "resolved.toml",
        "metrics.jsonl",
        "finished.json",
        "page-map.bin",
        ".lock",
        "data/train-rows.json",
        "data/train-rows.parquet",
        "checkpoints/step-00000001/manifest.json",
        "checkpoints/step-00000001/model.safetensors",
        "model/model.safetensors",
    ] {
        for (kind, plant) in [("link", "ln -s VICTIM/precious"), ("pipe", "mkfifo"), ("file", "touch")] {
            let before = format!("rm run/{name}; {plant} run/{name}");
            let attack = Attack::new(format!("a {kind} for {name}"), before, RESUME).after(CONVERTING);
            attacks.push(match (name, kind) {
                ("resolved.toml", "file") => attack.refused("got a file of user 65534"),
                ("resolved.toml", "link") => {
                    attack.refused("expected a regular file, got a symbolic link of user 65534")
                }
                ("resolved.toml", _) => attack.refused("expected a regular file, got a pipe"),
                _ => attack,
            });
        }
    }
    for name in ["data", "checkpoints", "checkpoints/step-00000001", "model"] {
        let before = format!("mv run/{name} run/old; ln -s VICTIM/model run/{name}");
        attacks.push(Attack::new(format!("a link for {name}"), before, RESUME).after(CONVERTING));
        let attack = Attack::new(format!("{name} is exchanged"), "true", RESUME).after(CONVERTING);
        attacks.push(attack.meanwhile(exchange(&format!("run/{name}"), "run/y")));
    }
    let held = "exec flock run/.lock sleep 60";
    let attack = Attack::new("a lock that is held", "true", RESUME).after(CONVERTING).meanwhile(held);
    attacks.push(attack);
    attacks
}

/// Files of another user that root reads: a link in them must not lead to a file that only root may read.
fn read() -> Vec<Attack> {
    [read_rows(), read_directories(), read_models(), read_through_links()].into_iter().flatten().collect()
}

/// Files of rows, prompts, configs and lists, as each command names them.
fn read_rows() -> Vec<Attack> {
    let run = "mkdir run; echo > run/resolved.toml; ln -s VICTIM/metrics.jsonl run/metrics.jsonl";
    let rows = "ln -s VICTIM/rows.jsonl rows.jsonl";
    let searched =
        "ln -s VICTIM/rows.jsonl rows.jsonl; echo '{\"_id\":\"a\",\"text\":\"b\"}' > c.jsonl; echo a a 1 > j.tsv";
    let small = "--max-new-tokens 2";
    vec![
        Attack::new("report", run, REPORT).refused(LINK),
        Attack::new("report: a config", "cp -r MODEL run; ln -sf VICTIM/rows.jsonl run/resolved.toml", REPORT),
        Attack::new("report: a pipe", "mkdir run; mkfifo run/metrics.jsonl", REPORT).refused("a pipe"),
        Attack::new("watch", run, "watch SHARED/run").refused(LINK),
        Attack::new("convert", rows, "convert SHARED/rows.jsonl --output SHARED/x.parquet").refused(LINK),
        Attack::new("inspect", rows, "inspect SHARED/rows.jsonl").refused(LINK),
        Attack::new("train", rows, CONVERTING.replace("ROWS", "SHARED/rows.jsonl")).refused(LINK),
        Attack::new("eval: rows", rows, EVAL.replace("ROWS", "SHARED/rows.jsonl")).refused(LINK),
        Attack::new("eval: a corpus", searched, SEARCH.replacen("c.jsonl", "rows.jsonl", 1)).refused(LINK),
        Attack::new("eval: queries", searched, SEARCH.replace("--queries SHARED/c", "--queries SHARED/rows"))
            .refused(LINK),
        Attack::new("eval: judgements", searched, SEARCH.replace("j.tsv", "rows.jsonl")).refused(LINK),
        Attack::new("generate: prompts", rows, format!("generate --model MODEL --input SHARED/rows.jsonl {small}"))
            .refused(LINK),
        Attack::new(
            "train-tokenizer",
            rows,
            "train-tokenizer --input SHARED/rows.jsonl --vocab-size 400 --output SHARED/t",
        )
        .refused(LINK),
        Attack::new("plan: a config", rows, "plan --config SHARED/rows.jsonl").refused(LINK),
        Attack::new("jobs run", rows, "jobs run SHARED/rows.jsonl").refused(LINK),
        Attack::new("serve: keys", rows, "serve MODEL --listen 127.0.0.1:0 --api-key-file SHARED/rows.jsonl")
            .refused(LINK),
        Attack::new(
            "train: a tokenizer",
            "ln -s VICTIM/rows.jsonl t.json",
            CONVERTING.replace("TOKENIZER", "SHARED/t.json"),
        )
        .refused(LINK),
        Attack::new("embed: texts", rows, EMBED.replace("ROWS", "SHARED/rows.jsonl")).refused(LINK),
        Attack::new("score: pairs", rows, SCORE.replace("ROWS", "SHARED/rows.jsonl")).refused(LINK),
        Attack::new(
            "trim-vocab: rows",
            rows,
            "trim-vocab --model MODEL --keep-used SHARED/rows.jsonl --output SHARED/x",
        )
        .refused(LINK),
        Attack::new(
            "add-tokens: a list",
            "ln -s VICTIM/precious t.txt",
            "add-tokens --model MODEL --tokens SHARED/t.txt --output SHARED/x",
        )
        .refused(LINK),
        Attack::new(
            "add-tokens: rows",
            rows,
            "add-tokens --model MODEL --missing-in SHARED/rows.jsonl --output SHARED/x",
        )
        .refused(LINK),
    ]
}

/// Directories of another user in which root looks, puts weights, or finds a model.
fn read_directories() -> Vec<Attack> {
    let adapter = "cp -r ADAPTER/adapter m; rm m/FILE; ln -s VICTIM/copy/FILE m/FILE";
    vec![
        Attack::new("doctor", WAY, "doctor --quick --output SHARED/way").findings(),
        Attack::new(
            "doctor: links and pipes",
            format!("ln -s VICTIM {LEFT}-part-model; mkfifo {LEFT}"),
            "doctor --output SHARED",
        )
        .findings(),
        // The files have no names.
        Attack::new("bench: weights in files", WAY, BENCH.replace("SHARED", "SHARED/way")),
        Attack::new("bench: an exchanged directory", "mkdir -m 777 way", BENCH.replace("SHARED", "SHARED/way"))
            .in_their_directory()
            .meanwhile(exchange("way", "y")),
        Attack::new(
            "bench: a config",
            LINKED_FILE.replace("FILE", "config.json"),
            BENCH.replace("tiny", "SHARED/m/config.json"),
        )
        .refused(LINK),
        Attack::new(
            "merge",
            adapter.replace("FILE", "adapter_model.safetensors"),
            "merge --adapter SHARED/m --output SHARED/merged",
        )
        .refused(LINK),
    ]
}

/// Each file of a model that another user made a link.
fn read_models() -> Vec<Attack> {
    let mut attacks = Vec::new();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        for command in [
            "export --model SHARED/m --format gguf --output SHARED/x.gguf",
            "convert-base --model SHARED/m --precision int8 --output SHARED/base",
            "generate --model SHARED/m --prompt a --max-new-tokens 2",
            "eval --model SHARED/m --data ROWS --samples 2 --generate-samples 0",
            "serve SHARED/m --listen 127.0.0.1:0",
            "chat SHARED/m --max-new-tokens 2",
            "embed --model SHARED/m --input ROWS --text-column prompt --output SHARED/v.npy",
            "score --model SHARED/m --pairs ROWS --template {prompt}{response} --answers a,b",
            "average SHARED/m MODEL --output SHARED/x",
            "trim-vocab --model SHARED/m --keep-used ROWS --output SHARED/x",
            "add-tokens --model SHARED/m --tokens abc --output SHARED/x",
            "bench serve SHARED/m --batch 1 --source-tokens 4 --new-tokens 2",
        ] {
            // Its prompts are ids.
            if command.starts_with("bench") && file == "tokenizer.json" {
                continue;
            }
            let name = format!("{}: {file}", command.split(' ').next().unwrap_or_default());
            attacks.push(Attack::new(name, LINKED_FILE.replace("FILE", file), command).refused(LINK));
        }
    }
    attacks
}

/// Links in place of a directory of a model or of rows.
fn read_through_links() -> Vec<Attack> {
    let mut attacks = Vec::new();
    let few = "--max-steps 1 --output SHARED/run --set data.train=ROWS --set train.eval_samples=0";
    for command in [
        format!("{few} --model SHARED/m"),
        format!("{few} --model SHARED/m --lora"),
        "average SHARED/m MODEL --output SHARED/x".to_owned(),
        "export --model SHARED/m --format gguf --output SHARED/x.gguf".to_owned(),
        "convert-base --model SHARED/m --precision int8 --output SHARED/base".to_owned(),
    ] {
        let name = format!("a link to a model's directory: {command}");
        attacks.push(Attack::new(name, "ln -s VICTIM/copy m", command).refused(LINK));
    }
    for command in [
        "inspect SHARED/rows".to_owned(),
        "convert SHARED/rows --output SHARED/x.parquet".to_owned(),
        CONVERTING.replace("ROWS", "SHARED/rows"),
        EVAL.replace("ROWS", "SHARED/rows"),
        "train-tokenizer --input SHARED/rows --vocab-size 400 --output SHARED/t".to_owned(),
    ] {
        let name = format!("a link to a directory of rows: {command}");
        attacks.push(Attack::new(name, "ln -s VICTIM rows", command).refused(LINK));
    }
    attacks
}

/// Files that a command writes where everyone may make names.
fn written() -> Vec<Attack> {
    let named = |name: &str| format!("ln -s VICTIM/precious {name}; ln -s VICTIM {LEFT}-part-model; mkfifo {LEFT}");
    let mut attacks = vec![
        Attack::new("convert: a link on the way", WAY, "convert ROWS --output SHARED/way/new").refused(LINK),
        Attack::new("report: links and pipes", named("x.html"), REPORT),
        Attack::new("proof: a link", WAY, "proof --steps 2 --output SHARED/way").refused(LINK),
        Attack::new("proof: a link on the way", WAY, "proof --steps 2 --output SHARED/way/new").refused(LINK),
        Attack::new("proof: a pipe for the page", "mkdir -m 777 way; mkfifo way/proof.md", "proof --output SHARED/way")
            .refused("expected an empty directory"),
        Attack::new("jobs add: a link on the way", WAY, "jobs add SHARED/way/new --output x").refused(LINK),
        Attack::new("jobs run: a link for the log", "ln -s VICTIM/precious run.log", "jobs run LIST"),
        Attack::new("jobs run: a pipe for the log", "mkfifo run.log", "jobs run LIST"),
        Attack::new("serve: a link for the log", "ln -s VICTIM/precious log", SERVE).refused("--access-log"),
        Attack::new("serve: a pipe for the log", "mkfifo log", SERVE).refused("--access-log"),
        Attack::new("serve: a link on the way", WAY, SERVE.replace("SHARED", "SHARED/way")).refused(LINK),
    ];
    for (command, name) in [
        (CONVERT, "x.parquet"),
        (EVAL, "p.jsonl"),
        ("export --model MODEL --format ctranslate2 --force --output SHARED/x", "x"),
        ("merge --adapter ADAPTER --force --output SHARED/x", "x"),
        ("convert-base --model MODEL --precision nf4 --force --output SHARED/x", "x"),
        ("train-tokenizer --input ROWS --vocab-size 400 --force --output SHARED/x", "x"),
        (EMBED, "v.npy"),
        (SCORE, "s.jsonl"),
        ("average MODEL MODEL --force --output SHARED/x", "x"),
        ("trim-vocab --model MODEL --keep-used ROWS --force --output SHARED/x", "x"),
        ("add-tokens --model MODEL --tokens abc --force --output SHARED/x", "x"),
    ] {
        let word = command.split(' ').next().unwrap_or_default();
        attacks.push(Attack::new(format!("{word}: links and pipes for {name}"), named(name), command));
        let replaced = format!("mkfifo {name}");
        attacks.push(Attack::new(format!("{word}: a pipe for {name}"), replaced, command));
        let into = command.replace("SHARED", "SHARED/way");
        attacks.push(Attack::new(format!("{word}: a link on the way of {name}"), WAY, into).refused(LINK));
        let into = command.replace("SHARED", "SHARED/way");
        let attack = Attack::new(format!("{word}: the directory of {name} is exchanged"), "mkdir -m 777 way", into);
        attacks.push(attack.in_their_directory().meanwhile(exchange("way", "y")));
    }
    attacks
}

/// A model's weights that another user made a link.
const LINKED_MODEL: &str =
    "cp -r MODEL/model m; rm m/model.safetensors; ln -s VICTIM/copy/model.safetensors m/model.safetensors";
/// The same of an adapter.
const LINKED_ADAPTER: &str = "cp -r ADAPTER/adapter m; rm m/adapter_model.safetensors; ln -s VICTIM/copy/adapter_model.safetensors m/adapter_model.safetensors";
const LINKED_ROWS: &str = "ln -s VICTIM/rows.jsonl rows.jsonl";
const LINKED_TOKENIZER: &str = "ln -s VICTIM/copy/tokenizer.json t.json";
const WAY: &str = "ln -s VICTIM way";
/// Flags of `generate`.
const ANSWERS: &str = "--model MODEL --input ROWS --prompt-column prompt --max-new-tokens 2";

/// What other flags and keys name: configs, rows, models, adapters, tokenizers, directories for weights, and files that are written.
fn named() -> Vec<Attack> {
    [named_by_training(), named_by_answers(), named_to_write()].into_iter().flatten().collect()
}

/// What flags and keys of training and of its plan name.
fn named_by_training() -> Vec<Attack> {
    let preferences = "--max-steps 1 --output SHARED/run --set data.train=PREFERENCES --model MODEL";
    let mut attacks = Vec::new();
    for start in ["", "plan "] {
        let few = format!(
            "{start}--max-steps 1 --output SHARED/run --set data.train=ROWS --set train.eval_samples=0 --model MODEL"
        );
        let new = few.replace("--model MODEL", "--preset tiny --tokenizer SHARED/t.json");
        for (before, command) in [
            (LINKED_ROWS, format!("{few} --validation SHARED/rows.jsonl")),
            (LINKED_ROWS, few.replace("--set data.train=ROWS", "--data SHARED/rows.jsonl")),
            (LINKED_ROWS, format!("{few} --config SHARED/rows.jsonl")),
            (LINKED_TOKENIZER, new),
            (LINKED_ADAPTER, format!("{few} --lora --set lora.init_from=SHARED/m")),
            (
                LINKED_MODEL,
                format!("{start}{preferences} --set preference.loss=dpo --set preference.reference=SHARED/m"),
            ),
            (LINKED_MODEL, format!("{few} --set distill.teacher=SHARED/m")),
        ] {
            attacks.push(Attack::new(command.clone(), before, command).refused(LINK));
        }
        // A plan looks at the sizes of weights alone.
        let attack = Attack::new(format!("{start}a model"), LINKED_MODEL, few.replace("MODEL", "SHARED/m"));
        attacks.push(if start.is_empty() { attack.refused(LINK) } else { attack });
    }
    attacks
}

/// What flags of commands on a trained model name.
fn named_by_answers() -> Vec<Attack> {
    let mut attacks = Vec::new();
    for (before, command) in [
        (LINKED_ROWS, format!("{EVAL} --config SHARED/rows.jsonl")),
        (LINKED_ADAPTER, format!("{EVAL} --adapter SHARED/m")),
        (LINKED_ADAPTER, format!("generate {ANSWERS} --adapter SHARED/m")),
        (LINKED_ADAPTER, format!("{EMBED} --adapter SHARED/m")),
        (LINKED_ADAPTER, format!("{SCORE} --adapter SHARED/m")),
        (LINKED_ADAPTER, "chat MODEL --adapter a=SHARED/m".to_owned()),
        (LINKED_ADAPTER, "serve MODEL --listen 127.0.0.1:0 --adapter a=SHARED/m".to_owned()),
        (LINKED_ADAPTER, "export --model MODEL --adapter SHARED/m --format gguf --output SHARED/x.gguf".to_owned()),
        (LINKED_MODEL, "merge --adapter ADAPTER --model SHARED/m --output SHARED/x".to_owned()),
        (LINKED_MODEL, "chat --model SHARED/m".to_owned()),
        (LINKED_MODEL, "serve --model SHARED/m --listen 127.0.0.1:0".to_owned()),
        (LINKED_TOKENIZER, "inspect ROWS --tokenizer SHARED/t.json".to_owned()),
        (LINKED_TOKENIZER, "convert ROWS --output SHARED/x.parquet --tokenizer SHARED/t.json".to_owned()),
        (WAY, "plan --set data.train=ROWS --model MODEL --html SHARED/way/x.html".to_owned()),
        (WAY, format!("generate {ANSWERS} --output SHARED/way/x.jsonl")),
    ] {
        attacks.push(Attack::new(command.clone(), before, command).refused(LINK));
    }
    attacks
}

/// Directories for weights, and files that are written.
fn named_to_write() -> Vec<Attack> {
    let mut attacks = Vec::new();
    // The files have no names, so a link leads to no harm.
    let offload = "--offload-dir SHARED/way";
    let bench = BENCH.replace("--offload SHARED", "");
    for command in [
        format!("{EVAL} {offload}"),
        format!("generate {ANSWERS} {offload}"),
        format!("{EMBED} {offload}"),
        format!("{SCORE} {offload}"),
        format!("chat MODEL {offload}"),
        format!("serve MODEL --listen 127.0.0.1:99999 {offload}"),
        format!("{bench} --offload-gradients SHARED/way"),
        format!("{bench} --offload-weights SHARED/way"),
        format!("{bench} --offload-optimizer SHARED/way"),
    ] {
        attacks.push(Attack::new(command.clone(), WAY, command));
    }
    for (command, name) in [
        ("plan --set data.train=ROWS --model MODEL --html SHARED/x.html".to_owned(), "x.html"),
        (format!("generate {ANSWERS} --output SHARED/x.jsonl"), "x.jsonl"),
        ("chat MODEL --history SHARED/h".to_owned(), "h"),
        ("proof --steps 2 --output SHARED/new --program SHARED/p".to_owned(), "p"),
    ] {
        for (kind, plant) in [("link", "ln -s VICTIM/precious"), ("pipe", "mkfifo"), ("file", "touch")] {
            attacks.push(Attack::new(
                format!("a {kind}: {command}"),
                format!("{plant} {name} || true"),
                command.clone(),
            ));
        }
    }
    attacks
}
