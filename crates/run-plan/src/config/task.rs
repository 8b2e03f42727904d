//! `task.name`: what a model makes of a source.

use t5::{Head, Labels};

use super::Values;

/// What a model makes of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Text.
    TextToText,
    /// One of some labels.
    Classification,
    /// A number.
    Regression,
    /// A label of each word.
    TokenClassification,
    /// A vector.
    Embedding,
    /// How well a text answers a query.
    Ranking,
}

impl Task {
    /// The task in these values; `None`: that of the model.
    pub fn from_values(values: &Values) -> Option<Task> {
        values.text("task.name").map(|name| match name.as_str() {
            "classification" => Task::Classification,
            "regression" => Task::Regression,
            "token-classification" => Task::TokenClassification,
            "embedding" => Task::Embedding,
            "ranking" => Task::Ranking,
            _ => Task::TextToText,
        })
    }

    /// The task of a model with this head.
    pub fn of(head: &Head) -> Task {
        match head {
            Head::Sequence(Labels { is_number: true, .. }) => Task::Regression,
            Head::Sequence(_) => Task::Classification,
            Head::Tokens(_) => Task::TokenClassification,
            Head::Encoder => Task::Embedding,
            Head::Language => Task::TextToText,
        }
    }

    /// A head for this task with as few labels as one can have, where the rows are not known. A head of this task stays.
    #[must_use]
    pub fn head_like(self, head: &Head) -> Head {
        let labels = || Labels::named(vec!["LABEL_0".into(), "LABEL_1".into()]);
        match self {
            _ if Task::of(head) == self => head.clone(),
            Task::TextToText | Task::Ranking => Head::Language,
            Task::Classification => Head::Sequence(labels()),
            Task::Regression => Head::Sequence(Labels::number()),
            Task::TokenClassification => Head::Tokens(labels()),
            Task::Embedding => Head::Encoder,
        }
    }
}
