//! `resolved.toml`: every key with its value, the value's origin and the key's meaning.
//!
//! The file is itself a config. It resolves to the same config, so `--config OUTPUT/resolved.toml` repeats a run.

use std::fmt::Write;

use toml::Value;

use super::{Config, Origin, Values, keys};

impl Config {
    /// The text of `resolved.toml`. `auto` stays `auto` if only the running program can decide. If the config alone decides, the comment
    /// has the decided value.
    pub fn to_toml(&self, heading: &str) -> String {
        let mut text = String::new();
        for line in heading.lines() {
            let _ = writeln!(text, "# {line}");
        }
        text.push('\n');
        let defaults = Values::defaults();
        text.push_str(&keys::by_section(|key, name| {
            let setting = self.values.setting(key.name);
            let decided = self.decided(key.name).map(|value| format!(" -> {value}")).unwrap_or_default();
            let origin = match &setting.origin {
                Origin::Default => "default".to_string(),
                // A resumed run reads every value from the file that it writes.
                origin if setting.value == defaults.setting(key.name).value => format!("default, as in {origin}"),
                origin => origin.to_string(),
            };
            format!("{name} = {} # {origin}{decided}: {}", inline(&setting.value), key.meaning)
        }));
        text
    }

    /// The decided value of `auto`, for keys that depend on the config only.
    fn decided(&self, name: &str) -> Option<String> {
        if self.values.setting(name).value.as_str() != Some("auto") {
            return None;
        }
        match name {
            "train.batch_size" => Some(self.train.batch_size.to_string()),
            "train.freeze" => Some(format!("[{}]", self.train.freeze.join(", "))),
            "train.eval_max_new_tokens" => Some(self.train.eval_max_new_tokens.to_string()),
            "optimizer.learning_rate" => self.optimizer.learning_rate.map(|rate| format!("{rate:e}")),
            _ => None,
        }
    }
}

/// A value on one line.
fn inline(value: &Value) -> String {
    match value {
        Value::Table(table) => {
            let entries: Vec<String> = table
                .iter()
                .map(|(name, value)| format!("{} = {}", Value::String(name.clone()), inline(value)))
                .collect();
            if entries.is_empty() { "{}".to_string() } else { format!("{{ {} }}", entries.join(", ")) }
        }
        Value::Array(items) => format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", ")),
        // Rust's debug form is TOML. It writes 1e-30, where the display form writes thirty digits.
        Value::Float(number) => format!("{number:?}"),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::keys::KEYS;

    #[test]
    fn resolved_toml_is_a_config_that_resolves_to_itself() {
        let mut values = Values::defaults();
        for assignment in [
            "data.train=[\"a b.parquet\", \"c.parquet\"]",
            "model.config=t5-small",
            "model.overrides={ num_layers = 4, feed_forward_proj = \"gated-gelu\" }",
            "train.freeze=encoder",
            "optimizer.eps1=1e-30",
            "optimizer.learning_rate=1e-4",
            "memory.budget=512MiB",
            "data.source_prefix= two\u{a0}blanks: \t",
            "run.output_dir=runs/\"quoted\"\n",
        ] {
            values.apply_assignment(assignment).unwrap();
        }
        let config = Config::resolve(values).unwrap();
        let text = config.to_toml("repeat it");
        let mut again = Values::defaults();
        again.apply_file("resolved.toml", &text).unwrap_or_else(|failure| panic!("{failure}\n{text}"));
        for key in KEYS.iter() {
            assert_eq!(again.setting(key.name).value, config.values.setting(key.name).value, "{}\n{text}", key.name);
        }
    }

    #[test]
    fn every_line_says_where_its_value_came_from() {
        let mut values = Values::defaults();
        values.apply_file("my.toml", "[data]\ntrain = \"a\"\n[model]\nconfig = \"t5-small\"\n").unwrap();
        values.apply_assignment("train.max_steps=3").unwrap();
        values.apply_assignment("data.shuffle=true").unwrap();
        let text = Config::resolve(values).unwrap().to_toml("");
        assert!(text.contains("train = [\"a\"] # my.toml:2: "), "{text}");
        assert!(text.contains("shuffle = true # default, as in --set: "), "{text}");
        assert!(text.contains("max_steps = 3 # --set: "), "{text}");
        assert!(text.contains("epochs = 1 # default: "), "{text}");
        assert!(text.contains("batch_size = \"auto\" # default -> 32: "), "{text}");
    }
}
