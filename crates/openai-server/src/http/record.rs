//! The record of a request. When the request ends in any way, it is counted and logged.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::shared::Shared;
use crate::access::Access;
use crate::metrics::Done;
use crate::queue::Event;
use crate::response::Usage;

/// A record, which is delivered when it is dropped.
pub(super) struct Record {
    pub access: Access,
    pub usage: Usage,
    pub route: &'static str,
    /// The time of the request's last byte, if a model is to answer it.
    pub since: Option<Instant>,
    start: Instant,
    shared: Arc<Shared>,
}

impl Record {
    pub fn new(shared: &Arc<Shared>, client: String, method: &str, path: &str) -> Self {
        let access = Access {
            time: SystemTime::now(),
            client,
            method: method.chars().take(16).collect(),
            path: path.chars().take(128).collect(),
            status: 0,
            error: None,
            model: None,
            stream: false,
            prompt_tokens: 0,
            generated_tokens: 0,
            first_token_ms: None,
            ms: 0.0,
            cancelled: false,
        };
        let shared = Arc::clone(shared);
        Record { access, usage: Usage::default(), route: "other", since: None, start: Instant::now(), shared }
    }

    /// Updates the record with an event of the answer.
    pub fn count(&mut self, event: &Event) {
        if let (Event::Text { .. }, Some(since), None) = (event, self.since, self.access.first_token_ms) {
            self.access.first_token_ms = Some(since.elapsed().as_secs_f64() * 1e3);
        }
        self.usage.count(event);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let Record { access, usage, route, since, start, shared } = self;
        (access.prompt_tokens, access.generated_tokens) = (usage.prompt, usage.generated);
        access.ms = start.elapsed().as_secs_f64() * 1e3;
        shared.metrics.done(&Done {
            route,
            status: access.status,
            prompt_tokens: usage.prompt,
            generated_tokens: usage.generated,
            seconds: since.map_or(0.0, |since| since.elapsed().as_secs_f64()),
            first_token_seconds: access.first_token_ms.map(|ms| ms / 1e3),
            is_answer: since.is_some() && access.status == 200 && access.error.is_none() && !access.cancelled,
            is_cancelled: access.cancelled,
        });
        if !(shared.log)(access) {
            shared.metrics.lost_log_line();
        }
    }
}
