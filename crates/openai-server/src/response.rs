//! Answers in OpenAI's form: whole, and as the events of a stream.

use serde_json::{Value, json};

use crate::queue::{Event, Finish};
use crate::request::Interface;

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
}

/// Token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub prompt: u64,
    pub generated: u64,
}

impl Usage {
    /// Adds an event's tokens.
    pub fn count(&mut self, event: &Event) {
        match event {
            Event::Started { prompt_tokens } => self.prompt += *prompt_tokens as u64,
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
    pub finish: Option<Finish>,
}

impl ResponseMetadata {
    /// The response with the whole answer.
    pub fn whole(&self, choices: &[Choice], usage: Usage) -> Value {
        let choice = |(index, choice): (usize, &Choice)| {
            let reason = choice.finish.map(Finish::name);
            match self.interface {
                Interface::Completions => {
                    json!({"index": index, "text": choice.text, "logprobs": null, "finish_reason": reason})
                }
                Interface::Chat => {
                    let message = json!({"role": "assistant", "content": choice.text, "refusal": null});
                    json!({"index": index, "message": message, "logprobs": null, "finish_reason": reason})
                }
            }
        };
        let choices: Vec<Value> = choices.iter().enumerate().map(choice).collect();
        let mut answer = self.object(false, choices);
        answer["usage"] = usage.json();
        answer
    }

    fn object(&self, is_part: bool, choices: Vec<Value>) -> Value {
        let kind = match (self.interface, is_part) {
            (Interface::Completions, _) => "text_completion",
            (Interface::Chat, false) => "chat.completion",
            (Interface::Chat, true) => "chat.completion.chunk",
        };
        json!({"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices})
    }

    fn part(&self, index: usize, text: Option<&str>, reason: Option<Finish>, is_first: bool) -> String {
        let reason = reason.map(Finish::name);
        let choice = match self.interface {
            Interface::Completions => {
                json!({"index": index, "text": text.unwrap_or_default(), "logprobs": null, "finish_reason": reason})
            }
            Interface::Chat => {
                let mut delta = json!({});
                if is_first {
                    delta["role"] = json!("assistant");
                }
                if let Some(text) = text {
                    delta["content"] = json!(text);
                }
                json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": reason})
            }
        };
        let mut part = self.object(true, vec![choice]);
        if self.include_usage {
            part["usage"] = Value::Null;
        }
        event(&part)
    }

    /// The beginning of a stream: in a chat, the role of each answer.
    pub fn beginning(&self, choices: usize) -> String {
        match self.interface {
            Interface::Completions => String::new(),
            Interface::Chat => (0..choices).map(|index| self.part(index, Some(""), None, true)).collect(),
        }
    }

    /// An event of a stream; `None` if it has nothing for the client.
    pub fn event(&self, first_choice: usize, event: &Event) -> Option<String> {
        match event {
            Event::Text { choice, text, .. } if !text.is_empty() => {
                Some(self.part(first_choice + choice, Some(text), None, false))
            }
            Event::Finished { choice, reason } => Some(self.part(first_choice + choice, None, Some(*reason), false)),
            Event::Failed(error) => Some(self::event(&error.to_json())),
            _ => None,
        }
    }

    /// The end of a stream.
    pub fn end(&self, usage: Usage) -> String {
        let mut text = String::new();
        if self.include_usage {
            let mut last = self.object(true, Vec::new());
            last["usage"] = usage.json();
            text += &event(&last);
        }
        text + "data: [DONE]\n\n"
    }
}

/// Formats a server-sent event.
fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(interface: Interface) -> ResponseMetadata {
        ResponseMetadata { interface, id: "x-1".into(), created: 7, model: "m".into(), include_usage: true }
    }

    #[test]
    fn a_stream_says_role_text_reason_usage_and_done() {
        let form = form(Interface::Chat);
        let mut usage = Usage::default();
        let events = [
            Event::Started { prompt_tokens: 3 },
            Event::Text { choice: 0, text: "a\nb".into(), tokens: 2 },
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
        let choices = ["a", "b"].map(|text| Choice { text: text.into(), finish: Some(Finish::Stop) });
        let answer = form(Interface::Completions).whole(&choices, Usage { prompt: 1, generated: 2 });
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(answer["choices"][1], json!({"index": 1, "text": "b", "logprobs": null, "finish_reason": "stop"}));
        assert_eq!(answer["usage"]["total_tokens"], 3);
    }
}
