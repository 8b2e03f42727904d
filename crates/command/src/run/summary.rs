//! The last screen of a run: whether it learned, where the model is, and what to do next.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;
use text_metrics::Metric;

use crate::config::task::Task;
use crate::config::{Config, Objective, paths};
use crate::files::run_dir::ROWS;
use crate::run::saved::History;
use crate::run::session::Session;
use crate::scores::best::Measure;
use crate::screen::shell_words::{quoted, quoted_text};

/// The report of a finished run.
pub fn summary(run: &Session, from: &Path) -> String {
    let history = run.history();
    let mut text = String::from("\n");
    if let (Some(first), Some(last)) = (&history.first_evaluation, &history.last_evaluation) {
        let kept = history.kept_evaluation.as_ref().unwrap_or(last);
        text.push_str(&before_and_after(first, kept));
        if kept["step"] != last["step"] {
            let (step, measure) = (&kept["step"], run.measure().name());
            let _ = writeln!(text, "after: the saved model, of step {step}, which has the best {measure}");
        }
    }
    let counts = [("rows skipped", history.bad_rows), ("steps skipped as not finite", history.skipped_steps)];
    for (what, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
        let _ = writeln!(text, "{what}: {count}");
    }
    text.push_str(&cut(history, (run.config.data.max_source_tokens, run.config.data.max_target_tokens)));
    for (what, count) in ["sources", "targets"].into_iter().zip(history.lossy).filter(|(_, count)| *count > 0) {
        let (share, used) = share(count, history);
        let _ = writeln!(text, "{what} with characters that the tokenizer loses: {count} of {used} ({share:.1} %)");
    }
    if let Some(row) = &history.first_bad_row {
        let _ = writeln!(text, "the first skipped row: {row}");
    }
    if let Some(throughput) = run.report.throughput() {
        let _ = writeln!(text, "{throughput}");
    }
    let ((peak, on_device), predicted) = (run.peaks(), run.plan.predicted_peak);
    let budget = run.config.memory.budget.map_or(String::new(), |_| format!(", {} allowed", run.plan.budget));
    let _ = writeln!(text, "peak memory {peak}, {predicted} predicted{budget}");
    if let Some(peak) = on_device {
        let _ = writeln!(text, "peak memory on the device {peak}, {} predicted", run.plan.predicted_device_peak);
    }
    let model = run.run.model(&run.opened.model);
    let is_adapter = run.opened.model.lora.is_some();
    let kind = if is_adapter { "adapter" } else { "model" };
    let _ = writeln!(text, "{kind}: saved to {} (from {})", model.display(), from.display());
    let _ = write!(text, "\nnext:\n  {}", next(run, &model).join("\n  "));
    text
}

/// Commands that work as they are shown: with the program as it was called, and existing rows. Rows for training are never shown for an
/// evaluation, nor the reverse.
fn next(run: &Session, model: &Path) -> Vec<String> {
    let (config, model) = (&run.config, quoted(model));
    let program = std::env::args_os().next().map_or("train_low_mem".to_string(), |name| quoted(Path::new(&name)));
    // The user's own files, not the files that they were converted to. Rows that were split off are only in the run's directory.
    let reading = &run.opened.reading;
    let split_off = || run.run.root().join(ROWS).join("validation-rows.parquet");
    let data =
        |files: &[PathBuf]| files.iter().map(|file| format!("--data {}", quoted(file))).collect::<Vec<_>>().join(" ");
    let validation = run.opened.validation.as_ref().map(|_| match &reading.validation {
        Some(part) => data(&part.originals),
        None => data(&[split_off()]),
    });
    // A directory or a pattern stays what the user typed: its splits are found again.
    let train: Vec<PathBuf> = config.data.train.iter().map(|pattern| paths::from_text(pattern)).collect();
    let train = data(if train.is_empty() { &reading.train.originals } else { &train });
    let prompt = run.history().example_prompt.as_deref().unwrap_or("...");
    // A command is one line.
    let prompt = without_prefix(prompt, run.opened.model.prefix()).lines().next().unwrap_or("...");
    let prompt = quoted_text(prompt);
    let of_adapter =
        run.opened.model.lora.is_some().then(|| config.model.init_from.as_deref().map_or_else(String::new, quoted));
    let answering = match &of_adapter {
        Some(base) => format!("--model {base} --adapter {model}"),
        None => format!("--model {model}"),
    };
    let is_of_vectors = reading.task == Task::Embedding;
    let is_pretraining = reading.config_objective() == Objective::Denoising;
    let score = config.ranking.is_some().then(|| {
        let part = reading.validation.as_ref().unwrap_or(&reading.train);
        format!("{program} score {answering} --pairs {}", quoted(&part.originals[0]))
    });
    // A classifier makes no text, and a model that fills gaps answers no prompt yet.
    let makes_text = run.opened.model.head.is_language() && !is_pretraining && score.is_none();
    let generate = makes_text.then(|| format!("{program} generate {answering} --prompt {prompt}"));
    let embed = is_of_vectors.then(|| {
        let part = reading.validation.as_ref().unwrap_or(&reading.train);
        let column = part.conversion.kinds().next().and_then(|(_, pairing)| pairing.columns().into_iter().next());
        let column = column.map(|column| format!(" --text-column {}", quoted_text(&column.name))).unwrap_or_default();
        let (input, vectors) = (quoted(&part.originals[0]), quoted(&config.run.output_dir.join("vectors.npy")));
        format!("{program} embed {answering} --input {input}{column} --output {vectors}")
    });
    let mut commands: Vec<String> = generate.into_iter().chain(embed).chain(score).collect();
    // `eval` takes the columns from the run, and rows that were split off are parquet.
    let text = settings_of_text(config);
    let of_rows = reading.validation.as_ref().map_or("", |_| text.as_str());
    commands.extend(validation.map(|rows| format!("{program} eval {answering} {rows}{of_rows}")));
    let output = &config.run.output_dir;
    commands.push(match of_adapter {
        Some(_) => format!("{program} merge {answering} --output {}", quoted(&output.join("merged"))),
        None if is_of_vectors || config.ranking.is_some() => return commands,
        None if is_pretraining => {
            let tuned = quoted(&unused_beside(output));
            format!(
                "{program} --model {model} --data pairs.csv --output {tuned}  # your rows, with a prompt and a response"
            )
        }
        None => {
            let tuned = quoted(&unused_beside(output));
            let columns = settings_of_columns(config);
            format!("{program} --finetune --model {model} {train}{columns}{text} --output {tuned}")
        }
    });
    commands
}

/// The settings that say which columns of the run's files were read.
fn settings_of_columns(config: &Config) -> String {
    let of = &config.data.chosen;
    let [chosen, rejected] = of.preference.clone().unwrap_or_default();
    let columns = typed(&[
        ("prompt_column", &of.prompt),
        ("response_column", &of.response),
        ("chosen_column", &chosen),
        ("rejected_column", &rejected),
        ("source_template", &of.source),
        ("target_template", &of.target),
        ("source_lang", &of.source_lang),
        ("target_lang", &of.target_lang),
    ]);
    let loss = config.values.text("preference.loss").map(|loss| format!(" --set preference.loss={loss}"));
    let reference = config.frozen.as_ref().filter(|of| of.key == "preference.reference");
    let reference =
        reference.map(|of| format!(" --set {}", quoted_text(&format!("{}={}", of.key, of.named.display()))));
    columns + &loss.unwrap_or_default() + &reference.unwrap_or_default()
}

/// The settings that say how the run's text files were read.
fn settings_of_text(config: &Config) -> String {
    let quoting = config.data.has_quotes.map(|has_quotes| if has_quotes { "all" } else { "none" }.to_owned());
    typed(&[("encoding", &config.data.encoding), ("quoting", &quoting)])
}

/// Keys of `data` with their values, as they are typed.
fn typed(settings: &[(&str, &Option<String>)]) -> String {
    let one = |key: &str, value: &String| format!(" --set {}", quoted_text(&format!("data.{key}={value}")));
    settings.iter().filter_map(|(key, value)| value.as_ref().map(|value| one(key, value))).collect()
}

/// A prompt as a user types it: commands add the model's prefix. The prompt was decoded from tokens, which may lack the prefix's last blank.
fn without_prefix<'a>(prompt: &'a str, prefix: &str) -> &'a str {
    let stripped = prompt.strip_prefix(prefix).or_else(|| prompt.strip_prefix(prefix.trim_end()));
    stripped.map_or(prompt, str::trim_start)
}

/// The output directory of the shown fine-tuning command: beside this run's directory, and not existing yet.
fn unused_beside(output: &Path) -> PathBuf {
    let names = std::iter::once("tuned".to_string()).chain((2..).map(|number| format!("tuned-{number}")));
    let mut paths = names.map(|name| output.with_file_name(name));
    paths.find(|path| !path.exists()).unwrap_or_else(|| output.with_file_name("tuned"))
}

/// The percentage of the rows that steps were made of, and their number.
fn share(count: u64, history: &History) -> (f64, u64) {
    let used = history.read_rows.saturating_sub(history.bad_rows).max(1);
    #[expect(clippy::cast_precision_loss, reason = "a share of rows")]
    let percent = 100.0 * count as f64 / used as f64;
    (percent, used)
}

/// The number of texts in the steps made that were cut for the model.
fn cut(history: &History, most: (usize, usize)) -> String {
    let mut text = String::new();
    for (what, count, most, key) in [
        ("sources", history.cut.0, most.0, "data.max_source_tokens"),
        ("targets", history.cut.1, most.1, "data.max_target_tokens"),
    ] {
        if count > 0 {
            let (percent, used) = share(count, history);
            let _ = writeln!(
                text,
                "{count} of {used} {what} were longer than {most} tokens and were cut ({percent:.1} %); `{key}` sets the limit"
            );
        }
    }
    text
}

/// Loss, perplexity and the scores that were asked for: before the first step, and of the model that is kept.
fn before_and_after(first: &Value, last: &Value) -> String {
    let mut text = format!("{:<18}{:>12}{:>12}\n", "on validation rows", "before", "after");
    let plain = |value: &Value| {
        value.as_f64().map_or_else(
            || value.to_string(),
            |figure| if figure.abs() < 1e6 { format!("{figure:.3}") } else { format!("{figure:.1e}") },
        )
    };
    let measures = wanted(last);
    // Of numbers, vectors and rankings, the loss is none of tokens.
    let is_other =
        |measure: &Measure| matches!(measure, Measure::Found(_) | Measure::Answers(Metric::Pearson | Metric::Spearman));
    let is_of_tokens = !measures.iter().any(is_other);
    for name in ["loss", "perplexity"].into_iter().filter(|name| is_of_tokens || *name == "loss") {
        let _ = writeln!(text, "{:<18}{:>12}{:>12}", format!("  {name}"), plain(&first[name]), plain(&last[name]));
    }
    for measure in measures {
        let shown = |value: &Value| value.as_f64().map_or("-".to_owned(), |value| measure.shown(value));
        let [before, after] = [first, last].map(|evaluation| shown(&evaluation[measure.name()]));
        let _ = writeln!(text, "{:<18}{before:>12}{after:>12}", format!("  {}", measure.title()));
    }
    text
}

/// The numbers of preferences and of what is found that an evaluation has, and the scores that it was asked for. Evaluations before 2026-11-28 do not say these.
pub fn wanted(evaluation: &Value) -> Vec<Measure> {
    let metrics: Vec<Metric> = match evaluation["metrics"].as_array() {
        Some(names) => names.iter().filter_map(|name| name.as_str()?.parse().ok()).collect(),
        None => vec![Metric::Bleu, Metric::ExactMatch],
    };
    let others = Measure::scores()
        .filter(|measure| !matches!(measure, Measure::Answers(_)) && evaluation[measure.name()].is_number());
    let of_answers = metrics.into_iter().map(Measure::Answers);
    // Vectors have no answers.
    others.chain(of_answers.filter(|measure| evaluation[measure.name()].is_number())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_shown_prompt_lacks_the_prefix_that_the_command_adds() {
        assert_eq!(without_prefix("summarize: The ball", "summarize: "), "The ball");
        assert_eq!(without_prefix("summarize:The ball", "summarize: "), "The ball");
        assert_eq!(without_prefix("The ball", "summarize: "), "The ball");
        assert_eq!(without_prefix("The ball", ""), "The ball");
    }

    #[test]
    fn the_table_shows_before_and_after() {
        let first = json!({"loss": 7.0, "perplexity": 1096.6, "bleu": 0.0, "exact_match": 0.0});
        let last = json!({"loss": 0.25, "perplexity": 1.284, "bleu": 81.5, "exact_match": 0.75});
        let text = before_and_after(&first, &last);
        assert!(text.contains("  loss                   7.000       0.250"), "{text}");
        assert!(text.contains("  exact match            0.0 %      75.0 %"), "{text}");
        assert!(text.contains("  BLEU-4                  0.00       81.50"), "{text}");
        let asked =
            |f1: f64| json!({"loss": 1.0, "perplexity": 2.7, "bleu": 0.0, "macro_f1": f1, "metrics": ["macro_f1"]});
        let text = before_and_after(&asked(0.1), &asked(0.95));
        assert!(text.contains("  macro-F1              10.0 %      95.0 %") && !text.contains("BLEU"), "{text}");
    }
}
