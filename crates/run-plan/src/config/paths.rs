//! Paths as text. A config is UTF-8, but file names may not be.
//!
//! A path that is not UTF-8 is written as a `file://` URL: its absolute path, in which `%` and two digits replace every byte except
//! letters, digits and `/-._~`. So such a path can be in a config and in `resolved.toml`, and a run can be repeated from there. Every other
//! path is written unchanged.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

const SCHEME: &str = "file://";

/// The text of a path from the command line.
pub fn to_text(path: &OsStr) -> String {
    if let Some(text) = path.to_str() {
        return text.to_string();
    }
    let path = Path::new(path);
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let mut text = SCHEME.to_string();
    for byte in absolute.as_os_str().as_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-._~".contains(byte) {
            text.push(char::from(*byte));
        } else {
            text += &format!("%{byte:02X}");
        }
    }
    text
}

/// `KEY=PATH` from the command line, for a key whose value is a path or a list of paths.
pub fn assignment(typed: &OsStr) -> Option<String> {
    const KEYS: [&str; 6] =
        ["run.output_dir", "model.config", "model.init_from", "data.train", "data.validation", "data.tokenizer"];
    let bytes = typed.as_encoded_bytes();
    let (key, path) = bytes.split_at(bytes.iter().position(|byte| *byte == b'=')?);
    let key = str::from_utf8(key).ok()?;
    let path = path_of(path[1..].to_vec())?;
    KEYS.contains(&key).then(|| format!("{key}={}", to_text(path.as_os_str())))
}

/// The path for a text.
pub fn from_text(text: &str) -> PathBuf {
    url_path(text).unwrap_or_else(|| PathBuf::from(text))
}

/// The path of a `file://` URL; `None` for any other text.
pub fn url_path(text: &str) -> Option<PathBuf> {
    let rest = text.strip_prefix(SCHEME).filter(|rest| rest.starts_with('/'))?;
    let mut bytes = Vec::with_capacity(rest.len());
    let mut left = rest.bytes();
    while let Some(byte) = left.next() {
        bytes.push(match byte {
            b'%' => 16 * digit(left.next()?)? + digit(left.next()?)?,
            byte => byte,
        });
    }
    path_of(bytes)
}

fn digit(byte: u8) -> Option<u8> {
    u8::try_from(char::from(byte).to_digit(16)?).ok()
}

#[cfg(unix)]
fn path_of(bytes: Vec<u8>) -> Option<PathBuf> {
    Some(PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(bytes)))
}

#[cfg(not(unix))]
fn path_of(bytes: Vec<u8>) -> Option<PathBuf> {
    String::from_utf8(bytes).ok().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_path_that_is_not_utf8_comes_back_from_its_text() {
        use std::os::unix::ffi::OsStrExt;
        for bytes in [&b"/data/\xff"[..], b"/a b%/\xc3(\n", b"/\x80\xe4rows#?.parquet"] {
            let path = OsStr::from_bytes(bytes);
            let text = to_text(path);
            assert!(text.starts_with("file:///") && text.is_ascii(), "{text}");
            assert_eq!(from_text(&text), Path::new(path));
        }
        let relative = from_text(&to_text(OsStr::from_bytes(b"runs/\xff")));
        assert_eq!(relative, std::path::absolute(OsStr::from_bytes(b"runs/\xff")).unwrap());
    }

    #[test]
    fn every_other_path_is_its_own_text() {
        for text in ["runs/a", "/data/%41", "caf\u{e9}", "file:", "file://", "file://host/a", "rows-*.parquet", ""] {
            assert_eq!(to_text(OsStr::new(text)), text);
            assert_eq!(from_text(text), Path::new(text));
        }
        for broken in ["file:///a%", "file:///a%4", "file:///a%GG"] {
            assert_eq!(from_text(broken), Path::new(broken));
        }
        assert_eq!(from_text("file:///a%20b%2520"), Path::new("/a b%20"));
    }
}
