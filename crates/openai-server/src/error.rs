//! Errors in OpenAI's form: a status, a type, a code, and the parameter at fault.

use std::fmt;

use serde_json::{Value, json};

/// The reason why a request gets no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: u16,
    /// The `code` of the error, for programs.
    pub code: &'static str,
    /// The fault, the expected value, and the remedy.
    pub message: String,
    /// The parameter at fault.
    pub parameter: Option<String>,
    /// Seconds after which another try makes sense.
    pub retry_after_s: Option<u64>,
}

impl ApiError {
    /// An error with a status and a code.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, code, message: message.into(), parameter: None, retry_after_s: None }
    }

    /// 400: a parameter has a wrong value.
    pub fn parameter(name: &str, message: impl fmt::Display) -> Self {
        let error = ApiError::new(400, "invalid_value", format!("`{name}`: {message}"));
        ApiError { parameter: Some(name.to_owned()), ..error }
    }

    /// 500: a failure that is not the request's fault.
    pub fn internal(message: impl Into<String>) -> Self {
        ApiError::new(500, "internal_error", message)
    }

    /// The `type`, which OpenAI's clients map to their exceptions.
    fn kind(&self) -> &'static str {
        match self.status {
            401 | 403 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body of the response: `{"error": {..}}`
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind(), "param": self.parameter, "code": self.code}})
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.message)
    }
}
