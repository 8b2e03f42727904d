//! Every flag of the commands beside training has an effect, or the command says why not.
//!
//! The list of flags is the one that `--help` prints, so a new flag needs a row here. A row runs its command twice, without and with the
//! flag: what it prints, its exit code or its files differ then, or standard error names the flag. Flags whose effect needs another
//! situation name a file that uses them there. The flags of `train` and `plan` set keys, which `effects.rs` sweeps.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::run::{Scene, repository, short};

/// A command, a flag, its value, and the flags beside it.
type Row = (&'static str, &'static str, &'static [&'static str], &'static [&'static str]);

const DRY: &[&str] = &["--dry-run"];
const TOKENIZER: &[&str] = &["--tokenizer", "run/model"];

#[rustfmt::skip]
const ROWS: &[Row] = &[
    ("eval", "--model", &["nosuch"], &[]),
    ("eval", "--data", &["nosuch"], &[]),
    ("eval", "--config", &["other.toml"], &[]),
    ("eval", "--prompt-column", &["other"], &[]),
    ("eval", "--response-column", &["other"], &[]),
    ("eval", "--source-template", &["{prompt} {other}"], &[]),
    ("eval", "--target-template", &["{other}"], &[]),
    ("eval", "--source-lang", &["other"], &["--target-lang", "response"]),
    ("eval", "--target-lang", &["other"], &["--source-lang", "prompt"]),
    ("eval", "--text-column", &["other"], &[]),
    ("eval", "--encoding", &["gb18030"], &[]),
    ("eval", "--quoting", &["none"], &[]),
    ("eval", "--samples", &["2"], &[]),
    ("eval", "--generate-samples", &["1"], &[]),
    ("eval", "--metrics", &["chrf"], &[]),
    ("eval", "--predictions", &["p.jsonl"], &[]),
    ("eval", "--batch-samples", &["3"], DRY),
    ("eval", "--show", &["1"], &[]),
    ("eval", "--show-wrong", &["2"], &["--show", "0"]),
    ("eval", "--bleu-tokenizer", &["char"], &[]),
    ("eval", "--rouge-stemmer", &[], &[]),
    ("eval", "--precision", &["bf16"], &[]),
    ("eval", "--set", &["data.max_source_tokens=2"], &[]),
    ("eval", "--adapter", &["nosuch"], &[]),
    ("eval", "--memory-budget", &["1MiB"], &[]),
    ("eval", "--device-memory-budget", &["1GiB"], &["--device", "cpu"]),
    ("eval", "--dry-run", &[], &[]),
    ("eval", "--device", &["cuda:7"], &[]),
    ("eval", "--json", &[], &[]),
    ("eval", "--num-beams", &["3"], DRY),
    ("eval", "--length-penalty", &["5"], &[]),
    ("eval", "--early-stopping", &["true"], &[]),
    ("eval", "--temperature", &["50"], &[]),
    ("eval", "--top-k", &["5"], &[]),
    ("eval", "--top-p", &["0.5"], &[]),
    ("eval", "--seed", &["3"], &[]),
    ("eval", "--repetition-penalty", &["50"], &[]),
    ("eval", "--no-repeat-ngram", &["1"], &[]),
    ("generate", "--model", &["nosuch"], &[]),
    ("generate", "--prompt", &["why"], &[]),
    ("generate", "--input", &["nosuch"], &[]),
    ("generate", "--prompt-column", &["other"], &[]),
    ("generate", "--source-template", &["{prompt} {other}"], &[]),
    ("generate", "--encoding", &["gb18030"], &[]),
    ("generate", "--quoting", &["none"], &[]),
    ("generate", "--num-return-sequences", &["2"], &["--num-beams", "2"]),
    ("generate", "--max-source-tokens", &["2"], &["--json"]),
    ("generate", "--batch-samples", &["1"], &["--dry-run", "--prompt", "why"]),
    ("generate", "--precision", &["bf16"], &["--json", "--scores"]),
    ("generate", "--adapter", &["nosuch"], &[]),
    ("generate", "--memory-budget", &["1MiB"], &[]),
    ("generate", "--device-memory-budget", &["1GiB"], &["--device", "cpu"]),
    ("generate", "--offload-dir", &["nosuch"], &[]),
    ("generate", "--dry-run", &[], &[]),
    ("generate", "--device", &["cuda:7"], &[]),
    ("generate", "--json", &[], &[]),
    ("generate", "--scores", &[], &["--json"]),
    ("generate", "--length-penalty", &["5"], &[]),
    ("generate", "--early-stopping", &["true"], &[]),
    ("generate", "--temperature", &["50"], &[]),
    ("generate", "--seed", &["3"], &[]),
    ("inspect", "--prompt-column", &["nosuch"], &[]),
    ("inspect", "--response-column", &["other"], &[]),
    ("inspect", "--source-template", &["{prompt} {other}"], &[]),
    ("inspect", "--target-template", &["{other}"], &[]),
    ("inspect", "--source-lang", &["other"], &[]),
    ("inspect", "--target-lang", &["other"], &[]),
    ("inspect", "--text-column", &["other"], &[]),
    ("inspect", "--encoding", &["gb18030"], &[]),
    ("inspect", "--quoting", &["none"], &[]),
    ("inspect", "--rows", &["2"], &[]),
    ("inspect", "--show", &["1"], &[]),
    ("inspect", "--tokenizer", &["run/model"], &[]),
    ("inspect", "--max-source-tokens", &["2"], &[]),
    ("inspect", "--max-target-tokens", &["2"], TOKENIZER),
    ("inspect", "--memory-budget", &["1MiB"], &[]),
    ("inspect", "--json", &[], &[]),
    ("convert", "--prompt-column", &["other"], &[]),
    ("convert", "--response-column", &["other"], &[]),
    ("convert", "--source-template", &["{prompt} {other}"], &[]),
    ("convert", "--target-template", &["{other}"], &[]),
    ("convert", "--source-lang", &["other"], &[]),
    ("convert", "--target-lang", &["other"], &[]),
    ("convert", "--text-column", &["other"], &[]),
    ("convert", "--encoding", &["gb18030"], &[]),
    ("convert", "--quoting", &["none"], &[]),
    ("convert", "--source-prefix", &["summarize: "], &[]),
    ("convert", "--validation-split", &["2"], &[]),
    ("convert", "--seed", &["7"], &[]),
    ("convert", "--tokenizer", &["run/model"], &[]),
    ("convert", "--max-source-tokens", &["2"], &[]),
    ("convert", "--max-target-tokens", &["2"], TOKENIZER),
    ("convert", "--memory-budget", &["1MiB"], &[]),
    ("convert", "--json", &[], &[]),
    ("train-tokenizer", "--input", &["nosuch"], &[]),
    ("train-tokenizer", "--vocab-size", &["10"], &[]),
    ("train-tokenizer", "--columns", &["nosuch"], &[]),
    ("train-tokenizer", "--encoding", &["gb18030"], &[]),
    ("train-tokenizer", "--quoting", &["none"], &[]),
    ("train-tokenizer", "--sentinels", &["300"], &[]),
    ("train-tokenizer", "--memory-budget", &["1MiB"], &[]),
    ("chat", "--model", &["nosuch"], &[]),
    ("chat", "--adapter", &["name=nosuch"], &[]),
    ("chat", "--memory-budget", &["1MiB"], &[]),
    ("chat", "--device-memory-budget", &["1GiB"], &["--device", "cpu"]),
    ("chat", "--offload-dir", &["nosuch"], &[]),
    ("chat", "--device", &["cuda:7"], &[]),
    ("chat", "--max-new-tokens", &["999"], &[]),
    ("chat", "--max-source-tokens", &["900"], &[]),
    ("chat", "--precision", &["bf16"], &[]),
    ("chat", "--max-beams", &["1"], &[]),
    ("serve", "--model", &["nosuch"], &[]),
    ("serve", "--adapter", &["name=nosuch"], &[]),
    ("serve", "--memory-budget", &["1MiB"], &[]),
    ("serve", "--device-memory-budget", &["1GiB"], &["--device", "cpu"]),
    ("serve", "--offload-dir", &["nosuch"], &[]),
    ("serve", "--device", &["cuda:7"], &[]),
    ("serve", "--max-new-tokens", &["999"], &[]),
    ("serve", "--max-source-tokens", &["900"], &[]),
    ("serve", "--precision", &["bf16"], &[]),
    ("serve", "--batch-samples", &["1"], &[]),
    ("serve", "--max-body", &["9MiB"], &[]),
    ("serve", "--max-rows", &["7"], &[]),
    ("serve", "--queue", &["5"], &[]),
    ("serve", "--connections", &["7"], &[]),
    ("embed", "--model", &["nosuch"], &[]),
    ("embed", "--adapter", &["nosuch"], &[]),
    ("embed", "--input", &["nosuch"], &[]),
    ("embed", "--text-column", &["other"], &[]),
    ("embed", "--encoding", &["gb18030"], &[]),
    ("embed", "--quoting", &["none"], &[]),
    ("embed", "--source-prefix", &["query: "], &[]),
    ("embed", "--pooling", &["last"], &[]),
    ("embed", "--normalize", &[], &[]),
    ("embed", "--max-source-tokens", &["2"], &[]),
    ("embed", "--batch-samples", &["1"], DRY),
    ("embed", "--precision", &["bf16"], &[]),
    ("embed", "--memory-budget", &["1MiB"], &[]),
    ("embed", "--device-memory-budget", &["1GiB"], &["--device", "cpu"]),
    ("embed", "--offload-dir", &["nosuch"], &[]),
    ("embed", "--dry-run", &[], &[]),
    ("embed", "--device", &["cuda:7"], &[]),
    ("trim-vocab", "--model", &["nosuch"], &[]),
    ("trim-vocab", "--keep-used", &["nosuch"], &[]),
    ("trim-vocab", "--keep-scripts", &["Latin"], &[]),
    ("trim-vocab", "--keep-top", &["10"], &[]),
    ("trim-vocab", "--prompt-column", &["other"], &[]),
    ("trim-vocab", "--response-column", &["other"], &[]),
    ("trim-vocab", "--source-template", &["{prompt} {other}"], &[]),
    ("trim-vocab", "--target-template", &["{other}"], &[]),
    ("trim-vocab", "--source-lang", &["other"], &[]),
    ("trim-vocab", "--target-lang", &["other"], &[]),
    ("trim-vocab", "--text-column", &["other"], &[]),
    ("trim-vocab", "--encoding", &["gb18030"], &[]),
    ("trim-vocab", "--quoting", &["none"], &[]),
    ("trim-vocab", "--memory-budget", &["1MiB"], &[]),
    ("trim-vocab", "--source-prefix", &["zebra: "], &[]),
    ("trim-vocab", "--json", &[], &[]),
];

/// Flags whose effect needs another situation, and a file that uses them there.
#[rustfmt::skip]
const ELSEWHERE: &[(&str, &[&str], &str)] = &[
    ("eval", &["--offload-dir"], "tests/inference.rs"),
    ("eval", &["--corpus", "--queries", "--qrels", "--query-prefix", "--passage-prefix"], "tests/embedding.rs"),
    ("eval", &["--threads"], "tests/flags.rs"),
    ("eval", &["--max-new-tokens", "--sample", "--min-new-tokens", "--keep-special-tokens"], "docs/generation.md"),
    ("generate", &["--threads"], "tests/flags.rs"),
    ("generate", &["--num-beams", "--max-new-tokens", "--stop", "--stream", "--output", "--best-of", "--response-column"], "tests/answers.rs"),
    ("generate", &["--sample", "--top-k", "--top-p", "--repetition-penalty", "--no-repeat-ngram", "--min-new-tokens", "--keep-special-tokens"], "docs/generation.md"),
    ("inspect", &["--threads"], "tests/flags.rs"),
    ("convert", &["--output", "--clean", "--deduplicate", "--bad-rows", "--force"], "tests/convert.rs"),
    ("convert", &["--threads"], "tests/flags.rs"),
    ("train-tokenizer", &["--output", "--force"], "crates/command/src/commands/train_tokenizer.rs"),
    ("train-tokenizer", &["--threads"], "tests/flags.rs"),
    ("average", &["--output", "--force", "--json"], "tests/merge.rs"),
    ("merge", &["--adapter", "--model", "--output", "--dtype", "--force", "--json"], "tests/merge.rs"),
    ("export", &["--model", "--adapter", "--format", "--dtype", "--output", "--gguf-names", "--force", "--json"], "tests/export.rs"),
    ("chat", &["--dry-run", "--num-beams"], "tests/chat.rs"),
    ("chat", &["--history"], "crates/command/src/commands/chat/mod.rs"),
    ("chat", &["--threads"], "tests/flags.rs"),
    ("chat", &["--sample", "--temperature", "--top-k", "--top-p", "--seed", "--repetition-penalty", "--no-repeat-ngram", "--min-new-tokens", "--keep-special-tokens", "--length-penalty", "--early-stopping"], "docs/generation.md"),
    ("serve", &["--listen", "--api-key-file", "--access-log", "--prompt-overflow", "--dry-run"], "tests/serve.rs"),
    ("serve", &["--model-name", "--threads"], "tests/flags.rs"),
    ("serve", &["--num-beams", "--without-key", "--allow-host", "--drain-timeout", "--request-timeout"], "docs/serve.md"),
    ("serve", &["--sample", "--temperature", "--top-k", "--top-p", "--seed", "--repetition-penalty", "--no-repeat-ngram", "--min-new-tokens", "--keep-special-tokens", "--length-penalty", "--early-stopping"], "docs/generation.md"),
    ("bench", &["--model", "--batch", "--source-tokens", "--target-tokens", "--precision", "--steps", "--json", "--profile", "--micro-batch", "--recompute"], "tests/other_commands.rs"),
    ("bench", &["--device", "--lora"], "tests/recorded_steps.rs"),
    ("bench", &["--memory-budget", "--device-memory-budget", "--offload", "--offload-to"], "crates/command/src/commands/bench.rs"),
    ("bench", &["--accumulation", "--blocks-in-memory", "--copy-overlap", "--gradient-precision", "--kept-gradient-blocks", "--loss-chunk-rows", "--master-weights"], "tests/effects.rs"),
    ("bench", &["--offload-gradients", "--offload-weights"], "tests/wrong_input.rs"),
    ("bench", &["--keep-heads"], "crates/command/src/cli/lever_flags.rs"),
    ("bench", &["--offload-optimizer"], "crates/planner/src/levers.rs"),
    ("bench serve", &["--batch", "--json", "--memory-budget", "--new-tokens", "--num-beams", "--rounds", "--source-tokens"], "tests/serve.rs"),
    ("bench serve", &["--device", "--precision"], "crates/command/src/commands/bench_serve.rs"),
    ("jobs", &["--json"], "tests/jobs.rs"),
    ("jobs run", &["--json"], "tests/jobs.rs"),
    ("jobs add", &["--output", "--priority", "--sweep", "--set", "--json"], "tests/jobs.rs"),
    ("jobs add", &["--config"], "crates/command/src/cli/job_flags.rs"),
    ("doctor", &["--json", "--output", "--quick", "--server"], "tests/doctor.rs"),
    ("proof", &["--output", "--steps", "--seed", "--program", "--torch", "--python"], "tests/proof.rs"),
    ("embed", &["--output", "--json"], "tests/embed.rs"),
    ("embed", &["--threads"], "tests/flags.rs"),
    ("trim-vocab", &["--output", "--force"], "tests/vocabulary.rs"),
    ("trim-vocab", &["--threads"], "tests/flags.rs"),
    ("add-tokens", &["--model", "--tokens", "--missing-in", "--output", "--force", "--json", "--memory-budget"], "tests/vocabulary.rs"),
    ("add-tokens", &["--prompt-column", "--response-column", "--source-template", "--target-template", "--source-lang", "--target-lang", "--text-column", "--encoding", "--quoting"], "crates/command/src/cli/row_flags.rs"),
    ("score", &["--model", "--pairs", "--answers", "--query-column", "--output", "--json"], "tests/ranking.rs"),
    ("score", &["--adapter", "--template", "--label-column", "--max-source-tokens", "--batch-samples", "--precision", "--dry-run", "--device"], "crates/command/src/commands/score.rs"),
    ("score", &["--encoding", "--quoting"], "crates/command/src/cli/row_flags.rs"),
    ("score", &["--memory-budget", "--device-memory-budget", "--offload-dir"], "crates/command/src/cli/answer_flags.rs"),
    ("report", &["--output"], "tests/views.rs"),
    ("convert-base", &["--model", "--precision", "--output", "--force", "--json"], "tests/convert_base.rs"),
];

/// Commands whose flags set keys.
const SET_KEYS: [&str; 2] = ["train", "plan"];

/// The commands that the help of the program lists.
fn commands(scene: &Scene) -> Vec<String> {
    let help = scene.run(&["--help"]).expect_code(0).out;
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let first = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    first.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).filter(|name| name != "help").collect()
}

/// The flags that the help of a command lists.
fn flags_of(scene: &Scene, command: &str) -> BTreeSet<String> {
    let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
    let help = scene.run(&words).expect_code(0).out;
    let first = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    let flags = first.filter_map(|line| line.split([' ', ',', '=', '[']).find(|word| word.starts_with("--")));
    flags.filter(|flag| *flag != "--help").map(str::to_owned).collect()
}

/// The usual arguments of a command.
fn usual(command: &str, output: &str) -> Vec<String> {
    let words = match command {
        "eval" => "eval --model run --data rows.csv --samples 4".to_owned(),
        "embed" => format!("embed --model run/model --input rows.csv --text-column response --output {output}.npy"),
        "trim-vocab" => format!("trim-vocab --model run/model --keep-used rows.csv --output {output}"),
        "generate" => "generate --model run/model --max-new-tokens 4 --prompt how".to_owned(),
        "inspect" => "inspect rows.csv".to_owned(),
        "chat" => "chat --model run/model --dry-run".to_owned(),
        "serve" => "serve --model run/model --dry-run".to_owned(),
        "convert" => format!("convert rows.csv --output {output}.parquet"),
        _ => format!("train-tokenizer --input rows.csv --vocab-size 380 --output {output}.json"),
    };
    words.split(' ').map(str::to_owned).collect()
}

/// What a command printed and wrote, without its times and its memory.
fn see(scene: &Scene, row: &Row, output: &str, with: &[&str]) -> (Option<i32>, String, Vec<u8>, String) {
    let (command, flag, ..) = *row;
    let mut arguments = usual(command, output);
    if !with.is_empty()
        && let Some(place) = arguments.iter().position(|word| word == flag).filter(|_| flag != "--prompt")
    {
        arguments.drain(place..place + 2);
    }
    arguments.extend(with.iter().map(ToString::to_string));
    let ran = scene.run(&[arguments, row.3.iter().map(ToString::to_string).collect()].concat());
    // Of a bill, the rows that no memory of this process is in.
    let is_steady = |line: &&str| {
        let of_process = ["process ", "total ", "memory);"].iter().any(|word| line.trim_start().starts_with(word));
        !of_process && !["peak", "budget", "available", "seconds"].iter().any(|word| line.contains(word))
    };
    let is_share = |word: &&str| word.contains('█') || *word == "%" || word.parse::<u8>().is_ok();
    let words = |line: &str| line.split_whitespace().filter(|word| !is_share(word)).collect::<Vec<_>>().join(" ");
    let out = ran.out.replace(output, "");
    let out = match ran.out.starts_with("Memory plan") {
        true => out.lines().filter(is_steady).map(words).collect::<Vec<_>>().join("\n"),
        false => out.lines().filter(is_steady).collect::<Vec<_>>().join("\n"),
    };
    let files = ["parquet", "json", "npy"]
        .into_iter()
        .filter_map(|ending| std::fs::read(scene.path(&format!("{output}.{ending}"))).ok());
    (ran.code, out, files.flatten().collect(), ran.err)
}

#[test]
fn every_flag_changes_something_or_the_command_says_why_not() {
    let scene = Scene::new();
    let listed: BTreeSet<&str> = ROWS.iter().map(|row| row.0).chain(ELSEWHERE.iter().map(|row| row.0)).collect();
    for command in commands(&scene) {
        let has_flags = flags_of(&scene, &command).iter().any(|flag| flag != "--threads");
        assert!(!has_flags || SET_KEYS.contains(&&*command) || listed.contains(&*command), "`{command}` needs rows");
    }
    for command in listed {
        let is_tool = !ROWS.iter().any(|row| row.0 == command);
        for flag in flags_of(&scene, command).into_iter().filter(|flag| !is_tool || flag != "--threads") {
            let here = ROWS.iter().filter(|row| row.0 == command && row.1 == flag).count();
            let elsewhere = ELSEWHERE.iter().filter(|row| row.0 == command && row.1.contains(&flag.as_str()));
            let files: Vec<&str> = elsewhere.map(|row| row.2).collect();
            assert_eq!(here + files.len(), 1, "`{command} {flag}` needs one row that shows its effect");
            for file in files {
                let text =
                    std::fs::read_to_string(repository().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
                let name = flag.trim_start_matches('-');
                assert!(
                    [name.to_owned(), name.replace('-', "_")].iter().any(|name| text.contains(name)),
                    "{file} does not have `{flag}`"
                );
            }
        }
    }
    scene.run(&short(&["--max-steps", "1"])).expect_code(0);
    scene.write(
        "rows.csv",
        "prompt,response,other\nhow many legs have cats,4 legs,the sun\n\"say \"\"yes\"\"\",\"yes, é\",moon\nwhat is two,two,a star\nRunning,run,mars\na,b,c\n",
    );
    scene.write("other.toml", "[data]\nmax_source_tokens = 2\n");
    let (next, silent) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(row) = ROWS.get(number) else { break };
            let (command, flag, value, beside) = *row;
            let base = see(&scene, row, &format!("base{number}"), &[]);
            let seen = see(&scene, row, &format!("with{number}"), &[&[flag], value].concat());
            let is_sound = base.0 == Some(0) || seen.0 == Some(0);
            let is_changed = (seen.0, &seen.1, &seen.2) != (base.0, &base.1, &base.2)
                || scene.path("p.jsonl").exists() && flag == "--predictions";
            let name = flag.trim_start_matches('-');
            let is_said = [name.to_owned(), name.replace('-', "_")]
                .iter()
                .any(|name| seen.3.contains(name) && !base.3.contains(name));
            if !(is_sound && (is_changed || is_said)) {
                silent.lock().expect("no panic").push(format!(
                    "{command} {flag} {value:?} beside {beside:?}: {:?} {:?} {}{}",
                    base.0, seen.0, base.3, seen.3
                ));
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
    let silent = silent.into_inner().expect("no panic");
    assert!(silent.is_empty(), "{} flags have no effect and no word:\n{}", silent.len(), silent.join("\n"));
}
