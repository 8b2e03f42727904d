//! `resolved.toml` as a recipe: each line has a key, its value and, as a comment, the origin of the value.

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Such as `train.batch_size`.
    pub key: String,
    /// The value as written.
    pub value: String,
    /// Such as `--set` or `configs/a.toml:14`; empty for a default.
    pub origin: String,
}

/// The settings of a config, in file order.
pub fn settings(config: &str) -> Vec<Setting> {
    let (mut settings, mut section) = (Vec::new(), String::new());
    for line in config.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.split(']').next()) {
            name.clone_into(&mut section);
        } else if let Some((key, rest)) = line.split_once(" = ")
            && !line.starts_with('#')
        {
            let end = end_of_value(rest);
            let comment = rest[end..].trim_start().strip_prefix("# ").unwrap_or_default();
            let origin = comment.split(": ").next().unwrap_or_default();
            let origin =
                if origin.strip_prefix("default").is_some_and(|more| more.is_empty() || more.starts_with([',', ' '])) {
                    ""
                } else {
                    origin
                };
            settings.push(Setting {
                key: format!("{section}.{key}"),
                value: rest[..end].trim_end().to_owned(),
                origin: origin.to_owned(),
            });
        }
    }
    settings
}

/// The end of the value: the first `#` outside of quotes.
fn end_of_value(text: &str) -> usize {
    let (mut quote, mut is_escaped) = (None, false);
    for (at, letter) in text.char_indices() {
        match (quote, letter) {
            _ if is_escaped => is_escaped = false,
            (Some('"'), '\\') => is_escaped = true,
            (Some(open), letter) if letter == open => quote = None,
            (None, '"' | '\'') => quote = Some(letter),
            (None, '#') => return at,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_is_its_keys_values_and_origins() {
        let config = "# note\n\n[run]\noutput_dir = \"a#\\\"b\" # --output: directory\nseed = 42 # default: seed\n[data]\ntrain = [\"x # y\"] # configs/a.toml:17: files\nfreeze = \"auto\" # default -> []: frozen\nshuffle = true # default, as in runs/a/resolved.toml:7: mixed\n";
        let found: Vec<(String, String, String)> =
            settings(config).into_iter().map(|s| (s.key, s.value, s.origin)).collect();
        let expected = [
            ("run.output_dir", "\"a#\\\"b\"", "--output"),
            ("run.seed", "42", ""),
            ("data.train", "[\"x # y\"]", "configs/a.toml:17"),
            ("data.freeze", "\"auto\"", ""),
            ("data.shuffle", "true", ""),
        ];
        assert_eq!(found, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    }
}
