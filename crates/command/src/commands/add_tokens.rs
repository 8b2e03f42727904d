//! `train_low_mem add-tokens`: a model with more entries in its vocabulary.

use std::time::Instant;

use dataloader::Tokenizer;
use memory_policy::{Bytes, Probe, SystemProbe, counted, plural};
use serde_json::json;
use trainer::checkpoint::export_with_rows;

use crate::cli::vocabulary_flags::AddTokensArgs;
use crate::commands::convert::named_by_flags;
use crate::commands::trim_vocab::Whole;
use crate::config::paths;
use crate::data::data_files;
use crate::data::file_texts::FileTexts;
use crate::data::row_budget;
use crate::data::survival::Survival;
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::screen::report;

/// A file of tokens is not longer than this.
const LARGEST_FILE_BYTES: u64 = 16 << 20;
/// The most tokens that are shown.
const SHOWN: usize = 16;

/// Adds tokens to a model's vocabulary.
pub fn add_tokens(flags: &AddTokensArgs) -> Outcome<()> {
    let began = Instant::now();
    let Whole { model, config, tokenizer, vocabulary } = Whole::open(&flags.model, &flags.output, flags.result.force)?;
    let (mut tokens, mut known) = (Vec::new(), 0);
    for token in named(&flags.tokens)?.into_iter().chain(missing(flags, &tokenizer)?) {
        match vocabulary.holds(&token) || tokens.contains(&token) {
            true => known += 1,
            false => tokens.push(token),
        }
    }
    if tokens.is_empty() {
        let reason =
            if known > 0 { "all of them are there already" } else { "the tokenizer loses no character of these rows" };
        return Err(Failure::usage(format!("no token to add: {reason}")).hint("name others with `--tokens`"));
    }
    if known > 0 {
        report::note(&format!("{} left out: they are there already", plural(known, "token")));
    }
    let grown = vocabulary.grown(&tokenizer, &tokens)?;
    let rows = rows(&grown.entries, config.vocab_size);
    outputs::make_directory_of(&flags.output)?;
    let changed = export_with_rows(&model, &rows, &grown.files, &flags.output)?;
    let peak = SystemProbe::new().snapshot()?.peak_rss;
    let first = vocabulary.rows();
    let (output, seconds) = (flags.output.display().to_string(), began.elapsed().as_secs_f64());
    if flags.result.json {
        let ids = tokens.iter().zip(first..).map(|(token, id)| json!({"token": token, "id": id}));
        let json = json!({
            "output": output, "model": model.display().to_string(), "added": ids.collect::<Vec<_>>(),
            "table_rows": changed.rows, "parameters": changed.parameters, "bytes": changed.bytes,
            "seconds": seconds, "peak_rss_bytes": peak.0,
        });
        return report::result(&format!("{json}\n"));
    }
    let [rows_before, rows_now] = changed.rows.map(|rows| counted(rows as u64));
    let [before, now] = changed.parameters.map(counted);
    let shown: Vec<String> = tokens.iter().take(SHOWN).map(|token| format!("`{}`", token.escape_debug())).collect();
    let more = match tokens.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {} more", counted(more as u64)),
    };
    report::result(&format!(
        "{output}: {} from id {first} on: {}{more}\n  table rows  {rows_before} before, {rows_now} now\n  parameters  {before} \
         before, {now} now, {}\n",
        plural(tokens.len() as u64, "new token"),
        shown.join(", "),
        Bytes(changed.bytes[1])
    ))?;
    report::note(&format!(
        "{seconds:.1} s, peak {peak}; each new row is the mean of the old rows: train the model before use"
    ));
    Ok(())
}

/// The rows of the new table: an entry's row before, or `None` for a new one. Rows that no entry used stay behind them, if any are left.
fn rows(entries: &[Option<u32>], table: usize) -> Vec<Option<u32>> {
    let unused = (entries.len()..table).map(|row| Some(row as u32));
    entries.iter().copied().chain(unused).collect()
}

/// The tokens of the command line: as they are, or the lines of files.
fn named(typed: &[String]) -> Outcome<Vec<String>> {
    let mut tokens = Vec::new();
    for typed in typed {
        let path = paths::from_text(typed);
        // A pipe is no token: it is refused as what it is.
        if !path.exists() || path.is_dir() {
            tokens.push(unescaped(typed));
            continue;
        }
        let text = regular_file::read_to_string(&path, LARGEST_FILE_BYTES)
            .map_err(|error| Failure::io("read", &path, &error))?;
        tokens.extend(text.lines().filter(|line| !line.is_empty()).map(unescaped));
    }
    Ok(tokens)
}

/// A token with the characters that `\n`, `\t`, `\r` and `\\` stand for.
fn unescaped(typed: &str) -> String {
    let (mut token, mut letters) = (String::new(), typed.chars().peekable());
    while let Some(letter) = letters.next() {
        let meant = match (letter, letters.peek()) {
            ('\\', Some('n')) => Some('\n'),
            ('\\', Some('t')) => Some('\t'),
            ('\\', Some('r')) => Some('\r'),
            ('\\', Some('\\')) => Some('\\'),
            _ => None,
        };
        token.push(meant.unwrap_or(letter));
        if meant.is_some() {
            letters.next();
        }
    }
    token
}

/// The characters of rows that the tokenizer loses, the most frequent first.
fn missing(flags: &AddTokensArgs, tokenizer: &Tokenizer) -> Outcome<Vec<String>> {
    if flags.missing_in.is_empty() {
        return Ok(Vec::new());
    }
    let files = data_files::files("--missing-in", &flags.missing_in)?;
    let options = row_budget::options("add-tokens", flags.memory_budget.as_deref(), flags.text.options())?;
    let texts = FileTexts::open(&files, (&flags.columns.chosen(), &options), named_by_flags)?;
    let mut survival = Survival::default();
    texts.each(|texts| {
        for text in texts.iter().flat_map(|text| parts(text)) {
            survival.add(true, text, &tokenizer.decode(&tokenizer.encode(text)?)?);
        }
        Ok(())
    })?;
    let mut missing = Vec::new();
    for letter in survival.lost_characters() {
        let token = letter.to_string();
        // A blank is lost beside another blank alone, and a letter may be lost as a part of another.
        if letter != ' ' && tokenizer.decode(&tokenizer.encode(&token)?)? != token {
            missing.push(token);
        }
    }
    Ok(missing)
}

/// The parts of a text, each short enough to be decoded: a decoder takes some fifty times its text.
fn parts(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let most = text.floor_char_boundary(dataloader::KEPT_TEXT_BYTES);
        let blank = if most < text.len() { text[..most].rfind(char::is_whitespace) } else { None };
        let part;
        (part, text) = text.split_at(blank.filter(|&blank| blank > 0).unwrap_or(most));
        (!part.is_empty()).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_has_parts_that_end_before_blanks_and_together_are_the_text() {
        let most = dataloader::KEPT_TEXT_BYTES;
        for text in ["", "a b", &"\u{4f60}".repeat(most), &"word ".repeat(most), &format!(" {}", "a".repeat(2 * most))]
        {
            let parts: Vec<&str> = parts(text).collect();
            assert_eq!(parts.concat(), text);
            assert!(parts.iter().all(|part| (1..=most).contains(&part.len())));
            assert!(!text.contains("d ") || parts[1..].iter().all(|part| part.starts_with(' ')));
        }
    }

    #[test]
    fn unused_rows_come_first_and_then_the_table_grows() {
        let entries = [Some(0), Some(1), None, None];
        assert_eq!(rows(&entries, 2), entries);
        assert_eq!(rows(&entries, 5), [Some(0), Some(1), None, None, Some(4)]);
    }

    #[test]
    fn characters_that_a_shell_cannot_hold_are_written_with_a_backslash() {
        for (typed, token) in
            [("\\n", "\n"), ("a\\tb", "a\tb"), ("\\\\n", "\\n"), ("\\d", "\\d"), ("\\", "\\"), ("{", "{")]
        {
            assert_eq!(unescaped(typed), token, "{typed}");
        }
    }
}
