//! The page of several runs, side by side.

use std::fmt::Write;

use serde_json::Value;

use super::chart::Chart;
use super::run::{figures_of, score_points, score_unit, validation_points};
use super::scale::Scale;
use super::{MAX_BYTES, escape, page, recipe, section};
use crate::figures::{self, bytes, count, decimal, score, score_name};
use crate::run::Run;
use crate::series::Series;

/// The most runs on a page: more colours could not be told apart.
pub const MAX_RUNS: usize = 12;
/// The most charts of scores.
const MAX_SCORE_CHARTS: usize = 4;
/// The most points of a curve, so that a page of many runs stays small.
const MAX_POINTS: usize = 180;

/// The page of several runs.
///
/// # Panics
/// If there are more than [`MAX_RUNS`].
pub fn of_runs(runs: &[Run]) -> String {
    assert!(runs.len() <= MAX_RUNS, "{} runs", runs.len());
    // Settings may be of any length; the figures and curves are bounded.
    let shown = [(usize::MAX, MAX_SCORE_CHARTS), (24, MAX_SCORE_CHARTS), (0, MAX_SCORE_CHARTS), (0, 0)];
    let mut pages = shown.into_iter().map(|(differences, scores)| with(runs, differences, scores));
    pages.find(|page| page.len() <= MAX_BYTES).unwrap_or_else(|| page("runs", "", &Value::Null))
}

fn with(runs: &[Run], max_differences: usize, max_scores: usize) -> String {
    let names: Vec<String> = runs.iter().map(|run| figures::clipped(run.name(), 200)).collect();
    let title = format!("{} runs", runs.len());
    let body = [
        format!("<h1>{title}</h1><p class=\"status\">{}</p>", escape::text(names.join(" · "))),
        section("Figures", &table(runs)),
        section("Learning", &learning(runs, max_scores)),
        section("Speed and memory", &speed(runs)),
        section("Settings that differ", &differences(runs, max_differences)),
        "<footer>made by <code>train_low_mem report</code> from the runs’ own files</footer>".to_owned(),
    ];
    page(&title, &body.concat(), &Value::Array(runs.iter().map(figures_of).collect()))
}

fn colour(run: usize) -> String {
    format!("c{run}\" style=\"--k:var(--c{run})")
}

fn table(runs: &[Run]) -> String {
    let mut html = String::from("<div class=\"scroll\"><table class=\"runs\"><tr><th>run</th>");
    for (at, run) in runs.iter().enumerate() {
        let _ = write!(
            html,
            "<th class=\"n\"><span class=\"swatch\" style=\"--k:var(--c{at})\"></span>{}</th>",
            escape::text(run.name())
        );
    }
    html += "</tr>\n";
    let mut row = |name: &str, of: &dyn Fn(&Run) -> Option<String>| {
        let cells: Vec<Option<String>> = runs.iter().map(of).collect();
        if cells.iter().all(Option::is_none) {
            return;
        }
        let _ = write!(html, "<tr><td>{}</td>", escape::text(name));
        for cell in cells {
            let _ = write!(html, "<td class=\"n\">{}</td>", escape::text(cell.unwrap_or_default()));
        }
        html += "</tr>\n";
    };
    row("state", &|run| Some(run.end().map_or("running", |(reason, _)| reason).replace('_', " ")));
    row("step", &|run| Some(count(run.step())));
    row("running time", &|run| Some(figures::duration(run.running_ms())));
    row("training loss", &|run| run.loss.last().map(|(_, loss)| decimal(loss)));
    row("validation loss, last", &|run| run.evaluations().last().map(|last| decimal(last.loss)));
    row("validation loss, best", &|run| {
        let best = run.evaluations().iter().min_by(|a, b| a.loss.total_cmp(&b.loss))?;
        Some(format!("{} at step {}", decimal(best.loss), count(best.step)))
    });
    let mut scores: Vec<&String> = Vec::new();
    for (name, _) in runs.iter().filter_map(Run::kept_evaluation).flat_map(|kept| &kept.scores) {
        if !scores.contains(&name) {
            scores.push(name);
        }
    }
    for name in scores {
        row(&score_name(name), &|run| {
            let value = run.kept_evaluation()?.scores.iter().find(|(other, _)| other == name)?.1;
            Some(score(name, value))
        });
    }
    row("tokens a second, median", &|run| run.tokens_per_second.median().map(|median| figures::short(median.round())));
    row("tokens", &|run| Some(count(run.totals().source_tokens + run.totals().target_tokens)));
    row("peak memory", &|run| Some(bytes(run.totals().peak_rss_bytes)));
    row("predicted peak", &|run| run.predicted_peak().map(bytes));
    row("budget", &|run| run.plan()?["budget"].as_u64().map(bytes));
    row("replans", &|run| Some(count(run.totals().replans)));
    row("warnings", &|run| Some(count(run.totals().warnings)));
    html + "</table></div>"
}

/// The means of a series, joined until there are few.
fn points(series: &Series) -> Vec<(f64, f64)> {
    let points: Vec<(f64, f64)> = series.points().map(|(x, bucket)| (x, bucket.mean())).collect();
    let at_a_time = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |values: &mut dyn Iterator<Item = f64>, count: usize| {
        #[expect(clippy::cast_precision_loss, reason = "a handful")]
        let count = count as f64;
        values.sum::<f64>() / count
    };
    let joined = points.chunks(at_a_time);
    joined
        .map(|of| (mean(&mut of.iter().map(|p| p.0), of.len()), mean(&mut of.iter().map(|p| p.1), of.len())))
        .collect()
}

/// Draws one curve for each run.
fn together(
    runs: &[Run],
    (title, unit): (&str, &str),
    x: (Scale, &'static str),
    scale: impl Fn((f64, f64)) -> Scale,
    of: impl Fn(&Run) -> (Vec<(f64, f64)>, String),
) -> Option<Chart> {
    let curves: Vec<_> = runs.iter().map(of).collect();
    let values = curves.iter().flat_map(|(points, _)| points).map(|(_, value)| *value);
    let range = values.fold(None, |range: Option<(f64, f64)>, value| {
        Some(range.map_or((value, value), |(least, most)| (least.min(value), most.max(value))))
    })?;
    let mut chart = Chart::new(title, unit, x, scale(range));
    for (at, (run, (points, last))) in runs.iter().zip(curves).enumerate() {
        chart = chart.line(&colour(at), run.name(), points.into_iter(), (run.name(), &last));
    }
    Some(chart)
}

fn from_zero((_, most): (f64, f64)) -> Scale {
    Scale::from_zero(most)
}

#[expect(clippy::cast_precision_loss, reason = "steps, for drawing")]
fn all_steps(runs: &[Run]) -> (Scale, &'static str) {
    (Scale::linear(0.0, runs.iter().map(Run::step).max().unwrap_or(1).max(1) as f64), "step")
}

fn learning(runs: &[Run], max_scores: usize) -> String {
    let last = |value: Option<f64>| value.map(decimal).unwrap_or_default();
    let of = |series: fn(&Run) -> &Series| {
        move |run: &Run| (points(series(run)), last(series(run).last().map(|(_, value)| value)))
    };
    let validation = |run: &Run| {
        let points = validation_points(run);
        let shown = last(points.last().map(|(_, loss)| *loss));
        (points, shown)
    };
    let nats = "nats a target token";
    let charts = [
        together(runs, ("Validation loss", nats), all_steps(runs), Scale::of_range, validation).map(Chart::wide),
        together(runs, ("Training loss", nats), all_steps(runs), Scale::of_range, of(Run::loss)).map(Chart::wide),
        together(runs, ("Learning rate", ""), all_steps(runs), from_zero, of(Run::learning_rate)),
        together(runs, ("Gradient norm", "before clipping"), all_steps(runs), Scale::of_range, of(Run::gradient_norm)),
    ];
    let wanted = runs.iter().filter_map(Run::kept_evaluation).flat_map(|kept| kept.scores.iter().take(kept.wanted));
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in wanted {
        if !names.contains(&name) && names.len() < max_scores {
            names.push(name);
        }
    }
    let scores = names.into_iter().map(|name| {
        let points = |run: &Run| {
            let points = score_points(run, name);
            let shown = last(points.last().map(|(_, value)| *value));
            (points, shown)
        };
        together(
            runs,
            (&score_name(name), score_unit(name)),
            all_steps(runs),
            |(_, most)| from_zero((0.0, most.max(1.0))),
            points,
        )
    });
    let charts = charts.into_iter().chain(scores).flatten().map(Chart::html);
    format!("<div class=\"charts\">{}</div>", charts.collect::<String>())
}

fn speed(runs: &[Run]) -> String {
    let rate = |run: &Run| {
        let median = run.tokens_per_second.median().map(|median| figures::short(median.round()));
        (points(&run.tokens_per_second), median.unwrap_or_default())
    };
    let wait = |run: &Run| {
        let share = run.totals().data_wait_percent().map(|share| format!("{share:.2} %"));
        (points(&run.data_wait), share.unwrap_or_default())
    };
    let memory = |run: &Run| (points(&run.rss), bytes(run.totals().peak_rss_bytes));
    #[expect(clippy::cast_precision_loss, reason = "milliseconds, for drawing")]
    let longest = runs.iter().map(Run::running_ms).max().unwrap_or(1) as f64;
    let charts = [
        together(runs, ("Tokens a second", "median"), all_steps(runs), from_zero, rate),
        together(runs, ("Waiting for data", "% of a step"), all_steps(runs), from_zero, wait),
        together(
            runs,
            ("Resident memory", "peak"),
            (Scale::time(longest), "time"),
            |(_, most)| Scale::bytes(most * 1.06),
            memory,
        )
        .map(|chart| chart.wide().bytes()),
    ];
    format!("<div class=\"charts\">{}</div>", charts.into_iter().flatten().map(Chart::html).collect::<String>())
}

fn differences(runs: &[Run], most: usize) -> String {
    let configs: Vec<Vec<recipe::Setting>> = runs.iter().map(|run| recipe::settings(run.config())).collect();
    let mut keys: Vec<&str> = Vec::new();
    for setting in configs.iter().flatten() {
        if !keys.contains(&setting.key.as_str()) {
            keys.push(&setting.key);
        }
    }
    let value = |config: &[recipe::Setting], key: &str| {
        config.iter().find(|setting| setting.key == key).map(|s| s.value.clone())
    };
    let (mut html, mut left) = (String::new(), most);
    for key in keys.into_iter().filter(|key| !["run.output_dir", "memory.prices"].contains(key)) {
        let values: Vec<Option<String>> = configs.iter().map(|config| value(config, key)).collect();
        if left == 0 || values.iter().all(|value| *value == values[0]) {
            continue;
        }
        left -= 1;
        let _ = write!(html, "<tr><td><code>{}</code></td>", escape::text(figures::clipped(key, 80)));
        for value in values {
            let _ = write!(
                html,
                "<td><code>{}</code></td>",
                escape::text(figures::clipped(&value.unwrap_or_default(), 120))
            );
        }
        html += "</tr>\n";
    }
    if html.is_empty() {
        return "<p class=\"mute\">none</p>".to_owned();
    }
    let names: String = runs.iter().map(|run| format!("<th>{}</th>", escape::text(run.name()))).collect();
    format!("<div class=\"scroll\"><table><tr><th>key</th>{names}</tr>\n{html}</table></div>")
}
