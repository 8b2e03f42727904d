//! `bench budgets`: how much of a budget a plan uses, and how fast a step is under that budget.
//!
//! A model's step is planned without a limit first. Then it is planned for smaller and smaller fractions of that plan's
//! memory, down to the smallest accepted budget. Every plan runs, and its peak and its time are measured.

use serde_json::{Value, json};

use super::child;
use super::levers::shortest_step;
use super::{Options, mib, write_tables};

/// A step whose curve is measured.
struct Subject {
    name: &'static str,
    flags: &'static str,
}

const SUBJECTS: [Subject; 3] = [
    Subject {
        name: "t5-small f32, 8 x 256+256",
        flags: "--model t5-small --batch 8 --source-tokens 256 --target-tokens 256 --steps 1",
    },
    Subject {
        name: "t5-small bf16, 8 x 256+256",
        flags: "--model t5-small --batch 8 --source-tokens 256 --target-tokens 256 --precision bf16 --steps 3",
    },
    Subject {
        name: "chatlm-0.2b bf16, 16 x 256+256",
        flags: "--model chatlm-0.2b --batch 16 --source-tokens 256 --target-tokens 256 --precision bf16 --steps 1",
    },
];

/// Budgets, in percent of the memory that the plan without a limit requires.
const PERCENT: [u64; 11] = [100, 90, 80, 70, 60, 55, 50, 45, 40, 35, 30];

const ROUNDS: usize = 2;

/// One plan, with its measurements.
struct Row {
    budget: u64,
    predicted: u64,
    required: u64,
    measured: u64,
    ms: f64,
    relative_time: f64,
    plan: String,
}

/// The outcome of a budget.
enum Ran {
    Row(Row),
    /// The budget was refused; this is the smallest budget that would be accepted.
    Smallest(u64),
}

/// Measures every subject and writes the tables.
pub fn run(options: &Options) -> Result<(), String> {
    let mut markdown = String::from("# Use of a budget, and step time within it\n");
    let mut curves = Vec::new();
    for subject in SUBJECTS.iter().filter(|subject| subject.name.contains(&options.filter)) {
        let rows = curve(options, subject)?;
        let Some(base) = rows.first() else { continue };
        markdown += &format!(
            "\n## {}\n\nThe first row took {:.0} ms.\n\n| budget MiB | peak MiB | predicted | use | time | planned |\n\
             | --- | --- | --- | --- | --- | --- |\n",
            subject.name, base.ms
        );
        for row in &rows {
            let line = line(row, base);
            print!("{line}");
            markdown += &line;
        }
        let points: Vec<Value> = rows.iter().map(|row| point(row, base)).collect();
        curves.push(json!({"subject": subject.name, "points": points}));
    }
    write_tables(options, &markdown, &json!({"curves": curves}))
}

/// The rows of one subject, the largest budget first. Each round runs all of them, so that a slowdown of the machine
/// affects all. The shortest step counts, because noise only adds time.
fn curve(options: &Options, subject: &Subject) -> Result<Vec<Row>, String> {
    let Ran::Row(unlimited) = step(options, subject, 64 << 30)? else {
        return Err(format!("{}: 64 GiB are not enough", subject.name));
    };
    // Each run measures the process's memory anew, and it may be some pages larger.
    let whole = unlimited.required + (2 << 20);
    let mut rows = round(options, subject, whole)?;
    for _ in 1..ROUNDS {
        for row in &mut rows {
            if let Ran::Row(again) = step(options, subject, row.budget)? {
                row.ms = row.ms.min(again.ms);
            }
        }
    }
    Ok(rows)
}

fn round(options: &Options, subject: &Subject, whole: u64) -> Result<Vec<Row>, String> {
    let mut rows: Vec<Row> = Vec::new();
    for percent in PERCENT {
        match step(options, subject, whole * percent / 100)? {
            Ran::Row(row) => rows.push(row),
            Ran::Smallest(smallest) => {
                // Each run measures the process's memory anew, and it may be some pages larger.
                if let Ran::Row(row) = step(options, subject, smallest + (1 << 20))? {
                    rows.push(row);
                }
                break;
            }
        }
    }
    Ok(rows)
}

fn step(options: &Options, subject: &Subject, budget: u64) -> Result<Ran, String> {
    let mut arguments: Vec<String> = vec!["bench".to_owned(), "--json".to_owned()];
    arguments.extend(subject.flags.split_whitespace().map(str::to_owned));
    arguments.extend(["--memory-budget".to_owned(), format!("{}MiB", budget >> 20)]);
    let measured = child::run(&options.program, &arguments, None, &options.scratch, &|| false)?;
    if measured.exit_code == 3 {
        let named = measured.stderr.split("--memory-budget ").nth(1).and_then(|rest| rest.split("MiB").next());
        let smallest: Option<u64> = named.and_then(|mib| mib.parse().ok());
        return Ok(Ran::Smallest(smallest.ok_or("the refusal names no budget")? << 20));
    }
    let said = measured.json()?;
    let number = |name: &str| said[name].as_u64().unwrap_or(0);
    Ok(Ran::Row(Row {
        budget: (budget >> 20) << 20,
        predicted: number("predicted_peak_bytes"),
        required: number("required_bytes"),
        measured: measured.peak_bytes,
        ms: shortest_step(&said)?,
        relative_time: said["relative_time"].as_f64().unwrap_or(0.0),
        plan: said["plan"].as_str().unwrap_or_default().to_owned(),
    }))
}

#[expect(clippy::cast_precision_loss, reason = "a share for reading")]
fn share(row: &Row) -> f64 {
    100.0 * row.measured as f64 / row.budget as f64
}

/// Whether a larger budget would make the step noticeably faster.
fn limits(row: &Row, base: &Row) -> bool {
    row.relative_time > 1.015 * base.relative_time
}

fn line(row: &Row, base: &Row) -> String {
    format!(
        "| {:.0} | {:.0} | {:.0} | {:.0} % | {:.2} | {:.2} |\n",
        mib(row.budget),
        mib(row.measured),
        mib(row.predicted),
        share(row),
        row.ms / base.ms,
        row.relative_time / base.relative_time
    )
}

fn point(row: &Row, base: &Row) -> Value {
    json!({
        "budget_bytes": row.budget, "measured_bytes": row.measured, "predicted_bytes": row.predicted,
        "step_ms": row.ms, "relative_time": row.ms / base.ms,
        "planned_relative_time": row.relative_time / base.relative_time, "plan": row.plan,
        "memory_limits": limits(row, base),
    })
}
