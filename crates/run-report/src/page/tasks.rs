//! The tasks of a mixture: their samples so far, and their scores in an evaluation.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use super::escape;
use crate::figures::{clipped, count, decimal, score, score_name};

/// The most tasks in the table.
const MAX_ROWS: usize = 64;
/// The most characters of a task's name.
const MAX_CHARACTERS: usize = 40;

/// The table of tasks: `samples` of each, and the `tasks` of the evaluation after `step`. Empty if there are none.
pub fn html(samples: &BTreeMap<String, u64>, (tasks, step): (&Value, u64)) -> String {
    if samples.is_empty() {
        return String::new();
    }
    let scored = tasks.as_object().and_then(|tasks| tasks.values().next());
    let wanted = scored.and_then(|first| first["metrics"].as_array()).into_iter().flatten();
    let names: Vec<&str> = wanted.filter_map(Value::as_str).take(8).collect();
    let after = if scored.is_some() { format!(", scored after step {}", count(step)) } else { String::new() };
    let mut html = format!(
        "<h3>Tasks{after}</h3><div class=\"scroll\"><table class=\"tasks\"><tr><th>task</th><th class=\"n\">samples</th>\
         <th class=\"n\">rows</th><th class=\"n\">loss</th>"
    );
    for name in &names {
        let _ = write!(html, "<th class=\"n\">{}</th>", escape::text(score_name(name)));
    }
    html += "</tr>\n";
    for (task, samples) in samples.iter().take(MAX_ROWS) {
        let of = &tasks[task];
        let number = |name: &str| of[name].as_f64();
        let rows = of["samples"].as_u64().map_or_else(String::new, count);
        let loss = number("loss").map_or_else(String::new, decimal);
        let _ = write!(
            html,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{rows}</td><td class=\"n\">{loss}</td>",
            escape::text(clipped(task, MAX_CHARACTERS)),
            count(*samples)
        );
        for name in &names {
            let value = number(name).map_or_else(String::new, |value| score(name, value));
            let _ = write!(html, "<td class=\"n\">{value}</td>");
        }
        html += "</tr>\n";
    }
    html + "</table></div>"
}
