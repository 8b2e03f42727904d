//! Parses requests from JSON and checks them completely before any work.
//!
//! An unknown parameter that would change the answer is refused, since ignoring it would give a different answer. Parameters
//! that do not affect the answer (`user`, `metadata`, ..) are accepted and ignored.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The interface of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
}

/// Limits of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// The most prompts of a request.
    pub prompts: usize,
    /// The most answers to a prompt, and the most beams.
    pub rows: usize,
    /// The most messages of a chat.
    pub messages: usize,
}

impl Default for RequestLimits {
    fn default() -> Self {
        RequestLimits { prompts: 16, rows: 4, messages: 256 }
    }
}

/// A parsed request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The interface.
    pub interface: Interface,
    /// The model, if the request names one.
    pub model: Option<String>,
    /// One or more prompts.
    pub prompts: Vec<Prompt>,
    /// The settings for the answers.
    pub options: Options,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether the last event of a stream contains the token counts.
    pub include_usage: bool,
}

/// A prompt to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids, without the end-of-sequence token.
    Tokens(Vec<u32>),
    /// A chat.
    Chat(Vec<Message>),
}

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant`, ..
    pub role: String,
    /// The message's text.
    pub content: String,
}

/// Settings for the answers. `None` stands for the model's own setting.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// The sampling temperature; 0 always takes the likeliest token.
    pub temperature: Option<f32>,
    /// Sample only from the likeliest tokens with this total probability.
    pub top_p: Option<f32>,
    /// Sample only from this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Determines the random choices.
    pub seed: Option<u64>,
    /// Number of answers to each prompt.
    pub n: usize,
    /// Texts that end an answer and are not part of it.
    pub stop: Vec<String>,
    /// Number of beams of a beam search.
    pub num_beams: Option<usize>,
    /// The exponent of the length by which a beam's score is divided.
    pub length_penalty: Option<f64>,
    /// Makes tokens less likely that occurred before.
    pub repetition_penalty: Option<f32>,
    /// No n-gram of this length occurs twice.
    pub no_repeat_ngram: Option<usize>,
    /// The answer does not end before this many tokens.
    pub min_tokens: Option<usize>,
    /// Whether the client receives the answer while it is generated.
    pub is_streamed: bool,
}

/// Parameters that do not affect an answer.
const IGNORED_PARAMETERS: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "verbosity",
];

/// Parameters that have no effect at one value, and are refused at any other: the name, and the neutral value as JSON.
const NEUTRAL: [(&str, &str); 10] = [
    ("presence_penalty", "0"),
    ("frequency_penalty", "0"),
    ("logit_bias", "{}"),
    ("suffix", "\"\""),
    ("tools", "[]"),
    ("functions", "[]"),
    ("logprobs", "false"),
    ("top_logprobs", "0"),
    ("best_of", "1"),
    // The decoder does not continue the prompt, but answers it.
    ("echo", "false"),
];

impl Request {
    /// Parses a request.
    ///
    /// # Errors
    /// [`ApiError`] with status 400, naming the parameter at fault.
    pub fn parse(interface: Interface, body: &[u8], limits: &RequestLimits) -> Result<Request, ApiError> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::new(400, "invalid_json", format!("the body is no JSON: {error}")))?;
        let Value::Object(body) = body else {
            return Err(ApiError::new(400, "invalid_json", "the body is no JSON object"));
        };
        let mut fields = Fields { left: body };
        let is_chat = interface == Interface::Chat;
        let prompts = if is_chat { vec![fields.messages(limits)?] } else { fields.prompts(limits)? };
        let mut options = fields.options(is_chat, limits)?;
        let stream = fields.truth("stream")?;
        options.is_streamed = stream;
        let include_usage = match fields.take("stream_options") {
            None => false,
            Some(Value::Object(inner)) => {
                let mut inner = Fields { left: inner };
                inner.left.remove("include_obfuscation");
                let wanted = inner.truth("include_usage")?;
                inner.end()?;
                wanted
            }
            Some(_) => return Err(ApiError::parameter("stream_options", "expected an object")),
        };
        let model = fields.text("model")?;
        if let Some(format) = fields.take("response_format")
            && format.get("type").and_then(Value::as_str) != Some("text")
        {
            return Err(ApiError::parameter(
                "response_format",
                "expected {\"type\": \"text\"}; others are not supported",
            ));
        }
        fields.end()?;
        if stream && options.num_beams.is_some_and(|beams| beams > 1) && options.n > 1 {
            return Err(ApiError::parameter("n", "expected 1 for a beam search that is streamed"));
        }
        Ok(Request { interface, model, prompts, options, stream, include_usage })
    }
}

/// The parameters that were not read yet.
struct Fields {
    left: Map<String, Value>,
}

impl Fields {
    /// Takes a parameter; `None` if it is absent or null.
    fn take(&mut self, name: &str) -> Option<Value> {
        self.left.remove(name).filter(|value| !value.is_null())
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::parameter(name, "expected a string")),
        }
    }

    fn truth(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(truth)) => Ok(truth),
            Some(_) => Err(ApiError::parameter(name, "expected true or false")),
        }
    }

    fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().filter(|number| (least..=most).contains(number));
        number.map(Some).ok_or_else(|| {
            ApiError::parameter(name, format!("expected a number from {least} to {most}, got {}", short(&value)))
        })
    }

    fn count(&mut self, name: &str, least: usize, most: usize) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.filter(|count| (least..=most).contains(count)).map(Some).ok_or_else(|| {
            let expected =
                if most == usize::MAX { format!("at least {least}") } else { format!("from {least} to {most}") };
            ApiError::parameter(name, format!("expected a whole number {expected}, got {}", short(&value)))
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "settings, not counts")]
    fn options(&mut self, is_chat: bool, limits: &RequestLimits) -> Result<Options, ApiError> {
        let max_tokens = self.count("max_tokens", 1, usize::MAX)?;
        let max_completion_tokens = if is_chat { self.count("max_completion_tokens", 1, usize::MAX)? } else { None };
        let options = Options {
            max_tokens: max_completion_tokens.or(max_tokens),
            temperature: self.number("temperature", 0.0, 100.0)?.map(|number| number as f32),
            top_p: self.number("top_p", 0.0, 1.0)?.map(|number| number as f32),
            top_k: self.count("top_k", 0, usize::MAX)?,
            seed: match self.take("seed") {
                None => None,
                Some(seed) => {
                    let bits = seed.as_u64().or_else(|| seed.as_i64().map(i64::cast_unsigned));
                    Some(bits.ok_or_else(|| ApiError::parameter("seed", "expected a whole number"))?)
                }
            },
            n: self.count("n", 1, limits.rows)?.unwrap_or(1),
            stop: self.stop()?,
            num_beams: self.count("num_beams", 1, limits.rows)?,
            length_penalty: self.number("length_penalty", -100.0, 100.0)?,
            repetition_penalty: self.number("repetition_penalty", 0.01, 100.0)?.map(|number| number as f32),
            no_repeat_ngram: self.count("no_repeat_ngram_size", 0, usize::MAX)?,
            min_tokens: self.count("min_tokens", 0, usize::MAX)?,
            is_streamed: false,
        };
        let is_drawn = options.temperature.is_some_and(|temperature| temperature > 0.0);
        match options.num_beams {
            Some(beams) if options.n > beams.max(1) && (beams > 1 || !is_drawn) => {
                Err(ApiError::parameter("n", format!("expected at most {beams}, the number of beams")))
            }
            _ => Ok(options),
        }
    }

    fn stop(&mut self) -> Result<Vec<String>, ApiError> {
        let fault = || ApiError::parameter("stop", "expected a text or a list of at most 4, each of 1 to 256 bytes");
        let texts = match self.take("stop") {
            None => Vec::new(),
            Some(Value::String(text)) => vec![text],
            Some(Value::Array(texts)) if texts.len() <= 4 => {
                let text = |value| if let Value::String(text) = value { Some(text) } else { None };
                texts.into_iter().map(text).collect::<Option<Vec<String>>>().ok_or_else(fault)?
            }
            Some(_) => return Err(fault()),
        };
        if texts.iter().any(|text| text.is_empty() || text.len() > 256) {
            return Err(fault());
        }
        Ok(texts)
    }

    fn prompts(&mut self, limits: &RequestLimits) -> Result<Vec<Prompt>, ApiError> {
        let fault = || {
            ApiError::parameter("prompt", "expected a text, a list of texts, a list of token ids, or a list of those")
        };
        let token = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(fault);
        let tokens = |values: &[Value]| values.iter().map(token).collect::<Result<Vec<u32>, _>>().map(Prompt::Tokens);
        match self.take("prompt") {
            None => Err(ApiError::parameter("prompt", "expected a text, got none")),
            Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
            Some(Value::Array(values)) if values.first().is_some_and(Value::is_number) => Ok(vec![tokens(&values)?]),
            Some(Value::Array(values)) if values.is_empty() => Err(fault()),
            Some(Value::Array(values)) if values.len() > limits.prompts => {
                let message = format!("expected at most {} prompts, got {}", limits.prompts, values.len());
                Err(ApiError::parameter("prompt", message))
            }
            Some(Value::Array(values)) => {
                let prompt = |value| match value {
                    Value::String(text) => Ok(Prompt::Text(text)),
                    Value::Array(ids) => tokens(&ids),
                    _ => Err(fault()),
                };
                values.into_iter().map(prompt).collect()
            }
            Some(_) => Err(fault()),
        }
    }

    fn messages(&mut self, limits: &RequestLimits) -> Result<Prompt, ApiError> {
        let Some(Value::Array(values)) = self.take("messages") else {
            return Err(ApiError::parameter("messages", "expected a list of messages"));
        };
        if values.is_empty() || values.len() > limits.messages {
            let message = format!("expected from 1 to {} messages, got {}", limits.messages, values.len());
            return Err(ApiError::parameter("messages", message));
        }
        values.into_iter().map(message).collect::<Result<_, _>>().map(Prompt::Chat)
    }

    /// Checks that no parameter is left that could change the answer.
    fn end(mut self) -> Result<(), ApiError> {
        for name in IGNORED_PARAMETERS {
            self.left.remove(name);
        }
        for (name, neutral) in NEUTRAL {
            if let Some(value) = self.take(name) {
                let neutral: Value = serde_json::from_str(neutral).unwrap_or_default();
                let is_same = value == neutral || value.as_f64().is_some_and(|number| Some(number) == neutral.as_f64());
                if !is_same {
                    return Err(ApiError::parameter(name, format!("not supported; expected {neutral} or nothing")));
                }
            }
        }
        match self.left.into_iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let name: String = name.chars().take(64).collect();
                Err(ApiError {
                    code: "unknown_parameter",
                    ..ApiError::parameter(&name, "no such parameter is supported")
                })
            }
        }
    }
}

/// Parses a message: `role`, and `content` as a text or as parts of text.
fn message(value: Value) -> Result<Message, ApiError> {
    let fault = |what: &str| ApiError::parameter("messages", what);
    let Value::Object(mut fields) = value else { return Err(fault("expected objects with `role` and `content`")) };
    let Some(Value::String(role)) = fields.remove("role") else { return Err(fault("a message has no `role`")) };
    if !["system", "developer", "user", "assistant"].contains(&role.as_str()) {
        return Err(fault("expected a role of system, developer, user or assistant"));
    }
    let content = match fields.remove("content") {
        Some(Value::String(text)) => text,
        None | Some(Value::Null) => String::new(),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| {
                let is_text = part.get("type").and_then(Value::as_str).is_none_or(|kind| kind == "text");
                part.get("text").and_then(Value::as_str).filter(|_| is_text).map(str::to_owned)
            };
            let parts = parts.iter().map(text).collect::<Option<Vec<String>>>();
            parts.ok_or_else(|| fault("expected parts of type `text`"))?.join("\n")
        }
        Some(_) => return Err(fault("expected `content` as a text or a list of parts")),
    };
    Ok(Message { role, content })
}

/// A value, shortened for an error.
fn short(value: &Value) -> String {
    match value {
        Value::Number(_) | Value::Bool(_) => value.to_string(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        _ => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(interface: Interface, json: &str) -> Result<Request, ApiError> {
        Request::parse(interface, json.as_bytes(), &RequestLimits::default())
    }

    #[track_caller]
    fn refused(interface: Interface, json: &str, parameter: &str) {
        let error = parsed(interface, json).expect_err(json);
        assert_eq!((error.status, error.parameter.as_deref()), (400, Some(parameter)), "{json}: {error}");
    }

    #[test]
    fn a_prompt_is_a_text_tokens_or_a_list_of_either() {
        let prompts =
            |json: &str| parsed(Interface::Completions, json).unwrap_or_else(|error| panic!("{error}")).prompts;
        assert_eq!(prompts(r#"{"prompt":"a"}"#), [Prompt::Text("a".into())]);
        assert_eq!(prompts(r#"{"prompt":["a","b"]}"#), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
        assert_eq!(prompts(r#"{"prompt":[3,4]}"#), [Prompt::Tokens(vec![3, 4])]);
        assert_eq!(prompts(r#"{"prompt":[[3],[4]]}"#), [Prompt::Tokens(vec![3]), Prompt::Tokens(vec![4])]);
        for json in [r#"{}"#, r#"{"prompt":[]}"#, r#"{"prompt":[-1]}"#, r#"{"prompt":[true]}"#, r#"{"prompt":[1,"a"]}"#]
        {
            refused(Interface::Completions, json, "prompt");
        }
        let many = format!("{{\"prompt\":[{}\"a\"]}}", "\"a\",".repeat(16));
        refused(Interface::Completions, &many, "prompt");
    }

    #[test]
    fn a_chat_has_messages_of_text() {
        let request = parsed(
            Interface::Chat,
            r#"{"model":"m","messages":[{"role":"developer","content":"s"},
               {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],
               "stream":true,"stream_options":{"include_usage":true},"max_completion_tokens":7,"user":"u"}"#,
        )
        .unwrap();
        let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        assert_eq!(request.prompts, [Prompt::Chat(vec![message("developer", "s"), message("user", "a\nb")])]);
        assert!(request.stream && request.include_usage);
        assert_eq!(request.options.max_tokens, Some(7));
        for json in [
            r#"{}"#,
            r#"{"messages":[]}"#,
            r#"{"messages":[3]}"#,
            r#"{"messages":[{"role":"tool","content":"a"}]}"#,
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}"#,
        ] {
            refused(Interface::Chat, json, "messages");
        }
    }

    #[test]
    fn a_parameter_that_would_change_the_answer_is_known_or_refused_by_name() {
        for (field, parameter) in [
            (r#""temperature":-1"#, "temperature"),
            (r#""temperature":"hot""#, "temperature"),
            (r#""top_p":1.5"#, "top_p"),
            (r#""n":9"#, "n"),
            (r#""num_beams":2,"n":3"#, "n"),
            (r#""max_tokens":0"#, "max_tokens"),
            (r#""stop":[1]"#, "stop"),
            (r#""stop":"""#, "stop"),
            (r#""stream":1"#, "stream"),
            (r#""presence_penalty":0.5"#, "presence_penalty"),
            (r#""logprobs":3"#, "logprobs"),
            (r#""tempreature":1"#, "tempreature"),
        ] {
            refused(Interface::Completions, &format!("{{\"prompt\":\"a\",{field}}}"), parameter);
        }
        let neutral =
            r#"{"prompt":"a","presence_penalty":0.0,"logit_bias":{},"suffix":null,"logprobs":null,"best_of":1}"#;
        assert!(parsed(Interface::Completions, neutral).is_ok());
        refused(Interface::Chat, r#"{"messages":[{"role":"user","content":"a"}],"tools":[{}]}"#, "tools");
    }

    #[test]
    fn what_is_no_json_object_is_an_error_with_a_code() {
        for body in ["", "{", "[]", "null", "{\"prompt\":\"a\"} x", &"[".repeat(100_000)] {
            assert_eq!(parsed(Interface::Completions, body).unwrap_err().code, "invalid_json", "{}", body.len());
        }
    }

    proptest! {
        #[test]
        fn damaged_requests_are_read_or_refused_with_400(
            cut in 0usize..400, place in 0usize..400, byte: u8, interface in prop_oneof![Just(Interface::Completions), Just(Interface::Chat)],
        ) {
            let whole = r#"{"model":"m","prompt":["a",[1,2]],"messages":[{"role":"user","content":[{"type":"text","text":"é"}]}],"n":2,"temperature":0.7,"stop":["x"],"stream":true,"stream_options":{"include_usage":true},"seed":-4}"#;
            let mut bytes = whole.as_bytes().to_vec();
            let length = bytes.len();
            bytes[place % length] = byte;
            bytes.truncate(length - cut.min(length) * usize::from(cut % 2 == 0));
            if let Err(error) = Request::parse(interface, &bytes, &RequestLimits::default()) {
                prop_assert_eq!(error.status, 400);
            }
        }
    }
}
