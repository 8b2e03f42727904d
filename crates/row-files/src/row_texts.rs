//! The texts of a row by the names of their columns: a cell, the prompt or the answer of a chat, or what a template makes of cells.

use std::borrow::Cow;

use crate::chat::{self, Fits, LeftOut};
use crate::column::Column;
use crate::error::RowFault;
use crate::row::{Cell, Row};
use crate::template::Template;

/// The end of what two texts begin with: behind the last name of the assistant that both have, or else behind the last blank.
fn common_beginning(one: &str, other: &str) -> usize {
    const ASSISTANT: &str = "\n\nAssistant:";
    let differs = one.char_indices().zip(other.chars()).find(|((_, a), b)| a != b);
    let alike = differs.map_or(one.len().min(other.len()), |((at, _), _)| at);
    let common = &one[..alike];
    let of_assistant = common.rfind(ASSISTANT).map(|at| at + ASSISTANT.len());
    of_assistant.or_else(|| common.rfind(char::is_whitespace)).unwrap_or(0)
}

/// The values of a row by the names of their columns.
pub(crate) struct Values<'a, 'b> {
    pub columns: &'b [Column],
    pub row: &'a Row,
}

impl<'a> Values<'a, '_> {
    fn cell(&self, name: &str) -> &'a Cell {
        let place = self.columns.iter().position(|column| column.name == name);
        place.and_then(|place| self.row.cells.get(place)).unwrap_or(&Cell::Null)
    }

    /// A text.
    pub fn text(&self, name: &str) -> Result<&'a str, RowFault> {
        match self.cell(name) {
            Cell::Null => Err(RowFault::Null(name.to_owned())),
            Cell::Text(text) if text.trim().is_empty() => Err(RowFault::Empty(name.to_owned())),
            Cell::Text(text) => Ok(text),
            Cell::Turns(_) => Err(RowFault::WrongType(name.to_owned(), "a list of messages")),
            Cell::Other(kind) => Err(RowFault::WrongType(name.to_owned(), kind)),
        }
    }

    /// A prompt: a text, or a list of messages, as TRL has them.
    pub fn prompt(&self, name: &str, fits: Option<Fits<'_>>) -> Result<(Cow<'a, str>, LeftOut), RowFault> {
        match self.cell(name) {
            Cell::Turns(turns) => self.prompt_of(name, turns, fits),
            _ => Ok((Cow::Borrowed(self.text(name)?), LeftOut::default())),
        }
    }

    fn prompt_of(
        &self,
        name: &str,
        turns: &[chat::Turn],
        fits: Option<Fits<'_>>,
    ) -> Result<(Cow<'a, str>, LeftOut), RowFault> {
        let fitted = chat::fitted_prompt(turns, fits).map_err(|reason| RowFault::Messages(name.to_owned(), reason))?;
        Ok((Cow::Owned(fitted.0), fitted.1))
    }

    /// The prompt, the chosen and the rejected answer. An answer may be a whole chat that ends with it. Without a prompt, the beginning that
    /// both answers have in common is the prompt.
    pub fn preference(
        &self,
        (prompt, [chosen, rejected]): (Option<&str>, [&str; 2]),
        fits: Option<Fits<'_>>,
    ) -> Result<([Cow<'a, str>; 3], LeftOut), RowFault> {
        let messages = |name: &str| {
            let name = name.to_owned();
            move |reason| RowFault::Messages(name, reason)
        };
        if let Some(prompt) = prompt {
            let (prompt, left_out) = self.prompt(prompt, fits)?;
            let last = |name: &str| match self.cell(name) {
                Cell::Turns(turns) => chat::last_answer(turns).map(Cow::Borrowed).map_err(messages(name)),
                _ => self.text(name).map(Cow::Borrowed),
            };
            return Ok(([prompt, last(chosen)?, last(rejected)?], left_out));
        }
        if let (Cell::Turns(of_chosen), Cell::Turns(of_rejected)) = (self.cell(chosen), self.cell(rejected)) {
            let alike = of_chosen.iter().zip(of_rejected).take_while(|(one, other)| one == other).count();
            let alike = alike.min(of_chosen.len().saturating_sub(1)).min(of_rejected.len().saturating_sub(1));
            let (prompt, left_out) = self.prompt_of(chosen, &of_chosen[..alike], fits)?;
            let [of_chosen, of_rejected] = [(chosen, of_chosen), (rejected, of_rejected)]
                .map(|(name, turns)| chat::completion(&turns[alike..]).map(Cow::Borrowed).map_err(messages(name)));
            return Ok(([prompt, of_chosen?, of_rejected?], left_out));
        }
        let [of_chosen, of_rejected] = [self.text(chosen)?, self.text(rejected)?];
        let end = common_beginning(of_chosen, of_rejected);
        let texts = [&of_chosen[..end], &of_chosen[end..], &of_rejected[end..]];
        for (text, name) in texts.into_iter().zip([chosen, chosen, rejected]) {
            if text.trim().is_empty() {
                return Err(RowFault::Empty(name.to_owned()));
            }
        }
        Ok((texts.map(|text| Cow::Owned(text.trim().to_owned())), LeftOut::default()))
    }

    /// An answer: a text, or one message of an assistant.
    pub fn answer(&self, name: &str) -> Result<Cow<'a, str>, RowFault> {
        match self.cell(name) {
            Cell::Turns(turns) => {
                chat::completion(turns).map(Cow::Borrowed).map_err(|reason| RowFault::Messages(name.to_owned(), reason))
            }
            _ => self.text(name).map(Cow::Borrowed),
        }
    }

    /// A text that may be missing.
    pub fn optional(&self, name: &str) -> Result<Option<&'a str>, RowFault> {
        match self.text(name) {
            Err(RowFault::Null(_) | RowFault::Empty(_)) => Ok(None),
            text => text.map(Some),
        }
    }

    /// Messages, as a list or as a text that is JSON. `None` if there are none.
    pub fn turns(&self, name: &str) -> Result<Option<Cow<'a, [chat::Turn]>>, RowFault> {
        let messages = |reason| RowFault::Messages(name.to_owned(), reason);
        match self.cell(name) {
            Cell::Null => Ok(None),
            Cell::Text(text) if text.trim().is_empty() => Ok(None),
            Cell::Turns(turns) => Ok(Some(Cow::Borrowed(turns))),
            Cell::Text(text) => chat::from_text(text).map(|turns| Some(Cow::Owned(turns))).map_err(messages),
            Cell::Other(kind) => Err(messages(format!("expected a list of messages, got {kind}"))),
        }
    }

    /// The text of a template.
    pub fn fill(&self, template: &Template, needs_all: bool) -> Result<Cow<'a, str>, RowFault> {
        let (mut missing, mut has_text) = (None, false);
        for column in template.columns() {
            match self.text(column) {
                Ok(_) => has_text = true,
                Err(fault) if needs_all || fault.is_malformed() => return Err(fault),
                Err(fault) => missing = Some(fault),
            }
        }
        match missing {
            Some(fault) if !has_text => Err(fault),
            _ => Ok(Cow::Owned(template.fill(|name| self.cell(name).text().unwrap_or_default()))),
        }
    }
}
