//! `bench pace`: compares a step's planned time and written bytes, from measured prices, with the real ones.

use std::fs;

use serde_json::json;

use super::{Options, child, write_tables};

/// Model, samples, tokens of each side, timed steps.
type Sizes = (&'static str, u64, u64, u64);

const SIZES: [Sizes; 10] = [
    ("tiny", 4, 8, 40),
    ("tiny", 32, 32, 40),
    ("t5-small", 1, 16, 12),
    ("t5-small", 1, 64, 8),
    ("t5-small", 8, 32, 6),
    ("t5-small", 8, 128, 3),
    ("t5-small", 2, 1024, 2),
    ("t5-base", 1, 32, 4),
    ("t5-base", 4, 128, 2),
    ("chatlm-0.2b", 2, 64, 3),
];

/// Choices of levers, and their flags; `SCRATCH` stands for a directory.
const CHOICES: [(&str, &str); 6] = [
    ("nothing saved", ""),
    ("micro-batches of 1", "--micro-batch 1"),
    ("every block recomputed", "--recompute full"),
    ("layer-major, gradients of blocks dropped", "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 0"),
    (
        "gradients and activations in files",
        "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 0 --offload-gradients SCRATCH --offload SCRATCH --recompute none",
    ),
    (
        "gradients, activations and weights in files",
        "--micro-batch 1 --accumulation layer-major --kept-gradient-blocks 0 --offload-gradients SCRATCH --offload SCRATCH --offload-weights SCRATCH --recompute none",
    ),
];

/// Rounds of a whole benchmark; the median of each case counts.
const ROUNDS: usize = 3;

struct Case {
    name: String,
    arguments: Vec<String>,
    /// Median milliseconds of a step, one value per round.
    measured: Vec<f64>,
    predicted: f64,
    /// Planned bytes that a step writes to files.
    written: u64,
}

/// Runs every case in turn, round by round, and writes the tables.
pub fn run(options: &Options) -> Result<(), String> {
    let files = options.scratch.join("pace");
    fs::create_dir_all(&files).map_err(|error| error.to_string())?;
    let mut cases = cases(options, &files.display().to_string());
    let mut problems = 0;
    for _ in 0..if options.quick { 1 } else { ROUNDS } {
        for case in &mut cases {
            match case.one(options) {
                Ok(()) => print!("{}", case.row().1),
                Err(problem) => {
                    println!("{}: {problem}", case.name);
                    problems += 1;
                }
            }
        }
    }
    let _ = fs::remove_dir_all(&files);
    let mut markdown = String::from(
        "# The time of a step, planned and measured\n\nPlanned from the prices that this machine was measured with; measured as the median of single steps over samples of full\n\
         length. Files fit into the page cache.\n\n| case | planned ms | measured ms | planned of measured | written MiB |\n\
         | --- | --- | --- | --- | --- |\n",
    );
    let mut rows = Vec::new();
    let mut ratios = Vec::new();
    for case in cases.iter().filter(|case| !case.measured.is_empty()) {
        let (ratio, row) = case.row();
        markdown += &row;
        ratios.push(ratio);
        rows.push(json!({"case": case.name, "predicted_ms": case.predicted, "measured_ms": case.measured,
            "ratio": ratio, "written_bytes": case.written}));
    }
    ratios.sort_by(f64::total_cmp);
    let within = ratios.iter().filter(|ratio| (0.75..=1.25).contains(*ratio)).count();
    let (Some(lowest), Some(highest)) = (ratios.first(), ratios.last()) else {
        return Err("no case was measured".into());
    };
    let conclusion =
        format!("{within} of {} cases within 25 %: {lowest:.2} to {highest:.2} of the measured time", ratios.len());
    println!("{conclusion}");
    markdown += &format!("\n{conclusion}.\n");
    write_tables(options, &markdown, &json!({"cases": rows, "within_25_percent": within}))?;
    if problems > 0 { Err(format!("{problems} runs failed")) } else { Ok(()) }
}

fn cases(options: &Options, scratch: &str) -> Vec<Case> {
    let mut cases = Vec::new();
    for (model, samples, tokens, steps) in SIZES {
        for (choice, flags) in CHOICES {
            for precision in ["f32", "bf16"] {
                let name = format!("{model}, {samples} x {tokens}+{tokens}, {precision}, {choice}");
                let is_quick = model == "tiny" || tokens == 16;
                if !name.contains(&options.filter) || (options.quick && !is_quick) {
                    continue;
                }
                let micro_batch =
                    if flags.contains("--micro-batch") { "" } else { &format!("--micro-batch {samples}") };
                let line = format!(
                    "bench --json --model {model} --batch {samples} --source-tokens {tokens} --target-tokens {tokens} \
                     --steps {steps} --precision {precision} {micro_batch} {}",
                    flags.replace("SCRATCH", scratch)
                );
                let arguments = line.split_whitespace().map(str::to_owned).collect();
                cases.push(Case { name, arguments, measured: Vec::new(), predicted: 0.0, written: 0 });
            }
        }
    }
    cases
}

impl Case {
    fn one(&mut self, options: &Options) -> Result<(), String> {
        let ran = child::run(&options.program, &self.arguments, None, &options.scratch, &|| false)?;
        let said = ran.json()?;
        self.predicted = said["predicted_step_ms"].as_f64().ok_or("no `predicted_step_ms` in its output")?;
        self.written = said["step_written_bytes"].as_u64().unwrap_or(0);
        self.measured.push(said["step_ms"].as_f64().ok_or("no `step_ms` in its output")?);
        Ok(())
    }

    /// The planned time over the measured one, and a row of the table.
    fn row(&self) -> (f64, String) {
        let mut sorted = self.measured.clone();
        sorted.sort_by(f64::total_cmp);
        let measured = sorted[sorted.len() / 2];
        let ratio = self.predicted / measured;
        let written = super::mib(self.written);
        (ratio, format!("| {} | {:.1} | {measured:.1} | {ratio:.2} | {written:.1} |\n", self.name, self.predicted))
    }
}
