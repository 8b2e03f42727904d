//! The ways out of a file whose columns have no known meaning: settings for each meaning that they could have, and a header for a file that
//! lacks one.

use crate::error::Error;
use crate::forms::guesses;
use crate::meaning::{Meaning, quoted};

impl Error {
    /// What the columns of the file could mean, with the settings that say so.
    pub fn meanings(&self) -> Vec<Meaning> {
        match self {
            Self::Question { meanings, .. } => meanings.clone(),
            Self::Columns { missing, columns, .. } if ["prompt", "response"].contains(&missing.as_str()) => {
                guesses(columns)
            }
            _ => Vec::new(),
        }
    }

    /// The command that gives the file a header, if its first line looks like a row.
    pub fn header_command(&self) -> Option<String> {
        let Self::Columns { path, columns, delimiter: Some(delimiter), .. } = self else { return None };
        let is_value = |name: &String| name.split_whitespace().count() > 2 || name.parse::<f64>().is_ok();
        if !columns.iter().any(is_value) {
            return None;
        }
        let names: Vec<String> = match columns.len() {
            2 => vec!["prompt".to_owned(), "response".to_owned()],
            columns => (1..=columns).map(|number| format!("column{number}")).collect(),
        };
        let between = if *delimiter == '\t' { "\\t".to_owned() } else { delimiter.to_string() };
        let (header, file) = (names.join(&between), quoted(&path.to_string_lossy()));
        let ending = path.extension().unwrap_or_default().display();
        Some(format!("(printf '{header}\\n'; cat {file}) > with-header.{ending}"))
    }
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
        check("a|b|c", "prompt", &["--prompt-column a --response-column c"]);
        check("message_id|a|b|c|lang", "prompt", &["--prompt-column a --response-column c"]);
        let of_words = "train_low_mem train --set task.name=token-classification";
        check("id|tokens|pos_tags|ner_tags", "prompt", &[of_words]);
        check("a|b", "nosuch", &[]);
    }

    #[test]
    fn a_file_whose_first_line_is_a_row_gets_a_header() {
        let command = |names: &str, delimiter| columns(names, "prompt", delimiter).header_command();
        let expected = "(printf 'prompt,response\\n'; cat 'my rows.csv') > with-header.csv";
        assert_eq!(command("how many legs have cats|4", ',').as_deref(), Some(expected));
        let expected = "(printf 'column1\\tcolumn2\\tcolumn3\\n'; cat 'my rows.csv') > with-header.csv";
        assert_eq!(command("1|good|it is very good", '\t').as_deref(), Some(expected));
        assert_eq!(command("Text|Label", ','), None);
    }
}
