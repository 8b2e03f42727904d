//! Escapes text for HTML, so that no text from a file or a user is markup.

use std::fmt::{self, Display, Write};

use crate::visible;

/// Escapes a text or number for HTML, in elements and in quoted attributes.
pub fn text(shown: impl Display) -> String {
    struct Escaping(String);
    impl Write for Escaping {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            for letter in visible::lines(text).chars() {
                match letter {
                    '<' => self.0.push_str("&lt;"),
                    '>' => self.0.push_str("&gt;"),
                    '&' => self.0.push_str("&amp;"),
                    '"' => self.0.push_str("&quot;"),
                    '\'' => self.0.push_str("&#39;"),
                    letter => self.0.push(letter),
                }
            }
            Ok(())
        }
    }
    let mut out = Escaping(String::new());
    write!(out, "{shown}").expect("a string takes everything");
    out.0
}

/// Escapes JSON for a `script` element, which ends at the first `</`.
pub fn json(value: &serde_json::Value) -> String {
    visible::lines(&value.to_string()).replace('<', "\\u003c").replace('>', "\\u003e")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_text() {
        assert_eq!(text("<a href='x' t=\"&\">"), "&lt;a href=&#39;x&#39; t=&quot;&amp;&quot;&gt;");
        assert_eq!(text("a\0\u{202e}\nb"), "a\\u0000\\u202e\nb");
        assert_eq!(json(&serde_json::json!("</script>")), "\"\\u003c/script\\u003e\"");
    }
}
