//! Pictures of a memory bill: the rows of each phase as bars and as a table, and the memory over the events of a step.
//!
//! The input is a plan's JSON, as in `plan --json` and `metrics.jsonl`.

use std::fmt::Write;

use serde_json::Value;

use super::chart::Chart;
use super::escape;
use super::scale::Scale;
use crate::figures;

/// The rows of a phase.
struct Phase {
    name: String,
    rows: Vec<(String, u64, String)>,
}

impl Phase {
    fn total(&self) -> u64 {
        self.rows.iter().map(|(_, bytes, _)| bytes).sum()
    }

    fn bytes(&self, row: &str) -> Option<u64> {
        let of_row = self.rows.iter().filter(|(name, ..)| name == row).map(|(_, bytes, _)| bytes);
        of_row.copied().reduce(|a, b| a + b)
    }
}

/// The phases of a plan: all phases if the plan has their rows, otherwise the largest.
fn phases(plan: &Value) -> Vec<Phase> {
    let rows = |rows: &Value| {
        let rows = rows.as_array().into_iter().flatten().take(64);
        rows.filter(|row| row["place"] != "device")
            .map(|row| {
                let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
                (text("name"), row["bytes"].as_u64().unwrap_or(0), text("note"))
            })
            .collect()
    };
    let bill = &plan["bill"];
    let all = bill["phase_rows"].as_array().into_iter().flatten().take(16);
    let all: Vec<Phase> = all
        .map(|phase| Phase { name: phase["name"].as_str().unwrap_or_default().to_owned(), rows: rows(&phase["rows"]) })
        .collect();
    if !all.is_empty() {
        return all;
    }
    let name = bill["binding"].as_str().filter(|name| !name.is_empty()).unwrap_or("peak").to_owned();
    vec![Phase { name, rows: rows(&bill["rows"]) }]
}

/// The colour of a row: `style="--k:var(--parameters)"`.
fn colour(row: &str) -> String {
    const MATMUL_BUFFERS: &str = "matmul buffers";
    const NAMED: [&str; 14] = [
        "process",
        "small blocks",
        "parameters",
        "gradients",
        "optimizer state",
        "square sums",
        "activations",
        "block inputs",
        "loss",
        "workspace",
        MATMUL_BUFFERS,
        "key/value cache",
        "loader",
        "dataset",
    ];
    // Older runs have the row under its older name.
    let row = if row == "packed operands" { MATMUL_BUFFERS } else { row };
    let name = if NAMED.contains(&row) { row.replace([' ', '/'], "-") } else { "other".to_owned() };
    format!(r#"style="--k:var(--{name})""#)
}

/// The bill of every phase: one bar each, then every row in bytes.
pub fn of_phases(plan: &Value) -> String {
    let phases = phases(plan);
    let budget = plan["budget"].as_u64().unwrap_or(0);
    let peak = phases.iter().map(Phase::total).max().unwrap_or(0);
    if peak == 0 {
        return String::new();
    }
    // A budget many times the peak would make the picture of the peak too small.
    let shows_budget = budget > 0 && budget <= peak.saturating_mul(3);
    let scale = if shows_budget { peak.max(budget) } else { peak };
    #[expect(clippy::cast_precision_loss, reason = "for drawing")]
    let percent = |bytes: u64| 100.0 * bytes as f64 / scale as f64;
    let mut html = String::from(r#"<div class="bars">"#);
    for phase in &phases {
        let is_most = phase.total() == peak;
        let name = escape::text(&phase.name);
        let name = if is_most { format!("<b>{name}</b>") } else { name };
        let _ = write!(html, r#"<div><div>{name}</div><div class="bar">"#);
        for (row, bytes, note) in phase.rows.iter().filter(|(_, bytes, _)| *bytes > 0) {
            let width = percent(*bytes);
            let row_name = escape::text(row);
            // Without line breaks: the style hides a name that is wider than its part of the bar.
            let shown =
                if width > 1.1 * row.chars().count() as f64 { row_name.replace(' ', "\u{a0}") } else { String::new() };
            let thin = if shown.is_empty() { r#" class="thin""# } else { "" };
            let note = if note.is_empty() { String::new() } else { format!(", {}", escape::text(note)) };
            let style = colour(row).replacen("--k", &format!("width:{width:.3}%;--k"), 1);
            let bytes = figures::bytes(*bytes);
            let _ = write!(html, r#"<span{thin} {style} title="{row_name}: {bytes}{note}">{shown}</span>"#);
        }
        if shows_budget {
            let _ = write!(html, r#"<i class="limit budget" style="left:{:.2}%" title="budget"></i>"#, percent(budget));
        }
        let _ = write!(html, r#"</div><div class="n">{}</div></div>"#, figures::bytes(phase.total()));
    }
    html.push_str("</div>\n");
    html + &table(plan, &phases, peak)
}

fn table(plan: &Value, phases: &[Phase], peak: u64) -> String {
    let mut rows: Vec<&str> = Vec::new();
    for phase in phases {
        for (name, ..) in &phase.rows {
            if !rows.contains(&name.as_str()) {
                rows.push(name);
            }
        }
    }
    let unit = if peak >= 2 << 30 { ("GiB", (1u64 << 30) as f64) } else { ("MiB", (1u64 << 20) as f64) };
    #[expect(clippy::cast_precision_loss, reason = "for reading")]
    let cell = |bytes: u64| {
        if unit.0 == "GiB" { format!("{:.3}", bytes as f64 / unit.1) } else { format!("{:.2}", bytes as f64 / unit.1) }
    };
    let is_most = |phase: &Phase| if phase.total() == peak { "n most" } else { "n" };
    let mut html = format!(r#"<div class="scroll"><table class="bill"><tr><th>{}</th>"#, unit.0);
    for phase in phases {
        let _ = write!(html, r#"<th class="n">{}</th>"#, escape::text(&phase.name));
    }
    html.push_str("<th></th></tr>\n");
    for row in rows {
        let _ = write!(
            html,
            r#"<tr><td class="row"><span class="swatch" {}></span>{}</td>"#,
            colour(row),
            escape::text(row)
        );
        for phase in phases {
            let bytes = phase.bytes(row);
            let _ = write!(
                html,
                r#"<td class="{}" data-bytes="{}">{}</td>"#,
                is_most(phase),
                bytes.map_or_else(String::new, |bytes| bytes.to_string()),
                bytes.map_or_else(String::new, cell)
            );
        }
        let notes =
            phases.iter().flat_map(|phase| &phase.rows).filter(|(name, _, note)| name == row && !note.is_empty());
        let note = notes.map(|(_, _, note)| note.as_str()).next().unwrap_or_default();
        let _ = writeln!(html, r#"<td class="mute">{}</td></tr>"#, escape::text(note));
    }
    html.push_str(r#"<tr class="sum"><td>total</td>"#);
    for phase in phases {
        let total = phase.total();
        let _ = write!(html, r#"<td class="n" data-bytes="{total}">{}</td>"#, cell(total));
    }
    html.push_str("<td></td></tr>\n");
    let headroom = plan["headroom"].as_u64().unwrap_or(0);
    let note = plan["bill"]["headroom_note"].as_str().unwrap_or_default();
    let _ = writeln!(
        html,
        r#"<tr><td>safety margin</td>{}<td class="mute">{} beyond the largest phase ({})</td></tr></table></div>"#,
        r#"<td></td>"#.repeat(phases.len()),
        figures::bytes(headroom),
        escape::text(note)
    );
    html
}

/// The memory over a step, if the plan has it: the rows held during each event of the step.
#[expect(clippy::cast_precision_loss, reason = "for drawing")]
pub fn of_step(plan: &Value) -> String {
    let timeline = &plan["timeline"];
    let names: Vec<&str> =
        timeline["rows"].as_array().into_iter().flatten().filter_map(Value::as_str).take(16).collect();
    let moments: Vec<Moment> =
        timeline["moments"].as_array().into_iter().flatten().take(4096).filter_map(Moment::from_json).collect();
    if names.is_empty() || moments.is_empty() {
        return String::new();
    }
    let totals = moments.iter().map(|moment| moment.bytes.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)));
    let (at, most) = totals.enumerate().max_by_key(|(at, total)| (*total, std::cmp::Reverse(*at))).unwrap_or((0, 0));
    let x = Scale::linear(0.0, moments.len() as f64).without_ticks();
    let scale = Scale::bytes(most as f64 * 1.08);
    let title = "A step, from event to event";
    let mut chart = Chart::new(title, "tensors held while each event goes on", (x, ""), scale).wide();
    let mut below = vec![0u64; moments.len()];
    for (row, name) in names.iter().enumerate() {
        if moments.iter().all(|moment| moment.bytes.get(row).copied().unwrap_or(0) == 0) {
            continue;
        }
        let mut between = Vec::new();
        for (at, (moment, below)) in moments.iter().zip(&mut below).enumerate() {
            let bytes = moment.bytes.get(row).copied().unwrap_or(0);
            let (bottom, top) = (*below as f64, below.saturating_add(bytes) as f64);
            between.extend([(at as f64, bottom, top), (at as f64 + 1.0, bottom, top)]);
            *below = below.saturating_add(bytes);
        }
        let largest = moments.iter().map(|moment| moment.bytes.get(row).copied().unwrap_or(0)).max().unwrap_or(0);
        chart = chart.area(&colour(name), name, &between).legend_of_area(&colour(name), name, &figures::bytes(largest));
    }
    let mut from = 0;
    for to in 1..=moments.len() {
        if to == moments.len() || moments[to].pass != moments[from].pass {
            chart = chart.bracket(from as f64, to as f64, &moments[from].pass);
            from = to;
        }
    }
    let what = format!("peak {}: {}, {}", figures::bytes(most), moments[at].pass, moments[at].what);
    chart.rule("mean", most as f64, &what).bytes().html()
}

struct Moment {
    pass: String,
    what: String,
    bytes: Vec<u64>,
}

impl Moment {
    fn from_json(moment: &Value) -> Option<Self> {
        let text = |key: &str| Some(moment[key].as_str()?.to_owned());
        let bytes = moment["bytes"].as_array()?.iter().map(|bytes| bytes.as_u64().unwrap_or(0)).collect();
        Some(Self { pass: text("pass")?, what: text("what")?, bytes })
    }
}
