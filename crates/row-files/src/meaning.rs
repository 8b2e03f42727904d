//! [`Meaning`]: one of several meanings of the columns of a file, with the settings that choose it.

/// Why columns have no single meaning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unpaired {
    /// This column is missing.
    Missing(String),
    /// A template cannot be read: the setting, and the reason.
    Template(&'static str, String),
    /// The columns have several meanings.
    Question(Vec<Meaning>),
}

/// One of several meanings of a file's columns, and the settings that choose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meaning {
    /// The meaning, for people.
    pub words: String,
    /// Keys with their values. A key without a dot is one of `data`.
    pub settings: Vec<(&'static str, String)>,
}

impl Meaning {
    /// The settings as they are typed for a command that has keys.
    pub fn assignments(&self) -> String {
        self.typed(|key, value| {
            let section = if key.contains('.') { "" } else { "data." };
            format!("--set {}", quoted(&format!("{section}{key}={}", of_toml(value))))
        })
    }

    /// The settings as they are typed for a command that has a flag for each. There, a text column implies its objective. A meaning for training
    /// alone is typed for `train`.
    pub fn flags(&self) -> String {
        if self.settings.iter().any(|(key, _)| key.contains('.')) {
            return format!("train_low_mem train {}", self.assignments());
        }
        self.typed(|key, value| match key {
            "objective" => String::new(),
            key => format!("--{} {}", key.replace('_', "-"), quoted(value)),
        })
    }

    fn typed(&self, setting: impl Fn(&str, &str) -> String) -> String {
        let settings = self.settings.iter().map(|(key, value)| setting(key, value)).filter(|typed| !typed.is_empty());
        settings.collect::<Vec<_>>().join(" ")
    }
}

/// A text as the value of a key. As it stands, a text in quotes would lose them.
fn of_toml(text: &str) -> String {
    let is_quoted = text.starts_with(['"', '\'', '[', '{']) && !text.contains(['"', '\\']) && !is_template(text);
    if is_quoted { format!("\"{text}\"") } else { text.to_owned() }
}

/// Whether a text names columns in braces, which no table of TOML does.
fn is_template(text: &str) -> bool {
    text.starts_with('{') && !text.contains('=')
}

/// A word for a shell.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = word.chars().all(|c| c.is_alphanumeric() || "_-.=/".contains(c));
    if is_plain { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reaches_the_setting_as_it_is() {
        let typed = |name: &str| {
            let meaning = Meaning { words: String::new(), settings: vec![("prompt_column", name.to_owned())] };
            meaning.assignments()
        };
        assert_eq!(typed("text"), "--set data.prompt_column=text");
        assert_eq!(typed("my text"), "--set 'data.prompt_column=my text'");
        // In TOML such a name would be a string, a list or a table.
        assert_eq!(typed("'text'"), "--set 'data.prompt_column=\"'\\''text'\\''\"'");
        assert_eq!(typed("[text]"), "--set 'data.prompt_column=\"[text]\"'");
        assert_eq!(
            typed("{a}\\n{b}"),
            "--set 'data.prompt_column={a}\\n{b}'",
            "a template, whose line break is TOML's"
        );
    }
}
