//! `bench memory`: compares the predicted peak with the peak that the kernel counts.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::cases::{self, Case, What};
use super::child::{self, Measured};
use super::data::{self, Lengths};
use super::{Options, mib, write_tables};

/// One finished case.
struct Row {
    name: String,
    predicted: u64,
    measured: u64,
    seconds: f64,
}

impl Row {
    /// The prediction's error in percent of the measured peak; positive if the prediction is higher.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    fn error_percent(&self) -> f64 {
        100.0 * (self.predicted as f64 - self.measured as f64) / self.measured as f64
    }
}

/// Runs the cases and writes the tables.
pub fn run(options: &Options) -> Result<(), String> {
    let chosen = cases::all();
    let chosen = chosen.iter().filter(|case| case.name.contains(&options.filter) && (case.quick || !options.quick));
    let mut rows: Vec<Row> = Vec::new();
    for case in chosen {
        let directory = options.scratch.join("case");
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        match measure(options, case, &directory) {
            Ok((predicted, measured)) => {
                let row = Row {
                    name: case.name.clone(),
                    predicted,
                    measured: measured.peak_bytes,
                    seconds: measured.seconds,
                };
                println!(
                    "{:6.1} %  predicted {:8.1} MiB  measured {:8.1} MiB  {:5.1} s  {}",
                    row.error_percent(),
                    mib(row.predicted),
                    mib(row.measured),
                    row.seconds,
                    row.name
                );
                rows.push(row);
            }
            Err(problem) => println!("   FAILED  {}: {problem}", case.name),
        }
        let _ = fs::remove_dir_all(&directory);
    }
    if rows.is_empty() {
        return Err("no case was measured".to_owned());
    }
    let errors = rows.iter().map(|row| row.error_percent().abs());
    let worst = errors.clone().fold(0.0, f64::max);
    #[expect(clippy::cast_precision_loss, reason = "a count of cases")]
    let average = errors.sum::<f64>() / rows.len() as f64;
    println!("{} cases: error {worst:.1} % at worst, {average:.1} % on average", rows.len());
    let cases: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({"case": row.name, "predicted_bytes": row.predicted, "measured_bytes": row.measured,
                   "error_percent": row.error_percent()})
        })
        .collect();
    let json = json!({"cases": cases, "worst_percent": worst, "average_percent": average});
    write_tables(options, &markdown(&rows, worst, average), &json)
}

fn markdown(rows: &[Row], worst: f64, average: f64) -> String {
    let mut text = format!(
        "# Predicted and measured peaks\n\nThe command prints the predicted peak before it allocates anything large. The measured peak is the\n\
         kernel's `VmHWM` of the whole process at its end.\n\n\
         {} cases: the error is {worst:.1} % at worst and {average:.1} % on average.\n\n\
         | case | predicted MiB | measured MiB | error |\n| --- | --- | --- | --- |\n",
        rows.len()
    );
    for row in rows {
        let (predicted, measured) = (mib(row.predicted), mib(row.measured));
        text += &format!("| {} | {predicted:.1} | {measured:.1} | {:+.1} % |\n", row.name, row.error_percent());
    }
    text
}

/// Runs a case; returns the predicted peak and the measurements.
fn measure(options: &Options, case: &Case, directory: &Path) -> Result<(u64, Measured), String> {
    match &case.what {
        What::Steps(flags) => {
            let flags = flags.iter().map(|flag| flag.replace("SCRATCH", &text(directory)));
            let arguments: Vec<String> = ["bench", "--json"].map(str::to_owned).into_iter().chain(flags).collect();
            said_on_stdout(done(options, &arguments)?)
        }
        What::Train { model, set, rows, resume } => {
            let output = directory.join("run");
            if *resume {
                let mut first = set.clone();
                first.push("train.max_steps=1".to_owned());
                done(options, &train_arguments(model, &first, *rows, directory, &output)?)?;
            }
            let mut arguments = train_arguments(model, set, *rows, directory, &output)?;
            if *resume {
                arguments.push("--keep-training".to_owned());
            }
            let measured = done(options, &arguments)?;
            Ok((planned_peak(&output)?, measured))
        }
        What::Command { command, model, rows, flags } => {
            let base = new_model(options, model, *rows, directory)?;
            ask(options, command, (&base, flags), *rows, directory)
        }
        What::Adapter { command, model, set } => {
            let base = new_model(options, model, Lengths::Full, directory)?;
            let output = directory.join("adapted");
            let tune = |steps: u64, more: &[&str]| {
                let of_run = [
                    "train.batch_size=4",
                    "train.eval_samples=4",
                    "train.eval_generate_samples=2",
                    "lora.rank=16",
                    "train.eval_max_new_tokens=64",
                    "data.max_source_tokens=128",
                    "data.max_target_tokens=128",
                ];
                let of_run = of_run.map(str::to_owned).into_iter().chain(set.iter().cloned());
                let of_run =
                    of_run.chain([format!("train.max_steps={steps}"), format!("model.init_from={}", text(&base))]);
                let mut arguments =
                    train_arguments(model, &of_run.collect::<Vec<_>>(), Lengths::Full, directory, &output)?;
                arguments.extend(more.iter().map(|&word| word.to_owned()));
                done(options, &arguments)
            };
            let measured = tune(if *command == "train" { 2 } else { 1 }, &[])?;
            match *command {
                "train" => Ok((planned_peak(&output)?, measured)),
                "resume" => {
                    let measured = tune(3, &["--keep-training"])?;
                    Ok((planned_peak(&output)?, measured))
                }
                command => {
                    let flags: &[&str] = match command {
                        "eval" => &["--samples", "16", "--generate-samples", "8", "--batch-samples", "8"],
                        _ => &["--max-new-tokens", "64", "--batch-samples", "8"],
                    };
                    let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
                    ask(options, command, (&output, &flags), Lengths::Full, directory)
                }
            }
        }
    }
}

/// Makes a new model of a preset by a short run, and returns its directory.
fn new_model(options: &Options, model: &str, rows: Lengths, directory: &Path) -> Result<PathBuf, String> {
    let output = directory.join("run");
    let set = ["train.max_steps=1", "train.batch_size=1", "data.max_source_tokens=16", "data.max_target_tokens=16"];
    done(options, &train_arguments(model, &set.map(str::to_owned), rows, directory, &output)?)?;
    Ok(output.join("model"))
}

/// Runs `eval` or `generate` of a model, with more flags.
fn ask(
    options: &Options,
    command: &str,
    (model, flags): (&Path, &[String]),
    lengths: Lengths,
    directory: &Path,
) -> Result<(u64, Measured), String> {
    let rows = data::write(directory, lengths)?;
    let mut arguments = vec![command.to_owned(), "--json".to_owned(), "--model".to_owned(), text(model)];
    match command {
        "eval" => arguments.extend(["--data".to_owned(), text(&rows)]),
        _ => {
            let prompts = directory.join("prompts.txt");
            let (times, lines) = if lengths == Lengths::Long { (1700, 4) } else { (400, 16) };
            let lines = vec!["seven twelve apple ".repeat(times); lines].join("\n");
            fs::write(&prompts, lines).map_err(|error| error.to_string())?;
            arguments.extend(["--input".to_owned(), text(&prompts)]);
        }
    }
    arguments.extend(flags.iter().cloned());
    if command == "generate" {
        arguments.extend(["--memory-budget", "8GiB"].map(str::to_owned));
        return said_on_stderr(done(options, &arguments)?);
    }
    said_on_stdout(done(options, &arguments)?)
}

/// Arguments of a training run over generated rows, with the sample data's tokenizer.
pub fn train_arguments(
    model: &str,
    set: &[String],
    rows: Lengths,
    directory: &Path,
    output: &Path,
) -> Result<Vec<String>, String> {
    let rows = text(&data::write(directory, rows)?);
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/sample-tokenizer.json");
    // A config file keeps out the embedded default, whose settings suit only its own tiny model.
    let config = directory.join("config.toml");
    let written = format!(
        "[model]\nconfig = {model:?}\nvocab_size = {}\n[data]\ntrain = [{rows:?}]\nvalidation = [{rows:?}]\ntokenizer = {:?}\n",
        vocabulary(model),
        text(&tokenizer)
    );
    fs::write(&config, written).map_err(|error| format!("{}: {error}", config.display()))?;
    let mut arguments = vec!["train".to_owned(), "--config".to_owned(), text(&config)];
    arguments.extend(["--output".to_owned(), text(output)]);
    set.iter().for_each(|set| arguments.extend(["--set".to_owned(), set.clone()]));
    Ok(arguments)
}

/// The vocabulary size of the published model; the sample tokenizer uses its first entries.
fn vocabulary(model: &str) -> usize {
    match model {
        "tiny" => 4096,
        "chatlm-0.2b" => 29_298,
        _ => 32_128,
    }
}

/// The peak that the newest plan of a run predicted.
pub fn planned_peak(output: &Path) -> Result<u64, String> {
    let path: PathBuf = output.join("metrics.jsonl");
    let metrics = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut events = metrics.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let plan = events.find(|event| event["event"] == "plan");
    plan.and_then(|plan| plan["predicted_peak_bytes"].as_u64()).ok_or_else(|| format!("{}: no plan", path.display()))
}

/// Reads the prediction from the last JSON object on standard output.
fn said_on_stdout(measured: Measured) -> Result<(u64, Measured), String> {
    let said = measured.stdout.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let predicted = said.into_iter().find_map(|said| said["predicted_peak_bytes"].as_u64());
    Ok((predicted.ok_or("no `predicted_peak_bytes` in its output")?, measured))
}

/// Reads the prediction from `peak N bytes, M predicted`.
fn said_on_stderr(measured: Measured) -> Result<(u64, Measured), String> {
    let words: Vec<&str> = measured.stderr.split_whitespace().collect();
    let place = words.iter().position(|word| *word == "predicted");
    let predicted = place.and_then(|place| words.get(place.checked_sub(1)?)?.parse().ok());
    Ok((predicted.ok_or("no prediction on standard error")?, measured))
}

fn done(options: &Options, arguments: &[String]) -> Result<Measured, String> {
    let measured = child::run(&options.program, arguments, None, &options.scratch, &|| false)?;
    match measured.exit_code {
        0 => Ok(measured),
        code => Err(format!("exit code {code}: {}", measured.stderr.trim())),
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
