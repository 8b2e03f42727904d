//! The server's counters, and their text for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use crate::queue::Load;

/// Upper bounds of the histograms' buckets, in seconds.
const SECONDS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Counters of a server since its start.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Requests by route and status.
    requests: BTreeMap<(&'static str, u16), u64>,
    prompt_tokens: u64,
    generated_tokens: u64,
    cancelled: u64,
    connections: u64,
    lost_log_lines: u64,
    first_token: Histogram,
    whole: Histogram,
}

#[derive(Debug, Default)]
struct Histogram {
    counts: [u64; SECONDS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, seconds: f64) {
        if let Some(place) = SECONDS.iter().position(|&end| seconds <= end) {
            self.counts[place] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }

    fn write(&self, out: &mut String, name: &str) {
        let mut below = 0;
        for (end, count) in SECONDS.iter().zip(self.counts) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{le=\"{end}\"}} {below}");
        }
        let _ = writeln!(
            out,
            "{name}_bucket{{le=\"+Inf\"}} {}\n{name}_sum {}\n{name}_count {}",
            self.count, self.sum, self.count
        );
    }
}

/// A finished request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub route: &'static str,
    pub status: u16,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub seconds: f64,
    pub first_token_seconds: Option<f64>,
    pub is_answer: bool,
    pub is_cancelled: bool,
}

/// A value from outside of the server, such as a size of the process.
#[derive(Clone, Debug)]
pub struct Gauge {
    /// Prometheus' name of the value.
    pub name: &'static str,
    /// The meaning of the value.
    pub help: &'static str,
    /// The current value.
    pub value: f64,
}

impl Metrics {
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub fn done(&self, done: &Done) {
        self.change(|state| {
            *state.requests.entry((done.route, done.status)).or_default() += 1;
            state.prompt_tokens += done.prompt_tokens;
            state.generated_tokens += done.generated_tokens;
            state.cancelled += u64::from(done.is_cancelled);
            done.first_token_seconds.into_iter().for_each(|seconds| state.first_token.add(seconds));
            if done.is_answer {
                state.whole.add(done.seconds);
            }
        });
    }

    pub fn connected(&self) {
        self.change(|state| state.connections += 1);
    }

    pub fn lost_log_line(&self) {
        self.change(|state| state.lost_log_lines += 1);
    }

    /// The metrics in Prometheus' text format, version 0.0.4. `open` and `gave_way` count connections.
    pub fn text(&self, load: Load, (open, gave_way): (usize, u64), others: &[Gauge]) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = String::new();
        let head = |out: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        head(&mut out, "serve_requests_total", "counter", "Requests that are over, by route and status.");
        for ((route, status), count) in &state.requests {
            let _ = writeln!(out, "serve_requests_total{{route=\"{route}\",status=\"{status}\"}} {count}");
        }
        let counters = [
            ("serve_prompt_tokens_total", state.prompt_tokens, "Tokens of prompts that were taken up."),
            ("serve_generated_tokens_total", state.generated_tokens, "Tokens of answers."),
            ("serve_cancelled_total", state.cancelled, "Requests whose client left before the answer was whole."),
            ("serve_connections_total", state.connections, "Connections that were accepted."),
            ("serve_connections_gave_way_total", gave_way, "Connections that were closed in favour of others."),
            ("serve_lost_log_lines_total", state.lost_log_lines, "Lines of the access log that could not be written."),
        ];
        for (name, value, help) in counters {
            head(&mut out, name, "counter", help);
            let _ = writeln!(out, "{name} {value}");
        }
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let own = [
            ("serve_requests_waiting", load.waiting as f64, "Prompts in the queue."),
            ("serve_requests_running", load.running as f64, "Prompts that are answered now."),
            ("serve_connections_open", open as f64, "Connections that are open."),
        ];
        let own = own.map(|(name, value, help)| Gauge { name, help, value });
        for Gauge { name, help, value } in own.iter().chain(others) {
            head(&mut out, name, "gauge", help);
            let _ = writeln!(out, "{name} {value}");
        }
        for (name, histogram, help) in [
            ("serve_time_to_first_token_seconds", &state.first_token, "From a request's last byte to its first token."),
            ("serve_request_seconds", &state.whole, "From a request's last byte to the end of its answer."),
        ] {
            head(&mut out, name, "histogram", help);
            histogram.write(&mut out, name);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_histograms_are_text_that_prometheus_reads() {
        let metrics = Metrics::default();
        let done = Done {
            route: "/v1/completions",
            status: 200,
            prompt_tokens: 3,
            generated_tokens: 5,
            seconds: 0.3,
            first_token_seconds: Some(0.02),
            is_answer: true,
            is_cancelled: false,
        };
        metrics.done(&done);
        metrics.done(&Done { status: 429, is_answer: false, first_token_seconds: None, ..done });
        let gauge = Gauge { name: "process_open_fds", help: "Open files.", value: 7.0 };
        let text = metrics.text(Load { waiting: 2, running: 1 }, (3, 4), &[gauge]);
        for line in [
            "serve_requests_total{route=\"/v1/completions\",status=\"200\"} 1",
            "serve_requests_total{route=\"/v1/completions\",status=\"429\"} 1",
            "serve_generated_tokens_total 10",
            "serve_requests_waiting 2",
            "serve_connections_open 3",
            "serve_connections_gave_way_total 4",
            "process_open_fds 7",
            "serve_time_to_first_token_seconds_bucket{le=\"0.01\"} 0",
            "serve_time_to_first_token_seconds_bucket{le=\"0.025\"} 1",
            "serve_request_seconds_bucket{le=\"+Inf\"} 1",
            "serve_request_seconds_count 1",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}\n{text}");
        }
        let names = text.lines().filter(|line| line.starts_with("# TYPE")).count();
        assert_eq!(names, text.lines().filter(|line| line.starts_with("# HELP")).count());
    }
}
