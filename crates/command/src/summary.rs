//! The last screen of a run: whether it learned, where the model is, and what to do next.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::saved::History;
use crate::session::Session;

/// The report of a finished run.
pub fn summary(run: &Session, from: &Path) -> String {
    let history = run.history();
    let mut text = String::from("\n");
    if let (Some(first), Some(last)) = (&history.first_evaluation, &history.last_evaluation) {
        text.push_str(&before_and_after(first, last));
    }
    let counts = [("rows skipped", history.bad_rows), ("steps skipped as not finite", history.skipped_steps)];
    for (what, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
        let _ = writeln!(text, "{what}: {count}");
    }
    text.push_str(&cut(history, (run.config.data.max_source_tokens, run.config.data.max_target_tokens)));
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
    let prompt = history.example_prompt.as_deref().unwrap_or("...");
    let model = quoted(&model);
    // The shown commands work as they are: they use the program as it was called, and existing rows.
    let program = std::env::args_os().next().map_or("train_low_mem".to_string(), |name| quoted(Path::new(&name)));
    // The user's own files, not the files that they were converted to.
    let named = |key: &str| run.config.values.list(key).and_then(|files| files.into_iter().next());
    let rows = named("data.validation").or_else(|| named("data.train"));
    let rows = rows.as_ref();
    let rows = rows.map_or("rows.parquet".to_string(), |rows| quoted(Path::new(rows)));
    if is_adapter {
        let base = run.config.model.init_from.as_deref().map_or_else(String::new, quoted);
        let merged = quoted(&run.config.run.output_dir.join("merged"));
        let prompt = prompt.replace('\'', "'\\''");
        let _ = write!(
            text,
            "\nnext:\n  {program} generate --model {base} --adapter {model} --prompt '{prompt}'\n  {program} eval --model {base} --adapter {model} --data {rows}\n  {program} merge --model {base} --adapter {model} --output {merged}"
        );
        return text;
    }
    let tuned = quoted(&unused_beside(&run.config.run.output_dir));
    let _ = write!(
        text,
        "\nnext:\n  {program} generate --model {model} --prompt '{}'\n  {program} eval --model {model} --data {rows}\n  {program} --finetune --model {model} --data {rows} --output {tuned}",
        prompt.replace('\'', "'\\''")
    );
    text
}

/// The output directory of the shown fine-tuning command: beside this run's directory, and not existing yet.
fn unused_beside(output: &Path) -> PathBuf {
    let names = std::iter::once("tuned".to_string()).chain((2..).map(|number| format!("tuned-{number}")));
    let mut paths = names.map(|name| output.with_file_name(name));
    paths.find(|path| !path.exists()).unwrap_or_else(|| output.with_file_name("tuned"))
}

/// A path, quoted for a shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+:@%=,".contains(c);
    if text.chars().all(is_plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// The number of texts in the steps made that were cut for the model.
fn cut(history: &History, most: (usize, usize)) -> String {
    let used = history.read_rows.saturating_sub(history.bad_rows).max(1);
    let mut text = String::new();
    for (what, count, most, key) in [
        ("sources", history.cut.0, most.0, "data.max_source_tokens"),
        ("targets", history.cut.1, most.1, "data.max_target_tokens"),
    ] {
        if count > 0 {
            #[expect(clippy::cast_precision_loss, reason = "a share of rows")]
            let percent = 100.0 * count as f64 / used as f64;
            let _ = writeln!(
                text,
                "{what} cut at {most} tokens: {count} of {used} ({percent:.1} %); `{key}` sets the limit"
            );
        }
    }
    text
}

/// Four values, before the first step and after the last.
fn before_and_after(first: &Value, last: &Value) -> String {
    let mut text = format!("{:<18}{:>12}{:>12}\n", "on validation rows", "before", "after");
    let percent = |value: &Value| value.as_f64().map_or("-".to_string(), |share| format!("{:.1} %", 100.0 * share));
    let plain = |value: &Value| {
        value.as_f64().map_or_else(
            || value.to_string(),
            |figure| if figure.abs() < 1e6 { format!("{figure:.3}") } else { format!("{figure:.1e}") },
        )
    };
    for (name, key) in [("loss", "loss"), ("perplexity", "perplexity"), ("BLEU-4", "bleu")] {
        let _ = writeln!(text, "{:<18}{:>12}{:>12}", format!("  {name}"), plain(&first[key]), plain(&last[key]));
    }
    let _ = writeln!(
        text,
        "{:<18}{:>12}{:>12}",
        "  exact match",
        percent(&first["exact_match"]),
        percent(&last["exact_match"])
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_table_shows_before_and_after() {
        let first = json!({"loss": 7.0, "perplexity": 1096.6, "bleu": 0.0, "exact_match": 0.0});
        let last = json!({"loss": 0.25, "perplexity": 1.284, "bleu": 81.5, "exact_match": 0.75});
        let text = before_and_after(&first, &last);
        assert!(text.contains("  loss                   7.000       0.250"), "{text}");
        assert!(text.contains("  exact match            0.0 %      75.0 %"), "{text}");
    }
}
