//! The known forms of rows: which columns of a file are the source and the target, by the names that people use.
//!
//! [`Pairing::choose`] is a pure function of the columns and the user's choice. It finds one meaning, or refuses: a column is missing, or the
//! columns have two meanings and the answer has a setting for each.

use crate::columns::{Chosen, Instruction, Pairing};
use crate::error::listed;
use crate::lists::RankedColumns;
use crate::meaning::{Meaning, Unpaired};
use crate::template::Template;

pub(crate) use guesses::guesses;

/// Sources and targets of known forms, in the order of search. The source is a template, whose columns the file has.
const FORMS: [(&str, &[&str]); 39] = [
    ("{prefix}: {input_text}", &["target_text"]),
    ("question: {question} context: {context}", ANSWERS),
    ("question: {question} passage: {passage}", &["answer", "label"]),
    ("question: {question} sentence: {sentence}", LABELS),
    ("sentence1: {sentence1} sentence2: {sentence2}", SCORES),
    ("question1: {question1} question2: {question2}", SCORES),
    // MRPC, as Microsoft publishes it.
    ("sentence1: {#1 String} sentence2: {#2 String}", &["Quality"]),
    ("hypothesis: {hypothesis} premise: {premise}", LABELS),
    ("{prompt}", &["completion"]),
    ("{source}", &["target"]),
    ("{question}", &["response"]),
    ("{question}", ANSWERS),
    ("{query}", &["response"]),
    ("{query}", ANSWERS),
    ("{problem}", &["solution"]),
    // Beside these, `inputs` and `targets` are tokens.
    ("{inputs_pretokenized}", &["targets_pretokenized"]),
    ("{inputs}", &["targets"]),
    ("{input}", &["output", "target"]),
    ("{concepts}", &["target"]),
    ("{input_text}", &["target_text"]),
    ("{document}", &["summary"]),
    ("{article}", &["highlights", "summary", "abstract"]),
    ("{dialogue}", &["summary"]),
    ("{text}", &["summary"]),
    ("{body}", &["summary"]),
    ("{content}", &["summary"]),
    ("{extract_text}", &["summary_text"]),
    ("{news_body}", &["news_title"]),
    ("{review_body}", &["review_title"]),
    ("{description}", &["abstract"]),
    ("{title}\n{content}", LABELS),
    ("{text}", TARGETS),
    ("{sentence}", LABELS),
    ("{content}", LABELS),
    ("{review}", LABELS),
    ("{tweet}", LABELS),
    ("{utterance}", LABELS),
    ("{comment}", LABELS),
    ("{headline}", LABELS),
];

/// Columns of answers to a question.
const ANSWERS: &[&str] = &["answers.text", "answer", "answers", "answer.value", "answerKey"];
/// Columns with the text of the class whose number is in `label`.
const TEXTS_OF_LABELS: [&str; 4] = ["label_text", "label_name", "label_desc", "label_des"];
/// Columns of classes. A text of the class comes before its number.
const LABELS: &[&str] =
    &["label_text", "label", "labels", "gold_label", "category", "target", "class", "intent", "sentiment"];
/// Classes or scores of pairs of sentences.
const SCORES: &[&str] =
    &["label_text", "label", "labels", "gold_label", "class", "is_duplicate", "score", "similarity_score"];
/// Targets beside a column `text`.
const TARGETS: &[&str] = &[
    "label_text",
    "label",
    "labels",
    "category",
    "target",
    "class",
    "intent",
    "sentiment",
    "emotion",
    "topic",
    "output",
    "response",
    "completion",
    "answer",
];
/// Columns of words, and of a label of each.
const WORDS: &[&str] = &["tokens", "words", "sequence", "text", "prompt"];
const LABELS_OF_WORDS: &[&str] = &["ner_tags", "tags", "labels", "pos_tags", "chunk_tags", "label", "response"];
/// Columns of texts and of those that belong to them, as sentence-transformers and data sets of retrieval name them.
const ANCHORS: &[&str] = &["query", "anchor", "sentence1", "question", "premise", "prompt"];
const POSITIVES: &[&str] =
    &["positive", "pos", "sentence2", "passage", "document", "answer", "entailment", "text", "response", "chosen"];
/// Columns of how near two texts are.
const SCORES_OF_PAIRS: &[&str] = &["score", "similarity_score", "similarity", "relatedness_score", "label"];
/// Columns of texts that are ranked for a query, and of how relevant they are.
const RANKED: &[&str] =
    &["passages", "documents", "texts", "passages.passage_text", "passage", "document", "text", "positive", "response"];
const RELEVANCE: &[&str] = &["labels", "relevances", "passages.is_selected", "relevance", "label", "score", "response"];
/// Columns that say which rows have the same query.
const QUERY_IDS: &[&str] = &["query_id", "qid"];
/// Columns of texts that a question is about, without which it is incomplete.
const CONTEXTS: [&str; 12] = [
    "article",
    "passage",
    "paragraph",
    "story",
    "support",
    "document",
    "hint",
    "background",
    "context",
    "context.sentences",
    "context.contexts",
    "passages.passage_text",
];
/// Columns of the options of a multiple choice: all of them, or one each with a number or a letter at its end.
const OPTIONS: [&str; 3] = ["options", "choices", "endings"];
const AN_OPTION: [&str; 6] = ["option", "choice", "ending", "sol", "distractor", "op"];
/// Columns about a text, beside which it still stands alone.
const ABOUT: [&str; 23] = [
    "id",
    "_id",
    "idx",
    "index",
    "uid",
    "uuid",
    "url",
    "uri",
    "timestamp",
    "date",
    "created",
    "meta",
    "metadata",
    "dump",
    "file_path",
    "lang",
    "language",
    "language_score",
    "token_count",
    "source",
    "license",
    "added",
    "__index_level_0__",
];

/// Whether a column of this name usually has classes or scores.
pub fn is_label_column(name: &str) -> bool {
    LABELS.contains(&name) || SCORES.contains(&name)
}

/// What the user's language flags and the columns of a translation are called.
const TRANSLATION: &str = "translation";

impl Pairing {
    /// The meaning of a file with these columns.
    ///
    /// # Errors
    /// A column is missing, or the columns have two meanings.
    pub fn choose(columns: &[String], chosen: &Chosen) -> Result<Self, Unpaired> {
        let file = File { columns };
        if chosen.is_of_vectors && chosen.source.is_none() && chosen.target.is_none() {
            let column = |named: &Option<String>, usual: &[&str]| match named {
                Some(name) => file.required(name),
                None => file.first(usual).ok_or_else(|| Unpaired::Missing(usual[0].to_owned())),
            };
            let [prompt, positive] = [(&chosen.prompt, ANCHORS), (&chosen.response, POSITIVES)];
            let (prompt, response) = (column(prompt.0, prompt.1)?, column(positive.0, positive.1)?);
            if chosen.has_labels {
                let label = column(&chosen.label, SCORES_OF_PAIRS)?;
                return Ok(Self::Labelled { prompt, completion: response, label, is_score: true });
            }
            return Ok(match &chosen.preference {
                Some([_, Some(negative)]) => {
                    let rejected = file.required(negative)?;
                    Self::Preference { prompt: Some(prompt), chosen: response, rejected, is_split: false }
                }
                _ => Self::Columns { prompt, response },
            });
        }
        if let Some(most) = chosen.ranked {
            return file.ranked(chosen, most);
        }
        if let Some([chosen_answer, rejected]) = &chosen.preference {
            let column = |named: &Option<String>, usual: &str| file.required(named.as_deref().unwrap_or(usual));
            return Ok(Self::Preference {
                prompt: file.prompt(chosen)?,
                chosen: column(chosen_answer, "chosen")?,
                rejected: column(rejected, "rejected")?,
                is_split: false,
            });
        }
        let is_named = chosen.response.is_some() || chosen.label.is_some();
        if chosen.has_labels && !is_named && !file.has("label") && file.has("chosen") && file.has("rejected") {
            let [of_chosen, rejected] = ["chosen", "rejected"].map(str::to_owned);
            return Ok(Self::Preference { prompt: file.prompt(chosen)?, chosen: of_chosen, rejected, is_split: true });
        }
        if chosen.has_labels {
            let usual = if file.has("completion") { "completion" } else { "response" };
            return Ok(Self::Labelled {
                prompt: file.required(chosen.prompt.as_deref().unwrap_or("prompt"))?,
                completion: file.required(chosen.response.as_deref().unwrap_or(usual))?,
                label: file.required(chosen.label.as_deref().unwrap_or("label"))?,
                is_score: false,
            });
        }
        if chosen.is_of_words {
            let column = |named: &Option<String>, usual: &[&str]| match named {
                Some(name) => file.required(name),
                None => file.first(usual).ok_or_else(|| Unpaired::Missing(usual[0].to_owned())),
            };
            let (prompt, response) = (column(&chosen.prompt, WORDS)?, column(&chosen.response, LABELS_OF_WORDS)?);
            return Ok(Self::Columns { prompt, response });
        }
        if chosen.is_text {
            return file.required(chosen.text.as_deref().unwrap_or("text")).map(|column| Self::Text { column });
        }
        if chosen.source_lang.is_some() || chosen.target_lang.is_some() {
            return file.translation(chosen);
        }
        let [prompt, response] = [&chosen.prompt, &chosen.response];
        if prompt.is_some() || response.is_some() || chosen.source.is_some() || chosen.target.is_some() {
            return file.named(chosen);
        }
        if let Some(column) = &chosen.text {
            return file.text_alone(column);
        }
        file.known()
    }
}

/// The columns of a file.
struct File<'a> {
    columns: &'a [String],
}

impl File<'_> {
    fn has(&self, name: &str) -> bool {
        self.columns.iter().any(|column| column == name)
    }

    fn required(&self, name: &str) -> Result<String, Unpaired> {
        if self.has(name) { Ok(name.to_owned()) } else { Err(Unpaired::Missing(name.to_owned())) }
    }

    /// The column of the prompts of preferences; `None`: answers begin with their prompt.
    fn prompt(&self, chosen: &Chosen) -> Result<Option<String>, Unpaired> {
        match &chosen.prompt {
            Some(name) => self.required(name).map(Some),
            None => Ok(self.first(&["prompt"])),
        }
    }

    /// The first of these columns that the file has.
    fn first(&self, names: &[&str]) -> Option<String> {
        names.iter().find(|name| self.has(name)).map(|name| (*name).to_owned())
    }

    /// Whether a column may hold texts: it has no members.
    fn has_text(&self, name: &str) -> bool {
        let is_member = |column: &String| column.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
        self.has(name) && !self.columns.iter().any(is_member)
    }

    /// The first of these columns that may hold texts.
    fn first_text(&self, names: &[&str]) -> Option<String> {
        names.iter().find(|name| self.has_text(name)).map(|name| (*name).to_owned())
    }

    /// The columns without which a question is incomplete, those before it and those after it.
    fn of_question(&self, source: &Template) -> [Vec<&str>; 2] {
        let others = self.columns.iter().map(String::as_str).filter(|name| source.columns().all(|used| used != *name));
        let is_letter = |name: &str| matches!(name, "A" | "B" | "C" | "D" | "a" | "b" | "c" | "d");
        let has_letters = ["a", "b", "c"].iter().all(|letter| self.has(letter) || self.has(&letter.to_uppercase()));
        let is_option = |name: &str| {
            let one = AN_OPTION.iter().find_map(|option| name.to_lowercase().strip_prefix(option).map(str::to_owned));
            let end = one.as_deref().map(|end| end.trim_start_matches(['_', ' ']));
            let is_one = end.is_some_and(|end| end.len() == 1 && end.chars().all(char::is_alphanumeric));
            OPTIONS.contains(&name.strip_suffix(".text").unwrap_or(name)) && self.has_text(name)
                || is_one && !OPTIONS.contains(&name)
                || has_letters && is_letter(name)
        };
        let is_of_question = source.columns().any(|column| ["question", "query"].contains(&column));
        let is_context = |name: &str| is_of_question && CONTEXTS.contains(&name) && self.has_text(name);
        let (options, contexts) =
            (others.clone().filter(|name| is_option(name)), others.filter(|name| is_context(name)));
        [contexts.collect(), options.collect()]
    }

    /// Lists of texts. Without a template, the source is that of monoT5.
    fn ranked(&self, chosen: &Chosen, most: usize) -> Result<Pairing, Unpaired> {
        let column = |named: &Option<String>, usual: &[&str]| match named {
            Some(name) => self.required(name),
            None => self.first(usual).ok_or_else(|| Unpaired::Missing(usual[0].to_owned())),
        };
        let source = match &chosen.source {
            Some(template) => template.clone(),
            None => {
                let (query, text) = (column(&chosen.prompt, ANCHORS)?, column(&chosen.response, RANKED)?);
                format!("Query: {{{query}}} Document: {{{text}}} Relevant:")
            }
        };
        let source = Template::parse(&source).map_err(|reason| Unpaired::Template("source_template", reason))?;
        source.columns().try_for_each(|column| self.required(column).map(drop))?;
        let first = source.columns().next().unwrap_or_default().to_owned();
        let query = match &chosen.query {
            Some(name) => self.required(name)?,
            None => self.first(QUERY_IDS).unwrap_or(first),
        };
        Ok(Pairing::Ranked(RankedColumns { source, label: column(&chosen.label, RELEVANCE)?, query, most }))
    }

    /// The columns that the user named, as columns or as templates. If only one side is named, the other is looked for.
    fn named(&self, chosen: &Chosen) -> Result<Pairing, Unpaired> {
        let template = |key: &'static str, text: &Option<String>| {
            let parse = |text: &String| Template::parse(text).map_err(|reason| Unpaired::Template(key, reason));
            text.as_ref().map(parse).transpose()
        };
        let of_column = |name: &Option<String>| name.as_deref().map(Template::of_column);
        let source = template("source_template", &chosen.source)?.or_else(|| of_column(&chosen.prompt));
        let target = template("target_template", &chosen.target)?.or_else(|| of_column(&chosen.response));
        for column in source.iter().flat_map(Template::columns) {
            self.required(column)?;
        }
        let target = match (&source, target) {
            (_, Some(target)) => target,
            (Some(source), None) if !self.has("response") => {
                let used: Vec<&str> = source.columns().collect();
                let labels: Vec<&str> = TARGETS.iter().copied().filter(|name| !used.contains(name)).collect();
                Template::of_column(&self.only(&labels, &|name| vec![("response_column", name.to_owned())])?)
            }
            (_, None) => Template::of_column("response"),
        };
        let source = source.unwrap_or_else(|| Template::of_column("prompt"));
        for column in source.columns().chain(target.columns()) {
            self.required(column)?;
        }
        Ok(Pairing::of_templates(source, target, false))
    }

    /// The only one of these columns. `label` is a number where another column has its text.
    fn only(&self, names: &[&str], settings: &dyn Fn(&str) -> Vec<(&'static str, String)>) -> Result<String, Unpaired> {
        let text = TEXTS_OF_LABELS.into_iter().find(|text| names.contains(&"label") && self.has(text));
        let usual = names.iter().copied().filter(|name| text.is_none() || !["label", "label_text"].contains(name));
        let found: Vec<&str> = text.into_iter().chain(usual.filter(|name| self.has(name))).collect();
        match found.as_slice() {
            [] => Err(Unpaired::Missing("response".to_owned())),
            [one] => Ok((*one).to_owned()),
            several => Err(Unpaired::Question(
                several
                    .iter()
                    .map(|name| Meaning { words: format!("the target is `{name}`"), settings: settings(name) })
                    .collect(),
            )),
        }
    }

    /// A text column that was named, without an objective: pretraining, if no other column could be a target.
    fn text_alone(&self, column: &str) -> Result<Pairing, Unpaired> {
        let column = self.required(column)?;
        match self.others(&column).as_slice() {
            [] => Ok(Pairing::Text { column }),
            others => Err(pairs_or_text(&column, others)),
        }
    }

    /// Columns beside a text that do more than describe it.
    fn others(&self, text: &str) -> Vec<&str> {
        // A page of the web has a title, and a score of its quality; beside another text these can be targets.
        let is_of_page = |name: &str| ["title", "score", "int_score"].contains(&name) && self.has("url");
        let is_about = |name: &str| is_about(name) || is_of_page(name);
        let columns = self.columns.iter().map(String::as_str);
        columns
            .filter(|name| *name != text && !name.trim().is_empty() && !is_about(name) && self.has_text(name))
            .collect()
    }

    /// One of the known forms.
    fn known(&self) -> Result<Pairing, Unpaired> {
        if self.has("prompt") && self.has("response") {
            return Ok(self.with_context(vec!["prompt".to_owned()], "response".to_owned()));
        }
        if let Some(column) = self.first(&["messages", "conversations", "conversation"]) {
            return Ok(Pairing::Chat { column, system: self.system() });
        }
        if let (true, Some(output)) = (self.has("instruction"), self.first(&["output", "response", "answer"])) {
            let lines = ["instruction", "input", "context"].into_iter().filter(|name| self.has(name));
            return Ok(self.with_context(lines.map(str::to_owned).collect(), output));
        }
        let languages: Vec<&str> =
            self.columns.iter().filter_map(|name| name.strip_prefix(TRANSLATION)?.strip_prefix('.')).collect();
        if !languages.is_empty() {
            return Err(directions(&languages));
        }
        for (source, targets) in FORMS {
            let template = Template::parse(source).expect("a template of the table");
            if !template.columns().all(|column| self.has_text(column)) || self.first_text(targets).is_none() {
                continue;
            }
            return self.form(&template, targets);
        }
        if self.has("text") {
            return self.text_alone("text");
        }
        Err(Unpaired::Missing(if self.has("prompt") { "response" } else { "prompt" }.to_owned()))
    }

    /// A form of the table, of which the file has the columns.
    fn form(&self, source: &Template, targets: &[&str]) -> Result<Pairing, Unpaired> {
        let [contexts, options] = self.of_question(source);
        let of = |names: &[&str]| names.iter().map(|name| format!("{{{name}}}")).collect::<Vec<_>>();
        let whole = [of(&contexts), vec![source.to_string()], of(&options)].concat().join("\\n");
        let whole = Template::parse(&whole).expect("columns and line breaks");
        let setting = |name: &str| of_source(&whole, name);
        if targets == ["completion"] && self.has("label") {
            return Err(Unpaired::Question(vec![
                Meaning {
                    words: "`label` says which answers are desirable".to_owned(),
                    // Its reference is the model without the adapter.
                    settings: vec![("lora.rank", "16".to_owned()), ("preference.loss", "kto".to_owned())],
                },
                Meaning {
                    words: "every answer is a target, and `label` is left out".to_owned(),
                    settings: setting("completion"),
                },
            ]));
        }
        let target = match targets {
            ANSWERS if self.has("label") => self.only(&["answer", "answers", "label"], &setting)?,
            ANSWERS => self.first_text(ANSWERS).unwrap_or_default(),
            targets => self.only(targets, &setting)?,
        };
        if whole != *source {
            let names: Vec<String> = contexts.iter().chain(&options).map(|name| format!("`{name}`")).collect();
            let (belong, are) = if names.len() == 1 { ("belongs", "is") } else { ("belong", "are") };
            let names = names.join(" and ");
            return Err(Unpaired::Question(vec![
                Meaning { words: format!("{names} {belong} to the question"), settings: setting(&target) },
                Meaning { words: format!("{names} {are} left out"), settings: of_source(source, &target) },
            ]));
        }
        match source.column() {
            Some(column) => Ok(self.with_context(vec![column.to_owned()], target)),
            None => Ok(Pairing::of_templates(source.clone(), Template::of_column(&target), true)),
        }
    }

    /// A column with the system's message.
    fn system(&self) -> Option<String> {
        self.first(&["system", "system_prompt"])
    }

    /// Lines of a prompt and a response, after the system's message and the earlier turns, if the file has them.
    fn with_context(&self, lines: Vec<String>, output: String) -> Pairing {
        match (lines.as_slice(), self.system(), self.first(&["history"])) {
            ([prompt], None, None) => Pairing::Columns { prompt: prompt.clone(), response: output },
            (_, system, history) => Pairing::Instruction(Instruction { system, history, lines, output }),
        }
    }

    /// Two languages of a translation: `translation.en` or `en`.
    fn translation(&self, chosen: &Chosen) -> Result<Pairing, Unpaired> {
        let column = |language: &Option<String>, other: &'static str| {
            let Some(language) = language else { return Err(Unpaired::Template(other, "is not set".to_owned())) };
            // `de_DE` stands for `de`, as in the script run_translation of transformers.
            let short = language.split('_').next().unwrap_or(language);
            let nested = [language, short].map(|name| format!("{TRANSLATION}.{name}"));
            let names = [nested[0].as_str(), nested[1].as_str(), language, short];
            self.first(&names).ok_or_else(|| Unpaired::Missing(nested[1].clone()))
        };
        let prompt = column(&chosen.source_lang, "source_lang")?;
        Ok(Pairing::Columns { prompt, response: column(&chosen.target_lang, "target_lang")? })
    }
}

/// Whether a column of this name says something about a row, and is no text of it.
fn is_about(name: &str) -> bool {
    let root = name.split('.').next().unwrap_or(name);
    ABOUT.contains(&root) || root.ends_with("_id") || name.starts_with("Unnamed")
}

/// The settings that choose a source and the column of the target.
pub(crate) fn of_source(source: &Template, target: &str) -> Vec<(&'static str, String)> {
    let source = match source.column() {
        Some(column) => ("prompt_column", column.to_owned()),
        None => ("source_template", source.to_string()),
    };
    vec![source, ("response_column", target.to_owned())]
}

/// The meaning of a text alone.
fn alone(text: &str) -> Meaning {
    Meaning {
        words: format!("pretraining on `{text}` alone, by span corruption"),
        settings: vec![("objective", "span-corruption".to_owned()), ("text_column", text.to_owned())],
    }
}

/// The meaning of a translation.
fn direction(from: &str, to: &str) -> Meaning {
    Meaning {
        words: format!("from `{from}` to `{to}`"),
        settings: vec![("source_lang", from.to_owned()), ("target_lang", to.to_owned())],
    }
}

/// The question whether a text stands alone, or is the source of another column.
fn pairs_or_text(text: &str, others: &[&str]) -> Unpaired {
    const SHOWN: usize = 3;
    let pair = |other: &&str| Meaning {
        words: match other.contains("score") {
            true => format!(
                "pairs: `{text}` is the source and the number in `{other}` the target, also for `task.name=regression`"
            ),
            false => format!("pairs: `{text}` is the source and `{other}` the target"),
        },
        settings: vec![("prompt_column", text.to_owned()), ("response_column", (*other).to_owned())],
    };
    Unpaired::Question(others.iter().take(SHOWN).map(pair).chain([alone(text)]).collect())
}

/// The question which language is the source, with each answer where languages are few.
fn directions(languages: &[&str]) -> Unpaired {
    let pairs = || languages.iter().flat_map(|from| languages.iter().map(move |to| (*from, *to)));
    match languages {
        [] | [_] => Unpaired::Missing(format!("{TRANSLATION} of a second language")),
        [_, _] | [_, _, _] => {
            Unpaired::Question(pairs().filter(|(from, to)| from != to).map(|(from, to)| direction(from, to)).collect())
        }
        many => {
            let names: Vec<String> = many.iter().map(|name| (*name).to_owned()).collect();
            let reason = format!("expected one of the {} languages of `{TRANSLATION}`: {}", many.len(), listed(&names));
            Unpaired::Template("source_lang", reason)
        }
    }
}

mod guesses;

#[cfg(test)]
mod tests;
