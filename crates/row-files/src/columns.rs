//! Columns, and the choice of those with the prompt and the response of a row.
//!
//! [`Pairing::of`] decides from the names of a file's columns. It takes the first of these that the file has:
//!
//! | columns | prompt | response |
//! | --- | --- | --- |
//! | the two that the config names | the first | the second |
//! | `prompt`, `response` | `prompt` | `response` |
//! | `messages` (OpenAI) or `conversations` (ShareGPT) | everything before the last answer | the last answer |
//! | `instruction`, `output`, perhaps `input` (Alpaca) | instruction, a line break, input | `output` |
//! | `prompt`, `completion`; `source`, `target`; `question`, `answer`; .. | the first | the second |
//! | `text`, alone of these | | the text, for span corruption |

use std::borrow::Cow;

use crate::chat;
use crate::error::{RowFault, listed};
use crate::row::{Cell, Row};

/// A column of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The column's name.
    pub name: String,
    /// Whether the column holds lists of messages.
    pub is_chat: bool,
}

impl Column {
    /// Returns a column of text.
    pub fn text(name: impl Into<String>) -> Self {
        Self { name: name.into(), is_chat: false }
    }
}

/// The columns that give a row's texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Two columns of text.
    Columns {
        /// Column of the prompts.
        prompt: String,
        /// Column of the responses.
        response: String,
    },
    /// An instruction, perhaps with an input, and an output.
    Instruction {
        /// Column of the instructions.
        instruction: String,
        /// Column of the inputs, which may be empty.
        input: Option<String>,
        /// Column of the outputs.
        output: String,
    },
    /// A column of messages.
    Chat {
        /// The column.
        column: String,
    },
    /// One text, for span corruption.
    Text {
        /// The column.
        column: String,
    },
    /// Any columns, for callers that want texts and no pairs; see [`Pairing::all_texts`].
    Each {
        /// The columns.
        columns: Vec<String>,
    },
}

/// Column names that the user chose; `None`: decide from the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// Column of the prompts.
    pub prompt: Option<String>,
    /// Column of the responses.
    pub response: Option<String>,
    /// Column of the texts for span corruption.
    pub text: Option<String>,
    /// Whether one text is wanted instead of a pair.
    pub is_text: bool,
}

/// Known pairs of columns, in the order of search.
const PAIRS: [(&str, &str); 10] = [
    ("prompt", "completion"),
    ("source", "target"),
    ("question", "answer"),
    ("query", "response"),
    ("inputs", "targets"),
    ("input", "output"),
    ("input_text", "target_text"),
    ("document", "summary"),
    ("article", "highlights"),
    ("text", "summary"),
];

impl Pairing {
    /// Returns the pairing of a file with these columns. The error is the missing column's name.
    pub fn of(columns: &[String], chosen: &Chosen) -> Result<Self, String> {
        let has = |name: &str| columns.iter().any(|column| column == name);
        let one = |name: &Option<String>, usual: &str| name.clone().unwrap_or_else(|| usual.to_owned());
        if chosen.is_text {
            let column = one(&chosen.text, "text");
            return if has(&column) { Ok(Self::Text { column }) } else { Err(column) };
        }
        if chosen.prompt.is_some() || chosen.response.is_some() {
            let (prompt, response) = (one(&chosen.prompt, "prompt"), one(&chosen.response, "response"));
            let missing = [&prompt, &response].into_iter().find(|name| !has(name)).cloned();
            return missing.map_or(Ok(Self::Columns { prompt, response }), Err);
        }
        let pair = |(prompt, response): (&str, &str)| {
            (has(prompt) && has(response))
                .then(|| Self::Columns { prompt: prompt.to_owned(), response: response.to_owned() })
        };
        let chat = |column: &str| has(column).then(|| Self::Chat { column: column.to_owned() });
        let instruction = || {
            let input = has("input").then(|| "input".to_owned());
            let output = ["output", "response"].into_iter().find(|output| has(output))?.to_owned();
            has("instruction").then(|| Self::Instruction { instruction: "instruction".to_owned(), input, output })
        };
        pair(("prompt", "response"))
            .or_else(|| chat("messages"))
            .or_else(|| chat("conversations"))
            .or_else(instruction)
            .or_else(|| PAIRS.into_iter().find_map(pair))
            .or_else(|| has("text").then(|| Self::Text { column: "text".to_owned() }))
            .ok_or_else(|| if has("prompt") { "response".to_owned() } else { "prompt".to_owned() })
    }

    /// The columns to read, in the order that [`Pairing::texts`] expects.
    pub fn columns(&self) -> Vec<Column> {
        match self {
            Self::Columns { prompt, response } => vec![Column::text(prompt), Column::text(response)],
            Self::Instruction { instruction, input, output } => {
                [Some(instruction), Some(output), input.as_ref()].into_iter().flatten().map(Column::text).collect()
            }
            Self::Chat { column } => vec![Column { name: column.clone(), is_chat: true }],
            Self::Text { column } => vec![Column::text(column)],
            Self::Each { columns } => columns.iter().map(Column::text).collect(),
        }
    }

    /// All texts of a row, the last one first. Columns without text are skipped.
    pub fn all_texts(&self, row: &mut Row) -> Vec<String> {
        let of_cells = |row: &mut Row| -> Vec<String> {
            let texts =
                row.cells.drain(..).filter_map(|cell| if let Cell::Text(text) = cell { Some(text) } else { None });
            texts.filter(|text| !text.is_empty()).collect()
        };
        let mut texts = match self {
            Self::Chat { .. } | Self::Instruction { .. } => match self.texts(row) {
                Ok(texts) => texts.into_iter().map(Cow::into_owned).collect(),
                Err(_) => of_cells(row),
            },
            _ => of_cells(row),
        };
        texts.reverse();
        texts
    }

    /// Whether a row is one text instead of a pair.
    pub fn is_text(&self) -> bool {
        matches!(self, Self::Text { .. })
    }

    /// The two flat columns, if a row consists of exactly two.
    pub fn flat(&self) -> Option<(&str, &str)> {
        match self {
            Self::Columns { prompt, response } => Some((prompt, response)),
            _ => None,
        }
    }

    /// One line for the user: the columns of prompt and response.
    pub fn in_words(&self) -> String {
        match self {
            Self::Columns { prompt, response } => format!("prompt from `{prompt}`, response from `{response}`"),
            Self::Instruction { instruction, input: Some(input), output } => {
                format!("prompt from `{instruction}` and `{input}`, response from `{output}`")
            }
            Self::Instruction { instruction, input: None, output } => {
                format!("prompt from `{instruction}`, response from `{output}`")
            }
            Self::Chat { column } => {
                format!("chats from `{column}`: the last answer is the response, everything before it the prompt")
            }
            Self::Text { column } => format!("text from `{column}`, for span corruption"),
            Self::Each { columns } => format!("texts from {}", listed(columns)),
        }
    }

    /// Returns the texts of a row: prompt and response, or one text.
    ///
    /// # Errors
    /// The row has no value in a column, or a value that is not text.
    pub fn texts<'a>(&self, row: &'a Row) -> Result<[Cow<'a, str>; 2], RowFault> {
        let columns = self.columns();
        let text = |number: usize| -> Result<Cow<'a, str>, RowFault> {
            let name = || columns[number].name.clone();
            match row.cells.get(number).unwrap_or(&Cell::Null) {
                Cell::Null => Err(RowFault::Null(name())),
                Cell::Text(text) if text.trim().is_empty() => Err(RowFault::Empty(name())),
                Cell::Text(text) => Ok(Cow::Borrowed(text)),
                Cell::Turns(_) => Err(RowFault::WrongType(name(), "a list of messages")),
                Cell::Other(kind) => Err(RowFault::WrongType(name(), kind)),
            }
        };
        match self {
            Self::Columns { .. } => Ok([text(0)?, text(1)?]),
            Self::Text { .. } | Self::Each { .. } => Ok([Cow::Borrowed(""), text(0)?]),
            Self::Instruction { input, .. } => {
                let (instruction, output) = (text(0)?, text(1)?);
                let input = match input.as_ref().map(|_| text(2)) {
                    None | Some(Err(RowFault::Null(_) | RowFault::Empty(_))) => return Ok([instruction, output]),
                    Some(input) => input?,
                };
                Ok([Cow::Owned(format!("{instruction}\n{input}")), output])
            }
            Self::Chat { column } => {
                let messages = |reason| RowFault::Messages(column.clone(), reason);
                let pair = |turns: &[chat::Turn]| {
                    let (prompt, response) = chat::prompt_and_response(turns)?;
                    Ok([Cow::Owned(prompt), Cow::Owned(response.to_owned())])
                };
                match row.cells.first().unwrap_or(&Cell::Null) {
                    Cell::Turns(turns) => pair(turns).map_err(messages),
                    Cell::Text(text) => chat::from_text(text).and_then(|turns| pair(&turns)).map_err(messages),
                    Cell::Null => Err(RowFault::Null(column.clone())),
                    Cell::Other(kind) => Err(messages(format!("expected a list of messages, got {kind}"))),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(columns: &str, expected: &str) {
        let columns: Vec<String> = columns.split(' ').map(str::to_owned).collect();
        let pairing = Pairing::of(&columns, &Chosen::default());
        let words = pairing.as_ref().map_or_else(|missing| format!("no {missing}"), Pairing::in_words);
        assert!(words.contains(expected), "{columns:?}: {words}");
    }

    #[test]
    fn a_file_says_by_its_columns_where_prompt_and_response_come_from() {
        check("response prompt id", "prompt from `prompt`, response from `response`");
        check("id messages", "chats from `messages`");
        check("conversations id", "chats from `conversations`");
        check("instruction input output", "prompt from `instruction` and `input`, response from `output`");
        check("instruction response", "prompt from `instruction`, response from `response`");
        check("prompt completion", "response from `completion`");
        check("question answer", "prompt from `question`");
        check("text id", "text from `text`");
        check("text summary", "prompt from `text`, response from `summary`");
        check("prompt id", "no response");
        check("a b", "no prompt");
    }

    #[test]
    fn chosen_columns_come_before_known_ones_and_have_to_be_there() {
        let columns = ["prompt", "response", "german"].map(str::to_owned);
        let chosen = |response: &str| Chosen { response: Some(response.to_owned()), ..Chosen::default() };
        let pairing = Pairing::of(&columns, &chosen("german")).unwrap();
        assert_eq!(pairing.flat(), Some(("prompt", "german")));
        assert_eq!(Pairing::of(&columns, &chosen("french")), Err("french".to_owned()));
        let text = Chosen { is_text: true, ..Chosen::default() };
        assert_eq!(Pairing::of(&columns, &text), Err("text".to_owned()));
    }

    #[test]
    fn an_instruction_without_input_stands_alone() {
        let pairing = Pairing::of(&["instruction", "input", "output"].map(str::to_owned), &Chosen::default()).unwrap();
        let texts = |input: Cell| {
            let cells = vec![Cell::Text("Add".into()), Cell::Text("3".into()), input];
            pairing.texts(&Row { line: 1, cells }).map(|[prompt, response]| format!("{prompt}|{response}"))
        };
        assert_eq!(texts(Cell::Text("1 2".into())), Ok("Add\n1 2|3".to_owned()));
        assert_eq!(texts(Cell::Text(" ".into())), Ok("Add|3".to_owned()));
        assert_eq!(texts(Cell::Null), Ok("Add|3".to_owned()));
        assert_eq!(texts(Cell::Other("a list")), Err(RowFault::WrongType("input".to_owned(), "a list")));
    }
}
