//! Lengths of prompts and responses, for `convert` and `inspect`: as a table, a histogram and JSON.

use std::fmt::Write;
use std::path::Path;

use dataloader::Tokenizer;
use memory_policy::counted;
use row_files::Lengths;
use serde_json::{Value, json};

use crate::cli::row_flags::LengthFlags;
use crate::data::survival::Survival;
use crate::failure::Outcome;
use crate::model::model_directory;

/// Bars of a histogram.
const BARS: u64 = 8;
/// The most tokens that are counted in a text; a longer text counts as this long.
const MAX_TOKENS: usize = 1 << 16;

/// Lengths of texts in characters, and with a tokenizer in tokens.
pub struct TextLengths {
    tokenizer: Option<Tokenizer>,
    of: Vec<TextStats>,
    survival: Survival,
}

struct TextStats {
    name: &'static str,
    characters: Lengths,
    tokens: Lengths,
}

impl TextLengths {
    /// Empty counts. With `is_text` there is one text a row, otherwise a prompt and a response.
    pub fn new(flags: &LengthFlags, is_text: bool) -> Outcome<Self> {
        let tokenizer = flags.tokenizer.as_deref().map(tokenizer).transpose()?;
        let of = |name, most| TextStats { name, characters: Lengths::new(u64::MAX), tokens: Lengths::new(most) };
        let of = match is_text {
            true => vec![of("text", u64::MAX)],
            false => vec![of("prompt", flags.max_source_tokens), of("response", flags.max_target_tokens)],
        };
        Ok(Self { tokenizer, of, survival: Survival::default() })
    }

    /// Counts the texts of a row.
    pub fn add(&mut self, texts: &[&str]) -> Outcome<()> {
        for (number, (text, of)) in texts.iter().zip(&mut self.of).enumerate() {
            of.characters.add(text.chars().count() as u64);
            if let Some(tokenizer) = &self.tokenizer {
                let tokens = tokenizer.encode_start(text, MAX_TOKENS)?.len() + tokenizer.start_ids().len();
                // The end of the sequence is counted, too.
                of.tokens.add(tokens as u64 + 1);
                // Only a beginning: an endless text shows its characters early.
                let beginning = &text[..text.floor_char_boundary(dataloader::KEPT_TEXT_BYTES)];
                let back = tokenizer.decode(&tokenizer.encode(beginning)?)?;
                self.survival.add(number + 1 == texts.len(), beginning, &back);
            }
        }
        Ok(())
    }

    /// The lengths as lines of text.
    pub fn in_words(&self) -> String {
        if self.of.iter().all(|of| of.characters.texts == 0) {
            return String::new();
        }
        let mut text = format!(
            "\n  {:<22}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}\n",
            "length", "mean", "p50", "p90", "p95", "p99", "longest"
        );
        for of in &self.of {
            row(&mut text, &format!("{} characters", of.name), &of.characters);
            if self.tokenizer.is_some() {
                row(&mut text, &format!("{} tokens", of.name), &of.tokens);
            }
        }
        for of in self.of.iter().filter(|of| of.tokens.limit < u64::MAX && of.tokens.texts > 0) {
            let tokens = &of.tokens;
            #[expect(clippy::cast_precision_loss, reason = "a share of texts")]
            let percent = 100.0 * tokens.cut as f64 / tokens.texts as f64;
            let _ = writeln!(
                text,
                "  {} of {} {}s are cut at {} tokens ({percent:.1} %)",
                counted(tokens.cut),
                counted(tokens.texts),
                of.name,
                counted(tokens.limit)
            );
        }
        if let Some(words) = self.survival.in_words("of the rows read") {
            let _ = writeln!(text, "  {words}");
        }
        for of in self.of.iter().filter(|of| of.tokens.texts > 0) {
            histogram(&mut text, of.name, &of.tokens);
        }
        text
    }

    /// The lengths as JSON.
    pub fn to_json(&self) -> Value {
        let of = |lengths: &Lengths| {
            let histogram = lengths.histogram(BARS).into_iter();
            json!({
                "mean": lengths.mean(), "p50": lengths.percentile(0.5), "p90": lengths.percentile(0.9),
                "p95": lengths.percentile(0.95), "p99": lengths.percentile(0.99), "longest": lengths.most,
                "histogram": histogram.map(|(longest, count)| json!([longest, count])).collect::<Vec<_>>(),
            })
        };
        let mut json = json!({});
        if self.tokenizer.is_some() {
            json["survival"] = self.survival.to_json("of the rows read");
        }
        for texts in &self.of {
            json[texts.name] = json!({"characters": of(&texts.characters)});
            if self.tokenizer.is_some() {
                json[texts.name]["tokens"] = of(&texts.tokens);
                if texts.tokens.limit < u64::MAX {
                    json[texts.name]["limit"] = json!(texts.tokens.limit);
                    json[texts.name]["cut"] = json!(texts.tokens.cut);
                }
            }
        }
        json
    }
}

fn row(text: &mut String, name: &str, lengths: &Lengths) {
    let _ = write!(text, "  {name:<22}{:>9.1}", lengths.mean());
    for share in [0.5, 0.9, 0.95, 0.99] {
        let _ = write!(text, "{:>9}", counted(lengths.percentile(share)));
    }
    let _ = writeln!(text, "{:>9}", counted(lengths.most));
}

fn histogram(text: &mut String, name: &str, lengths: &Lengths) {
    const WIDTH: u64 = 40;
    let bars = lengths.histogram(BARS);
    let most = bars.iter().map(|(_, count)| *count).max().unwrap_or(0).max(1);
    let _ = writeln!(text, "  {name} tokens, up to");
    for (longest, count) in bars {
        let bar = "█".repeat((count * WIDTH).div_ceil(most) as usize);
        let _ = writeln!(text, "  {:>8}  {:>9}  {bar}", counted(longest), counted(count));
    }
}

/// The tokenizer in a file or of a model.
fn tokenizer(path: &Path) -> Outcome<Tokenizer> {
    Ok(Tokenizer::load(&model_directory::find_tokenizer(path)?)?)
}
