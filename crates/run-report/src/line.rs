//! One line of `metrics.jsonl`: the fields that a page needs.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// A line.
#[derive(Debug)]
pub enum Line {
    /// A step.
    Step(Box<Step>),
    /// Another event, as it was written.
    Other {
        /// The event's name.
        event: String,
        /// The time of writing, in milliseconds since 1970.
        time_ms: Option<u64>,
        /// The event's fields.
        fields: Value,
    },
}

/// The fields of a `step` event. A field that an older run did not write is `None` or 0.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Step {
    /// The number of the step.
    pub step: u64,
    #[serde(deserialize_with = "time", rename = "time")]
    /// The time of writing, in milliseconds since 1970.
    pub time_ms: Option<u64>,
    /// Completed passes over the data.
    pub epoch: u64,
    /// The loss.
    #[serde(deserialize_with = "number")]
    pub loss: Option<f64>,
    /// The learning rate.
    #[serde(deserialize_with = "number")]
    pub lr: Option<f64>,
    /// The norm of the gradient.
    #[serde(deserialize_with = "number")]
    pub grad_norm: Option<f64>,
    /// Target tokens.
    pub target_tokens: u64,
    /// Source tokens.
    pub source_tokens: u64,
    /// Tokens including padding.
    pub padded_tokens: u64,
    /// Samples.
    pub samples: u64,
    /// Samples of each task of a mixture.
    pub tasks: BTreeMap<String, u64>,
    /// Tokens per second.
    #[serde(deserialize_with = "number")]
    pub tokens_per_second: Option<f64>,
    /// The duration of the step.
    #[serde(deserialize_with = "number")]
    pub step_ms: Option<f64>,
    /// The time that the step waited for its batch.
    #[serde(deserialize_with = "number")]
    pub data_wait_ms: Option<f64>,
    /// The resident set.
    pub rss_bytes: Option<u64>,
    /// The largest resident set so far.
    pub peak_rss_bytes: Option<u64>,
    /// The plan's prediction.
    pub predicted_peak_bytes: Option<u64>,
    /// The most bytes that the process could hold.
    pub available_bytes: Option<u64>,
    /// The percentage of the last ten seconds in which a task waited for memory.
    #[serde(deserialize_with = "number")]
    pub pressure_percent: Option<f64>,
    /// Bytes held on the device.
    pub device_bytes: Option<u64>,
    /// Sources that were cut.
    pub cut_sources: u64,
    /// Targets that were cut.
    pub cut_targets: u64,
    /// Tokens of the longest source.
    pub longest_source: Option<u64>,
    /// Tokens of the longest target.
    pub longest_target: Option<u64>,
}

impl Line {
    /// Parses a line; `None` if it is not an event.
    pub fn parse(line: &str) -> Option<Line> {
        if line.starts_with(r#"{"event":"step","#) {
            return serde_json::from_str(line).ok().map(Line::Step);
        }
        let fields: Value = serde_json::from_str(line).ok()?;
        let event = fields["event"].as_str()?.to_owned();
        if event == "step" {
            return serde_json::from_value(fields).ok().map(Line::Step);
        }
        let time_ms = fields["time"].as_str().and_then(milliseconds);
        Some(Line::Other { event, time_ms, fields })
    }

    /// The step of the line.
    pub fn step(&self) -> Option<u64> {
        match self {
            Line::Step(step) => Some(step.step),
            Line::Other { fields, .. } => fields["step"].as_u64(),
        }
    }
}

/// Reads a number, including the strings for numbers that JSON lacks: `NaN`, `inf`, `-inf`.
pub fn number_of(value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => text.parse().ok(),
        value => value.as_f64(),
    }
}

/// Converts an RFC 3339 time to milliseconds since 1970.
pub fn milliseconds(text: &str) -> Option<u64> {
    let time = humantime::parse_rfc3339(text).ok()?;
    u64::try_from(time.duration_since(std::time::UNIX_EPOCH).ok()?.as_millis()).ok()
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Text(String),
        Null,
    }
    Ok(match Written::deserialize(deserializer)? {
        Written::Number(number) => Some(number),
        Written::Text(text) => text.parse().ok(),
        Written::Null => None,
    })
}

fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.as_deref().and_then(milliseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_read_with_numbers_that_json_has_not() {
        let line = r#"{"event":"step","time":"1970-01-01T00:00:01.500Z","step":3,"loss":"NaN","lr":1,"grad_norm":"inf","new":[]}"#;
        let Some(Line::Step(step)) = Line::parse(line) else { panic!("a step") };
        assert_eq!((step.step, step.time_ms, step.lr, step.samples), (3, Some(1500), Some(1.0), 0));
        assert!(step.loss.is_some_and(f64::is_nan) && step.grad_norm == Some(f64::INFINITY));
        let spaced = r#"{"time": "x", "event": "step", "step": 4}"#;
        assert_eq!(Line::parse(spaced).and_then(|line| line.step()), Some(4));
        for no_event in ["", "{", "[]", r#"{"step":1}"#, r#"{"event":"step","step":-1}"#] {
            assert!(Line::parse(no_event).is_none(), "{no_event}");
        }
    }
}
