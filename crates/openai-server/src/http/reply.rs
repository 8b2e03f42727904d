//! Responses: their headers, and errors in OpenAI's form.

use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Response, StatusCode};

use super::body::ResponseBody;
use super::record::Record;
use super::socket::{Socket, write_and_close};
use crate::error::ApiError;

pub(super) const JSON: &str = "application/json";

/// The header with the id of a request.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Converts an error to a response.
pub(super) fn refusal(error: &ApiError, mut record: Record) -> Response<ResponseBody> {
    record.refused(error);
    let mut response = respond(error.status, JSON, ResponseBody::whole(error.to_json().to_string(), record));
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after_s {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.status == 401 {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// A response with the headers that all responses have.
pub(super) fn respond(status: u16, kind: &'static str, answer: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(answer);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A page, which may run its own script and no other.
pub(super) fn page(text: &str, record: Record) -> Response<ResponseBody> {
    let nonce = format!("{:x}", nonce());
    let mut response =
        respond(200, "text/html; charset=utf-8", ResponseBody::whole(text.replace("NONCE", &nonce), record));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
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
pub(super) async fn reject_and_close(socket: Socket, refusal: Option<(ApiError, Record)>) {
    let text = refusal.map(|(error, mut record)| {
        record.refused(&error);
        let body = error.to_json().to_string();
        let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::BAD_REQUEST);
        format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\n{REQUEST_ID}: {}\r\ncontent-type: {JSON}\r\n\
             content-length: {}\r\n\r\n{body}",
            record.access.request_id,
            body.len()
        )
    });
    // The client may be gone.
    let _ = write_and_close(socket, text.unwrap_or_default().as_bytes()).await;
}
