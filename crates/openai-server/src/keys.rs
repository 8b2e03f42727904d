//! API keys: lines of a file. A request without one of them is refused.

/// The accepted keys; without any, every request is accepted.
#[derive(Clone, Default)]
pub struct Keys {
    keys: Vec<Vec<u8>>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Keys({})", self.keys.len())
    }
}

impl Keys {
    /// Reads one key per line. Blank lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// A text for the user: there is no key, or the number of a line and its fault.
    pub fn of_file(text: &str) -> Result<Self, String> {
        let mut keys = Vec::new();
        for (number, line) in text.lines().map(str::trim).enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if !line.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(format!("line {}: expected a key of visible ASCII characters, without spaces", number + 1));
            }
            keys.push(line.as_bytes().to_vec());
        }
        match keys.is_empty() {
            true => Err("expected a key on a line, found none".to_owned()),
            false => Ok(Keys { keys }),
        }
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether the value of an `Authorization` header has one of the keys.
    pub fn accept(&self, authorization: Option<&[u8]>) -> bool {
        if self.keys.is_empty() {
            return true;
        }
        let Some((scheme, given)) = authorization.and_then(|value| value.split_at_checked(7)) else { return false };
        // Every key is compared to its end, so the time does not reveal which key was nearly right.
        let matches = self.keys.iter().fold(false, |found, key| found | is_same(key, given));
        scheme.eq_ignore_ascii_case(b"bearer ") && matches
    }
}

/// Compares in a time that depends only on the lengths.
fn is_same(key: &[u8], given: &[u8]) -> bool {
    let mut difference = u8::from(key.len() != given.len());
    for (place, byte) in key.iter().enumerate() {
        difference |= byte ^ given.get(place).copied().unwrap_or(!byte);
    }
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_needs_one_of_the_keys_whole() {
        let keys = Keys::of_file("# ours\nsk-one\n\n sk-two \n").unwrap();
        let accepts = |value: &str| keys.accept(Some(value.as_bytes()));
        assert!(accepts("Bearer sk-one") && accepts("bearer sk-two"));
        for value in
            ["", "Bearer", "Bearer ", "Bearer sk-on", "Bearer sk-onee", "Basic sk-one", "sk-one", "Bearer # ours"]
        {
            assert!(!accepts(value), "{value}");
        }
        assert!(!keys.accept(None) && Keys::default().accept(None));
        assert!(Keys::of_file("# none\n").is_err());
        assert!(Keys::of_file("# ours\n\nsk-one\na b\n").unwrap_err().starts_with("line 4: "));
        assert!(!format!("{keys:?}").contains("sk"));
    }
}
