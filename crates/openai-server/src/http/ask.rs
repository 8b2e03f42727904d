//! Requests for a model: the body is read and checked, its jobs are queued, and their events become the answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::body::{Body, Incoming};
use hyper::header;
use hyper::{Request, Response};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::body::{self, Events, ResponseBody};
use super::record::Record;
use super::reply::{JSON, refusal, respond};
use super::shared::Shared;
use crate::error::ApiError;
use crate::event::Event;
use crate::queue::{Job, Origin, places, untaken};
use crate::request::{Interface, Request as Asked, RequestLimits};
use crate::response::{Choice, ResponseMetadata};

/// The status of a request whose client left before the response, as in nginx's log.
const CLIENT_LEFT: u16 = 499;

/// A request that is in the queue.
pub(super) struct Waiting {
    form: ResponseMetadata,
    events: UnboundedReceiver<(usize, Event)>,
    choices: usize,
    is_stream: bool,
    timeout: Duration,
}

impl Waiting {
    /// Waits for the answer.
    pub async fn answer(self, mut record: Record) -> Response<ResponseBody> {
        record.access.stream = self.is_stream;
        // Cancelled until the answer is known to be complete.
        record.access.cancelled = true;
        record.access.status = CLIENT_LEFT;
        if self.is_stream { self.stream(record).await } else { self.whole(record).await }
    }

    /// Waits for the first event, so that a failure gets a proper status, and then streams.
    async fn stream(mut self, mut record: Record) -> Response<ResponseBody> {
        let deadline = tokio::time::Instant::now() + self.timeout;
        let news = tokio::time::timeout_at(deadline, self.events.recv()).await;
        let event = match news {
            Err(_) => Err(body::too_late(self.timeout)),
            Ok(None) => Err(body::gone()),
            Ok(Some((_, Event::Failed(error)))) => Err(error),
            Ok(Some(event)) => Ok(event),
        };
        let (first_choice, event) = match event {
            Ok(event) => event,
            Err(error) => return refusal(&error, record),
        };
        record.count(&event);
        record.delivery.taken(&event);
        record.access.status = 200;
        let mut first = self.form.beginning(self.choices);
        first.extend(self.form.event(first_choice, &event));
        let left = self.choices - usize::from(matches!(event, Event::Finished { .. }));
        let events = Events {
            form: self.form,
            events: self.events,
            left,
            record,
            first: Some(first),
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            timeout: self.timeout,
        };
        respond(200, "text/event-stream; charset=utf-8", ResponseBody::Events(Box::new(events)))
    }

    /// Waits for every answer.
    async fn whole(mut self, mut record: Record) -> Response<ResponseBody> {
        let mut choices = vec![Choice::default(); self.choices];
        let all = async {
            while choices.iter().any(|choice| !choice.is_over()) {
                let Some((first_choice, event)) = self.events.recv().await else { return Err(body::gone()) };
                record.count(&event);
                if let Event::Failed(error) = event {
                    return Err(error);
                }
                let place = event.choice().map(|choice| first_choice + choice);
                if let Some(choice) = place.and_then(|place| choices.get_mut(place)) {
                    choice.take(event);
                }
            }
            Ok(())
        };
        let ended = tokio::time::timeout(self.timeout, all).await;
        match ended.unwrap_or_else(|_| Err(body::too_late(self.timeout))) {
            Err(error) => refusal(&error, record),
            Ok(()) => {
                let text = self.form.whole(&choices, record.usage);
                record.access.status = 200;
                record.access.cancelled = false;
                respond(200, JSON, ResponseBody::whole(text, record))
            }
        }
    }
}

/// Reads the body, and queues the requested jobs.
pub(super) async fn ask(
    shared: &Arc<Shared>,
    interface: Interface,
    request: Request<Incoming>,
    record: &mut Record,
) -> Result<Waiting, ApiError> {
    let limits = &shared.settings.limits;
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    // A page of another origin may send other content types without a preflight request.
    if !kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(JSON) {
        return Err(ApiError::new(415, "not_json", "expected `Content-Type: application/json`"));
    }
    if shared.is_draining() {
        return Err(ApiError::new(503, "shutting_down", "the server is shutting down"));
    }
    let asked = read(shared, interface, request.into_body(), record).await?;
    record.since = Some(Instant::now());
    let models = &shared.settings.models;
    let model = match &asked.model {
        None => 0,
        Some(name) => models.iter().position(|model| model == name).ok_or_else(|| shared.unknown_model(name))?,
    };
    record.access.model = Some(models[model].clone());
    // Documents that are given back are held, and then written.
    let documents: usize = asked.results.documents.iter().map(String::len).sum();
    if documents > 0 && !record.delivery.hold(2 * documents) {
        return Err(untaken());
    }
    let (sender, events) = unbounded_channel();
    let origin = Origin {
        model,
        client: record.place.client,
        answer_tokens: limits.request.answer_tokens,
        request_id: record.access.request_id.as_str().into(),
        events: sender,
        delivery: Arc::clone(&record.delivery),
    };
    let form = form(shared, &asked, record.number, &models[model]);
    record.access.id = Some(form.id.clone());
    let choices = asked.prompts.len() * asked.options.n.max(asked.labels.len());
    let (is_stream, timeout) = (asked.stream, limits.request_timeout);
    shared.queue.push(jobs(&origin, asked, &limits.request))?;
    Ok(Waiting { form, events, choices, is_stream, timeout })
}

/// Reads and parses the body.
async fn read(shared: &Shared, interface: Interface, body: Incoming, record: &mut Record) -> Result<Asked, ApiError> {
    let limits = &shared.settings.limits;
    // What the log says if the connection has to give way.
    (record.access.status, record.access.error) = (408, Some("gave_way"));
    if !body.is_end_stream() {
        record.place.waits();
    }
    let length = body.size_hint().exact().map_or(limits.body_bytes, |length| length as usize).min(limits.body_bytes);
    record.place.turn_to_send(length).await;
    let bytes = body::read(body, &record.place, limits.body_bytes, limits.body_timeout).await;
    record.place.works();
    record.is_body_read = bytes.is_ok();
    let begun = Instant::now();
    let asked = bytes.and_then(|bytes| {
        let asked = Asked::parse(interface, &bytes, &limits.request);
        record.place.parsed(bytes.len(), begun.elapsed());
        asked
    });
    record.place.body_is_over();
    record.access.error = None;
    asked
}

fn form(shared: &Shared, asked: &Asked, number: u64, model: &str) -> ResponseMetadata {
    let prefix = match asked.interface {
        Interface::Completions => "cmpl",
        Interface::Chat => "chatcmpl",
        Interface::Score => "score",
        Interface::Rerank => "rerank",
        Interface::Embeddings => "embd",
    };
    ResponseMetadata {
        interface: asked.interface,
        id: format!("{prefix}-{:x}{number:08x}", shared.begun),
        created: std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs()),
        model: model.to_owned(),
        include_usage: asked.include_usage,
        has_logprobs: asked.options.logprobs.is_some(),
        labels: asked.labels.clone(),
        results: asked.results.clone(),
    }
}

/// The jobs of a request: one for each prompt, or for each prompt with as many labels as have rows.
fn jobs(origin: &Origin, asked: Asked, limits: &RequestLimits) -> Vec<Job> {
    let Asked { prompts, mut options, labels, .. } = asked;
    let of_prompt = options.n.max(labels.len());
    if !labels.is_empty() {
        // Nothing is generated that could stop.
        options.stop = Vec::new();
    }
    let mut jobs = Vec::new();
    for (number, prompt) in prompts.into_iter().enumerate() {
        let (first, prompt) = (number * of_prompt, Arc::new(prompt));
        for (part, labels) in labels.chunks(limits.rows).enumerate() {
            let options = crate::Options { labels: labels.to_vec(), ..options.clone() };
            jobs.push(Job::new(origin, Arc::clone(&prompt), options, first + part * limits.rows));
        }
        if labels.is_empty() {
            jobs.push(Job::new(origin, prompt, options.clone(), first));
        }
    }
    let held: Vec<_> = jobs.iter().map(|job| (&job.prompt, &job.options)).collect();
    let parts = places::parts(&held, places::place_bytes(limits));
    jobs.iter_mut().zip(parts).for_each(|(job, parts)| job.parts = parts);
    jobs
}
