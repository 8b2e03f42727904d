//! [`TransformersConfig`]: the `tokenizer_config.json` of a tokenizer, and the settings of it that are used. It is parsed once.

use serde_json::Value;

use super::added_tokens::name_of;
use crate::side::Side;

/// A `tokenizer_config.json`.
#[derive(Clone, Debug, Default)]
pub(super) struct TransformersConfig {
    /// Its text.
    pub text: String,
    /// Whether it came with the tokenizer. Otherwise it was made here.
    pub is_published: bool,
    /// The names of the tokens that end a text, and that fill a row.
    pub end: Option<String>,
    pub padding: Option<String>,
    /// The side on which the publisher cuts texts.
    pub truncation_side: Option<Side>,
}

impl TransformersConfig {
    /// The file that a tokenizer came with.
    pub fn published(text: String) -> Self {
        Self { is_published: true, ..Self::made(text) }
    }

    /// Sets the side on which texts are cut, in the text of the file as well.
    pub fn cut_on(&mut self, side: Side) {
        let mut settings: serde_json::Map<String, Value> = serde_json::from_str(&self.text).unwrap_or_default();
        settings.insert("truncation_side".to_owned(), side.name().into());
        self.truncation_side = Some(side);
        self.text = format!("{:#}\n", Value::from(settings));
    }

    /// A file that is made here.
    pub fn made(text: String) -> Self {
        let settings: Value = serde_json::from_str(&text).unwrap_or_default();
        let name = |role: &str| name_of(&settings[role]).map(str::to_owned);
        Self {
            is_published: false,
            end: name("eos_token"),
            padding: name("pad_token"),
            truncation_side: settings["truncation_side"].as_str().and_then(Side::of_name),
            text,
        }
    }
}
