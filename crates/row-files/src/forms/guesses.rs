//! What columns without a known form could mean, for the hints of a refusal.

use super::{File, alone, direction, is_about, of_source};
use crate::columns::{Chosen, Instruction, Pairing};
use crate::meaning::{Meaning, Unpaired};
use crate::template::Template;

/// What columns without a known form could mean, most likely first.
pub(crate) fn guesses(columns: &[String]) -> Vec<Meaning> {
    const SHOWN: usize = 3;
    let usual: Vec<String> = columns.iter().map(|name| name.to_lowercase().replace(' ', "_")).collect();
    let place = |name: &str| usual.iter().position(|usual| usual == name);
    let pair = |source: usize, target: usize| Meaning {
        words: format!("`{}` is the source and `{}` the target", columns[source], columns[target]),
        settings: vec![("prompt_column", columns[source].clone()), ("response_column", columns[target].clone())],
    };
    let known = (File { columns: &usual }).known();
    if usual != columns && !matches!(known, Err(Unpaired::Missing(_))) {
        let named = |text: &str| {
            let names = usual.iter().zip(columns);
            names.fold(text.to_owned(), |text, (usual, name)| {
                text.replace(&format!("`{usual}`"), &format!("`{name}`"))
                    .replace(&format!("{{{usual}}}"), &format!("{{{name}}}"))
            })
        };
        let column = |name: String| place(&name).map_or(name, |at| columns[at].clone());
        let of_file = |mut meaning: Meaning| {
            meaning.words = named(&meaning.words);
            for (key, value) in &mut meaning.settings {
                *value = if key.ends_with("column") { column(std::mem::take(value)) } else { named(value) };
            }
            meaning
        };
        let meanings = match known {
            Ok(pairing) => meaning(pairing).into_iter().collect(),
            Err(Unpaired::Question(meanings)) => meanings,
            Err(_) => Vec::new(),
        };
        return meanings.into_iter().map(of_file).collect();
    }
    if let Ok(Pairing::Columns { prompt, response }) =
        Pairing::choose(&usual, &Chosen { is_of_words: true, ..Chosen::default() })
        && ["tokens", "words"].contains(&prompt.as_str())
    {
        let words = format!("`{prompt}` are words and `{response}` their labels");
        return vec![Meaning { words, settings: vec![("task.name", "token-classification".to_owned())] }];
    }
    // A wrong answer is no target, and neither is a name.
    let is_text = |at: &usize| match usual[*at].as_str() {
        "" | "rejected" | "negative" => false,
        "source" => true,
        name => !is_about(name),
    };
    let texts: Vec<usize> = (0..columns.len()).filter(is_text).collect();
    let others = |known: usize| texts.iter().copied().filter(move |&at| at != known).take(SHOWN);
    match (place("prompt"), place("response"), texts.as_slice()) {
        (Some(prompt), None, _) => others(prompt).map(|target| pair(prompt, target)).collect(),
        (None, Some(response), _) => others(response).map(|source| pair(source, response)).collect(),
        (None, None, &[first, second]) => {
            let is_language = |at: usize| usual[at].len() == 2 && usual[at].chars().all(char::is_alphabetic);
            let meaning = |from: usize, to: usize| match is_language(first) && is_language(second) {
                true => direction(&columns[from], &columns[to]),
                false => pair(from, to),
            };
            vec![meaning(first, second), meaning(second, first)]
        }
        (None, None, &[only]) => vec![alone(&columns[only])],
        // Of several columns without known names none is likelier than the others.
        _ => Vec::new(),
    }
}

/// A pairing as the settings that choose it. `None`: no settings do.
fn meaning(pairing: Pairing) -> Option<Meaning> {
    let (source, target) = match pairing {
        Pairing::Text { column } => return Some(alone(&column)),
        Pairing::Columns { prompt, response } => (format!("{{{prompt}}}"), response),
        Pairing::Instruction(Instruction { system, history: None, lines, output }) => {
            let names: Vec<String> = system.iter().chain(&lines).map(|name| format!("{{{name}}}")).collect();
            (names.join("\\n"), output)
        }
        Pairing::Templates { source, target, .. } => (source.to_string(), target.column()?.to_owned()),
        _ => return None,
    };
    let source = Template::parse(&source).ok()?;
    let words = match source.column() {
        Some(column) => format!("`{column}` is the source and `{target}` the target"),
        None => format!("the source is `{source}` and `{target}` the target"),
    };
    Some(Meaning { words, settings: of_source(&source, &target) })
}
