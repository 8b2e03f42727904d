//! Finds and loads the tokenizer of a model directory.

use std::path::{Path, PathBuf};

use super::companion_files::CompanionFiles;
use super::transformers_config::TransformersConfig;
use super::utf8_bytes::{self, Utf8Bytes};
use super::{Kind, LARGEST_FILE_BYTES, Tokenizer, added_tokens, byte_pairs, sentence_piece, unusable};
use crate::Error;
use crate::side::Side;

/// The names under which transformers looks for a tokenizer, in this order.
const FILE: &str = "tokenizer.json";
const FILES: [&str; 4] = [FILE, sentence_piece::FILE, sentence_piece::OTHER_FILE, byte_pairs::VOCABULARY];
/// Files of a model directory that may be copied with the tokenizer, whichever file it is read from.
pub const COMPANION_FILES: [&str; 8] = [
    sentence_piece::FILE,
    sentence_piece::OTHER_FILE,
    byte_pairs::VOCABULARY,
    byte_pairs::MERGES,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];
impl Tokenizer {
    /// Loads a tokenizer and the files beside it that describe it. `path` is a `tokenizer.json`, a `spiece.model`, a
    /// `vocab.json` with its `merges.txt`, or a model directory with any of these. A directory whose files name ByT5's
    /// tokenizer will do, too.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the file is missing or is not a tokenizer, or a file beside it cannot be read.
    pub fn load(path: &Path) -> Result<Self, Error> {
        if path.is_dir() {
            return Self::load_directory(path);
        }
        let bytes = regular_file::read(path, LARGEST_FILE_BYTES).map_err(|error| unusable(path, error))?;
        if regular_file::is_lfs_pointer(&bytes) {
            return Err(unusable(
                path,
                "a pointer of Git LFS, not the file itself: `git lfs pull` in its directory fetches the file",
            ));
        }
        // A file with an unusual name has no files beside it: those in its directory belong to another tokenizer.
        let is_published = path.file_name().is_some_and(|name| FILES.iter().any(|file| name == *file));
        let directory = path.parent().filter(|_| is_published);
        let companion_files = directory.map(CompanionFiles::read).transpose()?.unwrap_or_default();
        let made = |json: Result<String, String>| {
            let json = json.map_err(|reason| unusable(path, reason))?;
            let tokenizer = Self::from_bytes(json.as_bytes(), path)?;
            Ok::<_, Error>(Self { kind: Kind::Converted(json), ..tokenizer })
        };
        let mut tokenizer = match path.extension() {
            Some(extension) if extension == "model" => {
                warn_of_class(path, &companion_files);
                made(sentence_piece::tokenizer_json(&bytes, &companion_files))?
            }
            _ if path.file_name().is_some_and(|name| name == byte_pairs::VOCABULARY) => {
                made(byte_pair_json(path, &bytes, &companion_files))?
            }
            _ => {
                let tokenizer = Self::from_bytes(&bytes, path)?;
                tokenizer.warn_of_missing_tokens(&companion_files);
                tokenizer
            }
        };
        if let Some(directory) = directory {
            tokenizer.take_companions(directory);
        }
        check_side(&companion_files).map_err(|reason| unusable(path, reason))?;
        let named = |role: &str| companion_files.role(role).and_then(added_tokens::name_of).map(str::to_owned);
        let (end, padding) = (named("eos_token"), named("pad_token"));
        if let Some(config) = companion_files.config_text {
            tokenizer.transformers_config = TransformersConfig::published(config);
        }
        // In older directories `special_tokens_map.json` has the last word.
        let of_files = &mut tokenizer.transformers_config;
        of_files.end = end.or(of_files.end.take());
        of_files.padding = padding.or(of_files.padding.take());
        Ok(tokenizer)
    }

    /// Warns of tokens that transformers adds to a `tokenizer.json` from the files beside it.
    fn warn_of_missing_tokens(&self, companion_files: &CompanionFiles) {
        let missing: Vec<String> =
            added_tokens::names(companion_files).into_iter().filter(|name| self.token_id(name).is_none()).collect();
        let Some(first) = missing.first() else { return };
        let others = missing.len() - 1;
        let more = if others > 0 { format!(" and {others} more") } else { String::new() };
        tracing::warn!(
            "{}: the files beside it add tokens that it lacks: `{first}`{more}; they are read as other text is, while \
             transformers gives them new ids (`save_pretrained` of its tokenizer writes them into this file)",
            self.path.display()
        );
    }

    fn load_directory(directory: &Path) -> Result<Self, Error> {
        let companion_files = CompanionFiles::read(directory)?;
        let file = FILES.map(|name| directory.join(name)).into_iter().find(|path| path.is_file());
        match file {
            Some(file) if companion_files.class() != Some(utf8_bytes::CLASS) => Self::load(&file),
            _ if is_of_bytes(&companion_files) => {
                let bytes = Utf8Bytes::new(&companion_files).map_err(|reason| unusable(directory, reason))?;
                let tokenizer = Self::from_bytes(bytes.tokenizer_json().as_bytes(), directory)?;
                let made = || TransformersConfig::made(bytes.transformers_config());
                let transformers_config = companion_files.config_text.map_or_else(made, TransformersConfig::published);
                let mut tokenizer = Self { kind: Kind::Bytes(bytes), transformers_config, ..tokenizer };
                tokenizer.take_companions(directory);
                Ok(tokenizer)
            }
            _ => Err(unusable(directory, format!("it has none: expected one of {}", FILES.join(", ")))),
        }
    }

    /// The tokenizer of a model directory: its `tokenizer.json`, `spiece.model` or `vocab.json`. If the files name ByT5's
    /// tokenizer, which has no file, it is the directory itself. `None` if there is no tokenizer.
    pub fn in_directory(directory: &Path) -> Option<PathBuf> {
        let companion_files = CompanionFiles::read(directory).unwrap_or_default();
        let file = FILES.map(|name| directory.join(name)).into_iter().find(|path| path.is_file());
        let file = file.filter(|_| companion_files.class() != Some(utf8_bytes::CLASS));
        file.or_else(|| is_of_bytes(&companion_files).then(|| directory.to_owned()))
    }

    fn take_companions(&mut self, directory: &Path) {
        self.companions =
            COMPANION_FILES.map(|name| directory.join(name)).into_iter().filter(|path| path.exists()).collect();
    }
}

/// Warns if the files name a class of transformers that makes other tokens of a SentencePiece model than T5's does.
fn warn_of_class(path: &Path, companion_files: &CompanionFiles) {
    const OF_T5: [&str; 8] = [
        "T5Tokenizer",
        "MT5Tokenizer",
        "UMT5Tokenizer",
        "GemmaTokenizer",
        "PreTrainedTokenizer",
        "TokenizersBackend",
        "SentencePieceBackend",
        "AutoTokenizer",
    ];
    let Some(class) = companion_files.class() else { return };
    if !OF_T5.contains(&class.strip_suffix("Fast").unwrap_or(class)) {
        tracing::warn!(
            "{}: the files beside it name `{class}`; it is read as T5's tokenizer reads it, so ids may differ from transformers' \
             (`save_pretrained` of its tokenizer writes a tokenizer.json, which has that class's ids)",
            path.display()
        );
    }
}

/// Refuses a side of truncation that is none, as transformers does.
fn check_side(companion_files: &CompanionFiles) -> Result<(), String> {
    match companion_files.setting("truncation_side") {
        Some(side) if side.as_str().and_then(Side::of_name).is_none() => {
            Err(format!("tokenizer_config.json: `truncation_side` is {side}, expected \"right\" or \"left\""))
        }
        _ => Ok(()),
    }
}

/// Whether a directory without another tokenizer has ByT5's, according to its files. Only ByT5 has a table with that many
/// rows.
fn is_of_bytes(companion_files: &CompanionFiles) -> bool {
    companion_files
        .class()
        .map_or(companion_files.rows == Some(utf8_bytes::USUAL_ROWS), |class| class == utf8_bytes::CLASS)
}

/// The `tokenizer.json` of a `vocab.json` with the `merges.txt` beside it.
fn byte_pair_json(path: &Path, vocabulary: &[u8], companion_files: &CompanionFiles) -> Result<String, String> {
    let merges = path.with_file_name(byte_pairs::MERGES);
    let merges = regular_file::read_to_string(&merges, LARGEST_FILE_BYTES);
    let merges = merges.map_err(|error| format!("{}: {error}", byte_pairs::MERGES))?;
    let vocabulary = std::str::from_utf8(vocabulary).map_err(|error| error.to_string())?;
    byte_pairs::tokenizer_json(vocabulary, &merges, companion_files)
}
