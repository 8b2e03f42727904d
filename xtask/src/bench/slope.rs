//! `bench slope`: whether the resident set grows over thousands of steps with evaluations in between.

use std::fs;

use serde_json::{Value, json};

use super::child;
use super::data::Lengths;
use super::memory::train_arguments;
use super::{Options, mib, write_tables};

const STEPS: u64 = 3000;
/// Steps between two evaluations; the resident set is averaged over this interval.
const INTERVAL: u64 = 200;
/// Intervals that are not counted: first allocations are not growth.
const WARM_UP: usize = 2;

const RUN: &str = "train.batch_size=8 train.eval_samples=16 train.eval_generate_samples=4 train.eval_max_new_tokens=16 \
                   data.max_source_tokens=48 data.max_target_tokens=48 checkpoint.keep_best=0 checkpoint.keep_last=1";

/// Runs and writes the tables.
pub fn run(options: &Options) -> Result<(), String> {
    let directory = options.scratch.join("slope");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
    let output = directory.join("run");
    let steps = if options.quick { STEPS / 5 } else { STEPS };
    let set = format!(
        "{RUN} train.max_steps={steps} train.epochs=1000 train.eval_every_steps={INTERVAL} checkpoint.every_steps={INTERVAL}"
    );
    let set: Vec<String> = set.split_whitespace().map(str::to_owned).collect();
    let mut arguments = train_arguments("tiny", &set, Lengths::Uneven, &directory, &output)?;
    arguments.extend(["--memory-budget", "512MiB"].map(str::to_owned));
    let ran = child::run(&options.program, &arguments, None, &options.scratch, &|| false)?;
    if ran.exit_code != 0 {
        return Err(format!("exit code {}: {}", ran.exit_code, ran.stderr));
    }
    let means = means(&fs::read_to_string(output.join("metrics.jsonl")).map_err(|error| error.to_string())?);
    let (slope, error) = slope(means.get(WARM_UP..).unwrap_or_default());
    #[expect(clippy::cast_precision_loss, reason = "a count of steps")]
    let per_step = 1024.0 / INTERVAL as f64;
    let (slope, error) = (slope * per_step, error * per_step);
    let verdict = if slope.abs() <= 2.0 * error { "zero within noise" } else { "not zero" };
    let conclusion = format!("{slope:+.3} KiB a step, standard error {error:.3}: {verdict}");
    println!("{conclusion}");
    let _ = fs::remove_dir_all(&directory);
    let each: Vec<String> = means.iter().map(|mib| format!("{mib:.2}")).collect();
    let markdown = format!(
        "# The resident set over {steps} steps\n\nThe tiny preset, 8 samples of very uneven length a step, an evaluation with\n\
         generation and a save every {INTERVAL} steps. A line through the means of {INTERVAL} steps each, the first {WARM_UP} left out:\n\n\
         **{conclusion}**. Peak {:.1} MiB.\n\nMeans in MiB: {}.\n",
        mib(ran.peak_bytes),
        each.join(", ")
    );
    let json = json!({"steps": steps, "kib_a_step": slope, "standard_error": error, "means_mib": means, "peak_bytes": ran.peak_bytes});
    write_tables(options, &markdown, &json)
}

/// The mean resident set, in MiB, of every complete interval.
fn means(metrics: &str) -> Vec<f64> {
    let events = metrics.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let rss: Vec<f64> = events
        .filter(|event| event["event"] == "step")
        .filter_map(|event| Some(mib(event["rss_bytes"].as_u64()?)))
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "a count of steps")]
    let mean = |steps: &[f64]| steps.iter().sum::<f64>() / steps.len() as f64;
    rss.chunks_exact(usize::try_from(INTERVAL).unwrap_or(1)).map(mean).collect()
}

/// The slope of a line through equally spaced values, and its standard error.
#[expect(clippy::cast_precision_loss, reason = "a count of values")]
fn slope(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let middle = (n - 1.0) / 2.0;
    let mean = values.iter().sum::<f64>() / n;
    let places = || (0..values.len()).map(|i| i as f64 - middle);
    let spread: f64 = places().map(|x| x * x).sum();
    let slope = places().zip(values).map(|(x, y)| x * (y - mean)).sum::<f64>() / spread;
    let rest: f64 = places().zip(values).map(|(x, y)| (y - mean - slope * x).powi(2)).sum();
    (slope, (rest / (n - 2.0) / spread).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_its_slope_and_no_error_and_noise_around_it_has_one() {
        let (slope_of, error) = slope(&[1.0, 3.0, 5.0, 7.0]);
        assert!((slope_of - 2.0).abs() < 1e-12 && error < 1e-12);
        let (slope_of, error) = slope(&[1.0, -1.0, 1.0, -1.0, 1.0]);
        assert!(slope_of.abs() < error, "{slope_of} {error}");
    }
}
