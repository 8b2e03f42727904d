//! The record of a request. When the request ends in any way, it is counted and logged.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::connections::ConnectionSlot;
use super::shared::Shared;
use crate::access::Access;
use crate::delivery::Delivery;
use crate::error::ApiError;
use crate::event::Event;
use crate::metrics::Done;
use crate::response::Usage;

/// A record, which is delivered when it is dropped.
pub(super) struct Record {
    pub access: Access,
    pub usage: Usage,
    pub route: &'static str,
    /// The number of the request.
    pub number: u64,
    /// The time of the request's last byte, if a model is to answer it.
    pub since: Option<Instant>,
    /// Whether the body was read to its end.
    pub is_body_read: bool,
    /// The way of the answer, if a model is to answer the request.
    pub delivery: Arc<Delivery>,
    /// The connection, which waits for its client again when the request is over.
    pub place: Arc<ConnectionSlot>,
    start: Instant,
    shared: Arc<Shared>,
}

impl Record {
    /// Begins the record of a request whose head was read.
    pub fn new(shared: &Arc<Shared>, place: &Arc<ConnectionSlot>, client: String) -> Self {
        let number = shared.next_number();
        let access = Access {
            time: SystemTime::now(),
            request_id: format!("req-{:x}{number:08x}", shared.begun),
            id: None,
            client,
            method: "-".to_owned(),
            path: "-".to_owned(),
            status: 0,
            error: None,
            model: None,
            stream: false,
            is_cut: false,
            prompt_tokens: 0,
            generated_tokens: 0,
            first_token_ms: None,
            ms: 0.0,
            cancelled: false,
        };
        let (shared, place, delivery) = (Arc::clone(shared), Arc::clone(place), Delivery::new(&shared.untaken));
        let (usage, route, start) = (Usage::default(), "other", Instant::now());
        Record { access, usage, route, number, since: None, is_body_read: false, delivery, place, start, shared }
    }

    /// Updates the record with an event of the answer.
    pub fn count(&mut self, event: &Event) {
        self.usage.count(event);
    }

    /// Notes that the request is refused.
    pub fn refused(&mut self, error: &ApiError) {
        self.access.status = error.status;
        self.access.error = Some(error.code);
        self.access.cancelled = false;
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let Record { access, usage, route, since, start, shared, .. } = self;
        (access.prompt_tokens, access.generated_tokens, access.is_cut) = (usage.prompt, usage.generated, usage.is_cut);
        access.ms = start.elapsed().as_secs_f64() * 1e3;
        let first_token = self.delivery.first_token().zip(*since);
        let first_token = first_token.map(|(token, since)| token.saturating_duration_since(since).as_secs_f64());
        access.first_token_ms = first_token.map(|seconds| seconds * 1e3);
        shared.metrics.done(&Done {
            route,
            status: access.status,
            prompt_tokens: usage.prompt,
            generated_tokens: usage.generated,
            seconds: since.map_or(0.0, |since| since.elapsed().as_secs_f64()),
            first_token_seconds: first_token,
            is_answer: since.is_some() && access.status == 200 && access.error.is_none() && !access.cancelled,
            is_cancelled: access.cancelled,
        });
        if !(shared.log)(access) {
            shared.metrics.lost_log_line();
        }
        self.place.waits();
    }
}
