//! The access log: a line of JSON for each finished request. It contains no prompt, no answer and no key.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// The last second that has an RFC 3339 form. A clock that shows a time after it, or before 1970, counts as the nearest of them.
const LAST: Duration = Duration::from_secs(253_402_300_799);

/// A finished request.
#[derive(Clone, Debug)]
pub struct Access {
    /// The time of arrival.
    pub time: SystemTime,
    /// The request's id: that of its `X-Request-Id`, or a new one. The answer has it, too.
    pub request_id: String,
    /// The id of the response, if a model answers.
    pub id: Option<String>,
    /// The client's address.
    pub client: String,
    /// The method; `-` if the head could not be read.
    pub method: String,
    /// The path, without a query.
    pub path: String,
    /// The status of the answer.
    pub status: u16,
    /// The code of the error, if there was one.
    pub error: Option<&'static str>,
    /// The model that answered.
    pub model: Option<String>,
    /// Whether the answer was streamed.
    pub stream: bool,
    /// Whether a prompt was cut, because it was too long.
    pub is_cut: bool,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of the answers.
    pub generated_tokens: u64,
    /// Milliseconds from the request's last byte to the first token.
    pub first_token_ms: Option<f64>,
    /// Milliseconds from the request's head to the end of the answer.
    pub ms: f64,
    /// Whether the client disconnected before the answer was complete.
    pub cancelled: bool,
}

impl Access {
    /// The log line, without its line end. It has characters as the client sent them: a writer for terminals makes them visible.
    pub fn line(&self) -> Value {
        let rounded = |ms: f64| (ms * 1000.0).round() / 1000.0;
        json!({
            "time": humantime::format_rfc3339_millis(self.time.clamp(UNIX_EPOCH, UNIX_EPOCH + LAST)).to_string(),
            "request_id": self.request_id,
            "id": self.id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "error": self.error,
            "model": self.model,
            "stream": self.stream,
            "prompt_cut": self.is_cut,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "first_token_ms": self.first_token_ms.map(rounded),
            "ms": rounded(self.ms),
            "cancelled": self.cancelled,
        })
    }
}
