//! The layout of bills: columns of names, sizes and shares that fit a terminal of 80 columns.

use crate::{Bytes, CostRow};

/// Columns of every line.
const WIDTH: usize = 78;
/// Columns of a name or label.
const LABEL: usize = 18;
/// Columns of the longest bar.
const BAR: usize = 8;
/// Rows with a smaller share are shown together, unless the bill is in full.
const MIN_PERCENT: f64 = 2.0;

/// The unit of a bill. All of its rows have the same unit, so that sizes are easy to compare.
#[derive(Clone, Copy, PartialEq)]
pub enum Unit {
    Gib,
    Mib,
}

impl Unit {
    /// The unit for rows whose largest value is `largest`.
    pub fn for_largest(largest: Bytes) -> Self {
        if largest >= Bytes::gib(1) { Self::Gib } else { Self::Mib }
    }

    /// `bytes` in this unit: `530.1 MiB`, `1.25 GiB`. A size that would be rounded to zero is shown as `<0.1 MiB` or `<0.01 GiB`.
    pub fn show(self, bytes: Bytes) -> String {
        let (bits, decimals, name, least) = match self {
            Self::Gib => (30, 2, "GiB", 0.01),
            Self::Mib => (20, 1, "MiB", 0.1),
        };
        let size = bytes.0 as f64 / (1u64 << bits) as f64;
        let shown =
            if bytes > Bytes::ZERO && size < least { format!("<{least}") } else { format!("{size:.decimals$}") };
        format!("{shown} {name}")
    }
}

/// A label and a text. Further lines of the text are indented to the same column.
pub fn labelled(label: &str, text: &str) -> String {
    wrapped(&format!("{label:<LABEL$}"), LABEL, text)
}

/// The rows of a bill, largest first. Unless `is_full`, small rows are combined into one.
pub fn rows(rows: &[CostRow], unit: Unit, is_full: bool) -> String {
    let total: Bytes = rows.iter().map(|row| row.bytes).sum();
    let percent = |bytes: Bytes| 100.0 * bytes.0 as f64 / total.0.max(1) as f64;
    let mut sorted: Vec<&CostRow> = rows.iter().collect();
    sorted.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    let large = sorted.iter().take_while(|row| percent(row.bytes) >= MIN_PERCENT).count();
    let (large, small) = sorted.split_at(if is_full || sorted.len() - large < 2 { sorted.len() } else { large });
    let line = |name: &str, bytes: Bytes, note: &str| {
        let share = percent(bytes);
        #[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "a share of 100")]
        let bar = "█".repeat((share / 100.0 * BAR as f64).round() as usize);
        row(name, &unit.show(bytes), &format!("{share:.0} %"), &bar, note)
    };
    let mut text: String = large.iter().map(|row| line(row.name.as_str(), row.bytes, &row.note)).collect();
    if !small.is_empty() {
        let bytes = small.iter().map(|row| row.bytes).sum();
        text += &line("everything else", bytes, &format!("{} rows: `plan --explain`", small.len()));
    }
    text
}

/// A row without a share, such as the total.
pub fn sum(name: &str, bytes: Bytes, unit: Unit, note: &str) -> String {
    row(name, &unit.show(bytes), "", "", note)
}

fn row(name: &str, size: &str, share: &str, bar: &str, note: &str) -> String {
    let start = format!("  {name:<width$}{size:>10} {share:>5}  {bar:<BAR$}  ", width = LABEL - 2);
    let indent = start.chars().count();
    wrapped(&start, indent, note)
}

/// `start`, then `text` in lines that begin at column `indent` and end before [`WIDTH`] if words are short enough.
fn wrapped(start: &str, indent: usize, text: &str) -> String {
    let (mut lines, mut line) = (String::new(), start.to_owned());
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines = lines + line.trim_end() + "\n";
            line = " ".repeat(indent);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line += word;
        is_empty = false;
    }
    lines + line.trim_end() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Name;

    #[test]
    fn sizes_have_the_unit_of_the_largest() {
        let shown = |bytes: u64| [Unit::Mib, Unit::Gib].map(|unit| unit.show(Bytes(bytes)));
        assert_eq!(shown(0), ["0.0 MiB", "0.00 GiB"]);
        assert_eq!(shown(600), ["<0.1 MiB", "<0.01 GiB"]);
        assert_eq!(shown(555_850_000), ["530.1 MiB", "0.52 GiB"]);
        assert!(Unit::for_largest(Bytes::mib(1024)) == Unit::Gib && Unit::for_largest(Bytes::mib(1023)) == Unit::Mib);
    }

    #[test]
    fn no_line_is_wider_than_a_terminal() {
        let note = "a note of many words that does not fit into what is left of its line";
        let all = [CostRow::new(Name::new("process"), 5 << 20, note), CostRow::new(Name::new("loss"), 5 << 20, "")];
        let text =
            rows(&all, Unit::Mib, true) + &labelled("Step", &note.repeat(3)) + &sum("total", Bytes(1), Unit::Mib, note);
        assert!(text.lines().count() > 6);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH && line.trim_end() == line), "{text}");
    }
}
