//! `task.name`: what a model makes of a source. Each task is a row of `TASKS`.

use t5::{Head, Labels, Problem};
use text_metrics::Metric;

/// What a model makes of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Text.
    TextToText,
    /// One of some labels.
    Classification,
    /// Any number of some labels.
    MultiLabel,
    /// A number.
    Regression,
    /// A label of each word.
    TokenClassification,
    /// A vector.
    Embedding,
    /// How well a text answers a query.
    Ranking,
}

/// What the second column of a pair says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    /// A text.
    Text,
    /// A number.
    Number,
    /// One of some labels.
    Label,
    /// Any number of some labels.
    LabelSet,
    /// A label of each word.
    LabelsOfWords,
}

/// A task.
struct Row {
    task: Task,
    name: &'static str,
    response: Response,
    /// The head of its model, with the labels of the rows.
    head: fn(Vec<String>) -> Head,
    /// The usual metrics of its answers; `None`: those that `train.eval_metrics` has for texts.
    metrics: Option<&'static [Metric]>,
}

const fn row(
    task: Task,
    name: &'static str,
    response: Response,
    head: fn(Vec<String>) -> Head,
    metrics: Option<&'static [Metric]>,
) -> Row {
    Row { task, name, response, head, metrics }
}

const OF_LABELS: &[Metric] = &[Metric::Accuracy, Metric::MacroF1];
const OF_LABEL_SETS: &[Metric] = &[Metric::Accuracy, Metric::MicroF1, Metric::MacroF1];
const OF_SPANS: &[Metric] = &[Metric::Accuracy, Metric::SpanF1];
const OF_NUMBERS: &[Metric] = &[Metric::Pearson, Metric::Spearman];

// Vectors and rankings are scored by what they find.
#[rustfmt::skip]
static TASKS: [Row; 7] = [
    row(Task::TextToText, "text-to-text", Response::Text, |_| Head::Language, None),
    row(Task::Classification, "classification", Response::Label, |labels| Head::Sequence(Labels::named(labels)), Some(OF_LABELS)),
    row(Task::MultiLabel, "multi-label-classification", Response::LabelSet, |labels| Head::Sequence(Labels::set(labels)), Some(OF_LABEL_SETS)),
    row(Task::Regression, "regression", Response::Number, |_| Head::Sequence(Labels::number()), Some(OF_NUMBERS)),
    row(Task::TokenClassification, "token-classification", Response::LabelsOfWords, |labels| Head::Tokens(Labels::named(labels)), Some(OF_LABELS)),
    row(Task::Embedding, "embedding", Response::Text, |_| Head::Encoder, Some(&[])),
    row(Task::Ranking, "ranking", Response::Text, |_| Head::Language, Some(&[])),
];

/// The values of `task.name`.
pub static NAMES: [&str; TASKS.len()] = {
    let (mut names, mut number) = ([""; TASKS.len()], 0);
    while number < names.len() {
        names[number] = TASKS[number].name;
        number += 1;
    }
    names
};

impl Task {
    /// The task of this name.
    pub fn named(name: &str) -> Option<Task> {
        TASKS.iter().find(|row| row.name == name).map(|row| row.task)
    }

    /// The task of a model with this head.
    pub fn from_head(head: &Head) -> Task {
        match head {
            Head::Sequence(labels) => match labels.problem {
                Problem::OneLabel => Task::Classification,
                Problem::LabelSet => Task::MultiLabel,
                Problem::Number => Task::Regression,
            },
            Head::Tokens(_) => Task::TokenClassification,
            Head::Encoder => Task::Embedding,
            Head::Language => Task::TextToText,
        }
    }

    fn row(self) -> &'static Row {
        TASKS.iter().find(|row| row.task == self).expect("every task has its row")
    }

    /// What the second column of a pair says.
    pub fn response(self) -> Response {
        self.row().response
    }

    /// The usual metrics of the answers of a model with this head; `None`: those that `train.eval_metrics` has for texts. Labels of words that
    /// begin and continue spans are scored by the spans.
    pub fn usual_metrics(self, head: &Head) -> Option<&'static [Metric]> {
        let is_of_span = |name: &String| name.starts_with("B-") || name.starts_with("I-");
        match head {
            Head::Tokens(labels) if labels.names.iter().any(is_of_span) => Some(OF_SPANS),
            _ => self.row().metrics,
        }
    }

    /// The head of a model that is trained on rows with these labels, which may be none.
    pub fn head(self, labels: Vec<String>) -> Head {
        (self.row().head)(labels)
    }

    /// A head for this task with as few labels as one can have, where the rows are not known. A head of this task stays.
    #[must_use]
    pub fn head_like(self, head: &Head) -> Head {
        if Task::from_head(head) == self { head.clone() } else { self.head(vec!["LABEL_0".into(), "LABEL_1".into()]) }
    }
}
