//! `bench levers`: what each lever saves and what it costs, a step of t5-small at a time.
//!
//! Each round runs every setting once, so that a machine that slows down slows all of them; the smallest
//! step time of a setting is its price, because noise only ever adds.

use serde_json::{Value, json};

use super::{Options, child, mib, write_tables};

const COMMON: &str = "bench --json --model t5-small --batch 8 --source-tokens 256 --target-tokens 256 --steps 2";

/// Setting, and its flags beside [`COMMON`]. The first one is what the others are held against.
const SETTINGS: [(&str, &str); 13] = [
    ("whole batch at once", "--micro-batch 8"),
    ("micro-batches of 4", "--micro-batch 4"),
    ("micro-batches of 2", "--micro-batch 2"),
    ("micro-batches of 1", "--micro-batch 1"),
    ("6 of 12 blocks recomputed", "--micro-batch 8 --recompute 6"),
    ("every block recomputed", "--micro-batch 8 --recompute full"),
    ("every block recomputed, micro-batches of 1", "--micro-batch 1 --recompute full"),
    ("1024 rows of logits", "--micro-batch 8 --loss-chunk-rows 1024"),
    ("64 rows of logits", "--micro-batch 8 --loss-chunk-rows 64"),
    ("16 rows of logits", "--micro-batch 8 --loss-chunk-rows 16"),
    ("layer-major, micro-batches of 1", "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 0"),
    ("layer-major, all gradients kept", "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 12"),
    ("stochastic rounding", "--micro-batch 8 --master-weights stochastic-rounding"),
];

/// Measures every setting in both precisions and writes the tables.
pub fn run(options: &Options) -> Result<(), String> {
    let rounds = if options.quick { 1 } else { 3 };
    let (mut markdown, mut json) = (
        String::from(
            "# What each lever saves and costs\n\nWritten by `cargo xtask bench levers`: t5-small, 8 x 256+256 tokens, dropout on.\n",
        ),
        Vec::new(),
    );
    for precision in ["f32", "bf16"] {
        let mut measured: Vec<(&str, f64, u64)> = Vec::new();
        for _ in 0..rounds {
            for (name, flags) in SETTINGS {
                if !name.contains(&options.filter) || (precision == "f32" && name == "stochastic rounding") {
                    continue;
                }
                match one(options, &format!("{COMMON} --precision {precision} {flags}")) {
                    Ok((ms, peak)) => match measured.iter_mut().find(|row| row.0 == name) {
                        Some(row) => row.1 = row.1.min(ms),
                        None => measured.push((name, ms, peak)),
                    },
                    Err(problem) => println!("{precision} {name}: {problem}"),
                }
            }
        }
        let Some(&(_, base_ms, base_peak)) = measured.first() else { continue };
        markdown += &format!(
            "\n## {precision}\n\n| setting | ms | time | peak MiB | saved MiB |\n| --- | --- | --- | --- | --- |\n"
        );
        for (name, ms, peak) in measured {
            let row = format!(
                "| {name} | {ms:.0} | {:.2} | {:.0} | {:.0} |\n",
                ms / base_ms,
                mib(peak),
                mib(base_peak) - mib(peak)
            );
            print!("{precision} {row}");
            markdown += &row;
            json.push(json!({"precision": precision, "setting": name, "step_ms": ms, "relative_time": ms / base_ms, "peak_bytes": peak}));
        }
    }
    write_tables(options, "memory-levers", &markdown, &json!({"settings": json}))
}

/// The smallest step time and the peak.
fn one(options: &Options, line: &str) -> Result<(f64, u64), String> {
    let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let measured = child::run(&options.program, &arguments, None, &options.scratch, &|| false)?;
    let said: Value = serde_json::from_str(&measured.stdout)
        .map_err(|error| format!("exit code {}: {error}: {}", measured.exit_code, measured.stderr.trim()))?;
    let steps = said["step_ms_each"].as_array().ok_or("it printed no times")?;
    Ok((steps.iter().filter_map(Value::as_f64).fold(f64::INFINITY, f64::min), measured.peak_bytes))
}
