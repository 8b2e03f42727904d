//! The runs of a proof: how they are started, watched, killed and read.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memory_policy::{Bytes, Enclosure, peak_of};
use serde_json::Value;

use crate::cli::view_flags::ProofArgs;
use crate::config::paths;
use crate::failure::{Exit, Failure, Outcome};
use crate::files::assets;
use crate::screen::report;
use crate::screen::stop::Stop;

/// The time between two looks at a run.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The most bytes of events and of logs that are read.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// The shape: 7.9 M parameters in 4 + 4 layers. Their state and activations are several times the memory of the program itself, so that a
/// quarter of the whole is a real limit. No relu: where a sum is rounded across its kink, losses of the same run in two cuts differ by up to
/// 4e-4 within 20 steps; with GELU by 1e-6.
const SHAPE: &str = r#"{
  "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 2048, "d_model": 256, "d_kv": 64, "d_ff": 688,
  "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4, "relative_attention_num_buckets": 32, "dropout_rate": 0.1,
  "feed_forward_proj": "gated-gelu", "tie_word_embeddings": true, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0
}
"#;

/// More than the fastest plan of the shape takes, so that memory does not decide which plan that is.
const AMPLE: Bytes = Bytes::gib(2);

/// What a run's hard limit has beyond its budget: a control group also counts pages of files that the kernel keeps, the program's own too.
const PAGES: Bytes = Bytes::mib(64);

/// The settings of every run. Sources and targets are as long as the limits, so that the bill's longest batch is every batch. The plan
/// does not depend on the speed of the machine.
const SETTINGS: [&str; 13] = [
    "train.batch_size=192",
    "data.max_source_tokens=8",
    "data.max_target_tokens=8",
    "optimizer.name=adamw",
    "optimizer.learning_rate=3e-4",
    "optimizer.weight_decay=0.01",
    "run.device=cpu",
    "run.log_every_steps=1",
    "checkpoint.keep_last=1",
    "checkpoint.keep_best=0",
    "memory.prices=built-in",
    "train.eval_samples=0",
    "train.grad_clip_norm=1.0",
];

/// The runs by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    Ample,
    Quarter,
    Killed,
    /// The killed run, continued in the same directory.
    Resumed,
    /// The run that starts from the weights that transformers wrote.
    BesideTorch,
}

impl Names {
    /// The name of the directory.
    fn directory(self) -> &'static str {
        match self {
            Names::Ample => "ample",
            Names::Quarter => "quarter",
            Names::Killed | Names::Resumed => "killed",
            Names::BesideTorch => "beside-torch",
        }
    }

    /// The name on the page.
    pub fn title(self) -> &'static str {
        match self {
            Names::Ample => "ample",
            Names::Quarter => "quarter",
            Names::Killed => "killed",
            Names::Resumed => "killed and resumed",
            Names::BesideTorch => "train_low_mem",
        }
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    Done,
    /// By the proof itself.
    Killed,
    /// With another exit code, or by another signal: the reason in words.
    Failed(String),
}

/// A run that has ended.
#[derive(Debug)]
pub struct Run {
    pub name: Names,
    pub budget: Bytes,
    /// The peak of the plan that was printed for the same settings before.
    pub predicted: Bytes,
    /// The largest resident set that the system counted.
    pub peak: Bytes,
    /// The events of its steps, in order; of a step that was made twice, the later one.
    pub steps: Vec<Value>,
    pub seconds: f64,
    pub ended: Ended,
}

impl Run {
    /// The reason why nothing can be said of this run, if it did not end well.
    pub fn expect_done(&self) -> Result<(), String> {
        match &self.ended {
            Ended::Done => Ok(()),
            Ended::Killed => Err(format!("the run `{}` was not resumed", self.name.title())),
            Ended::Failed(why) => Err(format!("the run `{}` {why}", self.name.title())),
        }
    }
}

/// The place and the settings of the runs.
pub struct Lab<'a> {
    program: PathBuf,
    place: PathBuf,
    pub steps: u64,
    pub seed: u64,
    /// The settings that decide in which order sums are made, for the runs whose bytes are compared.
    order: OnceCell<Vec<String>>,
    stop: &'a Stop,
}

impl<'a> Lab<'a> {
    /// Makes the directory, and writes the shape and the sample data into it.
    pub fn new(flags: &ProofArgs, stop: &'a Stop) -> Outcome<Self> {
        let place = flags.output.clone();
        let own_program =
            || std::env::current_exe().map_err(|error| Failure::internal(format!("this program: {error}")));
        let program = flags.program.clone().map_or_else(own_program, Ok)?;
        durable_files::create_directories(&place)?;
        let is_used =
            regular_file::list(&place).map_err(|error| Failure::io("read it", &place, &error))?.next().is_some();
        if is_used {
            return Err(Failure::usage(format!("{}: expected an empty directory", place.display()))
                .hint("remove an earlier proof, or name another directory with `--output`"));
        }
        assets::place_all(&place)?;
        durable_files::write_atomic(&place.join("shape.json"), SHAPE.as_bytes())?;
        let seed = flags.seed.unwrap_or_else(random_seed);
        Ok(Self { program, place, steps: flags.steps, seed, order: OnceCell::new(), stop })
    }

    /// The directory of a run.
    pub fn directory(&self, name: Names) -> PathBuf {
        self.place.join(name.directory())
    }

    /// A path in the proof's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.join(name)
    }

    /// Steps between two checkpoints.
    pub fn save_every(&self) -> u64 {
        (self.steps / 4).max(1)
    }

    /// Random numbers of the proof's seed.
    pub fn random(&self) -> Random {
        Random(self.seed)
    }

    /// A hard limit around the processes of a run.
    pub fn enclosure(&self, budget: Bytes, name: Names) -> Enclosure {
        Enclosure::new(budget + PAGES, name.directory())
    }

    /// Has the runs at this budget sum in one order. Each run plans for itself, from the memory that it has taken until then, which differs by
    /// some pages from run to run: at the border between two plans it would take the other one. A MiB is left for that.
    pub fn keep_order(&self, budget: Bytes) -> Outcome<()> {
        let less = Bytes(budget.0.saturating_sub(1 << 20));
        let plan = self.planned(Names::Quarter, less, &self.enclosure(budget, Names::Quarter))?;
        let accumulation = if plan["layer_major"].is_null() { "micro-batch-major" } else { "layer-major" };
        let order = [
            format!("memory.micro_batch_samples={}", plan["micro_batch_samples"]),
            format!("memory.loss_chunk_rows={}", plan["loss_chunk_rows"]),
            format!("memory.accumulation={accumulation}"),
        ];
        self.order.set(order.into()).map_err(|_| Failure::internal("proof: an order of sums was chosen before"))
    }

    /// The bytes of the least budget that allows the fastest plan.
    pub fn least_budget_of_fastest(&self) -> Outcome<u64> {
        Ok(self.planned(Names::Ample, AMPLE, &self.enclosure(AMPLE, Names::Ample))?["smallest_budget_bytes"]
            .as_u64()
            .unwrap_or(0))
    }

    /// What `plan --json` prints for a run.
    fn planned(&self, name: Names, budget: Bytes, enclosure: &Enclosure) -> Outcome<Value> {
        let mut command = Command::new(&self.program);
        command.args(["plan", "--json"]).args(self.arguments(name, budget));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Within the limit, as the run: a group leaves less memory than its limit, and a plan takes that into account.
        let child = enclosure.start(&mut command).map_err(|error| self.cannot_start(&error))?;
        let output = child.wait_with_output().map_err(|error| self.cannot_start(&error))?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let unplanned = || {
            let why = text.lines().find(|line| line.starts_with("error: ")).unwrap_or("it printed no plan").to_owned();
            Failure::internal(format!("no plan of {budget} on this machine: {}", why.trim_start_matches("error: ")))
        };
        match serde_json::from_slice::<Value>(&output.stdout) {
            Ok(plan) if plan["predicted_peak"].is_u64() => Ok(plan),
            _ => Err(unplanned()),
        }
    }

    /// The flags of a run.
    fn arguments(&self, name: Names, budget: Bytes) -> Vec<String> {
        let text = |path: PathBuf| paths::to_text(path.as_os_str());
        let mut arguments: Vec<String> = Vec::new();
        let mut flag = |name: &str, value: String| arguments.extend([format!("--{name}"), value]);
        flag("output", text(self.directory(name)));
        flag("max-steps", self.steps.to_string());
        flag("memory-budget", format!("{}MiB", budget.0 >> 20));
        match name {
            Names::BesideTorch => {
                flag("model", text(self.path("init")));
                flag("data", text(self.path("rows.jsonl")));
                flag("set", "data.shuffle=false".into());
                flag("set", "train.dropout=0".into());
            }
            _ => {
                flag("preset", text(self.path("shape.json")));
                flag("tokenizer", text(self.path("sample-data/sample-tokenizer.json")));
                flag("data", text(self.path("sample-data/sample-train.parquet")));
            }
        }
        flag("set", format!("checkpoint.every_steps={}", self.save_every()));
        SETTINGS.iter().for_each(|setting| flag("set", (*setting).to_owned()));
        if let (Names::Quarter | Names::Killed | Names::Resumed, Some(order)) = (name, self.order.get()) {
            order.iter().for_each(|setting| flag("set", setting.clone()));
        }
        if name == Names::Resumed {
            arguments.push("--keep-training".into());
        }
        arguments
    }

    /// Makes a run to its end.
    pub fn run(&self, name: Names, budget: Bytes, enclosure: &Enclosure) -> Outcome<Run> {
        self.run_until(name, budget, enclosure, None)
    }

    /// Makes a run to its end, or kills it: after this step and so many seconds.
    pub fn run_until(
        &self,
        name: Names,
        budget: Bytes,
        enclosure: &Enclosure,
        kill: Option<(u64, f64)>,
    ) -> Outcome<Run> {
        let predicted = Bytes(self.planned(name, budget, enclosure)?["predicted_peak"].as_u64().unwrap_or(0));
        let log = self.path(&format!("{}.log", name.directory()));
        let failed = |error: std::io::Error| Failure::io("write to it", &log, &error);
        let file = durable_files::append(&log).map_err(failed)?;
        let mut command = Command::new(&self.program);
        command.arg("train").args(self.arguments(name, budget)).stdin(Stdio::null());
        command.stdout(file.try_clone().map_err(failed)?).stderr(file);
        let began = Instant::now();
        let mut child = enclosure.start(&mut command).map_err(|error| self.cannot_start(&error))?;
        let (mut peak, mut is_killed, mut step_seen) = (Bytes::ZERO, false, None);
        let status = loop {
            peak = peak.max(peak_of(child.id()).unwrap_or_default());
            if let Some(status) = child.try_wait().map_err(|error| Failure::internal(format!("a run: {error}")))? {
                break status;
            }
            let is_due = kill.is_some_and(|(step, delay)| {
                if step_seen.is_none() && self.steps_of(name).len() as u64 >= step {
                    step_seen = Some(Instant::now());
                }
                step_seen.is_some_and(|seen| seen.elapsed().as_secs_f64() >= delay)
            });
            if is_due || self.stop.requested() {
                is_killed |= is_due;
                // It may have ended since the last look.
                let _ = child.kill();
            }
            std::thread::park_timeout(POLL_INTERVAL);
        };
        if self.stop.requested() {
            return Err(Failure::new(Exit::Interrupted, "interrupted; a proof cannot be resumed")
                .hint(format!("remove {} and start again", self.place.display())));
        }
        let steps = self.steps_of(name);
        // The last moments are in the run's own account: it ends with its peak.
        let own = steps.last().and_then(|step| step["peak_rss_bytes"].as_u64()).unwrap_or(0);
        let ended = match status.code() {
            Some(0) if steps.len() as u64 == self.steps => Ended::Done,
            Some(0) => Ended::Failed(format!("made {} of {} steps", steps.len(), self.steps)),
            Some(code) => Ended::Failed(format!("ended with exit code {code}: {}", last_error(&log))),
            None if is_killed => Ended::Killed,
            None => Ended::Failed(format!("was ended by a signal; limited by {}", enclosure.in_words())),
        };
        let seconds = began.elapsed().as_secs_f64();
        report::note(&format!("{}: {:.0} s, peak {}", name.title(), seconds, peak.max(Bytes(own))));
        Ok(Run { name, budget, predicted, peak: peak.max(Bytes(own)), steps, seconds, ended })
    }

    fn cannot_start(&self, error: &std::io::Error) -> Failure {
        Failure::usage(format!("{}: cannot start it: {error}", self.program.display()))
            .hint("`--program` names a program like this one; without it, this one is tried")
    }

    /// The steps of a run so far. Of steps that were made again, the later ones count; a line that is being written does not.
    fn steps_of(&self, name: Names) -> Vec<Value> {
        let path = self.directory(name).join("metrics.jsonl");
        let text = regular_file::read_to_string(&path, MAX_TEXT_BYTES).unwrap_or_default();
        let mut steps: Vec<Value> = Vec::new();
        for event in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            if event["event"] == "step" {
                let number = event["step"].as_u64();
                steps.retain(|step| step["step"].as_u64() < number);
                steps.push(event);
            }
        }
        steps
    }
}

/// The last error in a log.
fn last_error(log: &Path) -> String {
    let text = regular_file::read_to_string(log, MAX_TEXT_BYTES).unwrap_or_default();
    let last = text.lines().rev().find_map(|line| line.strip_prefix("error: ")).unwrap_or("see its log");
    run_report::figures::clipped(last, 200)
}

/// A random seed.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // Short enough to be typed.
    RandomState::new().hash_one(0) % 1_000_000
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
