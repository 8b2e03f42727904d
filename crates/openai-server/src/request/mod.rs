//! Parses requests from JSON and checks them completely before any work.
//!
//! An unknown parameter that would change the answer is refused, since ignoring it would give a different answer. Parameters
//! that do not affect the answer (`user`, `metadata`, ..) are accepted and ignored.

mod fields;
mod texts;
mod tree;

use std::sync::Arc;

use crate::error::ApiError;
use fields::Fields;
pub use texts::Results;

/// The interface of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/score`
    Score,
    /// `/v1/rerank`
    Rerank,
    /// `/v1/embeddings`
    Embeddings,
}

impl Interface {
    /// The parameter of the prompts, for errors about them.
    fn prompts(self) -> &'static str {
        match self {
            Interface::Completions | Interface::Score => "prompt",
            Interface::Chat => "messages",
            Interface::Rerank => "documents",
            Interface::Embeddings => "input",
        }
    }
}

/// Limits of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// The most prompts of a request.
    pub prompts: usize,
    /// The most documents of a ranking, and the most texts that get vectors.
    pub texts: usize,
    /// The most answers to a prompt, and the most beams.
    pub rows: usize,
    /// The most messages of a chat.
    pub messages: usize,
    /// The most tokens of an answer, and those of a request that names none.
    pub answer_tokens: usize,
    /// The most bytes of a prompt: of its text, of the texts of its messages, or of four for each token id.
    pub prompt_bytes: usize,
    /// Whether a longer text is cut rather than refused.
    pub overflow: Overflow,
}

/// What happens to a prompt that is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// It is refused.
    #[default]
    Refuse,
    /// Its end is cut off; of a chat, its beginning.
    CutEnd,
    /// Its beginning is cut off.
    CutBeginning,
}

impl Overflow {
    /// The part of a text that is kept: at most `most` bytes. `None` if it is refused.
    pub fn kept(self, text: &str, most: usize) -> Option<&str> {
        match self {
            _ if text.len() <= most => Some(text),
            Overflow::Refuse => None,
            Overflow::CutEnd => Some(&text[..text.floor_char_boundary(most)]),
            Overflow::CutBeginning => Some(&text[text.ceil_char_boundary(text.len() - most)..]),
        }
    }
}

impl Default for RequestLimits {
    fn default() -> Self {
        RequestLimits {
            prompts: 16,
            texts: 64,
            rows: 4,
            messages: 256,
            answer_tokens: 256,
            prompt_bytes: 16 << 10,
            overflow: Overflow::default(),
        }
    }
}

/// The most stop texts of a request.
pub(crate) const STOPS: usize = 4;

/// The most bytes of a label or a stop text.
pub(crate) const LABEL_BYTES: usize = 256;

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
    /// Of [`Interface::Score`]: the texts whose probabilities are wanted.
    pub labels: Vec<String>,
    /// Of [`Interface::Rerank`] and [`Interface::Embeddings`]: how the results are given.
    pub results: Results,
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
    /// A query, and a document that may answer it.
    Pair(Arc<str>, String),
}

impl Prompt {
    /// The query, which all documents of a request share.
    pub(crate) fn query(&self) -> Option<&Arc<str>> {
        if let Prompt::Pair(query, _) = self { Some(query) } else { None }
    }

    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Prompt::Text(text) => text.len(),
            Prompt::Tokens(ids) => size_of_val(ids.as_slice()),
            Prompt::Pair(query, document) => query.len() + document.len(),
            Prompt::Chat(messages) => messages.iter().map(|message| message.content.len() + MESSAGE_BYTES).sum(),
        }
    }
}

/// Bytes of a message beside its text: itself, its role, and their allocations.
const MESSAGE_BYTES: usize = 96;

/// What is wanted of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// Answers, or the probabilities of labels.
    #[default]
    Answers,
    /// How well a document answers a query.
    Score,
    /// Its vector, perhaps cut to so many numbers.
    Vector(Option<usize>),
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
    /// The log-probability of each token is wanted, beside those of this many of the likeliest tokens.
    pub logprobs: Option<usize>,
    /// If there are any: no answer is made. The log-probabilities of these texts are wanted instead.
    pub labels: Vec<String>,
    /// What is wanted of the prompt.
    pub wanted: Wanted,
    /// Whether the text was cut already, because it had too many bytes.
    pub is_cut: bool,
}

/// The most labels of a request, for each row.
pub(crate) const LABELS_A_ROW: usize = 16;

/// The most log-probabilities of tokens in an answer to a request.
const MOST_LOGPROBS: usize = 8192;

impl Request {
    /// Parses a request.
    ///
    /// # Errors
    /// [`ApiError`] with status 400, naming the parameter at fault.
    pub fn parse(interface: Interface, body: &[u8], limits: &RequestLimits) -> Result<Request, ApiError> {
        let mut fields = Fields::read(body, limits)?;
        if matches!(interface, Interface::Rerank | Interface::Embeddings) {
            let is_ranked = interface == Interface::Rerank;
            let mut request =
                if is_ranked { texts::rerank(fields, limits)? } else { texts::embeddings(fields, limits)? };
            request.cut(limits)?;
            return Ok(request);
        }
        let is_chat = interface == Interface::Chat;
        let prompts =
            if is_chat { vec![fields.messages(limits)?] } else { fields.prompts("prompt", limits.prompts, limits)? };
        let labels =
            if interface == Interface::Score { fields.labels(LABELS_A_ROW * limits.rows)? } else { Vec::new() };
        let mut options = fields.options(is_chat, limits)?;
        options.logprobs = if is_chat { fields.logprobs_of_chat()? } else { fields.count("logprobs", 0, 5)? };
        let stream = fields.truth("stream")?;
        options.is_streamed = stream;
        let include_usage = fields.include_usage()?;
        let model = fields.text("model")?;
        fields.response_format()?;
        fields.end()?;
        let results = Results::default();
        let mut request = Request { interface, model, prompts, options, stream, include_usage, labels, results };
        request.check(limits)?;
        request.cut(limits)?;
        Ok(request)
    }

    /// Checks the parameters that can contradict each other.
    fn check(&self, limits: &RequestLimits) -> Result<(), ApiError> {
        let Options { num_beams, n, logprobs, max_tokens, .. } = self.options;
        let searches = num_beams.is_some_and(|beams| beams > 1);
        if self.stream && searches && n > 1 {
            return Err(ApiError::parameter("n", "expected 1 for a beam search that is streamed"));
        }
        if logprobs.is_some() && searches {
            return Err(ApiError::parameter("logprobs", "not supported beside a beam search"));
        }
        if self.interface == Interface::Score && (self.stream || n > 1 || searches || logprobs.is_some()) {
            return Err(ApiError::parameter("labels", "scores have no `stream`, `n`, `num_beams` or `logprobs`"));
        }
        let of_answer = max_tokens.unwrap_or(usize::MAX).min(limits.answer_tokens);
        let tokens = self.prompts.len() * n * of_answer;
        if logprobs.is_some_and(|more| tokens.saturating_mul(more + 1) > MOST_LOGPROBS) {
            let message =
                format!("expected at most {MOST_LOGPROBS} log-probabilities; ask for fewer tokens or answers");
            return Err(ApiError::parameter("logprobs", message));
        }
        Ok(())
    }

    /// Refuses or cuts prompts of too many bytes, before they wait anywhere.
    fn cut(&mut self, limits: &RequestLimits) -> Result<(), ApiError> {
        let most = limits.prompt_bytes;
        let parameter = self.interface.prompts();
        let refuse = |bytes: usize| too_long(parameter, format!("{bytes} bytes"), limits);
        for prompt in &mut self.prompts {
            match prompt {
                Prompt::Text(text) if text.len() > most => {
                    let kept = limits.overflow.kept(text, most).ok_or_else(|| refuse(text.len()))?;
                    *text = kept.to_owned();
                    self.options.is_cut = true;
                }
                Prompt::Chat(messages) => {
                    let bytes = |messages: &[Message]| messages.iter().map(|message| message.content.len()).sum();
                    let all: usize = bytes(messages);
                    if all > most && limits.overflow == Overflow::Refuse {
                        return Err(refuse(all));
                    }
                    // The oldest messages go first, and the last question stays.
                    while bytes(messages) > most && messages.len() > 1 {
                        messages.remove(0);
                        self.options.is_cut = true;
                    }
                    if let [only] = &mut messages[..]
                        && only.content.len() > most
                    {
                        only.content = Overflow::CutBeginning.kept(&only.content, most).unwrap_or_default().to_owned();
                        self.options.is_cut = true;
                    }
                }
                Prompt::Pair(query, document) if query.len() + document.len() > most => {
                    let bytes = query.len() + document.len();
                    let of_query = || too_long("query", format!("{} bytes", query.len()), limits);
                    let room = most.checked_sub(query.len()).ok_or_else(of_query)?;
                    let refuse = |bytes| too_long(parameter, format!("{bytes} bytes with the query"), limits);
                    let kept = limits.overflow.kept(document, room).ok_or_else(|| refuse(bytes))?;
                    *document = kept.to_owned();
                    self.options.is_cut = true;
                }
                Prompt::Text(_) | Prompt::Tokens(_) | Prompt::Pair(..) => {}
            }
        }
        Ok(())
    }
}

/// The error of a prompt that is refused before it is tokenized.
fn too_long(parameter: &str, got: String, limits: &RequestLimits) -> ApiError {
    let message = format!("`{parameter}`: a text has {got}, and at most {} bytes are read", limits.prompt_bytes);
    let error = ApiError::new(400, "context_length_exceeded", message);
    ApiError { parameter: Some(parameter.to_owned()), ..error }
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
        let limits = RequestLimits { answer_tokens: 1000, ..RequestLimits::default() };
        let error = Request::parse(interface, json.as_bytes(), &limits).expect_err(json);
        assert_eq!((error.status, error.parameter.as_deref()), (400, Some(parameter)), "{json}: {error}");
    }

    #[test]
    fn documents_are_ranked_for_a_query_and_texts_get_vectors() {
        let asked = parsed(
            Interface::Rerank,
            r#"{"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": true}"#,
        );
        let asked = asked.unwrap();
        assert_eq!(asked.prompts, ["a", "b"].map(|text| Prompt::Pair("q".into(), text.to_owned())));
        assert_eq!((asked.results.top_n, asked.results.documents), (Some(1), vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!((asked.options.wanted, asked.options.n), (Wanted::Score, 1));
        let asked =
            parsed(Interface::Embeddings, r#"{"input": ["a", [5, 6]], "encoding_format": "base64", "dimensions": 4}"#);
        let asked = asked.unwrap();
        assert_eq!(asked.prompts, [Prompt::Text("a".into()), Prompt::Tokens(vec![5, 6])]);
        assert_eq!((asked.options.wanted, asked.results.are_base64), (Wanted::Vector(Some(4)), true));
        for (json, parameter) in [
            (r#"{"documents": ["a"]}"#, "query"),
            (r#"{"query": "q", "documents": []}"#, "documents"),
            (r#"{"query": "q", "documents": [{"title": "a"}]}"#, "documents"),
            (r#"{"query": "q", "documents": ["a"], "top_n": 0}"#, "top_n"),
        ] {
            refused(Interface::Rerank, json, parameter);
        }
        for (json, parameter) in [
            ("{}", "input"),
            (r#"{"input": "a", "encoding_format": "int8"}"#, "encoding_format"),
            (r#"{"input": "a", "dimensions": 0}"#, "dimensions"),
        ] {
            refused(Interface::Embeddings, json, parameter);
        }
        let many = format!(r#"{{"query": "q", "documents": [{}"a"]}}"#, r#""a","#.repeat(64));
        refused(Interface::Rerank, &many, "documents");
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
            (r#""logprobs":6"#, "logprobs"),
            (r#""logprobs":true"#, "logprobs"),
            (r#""logprobs":5,"n":4,"temperature":1,"max_tokens":342"#, "logprobs"),
            (r#""logprobs":1,"num_beams":2"#, "logprobs"),
            (r#""logit_bias":{"3":[[[[[0]]]]]}"#, "logit_bias"),
            (r#""tempreature":1"#, "tempreature"),
        ] {
            refused(Interface::Completions, &format!("{{\"prompt\":\"a\",{field}}}"), parameter);
        }
        let neutral =
            r#"{"prompt":"a","presence_penalty":0.0,"logit_bias":{},"suffix":null,"logprobs":null,"best_of":1}"#;
        assert!(parsed(Interface::Completions, neutral).is_ok());
        let chat = |field: &str| format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"a\"}}],{field}}}");
        refused(Interface::Chat, &chat(r#""tools":[{}]"#), "tools");
        refused(Interface::Chat, &chat(r#""top_logprobs":2"#), "top_logprobs");
        refused(Interface::Chat, &chat(r#""logprobs":true,"top_logprobs":21"#), "top_logprobs");
        let logprobs = |field: &str| parsed(Interface::Chat, &chat(field)).unwrap().options.logprobs;
        assert_eq!(logprobs(r#""logprobs":true,"top_logprobs":20"#), Some(20));
        assert_eq!((logprobs(r#""logprobs":true"#), logprobs(r#""logprobs":false,"top_logprobs":0"#)), (Some(0), None));
        assert_eq!(parsed(Interface::Completions, r#"{"prompt":"a","logprobs":0}"#).unwrap().options.logprobs, Some(0));
    }

    #[test]
    fn labels_are_scored_and_not_answered() {
        let parsed = |json: &str| parsed(Interface::Score, json);
        assert_eq!(parsed(r#"{"prompt":"a","labels":["x","y"]}"#).unwrap().labels, ["x", "y"]);
        for json in [
            r#"{"prompt":"a"}"#,
            r#"{"prompt":"a","labels":[]}"#,
            r#"{"prompt":"a","labels":[""]}"#,
            r#"{"prompt":"a","labels":[3]}"#,
            r#"{"prompt":"a","labels":["x"],"stream":true}"#,
        ] {
            refused(Interface::Score, json, "labels");
        }
        refused(Interface::Completions, r#"{"prompt":"a","labels":["x"]}"#, "labels");
    }

    #[test]
    fn a_prompt_of_too_many_bytes_is_refused_or_cut_before_it_waits() {
        let with = |overflow, interface, json: &str| {
            let limits = RequestLimits { prompt_bytes: 5, overflow, ..RequestLimits::default() };
            Request::parse(interface, json.as_bytes(), &limits)
        };
        let text = |overflow| with(overflow, Interface::Completions, r#"{"prompt":"aébcdé"}"#);
        let refused = text(Overflow::Refuse).unwrap_err();
        assert_eq!((refused.status, refused.code), (400, "context_length_exceeded"));
        let cut = |overflow| {
            let request = text(overflow).unwrap();
            (request.prompts, request.options.is_cut)
        };
        assert_eq!(cut(Overflow::CutEnd), (vec![Prompt::Text("aébc".into())], true));
        assert_eq!(cut(Overflow::CutBeginning), (vec![Prompt::Text("bcdé".into())], true));
        let chat = r#"{"messages":[{"role":"user","content":"old"},{"role":"user","content":"new"}]}"#;
        assert_eq!(with(Overflow::Refuse, Interface::Chat, chat).unwrap_err().code, "context_length_exceeded");
        let kept = with(Overflow::CutEnd, Interface::Chat, chat).unwrap().prompts;
        assert_eq!(kept, [Prompt::Chat(vec![Message { role: "user".into(), content: "new".into() }])]);
        let ids = with(Overflow::CutEnd, Interface::Completions, r#"{"prompt":[1,2]}"#).unwrap_err();
        assert_eq!(ids.code, "context_length_exceeded");
    }

    #[test]
    fn what_is_too_deep_or_too_long_is_skipped_and_takes_no_memory() {
        let deep = format!("{}0{}", "[".repeat(50_000), "]".repeat(50_000));
        let ignored = format!("{{\"prompt\":\"a\",\"metadata\":{deep}}}");
        assert!(parsed(Interface::Completions, &ignored).is_ok());
        for (field, parameter) in [("prompt", "prompt"), ("stop", "stop"), ("tools", "tools"), ("colour", "colour")] {
            let body = format!("{{\"{field}\":{deep},\"prompt\":{}}}", if field == "prompt" { &deep } else { "\"a\"" });
            refused(Interface::Completions, &body, parameter);
        }
        let many = format!("{{\"messages\":[{}{{}}]}}", "{},".repeat(20_000));
        let error = parsed(Interface::Chat, &many).unwrap_err();
        assert!(error.message.contains("from 1 to 256 messages, got 20001"), "{error}");
        assert!(parsed(Interface::Completions, &ignored.replace("]]", "]")).is_err(), "it is checked as JSON");
    }

    #[test]
    fn what_is_no_json_object_is_an_error_with_a_code() {
        let text = format!("\"{}\"", "x".repeat(9000));
        for body in ["", "{", "[]", "null", "{\"prompt\":\"a\"} x", &"[".repeat(100_000), &text] {
            let error = parsed(Interface::Completions, body).unwrap_err();
            assert_eq!((error.code, error.message.len() < 200), ("invalid_json", true), "{}", body.len());
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
