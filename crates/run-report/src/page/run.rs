//! The page of one run.

use std::fmt::Write;

use serde_json::{Value, json};

use super::chart::Chart;
use super::scale::Scale;
use super::{MAX_BYTES, bill, classes, escape, page, recipe, section, tasks};
use crate::evaluation::Evaluation;
use crate::figures::{self, bytes, count, decimal, score, score_name};
use crate::run::Run;
use crate::series::Series;

/// The most evaluations in the table; from more, an even selection is shown.
pub(super) const MAX_ROWS: usize = 24;

/// The parts of a page whose length depends on users' texts.
#[derive(Clone, Copy)]
struct Shown {
    config: bool,
    settings: usize,
    notes: usize,
    evaluations_with_answers: usize,
    plan: bool,
}

/// From everything down to the parts that always fit. The config's text is dropped first: a file beside the page also
/// has it.
const SHOWN: [Shown; 5] = {
    let all =
        Shown { config: true, settings: 128, notes: usize::MAX, evaluations_with_answers: usize::MAX, plan: true };
    let no_config = Shown { config: false, ..all };
    let few = Shown { settings: 64, notes: 16, evaluations_with_answers: 2, ..no_config };
    let least = Shown { settings: 0, notes: 4, evaluations_with_answers: 0, ..few };
    [all, no_config, few, least, Shown { plan: false, ..least }]
};

/// The page of a run.
pub fn of_run(run: &Run) -> String {
    let mut pages = SHOWN.iter().map(|shown| with(run, shown));
    pages.find(|page| page.len() <= MAX_BYTES).unwrap_or_else(|| page("a run", "", &Value::Null))
}

fn with(run: &Run, shown: &Shown) -> String {
    let body = [
        header(run),
        section("Learning", &learning(run)),
        section("Speed", &speed(run)),
        section("Memory", &memory(run, shown)),
        section("Answers", &answers(run, shown.evaluations_with_answers)),
        section("Data", &data(run)),
        section("Recipe", &recipe_of(run, shown)),
        section("Machine", &machine(run)),
        "<footer>made by <code>train_low_mem</code> from the run’s own files</footer>".to_owned(),
    ];
    page(run.name(), &body.concat(), &figures_of(run))
}

/// The exact numbers of the page, for programs.
pub(super) fn figures_of(run: &Run) -> Value {
    let totals = run.totals();
    let evaluation = |evaluation: &Evaluation| {
        let scores = evaluation.scores.iter().map(|(name, value)| (name.clone(), json!(value)));
        let scores: serde_json::Map<String, Value> = scores.collect();
        json!({"step": evaluation.step, "loss": evaluation.loss, "scores": scores})
    };
    let shown = spread(run.evaluations(), MAX_ROWS);
    json!({
        "run": run.name(), "step": run.step(), "total_steps": run.total_steps(), "steps": totals.steps,
        "target_tokens": totals.target_tokens, "source_tokens": totals.source_tokens, "samples": totals.samples,
        "last_loss": run.loss.last().map(|(_, loss)| loss), "last_lr": run.learning_rate.last().map(|(_, rate)| rate),
        "last_grad_norm": run.gradient_norm.last().map(|(_, norm)| norm),
        "peak_rss_bytes": totals.peak_rss_bytes, "predicted_peak_bytes": run.predicted_peak(),
        "evaluations": shown.into_iter().map(evaluation).collect::<Vec<_>>(),
    })
}

fn header(run: &Run) -> String {
    let (class, state) = match run.end() {
        Some(("done", _)) => ("done", "done".to_owned()),
        Some((reason, _)) => ("failed", escape::text(reason.replace('_', " "))),
        None => ("running", "running".to_owned()),
    };
    let began = run.first_ms().map_or_else(String::new, |began| format!(" · began {}", figures::moment(began)));
    let of = run.total_steps().map_or_else(String::new, |total| format!(" of {}", count(total)));
    let mut html = format!(
        "<h1>{}</h1><p class=\"status {class}\"><b class=\"s\">{state}</b> at step <b>{}</b>{of} · {}{began}</p>\n<dl class=\"top\">",
        escape::text(run.name()),
        count(run.step()),
        figures::duration(run.running_ms()),
    );
    let mut fact = |name: &str, value: &str, more: &str| {
        let _ = write!(html, "<div><dt>{}</dt><dd>{value}<small>{more}</small></dd></div>", escape::text(name));
    };
    let evaluations = run.evaluations();
    match (evaluations.first(), run.kept_evaluation()) {
        (Some(first), Some(kept)) => {
            let of_step =
                if kept.step == run.step() { String::new() } else { format!(", at step {}", count(kept.step)) };
            fact(
                "validation loss",
                &decimal(kept.loss),
                &format!("from {} before the first step{of_step}", decimal(first.loss)),
            );
            for (name, value) in kept.scores.iter().take(kept.wanted.min(4)) {
                let before = first.scores.iter().find(|(other, _)| other == name).map_or(0.0, |(_, value)| *value);
                fact(&score_name(name), &score(name, *value), &format!("from {}", score(name, before)));
            }
        }
        _ => {
            if let Some((_, loss)) = run.loss.last() {
                fact("loss", &decimal(loss), "of the last step");
            }
        }
    }
    let totals = run.totals();
    let predicted =
        run.predicted_peak().map_or_else(String::new, |predicted| format!("{} predicted", bytes(predicted)));
    fact("peak memory", &bytes(totals.peak_rss_bytes), &predicted);
    if let Some(median) = run.tokens_per_second.median() {
        let tokens = totals.source_tokens + totals.target_tokens;
        fact(
            "tokens a second",
            &figures::short(median.round()),
            &format!("{} tokens in {} steps", count(tokens), count(totals.steps)),
        );
    }
    html + "</dl>"
}

/// Draws a training figure by step.
fn by_step(run: &Run, title: &str, unit: &str, series: &Series, scale: fn((f64, f64)) -> Scale) -> String {
    let Some(range) = series.range() else { return String::new() };
    let (scale, last) = (scale(range), series.last().map_or_else(String::new, |(_, value)| decimal(value)));
    Chart::new(title, unit, steps(run), scale).curve("train", "", series, ("last", &last)).html()
}

#[expect(clippy::cast_precision_loss, reason = "steps, for drawing")]
pub(super) fn steps(run: &Run) -> (Scale, &'static str) {
    (Scale::linear(0.0, run.total_steps().unwrap_or(0).max(run.step()).max(1) as f64), "step")
}

#[expect(clippy::cast_precision_loss, reason = "steps, for drawing")]
pub(super) fn validation_points(run: &Run) -> Vec<(f64, f64)> {
    let finite = run.evaluations().iter().filter(|evaluation| evaluation.loss.is_finite());
    finite.map(|evaluation| (evaluation.step as f64, evaluation.loss)).collect()
}

fn learning(run: &Run) -> String {
    let validation = validation_points(run);
    let mut range = run.loss.range();
    for (_, loss) in &validation {
        range = Some(range.map_or((*loss, *loss), |(least, most)| (least.min(*loss), most.max(*loss))));
    }
    let Some(range) = range else { return String::new() };
    let last = run.loss.last().map_or_else(String::new, |(_, loss)| decimal(loss));
    let mut loss = Chart::new("Loss", "nats a target token", steps(run), Scale::of_range(range)).wide();
    loss = loss.curve("train", "training", &run.loss, ("training", &last));
    if let Some((_, last)) = validation.last() {
        loss = loss.dots("valid", "validation", &validation, ("validation", &decimal(*last)));
    }
    for note in run.notes().iter().filter(|note| note.kind == "resume") {
        #[expect(clippy::cast_precision_loss, reason = "steps, for drawing")]
        let step = note.step as f64;
        loss = loss.mark("resume", step, &note.text);
    }
    let rate = by_step(run, "Learning rate", "", &run.learning_rate, |(_, most)| Scale::from_zero(most));
    let norm = by_step(run, "Gradient norm", "before clipping", &run.gradient_norm, Scale::of_range);
    let not_finite = run.loss.not_finite() + run.gradient_norm.not_finite();
    let note = match not_finite {
        0 => String::new(),
        count => format!("<p class=\"wrong\">{count} values were not finite and are not drawn.</p>"),
    };
    let charts = format!("<div class=\"charts\">{}{}{rate}{norm}</div>", loss.html(), scores(run));
    format!("{charts}{note}{}{}{}{}", evaluations(run), tasks(run), labels(run), recall(run))
}

/// The curve of recall of the model that is kept, beside that of the first evaluation.
fn recall(run: &Run) -> String {
    let Some(kept) = run.kept_evaluation().filter(|kept| kept.recall.len() > 1) else { return String::new() };
    let (least, most) = (kept.recall[0].0, kept.recall[kept.recall.len() - 1].0);
    let share = |recall: &[(f64, f64)]| recall.last().map_or_else(String::new, |(_, share)| decimal(*share));
    let x = (Scale::log(least, most), "first texts");
    let mut chart = Chart::new("Recall", "share of texts that are among the first", x, Scale::from_zero(1.0));
    if let Some(first) = run.evaluations().first().filter(|first| first.step != kept.step && !first.recall.is_empty()) {
        let legend = format!("after step {}", count(first.step));
        chart = chart.dots("train", "", &first.recall, (&legend, &share(&first.recall)));
    }
    let legend = format!("after step {}", count(kept.step));
    let chart = chart.dots("valid", "", &kept.recall, (&legend, &share(&kept.recall)));
    format!("<div class=\"charts\">{}</div>", chart.html())
}

/// A chart of each score that was asked for.
fn scores(run: &Run) -> String {
    let Some(kept) = run.kept_evaluation().filter(|_| run.evaluations().len() > 1) else { return String::new() };
    let wanted = kept.scores.iter().take(kept.wanted.min(MAX_SCORE_CHARTS));
    let chart = |name: &String| {
        let points = score_points(run, name);
        let (unit, most) = (score_unit(name), points.iter().map(|(_, value)| *value).fold(0.0, f64::max));
        let last = points.last().map_or_else(String::new, |(_, value)| decimal(*value));
        let chart = Chart::new(&score_name(name), unit, steps(run), Scale::from_zero(most.max(1.0)));
        chart.dots("valid", &score_name(name), &points, ("last", &last)).html()
    };
    wanted.map(|(name, _)| chart(name)).collect()
}

/// The most charts of scores.
const MAX_SCORE_CHARTS: usize = 4;

/// A score over the steps, out of 100.
#[expect(clippy::cast_precision_loss, reason = "steps, for drawing")]
pub(super) fn score_points(run: &Run, name: &str) -> Vec<(f64, f64)> {
    let factor = if score_unit(name) == "%" { 100.0 } else { 1.0 };
    let of = |evaluation: &Evaluation| {
        let (_, value) = evaluation.scores.iter().find(|(other, value)| other == name && value.is_finite())?;
        Some((evaluation.step as f64, factor * value))
    };
    run.evaluations().iter().filter_map(of).collect()
}

/// The unit of a score out of 100.
pub(super) fn score_unit(name: &str) -> &'static str {
    if score(name, 1.0).ends_with('%') { "%" } else { "of 100" }
}

/// The tasks of a mixture, with their scores in the evaluation of the model that is kept.
fn tasks(run: &Run) -> String {
    let kept = run.kept_evaluation();
    let scores = kept.and_then(|kept| serde_json::from_str(kept.tasks.as_deref()?).ok()).unwrap_or(Value::Null);
    tasks::html(run.samples_of_tasks(), (&scores, kept.map_or(0, |kept| kept.step)))
}

/// The labels of the model that is kept.
fn labels(run: &Run) -> String {
    let kept = run.kept_evaluation();
    let classes = kept.and_then(|kept| serde_json::from_str(kept.classes.as_deref()?).ok().zip(Some(kept.step)));
    classes.map_or_else(String::new, |(classes, step)| classes::html(&classes, step))
}

/// At most `most` of the items: the first, the last, and some between them.
fn spread<T>(items: &[T], most: usize) -> Vec<&T> {
    if items.len() <= most {
        return items.iter().collect();
    }
    (0..most).map(|at| &items[at * (items.len() - 1) / (most - 1)]).collect()
}

fn evaluations(run: &Run) -> String {
    let all = run.evaluations();
    let Some(last) = all.last() else { return String::new() };
    let names: Vec<&String> = last.scores.iter().map(|(name, _)| name).collect();
    let mut html = String::from(
        "<h3>Evaluations</h3><div class=\"scroll\"><table class=\"evaluations\"><tr><th class=\"n\">step</th><th class=\"n\">loss</th><th class=\"n\">perplexity</th>",
    );
    for name in &names {
        let _ = write!(html, "<th class=\"n\">{}</th>", escape::text(score_name(name)));
    }
    html += "<th class=\"n\">rows</th><th class=\"n\">generated</th></tr>\n";
    for evaluation in spread(all, MAX_ROWS) {
        let perplexity = decimal(evaluation.perplexity);
        let _ = write!(
            html,
            "<tr><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{perplexity}</td>",
            count(evaluation.step),
            decimal(evaluation.loss)
        );
        for name in &names {
            let value = evaluation.scores.iter().find(|(other, _)| other == *name);
            let _ = write!(
                html,
                "<td class=\"n\">{}</td>",
                value.map_or_else(String::new, |(_, value)| score(name, *value))
            );
        }
        let (rows, generated) = evaluation.samples;
        let _ = writeln!(html, "<td class=\"n\">{}</td><td class=\"n\">{}</td></tr>", count(rows), count(generated));
    }
    html + "</table></div>"
}

fn speed(run: &Run) -> String {
    let mut charts = String::new();
    if let (Some((_, most)), Some(mean)) = (run.tokens_per_second.range(), run.tokens_per_second.median()) {
        let chart =
            Chart::new("Tokens a second", "source and target, without padding", steps(run), Scale::from_zero(most));
        charts += &chart.curve("train", "", &run.tokens_per_second, ("median", &figures::short(mean.round()))).html();
    }
    if let Some((_, most)) = run.data_wait.range() {
        let share = run.totals().data_wait_percent().unwrap_or(0.0);
        let chart = Chart::new("Waiting for data", "% of a step", steps(run), Scale::from_zero(most.max(1.0)));
        charts += &chart.curve("train", "", &run.data_wait, ("of all time", &format!("{share:.2} %"))).html();
    }
    if charts.is_empty() { charts } else { format!("<div class=\"charts\">{charts}</div>") }
}

#[expect(clippy::cast_precision_loss, reason = "bytes and milliseconds, for drawing")]
fn memory(run: &Run, shown: &Shown) -> String {
    let mut html = String::new();
    let plan = run.plan().filter(|_| shown.plan);
    let plan = plan.as_ref();
    if let Some((_, most)) = run.rss.range() {
        let budget = plan.and_then(|plan| plan["budget"].as_u64());
        let predicted = run.predicted_peak();
        let peak = run.totals().peak_rss_bytes;
        let highest = most.max(predicted.unwrap_or(0) as f64).max(peak as f64);
        let top =
            budget.map(|budget| budget as f64).filter(|budget| *budget <= 3.0 * highest).unwrap_or(0.0).max(highest);
        let time = (Scale::time(run.running_ms() as f64), "time");
        let mut chart = Chart::new("Resident memory", "of the process", time, Scale::bytes(top * 1.06)).wide().bytes();
        chart = chart.curve("train", "", &run.rss, ("peak", &bytes(peak)));
        if let Some(predicted) = predicted {
            chart = chart.rule("predicted", predicted as f64, &format!("predicted peak {}", bytes(predicted)));
        }
        if let Some(budget) = budget {
            chart = chart.rule("budget", budget as f64, &format!("budget {}", bytes(budget)));
        }
        for note in run.notes().iter().filter(|note| ["replan", "resume"].contains(&note.kind.as_str())) {
            chart = chart.mark(if note.kind == "replan" { "replan" } else { "resume" }, note.at_ms as f64, &note.text);
        }
        html += &format!("<div class=\"charts\">{}{}</div>", chart.html(), pressure(run, 2.0 * top));
    }
    html += &notes(run, shown.notes);
    if let Some(plan) = plan {
        let bars = bill::of_phases(plan);
        if !bars.is_empty() {
            html += &format!(
                "<h3>The predicted bill</h3><p class=\"mute\">{}</p>{bars}",
                escape::text(plan["bill"]["conclusion"].as_str().unwrap_or_default())
            );
        }
        let step = bill::of_step(plan);
        if !step.is_empty() {
            html += &format!("<div class=\"charts\">{step}</div>");
        }
    }
    html
}

/// Memory pressure by other processes, if there was any, and the available memory, if it came down to `top`.
#[expect(clippy::cast_precision_loss, reason = "milliseconds, for drawing")]
fn pressure(run: &Run, top: f64) -> String {
    let time = || (Scale::time(run.running_ms() as f64), "time");
    let mut charts = String::new();
    if let Some((_, most)) = run.pressure.range().filter(|(_, most)| *most > 0.0) {
        let chart = Chart::new(
            "Memory pressure",
            "% of the last 10 s in which a task waited",
            time(),
            Scale::from_zero(most.max(1.0)),
        );
        charts += &chart.curve("replan", "", &run.pressure, ("largest", &format!("{most:.1} %"))).html();
    }
    if let Some((least, most)) = run.available.range().filter(|(least, _)| *least <= top) {
        let chart = Chart::new("Within reach", "held and available", time(), Scale::bytes(most * 1.06)).bytes();
        charts += &chart.curve("resume", "", &run.available, ("least", &bytes(least as u64))).html();
    }
    charts
}

fn notes(run: &Run, most: usize) -> String {
    let totals = run.totals();
    if run.notes().is_empty() {
        return String::new();
    }
    let mut html = format!(
        "<h3>Events</h3><p class=\"mute\">{} replans, {} warnings</p><div class=\"scroll\"><table>",
        count(totals.replans),
        count(totals.warnings)
    );
    for note in &run.notes()[run.notes().len().saturating_sub(most)..] {
        let _ = writeln!(
            html,
            "<tr><td class=\"n\">step {}</td><td class=\"n\">{}</td><td>{}</td><td>{}</td></tr>",
            count(note.step),
            figures::duration(note.at_ms),
            escape::text(&note.kind),
            escape::text(&note.text)
        );
    }
    html + "</table></div>"
}

fn answers(run: &Run, evaluations: usize) -> String {
    let by_step = run.answers().by_step();
    let by_step = &by_step[by_step.len().saturating_sub(evaluations)..];
    let mut html = String::new();
    for (at, (step, answers)) in by_step.iter().enumerate().rev() {
        let is_newest = at + 1 == by_step.len();
        let right = answers.iter().filter(|answer| answer.is_right()).count();
        let _ = writeln!(
            html,
            "<details{}><summary>after step {} <small>{right} of {} right</small></summary><table class=\"answers\"><tr><th>prompt</th><th>answer</th><th>expected</th></tr>",
            if is_newest { " open" } else { "" },
            count(*step),
            answers.len()
        );
        for answer in answers {
            let class = if answer.is_right() { "right" } else { "wrong" };
            let _ = writeln!(
                html,
                "<tr class=\"answer\"><td>{}</td><td class=\"{class}\">{}</td><td>{}</td></tr>",
                escape::text(&answer.prompt),
                escape::text(&answer.answer),
                escape::text(&answer.expected)
            );
        }
        html += "</table></details>\n";
    }
    html
}

fn facts(facts: &[(String, String)]) -> String {
    if facts.is_empty() {
        return String::new();
    }
    let facts: String = facts
        .iter()
        .map(|(name, value)| format!("<dt>{}</dt><dd>{}</dd>", escape::text(name), escape::text(value)))
        .collect();
    format!("<dl class=\"facts\">{facts}</dl>")
}

/// A paragraph of the command's first screen, by its label.
fn of_screen(run: &Run, label: &str) -> Option<String> {
    let mut words = Vec::new();
    for line in run.screen().lines() {
        let is_more = line.starts_with(' ');
        if line.strip_prefix(label).is_some_and(|rest| rest.starts_with(' ')) {
            words.push(line[label.len()..].trim());
        } else if is_more && !words.is_empty() {
            words.push(line.trim());
        } else if !words.is_empty() {
            break;
        }
    }
    (!words.is_empty()).then(|| words.join(" "))
}

fn data(run: &Run) -> String {
    let totals = run.totals();
    let mut found: Vec<(String, String)> = Vec::new();
    let mut fact = |name: &str, value: String| found.push((name.to_owned(), value));
    of_screen(run, "Data").into_iter().for_each(|data| fact("rows", data));
    if totals.samples > 0 {
        #[expect(clippy::cast_precision_loss, reason = "for reading")]
        let share = |part: u64, of: u64| part as f64 / of.max(1) as f64;
        let longest = |longest: u64| if longest > 0 { format!(", longest {}", count(longest)) } else { String::new() };
        fact("samples trained on", format!("{} in {} steps", count(totals.samples), count(totals.steps)));
        let lengths = [
            ("source", totals.source_tokens, totals.longest.0, totals.cut_sources),
            ("target", totals.target_tokens, totals.longest.1, totals.cut_targets),
        ];
        for (what, tokens, most, cut) in lengths {
            let mean = share(tokens, totals.samples);
            let cut = format!("{} cut ({:.2} %)", count(cut), 100.0 * share(cut, totals.samples));
            fact(&format!("{what} tokens"), format!("mean {mean:.1}{}; {cut}", longest(most)));
        }
        let tokens = totals.source_tokens + totals.target_tokens;
        if totals.padded_tokens >= tokens {
            fact(
                "padding",
                format!("{:.1} % of all computed tokens", 100.0 * (1.0 - share(tokens, totals.padded_tokens))),
            );
        }
    }
    if let Some(bad) = run.end().and_then(|(_, end)| end["bad_rows"].as_u64()).filter(|bad| *bad > 0) {
        fact("rows left out", count(bad));
    }
    facts(&found)
}

fn recipe_of(run: &Run, shown: &Shown) -> String {
    let screen = ["Model", "Adapter", "Recipe", "Length"];
    let screen = screen.iter().filter_map(|label| Some((label.to_lowercase(), of_screen(run, label)?)));
    let mut html = facts(&screen.collect::<Vec<_>>());
    let named: Vec<_> =
        recipe::settings(run.config()).into_iter().filter(|setting| !setting.origin.is_empty()).collect();
    if !named.is_empty() && shown.settings > 0 {
        html += "<h3>Settings that are not defaults</h3><div class=\"scroll\"><table class=\"settings\">";
        for setting in named.iter().take(shown.settings) {
            let _ = writeln!(
                html,
                "<tr><td><code>{}</code></td><td><code>{}</code></td><td class=\"mute\">{}</td></tr>",
                escape::text(figures::clipped(&setting.key, 80)),
                escape::text(figures::clipped(&setting.value, 300)),
                escape::text(figures::clipped(&setting.origin, 120))
            );
        }
        html += "</table></div>";
    }
    if shown.config && !run.config().is_empty() {
        let config = escape::text(run.config());
        html += &format!("<details><summary>resolved.toml</summary><pre>{config}</pre></details>");
    }
    html
}

fn machine(run: &Run) -> String {
    let mut found = Vec::new();
    of_screen(run, "Device").into_iter().for_each(|device| found.push(("device".to_owned(), device)));
    let start = run.start();
    for (key, name) in [
        ("version", "command"),
        ("commit", "commit"),
        ("processor", "processor"),
        ("threads", "threads"),
        ("instruction_set", "instruction set"),
        ("world_size", "processes"),
    ] {
        let value = match &start[key] {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            _ => continue,
        };
        found.push((name.to_owned(), value));
    }
    if let Some(total) = start["total_memory_bytes"].as_u64() {
        found.push(("memory of the machine".to_owned(), bytes(total)));
    }
    facts(&found)
}
