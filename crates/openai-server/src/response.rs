//! Answers in OpenAI's form: whole, and as the events of a stream. They are written as text at once: a tree of values would take many times
//! their size.

use serde::Serialize;
use serde_json::{Value, json};

use crate::delivery::NUMBER_TEXT_BYTES;
use crate::event::{Event, Finish, TokenLogprob};
use crate::request::{Interface, Results};

/// The data that is common to an answer's responses.
#[derive(Clone, Debug)]
pub(crate) struct ResponseMetadata {
    pub interface: Interface,
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    /// Whether the last event contains the token counts.
    pub include_usage: bool,
    /// Whether the log-probabilities of tokens are wanted.
    pub has_logprobs: bool,
    /// The texts to score.
    pub labels: Vec<String>,
    /// How ranks and vectors are given.
    pub results: Results,
}

/// Token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt: u64,
    pub generated: u64,
    /// Whether a prompt was cut.
    pub is_cut: bool,
}

impl Usage {
    /// Adds an event's tokens.
    pub fn count(&mut self, event: &Event) {
        match event {
            Event::Started { prompt_tokens, is_cut } => {
                self.prompt += *prompt_tokens as u64;
                self.is_cut |= is_cut;
            }
            Event::Text { tokens, .. } => self.generated += *tokens as u64,
            _ => {}
        }
    }

    fn json(self) -> Value {
        let total = self.prompt + self.generated;
        json!({"prompt_tokens": self.prompt, "completion_tokens": self.generated, "total_tokens": total})
    }
}

/// One answer so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    pub text: String,
    pub logprobs: Vec<TokenLogprob>,
    pub finish: Option<Finish>,
    /// Of a label: the sum of its tokens' log-probabilities, and their number.
    pub score: Option<(f64, usize)>,
    /// Of a document: how well it answers the query.
    pub rank: Option<f64>,
    /// Of a text: its vector.
    pub vector: Option<Vec<f32>>,
}

impl Choice {
    /// Whether the answer is complete.
    pub fn is_over(&self) -> bool {
        self.finish.is_some() || self.score.is_some() || self.rank.is_some() || self.vector.is_some()
    }

    /// Adds an event of this answer.
    pub fn take(&mut self, event: Event) {
        match event {
            Event::Text { text, logprobs, .. } => {
                self.text += &text;
                self.logprobs.extend(logprobs);
            }
            Event::Scored { logprob, tokens, .. } => self.score = Some((logprob, tokens)),
            Event::Ranked { score, .. } => self.rank = Some(score),
            Event::Vector { values, .. } => self.vector = Some(values),
            Event::Finished { reason, .. } => self.finish = Some(reason),
            Event::Started { .. } | Event::Failed(_) => {}
        }
    }
}

/// `logprobs` of an answer.
#[derive(Serialize)]
#[serde(untagged)]
enum Logprobs<'a> {
    Completion {
        tokens: Vec<&'a str>,
        token_logprobs: Vec<f64>,
        top_logprobs: Vec<serde_json::Map<String, Value>>,
        /// Of each token, the characters before it.
        text_offset: Vec<usize>,
    },
    Chat {
        content: Vec<ChatToken<'a>>,
        refusal: (),
    },
}

#[derive(Serialize)]
struct ChatToken<'a> {
    #[serde(flatten)]
    token: ChatLogprob<'a>,
    top_logprobs: Vec<ChatLogprob<'a>>,
}

#[derive(Serialize)]
struct ChatLogprob<'a> {
    token: &'a str,
    logprob: f64,
    bytes: &'a [u8],
}

impl<'a> Logprobs<'a> {
    /// In an interface's form. Offsets begin at the first of these tokens.
    fn new(interface: Interface, tokens: &'a [TokenLogprob]) -> Self {
        let chat = |token: &'a str, logprob| ChatLogprob { token, logprob, bytes: token.as_bytes() };
        if interface == Interface::Chat {
            let of_token = |token: &'a TokenLogprob| ChatToken {
                token: chat(&token.token, token.logprob),
                top_logprobs: token.likeliest.iter().map(|(text, logprob)| chat(text, *logprob)).collect(),
            };
            return Logprobs::Chat { content: tokens.iter().map(of_token).collect(), refusal: () };
        }
        let likeliest = |token: &TokenLogprob| {
            token.likeliest.iter().map(|(text, logprob)| (text.clone(), Value::from(*logprob))).collect()
        };
        let mut offset = 0;
        let offsets = tokens.iter().map(|token| {
            offset += token.token.chars().count();
            offset - token.token.chars().count()
        });
        Logprobs::Completion {
            tokens: tokens.iter().map(|token| token.token.as_str()).collect(),
            token_logprobs: tokens.iter().map(|token| token.logprob).collect(),
            top_logprobs: tokens.iter().map(likeliest).collect(),
            text_offset: offsets.collect(),
        }
    }
}

/// A choice of a response.
#[derive(Serialize)]
struct ChoiceJson<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<MessageJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<DeltaJson<'a>>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct MessageJson<'a> {
    role: &'static str,
    content: &'a str,
    refusal: (),
}

#[derive(Default, Serialize)]
struct DeltaJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct ResponseJson<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
    /// Beside OpenAI's fields: a prompt was too long, and was cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_cut: Option<bool>,
}

impl ResponseMetadata {
    /// The response with the whole answer.
    pub fn whole(&self, choices: &[Choice], usage: Usage) -> String {
        match self.interface {
            Interface::Score => return self.scores(choices, usage).to_string(),
            Interface::Rerank => return self.ranks(choices, usage).to_string(),
            Interface::Embeddings => return self.vectors(choices, usage),
            Interface::Completions | Interface::Chat => {}
        }
        let is_chat = self.interface == Interface::Chat;
        let mut all = Vec::with_capacity(choices.len());
        for (index, choice) in choices.iter().enumerate() {
            let message = MessageJson { role: "assistant", content: &choice.text, refusal: () };
            all.push(ChoiceJson {
                logprobs: self.has_logprobs.then(|| Logprobs::new(self.interface, &choice.logprobs)),
                message: is_chat.then_some(message),
                ..self.choice(index, (!is_chat).then_some(&choice.text), choice.finish)
            });
        }
        self.json(false, all, Some(usage.json()), usage.is_cut)
    }

    /// The scores of all labels for each prompt, as their probabilities among themselves.
    fn scores(&self, choices: &[Choice], usage: Usage) -> Value {
        let of_prompt = |(index, scores): (usize, &[Choice])| {
            let logprobs = scores.iter().map(|choice| choice.score.unwrap_or_default());
            let largest = logprobs.clone().map(|(sum, _)| sum).fold(f64::NEG_INFINITY, f64::max);
            let all: f64 = logprobs.clone().map(|(sum, _)| (sum - largest).exp()).sum();
            let best = logprobs.clone().position(|(sum, _)| sum >= largest).unwrap_or_default();
            let score = |(label, (sum, tokens)): (&String, (f64, usize))| json!({"label": label, "logprob": sum, "probability": (sum - largest).exp() / all, "tokens": tokens});
            let scores: Vec<Value> = self.labels.iter().zip(logprobs).map(score).collect();
            json!({"index": index, "object": "score", "label": self.labels.get(best), "scores": scores})
        };
        let data: Vec<Value> = choices.chunks(self.labels.len().max(1)).enumerate().map(of_prompt).collect();
        let mut answer =
            json!({"id": self.id, "object": "list", "created": self.created, "model": self.model, "data": data});
        answer["usage"] = usage.json();
        if usage.is_cut {
            answer["prompt_cut"] = json!(true);
        }
        answer
    }

    /// The documents, the best first. Of equal scores, the first comes first.
    fn ranks(&self, choices: &[Choice], usage: Usage) -> Value {
        let mut ranks: Vec<(usize, f64)> =
            choices.iter().map(|choice| choice.rank.unwrap_or_default()).enumerate().collect();
        ranks.sort_by(|one, other| other.1.total_cmp(&one.1));
        ranks.truncate(self.results.top_n.unwrap_or(usize::MAX));
        let result = |(index, score): (usize, f64)| {
            let mut result = json!({"index": index, "relevance_score": score});
            if let Some(text) = self.results.documents.get(index) {
                result["document"] = json!({"text": text});
            }
            result
        };
        let results: Vec<Value> = ranks.into_iter().map(result).collect();
        let usage = json!({"prompt_tokens": usage.prompt, "total_tokens": usage.prompt});
        json!({"id": self.id, "object": "list", "model": self.model, "results": results, "usage": usage})
    }

    /// The vectors, in the order of the texts.
    fn vectors(&self, choices: &[Choice], usage: Usage) -> String {
        let numbers: usize = choices.iter().flat_map(|choice| &choice.vector).map(Vec::len).sum();
        let mut text = String::with_capacity(numbers * NUMBER_TEXT_BYTES + (choices.len() + 2) * 64 + self.model.len());
        text += "{\"object\":\"list\",\"data\":[";
        for (index, choice) in choices.iter().enumerate() {
            let values = choice.vector.as_deref().unwrap_or_default();
            let separator = if index == 0 { "" } else { "," };
            text += &format!("{separator}{{\"object\":\"embedding\",\"index\":{index},\"embedding\":");
            text += &match self.results.are_base64 {
                true => {
                    format!("\"{}\"", base64(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()))
                }
                false => serde_json::to_string(values).unwrap_or_default(),
            };
            text.push('}');
        }
        let usage = json!({"prompt_tokens": usage.prompt, "total_tokens": usage.prompt});
        text + &format!("],\"model\":{},\"usage\":{usage}}}", json!(self.model))
    }

    fn choice<'a>(&self, index: usize, text: Option<&'a str>, reason: Option<Finish>) -> ChoiceJson<'a> {
        let finish_reason = reason.map(Finish::name);
        ChoiceJson { index, text, message: None, delta: None, logprobs: None, finish_reason }
    }

    fn json(&self, is_part: bool, choices: Vec<ChoiceJson>, usage: Option<Value>, is_cut: bool) -> String {
        let object = match (self.interface, is_part) {
            (Interface::Chat, false) => "chat.completion",
            (Interface::Chat, true) => "chat.completion.chunk",
            _ => "text_completion",
        };
        let (id, created, model, prompt_cut) = (&self.id, self.created, &self.model, is_cut.then_some(true));
        let response = ResponseJson { id, object, created, model, choices, usage, prompt_cut };
        serde_json::to_string(&response).unwrap_or_default()
    }

    fn part(&self, choice: ChoiceJson) -> String {
        event(&self.json(true, vec![choice], self.include_usage.then_some(Value::Null), false))
    }

    fn text_part(&self, index: usize, text: &str, logprobs: &[TokenLogprob], role: Option<&'static str>) -> String {
        let logprobs = (!logprobs.is_empty() && self.has_logprobs).then(|| Logprobs::new(self.interface, logprobs));
        self.part(match self.interface {
            Interface::Chat => {
                let delta = Some(DeltaJson { role, content: Some(text) });
                ChoiceJson { delta, logprobs, ..self.choice(index, None, None) }
            }
            _ => ChoiceJson { logprobs, ..self.choice(index, Some(text), None) },
        })
    }

    /// The beginning of a stream: in a chat, the role of each answer.
    pub fn beginning(&self, choices: usize) -> String {
        match self.interface {
            Interface::Chat => (0..choices).map(|index| self.text_part(index, "", &[], Some("assistant"))).collect(),
            _ => String::new(),
        }
    }

    /// An event of a stream; `None` if it has nothing for the client.
    pub fn event(&self, first_choice: usize, event: &Event) -> Option<String> {
        match event {
            Event::Text { choice, text, logprobs, .. } if !(text.is_empty() && logprobs.is_empty()) => {
                Some(self.text_part(first_choice + choice, text, logprobs, None))
            }
            Event::Finished { choice, reason } => {
                let is_chat = self.interface == Interface::Chat;
                let delta = is_chat.then(DeltaJson::default);
                let choice = self.choice(first_choice + choice, (!is_chat).then_some(""), Some(*reason));
                Some(self.part(ChoiceJson { delta, ..choice }))
            }
            Event::Failed(error) => Some(self::event(&error.to_json().to_string())),
            _ => None,
        }
    }

    /// The end of a stream.
    pub fn end(&self, usage: Usage) -> String {
        let counts = self.include_usage.then(|| usage.json());
        let is_last = counts.is_some() || usage.is_cut;
        let last = is_last.then(|| event(&self.json(true, Vec::new(), counts, usage.is_cut)));
        last.unwrap_or_default() + "data: [DONE]\n\n"
    }
}

/// Bytes in base64, as RFC 4648 has it.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= group.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

/// Formats a server-sent event.
fn event(data: &str) -> String {
    format!("data: {data}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(interface: Interface) -> ResponseMetadata {
        let labels = vec!["yes".to_owned(), "no".to_owned()];
        let (id, model) = ("x-1".into(), "m".into());
        let results = Results::default();
        ResponseMetadata { interface, id, created: 7, model, include_usage: true, has_logprobs: false, labels, results }
    }

    fn parsed(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn log_probabilities_have_openai_s_form() {
        let token = |token: &str| TokenLogprob {
            token: token.into(),
            logprob: -0.5,
            likeliest: vec![(token.into(), -0.5), ("é".into(), -2.0)],
        };
        let choice =
            Choice { logprobs: vec![token("ü"), token(" b")], finish: Some(Finish::Stop), ..Choice::default() };
        let with = |interface| ResponseMetadata { has_logprobs: true, ..form(interface) };
        let of = |interface| {
            let answer = parsed(&with(interface).whole(std::slice::from_ref(&choice), Usage::default()));
            answer["choices"][0]["logprobs"].clone()
        };
        let completion = of(Interface::Completions);
        assert_eq!(completion["tokens"], json!(["ü", " b"]));
        assert_eq!(completion["text_offset"], json!([0, 1]));
        assert_eq!(completion["top_logprobs"][1], json!({" b": -0.5, "é": -2.0}));
        assert_eq!(completion["token_logprobs"], json!([-0.5, -0.5]));
        let chat = of(Interface::Chat);
        assert_eq!(chat["refusal"], Value::Null);
        assert_eq!(chat["content"][0]["bytes"], json!([195, 188]));
        assert_eq!(chat["content"][1]["top_logprobs"][1], json!({"token": "é", "logprob": -2.0, "bytes": [195, 169]}));
        let event = Event::Text { choice: 0, text: "ü".into(), tokens: 1, logprobs: vec![token("ü")] };
        let part = with(Interface::Chat).event(0, &event).unwrap();
        let part = parsed(part.trim_start_matches("data: "));
        assert_eq!(part["choices"][0]["logprobs"]["content"][0]["logprob"], -0.5);
    }

    #[test]
    fn scores_are_probabilities_among_the_labels() {
        let score = |sum: f64| Choice { score: Some((sum, 2)), ..Choice::default() };
        let choices = [score(-1.0), score(-1.0 - 3f64.ln()), score(-800.0), score(-799.0)];
        let answer = parsed(&form(Interface::Score).whole(&choices, Usage { prompt: 6, generated: 0, is_cut: false }));
        let probability = |prompt: usize, label: usize| answer["data"][prompt]["scores"][label]["probability"].as_f64();
        assert!((probability(0, 0).unwrap() - 0.75).abs() < 1e-12 && (probability(0, 1).unwrap() - 0.25).abs() < 1e-12);
        assert!((probability(1, 0).unwrap() + probability(1, 1).unwrap() - 1.0).abs() < 1e-12);
        assert_eq!((&answer["data"][0]["label"], &answer["data"][1]["label"]), (&json!("yes"), &json!("no")));
        assert_eq!(answer["data"][1]["scores"][1]["tokens"], 2);
    }

    #[test]
    fn ranks_have_the_best_document_first_and_vectors_their_texts_order() {
        let rank = |score| Choice { rank: Some(score), ..Choice::default() };
        let usage = Usage { prompt: 9, generated: 0, is_cut: false };
        let mut of = form(Interface::Rerank);
        of.results = Results { top_n: Some(2), documents: vec!["x".into(), "y".into(), "z".into()], are_base64: false };
        let answer = parsed(&of.whole(&[rank(0.1), rank(0.7), rank(0.1)], usage));
        let expected = json!([{"index": 1, "relevance_score": 0.7, "document": {"text": "y"}},
            {"index": 0, "relevance_score": 0.1, "document": {"text": "x"}}]);
        assert_eq!((&answer["results"], &answer["usage"]["total_tokens"]), (&expected, &json!(9)));
        let vector = |values: &[f32]| Choice { vector: Some(values.to_vec()), ..Choice::default() };
        let mut of = form(Interface::Embeddings);
        let choices = [vector(&[0.5, -2.0]), vector(&[1.0, 0.0])];
        let answer = parsed(&of.whole(&choices, usage));
        assert_eq!(answer["data"][0], json!({"object": "embedding", "index": 0, "embedding": [0.5, -2.0]}));
        of.results.are_base64 = true;
        assert_eq!(parsed(&of.whole(&choices, usage))["data"][1]["embedding"], "AACAPwAAAAA=");
        assert_eq!([&b""[..], b"f", b"fo", b"foo", b"foob"].map(base64), ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]);
    }

    #[test]
    fn a_stream_says_role_text_reason_usage_and_done() {
        let form = form(Interface::Chat);
        let mut usage = Usage::default();
        let events = [
            Event::Started { prompt_tokens: 3, is_cut: false },
            Event::Text { choice: 0, text: "a\nb".into(), tokens: 2, logprobs: Vec::new() },
            Event::Finished { choice: 0, reason: Finish::Length },
        ];
        let mut text = form.beginning(1);
        for event in &events {
            usage.count(event);
            text.extend(form.event(0, event));
        }
        text += &form.end(usage);
        let lines: Vec<&str> = text.split("\n\n").filter(|line| !line.is_empty()).collect();
        let data = |line: usize| -> Value { serde_json::from_str(&lines[line]["data: ".len()..]).unwrap() };
        assert_eq!(data(0)["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        assert_eq!(data(1)["choices"][0]["delta"], json!({"content": "a\nb"}));
        assert_eq!(data(2)["choices"][0]["finish_reason"], "length");
        assert_eq!(data(3)["usage"], json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}));
        assert_eq!((lines[4], lines.len()), ("data: [DONE]", 5));
    }

    #[test]
    fn a_whole_answer_has_every_choice_and_the_counts() {
        let choices =
            ["a", "b"].map(|text| Choice { text: text.into(), finish: Some(Finish::Stop), ..Choice::default() });
        let answer =
            parsed(&form(Interface::Completions).whole(&choices, Usage { prompt: 1, generated: 2, is_cut: true }));
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(answer["choices"][1], json!({"index": 1, "text": "b", "logprobs": null, "finish_reason": "stop"}));
        assert_eq!(answer["usage"]["total_tokens"], 3);
        assert_eq!(answer["prompt_cut"], true);
    }
}
