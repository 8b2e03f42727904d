//! `bench levers`: the memory that each lever saves and the time that it costs, measured on single steps of t5-small.
//!
//! Each round runs every setting once, so that a slowdown of the machine affects all settings. A setting's time is its
//! smallest step time, because noise only adds time.

use serde_json::{Value, json};

use super::{Options, child, mib, write_tables};

const COMMON: &str = "bench --json --model t5-small --batch 8 --source-tokens 256 --target-tokens 256 --steps 2";

/// Settings, and their flags in addition to [`COMMON`]; `SCRATCH` stands for a directory. The first is the base of
/// comparison.
const SETTINGS: [(&str, &str); 28] = [
    ("whole batch at once", "--micro-batch 8"),
    ("micro-batches of 4", "--micro-batch 4"),
    ("micro-batches of 2", "--micro-batch 2"),
    ("micro-batches of 1", "--micro-batch 1"),
    ("3 of 12 blocks recomputed", "--micro-batch 8 --recompute 3"),
    ("6 of 12 blocks recomputed", "--micro-batch 8 --recompute 6"),
    ("every block recomputed", "--micro-batch 8 --recompute full"),
    ("every block recomputed, micro-batches of 2", "--micro-batch 2 --recompute full"),
    ("every block recomputed, micro-batches of 1", "--micro-batch 1 --recompute full"),
    ("1024 rows of logits", "--micro-batch 8 --loss-chunk-rows 1024"),
    ("64 rows of logits", "--micro-batch 8 --loss-chunk-rows 64"),
    ("logits computed again", "--micro-batch 8 --loss-chunk-rows 1"),
    (
        "layer-major, all gradients kept, micro-batches of 4",
        "--micro-batch 4 --accumulation layer-major --kept-gradient-blocks 12",
    ),
    (
        "layer-major, none kept, micro-batches of 4",
        "--micro-batch 4 --accumulation layer-major --kept-gradient-blocks 0",
    ),
    (
        "layer-major, all gradients kept, micro-batches of 1",
        "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 12",
    ),
    (
        "layer-major, half kept, micro-batches of 1",
        "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 6",
    ),
    (
        "layer-major, none kept, micro-batches of 1",
        "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 0",
    ),
    (
        "the same, block inputs on disk",
        "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 0 --offload SCRATCH",
    ),
    (
        "the same, gradients on disk instead",
        "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 0 --offload-gradients SCRATCH",
    ),
    (
        "gradients and block inputs on disk, attention heads kept, micro-batches of 4",
        "--micro-batch 4 --accumulation layer-major --kept-gradient-blocks 0 --offload-gradients SCRATCH --offload SCRATCH --keep-heads",
    ),
    (
        "gradients and activations on disk, nothing recomputed",
        "--micro-batch 4 --accumulation layer-major --kept-gradient-blocks 0 --offload-gradients SCRATCH --offload SCRATCH --recompute none",
    ),
    (
        "gradients, activations and weights on disk, nothing recomputed",
        "--micro-batch 4 --accumulation layer-major --kept-gradient-blocks 0 --offload-gradients SCRATCH --offload SCRATCH --offload-weights SCRATCH --recompute none",
    ),
    (
        "gradients on disk, activations in memory",
        "--micro-batch 4 --accumulation layer-major --kept-gradient-blocks 0 --offload-gradients SCRATCH --recompute none",
    ),
    (
        "activations on disk, gradients in memory",
        "--micro-batch 4 --accumulation layer-major --kept-gradient-blocks 12 --offload SCRATCH --recompute none",
    ),
    ("gradients in bf16", "--micro-batch 8 --gradient-precision bf16"),
    ("gradients in bf16, micro-batches of 2", "--micro-batch 2 --gradient-precision bf16"),
    ("gradients in bf16, micro-batches of 1", "--micro-batch 1 --gradient-precision bf16"),
    ("stochastic rounding", "--micro-batch 8 --master-weights stochastic-rounding"),
];

/// A measured setting.
struct Measured {
    name: &'static str,
    /// Milliseconds of the shortest step.
    ms: f64,
    peak_bytes: u64,
    /// The planner's estimate of its relative time.
    price: f64,
}

const PRECISIONS: [&str; 2] = ["f32", "bf16"];

/// Measures every setting in both precisions and writes the table.
pub fn run(options: &Options) -> Result<(), String> {
    let measured = PRECISIONS.map(|precision| settings(options, precision));
    let mut json = Vec::new();
    for (precision, rows) in PRECISIONS.iter().zip(&measured) {
        let Some(base) = rows.first() else { continue };
        json.extend(rows.iter().map(|row| {
            json!({"precision": precision, "setting": row.name, "step_ms": row.ms, "relative_time": row.ms / base.ms,
                "planned_relative_time": row.price / base.price, "peak_bytes": row.peak_bytes})
        }));
    }
    write_tables(options, &table(&measured), &json!({"settings": json}))
}

/// The settings that match the filter, in one precision.
fn settings(options: &Options, precision: &str) -> Vec<Measured> {
    let rounds = if options.quick { 1 } else { 2 };
    let mut measured: Vec<Measured> = Vec::new();
    for _ in 0..rounds {
        for (name, flags) in SETTINGS {
            if !name.contains(&options.filter) || (precision == "f32" && name == "stochastic rounding") {
                continue;
            }
            let flags = flags.replace("SCRATCH", &options.scratch.display().to_string());
            match one(options, name, &format!("{COMMON} --precision {precision} {flags}")) {
                Ok(one) => {
                    println!("{precision} {name}: {:.0} ms, {:.0} MiB", one.ms, mib(one.peak_bytes));
                    match measured.iter_mut().find(|row| row.name == name) {
                        Some(row) => row.ms = row.ms.min(one.ms),
                        None => measured.push(one),
                    }
                }
                Err(problem) => println!("{precision} {name}: {problem}"),
            }
        }
    }
    measured
}

/// One row for each setting, with its relative times and its peak in both precisions.
fn table(measured: &[Vec<Measured>; 2]) -> String {
    let mut page = String::from("# Memory saved and time taken by each lever\n");
    for (precision, rows) in PRECISIONS.iter().zip(measured) {
        if let Some(base) = rows.first() {
            page += &format!("\nThe first row took {:.0} ms in {precision}.\n", base.ms);
        }
    }
    page += "\n| setting | f32: time | planned | peak MiB | bf16: time | planned | peak MiB |\n\
             | --- | --- | --- | --- | --- | --- | --- |\n";
    for (name, _) in SETTINGS {
        let cells: Vec<String> = measured.iter().flat_map(|rows| cells(rows, name)).collect();
        if cells.iter().any(|cell| !cell.is_empty()) {
            let shown = |cell: &String| if cell.is_empty() { " |".to_owned() } else { format!(" {cell} |") };
            page += &format!("| {name} |{}\n", cells.iter().map(shown).collect::<String>());
        }
    }
    page
}

/// The three cells of a setting; empty if it was not measured.
fn cells(rows: &[Measured], name: &str) -> [String; 3] {
    let (Some(base), Some(row)) = (rows.first(), rows.iter().find(|row| row.name == name)) else {
        return Default::default();
    };
    let [time, price] = [row.ms / base.ms, row.price / base.price].map(|ratio| format!("{ratio:.2}"));
    [time, price, format!("{:.0}", mib(row.peak_bytes))]
}

/// Measures the smallest step time and the peak of a setting, and reads its price.
fn one(options: &Options, name: &'static str, line: &str) -> Result<Measured, String> {
    let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let measured = child::run(&options.program, &arguments, None, &options.scratch, &|| false)?;
    let said = measured.json()?;
    let price = said["relative_time"].as_f64().ok_or("no `relative_time` in its output")?;
    Ok(Measured { name, ms: shortest_step(&said)?, peak_bytes: measured.peak_bytes, price })
}

/// The smallest of the step times that `bench --json` printed.
pub fn shortest_step(said: &Value) -> Result<f64, String> {
    let steps = said["step_ms_each"].as_array().ok_or("no `step_ms_each` in its output")?;
    Ok(steps.iter().filter_map(Value::as_f64).fold(f64::INFINITY, f64::min))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_has_one_row_for_both_precisions_and_none_if_it_was_not_measured() {
        let row = |name, ms, mib: u64| Measured { name, ms, peak_bytes: mib << 20, price: ms };
        let f32 = vec![row("whole batch at once", 200.0, 100), row("micro-batches of 4", 300.0, 60)];
        let bf16 = vec![row("whole batch at once", 100.0, 80), row("stochastic rounding", 90.0, 70)];
        let page = table(&[f32, bf16]);
        let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
        let expected = [
            "| whole batch at once | 1.00 | 1.00 | 100 | 1.00 | 1.00 | 80 |",
            "| micro-batches of 4 | 1.50 | 1.50 | 60 | | | |",
            "| stochastic rounding | | | | 0.90 | 0.90 | 70 |",
        ];
        assert_eq!(rows, expected);
        assert!(page.contains("The first row took 200 ms in f32.\n\nThe first row took 100 ms in bf16."), "{page}");
    }
}
