//! A run on a terminal's screen, as rows of styled text. The screen is drawn from the run's files; it never contacts or
//! changes the run. The caller owns the terminal.

mod chart;

use crate::figures::{self, bytes, count, decimal, duration, short};
use crate::run::Run;
use crate::series::Series;
use crate::visible;

/// The style of a piece of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// No style.
    #[default]
    Plain,
    /// Important text.
    Bold,
    /// Labels.
    Dim,
    /// Training.
    Blue,
    /// Validation.
    Yellow,
    /// Good news.
    Green,
    /// Bad news.
    Red,
}

impl Style {
    /// The control sequence that begins the style; `\x1b[0m` ends it.
    pub fn ansi(self) -> &'static str {
        match self {
            Style::Plain => "",
            Style::Bold => "\x1b[1m",
            Style::Dim => "\x1b[2m",
            Style::Blue => "\x1b[34m",
            Style::Yellow => "\x1b[33m",
            Style::Green => "\x1b[32m",
            Style::Red => "\x1b[31m",
        }
    }
}

/// A row: pieces of text from left to right, no wider than the screen, without control characters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    pieces: Vec<(Style, String)>,
    width: usize,
    most: usize,
}

impl Row {
    /// Makes an empty row of at most `most` columns.
    fn new(most: usize) -> Self {
        Self { most, ..Self::default() }
    }

    /// Adds text to the row, cut at the row's end.
    fn with(mut self, style: Style, text: &str) -> Self {
        let mut kept = String::new();
        for letter in visible::line(text).chars() {
            if self.width + columns(letter) > self.most {
                break;
            }
            self.width += columns(letter);
            kept.push(letter);
        }
        self.pieces.push((style, kept));
        self
    }

    /// Fills the row with spaces up to a column.
    fn up_to(self, column: usize) -> Self {
        let spaces = column.saturating_sub(self.width);
        self.with(Style::Plain, &" ".repeat(spaces))
    }

    fn then(mut self, other: Row) -> Self {
        for (style, text) in other.pieces {
            self = self.with(style, &text);
        }
        self
    }

    /// The text without styles.
    pub fn text(&self) -> String {
        self.pieces.iter().map(|(_, text)| text.as_str()).collect()
    }

    /// The text with the control sequences of its styles.
    pub fn ansi(&self) -> String {
        let piece = |(style, text): &(Style, String)| match style {
            Style::Plain => text.clone(),
            style => format!("{}{text}\x1b[0m", style.ansi()),
        };
        self.pieces.iter().map(piece).collect()
    }
}

/// Columns of a character on a terminal: two for East Asian characters and pictures (approximates Unicode's East Asian
/// Width).
fn columns(letter: char) -> usize {
    match u32::from(letter) {
        0x1100..=0x115f
        | 0x2e80..=0xa4cf
        | 0xac00..=0xd7a3
        | 0xf900..=0xfaff
        | 0xfe30..=0xfe6f
        | 0xff00..=0xff60
        | 0x1f300..=0x1faff
        | 0x20000..=0x3fffd => 2,
        _ => 1,
    }
}

/// The fewest rows of a useful chart.
const MIN_CHART_ROWS: usize = 5;
/// The most scores among the figures.
const MAX_SCORES: usize = 4;
/// Columns of the figures beside the chart.
const FIGURE_COLUMNS: usize = 36;

/// The screen in the given columns and rows. `trouble` is shown if the files cannot be read.
pub fn rows(run: &Run, (width, height): (usize, usize), trouble: Option<&str>) -> Vec<Row> {
    let mut rows = head(run, width, trouble);
    let below = [memory(run, width), news(run, width)].concat();
    let figures = newest(run);
    let left = height.saturating_sub(rows.len() + below.len() + 2);
    let has_chart = left >= MIN_CHART_ROWS && width >= 2 * FIGURE_COLUMNS;
    let middle = if has_chart { left.max(figures.len()) } else { figures.len() };
    let chart = if has_chart { chart::loss(run, width - FIGURE_COLUMNS - 2, middle) } else { Vec::new() };
    rows.push(Row::new(width));
    for at in 0..middle {
        let row = match chart.get(at) {
            Some(chart) => Row::new(width).then(chart.clone()).up_to(width - FIGURE_COLUMNS),
            None => Row::new(width),
        };
        let figure = figures.get(at).map(|(name, value)| (format!("{name:<16}"), value));
        rows.push(match figure {
            Some((name, value)) => row.with(Style::Dim, &name).with(Style::Plain, value),
            None => row,
        });
    }
    rows.push(Row::new(width));
    rows.extend(below);
    rows.truncate(height);
    rows
}

fn state(run: &Run) -> (String, Style) {
    match run.end() {
        Some(("done", _)) => ("done".to_owned(), Style::Green),
        Some((reason, _)) => (reason.replace('_', " "), Style::Red),
        None => ("running".to_owned(), Style::Blue),
    }
}

/// The time until the last step at the average pace so far, including evaluations and saves.
fn left_ms(run: &Run) -> Option<u64> {
    let left = run.total_steps()?.saturating_sub(run.step());
    let steps = run.totals().steps;
    (steps > 0 && run.end().is_none()).then(|| (run.running_ms() / steps).saturating_mul(left))
}

/// A bar of `columns` columns, filled to `part / of`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "columns")]
fn bar(part: u64, of: u64, columns: usize) -> (String, String) {
    let full = (part as f64 / of.max(1) as f64).clamp(0.0, 1.0) * columns as f64;
    let full = (full.round() as usize).min(columns);
    ("█".repeat(full), "░".repeat(columns - full))
}

fn head(run: &Run, width: usize, trouble: Option<&str>) -> Vec<Row> {
    let (state, style) = state(run);
    let left = left_ms(run).map_or_else(String::new, |left| format!(", about {} left", duration(left)));
    let row = || Row::new(width);
    let of = run.total_steps().map_or_else(String::new, |total| format!(" / {}", count(total)));
    let (full, empty) = bar(run.step(), run.total_steps().unwrap_or(0), width.saturating_sub(28).min(60));
    vec![
        row().with(Style::Bold, run.name()).with(Style::Plain, "  ").with(style, &state),
        row()
            .with(Style::Blue, &full)
            .with(Style::Dim, &empty)
            .with(Style::Plain, &format!("  {}{of}", count(run.step()))),
        match trouble {
            Some(trouble) => row().with(Style::Red, trouble),
            None => row().with(Style::Dim, &format!("epoch {}, {}{left}", run.epoch(), duration(run.running_ms()))),
        },
    ]
}

/// The newest figures, by name.
fn newest(run: &Run) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    let mut last = |name, series: &Series| {
        series.last().into_iter().for_each(|(_, value)| lines.push((name, decimal(value))));
    };
    last("loss", run.loss());
    last("learning rate", run.learning_rate());
    last("gradient norm", run.gradient_norm());
    if let Some(evaluation) = run.kept_evaluation() {
        lines.push(("validation", format!("{} (step {})", decimal(evaluation.loss), count(evaluation.step))));
        for (name, value) in evaluation.scores.iter().take(evaluation.wanted.min(MAX_SCORES)) {
            lines.push(("score", format!("{} {}", figures::score_name(name), figures::score(name, *value))));
        }
    }
    let rate = run.tokens_per_second().last();
    rate.into_iter().for_each(|(_, rate)| lines.push(("tokens a second", short(rate.round()))));
    run.totals().data_wait_percent().into_iter().for_each(|share| lines.push(("data wait", format!("{share:.2} %"))));
    lines
}

fn memory(run: &Run, width: usize) -> Vec<Row> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes")]
    let Some(now) = run.rss().last().map(|(_, bytes)| bytes as u64) else { return Vec::new() };
    let (peak, predicted) = (run.totals().peak_rss_bytes, run.predicted_peak().unwrap_or(0));
    let budget = run.plan().and_then(|plan| plan["budget"].as_u64());
    let budget = budget.map_or_else(String::new, |budget| format!(", budget {}", bytes(budget)));
    let words = format!("  {} now, peak {} of {} predicted{budget}", bytes(now), bytes(peak), bytes(predicted));
    let (full, empty) = bar(now, predicted.max(now), 20);
    let style = if predicted > 0 && peak > predicted { Style::Yellow } else { Style::Green };
    vec![
        Row::new(width)
            .with(Style::Dim, "memory  ")
            .with(style, &full)
            .with(Style::Dim, &empty)
            .with(Style::Plain, &words),
    ]
}

/// The newest answers and notes.
fn news(run: &Run, width: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    if let Some((step, answers)) = run.answers().by_step().last() {
        rows.push(Row::new(width).with(Style::Dim, &format!("answers after step {}", count(*step))));
        for answer in answers.iter().take(3) {
            let (mark, style) = if answer.is_right() { ("right  ", Style::Green) } else { ("wrong  ", Style::Red) };
            let words = format!("{} -> {}", answer.prompt, answer.answer);
            rows.push(Row::new(width).with(style, mark).with(Style::Plain, &words));
        }
    }
    for note in run.notes().iter().rev().take(2) {
        let words = format!("step {}: {}: {}", count(note.step), note.kind, note.text);
        rows.push(Row::new(width).with(if note.kind == "warning" { Style::Yellow } else { Style::Dim }, &words));
    }
    rows.push(Row::new(width).with(Style::Dim, "q leaves; the run goes on"));
    rows
}

/// The run in a few lines of text, for output to something other than a terminal.
pub fn summary(run: &Run) -> String {
    let (state, _) = state(run);
    let of = run.total_steps().map_or_else(String::new, |total| format!(" of {}", count(total)));
    let left = left_ms(run).map_or_else(String::new, |left| format!(", about {} left", duration(left)));
    let (step, time) = (count(run.step()), duration(run.running_ms()));
    let mut lines = vec![format!("{}: {state} at step {step}{of}, {time}{left}", run.name())];
    lines.extend(newest(run).into_iter().map(|(name, value)| format!("  {name:<16}{value}")));
    let predicted = run.predicted_peak().map_or_else(String::new, |bytes_| format!(", {} predicted", bytes(bytes_)));
    lines.push(format!("  {:<16}{}{predicted}", "peak memory", bytes(run.totals().peak_rss_bytes)));
    if let Some(note) = run.notes().last() {
        lines.push(format!("  {:<16}step {}: {}", note.kind, count(note.step), note.text));
    }
    lines.iter().map(|line| visible::line(line) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Run {
        let mut run = Run::new("runs/a");
        let start = [
            r#"{"event":"start","time":"1970-01-01T00:00:00Z","step":0,"total_steps":100}"#,
            r#"{"event":"plan","budget":3145728,"predicted_peak":2097152}"#,
            r#"{"event":"eval","step":0,"loss":7.5,"bleu":0.5,"examples":[{"prompt":"字2+2","answer":"4","expected":"4"}]}"#,
        ];
        start.iter().for_each(|line| run.note(line));
        for step in 1..=10 {
            run.note(&format!(
                r#"{{"event":"step","time":"1970-01-01T00:00:{step:02}Z","step":{step},"loss":{},"tokens_per_second":1234.4,"rss_bytes":1048576,"peak_rss_bytes":1048576}}"#,
                7.5 - 0.5 * f64::from(step)
            ));
        }
        run.note("{\"event\":\"warning\",\"step\":10,\"message\":\"a \\u001b[31mred\\u0007 word\"}");
        run
    }

    fn shown(size: (usize, usize), run: &Run) -> String {
        rows(run, size, None).iter().map(|row| row.text() + "\n").collect()
    }

    #[test]
    fn a_screen_shows_progress_loss_memory_and_answers_without_control_characters() {
        let screen = shown((100, 30), &run());
        for words in [
            "runs/a  running",
            "10 / 100",
            "loss            2.5",
            "7.5 (step 0)",
            "1.0 MiB now, peak 1.0 MiB of 2.0 MiB predicted, budget 3.0 MiB",
            "right  字2+2 -> 4",
            "warning: a \\u001b[31mred\\u0007 word",
        ] {
            assert!(screen.contains(words), "{words}\n{screen}");
        }
        assert!(!screen.contains('\u{1b}') && !screen.contains('\u{7}'), "{screen}");
        // The curve falls: it begins in the first row of the chart, and ends in the last row but one.
        let is_dot = |letter: char| ('\u{2801}'..='\u{28ff}').contains(&letter);
        let curve: Vec<Option<usize>> = screen.lines().map(|line| line.chars().position(is_dot)).collect();
        let columns: Vec<usize> = curve.into_iter().flatten().collect();
        assert!(columns.len() > 10 && columns.is_sorted(), "{columns:?}\n{screen}");
    }

    #[test]
    fn no_row_is_wider_and_no_screen_higher_than_the_terminal() {
        for size in [(0, 0), (1, 1), (20, 5), (40, 12), (80, 24), (300, 90)] {
            for run in [run(), Run::new("nothing yet")] {
                let rows = rows(&run, size, Some("no file"));
                assert!(rows.len() <= size.1, "{size:?}");
                assert!(rows.iter().all(|row| row.text().chars().map(columns).sum::<usize>() <= size.0), "{size:?}");
            }
        }
    }

    #[test]
    fn a_summary_is_plain_text() {
        let text = summary(&run());
        assert!(text.starts_with("runs/a: running at step 10 of 100, 10 s, about 1 min 30 s left\n"), "{text}");
        assert!(text.contains("peak memory     1.0 MiB, 2.0 MiB predicted\n"), "{text}");
        assert!(!text.chars().any(|letter| letter.is_control() && letter != '\n'), "{text:?}");
    }
}
