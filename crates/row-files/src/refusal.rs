//! The ways out of a file whose columns have no known meaning: settings for each meaning that they could have, and a header for a file that
//! lacks one.

use crate::error::{Error, is_of_messages};
use crate::forms::{guesses, of_source};
use crate::meaning::{Meaning, quoted};
use crate::template::Template;

impl Error {
    /// What the columns of the file could mean, with the settings that say so.
    pub fn meanings(&self) -> Vec<Meaning> {
        match self {
            Self::Question { meanings, .. } => meanings.clone(),
            Self::Columns { .. } if self.layout_command().is_some() || self.header_command().is_some() => Vec::new(),
            Self::Columns { missing, columns, .. } if ["prompt", "response"].contains(&missing.as_str()) => {
                guesses(columns)
            }
            _ => Vec::new(),
        }
    }

    /// The command that makes rows of a layout in which a row of the file is more, or less, than a sample: that of SQuAD and of OpenAssistant.
    pub(crate) fn layout_command(&self) -> Option<String> {
        let Self::Columns { path, columns, .. } = self else { return None };
        let has = |name: &str| columns.iter().any(|column| column == name);
        let (what, command) = if has("paragraphs") {
            (
                "a row of SQuAD's own layout has many questions; a row for each",
                "jq -c '.data[].paragraphs[] | .context as $c | .qas[] | {context: $c, question, answer: (.answers[0].text // \"\")}'",
            )
        } else if has("prompt.replies") {
            (
                "a row is a tree of messages; a row for each question and its first answer",
                "jq -c '.prompt | recurse(.replies[]) | select(.role == \"prompter\" and .replies[0]) | {prompt: .text, response: .replies[0].text}'",
            )
        } else if is_of_messages(columns) {
            (
                "a row is one message of a tree; a row for each answer and what it answers",
                "jq -sc '(map({(.message_id): .text}) | add) as $texts | .[] | select(.role == \"assistant\") | {prompt: $texts[.parent_id], response: .text}'",
            )
        } else {
            return None;
        };
        let file = quoted(&path.to_string_lossy());
        let is_parquet = path.extension().is_some_and(|extension| extension == "parquet");
        let rows = format!(
            "python3 -c 'import pandas, sys; pandas.read_parquet(sys.argv[1]).to_json(\"/dev/stdout\", orient=\"records\", lines=True)' {file}"
        );
        Some(match is_parquet {
            true => format!("{what}: `{rows} | {command} > rows.jsonl`"),
            false => format!("{what}: `{command} {file} > rows.jsonl`"),
        })
    }

    /// The command that gives the file a header, if its first line looks like a row.
    pub fn header_command(&self) -> Option<String> {
        let Self::Columns { path, columns, delimiter: Some(delimiter), .. } = self else { return None };
        let is_value = |name: &String| name.split_whitespace().count() > 2 || name.parse::<f64>().is_ok();
        if !columns.iter().any(is_value) {
            return None;
        }
        let names = header(columns);
        let between = if *delimiter == '\t' { "\\t".to_owned() } else { delimiter.to_string() };
        let (header, file) = (names.join(&between), quoted(&path.to_string_lossy()));
        let ending = path.extension().unwrap_or_default().display();
        Some(format!("(printf '{header}\\n'; cat {file}) > with-header.{ending}"))
    }

    /// What the columns could mean once the file has that header, as arguments of a command: each in words, and with its settings.
    pub fn header_meanings(&self) -> Vec<String> {
        let Self::Columns { path, columns, .. } = self else { return Vec::new() };
        if self.header_command().is_none() || header(columns).iter().all(|name| name != "title") {
            return Vec::new();
        }
        let file = format!("--data with-header.{}", path.extension().unwrap_or_default().display());
        [("`title` and `text` are the source", "{title}\\n{text}"), ("`text` alone is the source", "{text}")]
            .into_iter()
            .filter_map(|(words, source)| {
                let meaning =
                    Meaning { words: words.to_owned(), settings: of_source(&Template::parse(source).ok()?, "label") };
                Some(format!("then {words} and `label` the target: `{file} {}`", meaning.assignments()))
            })
            .collect()
    }
}

/// Names for the columns of a file without a header, whose first row this is. One number beside texts is a label, as in AG News, DBpedia and
/// other files of Torchtext.
fn header(row: &[String]) -> Vec<String> {
    let is_number = |text: &String| text.trim().parse::<f64>().is_ok();
    let texts: &[&str] = match (row.len(), row.iter().filter(|text| is_number(text)).count()) {
        (2, 0) => &["prompt", "response"],
        (2, 1) => &["text"],
        (3, 1) => &["title", "text"],
        (columns, _) => return (1..=columns).map(|number| format!("column{number}")).collect(),
    };
    let mut texts = texts.iter();
    row.iter().map(|text| if is_number(text) { "label" } else { texts.next().unwrap_or(&"text") }.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn columns(columns: &str, missing: &str, delimiter: char) -> Error {
        let columns = columns.split('|').map(str::to_owned).collect();
        Error::Columns {
            path: PathBuf::from("my rows.csv"),
            missing: missing.to_owned(),
            columns,
            delimiter: Some(delimiter),
        }
    }

    #[test]
    fn a_layout_whose_rows_are_no_samples_has_the_command_that_makes_rows_and_no_guess() {
        for (names, words) in [
            ("title|paragraphs", "`jq -c '.data[].paragraphs[]"),
            ("message_tree_id|prompt|prompt.replies", "`jq -c '.prompt | recurse(.replies[])"),
            ("message_id|parent_id|text|role", "`jq -sc '(map("),
        ] {
            let error = columns(names, "response", ',');
            let hint = error.hint().unwrap_or_default();
            assert!(hint.contains(words) && hint.ends_with("'my rows.csv' > rows.jsonl`"), "{hint}");
            assert!(error.meanings().is_empty(), "{names}");
        }
    }

    #[test]
    fn each_meaning_of_unknown_columns_has_its_settings() {
        let check = |names: &str, missing: &str, expected: &[&str]| {
            let flags: Vec<String> = columns(names, missing, ',').meanings().iter().map(Meaning::flags).collect();
            assert_eq!(flags, expected, "{names}");
        };
        check("Text|Label", "prompt", &["--prompt-column Text --response-column Label"]);
        check("id|Question|Answer", "prompt", &["--prompt-column Question --response-column Answer"]);
        check("en|fr", "prompt", &["--source-lang en --target-lang fr", "--source-lang fr --target-lang en"]);
        check(
            "src|tgt",
            "prompt",
            &["--prompt-column src --response-column tgt", "--prompt-column tgt --response-column src"],
        );
        check("prompt|chosen|rejected", "response", &["--prompt-column prompt --response-column chosen"]);
        check("chosen|rejected", "prompt", &["--text-column chosen"]);
        check("only", "prompt", &["--text-column only"]);
        check(
            "v1|v2",
            "prompt",
            &["--prompt-column v1 --response-column v2", "--prompt-column v2 --response-column v1"],
        );
        check("a|b|c", "prompt", &[]);
        check("goal|sol1|sol2|label", "prompt", &[]);
        check(
            "Question|A|B|C|D|Answer",
            "prompt",
            &[
                "--source-template '{Question}\\n{A}\\n{B}\\n{C}\\n{D}' --response-column Answer",
                "--prompt-column Question --response-column Answer",
            ],
        );
        check(
            "Sentence1|Sentence2|Label",
            "prompt",
            &["--source-template 'sentence1: {Sentence1} sentence2: {Sentence2}' --response-column Label"],
        );
        check(
            "Instruction|Input|Output",
            "prompt",
            &["--source-template '{Instruction}\\n{Input}' --response-column Output"],
        );
        let of_words = "train_low_mem train --set task.name=token-classification";
        check("id|tokens|pos_tags|ner_tags", "prompt", &[of_words]);
        check("a|b", "nosuch", &[]);
    }

    #[test]
    fn a_file_whose_first_line_is_a_row_gets_a_header() {
        let command = |names: &str, delimiter| columns(names, "prompt", delimiter).header_command();
        assert!(
            columns("3|Wall St.|Reuters - Short", "prompt", ',').meanings().is_empty(),
            "its first row names no columns"
        );
        let expected = "(printf 'prompt,response\\n'; cat 'my rows.csv') > with-header.csv";
        assert_eq!(command("how many legs have cats|four legs", ',').as_deref(), Some(expected));
        let expected = "(printf 'label\\ttitle\\ttext\\n'; cat 'my rows.csv') > with-header.csv";
        assert_eq!(command("1|good|it is very good", '\t').as_deref(), Some(expected));
        let names = |row: &str| header(&row.split('|').map(str::to_owned).collect::<Vec<_>>()).join(" ");
        assert_eq!(names("it is good|4"), "text label");
        assert_eq!(names("0|it is good"), "label text");
        assert_eq!(names("1|2|it is good"), "column1 column2 column3");
        assert_eq!(names("a b c|d|e|f"), "column1 column2 column3 column4");
        let expected = [
            "then `title` and `text` are the source and `label` the target: `--data with-header.csv --set \
             'data.source_template={title}\\n{text}' --set data.response_column=label`",
            "then `text` alone is the source and `label` the target: `--data with-header.csv --set data.prompt_column=text \
             --set data.response_column=label`",
        ];
        assert_eq!(columns("3|Wall St. and more|Reuters", "prompt", ',').header_meanings(), expected);
        assert!(columns("how many legs have cats|4", "prompt", ',').header_meanings().is_empty());
        assert_eq!(command("Text|Label", ','), None);
    }
}
