//! Columns, and the texts that they give for a row.
//!
//! [`Pairing::choose`] decides from the names of a file's columns; `docs/data.md` has the table of known forms. [`Pairing::texts`] then makes
//! the source and the target of a row.

use std::borrow::Cow;

use crate::chat::{self, Fits, LeftOut};
use crate::classes::Classes;
use crate::column::Column;
use crate::error::{RowFault, listed};
use crate::lists::RankedColumns;
use crate::row::{Cell, Row};
use crate::row_texts::Values;
use crate::template::Template;

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
    /// Columns of a prompt and of two answers to it, of which one was chosen.
    Preference {
        /// Column of the prompts; `None`: the prompt is what both answers begin with.
        prompt: Option<String>,
        /// Column of the chosen answers.
        chosen: String,
        /// Column of the rejected answers.
        rejected: String,
        /// Whether each answer becomes a row of its own, with a label.
        is_split: bool,
    },
    /// Columns of a prompt, of an answer to it, and of a label that says whether the answer is desirable; or of two texts and a score.
    Labelled {
        /// Column of the prompts.
        prompt: String,
        /// Column of the answers.
        completion: String,
        /// Column of the labels; see [`truth_of_label`].
        label: String,
        /// Whether labels are numbers.
        is_score: bool,
    },
    /// Lines of a prompt, perhaps after a system's message and earlier turns.
    Instruction(Instruction),
    /// A source and a target that are made from columns.
    Templates {
        /// The source.
        source: Template,
        /// The target.
        target: Template,
        /// Whether a row needs a text in every column. Otherwise one column of each template is enough, and the others leave their
        /// place empty.
        needs_all: bool,
    },
    /// A column of messages.
    Chat {
        /// The column.
        column: String,
        /// Column of the system's message, which comes first.
        system: Option<String>,
    },
    /// A query and a text of a list, or a whole list.
    Ranked(RankedColumns),
    /// One text, for pretraining.
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

/// Columns of a prompt in lines, as Alpaca, Dolly and LLaMA-Factory have them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// Column of the system's message, which may be empty.
    pub system: Option<String>,
    /// Column of earlier turns, which may be empty.
    pub history: Option<String>,
    /// Columns of the prompt's lines. One of them has to have text.
    pub lines: Vec<String>,
    /// Column of the response.
    pub output: String,
}

/// What the user chose; `None`: decide from the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// Column of the prompts.
    pub prompt: Option<String>,
    /// Column of the responses.
    pub response: Option<String>,
    /// Template of the sources.
    pub source: Option<String>,
    /// Template of the targets.
    pub target: Option<String>,
    /// Language of the sources of a translation.
    pub source_lang: Option<String>,
    /// Language of the targets.
    pub target_lang: Option<String>,
    /// Column of the texts for span corruption.
    pub text: Option<String>,
    /// Whether one text is wanted instead of a pair.
    pub is_text: bool,
    /// Columns of chosen and rejected answers, if such rows are wanted.
    pub preference: Option<[Option<String>; 2]>,
    /// Whether rows of one answer and a label are wanted. For an encoder, the label is a score.
    pub has_labels: bool,
    /// Whether rows of texts that belong together are wanted, for an encoder.
    pub is_of_vectors: bool,
    /// Column of the labels.
    pub label: Option<String>,
    /// Whether rows are wanted that have words and a label of each.
    pub is_of_words: bool,
    /// Whether targets are any number of labels: none is a target, too.
    pub is_of_sets: bool,
    /// Whether lists of texts are wanted, with a label of each, and the most texts of a list.
    pub ranked: Option<usize>,
    /// Column that says which rows have the same query.
    pub query: Option<String>,
}

/// What a label says of an answer: whether it is desirable. `None` if it is no label.
///
/// `true` and `false` as TRL has them, in any case; 1 and 0 or -1, as numbers or texts; `desirable` and `undesirable`.
pub fn truth_of_label(text: &str) -> Option<bool> {
    match text.trim().to_lowercase().as_str() {
        "true" | "1" | "1.0" | "desirable" => Some(true),
        "false" | "0" | "0.0" | "-1" | "-1.0" | "undesirable" => Some(false),
        _ => None,
    }
}

/// The number that a label is. `None` if it is none.
pub fn score_of_label(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|score: &f64| score.is_finite())
}

impl Pairing {
    /// The pairing of two templates: two columns, if each is one.
    pub(crate) fn of_templates(source: Template, target: Template, needs_all: bool) -> Self {
        match (source.column(), target.column()) {
            (Some(prompt), Some(response)) => {
                Self::Columns { prompt: prompt.to_owned(), response: response.to_owned() }
            }
            _ => Self::Templates { source, target, needs_all },
        }
    }

    /// The columns to read, in the order that [`Pairing::texts`] expects.
    pub fn columns(&self) -> Vec<Column> {
        match self {
            Self::Columns { prompt, response } => vec![Column::text(prompt), Column::text(response)],
            Self::Preference { prompt, chosen, rejected, .. } => {
                prompt.iter().chain([chosen, rejected]).map(Column::text).collect()
            }
            Self::Labelled { prompt, completion, label, .. } => [prompt, completion, label].map(Column::text).to_vec(),
            Self::Instruction(of) => {
                let texts = of.lines.iter().chain([&of.output]).chain(&of.system).map(Column::text);
                texts.chain(of.history.iter().map(Column::chat)).collect()
            }
            Self::Templates { source, target, .. } => {
                let mut columns: Vec<Column> = Vec::new();
                for name in source.columns().chain(target.columns()) {
                    if columns.iter().all(|column| column.name != name) {
                        columns.push(Column::text(name));
                    }
                }
                columns
            }
            Self::Chat { column, system } => {
                [Column::chat(column)].into_iter().chain(system.iter().map(Column::text)).collect()
            }
            Self::Ranked(of) => of.columns().into_iter().map(Column::list).collect(),
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
            Self::Chat { .. } | Self::Instruction(_) => match self.texts(row) {
                Ok(texts) => texts.into_iter().map(Cow::into_owned).collect(),
                Err(_) => of_cells(row),
            },
            _ => of_cells(row),
        };
        texts.reverse();
        texts
    }

    /// The columns of the file that give no text. A column of objects is named once, without its members.
    pub fn unused(&self, columns: &[String]) -> Vec<String> {
        let used = self.columns();
        let is_within = |name: &str, parent: &str| name.strip_prefix(parent).is_some_and(|rest| rest.starts_with('.'));
        let is_used = |name: &String| {
            let is_of = |column: &Column| {
                column.name == *name || is_within(&column.name, name) || is_within(name, &column.name)
            };
            used.iter().any(is_of)
        };
        let mut unused: Vec<String> = Vec::new();
        for name in columns.iter().filter(|name| !is_used(name)) {
            if !unused.iter().any(|parent| is_within(name, parent)) {
                unused.push(name.clone());
            }
        }
        unused
    }

    /// The reading in one line: [`in_words`](Self::in_words), and the names of the classes that numbers stand for.
    pub fn of_classes(&self, classes: &Classes) -> String {
        let columns = self.columns();
        self.in_words() + &classes.in_words(columns.iter().map(|column| column.name.as_str()))
    }

    /// Whether a row is one text instead of a pair.
    pub fn is_text(&self) -> bool {
        matches!(self, Self::Text { .. })
    }

    /// Whether the texts of a row are columns as they stand.
    pub fn is_flat(&self) -> bool {
        match self {
            Self::Preference { prompt, is_split, .. } => prompt.is_some() && !is_split,
            _ => matches!(self, Self::Columns { .. } | Self::Labelled { .. } | Self::Text { .. }),
        }
    }

    /// Whether each of a row's two answers becomes a row of its own, with a label.
    pub fn is_split(&self) -> bool {
        matches!(self, Self::Preference { is_split: true, .. })
    }

    /// The two flat columns, if a row consists of exactly two.
    pub fn flat(&self) -> Option<(&str, &str)> {
        match self {
            Self::Columns { prompt, response } => Some((prompt, response)),
            _ => None,
        }
    }

    /// The column of the targets, if it is one.
    pub(crate) fn target(&self) -> Option<&str> {
        match self {
            Self::Columns { response, .. } => Some(response),
            Self::Instruction(of) => Some(&of.output),
            Self::Templates { target, .. } => target.column(),
            _ => None,
        }
    }

    /// One line for the user: the columns of prompt and response.
    pub fn in_words(&self) -> String {
        match self {
            Self::Columns { prompt, response } => format!("prompt from `{prompt}`, response from `{response}`"),
            Self::Preference { prompt, chosen, rejected, is_split } => {
                let prompt = match prompt {
                    Some(prompt) => format!("prompt from `{prompt}`"),
                    None => "the prompt is what both answers begin with".to_owned(),
                };
                let rows = if *is_split { "; each answer is a row with a label" } else { "" };
                format!("{prompt}, chosen answer from `{chosen}`, rejected answer from `{rejected}`{rows}")
            }
            Self::Labelled { prompt, completion, label, is_score: true } => {
                format!("texts from `{prompt}` and `{completion}`, their score from `{label}`")
            }
            Self::Labelled { prompt, completion, label, .. } => {
                format!("prompt from `{prompt}`, answer from `{completion}`, its label from `{label}`")
            }
            Self::Instruction(of) => {
                let names = of.system.iter().chain(&of.history).chain(&of.lines).map(|name| format!("`{name}`"));
                let names: Vec<String> = names.collect();
                let prompt = match names.split_last() {
                    Some((last, [])) => last.clone(),
                    Some((last, others)) => format!("{} and {last}", others.join(", ")),
                    None => String::new(),
                };
                format!("prompt from {prompt}, response from `{}`", of.output)
            }
            Self::Templates { source, target, .. } => {
                let of = |template: &Template| match template.column() {
                    Some(column) => format!("from `{column}`"),
                    None => format!("`{template}`"),
                };
                format!("prompt {}, response {}", of(source), of(target))
            }
            Self::Chat { column, system } => {
                let system = system.as_ref().map_or_else(String::new, |system| format!(", after `{system}`"));
                format!(
                    "chats from `{column}`{system}: the last answer is the response, everything before it the prompt"
                )
            }
            Self::Ranked(of) => format!("texts `{}` ranked by `{}`, lists by `{}`", of.source, of.label, of.query),
            Self::Text { column } => format!("text from `{column}`, for pretraining"),
            Self::Each { columns } => format!("texts from {}", listed(columns)),
        }
    }

    /// Returns the texts of a row: prompt and response, or one text.
    ///
    /// # Errors
    /// The row has no value in a column, or a value that is not text.
    pub fn texts<'a>(&self, row: &'a Row) -> Result<[Cow<'a, str>; 2], RowFault> {
        self.fitted_texts(row, None).map(|(texts, _)| texts)
    }

    /// As [`texts`](Self::texts), but a chat whose prompt does not fit loses its oldest turns. Also returns how many.
    ///
    /// # Errors
    /// As for `texts`.
    pub fn fitted_texts<'a>(
        &self,
        row: &'a Row,
        fits: Option<Fits<'_>>,
    ) -> Result<([Cow<'a, str>; 2], LeftOut), RowFault> {
        let columns = self.columns();
        let values = Values { columns: &columns, row };
        let borrowed = |name: &str| values.text(name).map(Cow::Borrowed);
        let texts = match self {
            Self::Preference { prompt, chosen, rejected, .. } => {
                let ([source, chosen, _], left_out) =
                    values.preference((prompt.as_deref(), [chosen, rejected]), fits)?;
                return Ok(([source, chosen], left_out));
            }
            Self::Columns { prompt, response } | Self::Labelled { prompt, completion: response, .. } => {
                let (source, left_out) = values.prompt(prompt, fits)?;
                return Ok(([source, values.answer(response)?], left_out));
            }
            Self::Ranked(of) => of.of_row(row)?.written().map(Cow::Owned),
            Self::Text { column } => [Cow::Borrowed(""), borrowed(column)?],
            Self::Each { .. } => [Cow::Borrowed(""), borrowed(&columns[0].name)?],
            Self::Instruction(of) => {
                let (prompt, left_out) = of.prompt(&values, fits)?;
                return Ok(([prompt, borrowed(&of.output)?], left_out));
            }
            Self::Templates { source, target, needs_all } => {
                let fill = |template| values.fill(template, *needs_all);
                [fill(source)?, fill(target)?]
            }
            Self::Chat { column, system } => {
                let messages = |reason| RowFault::Messages(column.clone(), reason);
                let mut turns = values.turns(column)?.ok_or_else(|| RowFault::Null(column.clone()))?;
                if let Some(system) = system.as_ref().map(|name| values.optional(name)).transpose()?.flatten() {
                    turns.to_mut().insert(0, chat::Turn::new("system", system));
                }
                let (before, response) = chat::before_response(&turns).map_err(messages)?;
                let (prompt, mut left_out) = chat::fitted_prompt(before, fits).map_err(messages)?;
                left_out.has_more |= turns[before.len()].has_more;
                return Ok(([Cow::Owned(prompt), Cow::Owned(response.to_owned())], left_out));
            }
        };
        Ok((texts, LeftOut::default()))
    }

    /// Returns the rejected answer of a row, or its label as `true` or `false`, if rows have one.
    ///
    /// # Errors
    /// As for [`texts`](Self::texts).
    pub fn third_text<'a>(&self, row: &'a Row) -> Result<Option<Cow<'a, str>>, RowFault> {
        let values = Values { columns: &self.columns(), row };
        match self {
            Self::Preference { prompt, chosen, rejected, .. } => {
                let ([.., rejected], _) = values.preference((prompt.as_deref(), [chosen, rejected]), None)?;
                Ok(Some(rejected))
            }
            Self::Labelled { label, is_score: true, .. } => {
                let text = values.text(label)?;
                match score_of_label(text) {
                    Some(_) => Ok(Some(Cow::Borrowed(text))),
                    None => Err(RowFault::NoScore(label.clone(), text.to_owned())),
                }
            }
            Self::Labelled { label, .. } => match truth_of_label(values.text(label)?) {
                Some(truth) => Ok(Some(Cow::Owned(truth.to_string()))),
                None => Err(RowFault::NoLabel(label.clone())),
            },
            _ => Ok(None),
        }
    }

    /// Whether prompts are chats, which lose their oldest turns if they are too long.
    pub fn is_chat(&self) -> bool {
        matches!(self, Self::Chat { .. } | Self::Instruction(Instruction { history: Some(_), .. }))
    }
}

impl Instruction {
    /// The prompt of a row: its lines alone, or as the last turn of a chat.
    fn prompt<'a>(&self, values: &Values<'a, '_>, fits: Option<Fits<'_>>) -> Result<(Cow<'a, str>, LeftOut), RowFault> {
        let mut lines = Vec::with_capacity(self.lines.len());
        for line in &self.lines {
            lines.extend(values.optional(line)?);
        }
        let prompt = match lines.as_slice() {
            [] => values.text(&self.lines[0]).map(Cow::Borrowed)?,
            [line] => Cow::Borrowed(*line),
            lines => Cow::Owned(lines.join("\n")),
        };
        let system = self.system.as_ref().map(|name| values.optional(name)).transpose()?.flatten();
        let history = self.history.as_ref().map(|name| values.turns(name)).transpose()?.flatten();
        if system.is_none() && history.is_none() {
            return Ok((prompt, LeftOut::default()));
        }
        let mut turns: Vec<chat::Turn> = system.iter().map(|text| chat::Turn::new("system", text)).collect();
        turns.extend(history.map(Cow::into_owned).unwrap_or_default());
        turns.push(chat::Turn::new("user", &prompt));
        let fitted = chat::fitted_prompt(&turns, fits);
        let fitted = fitted.map_err(|reason| RowFault::Messages(self.lines[0].clone(), reason))?;
        Ok((Cow::Owned(fitted.0), fitted.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meaning::Unpaired;

    #[test]
    fn chosen_columns_come_before_known_ones_and_have_to_be_there() {
        let columns = ["prompt", "response", "german"].map(str::to_owned);
        let chosen = |response: &str| Chosen { response: Some(response.to_owned()), ..Chosen::default() };
        let pairing = Pairing::choose(&columns, &chosen("german")).unwrap();
        assert_eq!(pairing.flat(), Some(("prompt", "german")));
        assert_eq!(Pairing::choose(&columns, &chosen("french")), Err(Unpaired::Missing("french".to_owned())));
        let text = Chosen { is_text: true, ..Chosen::default() };
        assert_eq!(Pairing::choose(&columns, &text), Err(Unpaired::Missing("text".to_owned())));
    }

    #[test]
    fn a_prompt_and_a_completion_may_be_lists_of_messages() {
        let pairing = Pairing::choose(&["prompt", "completion"].map(str::to_owned), &Chosen::default()).unwrap();
        let turns = |turns: &[(&str, &str)]| {
            Cell::Turns(turns.iter().map(|(role, content)| chat::Turn::new(role, content)).collect())
        };
        let prompt = turns(&[("user", "1+1"), ("assistant", "2"), ("user", "2+2")]);
        let row = Row { line: 1, cells: vec![prompt, turns(&[("assistant", "4")])] };
        assert_eq!(pairing.texts(&row).unwrap(), ["user: 1+1\nassistant: 2\nuser: 2+2", "4"]);
        let (texts, left_out) = pairing.fitted_texts(&row, Some(&|prompt| prompt.len() < 10)).unwrap();
        assert_eq!((texts[0].as_ref(), left_out.turns), ("2+2", 2), "the last question stays");
        let row = Row { line: 1, cells: vec![Cell::Text("q".into()), turns(&[("user", "no answer")])] };
        assert!(matches!(pairing.texts(&row), Err(RowFault::Messages(..))));
    }

    #[test]
    fn a_preference_has_its_prompt_in_a_column_or_before_both_answers() {
        let chosen = Chosen { preference: Some([None, None]), ..Chosen::default() };
        let texts = |columns: &[&str], cells: Vec<Cell>| {
            let columns: Vec<String> = columns.iter().map(|name| (*name).to_owned()).collect();
            let pairing = Pairing::choose(&columns, &chosen).unwrap();
            let row = Row { line: 1, cells };
            let [prompt, answer] = pairing.texts(&row)?;
            Ok([prompt.into_owned(), answer.into_owned(), pairing.third_text(&row)?.unwrap().into_owned()])
        };
        let chat = |turns: &[(&str, &str)]| {
            Cell::Turns(turns.iter().map(|(role, content)| chat::Turn::new(role, content)).collect())
        };
        let text = |text: &str| Cell::Text(text.to_owned());
        let check = |columns: &[&str], cells: Vec<Cell>, expected: [&str; 3]| {
            assert_eq!(texts(columns, cells), Ok(expected.map(str::to_owned)));
        };
        let pair = |answer: &str| chat(&[("user", "2+2"), ("assistant", answer)]);
        check(&["prompt", "chosen", "rejected"], vec![text("2+2"), pair("4"), pair("5")], ["2+2", "4", "5"]);
        check(&["chosen", "rejected"], vec![pair("4"), pair("5")], ["2+2", "4", "5"]);
        let long = |answer: &str| chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", answer)]);
        check(&["chosen", "rejected"], vec![long("d"), long("e")], ["user: a\nassistant: b\nuser: c", "d", "e"]);
        let human = |answer: &str| text(&format!("\n\nHuman: hi\n\nAssistant: I {answer}"));
        check(&["chosen", "rejected"], vec![human("am"), human("do")], ["Human: hi\n\nAssistant:", "I am", "I do"]);
        check(&["chosen", "rejected"], vec![text("It is Paris"), text("It is Pau")], ["It is", "Paris", "Pau"]);
        let apart = texts(&["chosen", "rejected"], vec![text("yes"), text("no")]);
        assert_eq!(apart, Err(RowFault::Empty("chosen".to_owned())));
        let open = chat(&[("user", "2+2"), ("assistant", "4"), ("user", "thanks")]);
        let asks = texts(&["prompt", "chosen", "rejected"], vec![text("2+2"), open, pair("5")]);
        assert!(matches!(asks, Err(RowFault::Messages(..))), "{asks:?}");
    }

    #[test]
    fn an_instruction_without_input_stands_alone() {
        let pairing =
            Pairing::choose(&["instruction", "input", "output"].map(str::to_owned), &Chosen::default()).unwrap();
        let texts = |input: Cell| {
            let cells = vec![Cell::Text("Add".into()), input, Cell::Text("3".into())];
            pairing.texts(&Row { line: 1, cells }).map(|[prompt, response]| format!("{prompt}|{response}"))
        };
        assert_eq!(texts(Cell::Text("1 2".into())), Ok("Add\n1 2|3".to_owned()));
        assert_eq!(texts(Cell::Text(" ".into())), Ok("Add|3".to_owned()));
        assert_eq!(texts(Cell::Null), Ok("Add|3".to_owned()));
        let cells = |instruction: Cell| vec![instruction, Cell::Text("1 2".into()), Cell::Text("3".into())];
        let row = Row { line: 1, cells: cells(Cell::Text(String::new())) };
        assert_eq!(pairing.texts(&row).unwrap()[0], "1 2", "an input alone is the prompt");
        assert_eq!(texts(Cell::Other("a list")), Err(RowFault::WrongType("input".to_owned(), "a list")));
    }
}
