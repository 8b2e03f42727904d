//! Paths, and the checks before a request reaches a model: the key, the host, the method and the path.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::body::{self, Answer, Events};
use super::record::Record;
use super::shared::Shared;
use super::socket::{Socket, write_all};
use crate::error::ApiError;
use crate::queue::{Event, Job};
use crate::request::{Interface, Request as Asked};
use crate::response::{Choice, ResponseMetadata};

/// The page for trying the server. `NONCE` is replaced by the number that allows its script and style.
const PAGE: &str = include_str!("page.html");

/// The status of a request whose client left before the response, as in nginx's log.
const CLIENT_LEFT: u16 = 499;

const JSON: &str = "application/json";

/// Answers a request.
pub(super) async fn answer(shared: Arc<Shared>, client: SocketAddr, request: Request<Incoming>) -> Response<Answer> {
    let mut record = Record::new(&shared, client.to_string(), request.method().as_str(), request.uri().path());
    let answered = match route(&request, &shared, &mut record) {
        Err(error) => Err(error),
        Ok(Route::Text(kind, text)) => Ok(Err((kind, text))),
        Ok(Route::Ask(interface)) => ask(&shared, interface, request, &mut record).await.map(Ok),
    };
    match answered {
        Err(error) => refusal(&shared, error, record),
        Ok(Err((kind, text))) => {
            record.access.status = 200;
            let nonce = format!("{:x}", nonce());
            let text = if kind == "text/html; charset=utf-8" { text.replace("NONCE", &nonce) } else { text };
            let mut response = respond(200, kind, Answer::whole(text, record));
            let policy = format!(
                "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
                 base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            );
            if let Ok(policy) = HeaderValue::from_str(&policy) {
                response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
            }
            response
        }
        Ok(Ok(Waiting { form, events, choices, is_stream, timeout })) => {
            record.access.stream = is_stream;
            record.since = Some(Instant::now());
            // Cancelled until the answer is known to be complete.
            record.access.cancelled = true;
            record.access.status = CLIENT_LEFT;
            let waiting = Waiting { form, events, choices, is_stream, timeout };
            if is_stream { stream(&shared, waiting, record).await } else { whole(&shared, waiting, record).await }
        }
    }
}

/// The destination of a request.
enum Route {
    /// A content type, and the text of the response.
    Text(&'static str, String),
    /// A request for a model.
    Ask(Interface),
}

/// Performs all checks that are possible before the body is read.
fn route(request: &Request<Incoming>, shared: &Shared, record: &mut Record) -> Result<Route, ApiError> {
    let (path, headers) = (request.uri().path(), request.headers());
    let (route, method, needs_key) = match path {
        "/" => ("/", Method::GET, false),
        "/health" => ("/health", Method::GET, false),
        "/metrics" => ("/metrics", Method::GET, true),
        "/v1/models" => ("/v1/models", Method::GET, true),
        "/v1/completions" => ("/v1/completions", Method::POST, true),
        "/v1/chat/completions" => ("/v1/chat/completions", Method::POST, true),
        path if path.starts_with("/v1/models/") => ("/v1/models/{model}", Method::GET, true),
        _ => {
            return Err(ApiError::new(
                404,
                "unknown_path",
                "no such path; see /v1/models, /v1/completions, /v1/chat/completions",
            ));
        }
    };
    record.route = route;
    check_host(headers, shared)?;
    if request.method() != method {
        let message = format!("{route} takes {method}, not {}", record.access.method);
        return Err(ApiError::new(405, "method_not_allowed", message));
    }
    if needs_key && !shared.settings.keys.accept(headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes)) {
        let message = "expected `Authorization: Bearer KEY` with a key of this server";
        return Err(ApiError::new(401, "invalid_api_key", message));
    }
    let model = |name: &String| json!({"id": name, "object": "model", "created": shared.begun / 1_000_000, "owned_by": "train_low_mem"});
    let models = &shared.settings.models;
    Ok(match route {
        "/" => Route::Text("text/html; charset=utf-8", PAGE.to_owned()),
        "/health" if shared.is_draining.load(Ordering::Relaxed) => {
            return Err(ApiError::new(503, "shutting_down", "the server is shutting down"));
        }
        "/health" => {
            let load = shared.queue.load();
            Route::Text(JSON, json!({"status": "ok", "waiting": load.waiting, "running": load.running}).to_string())
        }
        "/metrics" => {
            let text = shared.metrics.text(shared.queue.load(), &(shared.gauges)());
            Route::Text("text/plain; version=0.0.4; charset=utf-8", text)
        }
        "/v1/models" => {
            let all: Vec<_> = models.iter().map(model).collect();
            Route::Text(JSON, json!({"object": "list", "data": all}).to_string())
        }
        "/v1/models/{model}" => {
            let name = &path["/v1/models/".len()..];
            let found = models.iter().find(|model| *model == name);
            Route::Text(JSON, model(found.ok_or_else(|| unknown_model(name, shared))?).to_string())
        }
        "/v1/completions" => Route::Ask(Interface::Completions),
        _ => Route::Ask(Interface::Chat),
    })
}

/// A loopback server without keys trusts every local program. Refuses host names that another site may have pointed at
/// it.
fn check_host(headers: &HeaderMap, shared: &Shared) -> Result<(), ApiError> {
    if !shared.is_loopback || !shared.settings.keys.is_empty() {
        return Ok(());
    }
    let host = headers.get(header::HOST).map(|host| host.to_str().unwrap_or("?")).unwrap_or_default();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let is_own =
        ["", "localhost", "127.0.0.1", "[::1]"].contains(&name) || name == shared.settings.listen.ip().to_string();
    match is_own || shared.settings.hosts.iter().any(|host| host.eq_ignore_ascii_case(name)) {
        true => Ok(()),
        false => Err(ApiError::new(
            421,
            "unknown_host",
            "the `Host` header names another machine; `--allow-host NAME` accepts it",
        )),
    }
}

fn unknown_model(name: &str, shared: &Shared) -> ApiError {
    let name: String = name.chars().take(64).collect();
    let models = shared.settings.models.join(", ");
    let error = ApiError::new(404, "model_not_found", format!("no model `{name}`; there are: {models}"));
    ApiError { parameter: Some("model".to_owned()), ..error }
}

/// A request that is in the queue.
struct Waiting {
    form: ResponseMetadata,
    events: UnboundedReceiver<(usize, Event)>,
    choices: usize,
    is_stream: bool,
    timeout: Duration,
}

/// Reads the body, and queues the requested jobs.
async fn ask(
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
    if shared.is_draining.load(Ordering::Relaxed) {
        return Err(ApiError::new(503, "shutting_down", "the server is shutting down"));
    }
    let turn = tokio::time::timeout(limits.body_timeout, shared.bodies.acquire()).await;
    let Ok(Ok(turn)) = turn else {
        let error = ApiError::new(503, "too_many_bodies", "too many requests are read at a time; try again");
        return Err(ApiError { retry_after_s: Some(1), ..error });
    };
    let bytes = body::read(request.into_body(), limits.body_bytes, limits.body_timeout).await?;
    let asked = Asked::parse(interface, &bytes, &limits.request)?;
    drop((bytes, turn));
    let models = &shared.settings.models;
    let model = match &asked.model {
        None => 0,
        Some(name) => models.iter().position(|model| model == name).ok_or_else(|| unknown_model(name, shared))?,
    };
    record.access.model = Some(models[model].clone());
    let (sender, events) = unbounded_channel();
    let (choices, n) = (asked.prompts.len() * asked.options.n, asked.options.n);
    let jobs = asked.prompts.into_iter().enumerate();
    let jobs = jobs.map(|(i, prompt)| Job::new(model, prompt, asked.options.clone(), sender.clone(), i * n));
    shared.queue.push(jobs.collect())?;
    let number = shared.number.fetch_add(1, Ordering::Relaxed);
    let prefix = if interface == Interface::Chat { "chatcmpl" } else { "cmpl" };
    let form = ResponseMetadata {
        interface,
        id: format!("{prefix}-{:x}{number:08x}", shared.begun),
        created: std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs()),
        model: models[model].clone(),
        include_usage: asked.include_usage,
    };
    Ok(Waiting { form, events, choices, is_stream: asked.stream, timeout: limits.request_timeout })
}

/// Waits for the first event, so that a failure gets a proper status, and then streams.
async fn stream(shared: &Arc<Shared>, mut waiting: Waiting, mut record: Record) -> Response<Answer> {
    let deadline = tokio::time::Instant::now() + waiting.timeout;
    let news = tokio::time::timeout_at(deadline, waiting.events.recv()).await;
    let event = match news {
        Err(_) => Err(body::too_late(waiting.timeout)),
        Ok(None) => Err(body::gone()),
        Ok(Some((_, Event::Failed(error)))) => Err(error),
        Ok(Some(event)) => Ok(event),
    };
    let (first_choice, event) = match event {
        Ok(event) => event,
        Err(error) => return refusal(shared, error, record),
    };
    record.count(&event);
    record.access.status = 200;
    let mut first = waiting.form.beginning(waiting.choices);
    first.extend(waiting.form.event(first_choice, &event));
    let left = waiting.choices - usize::from(matches!(event, Event::Finished { .. }));
    let events = Events {
        form: waiting.form,
        events: waiting.events,
        left,
        record,
        first: Some(first),
        deadline: Box::pin(tokio::time::sleep_until(deadline)),
        timeout: waiting.timeout,
    };
    respond(200, "text/event-stream; charset=utf-8", Answer::Events(Box::new(events)))
}

/// Waits for every answer.
async fn whole(shared: &Arc<Shared>, mut waiting: Waiting, mut record: Record) -> Response<Answer> {
    let mut choices = vec![Choice::default(); waiting.choices];
    let all = async {
        while choices.iter().any(|choice| choice.finish.is_none()) {
            let Some((first_choice, event)) = waiting.events.recv().await else { return Err(body::gone()) };
            record.count(&event);
            match event {
                Event::Started { .. } => {}
                Event::Text { choice, text, .. } => choices[first_choice + choice].text += &text,
                Event::Finished { choice, reason } => choices[first_choice + choice].finish = Some(reason),
                Event::Failed(error) => return Err(error),
            }
        }
        Ok(())
    };
    let ended = tokio::time::timeout(waiting.timeout, all).await;
    match ended.unwrap_or_else(|_| Err(body::too_late(waiting.timeout))) {
        Err(error) => refusal(shared, error, record),
        Ok(()) => {
            let text = waiting.form.whole(&choices, record.usage).to_string();
            record.access.status = 200;
            record.access.cancelled = false;
            respond(200, JSON, Answer::whole(text, record))
        }
    }
}

/// Converts an error to a response. If a body was not read, the connection is useless, and hyper closes it.
fn refusal(shared: &Arc<Shared>, error: ApiError, mut record: Record) -> Response<Answer> {
    record.access.status = error.status;
    record.access.error = Some(error.code);
    record.access.cancelled = false;
    let text = error.to_json().to_string();
    let mut response = respond(error.status, JSON, Answer::whole(text, record));
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after_s {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.status == 401 {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    let is_over = matches!(error.status, 408 | 413) || shared.is_draining.load(Ordering::Relaxed);
    if is_over {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn respond(status: u16, kind: &'static str, answer: Answer) -> Response<Answer> {
    let mut response = Response::new(answer);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A number that a page cannot know before it is loaded.
fn nonce() -> u128 {
    use std::hash::{BuildHasher, RandomState};
    let half = || u128::from(RandomState::new().hash_one(0));
    half() << 64 | half()
}

/// The error for a head that was late, too large, or malformed.
pub(super) fn refusal_of_head(error: &hyper::Error) -> Option<ApiError> {
    if error.is_timeout() {
        Some(ApiError::new(408, "head_timeout", "the request's head was not whole in time"))
    } else if error.is_parse_too_large() {
        Some(ApiError::new(431, "head_too_large", "the request's head is too large, or has too many fields"))
    } else if error.is_parse() {
        Some(ApiError::new(400, "invalid_http", format!("expected a request of HTTP/1.1: {error}")))
    } else {
        None
    }
}

/// Writes the refusal of a head, if any, and closes the connection.
pub(super) async fn reject_and_close(mut socket: Socket, refusal: Option<ApiError>) {
    let text = refusal.map(|error| {
        let body = error.to_json().to_string();
        let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::BAD_REQUEST);
        format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: {JSON}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    });
    // The client may be gone.
    let _ = write_all(&mut socket, text.unwrap_or_default().as_bytes()).await;
}
