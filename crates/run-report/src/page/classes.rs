//! The labels of a classification: their scores, and which are taken for which.

use std::fmt::Write;

use serde_json::Value;

use super::escape;
use crate::figures::{clipped, count, score};

/// The most labels in the table of scores.
const MAX_ROWS: usize = 64;
/// The most labels in the confusion matrix.
const MAX_COLUMNS: usize = 24;
/// The most characters of a label.
const MAX_CHARACTERS: usize = 40;

/// The table of scores and the confusion matrix of an evaluation's `classes`; empty if there are none.
pub fn html(classes: &Value, step: u64) -> String {
    let Some(labels) = classes["labels"].as_array().filter(|labels| !labels.is_empty()) else { return String::new() };
    let mut html = format!(
        "<h3>Labels, after step {}</h3><div class=\"scroll\"><table class=\"labels\"><tr><th>label</th><th class=\"n\">precision</th>\
         <th class=\"n\">recall</th><th class=\"n\">F1</th><th class=\"n\">rows</th></tr>\n",
        count(step)
    );
    let mut row = |name: &str, scores: &Value, rows: &str| {
        let _ = write!(html, "<tr><td>{}</td>", escape::text(clipped(name, MAX_CHARACTERS)));
        for name in ["precision", "recall", "f1"] {
            let _ = write!(html, "<td class=\"n\">{}</td>", score(name, scores[name].as_f64().unwrap_or(0.0)));
        }
        let _ = writeln!(html, "<td class=\"n\">{rows}</td></tr>");
    };
    for label in labels.iter().take(MAX_ROWS) {
        row(name_of(label), label, &count(label["support"].as_u64().unwrap_or(0)));
    }
    row("mean of the labels", &classes["macro"], "");
    row("mean of the rows", &classes["weighted"], "");
    html += "</table></div>";
    html + &matrix(labels, &classes["confusion"])
}

fn name_of(label: &Value) -> &str {
    label["label"].as_str().unwrap_or_default()
}

fn matrix(labels: &[Value], confusion: &Value) -> String {
    let Some(rows) = confusion.as_array().filter(|rows| rows.len() == labels.len() && rows.len() <= MAX_COLUMNS) else {
        return String::new();
    };
    let name = |label: &Value| escape::text(clipped(name_of(label), MAX_CHARACTERS));
    let heads: String = labels.iter().map(|label| format!("<th class=\"n\">{}</th>", name(label))).collect();
    let mut html = format!(
        "<h3>Confusion matrix</h3><p class=\"mute\">Rows are the right labels, columns the answers.</p>\
         <div class=\"scroll\"><table class=\"confusion\"><tr><th></th>{heads}<th class=\"n\">other</th></tr>\n"
    );
    for (at, (label, row)) in labels.iter().zip(rows).enumerate() {
        let _ = write!(html, "<tr><th>{}</th>", name(label));
        for (column, cell) in row.as_array().into_iter().flatten().take(labels.len() + 1).enumerate() {
            let rows = cell.as_u64().unwrap_or(0);
            let class = match (column == at, rows) {
                (_, 0) => "n mute",
                (true, _) => "n right",
                (false, _) => "n wrong",
            };
            let _ = write!(html, "<td class=\"{class}\">{}</td>", count(rows));
        }
        html += "</tr>\n";
    }
    html + "</table></div>"
}
