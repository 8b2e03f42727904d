//! [`Head`]: the part of a model above its stacks, and so the class of transformers that a directory names.

use serde_json::{Map, Value, json};
use t5_ops::IGNORED_LABEL;

use crate::family::Family;

/// What transformers' classes of T5 put before the names of all parameters but the classifier's.
pub(crate) const WRAPPED: &str = "transformer.";

/// The part of a model above its stacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Head {
    /// A logit of each entry of the vocabulary: `T5ForConditionalGeneration`.
    #[default]
    Language,
    /// None, and no decoder: `T5EncoderModel`. The encoder's output is the result.
    Encoder,
    /// A label or a number for a source, from the decoder's output at its last token: `T5ForSequenceClassification`.
    Sequence(Labels),
    /// A label for each token of a source, without a decoder: `T5ForTokenClassification`.
    Tokens(Labels),
}

/// What the outputs of a classifier say: transformers' `problem_type`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Problem {
    /// Which of the labels is the right one.
    #[default]
    OneLabel,
    /// Of each label, whether it is right.
    LabelSet,
    /// One number.
    Number,
}

impl Problem {
    /// The name in `config.json`.
    fn name(self) -> &'static str {
        match self {
            Problem::OneLabel => "single_label_classification",
            Problem::LabelSet => "multi_label_classification",
            Problem::Number => "regression",
        }
    }
}

/// The outputs of a classifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    /// The label of each output.
    pub names: Vec<String>,
    /// What the outputs say of a source.
    pub problem: Problem,
    /// Whether a classifier over a T5Gemma reads the decoder's output, which its files say. `None`: as T5's classes do.
    pub reads_decoder: Option<bool>,
}

impl Labels {
    /// Labels with these names, of which one is right.
    pub fn named(names: Vec<String>) -> Labels {
        Labels { names, problem: Problem::OneLabel, reads_decoder: None }
    }

    /// Labels with these names, of which any number is right.
    pub fn set(names: Vec<String>) -> Labels {
        Labels { problem: Problem::LabelSet, ..Labels::named(names) }
    }

    /// One number.
    pub fn number() -> Labels {
        Labels { problem: Problem::Number, ..Labels::named(vec!["LABEL_0".into()]) }
    }

    /// Whether the one output is a number.
    pub fn is_number(&self) -> bool {
        self.problem == Problem::Number
    }

    /// Whether any number of labels may be right.
    pub fn is_set(&self) -> bool {
        self.problem == Problem::LabelSet
    }

    /// How many entries the target of a source has: a label, a number, or whether each label is right.
    fn target_length(&self) -> usize {
        if self.is_set() { self.names.len() } else { 1 }
    }

    /// The index of a label.
    pub fn index(&self, name: &str) -> Option<u32> {
        self.names.iter().position(|other| other == name).map(|index| index as u32)
    }

    /// A target as text: its labels, or the number whose bits it is. Entries without a label are left out.
    pub fn text(&self, ids: &[u32]) -> String {
        if self.is_set() {
            let right = self.names.iter().zip(ids).filter(|(_, is_right)| **is_right == 1);
            return right.map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        }
        let of = |id: &u32| match self.is_number() {
            true => f32::from_bits(*id).to_string(),
            false => self.names.get(*id as usize).cloned().unwrap_or_default(),
        };
        ids.iter().filter(|id| **id != IGNORED_LABEL).map(of).collect::<Vec<_>>().join(" ")
    }

    /// The labels in a `config.json`, with transformers' defaults.
    pub(crate) fn from_json(raw: &Map<String, Value>) -> Labels {
        let named = raw.get("id2label").and_then(Value::as_object).map(|names| {
            let mut names: Vec<(u64, String)> =
                names.iter().filter_map(|(id, name)| Some((id.parse().ok()?, name.as_str()?.to_owned()))).collect();
            names.sort();
            names.into_iter().map(|(_, name)| name).collect::<Vec<_>>()
        });
        let count = raw.get("num_labels").and_then(Value::as_u64).unwrap_or(2).min(1 << 16);
        let names = named.unwrap_or_else(|| (0..count).map(|id| format!("LABEL_{id}")).collect());
        let kind = raw.get("problem_type").and_then(Value::as_str);
        let problem = match kind {
            None if names.len() == 1 => Some(Problem::Number),
            kind => [Problem::LabelSet, Problem::Number].into_iter().find(|of| kind == Some(of.name())),
        };
        Labels { problem: problem.unwrap_or_default(), ..Labels::named(names) }
    }
}

impl Head {
    /// The head of the class that a `config.json` names.
    pub(crate) fn from_json(family: Family, raw: &Map<String, Value>) -> Head {
        let class = raw.get("architectures").and_then(|names| names.get(0)).and_then(Value::as_str).unwrap_or_default();
        let has_decoder = || raw.get("is_encoder_decoder").and_then(Value::as_bool).unwrap_or(true);
        let reads_decoder = family.is_gemma().then(|| family == Family::T5Gemma2 || has_decoder());
        let labels = || Labels { reads_decoder, ..Labels::from_json(raw) };
        match class.strip_prefix(family.class_prefix()) {
            Some("EncoderModel") => Head::Encoder,
            Some("Encoder") if family == Family::T5Gemma2 => Head::Encoder,
            Some("ForSequenceClassification") => Head::Sequence(labels()),
            Some("ForTokenClassification") => Head::Tokens(labels()),
            _ => Head::Language,
        }
    }

    /// The class of transformers.
    pub fn architecture(&self, family: Family) -> String {
        let class = match self {
            Head::Language => "ForConditionalGeneration",
            Head::Encoder if family == Family::T5Gemma2 => "Encoder",
            Head::Encoder => "EncoderModel",
            Head::Sequence(_) => "ForSequenceClassification",
            Head::Tokens(_) => "ForTokenClassification",
        };
        format!("{}{class}", family.class_prefix())
    }

    /// Whether a decoder is below the head.
    pub fn has_decoder(&self) -> bool {
        match self {
            Head::Language => true,
            Head::Encoder => false,
            Head::Sequence(labels) => labels.reads_decoder.unwrap_or(true),
            Head::Tokens(labels) => labels.reads_decoder.unwrap_or(false),
        }
    }

    /// This head over a model of a family with another head. Over a T5Gemma, a label of tokens is read from the encoder where transformers' class
    /// can do so.
    pub(crate) fn over(mut self, family: Family, other: &Head) -> Head {
        let has_own = self.is_like(other);
        let of_tokens = matches!(self, Head::Tokens(_));
        if let (true, Head::Sequence(labels) | Head::Tokens(labels)) = (family.is_gemma(), &mut self) {
            let own = other.labels().filter(|_| has_own).and_then(|labels| labels.reads_decoder);
            labels.reads_decoder = labels.reads_decoder.or(own).or(Some(!of_tokens || family == Family::T5Gemma2));
        }
        self
    }

    /// Whether both are heads of one kind, whatever their labels.
    pub(crate) fn is_like(&self, other: &Head) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    /// Whether the model makes text.
    pub fn is_language(&self) -> bool {
        *self == Head::Language
    }

    /// The outputs of a classifier.
    pub fn labels(&self) -> Option<&Labels> {
        match self {
            Head::Language | Head::Encoder => None,
            Head::Sequence(labels) | Head::Tokens(labels) => Some(labels),
        }
    }

    /// How many entries the target of a source with this many tokens has, if the model is a classifier.
    pub fn target_length(&self, tokens: usize) -> Option<usize> {
        match self {
            Head::Language | Head::Encoder => None,
            Head::Sequence(labels) => Some(labels.target_length()),
            Head::Tokens(_) => Some(tokens),
        }
    }

    /// The module of transformers that it is, if it has parameters.
    pub fn module(&self, family: Family) -> Option<&'static str> {
        match self {
            Head::Language => Some("lm_head"),
            Head::Sequence(_) | Head::Tokens(_) if family.is_gemma() => Some("score"),
            Head::Encoder => None,
            Head::Sequence(_) => Some("classification_head"),
            Head::Tokens(_) => Some("classifier"),
        }
    }

    /// The entries of a `config.json` that name the labels.
    pub(crate) fn entries(&self) -> Vec<(&'static str, Value)> {
        let Some(Labels { names, problem, .. }) = self.labels() else { return Vec::new() };
        let ids: Map<_, _> = names.iter().enumerate().map(|(id, name)| (id.to_string(), json!(name))).collect();
        let labels: Map<_, _> = names.iter().enumerate().map(|(id, name)| (name.clone(), json!(id))).collect();
        let mut entries = vec![("id2label", Value::Object(ids)), ("label2id", Value::Object(labels))];
        if let Head::Sequence(_) = self {
            entries.push(("problem_type", problem.name().into()));
        }
        entries
    }

    /// The tokens that both stacks compute for a sample: of the source, and of the decoder's input.
    pub fn lengths(&self, source: usize, target: usize) -> (usize, usize) {
        match self {
            Head::Language => (source, target),
            Head::Sequence(_) | Head::Tokens(_) if self.has_decoder() => (source, source),
            // A target is another text of the same encoder.
            Head::Encoder => (source.max(target), 1),
            Head::Sequence(_) | Head::Tokens(_) => (source, 1),
        }
    }

    /// Targets that fit these sources, for a rehearsal.
    pub fn targets_like(&self, sources: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let of = |source: &Vec<u32>| match self {
            Head::Language | Head::Encoder => source.clone(),
            Head::Sequence(labels) => vec![0; labels.target_length()],
            Head::Tokens(_) => vec![0; source.len()],
        };
        sources.iter().map(of).collect()
    }
}

/// The number of a target's entries that have a loss.
pub fn counted_labels(target: &[u32]) -> u64 {
    target.iter().filter(|label| **label != IGNORED_LABEL).count() as u64
}

/// Whether a parameter belongs to a classifier.
pub(crate) fn is_of_classifier(name: &str) -> bool {
    ["classif", "score."].iter().any(|start| name.starts_with(start))
}
