//! The access log: a line of JSON for each request that is over. It holds no prompt, no answer and no key.

use std::time::SystemTime;

use serde_json::{Value, json};

/// A request that is over.
#[derive(Clone, Debug)]
pub struct Access {
    /// When it came.
    pub time: SystemTime,
    /// The client's address.
    pub client: String,
    /// The method.
    pub method: String,
    /// The path, without a query.
    pub path: String,
    /// The status of the answer.
    pub status: u16,
    /// The code of the error, where there was one.
    pub error: Option<&'static str>,
    /// The model that answered.
    pub model: Option<String>,
    /// Whether the answer was sent as it was made.
    pub stream: bool,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of the answers.
    pub generated_tokens: u64,
    /// From the request's last byte to the first token.
    pub first_token_ms: Option<f64>,
    /// From the request's head to the end of the answer.
    pub ms: f64,
    /// Whether the client left before the answer was whole.
    pub cancelled: bool,
}

impl Access {
    /// The line, without its end.
    pub fn line(&self) -> Value {
        let rounded = |ms: f64| (ms * 1000.0).round() / 1000.0;
        json!({
            "time": humantime::format_rfc3339_millis(self.time).to_string(),
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "error": self.error,
            "model": self.model,
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "first_token_ms": self.first_token_ms.map(rounded),
            "ms": rounded(self.ms),
            "cancelled": self.cancelled,
        })
    }
}
