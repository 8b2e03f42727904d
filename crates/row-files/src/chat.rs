//! Chats: turns a list of messages into a prompt and a response.
//!
//! The response is the assistant's last message, and the prompt is all messages before it. Messages after the response
//! have no answer and are left out. The prompt joins its messages with line breaks: first system messages unchanged, then
//! the others. A single other message is unchanged; each of several begins with `user: `, `assistant: ` or its own role.

use std::fmt;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::{reason, shortened};
use crate::python_text;

/// The most messages of a chat; a longer chat is an error.
pub(crate) const MAX_TURNS: usize = 4096;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// `user`, `assistant`, `system`, or another role from the file.
    pub role: String,
    /// The message's text.
    pub content: String,
    /// Whether the message has more than its text, such as an image or the call of a tool, which no prompt holds.
    pub has_more: bool,
    /// Whether the file says that nothing is learned from the message: OpenAI's `weight` of 0.
    pub has_no_weight: bool,
}

impl Turn {
    /// Returns a message of this role.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned(), has_more: false, has_no_weight: false }
    }
}

/// Returns the turns before the response, and the response of a chat.
///
/// # Errors
/// A text for the user: the assistant has no message from which something is learned.
pub(crate) fn before_response(turns: &[Turn]) -> Result<(&[Turn], &str), String> {
    const SHOWN: usize = 4;
    let is_answer = |turn: &Turn| turn.role == "assistant" && !turn.content.trim().is_empty();
    let Some(last) = turns.iter().rposition(|turn| is_answer(turn) && !turn.has_no_weight) else {
        if turns.iter().any(is_answer) {
            return Err("every message of the assistant has a `weight` of 0: nothing is learned from it".to_owned());
        }
        let mut roles: Vec<String> = turns.iter().map(|turn| format!("`{}`", shortened(&turn.role))).collect();
        roles.dedup();
        roles.truncate(SHOWN);
        return Err(match roles.as_slice() {
            [] => "expected a message of the assistant, got none".to_owned(),
            roles => format!("expected a message of the assistant, got none; the roles are {}", roles.join(", ")),
        });
    };
    Ok((&turns[..last], &turns[last].content))
}

/// The text of a response that is a list of messages: one message of the assistant.
///
/// # Errors
/// A text for the user: there are others, which would be left out.
pub(crate) fn completion(turns: &[Turn]) -> Result<&str, String> {
    match before_response(turns)? {
        ([], text) if turns.len() == 1 => Ok(text),
        _ => Err(format!("expected one message of the assistant in a response, got {} messages", turns.len())),
    }
}

/// The text of an answer that is a chat: its last message, which is one of the assistant.
///
/// # Errors
/// A text for the user: the last message is another's.
pub(crate) fn last_answer(turns: &[Turn]) -> Result<&str, String> {
    match before_response(turns)? {
        (before, text) if before.len() + 1 == turns.len() => Ok(text),
        _ => Err("expected the last message to be one of the assistant".to_owned()),
    }
}

/// Returns the prompt of a chat without a response, in the form of a chat with one. Roles are OpenAI's.
///
/// # Errors
/// A text for the user: there are only system messages.
pub fn prompt(turns: &[Turn]) -> Result<String, String> {
    let turns: Vec<Turn> = turns.iter().map(|turn| Turn { role: role(&turn.role), ..turn.clone() }).collect();
    prompt_of(turns.iter())
}

/// Whether a prompt is short enough.
pub type Fits<'a> = &'a dyn Fn(&str) -> bool;

/// What a prompt leaves out of its messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// The oldest turns, for which there was no room.
    pub turns: usize,
    /// Whether a message has more than its text ([`Turn::has_more`]).
    pub has_more: bool,
}

/// The prompt of these turns. If it does not fit, the oldest turns are left out, but never a system message nor the last turn. Also returns
/// what was left out.
///
/// Turns may be as long as a row may be, so no more than one prompt exists at a time, and no copy of a turn.
pub(crate) fn fitted_prompt(turns: &[Turn], fits: Option<Fits<'_>>) -> Result<(String, LeftOut), String> {
    let prompt = prompt_of(turns.iter())?;
    let has_more = turns.iter().any(|turn| turn.has_more);
    let left_out = |turns| LeftOut { turns, has_more };
    let Some(fits) = fits.filter(|fits| !fits(&prompt)) else { return Ok((prompt, left_out(0))) };
    let others: Vec<usize> = (0..turns.len()).filter(|at| turns[*at].role != "system").collect();
    let Some((last, before)) = others.split_last() else { return Ok((prompt, left_out(0))) };
    drop(prompt);
    // A chat does not begin with an answer.
    let starts = before.iter().skip(1).filter(|at| turns[**at].role != "assistant").chain([last]);
    let starts: Vec<usize> = starts.copied().collect();
    let from = |start: usize| {
        let kept = turns.iter().enumerate().filter(move |(at, turn)| *at >= start || turn.role == "system");
        prompt_of(kept.map(|(_, turn)| turn))
    };
    let does_not_fit = |start: &usize| from(*start).is_ok_and(|prompt| !fits(&prompt));
    let start = starts[starts.partition_point(does_not_fit).min(starts.len() - 1)];
    Ok((from(start)?, left_out(others.iter().filter(|at| **at < start).count())))
}

fn prompt_of<'a>(turns: impl Iterator<Item = &'a Turn>) -> Result<String, String> {
    let with_text = turns.filter(|turn| !turn.content.is_empty());
    let (mut ordered, others): (Vec<&Turn>, Vec<&Turn>) = with_text.partition(|turn| turn.role == "system");
    let has_labels = others.len() > 1;
    let systems = ordered.len();
    ordered.extend(&others);
    if others.is_empty() {
        return Err("expected a message before that of the assistant, got none".to_owned());
    }
    // A prompt that grows would be copied, and both copies held.
    let bytes = ordered.iter().map(|turn| turn.role.len() + turn.content.len() + "\n: ".len()).sum();
    let mut prompt = String::with_capacity(bytes);
    for (number, turn) in ordered.iter().enumerate() {
        if number > 0 {
            prompt.push('\n');
        }
        if has_labels && number >= systems {
            prompt.push_str(&turn.role);
            prompt.push_str(": ");
        }
        prompt.push_str(&turn.content);
    }
    Ok(prompt)
}

/// Converts a role's name from the forms of OpenAI, ShareGPT, Cohere and others, in any case.
pub(crate) fn role(name: &str) -> String {
    match name.to_lowercase().as_str() {
        "human" | "user" | "prompter" => "user".to_owned(),
        "gpt" | "assistant" | "chatgpt" | "bing" | "bard" | "model" | "chatbot" | "bot" => "assistant".to_owned(),
        "system" | "developer" => "system".to_owned(),
        _ => name.to_owned(),
    }
}

/// Parses messages from a text that is itself JSON, as a CSV may hold them.
pub(crate) fn from_text(text: &str) -> Result<Vec<Turn>, String> {
    let of_json = serde_json::from_str::<Turns>(text);
    // pandas writes lists as Python does.
    let turns =
        of_json.or_else(|error| python_text::json(text).and_then(|json| serde_json::from_str(&json).ok()).ok_or(error));
    turns.map(|turns| turns.0).map_err(|error| format!("expected a list of messages as JSON: {}", reason(&error)))
}

/// Parses messages from a list of a JSON row.
pub(crate) fn from_list(list: &str) -> Result<Vec<Turn>, String> {
    serde_json::from_str::<Turns>(list).map(|turns| turns.0).map_err(|error| reason(&error))
}

/// Reads a list of messages.
fn turns<'de, A: SeqAccess<'de>>(mut list: A) -> Result<Vec<Turn>, A::Error> {
    let mut turns = Vec::new();
    while let Some(element) = list.next_element()? {
        if turns.len() >= MAX_TURNS {
            return Err(A::Error::custom(too_many()));
        }
        match element {
            Element::Message(Message { role: name, content, tool_calls, function_call, weight }) => {
                let has_more = content.has_more || tool_calls.0 || function_call.0;
                let has_no_weight = weight.as_f64() == Some(0.0);
                turns.push(Turn { role: role(&name.text), content: content.text, has_more, has_no_weight });
            }
            Element::Exchange(question, answer) => {
                let turn = |role: &str, content: Content| Turn {
                    role: role.to_owned(),
                    content: content.text,
                    has_more: content.has_more,
                    has_no_weight: false,
                };
                turns.extend([turn("user", question), turn("assistant", answer)]);
            }
        }
    }
    Ok(turns)
}

/// The error of a chat that is too long.
pub(crate) fn too_many() -> String {
    format!("expected at most {MAX_TURNS} messages")
}

struct Turns(Vec<Turn>);

impl<'de> Deserialize<'de> for Turns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Turns;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of messages")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Turns, A::Error> {
                turns(list).map(Turns)
            }
        }
        deserializer.deserialize_seq(List)
    }
}

/// An element of a list of messages: a message, or a question with its answer as a `history` has them.
enum Element {
    Message(Message),
    Exchange(Content, Content),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a message with `role` and `content`")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Element, A::Error> {
                Message::deserialize(MapAccessDeserializer::new(map)).map(Element::Message)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
                let texts = [list.next_element::<Content>()?, list.next_element::<Content>()?];
                match (texts, list.next_element::<IgnoredAny>()?) {
                    ([Some(question), Some(answer)], None) => Ok(Element::Exchange(question, answer)),
                    _ => Err(A::Error::custom("expected a question and its answer in each list")),
                }
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// A message in the OpenAI or the ShareGPT form.
#[derive(Deserialize)]
#[serde(expecting = "a message with `role` and `content`")]
struct Message {
    #[serde(alias = "from")]
    role: Content,
    #[serde(alias = "value", default)]
    content: Content,
    #[serde(default)]
    tool_calls: Presence,
    #[serde(default)]
    function_call: Presence,
    #[serde(default)]
    weight: serde_json::Value,
}

/// Whether a value is there: neither null, false, a number, nor empty.
#[derive(Default)]
struct Presence(bool);

impl<'de> Deserialize<'de> for Presence {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Presence;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a call")
            }

            fn visit_unit<E>(self) -> Result<Presence, E> {
                Ok(Presence(false))
            }

            fn visit_bool<E>(self, is_there: bool) -> Result<Presence, E> {
                Ok(Presence(is_there))
            }

            // A count or a mark, as pandas writes an absent value: no call.
            fn visit_f64<E>(self, _: f64) -> Result<Presence, E> {
                Ok(Presence(false))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Presence, E> {
                Ok(Presence(false))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Presence, E> {
                Ok(Presence(false))
            }

            fn visit_str<E>(self, text: &str) -> Result<Presence, E> {
                Ok(Presence(!text.is_empty()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Presence, A::Error> {
                let mut is_there = false;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    is_there = true;
                }
                Ok(Presence(is_there))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Presence, A::Error> {
                let mut is_there = false;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    is_there = true;
                }
                Ok(Presence(is_there))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// A part of a message's content.
#[derive(Deserialize)]
#[serde(expecting = "a part of a message")]
struct Part {
    #[serde(default)]
    text: Content,
}

/// A text: a string, or the text parts of a list. Null gives an empty text.
#[derive(Default)]
struct Content {
    text: String,
    /// Whether there is a part without a text.
    has_more: bool,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content { text: text.to_owned(), has_more: false })
            }

            fn visit_unit<E>(self) -> Result<Content, E> {
                Ok(Content::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
                let mut content = Content::default();
                while let Some(Part { text }) = list.next_element()? {
                    if !content.text.is_empty() && !text.text.is_empty() {
                        content.text.push('\n');
                    }
                    content.has_more |= text.text.is_empty();
                    content.text += &text.text;
                }
                Ok(content)
            }
        }
        deserializer.deserialize_any(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(json: &str) -> Result<(String, String), String> {
        let turns = from_text(json)?;
        let (before, response) = before_response(&turns)?;
        Ok((prompt_of(before.iter())?, response.to_owned()))
    }

    #[test]
    fn a_chat_that_is_too_long_loses_its_oldest_turns_and_never_its_last_question() {
        let turn = |role: &str, content: &str| Turn::new(role, content);
        let chat = [
            turn("system", "S"),
            turn("user", "a"),
            turn("assistant", "b"),
            turn("user", "c"),
            turn("assistant", "d"),
            turn("user", "e"),
        ];
        for (most, expected, left_out) in [
            (99, "S\nuser: a\nassistant: b\nuser: c\nassistant: d\nuser: e", 0),
            (39, "S\nuser: c\nassistant: d\nuser: e", 2),
            (9, "S\ne", 4),
            (1, "S\ne", 4),
        ] {
            let fits = |prompt: &str| prompt.len() <= most;
            let left_out = LeftOut { turns: left_out, has_more: false };
            assert_eq!(fitted_prompt(&chat, Some(&fits)), Ok((expected.to_owned(), left_out)), "{most}");
        }
        assert_eq!(fitted_prompt(&chat[1..2], Some(&|_| false)), Ok(("a".to_owned(), LeftOut::default())));
    }

    #[track_caller]
    fn check(json: &str, prompt: &str, response: &str) {
        assert_eq!(pair(json), Ok((prompt.to_owned(), response.to_owned())), "{json}");
    }

    #[test]
    fn an_answer_of_weight_0_is_no_response_and_roles_are_known_in_any_case() {
        check(
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":"b","weight":1},{"role":"user","content":"c"},
               {"role":"assistant","content":"d","weight":0}]"#,
            "a",
            "b",
        );
        let none = pair(r#"[{"role":"user","content":"a"},{"role":"assistant","content":"b","weight":0.0}]"#);
        assert!(none.unwrap_err().contains("`weight` of 0"));
        check(r#"[{"role":"User","content":"a"},{"role":"Chatbot","content":"b","weight":null}]"#, "a", "b");
        let other = pair(r#"[{"role":"teacher","content":"a"},{"role":"pupil","content":"b"}]"#).unwrap_err();
        assert!(other.ends_with("got none; the roles are `teacher`, `pupil`"), "{other}");
    }

    #[test]
    fn the_last_answer_is_the_response_and_everything_before_it_the_prompt() {
        check(r#"[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}]"#, "Hi", "Hello");
        check(
            r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"},{"role":"assistant","content":"Yo"}]"#,
            "Be brief.\nHi",
            "Yo",
        );
        check(
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"},
               {"role":"assistant","content":"d"},{"role":"user","content":"thanks"}]"#,
            "user: a\nassistant: b\nuser: c",
            "d",
        );
    }

    #[test]
    fn a_chat_that_waits_for_its_answer_has_the_prompt_that_it_was_trained_with() {
        let turn = Turn::new;
        let chat = [turn("developer", "Be brief."), turn("user", "a"), turn("assistant", "b"), turn("user", "c")];
        assert_eq!(prompt(&chat).as_deref(), Ok("Be brief.\nuser: a\nassistant: b\nuser: c"));
        assert_eq!(prompt(&chat[1..2]).as_deref(), Ok("a"));
        assert!(prompt(&chat[..1]).is_err());
    }

    #[test]
    fn share_gpt_and_lists_of_parts_are_read_as_well() {
        check(r#"[{"from":"human","value":"1+1"},{"from":"gpt","value":"2"}]"#, "1+1", "2");
        check(
            r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image"},{"type":"text","text":"b"}]},
               {"role":"assistant","content":"c","tool_calls":[{"id":1}]}]"#,
            "a\nb",
            "c",
        );
        check(
            r#"[{"role":"user","content":"q"},{"role":"assistant","content":"a"},{"role":"assistant","content":null}]"#,
            "q",
            "a",
        );
    }

    #[test]
    fn a_message_with_more_than_its_text_is_known() {
        for (message, has_more) in [
            (r#""content":"c""#, false),
            (r#""content":"c","tool_calls":[],"function_call":null"#, false),
            (r#""content":null,"tool_calls":[{"function":{"name":"f"}}]"#, true),
            (r#""content":"c","function_call":{"name":"f"}"#, true),
            (r#""content":[{"type":"text","text":"a"},{"type":"image"}]"#, true),
            (r#""content":[{"type":"text","text":"a"}]"#, false),
            (r#""content":"c","tool_calls":false,"function_call":0"#, false),
            (r#""content":"c","tool_calls":0.5,"function_call":-1"#, false),
            (r#""content":"c","tool_calls":true"#, true),
        ] {
            let turns = from_text(&format!(r#"[{{"role":"assistant",{message}}}]"#)).expect(message);
            assert_eq!(turns[0].has_more, has_more, "{message}");
        }
    }

    #[test]
    fn a_chat_without_an_answer_or_a_question_says_so() {
        for (json, expected) in [
            ("[]", "expected a message of the assistant"),
            (r#"[{"role":"user","content":"q"}]"#, "expected a message of the assistant"),
            (r#"[{"role":"assistant","content":"a"}]"#, "expected a message before"),
            ("[1]", "expected a message with `role` and `content`"),
            (r#"{"role":"user"}"#, "expected a list of messages"),
            (r#"[{"content":"q"}]"#, "missing field `role`"),
        ] {
            let error = pair(json).unwrap_err();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }
}
