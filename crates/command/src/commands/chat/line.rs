//! A typed line: a prompt, or a command that begins with `/`.

/// A parsed line.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// An empty line.
    Empty,
    /// A prompt to answer.
    Prompt(String),
    /// `/set NAME VALUE`
    Set(String, String),
    /// `/settings`
    Settings,
    /// `/use NAME...`: the models to ask; without names, all models.
    Use(Vec<String>),
    /// `/models`
    Models,
    /// `/turns on|off`: whether a prompt includes the turns before it.
    Turns(bool),
    /// `/forget`: forgets the turns so far.
    Forget,
    /// `/help`
    Help,
    /// `/quit`
    Quit,
    /// An invalid line, and the reason.
    Wrong(String),
}

/// Words for `/help`.
pub const HELP: &str = "\
/set NAME VALUE   change a setting: temperature, top_k, top_p, num_beams, seed, repetition_penalty,
                  no_repeat_ngram, min_new_tokens, max_new_tokens, length_penalty
/settings         show the settings
/models           show the models
/use NAME ...     ask these models, side by side; without a name all
/turns on|off     put the turns before a prompt into it, as chats are trained (off at first)
/forget           forget the turns so far
/quit             end, as Ctrl-D does
A line that begins with // is a prompt that begins with /. Ctrl-C stops an answer.
";

impl Line {
    /// Reads a line.
    pub fn parse(text: &str) -> Line {
        let text = text.trim();
        if text.is_empty() {
            return Line::Empty;
        }
        let Some(command) = text.strip_prefix('/') else { return Line::Prompt(text.to_owned()) };
        if command.starts_with('/') {
            return Line::Prompt(command.to_owned());
        }
        let words: Vec<&str> = command.split_whitespace().collect();
        match words.as_slice() {
            ["set", name, value] => Line::Set(name.replace('-', "_"), (*value).to_owned()),
            ["set", ..] => Line::Wrong("expected `/set NAME VALUE`, such as `/set temperature 0.7`".to_owned()),
            ["settings"] => Line::Settings,
            ["use", names @ ..] => Line::Use(names.iter().map(|&name| name.to_owned()).collect()),
            ["models"] => Line::Models,
            ["turns", "on"] => Line::Turns(true),
            ["turns", "off"] => Line::Turns(false),
            ["turns", ..] => Line::Wrong("expected `/turns on` or `/turns off`".to_owned()),
            ["forget"] => Line::Forget,
            ["help"] => Line::Help,
            ["quit" | "exit"] => Line::Quit,
            _ => Line::Wrong(format!("no command `{text}`; `/help` lists them")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_prompt_or_a_command() {
        for (text, expected) in [
            ("  ", Line::Empty),
            (" how many ", Line::Prompt("how many".into())),
            ("//etc", Line::Prompt("/etc".into())),
            ("/set top-k 5", Line::Set("top_k".into(), "5".into())),
            ("/use a b", Line::Use(vec!["a".into(), "b".into()])),
            ("/use", Line::Use(Vec::new())),
            ("/turns on", Line::Turns(true)),
            ("/exit", Line::Quit),
        ] {
            assert_eq!(Line::parse(text), expected, "{text}");
        }
        for wrong in ["/", "/sett", "/set temperature", "/turns maybe"] {
            assert!(matches!(Line::parse(wrong), Line::Wrong(_)), "{wrong}");
        }
    }
}
