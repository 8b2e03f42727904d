//! A run, built from its events in bounded memory.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::answers::{Answers, SampleAnswer};
use crate::evaluation::Evaluation;
use crate::figures::clipped;
use crate::line::{Line, Step};
use crate::series::Series;

/// The most characters of a run's name.
const MAX_NAME_CHARACTERS: usize = 160;
/// The most evaluations that are kept; beyond, every second one is dropped.
const MAX_EVALUATIONS: usize = 512;
/// The most notes that are kept.
const MAX_NOTES: usize = 48;
/// The most characters of a note.
const MAX_NOTE_CHARACTERS: usize = 300;
/// The most tasks whose samples are counted.
const MAX_TASKS: usize = 64;
/// The most bytes of the scores of labels that are kept, of all evaluations.
const MAX_CLASSES_BYTES: usize = 512 << 10;
/// The most bytes of a plan's JSON that are kept.
const MAX_PLAN_BYTES: usize = 64 << 10;
/// The most bytes of a config that are kept.
const MAX_CONFIG_BYTES: usize = 48 << 10;
/// The most bytes of the first screen that are kept.
const MAX_SCREEN_BYTES: usize = 8 << 10;
/// Milliseconds of the narrowest bucket of a curve over time.
const MILLISECONDS: u64 = 50;

/// An event to show.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// The event's step.
    pub step: u64,
    /// The run's time at the event, in milliseconds.
    pub at_ms: u64,
    /// `replan`, `warning`, `resume`.
    pub kind: String,
    /// A text for the reader.
    pub text: String,
}

/// Sums over the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Steps.
    pub steps: u64,
    /// Samples.
    pub samples: u64,
    /// Source tokens.
    pub source_tokens: u64,
    /// Target tokens.
    pub target_tokens: u64,
    /// Tokens including padding.
    pub padded_tokens: u64,
    /// Sources that were cut.
    pub cut_sources: u64,
    /// Targets that were cut.
    pub cut_targets: u64,
    /// Tokens of the longest source and target.
    pub longest: (u64, u64),
    /// Milliseconds of steps.
    pub step_ms: f64,
    /// Milliseconds of waiting for data.
    pub data_wait_ms: f64,
    /// The largest resident set.
    pub peak_rss_bytes: u64,
    /// Checkpoints saved.
    pub checkpoints: u64,
    /// Warnings, including those that were dropped.
    pub warnings: u64,
    /// Replans, including those that were dropped.
    pub replans: u64,
}

impl Totals {
    /// The percentage of all steps' time that was spent waiting for data. `None` before the first step.
    pub fn data_wait_percent(&self) -> Option<f64> {
        let all = self.data_wait_ms + self.step_ms;
        (all > 0.0).then(|| 100.0 * self.data_wait_ms / all)
    }
}

/// A run.
#[derive(Clone, Debug)]
pub struct Run {
    name: String,
    /// By step, like the three curves after it.
    pub(crate) loss: Series,
    pub(crate) learning_rate: Series,
    pub(crate) gradient_norm: Series,
    pub(crate) tokens_per_second: Series,
    /// Percentage of a step's time.
    pub(crate) data_wait: Series,
    /// By milliseconds of the run, like the three curves after it.
    pub(crate) rss: Series,
    pub(crate) available: Series,
    pub(crate) pressure: Series,
    pub(crate) device: Series,
    evaluations: Vec<Evaluation>,
    answers: Answers,
    notes: Vec<Note>,
    totals: Totals,
    samples_of_tasks: BTreeMap<String, u64>,
    total_steps: Option<u64>,
    step: u64,
    epoch: u64,
    predicted_peak: Option<u64>,
    start: Value,
    screen: String,
    config: String,
    /// JSON as text, because a parsed tree takes many times the memory.
    plan: Option<String>,
    end: Option<(String, Value)>,
    clock: Clock,
    first_ms: Option<u64>,
}

impl Run {
    /// Makes a run without events. The name is shown unchanged unless it is too long.
    pub fn new(name: &str) -> Self {
        Self {
            name: clipped(name, MAX_NAME_CHARACTERS),
            loss: Series::new(1),
            learning_rate: Series::new(1),
            gradient_norm: Series::new(1),
            tokens_per_second: Series::new(1),
            data_wait: Series::new(1),
            rss: Series::new(MILLISECONDS),
            available: Series::new(MILLISECONDS),
            pressure: Series::new(MILLISECONDS),
            device: Series::new(MILLISECONDS),
            evaluations: Vec::new(),
            answers: Answers::default(),
            notes: Vec::new(),
            totals: Totals::default(),
            samples_of_tasks: BTreeMap::new(),
            total_steps: None,
            step: 0,
            epoch: 0,
            predicted_peak: None,
            start: Value::Null,
            screen: String::new(),
            config: String::new(),
            plan: None,
            end: None,
            clock: Clock::default(),
            first_ms: None,
        }
    }

    /// Sets the text of `resolved.toml`.
    pub fn set_config(&mut self, text: &str) {
        text.get(..text.floor_char_boundary(MAX_CONFIG_BYTES)).unwrap_or_default().clone_into(&mut self.config);
    }

    /// Adds a line of `metrics.jsonl`. A line that is not an event changes nothing.
    pub fn note(&mut self, line: &str) {
        if let Some(line) = Line::parse(line) {
            self.note_line(&line);
        }
    }

    /// Adds an event.
    pub fn note_line(&mut self, line: &Line) {
        match line {
            Line::Step(step) => self.note_step(step),
            Line::Other { event, time_ms, fields } => self.note_event(event, *time_ms, fields),
        }
    }

    fn note_step(&mut self, step: &Step) {
        let at_ms = self.at(step.time_ms);
        self.step = step.step;
        self.epoch = step.epoch;
        self.end = None;
        let of = step.step;
        let by_step = [
            (&mut self.loss, step.loss),
            (&mut self.learning_rate, step.lr),
            (&mut self.gradient_norm, step.grad_norm),
            (&mut self.tokens_per_second, step.tokens_per_second),
        ];
        by_step.into_iter().for_each(|(series, value)| value.into_iter().for_each(|value| series.note(of, value)));
        let (step_ms, wait_ms) = (step.step_ms.unwrap_or(0.0), step.data_wait_ms.unwrap_or(0.0));
        if step_ms + wait_ms > 0.0 {
            self.data_wait.note(of, 100.0 * wait_ms / (step_ms + wait_ms));
        }
        #[expect(clippy::cast_precision_loss, reason = "bytes, for drawing")]
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        let by_time = [
            (&mut self.rss, bytes(step.rss_bytes)),
            (&mut self.available, bytes(step.available_bytes)),
            (&mut self.pressure, step.pressure_percent),
            (&mut self.device, bytes(step.device_bytes)),
        ];
        by_time.into_iter().for_each(|(series, value)| value.into_iter().for_each(|value| series.note(at_ms, value)));
        self.predicted_peak = step.predicted_peak_bytes.or(self.predicted_peak);
        let totals = &mut self.totals;
        totals.steps += 1;
        for (sum, more) in [
            (&mut totals.samples, step.samples),
            (&mut totals.source_tokens, step.source_tokens),
            (&mut totals.target_tokens, step.target_tokens),
            (&mut totals.padded_tokens, step.padded_tokens),
            (&mut totals.cut_sources, step.cut_sources),
            (&mut totals.cut_targets, step.cut_targets),
        ] {
            *sum = sum.saturating_add(more);
        }
        for (task, samples) in &step.tasks {
            if self.samples_of_tasks.len() < MAX_TASKS || self.samples_of_tasks.contains_key(task) {
                let sum = self.samples_of_tasks.entry(clipped(task, 80)).or_default();
                *sum = sum.saturating_add(*samples);
            }
        }
        totals.longest.0 = totals.longest.0.max(step.longest_source.unwrap_or(0));
        totals.longest.1 = totals.longest.1.max(step.longest_target.unwrap_or(0));
        totals.step_ms += step_ms;
        totals.data_wait_ms += wait_ms;
        totals.peak_rss_bytes = totals.peak_rss_bytes.max(step.peak_rss_bytes.unwrap_or(0));
    }

    fn note_event(&mut self, event: &str, time_ms: Option<u64>, fields: &Value) {
        if matches!(event, "start" | "resume") {
            self.clock.begin(time_ms);
        }
        let at_ms = self.at(time_ms);
        let step = fields["step"].as_u64().unwrap_or(self.step);
        match event {
            "start" | "resume" => {
                self.step = step;
                self.total_steps = fields["total_steps"].as_u64().or(self.total_steps);
                if let Some(screen) = fields["screen"].as_str() {
                    let end = screen.floor_char_boundary(MAX_SCREEN_BYTES);
                    screen[..end].clone_into(&mut self.screen);
                }
                self.start = without_large(fields);
                self.end = None;
                if event == "resume" {
                    self.add_note(step, at_ms, event, format!("resumed at step {step}"));
                }
            }
            "plan" => self.set_plan(fields),
            "replan" => {
                self.totals.replans += 1;
                self.set_plan(&fields["plan"]);
                let text = fields["reason_text"].as_str().map_or_else(|| reason(&fields["reason"]), str::to_owned);
                self.add_note(step, at_ms, event, text);
            }
            "warning" => {
                self.totals.warnings += 1;
                let text = fields["message"].as_str().or(fields["kind"].as_str()).unwrap_or_default().to_owned();
                self.add_note(step, at_ms, event, text);
            }
            "memory" => {
                #[expect(clippy::cast_precision_loss, reason = "bytes, for drawing")]
                for (series, key) in [(&mut self.rss, "rss_bytes"), (&mut self.available, "available_bytes")] {
                    fields[key].as_u64().into_iter().for_each(|bytes| series.note(at_ms, bytes as f64));
                }
                let peak = fields["peak_rss_bytes"].as_u64().unwrap_or(0);
                self.totals.peak_rss_bytes = self.totals.peak_rss_bytes.max(peak);
            }
            "checkpoint" => self.totals.checkpoints += 1,
            "eval" => self.note_evaluation(step, fields),
            "end" => {
                let peak = fields["peak_rss_bytes"].as_u64().unwrap_or(0);
                self.totals.peak_rss_bytes = self.totals.peak_rss_bytes.max(peak);
                let reason = clipped(fields["reason"].as_str().unwrap_or("ended"), 40);
                self.end = Some((reason, without_large(fields)));
            }
            _ => {}
        }
    }

    fn note_evaluation(&mut self, step: u64, fields: &Value) {
        let Some(evaluation) = Evaluation::from_event(step, fields) else { return };
        self.evaluations.retain(|other| other.step != step);
        self.evaluations.push(evaluation);
        let mut bytes = 0;
        for evaluation in self.evaluations.iter_mut().rev() {
            for text in [&mut evaluation.classes, &mut evaluation.tasks] {
                bytes += text.as_ref().map_or(0, String::len);
                text.take_if(|_| bytes > MAX_CLASSES_BYTES);
            }
        }
        if self.evaluations.len() > MAX_EVALUATIONS {
            let mut at = 0;
            let last = self.evaluations.len() - 1;
            self.evaluations.retain(|_| {
                at += 1;
                (at - 1) % 2 == 0 || at - 1 == last
            });
        }
        if let Ok(answers) = serde_json::from_value::<Vec<SampleAnswer>>(fields["examples"].clone()) {
            self.answers.note(step, answers);
        }
    }

    fn set_plan(&mut self, plan: &Value) {
        let text = plan.to_string();
        if plan.is_object() && text.len() <= MAX_PLAN_BYTES {
            self.predicted_peak = plan["predicted_peak"].as_u64().or(self.predicted_peak);
            self.plan = Some(text);
        }
    }

    fn add_note(&mut self, step: u64, at_ms: u64, kind: &str, text: String) {
        if self.notes.len() == MAX_NOTES {
            // The first notes show the beginning, the newest the present; drop one in the middle.
            self.notes.remove(MAX_NOTES / 2);
        }
        self.notes.push(Note { step, at_ms, kind: kind.to_owned(), text: clipped(&text, MAX_NOTE_CHARACTERS) });
    }

    fn at(&mut self, time_ms: Option<u64>) -> u64 {
        self.first_ms = self.first_ms.or(time_ms);
        self.clock.at(time_ms)
    }

    /// Gives the run another name.
    pub fn set_name(&mut self, name: &str) {
        self.name = clipped(name, MAX_NAME_CHARACTERS);
    }

    /// The run's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The current step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The current pass over the data, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The planned number of steps.
    pub fn total_steps(&self) -> Option<u64> {
        self.total_steps
    }

    /// Sums over the steps.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// The samples of each task of a mixture so far.
    pub fn samples_of_tasks(&self) -> &BTreeMap<String, u64> {
        &self.samples_of_tasks
    }

    /// The evaluations, oldest first.
    pub fn evaluations(&self) -> &[Evaluation] {
        &self.evaluations
    }

    /// The evaluation of the model that the run keeps; of a run that has not ended, the newest one.
    pub fn kept_evaluation(&self) -> Option<&Evaluation> {
        let kept = self.end.as_ref().and_then(|(_, fields)| fields["model_step"].as_u64());
        let of_step = kept.and_then(|step| self.evaluations.iter().find(|evaluation| evaluation.step == step));
        of_step.or(self.evaluations.last())
    }

    /// The sample answers.
    pub fn answers(&self) -> &Answers {
        &self.answers
    }

    /// The events to show.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// The current plan, as `plan --json` prints it.
    pub fn plan(&self) -> Option<Value> {
        serde_json::from_str(self.plan.as_deref()?).ok()
    }

    /// The fields of the newest `start` or `resume` event.
    pub fn start(&self) -> &Value {
        &self.start
    }

    /// The first screen of the command: model, data, recipe, device.
    pub fn screen(&self) -> &str {
        &self.screen
    }

    /// The text of `resolved.toml`.
    pub fn config(&self) -> &str {
        &self.config
    }

    /// The reason for the run's end, and the fields of that event; `None` while it runs.
    pub fn end(&self) -> Option<(&str, &Value)> {
        self.end.as_ref().map(|(reason, fields)| (reason.as_str(), fields))
    }

    /// The predicted peak of the process in bytes.
    pub fn predicted_peak(&self) -> Option<u64> {
        self.predicted_peak
    }

    /// Milliseconds that the run has run, without the time between two processes.
    pub fn running_ms(&self) -> u64 {
        self.clock.last
    }

    /// The time of the first event, in milliseconds since 1970.
    pub fn first_ms(&self) -> Option<u64> {
        self.first_ms
    }

    /// The curve of the loss, by step.
    pub fn loss(&self) -> &Series {
        &self.loss
    }

    /// The curve of tokens per second, by step.
    pub fn tokens_per_second(&self) -> &Series {
        &self.tokens_per_second
    }

    /// The curve of the gradient's norm, by step.
    pub fn gradient_norm(&self) -> &Series {
        &self.gradient_norm
    }

    /// The curve of the learning rate, by step.
    pub fn learning_rate(&self) -> &Series {
        &self.learning_rate
    }

    /// The curve of the resident set, by milliseconds of the run.
    pub fn rss(&self) -> &Series {
        &self.rss
    }
}

/// The running time of a run: the sum over its processes.
#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    /// The beginning of this process.
    origin: Option<u64>,
    /// The time of earlier processes.
    before: u64,
    last: u64,
}

impl Clock {
    fn begin(&mut self, time_ms: Option<u64>) {
        *self = Self { origin: time_ms, before: self.last, last: self.last };
    }

    fn at(&mut self, time_ms: Option<u64>) -> u64 {
        if let Some(time) = time_ms {
            let origin = *self.origin.get_or_insert(time);
            // If the clock was set back, the time stands still.
            self.last = self.last.max(self.before + time.saturating_sub(origin));
        }
        self.last
    }
}

/// The fields of an event, without long ones.
fn without_large(fields: &Value) -> Value {
    let fields = fields.as_object().into_iter().flatten().take(64);
    let is_small = |value: &Value| value.to_string().len() <= 512;
    Value::Object(
        fields.filter(|(_, value)| is_small(value)).map(|(key, value)| (key.clone(), value.clone())).collect(),
    )
}

/// The reason why a plan was replaced, as text: from `{"shrunk": {"needed": .., "available": ..}}`.
fn reason(reason: &Value) -> String {
    let Some((kind, of)) = reason.as_object().and_then(|object| object.iter().next()) else {
        return reason.as_str().unwrap_or("a new plan").to_owned();
    };
    let bytes = |key: &str| crate::figures::bytes(of[key].as_u64().unwrap_or(0));
    let (needed, available) = (bytes("needed"), bytes("available"));
    match kind.as_str() {
        "grown" => format!("memory is free again: {available} available, a faster plan needs {needed}"),
        "shrunk" => format!("memory pressure: the plan needed {needed}, {available} available"),
        "does_not_fit" => format!("memory pressure: the smallest plan needs {needed}, {available} available"),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_between_two_processes_is_left_out() {
        let mut run = Run::new("a");
        let at = |second: u64| format!("1970-01-01T00:{:02}:{:02}Z", second / 60, second % 60);
        let line = |event: &str, second: u64, step: u64| {
            format!(r#"{{"event":"{event}","time":"{}","step":{step},"rss_bytes":7}}"#, at(second))
        };
        for (event, second, step) in
            [("start", 0, 0), ("step", 5, 1), ("step", 10, 2), ("resume", 1000, 2), ("step", 1004, 3), ("end", 1005, 3)]
        {
            run.note(&line(event, second, step));
        }
        assert_eq!((run.running_ms(), run.step(), run.totals().steps), (15_000, 3, 3));
        assert_eq!(run.notes()[0].text, "resumed at step 2");
        assert!(run.end().is_some());
        run.note(&line("step", 1006, 4));
        assert!(run.end().is_none(), "it goes on");
    }

    #[test]
    fn evaluations_replans_and_warnings_are_kept_within_bounds() {
        let mut run = Run::new("a");
        for step in 0..5000 {
            run.note(&format!(
                r#"{{"event":"eval","step":{step},"loss":1.5,"bleu":3.0,"bleu_signature":"x","examples":[{{"prompt":"p","answer":"a","expected":"e"}}]}}"#
            ));
            run.note(&format!(r#"{{"event":"warning","step":{step},"message":"{}"}}"#, "w".repeat(1000)));
        }
        run.note(r#"{"event":"replan","step":5000,"reason":{"shrunk":{"needed":2097152,"available":1048576}},"plan":{"predicted_peak":5}}"#);
        let evaluations = run.evaluations();
        assert!(evaluations.len() <= MAX_EVALUATIONS && evaluations[0].step == 0);
        assert_eq!(evaluations.last().map(|last| last.step), Some(4999));
        assert_eq!(evaluations[0].scores, [("bleu".to_owned(), 3.0)]);
        assert_eq!((run.totals().warnings, run.notes().len()), (5000, MAX_NOTES));
        assert_eq!(
            run.notes().last().map(|note| note.text.as_str()),
            Some("memory pressure: the plan needed 2.0 MiB, 1.0 MiB available")
        );
        assert_eq!((run.predicted_peak(), run.answers().by_step().len() > 1), (Some(5), true));
    }
}
