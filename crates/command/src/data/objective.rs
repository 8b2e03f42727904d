//! The objective of a task: the columns that the loader reads, and its words on the first screen.

use dataloader::{Denoiser, Noise, Objective, SpanCorruption, Tokenizer};
use memory_policy::plural;

use crate::config::task::{Response, Task};
use crate::config::{self, Config};
use crate::data::labels;
use crate::failure::{Failure, Outcome};

/// The objective of `task` for rows of texts, or else of pairs with these labels. `in_place`: the columns of files that are not converted;
/// converted files have this program's columns.
pub fn resolve(
    config: &Config,
    (task, is_text): (Task, bool),
    labels: Vec<String>,
    in_place: Option<Vec<String>>,
    tokenizer: &Tokenizer,
) -> Outcome<Objective> {
    let (data, chosen) = (&config.data, &config.data.chosen);
    if is_text {
        let [text_column] = columns(in_place, ["text"]);
        let spans = SpanCorruption { noise_density: data.noise_density, mean_span_tokens: data.mean_span_tokens };
        return Ok(match data.denoisers.as_slice() {
            [] => Objective::SpanCorruption { text_column, spans },
            denoisers => Objective::Denoising { text_column, denoisers: denoisers.iter().map(denoiser).collect() },
        });
    }
    if task == Task::Ranking {
        let [texts_column, labels_column] = columns(in_place, ["texts", "labels"]);
        let most = config.ranking.as_ref().map_or(1, |of| of.list_size);
        return Ok(Objective::Lists { texts_column, labels_column, answers: answers(config, tokenizer)?, most });
    }
    if chosen.preference.is_some() {
        let [prompt_column, chosen_column, rejected_column] = columns(in_place, ["prompt", "chosen", "rejected"]);
        return Ok(Objective::Preference { prompt_column, chosen_column, rejected_column });
    }
    if chosen.has_labels {
        let [prompt_column, completion_column, label_column] = columns(in_place, ["prompt", "completion", "label"]);
        let are_scores = task == Task::Embedding;
        return Ok(Objective::Labelled { prompt_column, completion_column, label_column, are_scores });
    }
    let [prompt_column, response_column] = columns(in_place, ["prompt", "response"]);
    Ok(match task.response() {
        Response::Text => Objective::TextToText { prompt_column, response_column },
        Response::Number | Response::Label | Response::LabelSet => {
            let are_sets = task.response() == Response::LabelSet;
            Objective::Labels { prompt_column, label_column: response_column, labels, are_sets }
        }
        Response::LabelsOfWords => {
            Objective::LabelsOfWords { words_column: prompt_column, labels_column: response_column, labels }
        }
    })
}

fn columns<const N: usize>(in_place: Option<Vec<String>>, own: [&str; N]) -> [String; N] {
    let mut in_place = in_place.map(Vec::into_iter);
    own.map(|own| match &mut in_place {
        Some(columns) => columns.next().unwrap_or_default(),
        None => own.to_owned(),
    })
}

/// A denoiser of the config, as the loader's type.
fn denoiser(of: &config::Denoiser) -> Denoiser {
    let noise = match of.noise {
        config::Noise::SpanCorruption { noise_density, mean_span_tokens } => {
            Noise::SpanCorruption(SpanCorruption { noise_density, mean_span_tokens })
        }
        config::Noise::PrefixLm { noise_density } => Noise::PrefixLm { noise_density },
    };
    Denoiser { noise, prefix: of.prefix.clone(), weight: of.weight }
}

/// The targets of relevant texts and of others.
fn answers(config: &Config, tokenizer: &Tokenizer) -> Outcome<[u32; 2]> {
    let of = config.ranking.iter().flat_map(|of| &of.answers);
    let tokens = of.map(|answer| labels::token(tokenizer, answer, "ranking.answers")).collect::<Outcome<Vec<_>>>()?;
    match tokens.as_slice() {
        [first, .., last] => Ok([*first, *last]),
        &[one] => Ok([one; 2]),
        [] => Err(Failure::internal("a ranking without answers")),
    }
}

/// What is made of the rows, by their columns.
pub fn in_words(objective: &Objective, task: Task, config: &Config) -> String {
    match objective {
        Objective::TextToText { prompt_column, response_column } if task == Task::Embedding => {
            format!("vectors of `{prompt_column}` near those of `{response_column}`")
        }
        Objective::Preference { prompt_column, chosen_column, rejected_column } if task == Task::Embedding => {
            format!(
                "vectors of `{prompt_column}` near those of `{chosen_column}`, and far from those of `{rejected_column}`"
            )
        }
        Objective::TextToText { prompt_column, response_column } => format!("`{prompt_column}` to `{response_column}`"),
        Objective::Preference { prompt_column, chosen_column, rejected_column } => {
            format!("`{prompt_column}` to `{chosen_column}` over `{rejected_column}`")
        }
        Objective::Labelled { prompt_column, completion_column, label_column, are_scores: true } => {
            format!("vectors of `{prompt_column}` as near those of `{completion_column}` as `{label_column}` says")
        }
        Objective::Labelled { prompt_column, completion_column, label_column, .. } => {
            format!("`{prompt_column}` to `{completion_column}`, where `{label_column}` says how good it is")
        }
        Objective::Labels { prompt_column, label_column, labels, are_sets } => match labels.len() {
            0 => format!("`{prompt_column}` to the number in `{label_column}`"),
            count => {
                let which = if *are_sets { "any of the" } else { "the" };
                format!("`{prompt_column}` to {which} {count} labels of `{label_column}`{}", without_names(labels))
            }
        },
        Objective::LabelsOfWords { words_column, labels_column, labels } => {
            let spans = if without_names(labels).is_empty() { "" } else { ", and spans are not scored" };
            let (count, numbers) = (labels.len(), without_names(labels));
            format!("words of `{words_column}` to the {count} labels of `{labels_column}`{numbers}{spans}")
        }
        Objective::Lists { most, .. } => {
            let loss = config.ranking.as_ref().map_or("", |of| of.of.loss.name());
            format!("lists of texts ranked by `{loss}`, at most {most} texts each")
        }
        Objective::SpanCorruption { text_column, .. } => format!("span corruption of `{text_column}`"),
        Objective::Denoising { text_column, denoisers } => match denoisers.as_slice() {
            [Denoiser { noise: Noise::PrefixLm { .. }, .. }] => format!("the beginning of `{text_column}` to its end"),
            _ => format!("`{text_column}` by {}", plural(denoisers.len() as u64, "denoiser")),
        },
    }
}

/// The remark on labels that are numbers of classes, such as CoNLL's tags in a file that does not name them.
fn without_names(labels: &[String]) -> &'static str {
    let are_numbers = labels.iter().all(|label| label.parse::<i64>().is_ok());
    if are_numbers { ", which are numbers: the file has no names for them" } else { "" }
}
