//! Settings in layers: defaults, then the config file, then the command line.
//!
//! [`Values`] holds one [`Setting`] with its origin for every key of [`KEYS`]. Names, types and ranges are checked when a value is set,
//! while file and line are still known. So reading a setting later cannot fail.

use std::collections::BTreeMap;
use std::fmt;

use toml::Value;
use toml::de::{DeTable, DeValue};

use super::aliases::{self, Here};
use super::keys::{self, KEYS, Key, Kind};
use crate::failure::{Failure, Outcome};

/// The origin of a setting.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// The table of keys.
    Default,
    /// A config file, by its given name, and the line.
    File(String, usize),
    /// A flag of the command line, such as `--epochs` or `--set`.
    Flag(String),
    /// The run itself, with an explanation.
    Run(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(file, line) => write!(f, "{file}:{line}"),
            Self::Flag(flag) => f.write_str(flag),
            Self::Run(words) => f.write_str(words),
        }
    }
}

/// One value and its origin.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The value, of the key's type.
    pub value: Value,
    /// Its origin.
    pub origin: Origin,
}

/// A setting for every key.
#[derive(Clone, Debug)]
pub struct Values {
    settings: BTreeMap<&'static str, Setting>,
}

impl Values {
    /// Every key at its default.
    pub fn defaults() -> Self {
        let settings = KEYS
            .iter()
            .map(|key| {
                let value: Value = key.default.parse().expect("defaults in the table of keys are TOML");
                let value = check(key, value).expect("a test holds every default to its own key");
                (key.name, Setting { value, origin: Origin::Default })
            })
            .collect();
        Self { settings }
    }

    /// Sets the values of a config file's text. `file` is the name shown in errors.
    ///
    /// # Errors
    /// All wrong keys and values at once, each with its line.
    pub fn apply_file(&mut self, file: &str, text: &str) -> Outcome<()> {
        let document = DeTable::parse(text).map_err(|error| syntax_error(file, text, &error))?;
        let whole: toml::Table = toml::from_str(text).map_err(|error| syntax_error(file, text, &error))?;
        let mut failures = Vec::new();
        for (section, entries) in document.get_ref() {
            let at = |offset: usize| Origin::File(file.to_string(), line_of(text, offset));
            let name: &str = section.get_ref();
            let DeValue::Table(entries) = entries.get_ref() else {
                failures.push((section.span().start, unknown(&at(section.span().start), name)));
                continue;
            };
            if !KEYS.iter().any(|key| key.name.starts_with(&format!("{name}."))) {
                failures.push((section.span().start, unknown_section(&at(section.span().start), name)));
                continue;
            }
            for key in entries.keys() {
                let value = whole[name][key.get_ref().as_ref()].clone();
                let set = self.set(&format!("{name}.{}", key.get_ref()), value, at(key.span().start));
                failures.extend(set.err().map(|failure| (key.span().start, failure)));
            }
        }
        failures.sort_by_key(|(offset, _)| *offset);
        let failures = failures.into_iter().map(|(_, failure)| failure);
        failures.reduce(Failure::and).map_or(Ok(()), Err)
    }

    /// Sets the value of one `--set KEY=VALUE`. The value is read as TOML if it is TOML of the key's kind, else it is a string, so `--set
    /// run.output_dir=runs/a` needs no quotes. A string keeps every byte after `=`. Only in `KEY = VALUE`, as TOML is written, the blanks
    /// around `=` belong to neither side.
    pub fn apply_assignment(&mut self, assignment: &str) -> Outcome<()> {
        let Some((name, text)) = assignment.split_once('=') else {
            return Err(Failure::usage(format!("--set {assignment}: expected KEY=VALUE, got no `=`"))
                .hint("for example `--set train.max_steps=10`"));
        };
        let text = if name.ends_with(char::is_whitespace) { text.trim_start() } else { text };
        let value = keys::find(name.trim()).map_or_else(|| Value::from(text), |key| value_of_text(key.kind, text));
        self.set(name.trim(), value, Origin::Flag("--set".to_string()))
    }

    /// Sets the value that the words of a flag give to a key. They are taken as typed, without the quotes and brackets of TOML. Only a key
    /// for a list has several.
    pub fn apply_flag(&mut self, flag: &str, name: &str, words: &[String]) -> Outcome<()> {
        let word = words.last().map(String::as_str).unwrap_or_default();
        let value = match keys::find(name).map(|key| key.kind) {
            Some(Kind::Paths) => Value::from(words.to_vec()),
            Some(Kind::Parts | Kind::Words(_) | Kind::Metrics) => Value::from(words.join(",")),
            Some(Kind::Text | Kind::Name | Kind::OneOf(_)) => Value::from(word),
            Some(Kind::Switch) => truth(word).map_or_else(|| Value::from(word), Value::Boolean),
            _ => word.parse().unwrap_or_else(|_| Value::from(word)),
        };
        self.set(name, value, Origin::Flag(flag.to_string()))
    }

    /// Sets one value, checked against its key.
    pub fn set(&mut self, name: &str, value: Value, origin: Origin) -> Outcome<()> {
        let Some(key) = keys::find(name) else {
            return Err(unknown(&origin, name));
        };
        let value = check(key, value).map_err(|got| {
            let failure = Failure::usage(format!("{origin}: `{name}`: expected {}, got {got}", key.expected()));
            match aliases::of_word(name, got.trim_matches('"')) {
                Some(Here::Said(words)) => failure.hint(words),
                _ => failure.hint(format!("`{name}`: {}; default {}", key.meaning, key.default)),
            }
        })?;
        self.settings.insert(key.name, Setting { value, origin });
        Ok(())
    }

    /// Resets a key to its default.
    pub fn reset(&mut self, name: &str) -> Outcome<()> {
        let default = keys::find(name).map_or("", |key| key.default);
        let value = default.parse().expect("defaults in the table of keys are TOML");
        self.set(name, value, Origin::Default)
    }

    /// The setting of a key of the table.
    pub fn setting(&self, name: &str) -> &Setting {
        self.settings.get(name).unwrap_or_else(|| panic!("`{name}` is not in the table of keys"))
    }

    /// The origin of a key's value.
    pub fn origin(&self, name: &str) -> &Origin {
        &self.setting(name).origin
    }

    /// Whether a file or a flag gave a key its value.
    pub fn is_given(&self, name: &str) -> bool {
        !matches!(self.origin(name), Origin::Default)
    }

    /// A switch.
    pub fn switch(&self, name: &str) -> bool {
        self.setting(name).value.as_bool().unwrap_or_else(|| panic!("`{name}` is not a switch"))
    }

    /// A whole number, or `None` if the key holds `auto` or `none`.
    pub fn integer(&self, name: &str) -> Option<u64> {
        self.setting(name)
            .value
            .as_integer()
            .map(|value| u64::try_from(value).expect("ranges in the table start at 0 or above"))
    }

    /// A number, or `None` if the key holds `auto` or `none`.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.setting(name).value.as_float()
    }

    /// A number of a key that has no word that stands for no value.
    pub fn required_number(&self, name: &str) -> f64 {
        self.number(name).unwrap_or_else(|| panic!("`{name}` has no word that stands for no value"))
    }

    /// A string, or `None` if the key holds `auto` or `none`.
    pub fn text(&self, name: &str) -> Option<String> {
        let words = keys::find(name).map_or(&[][..], |key| key.words);
        self.setting(name).value.as_str().filter(|text| !words.contains(text)).map(str::to_string)
    }

    /// A list of strings, or `None` if the key holds `auto` or `none`.
    pub fn list(&self, name: &str) -> Option<Vec<String>> {
        let items = self.setting(name).value.as_array()?;
        Some(items.iter().filter_map(Value::as_str).map(str::to_string).collect())
    }

    /// A list of tables.
    pub fn tables(&self, name: &str) -> Vec<toml::Table> {
        let items = self.setting(name).value.as_array().map(Vec::as_slice).unwrap_or_default();
        items.iter().filter_map(Value::as_table).cloned().collect()
    }

    /// A table.
    pub fn table(&self, name: &str) -> toml::Table {
        self.setting(name).value.as_table().cloned().unwrap_or_default()
    }
}

/// Checks a value against its key and converts it to the key's type: a whole number to a number, a single path to a list. On error, returns
/// the given value in words.
fn check(key: &Key, value: Value) -> Result<Value, String> {
    let got = |value: &Value| match value {
        Value::String(text) => format!("\"{text}\""),
        other => other.to_string().trim().to_string(),
    };
    if let Value::String(text) = &value
        && key.words.contains(&text.as_str())
    {
        return Ok(value);
    }
    match (key.kind, &value) {
        (Kind::Switch, Value::Boolean(_)) | (Kind::Text, Value::String(_)) | (Kind::Table, Value::Table(_)) => {
            Ok(value)
        }
        (Kind::Name, Value::String(text)) if !text.is_empty() => Ok(value),
        // `--num_train_epochs 3.0`
        #[expect(clippy::cast_possible_truncation, reason = "a setting; the range is checked")]
        (Kind::Integer(..), Value::Float(number)) if number.fract() == 0.0 && number.abs() < 1e15 => {
            check(key, Value::Integer(*number as i64))
        }
        (Kind::Integer(low, high), Value::Integer(number)) if (low..=high).contains(number) => Ok(value),
        (Kind::Number(low, high), Value::Float(number)) if (low..=high).contains(number) => Ok(value),
        #[expect(clippy::cast_precision_loss, reason = "a setting, not a count")]
        (Kind::Number(low, high), Value::Integer(number)) if (low..=high).contains(&(*number as f64)) => {
            Ok(Value::Float(*number as f64))
        }
        (Kind::OneOf(words), Value::String(text)) if words.contains(&text.as_str()) => Ok(value),
        (Kind::OneOf(words), Value::String(text)) if spelled(words, text).is_some() => {
            Ok(Value::String(spelled(words, text).unwrap_or_default().to_string()))
        }
        (Kind::OneOf(_), Value::String(text)) if let Some(Here::Key(word)) = aliases::of_word(key.name, text) => {
            Ok(Value::from(word))
        }
        (Kind::OneOf(words), Value::Boolean(switch)) if words.contains(&switch.to_string().as_str()) => {
            Ok(Value::String(switch.to_string()))
        }
        (Kind::Words(words), Value::Array(items)) => {
            let known = |item: &Value| item.as_str().is_some_and(|text| words.contains(&text));
            if items.iter().all(known) { Ok(value) } else { Err(got(&value)) }
        }
        (Kind::Words(words), Value::String(text)) => {
            let items: Vec<&str> = text.split(',').map(str::trim).filter(|item| !item.is_empty()).collect();
            if items.iter().all(|item| words.contains(item)) { Ok(Value::from(items)) } else { Err(got(&value)) }
        }
        (Kind::Metrics, Value::String(text)) => metric_names(text).ok_or_else(|| got(&value)),
        (Kind::Metrics, Value::Array(items)) => {
            let names: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
            names.and_then(|names| metric_names(&names.join(","))).ok_or_else(|| got(&value))
        }
        (Kind::Parts, Value::String(text)) => {
            Ok(Value::from(text.split(',').map(str::trim).filter(|item| !item.is_empty()).collect::<Vec<_>>()))
        }
        (Kind::Paths, Value::String(text)) if !text.is_empty() => Ok(Value::from(vec![text.clone()])),
        (Kind::Paths, Value::Array(items))
            if items.iter().all(|item| item.as_str().is_some_and(|text| !text.is_empty())) =>
        {
            Ok(value)
        }
        (Kind::Parts, Value::Array(items)) if items.iter().all(Value::is_str) => Ok(value),
        (Kind::Tables(_), Value::Array(items)) if items.iter().all(Value::is_table) => Ok(value),
        (Kind::Size(least), Value::Integer(bytes)) if *bytes >= least => Ok(Value::String(format!("{bytes}"))),
        (Kind::Size(_), Value::String(text)) if parse_size(text).is_some() => Ok(value),
        _ => Err(got(&value)),
    }
}

/// The value of an assignment's text for a key of this kind. Text that happens to be a number, a date or a truth is text, if the key takes
/// text.
fn value_of_text(kind: Kind, text: &str) -> Value {
    let value = text.trim().parse().ok();
    match (kind, value) {
        (Kind::Text | Kind::Name, Some(value @ Value::String(_))) => value,
        (Kind::Paths | Kind::Parts, Some(value @ (Value::String(_) | Value::Array(_)))) => value,
        (Kind::Text | Kind::Name | Kind::Paths | Kind::Parts, _) => Value::from(text),
        (_, Some(value)) => value,
        (_, None) => Value::from(text.trim()),
    }
}

/// `True`, `true`, `1`, `yes` and their opposites, in the spellings of other command-line libraries.
pub fn truth(text: &str) -> Option<bool> {
    match text.to_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Some(true),
        "false" | "0" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// The word that equals `text` up to `-`, `_`, capitals, and the `eval_` before a metric's name in other trainers.
fn spelled(words: &[&'static str], text: &str) -> Option<&'static str> {
    let plain = |word: &str| word.replace(['-', '_'], "").to_lowercase();
    let text = plain(text);
    let bare = text.strip_prefix("eval").unwrap_or(&text);
    words.iter().copied().find(|word| plain(word) == text || plain(word) == bare)
}

/// A list of metrics by their canonical names.
fn metric_names(text: &str) -> Option<Value> {
    let metrics = text_metrics::Metric::list(text).ok()?;
    Some(Value::from(metrics.into_iter().map(text_metrics::Metric::name).collect::<Vec<_>>()))
}

/// Bytes of a size such as `512MiB`, `4GiB` or `4G`.
pub fn parse_size(text: &str) -> Option<u64> {
    text.parse::<memory_policy::Bytes>().ok().map(|bytes| bytes.0)
}

fn unknown(origin: &Origin, name: &str) -> Failure {
    let failure = Failure::usage(format!("{origin}: unknown key `{name}`"));
    match (aliases::of_key(name), keys::nearest(name)) {
        (Some(Here::Said(words)), _) => failure.hint(words),
        (Some(Here::Key(key)), _) | (None, Some(key)) => {
            let meaning = keys::find(key).map_or("", |key| key.meaning);
            failure.hint(format!("did you mean `{key}` ({meaning})?"))
        }
        (None, None) => failure.hint("`train_low_mem keys` lists every key"),
    }
}

fn unknown_section(origin: &Origin, name: &str) -> Failure {
    let mut sections: Vec<&str> = KEYS.iter().filter_map(|key| key.name.split('.').next()).collect();
    sections.dedup();
    let nearest =
        sections.iter().max_by(|a, b| strsim::jaro_winkler(a, name).total_cmp(&strsim::jaro_winkler(b, name)));
    let failure = Failure::usage(format!("{origin}: unknown section `[{name}]`"));
    match nearest.filter(|section| strsim::jaro_winkler(section, name) > 0.7) {
        Some(section) => failure.hint(format!("did you mean `[{section}]`?")),
        None => failure.hint(format!("sections are [{}]", sections.join("], ["))),
    }
}

fn syntax_error(file: &str, text: &str, error: &toml::de::Error) -> Failure {
    let line = error.span().map_or(1, |span| line_of(text, span.start));
    Failure::usage(format!("{file}:{line}: not valid TOML: {}", error.message().replace('\n', ", ")))
        .hint(format!("the line is `{}`", text.lines().nth(line - 1).unwrap_or("").trim()))
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset.min(text.len())].matches('\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        Values::defaults().apply_file("my.toml", text).expect_err("a wrong config").to_string()
    }

    #[test]
    fn a_wrong_config_says_what_where_expected_and_got() {
        for (text, expected) in [
            (
                "[train]\n\nbatchsize = 3\n",
                "error: my.toml:3: unknown key `train.batchsize`\nhint: did you mean `train.batch_size`",
            ),
            (
                "[train]\nepochs = 0\n",
                "error: my.toml:2: `train.epochs`: expected a whole number of at least 1, or \"none\", got 0\nhint: ",
            ),
            (
                "[train]\nepochs = \"three\"\n",
                "`train.epochs`: expected a whole number of at least 1, or \"none\", got \"three\"",
            ),
            ("[train]\nprecision = \"f16\"", "`train.precision`: expected one of \"f32\", \"bf16\", got \"f16\""),
            ("[data]\ntrain = [1]", "`data.train`: expected a list of paths or globs, got [1]"),
            (
                "[memory]\nbudget = \"lots\"",
                "`memory.budget`: expected a size such as \"512MiB\" or \"4GiB\", or \"auto\", got \"lots\"",
            ),
            (
                "[memory]\nbudget = 0",
                "`memory.budget`: expected a size such as \"512MiB\" or \"4GiB\", or \"auto\", got 0",
            ),
            ("[trian]\nepochs = 1", "error: my.toml:1: unknown section `[trian]`\nhint: did you mean `[train]`?"),
            ("epochs = 1", "error: my.toml:1: unknown key `epochs`\nhint: did you mean `train.epochs`"),
            ("[train]\nepochs = = 1", "error: my.toml:2: not valid TOML"),
            ("[train]\nepochs = 1\nepochs = 2", "error: my.toml:3: not valid TOML"),
            (
                "[train]\nepochs = 0\nbatchsize = 3\n",
                "error: my.toml:2: `train.epochs`: expected a whole number of at least 1, or \"none\", got 0\nmy.toml:3: unknown key",
            ),
        ] {
            let error = error_of(text);
            assert!(error.contains(expected), "{text}\n{error}");
        }
    }

    #[test]
    fn an_assignment_is_toml_or_else_a_string() {
        let mut values = Values::defaults();
        for assignment in [
            "train.max_steps=10",
            "run.output_dir=runs/a",
            "data.train=a.parquet",
            "checkpoint.best_metric=exact-match",
            "generation.early_stopping=true",
            "data.validation=[\"a\", \"b\"]",
            "optimizer.weight_decay=1",
            "train.freeze=encoder,shared",
            "memory.budget=512MiB",
            "memory.disk_writes=0",
            "model.overrides={ num_layers = 4 }",
        ] {
            values.apply_assignment(assignment).unwrap_or_else(|failure| panic!("{assignment}: {failure}"));
        }
        assert_eq!(values.integer("train.max_steps"), Some(10));
        assert_eq!(values.text("run.output_dir").as_deref(), Some("runs/a"));
        assert_eq!(values.text("checkpoint.best_metric").as_deref(), Some("exact_match"));
        assert_eq!(values.text("generation.early_stopping").as_deref(), Some("true"));
        assert_eq!(values.list("data.train"), Some(vec!["a.parquet".to_string()]));
        assert_eq!(values.list("data.validation").map(|list| list.len()), Some(2));
        assert_eq!(values.number("optimizer.weight_decay"), Some(1.0));
        assert_eq!(values.list("train.freeze"), Some(vec!["encoder".to_string(), "shared".to_string()]));
        assert_eq!(values.table("model.overrides").len(), 1);
        assert!(values.apply_assignment("train.max_steps").is_err());
        assert!(values.apply_assignment("max_steps=1").is_err());
    }

    #[test]
    fn strings_are_kept_byte_for_byte() {
        let prefix = |assignment: &str| {
            let mut values = Values::defaults();
            values.apply_assignment(assignment).unwrap_or_else(|failure| panic!("{assignment}: {failure}"));
            values.text("data.source_prefix").unwrap_or_default()
        };
        for text in ["summarize: ", "  a\t", "2024", "true", "[x]", "{y}", "\n", ""] {
            assert_eq!(prefix(&format!("data.source_prefix={text}")), text);
            assert_eq!(prefix(&format!("data.source_prefix={}", Value::from(text))), text, "as TOML");
        }
        assert_eq!(prefix("data.source_prefix = a: "), "a: ", "blanks around `=` as in TOML");
        let mut values = Values::defaults();
        values.apply_file("c.toml", "[data]\nsource_prefix = \"summarize: \"\ntrain = \" a \"\n").unwrap();
        assert_eq!(values.text("data.source_prefix").as_deref(), Some("summarize: "));
        assert_eq!(values.list("data.train"), Some(vec![" a ".to_string()]));
    }

    #[test]
    fn words_stand_for_nothing() {
        let mut values = Values::defaults();
        assert_eq!(values.integer("train.max_steps"), None);
        assert_eq!(values.text("data.tokenizer"), None);
        values.apply_assignment("optimizer.beta1=none").unwrap();
        assert_eq!(values.number("optimizer.beta1"), None);
        assert!(values.apply_assignment("train.max_steps=auto").is_err());
    }

    #[test]
    fn every_default_satisfies_its_own_key() {
        for key in KEYS.iter() {
            let value: Value = key.default.parse().unwrap();
            check(key, value).unwrap_or_else(|got| panic!("{}: expected {}, got {got}", key.name, key.expected()));
        }
    }
}
