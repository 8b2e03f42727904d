//! Paths, and the checks before a request reaches a model: the key, the host, the method and the path.

use std::sync::Arc;

use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, Version};
use serde_json::json;

use super::ask::ask;
use super::body::ResponseBody;
use super::record::Record;
use super::reply::{self, JSON, REQUEST_ID};
use super::shared::Shared;
use crate::error::ApiError;
use crate::request::Interface;

/// The page for trying the server. `NONCE` is replaced by the number that allows its script and style.
const PAGE: &str = include_str!("page.html");

/// The most characters of a client's id of a request.
const REQUEST_ID_CHARS: usize = 128;

/// Answers a request.
pub(super) async fn answer(
    shared: Arc<Shared>,
    mut record: Record,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    record.access.method = request.method().as_str().chars().take(16).collect();
    record.access.path = request.uri().path().chars().take(128).collect();
    if let Some(id) = id_of_client(request.headers()) {
        record.access.request_id = id;
    }
    let id = HeaderValue::from_str(&record.access.request_id);
    let has_body = !request.body().is_end_stream();
    let mut reads_body = false;
    let mut response = match route(&request, &shared, &mut record) {
        Err(error) => reply::refusal(&error, record),
        Ok(Route::Page) => {
            record.access.status = 200;
            reply::page(PAGE, record)
        }
        Ok(Route::Text(kind, text)) => {
            record.access.status = 200;
            reply::respond(200, kind, ResponseBody::whole(text, record))
        }
        Ok(Route::Ask(interface)) => match ask(&shared, interface, request, &mut record).await {
            Err(error) => {
                // A body that is not JSON was read to its end.
                reads_body = record.is_body_read;
                reply::refusal(&error, record)
            }
            Ok(waiting) => {
                reads_body = true;
                waiting.answer(record).await
            }
        },
    };
    let headers = response.headers_mut();
    if let Ok(id) = id {
        headers.insert(REQUEST_ID, id);
    }
    // The rest of a body that was not read would be taken for the next request.
    if (has_body && !reads_body) || shared.is_draining() {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The id that the client gave its request: visible ASCII.
fn id_of_client(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let is_plain = id.bytes().all(|byte| byte.is_ascii_graphic()) && (1..=REQUEST_ID_CHARS).contains(&id.len());
    is_plain.then(|| id.to_owned())
}

/// The destination of a request.
enum Route {
    /// The page.
    Page,
    /// A content type, and the text of the response.
    Text(&'static str, String),
    /// A request for a model.
    Ask(Interface),
}

/// Performs all checks that are possible before the body is read.
fn route(request: &Request<Incoming>, shared: &Shared, record: &mut Record) -> Result<Route, ApiError> {
    let (path, headers, host) = (request.uri().path(), request.headers(), host(request)?);
    let (route, method, needs_key) = match path {
        "/" => ("/", Method::GET, false),
        "/health" => ("/health", Method::GET, false),
        "/ready" => ("/ready", Method::GET, false),
        "/metrics" => ("/metrics", Method::GET, true),
        "/v1/models" => ("/v1/models", Method::GET, true),
        "/v1/completions" => ("/v1/completions", Method::POST, true),
        "/v1/chat/completions" => ("/v1/chat/completions", Method::POST, true),
        "/v1/score" => ("/v1/score", Method::POST, true),
        "/v1/rerank" => ("/v1/rerank", Method::POST, true),
        "/v1/embeddings" => ("/v1/embeddings", Method::POST, true),
        path if path.starts_with("/v1/models/") => ("/v1/models/{model}", Method::GET, true),
        _ => {
            return Err(ApiError::new(
                404,
                "unknown_path",
                "no such path; see /v1/models, /v1/completions, /v1/chat/completions, /v1/score, /v1/rerank, /v1/embeddings",
            ));
        }
    };
    record.route = route;
    check_host(host, shared)?;
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
        "/" => Route::Page,
        "/ready" if shared.is_draining() => {
            return Err(ApiError::new(503, "shutting_down", "the server is shutting down"));
        }
        "/health" | "/ready" => {
            let (load, status) = (shared.queue.load(), if shared.is_draining() { "stopping" } else { "ok" });
            Route::Text(JSON, json!({"status": status, "waiting": load.waiting, "running": load.running}).to_string())
        }
        "/metrics" => {
            let text = shared.metrics.text(shared.queue.load(), shared.connections.counts(), &(shared.gauges)());
            Route::Text("text/plain; version=0.0.4; charset=utf-8", text)
        }
        "/v1/models" => {
            let all: Vec<_> = models.iter().map(model).collect();
            Route::Text(JSON, json!({"object": "list", "data": all}).to_string())
        }
        "/v1/models/{model}" => {
            let name = &path["/v1/models/".len()..];
            let found = models.iter().find(|model| *model == name);
            Route::Text(JSON, model(found.ok_or_else(|| shared.unknown_model(name))?).to_string())
        }
        "/v1/completions" => Route::Ask(Interface::Completions),
        "/v1/score" => Route::Ask(Interface::Score),
        "/v1/rerank" => Route::Ask(Interface::Rerank),
        "/v1/embeddings" => Route::Ask(Interface::Embeddings),
        _ => Route::Ask(Interface::Chat),
    })
}

/// The value of the `Host` header, which HTTP/1.1 has exactly once (RFC 9112, 3.2).
fn host(request: &Request<Incoming>) -> Result<&str, ApiError> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (first, second) = (hosts.next(), hosts.next());
    let got = match (first, second) {
        (None, _) if request.version() < Version::HTTP_11 => return Ok(""),
        (None, _) => "none",
        (_, Some(_)) => "more",
        (Some(host), None) => match host.to_str() {
            Ok(host) if is_host(host) => return Ok(host),
            _ => "something else",
        },
    };
    Err(ApiError::new(
        400,
        "invalid_http",
        format!("expected one `Host` header with a name and perhaps a port, got {got}"),
    ))
}

/// Whether this is a host with or without a port, or nothing.
fn is_host(text: &str) -> bool {
    let is_port = |rest: &str| rest.is_empty() || rest.strip_prefix(':').is_some_and(has_only_digits);
    let is_host = |authority: Authority| !text.contains('@') && is_port(&text[authority.host().len()..]);
    text.is_empty() || text.parse().is_ok_and(is_host)
}

fn has_only_digits(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A loopback server without keys trusts every local program. Refuses host names that another site may have pointed at
/// it.
fn check_host(host: &str, shared: &Shared) -> Result<(), ApiError> {
    if !shared.is_loopback || !shared.settings.keys.is_empty() {
        return Ok(());
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if has_only_digits(port) => name,
        _ => host,
    };
    let own = shared.settings.listen.ip().to_string();
    let mut accepted = ["", "localhost", "127.0.0.1", "[::1]", &own].into_iter();
    let mut named = shared.settings.hosts.iter();
    match accepted.any(|own| own.eq_ignore_ascii_case(name)) || named.any(|host| host.eq_ignore_ascii_case(name)) {
        true => Ok(()),
        false => Err(ApiError::new(
            421,
            "unknown_host",
            "the `Host` header names another machine; `--allow-host NAME` accepts it",
        )),
    }
}
