//! The parameters of a request: read from JSON by name, and taken out one by one.

use std::cell::Cell;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::tree::{MOST_NODES, Tree, TreeLimits};
use super::{LABEL_BYTES, Message, Options, Prompt, RequestLimits, STOPS};
use crate::error::ApiError;

/// Parameters that do not affect an answer.
const IGNORED: [&str; 8] = [
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
const NEUTRAL: [(&str, &str); 8] = [
    ("presence_penalty", "0"),
    ("frequency_penalty", "0"),
    ("logit_bias", "{}"),
    ("suffix", "\"\""),
    ("tools", "[]"),
    ("functions", "[]"),
    ("best_of", "1"),
    // The decoder does not continue the prompt, but answers it.
    ("echo", "false"),
];

/// Parameters that are read, beside those of [`NEUTRAL`].
const READ: [&str; 31] = [
    "model",
    "prompt",
    "messages",
    "labels",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "stop",
    "num_beams",
    "length_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_tokens",
    "stream",
    "stream_options",
    "response_format",
    "logprobs",
    "top_logprobs",
    "include_usage",
    "include_obfuscation",
    "query",
    "documents",
    "top_n",
    "return_documents",
    "input",
    "encoding_format",
    "dimensions",
];

/// The most lists and objects in each other: messages, a message, its content, a part.
const DEPTH: usize = 4;

/// The most characters of an error that a request determines.
const ERROR_CHARS: usize = 120;

/// The parameters that were not taken yet.
#[derive(Debug, Default)]
pub(super) struct Fields {
    left: Vec<(&'static str, Tree)>,
    /// The first parameter without a meaning here.
    unknown: Option<String>,
}

impl Fields {
    /// Reads the parameters of a body. Values that do not matter are checked as JSON, and not kept.
    ///
    /// # Errors
    /// The body is no JSON object.
    pub fn read(body: &[u8], limits: &RequestLimits) -> Result<Self, ApiError> {
        let fault = |reason: &dyn fmt::Display| {
            let reason: String = reason.to_string().chars().take(ERROR_CHARS).collect();
            ApiError::new(400, "invalid_json", format!("the body is no JSON: {reason}"))
        };
        let text = std::str::from_utf8(body).map_err(|error| fault(&error))?;
        if text.trim_start().chars().next().is_some_and(|first| first != '{') {
            return Err(ApiError::new(400, "invalid_json", "the body is no JSON object"));
        }
        let nodes = Cell::new(MOST_NODES);
        let limits = TreeLimits { nodes: &nodes, ids: limits.prompt_bytes / size_of::<u32>(), depth: DEPTH };
        let mut json = serde_json::Deserializer::from_str(text);
        let fields = json.deserialize_map(Body(limits)).map_err(|error| fault(&error))?;
        json.end().map_err(|error| fault(&error))?;
        Ok(fields)
    }

    /// The parameters inside of an object.
    fn inside(parts: Vec<(String, Tree)>) -> Self {
        let mut fields = Fields::default();
        for (name, value) in parts {
            match READ.into_iter().find(|read| *read == name) {
                Some(read) => fields.put(read, value),
                None => fields.put_unknown(name, &value),
            }
        }
        fields
    }

    /// The last value of a name counts.
    fn put(&mut self, name: &'static str, value: Tree) {
        self.take(name);
        self.left.push((name, value));
    }

    fn put_unknown(&mut self, name: String, value: &Tree) {
        if *value != Tree::Null {
            self.unknown.get_or_insert(name);
        }
    }

    /// Takes a parameter; `None` if it is absent or null.
    fn take(&mut self, name: &str) -> Option<Tree> {
        let place = self.left.iter().position(|(other, _)| *other == name)?;
        Some(self.left.swap_remove(place).1).filter(|value| *value != Tree::Null)
    }

    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Tree::Text(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::parameter(name, "expected a string")),
        }
    }

    pub fn truth(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Tree::Truth(truth)) => Ok(truth),
            Some(_) => Err(ApiError::parameter(name, "expected true or false")),
        }
    }

    fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.number().filter(|number| (least..=most).contains(number));
        number
            .map(Some)
            .ok_or_else(|| ApiError::parameter(name, format!("expected a number from {least} to {most}, got {value}")))
    }

    pub fn count(&mut self, name: &str, least: usize, most: usize) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let count = if let Tree::Whole(count) = value { usize::try_from(count).ok() } else { None };
        count.filter(|count| (least..=most).contains(count)).map(Some).ok_or_else(|| {
            let expected =
                if most == usize::MAX { format!("at least {least}") } else { format!("from {least} to {most}") };
            ApiError::parameter(name, format!("expected a whole number {expected}, got {value}"))
        })
    }

    #[expect(clippy::cast_possible_truncation, reason = "settings, not counts")]
    pub fn options(&mut self, is_chat: bool, limits: &RequestLimits) -> Result<Options, ApiError> {
        let max_tokens = self.count("max_tokens", 1, usize::MAX)?;
        let max_completion_tokens = if is_chat { self.count("max_completion_tokens", 1, usize::MAX)? } else { None };
        let options = Options {
            max_tokens: max_completion_tokens.or(max_tokens),
            temperature: self.number("temperature", 0.0, 100.0)?.map(|number| number as f32),
            top_p: self.number("top_p", 0.0, 1.0)?.map(|number| number as f32),
            top_k: self.count("top_k", 0, usize::MAX)?,
            seed: match self.take("seed") {
                None => None,
                Some(Tree::Whole(seed)) => Some(seed),
                Some(Tree::Negative(seed)) => Some(seed.cast_unsigned()),
                Some(_) => return Err(ApiError::parameter("seed", "expected a whole number")),
            },
            n: self.count("n", 1, limits.rows)?.unwrap_or(1),
            stop: self.stop()?,
            num_beams: self.count("num_beams", 1, limits.rows)?,
            length_penalty: self.number("length_penalty", -100.0, 100.0)?,
            repetition_penalty: self.number("repetition_penalty", 0.01, 100.0)?.map(|number| number as f32),
            no_repeat_ngram: self.count("no_repeat_ngram_size", 0, usize::MAX)?,
            min_tokens: self.count("min_tokens", 0, usize::MAX)?,
            ..Options::default()
        };
        let is_drawn = options.temperature.is_some_and(|temperature| temperature > 0.0);
        match options.num_beams {
            Some(beams) if options.n > beams.max(1) && (beams > 1 || !is_drawn) => {
                Err(ApiError::parameter("n", format!("expected at most {beams}, the number of beams")))
            }
            _ => Ok(options),
        }
    }

    /// A text or a list of texts, each of 1 to 256 bytes.
    fn texts(&mut self, name: &str, most: usize) -> Result<Vec<String>, ApiError> {
        let fault = || {
            ApiError::parameter(
                name,
                format!("expected a text or a list of at most {most}, each of 1 to {LABEL_BYTES} bytes"),
            )
        };
        let texts = match self.take(name) {
            None => Vec::new(),
            Some(Tree::Text(text)) => vec![text],
            Some(Tree::List(texts)) if texts.len() <= most => {
                let text = |value| if let Tree::Text(text) = value { Some(text) } else { None };
                texts.into_iter().map(text).collect::<Option<Vec<String>>>().ok_or_else(fault)?
            }
            Some(_) => return Err(fault()),
        };
        match texts.iter().any(|text| text.is_empty() || text.len() > LABEL_BYTES) {
            true => Err(fault()),
            false => Ok(texts),
        }
    }

    fn stop(&mut self) -> Result<Vec<String>, ApiError> {
        self.texts("stop", STOPS)
    }

    /// The texts to score: at least one.
    pub fn labels(&mut self, most: usize) -> Result<Vec<String>, ApiError> {
        let labels = self.texts("labels", most)?;
        match labels.is_empty() {
            true => Err(ApiError::parameter("labels", format!("expected a list of 1 to {most} texts"))),
            false => Ok(labels),
        }
    }

    /// `logprobs` of a chat: a truth, and the number of alternatives in `top_logprobs`.
    pub fn logprobs_of_chat(&mut self) -> Result<Option<usize>, ApiError> {
        let more = self.count("top_logprobs", 0, 20)?.unwrap_or(0);
        match self.truth("logprobs")? {
            true => Ok(Some(more)),
            false if more > 0 => Err(ApiError::parameter("top_logprobs", "needs `logprobs`: true")),
            false => Ok(None),
        }
    }

    /// `stream_options.include_usage`
    pub fn include_usage(&mut self) -> Result<bool, ApiError> {
        match self.take("stream_options") {
            None => Ok(false),
            Some(Tree::Object(parts)) => {
                let mut inside = Fields::inside(parts);
                inside.take("include_obfuscation");
                let wanted = inside.truth("include_usage")?;
                inside.end()?;
                Ok(wanted)
            }
            Some(_) => Err(ApiError::parameter("stream_options", "expected an object")),
        }
    }

    pub fn response_format(&mut self) -> Result<(), ApiError> {
        let is_text = |parts: &[(String, Tree)]| {
            parts.iter().any(|(name, value)| name == "type" && *value == Tree::Text("text".to_owned()))
        };
        match self.take("response_format") {
            None => Ok(()),
            Some(Tree::Object(parts)) if is_text(&parts) => Ok(()),
            Some(_) => {
                Err(ApiError::parameter("response_format", "expected {\"type\": \"text\"}; others are not supported"))
            }
        }
    }

    /// The prompts in a parameter, at most `most`.
    pub fn prompts(&mut self, name: &str, most: usize, limits: &RequestLimits) -> Result<Vec<Prompt>, ApiError> {
        let fault =
            || ApiError::parameter(name, "expected a text, a list of texts, a list of token ids, or a list of those");
        let one = |value| match value {
            Tree::Text(text) => Ok(Prompt::Text(text)),
            Tree::Ids(ids) => Ok(Prompt::Tokens(ids)),
            Tree::List(parts) if parts.is_empty() => Ok(Prompt::Tokens(Vec::new())),
            Tree::TooManyIds(count) => Err(super::too_long(name, format!("{count} tokens"), limits)),
            _ => Err(fault()),
        };
        match self.take(name) {
            None => Err(ApiError::parameter(name, "expected a text, got none")),
            Some(Tree::List(values)) if values.is_empty() => Err(fault()),
            Some(value @ (Tree::List(_) | Tree::Skipped(_))) if value.parts() > Some(most) => {
                let got = value.parts().unwrap_or_default();
                Err(ApiError::parameter(name, format!("expected at most {most} texts, got {got}")))
            }
            Some(Tree::List(values)) => values.into_iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }

    /// The documents of a ranking: texts, or objects with a `text`.
    pub fn documents(&mut self, limits: &RequestLimits) -> Result<Vec<String>, ApiError> {
        const NAME: &str = "documents";
        let fault = || ApiError::parameter(NAME, "expected a list of texts, or of objects with a `text`");
        let one = |value| match value {
            Tree::Text(text) => Ok(text),
            Tree::Object(parts) => match parts.into_iter().find(|(name, _)| name == "text") {
                Some((_, Tree::Text(text))) => Ok(text),
                _ => Err(fault()),
            },
            _ => Err(fault()),
        };
        match self.take(NAME) {
            Some(value) if value.parts() > Some(limits.texts) => {
                let (most, got) = (limits.texts, value.parts().unwrap_or_default());
                let message = format!("expected at most {most} documents, got {got}; `serve --queue` sets the limit");
                Err(ApiError::parameter(NAME, message))
            }
            Some(Tree::List(values)) if !values.is_empty() => values.into_iter().map(one).collect(),
            _ => Err(fault()),
        }
    }

    pub fn messages(&mut self, limits: &RequestLimits) -> Result<Prompt, ApiError> {
        let value = self.take("messages");
        let Some(count) = value.as_ref().and_then(Tree::parts) else {
            return Err(ApiError::parameter("messages", "expected a list of messages"));
        };
        match value {
            Some(Tree::List(values)) if (1..=limits.messages).contains(&count) => {
                values.into_iter().map(message).collect::<Result<_, _>>().map(Prompt::Chat)
            }
            _ => {
                let message = format!("expected from 1 to {} messages, got {count}", limits.messages);
                Err(ApiError::parameter("messages", message))
            }
        }
    }

    /// Checks that no parameter is left that could change the answer.
    pub fn end(mut self) -> Result<(), ApiError> {
        for (name, neutral) in NEUTRAL {
            if let Some(value) = self.take(name) {
                let is_neutral = match &value {
                    Tree::Text(text) => text.is_empty() && neutral == "\"\"",
                    Tree::List(parts) => parts.is_empty() && neutral == "[]",
                    Tree::Object(parts) => parts.is_empty() && neutral == "{}",
                    Tree::Truth(truth) => truth.to_string() == neutral,
                    value => value.number().is_some_and(|number| neutral.parse() == Ok(number)),
                };
                if !is_neutral {
                    return Err(ApiError::parameter(name, format!("not supported; expected {neutral} or nothing")));
                }
            }
        }
        let left = self.left.into_iter().find(|(_, value)| *value != Tree::Null);
        match self.unknown.or(left.map(|(name, _)| name.to_owned())) {
            None => Ok(()),
            Some(name) => {
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
fn message(value: Tree) -> Result<Message, ApiError> {
    let fault = |what: &str| ApiError::parameter("messages", what);
    let Tree::Object(fields) = value else { return Err(fault("expected objects with `role` and `content`")) };
    let (mut role, mut content) = (None, Tree::Null);
    for (name, value) in fields {
        match (name.as_str(), value) {
            ("role", Tree::Text(text)) => role = Some(text),
            ("content", value) => content = value,
            _ => {}
        }
    }
    let Some(role) = role else { return Err(fault("a message has no `role`")) };
    if !["system", "developer", "user", "assistant"].contains(&role.as_str()) {
        return Err(fault("expected a role of system, developer, user or assistant"));
    }
    let content = match content {
        Tree::Text(text) => text,
        Tree::Null => String::new(),
        Tree::List(parts) => {
            let parts = parts.into_iter().map(part).collect::<Option<Vec<String>>>();
            parts.ok_or_else(|| fault("expected parts of type `text`"))?.join("\n")
        }
        _ => return Err(fault("expected `content` as a text or a list of parts")),
    };
    Ok(Message { role, content })
}

/// The text of a part of a message.
fn part(value: Tree) -> Option<String> {
    let Tree::Object(fields) = value else { return None };
    let mut text = None;
    for (name, value) in fields {
        match (name.as_str(), value) {
            ("type", value) if value != Tree::Text("text".to_owned()) => return None,
            ("text", Tree::Text(value)) => text = Some(value),
            _ => {}
        }
    }
    text
}

/// Reads the object of a body.
struct Body<'a>(TreeLimits<'a>);

impl<'de> Visitor<'de> for Body<'_> {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Fields, A::Error> {
        let mut fields = Fields::default();
        while let Some(name) = all.next_key::<String>()? {
            let flat = TreeLimits { depth: 0, ..self.0 };
            if IGNORED.contains(&name.as_str()) {
                all.next_value::<IgnoredAny>()?;
            } else if let Some(read) = READ.into_iter().find(|read| *read == name) {
                fields.put(read, all.next_value_seed(self.0)?);
            } else if let Some((neutral, _)) = NEUTRAL.into_iter().find(|(neutral, _)| *neutral == name) {
                fields.put(neutral, all.next_value_seed(flat)?);
            } else {
                let value = all.next_value_seed(flat)?;
                fields.put_unknown(name, &value);
            }
        }
        Ok(fields)
    }
}
