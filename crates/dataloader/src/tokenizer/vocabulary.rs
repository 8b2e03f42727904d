//! [`Vocabulary`]: the entries of a tokenizer, and the tokenizer's files with fewer entries or with more of them.
//!
//! A trim keeps the order of the entries and numbers them anew. The tokens of a text whose entries all stay are the same as before:
//! * Unigram looks for the best path. Its pieces stay, so it stays the best one. The piece of the lowest score stays too, because
//!   it decides the price of unknown text.
//! * Of byte-pair merges those stay that make the pieces which stay, and whatever they are made of ([`Vocabulary::parts`]).
//! * WordPiece and WordLevel take the longest entry, and no longer one comes.
//!
//! A new entry of a Unigram tokenizer is a piece of its own, as SentencePiece's user-defined ones are: the blanks around it stay what
//! they were. If the normalizer would change its text, such as a line break, a character of private use stands for it between
//! normalizer and decoder. Other tokenizers get an added token.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;

use fancy_regex::Regex;
use serde_json::{Map, Value, json};
use tokenizers::{NormalizedString, Normalizer};

use super::companion_files;
use super::{COMPANION_FILES, LARGEST_FILE_BYTES, Tokenizer, TokenizerJson, byte_pairs, piece_file, sentence_piece};
use crate::Error;

const FILE: &str = "tokenizer.json";
/// The class of transformers that takes a `tokenizer.json` as it is.
const PLAIN_CLASS: &str = "PreTrainedTokenizerFast";
/// The score of a piece that is taken before others.
const FIRST_SCORE: f64 = 0.0;

/// The files of a tokenizer with other entries.
#[derive(Debug)]
pub struct ChangedTokenizer {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Names and contents of the files.
    pub files: Vec<(String, Vec<u8>)>,
    /// For each id the id before; `None` is a new entry.
    pub entries: Vec<Option<u32>>,
}

/// The entries of a tokenizer.
pub struct Vocabulary {
    json: Value,
    /// By their ids.
    names: Vec<Option<String>>,
    /// Of a byte-pair model the rank and the result of each merge.
    merges: HashMap<(u32, u32), (usize, u32)>,
    path: PathBuf,
    /// The files beside it that belong to it: names and contents.
    beside: Vec<(String, Vec<u8>)>,
    /// The text of `tokenizer_config.json`, if the tokenizer came with one.
    config: Option<String>,
    /// Ids of the tokenizer's roles.
    roles: BTreeSet<u32>,
}

impl Vocabulary {
    /// The entries of a tokenizer. Of its files `tokenizer.json` is read once more.
    ///
    /// # Errors
    /// [`Error::Options`] for ByT5's tokenizer, which has the bytes alone; [`Error::Tokenizer`] for a file that cannot be read.
    pub fn read(tokenizer: &Tokenizer) -> Result<Self, Error> {
        let path = tokenizer.path.clone();
        let json: Value = match tokenizer.json() {
            TokenizerJson::File(path) => {
                let bytes =
                    regular_file::read(path, LARGEST_FILE_BYTES).map_err(|error| super::unusable(path, error))?;
                serde_json::from_slice(&bytes).map_err(|error| super::unusable(path, error))?
            }
            TokenizerJson::Text(text) => serde_json::from_str(text).map_err(|error| super::unusable(&path, error))?,
            TokenizerJson::None => {
                let said = "its tokenizer is ByT5's, whose entries are the bytes: every text has them, and none can go";
                return Err(Error::Options(format!("{}: {said}", path.display())));
            }
        };
        let names = (0..tokenizer.vocab_size as u32).map(|id| tokenizer.token_name(id)).collect();
        let merges = merges(&json["model"]);
        let mut beside = Vec::new();
        for file in &tokenizer.companions {
            let name = file.file_name().and_then(|name| name.to_str()).filter(|name| COMPANION_FILES.contains(name));
            if let Some(name) = name {
                let bytes =
                    regular_file::read(file, LARGEST_FILE_BYTES).map_err(|error| super::unusable(file, error))?;
                beside.push((name.to_owned(), bytes));
            }
        }
        let said = [tokenizer.eos_id().ok(), tokenizer.pad_id().ok(), tokenizer.unknown_id()];
        let roles = said.into_iter().flatten().chain(tokenizer.start_ids.iter().copied()).collect();
        let transformers = &tokenizer.transformers_config;
        let config = transformers.is_published.then(|| transformers.text.clone());
        Ok(Self { json, names, merges, path, beside, config, roles })
    }

    /// The ids that every trim keeps: special and added tokens, sentinels, the pieces of bytes, and what the files name by its id.
    pub fn lasting(&self) -> BTreeSet<u32> {
        let mut ids = self.roles.clone();
        let rows = self.names.len() as u32;
        let model = &self.json["model"];
        ids.extend(self.added().filter_map(|token| id(&token["id"])));
        ids.extend(id(&model["unk_id"]));
        ids.extend(model["unk_token"].as_str().and_then(|name| self.id_of(name)));
        let mut framing = self.json.clone();
        each_id(&mut framing, &mut |named| ids.extend(id(named)));
        if let Some(config) = self.config.as_ref().and_then(|text| serde_json::from_str::<Value>(text).ok()) {
            let listed = config["added_tokens_decoder"].as_object().into_iter().flatten();
            ids.extend(listed.filter_map(|(id, _)| id.parse::<u32>().ok()));
        }
        // Letters of bytes: without them a byte-level tokenizer loses other texts than these.
        let is_byte_level = !self.merges.is_empty() && has_type(&self.json["pre_tokenizer"], "ByteLevel");
        for (name, id) in self.names.iter().zip(0..) {
            let is_letter = |name: &str| is_byte_level && name.chars().count() == 1;
            if name.as_ref().is_some_and(|name| is_sentinel(name) || is_byte(name) || is_letter(name)) {
                ids.insert(id);
            }
        }
        let scores = model["vocab"].as_array().into_iter().flatten().map(|piece| piece[1].as_f64().unwrap_or(0.0));
        ids.extend(scores.zip(0..).min_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, id)| id));
        for (_, file) in self.piece_files() {
            let kinds = sentence_piece::kinds(file).unwrap_or_default();
            ids.extend(
                kinds.into_iter().zip(0..).filter(|(kind, _)| *kind != sentence_piece::NORMAL).map(|(_, id)| id),
            );
        }
        ids.retain(|id| *id < rows);
        ids
    }

    /// The entries without a letter of another script than these, in their order. Digits, punctuation and signs belong to every script. Parts of
    /// a letter belong to none: [`Vocabulary::parts`] has those that an entry needs.
    ///
    /// # Errors
    /// [`Error::Options`] for a script that Unicode does not name.
    pub fn of_scripts(&self, tokenizer: &Tokenizer, scripts: &[String]) -> Result<Vec<u32>, Error> {
        let mut of_all = String::new();
        for script in scripts {
            let class = format!(r"\p{{Script={script}}}");
            let is_name = script.chars().all(|letter| letter.is_ascii_alphabetic() || letter == '_');
            if script.is_empty() || !is_name || Regex::new(&class).is_err() {
                return Err(Error::Options(format!(
                    "--keep-scripts: Unicode has no script `{}`: expected names such as Latin, Cyrillic, Han, Hiragana, Hangul, Arabic",
                    script.escape_debug()
                )));
            }
            of_all.push_str(&class);
        }
        if scripts.is_empty() {
            return Ok(Vec::new());
        }
        let pattern = format!(r"\A[{of_all}\p{{Script=Common}}\p{{Script=Inherited}}&&[^\x{{FFFD}}]]*\z");
        let pattern = Regex::new(&pattern).map_err(|error| Error::Options(format!("--keep-scripts: {error}")))?;
        let mut ids = Vec::new();
        for (name, id) in self.names.iter().zip(0..) {
            if name.is_some() && pattern.is_match(&tokenizer.decode(&[id])?).unwrap_or(false) {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    /// Whether there is an entry with this id.
    pub fn has(&self, id: u32) -> bool {
        self.names.get(id as usize).is_some_and(Option::is_some)
    }

    /// The largest id plus one.
    pub fn rows(&self) -> usize {
        self.names.len()
    }

    /// The number of entries.
    pub fn entries(&self) -> usize {
        self.names.iter().flatten().count()
    }

    /// What a piece of a byte-pair model is made of, step by step, and the piece itself.
    pub fn parts(&self, piece: u32) -> Vec<u32> {
        let Some(name) = self.names.get(piece as usize).and_then(Option::as_ref).filter(|_| !self.merges.is_empty())
        else {
            return vec![piece];
        };
        let letters: Option<Vec<u32>> =
            name.chars().map(|letter| self.id_of(letter.encode_utf8(&mut [0; 4]))).collect();
        let mut made = vec![piece];
        let Some(mut symbols) = letters else { return made };
        made.extend_from_slice(&symbols);
        loop {
            let pairs = symbols.windows(2).enumerate();
            let found = pairs.filter_map(|(at, pair)| Some((*self.merges.get(&(pair[0], pair[1]))?, at)));
            let Some(((_, into), at)) = found.min() else { return made };
            made.push(into);
            symbols.splice(at..at + 2, [into]);
        }
    }

    /// The tokenizer with these entries alone, which are numbered in their order.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the files contradict each other, or the result is no tokenizer.
    pub fn trimmed(&self, keep: &BTreeSet<u32>) -> Result<ChangedTokenizer, Error> {
        let entries: Vec<u32> = keep.iter().copied().filter(|id| self.has(*id)).collect();
        let numbers: HashMap<u32, u32> = entries.iter().copied().zip(0..).collect();
        let new_id = |old: u32| numbers.get(&old).copied();
        let mut json = self.json.clone();
        self.trim_model(&mut json["model"], &numbers);
        each_id(&mut json, &mut |named| renumber(named, &new_id));
        for token in json.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
            renumber(&mut token["id"], &new_id);
        }
        let mut files = Vec::new();
        for (name, file) in &self.beside {
            let changed = match name.as_str() {
                sentence_piece::FILE | sentence_piece::OTHER_FILE => {
                    self.check_pieces(name, file)?;
                    piece_file::trimmed(file, new_id).map_err(|reason| super::unusable(&self.path, reason))?
                }
                // tokenizer.json has all of them.
                byte_pairs::VOCABULARY | byte_pairs::MERGES => continue,
                companion_files::ADDED => renumbered_names(file, &new_id),
                _ => file.clone(),
            };
            files.push((name.clone(), changed));
        }
        let config = self.config.as_ref().map(|text| renumbered_config(text, &new_id));
        self.changed(&json, files, config, entries.into_iter().map(Some).collect())
    }

    fn trim_model(&self, model: &mut Value, numbers: &HashMap<u32, u32>) {
        let new_id = |old: u32| numbers.get(&old).copied();
        if let Some(number) = id(&model["unk_id"]).and_then(new_id) {
            model["unk_id"] = number.into();
        }
        match &mut model["vocab"] {
            Value::Array(pieces) => {
                let mut old = 0..;
                pieces.retain(|_| old.next().and_then(new_id).is_some());
            }
            Value::Object(names) => {
                names.retain(|_, named| id(named).and_then(new_id).is_some());
                names.values_mut().for_each(|named| renumber(named, &new_id));
            }
            _ => {}
        }
        let has = |name: &str| self.id_of(name).and_then(new_id).is_some();
        let prefix = continuing_prefix(model).to_owned();
        if let Some(Value::Array(merges)) = model.get_mut("merges") {
            merges.retain(|merge| {
                pair(merge).is_some_and(|(one, other)| has(one) && has(other) && has(&joined(one, other, &prefix)))
            });
        }
    }

    /// The tokenizer with these tokens as well, behind the entries that are there.
    ///
    /// # Errors
    /// [`Error::Options`] for a token that is there already, or that the tokenizer would cut.
    pub fn grown(&self, tokenizer: &Tokenizer, tokens: &[String]) -> Result<ChangedTokenizer, Error> {
        let refused = |token: &str, reason: &str| {
            let (path, token) = (self.path.display(), token.escape_debug());
            Error::Options(format!("{path}: cannot add the token `{token}`: {reason}"))
        };
        let mut json = self.json.clone();
        let is_unigram = json["model"]["vocab"].is_array();
        let mut entries: Vec<Option<u32>> = (0..self.names.len() as u32).map(Some).collect();
        let (mut known, mut stand_ins) = (HashSet::new(), StandIns::new(self, tokenizer));
        if is_unigram {
            self.take_added_into_model(&mut json)?;
        }
        for token in tokens {
            if token.is_empty() {
                return Err(refused(token, "it has no text"));
            }
            if self.holds(token) || !known.insert(token.as_str()) {
                return Err(refused(token, "it is there already"));
            }
            match is_unigram {
                true => {
                    let text = stand_ins.text(token).ok_or_else(|| refused(token, "too many tokens of this kind"))?;
                    push(&mut json["model"]["vocab"], json!([text, FIRST_SCORE]));
                }
                false => {
                    let mut added = added_token(token);
                    added["id"] = entries.len().into();
                    push(&mut json["added_tokens"], added);
                }
            }
            entries.push(None);
        }
        stand_ins.put_into(&mut json);
        let is_left_out = |name: &str| match is_unigram {
            true => [sentence_piece::FILE, sentence_piece::OTHER_FILE].contains(&name),
            false => name == companion_files::ADDED,
        };
        let files = self.beside.iter().filter(|(name, _)| !is_left_out(name)).cloned().collect();
        let new: Vec<(usize, &String)> = (self.names.len()..).zip(tokens).collect();
        let config = self.config.as_ref().map(|text| grown_config(text, is_unigram, &new));
        let changed = self.changed(&json, files, config, entries)?;
        for (id, token) in new {
            let id = id as u32;
            let ids = changed.tokenizer.encode(&format!("a{token}a"))?;
            if !ids.contains(&id)
                || changed.tokenizer.decode(&[id])?.trim_start_matches(' ') != token.trim_start_matches(' ')
            {
                return Err(refused(token, "the tokenizer cuts or changes it within a text"));
            }
        }
        Ok(changed)
    }

    /// Writes the added tokens that are not in a Unigram model into it, so that pieces can follow them.
    fn take_added_into_model(&self, json: &mut Value) -> Result<(), Error> {
        let pieces = json["model"]["vocab"].as_array().map_or(0, Vec::len);
        for (id, name) in self.names.iter().enumerate().skip(pieces) {
            let name = name.as_ref().ok_or_else(|| {
                super::unusable(&self.path, format!("no entry has the id {id}: entries cannot be added behind a gap"))
            })?;
            push(&mut json["model"]["vocab"], json!([name, FIRST_SCORE]));
        }
        Ok(())
    }

    /// Whether a token has an entry: by its name, or by a character that stands for it.
    pub fn holds(&self, token: &str) -> bool {
        let replaces = |step: &Value| step["type"] == "Replace" && step["pattern"]["String"] == *token;
        self.id_of(token).is_some() || steps(&self.json["normalizer"], "normalizers").iter().any(replaces)
    }

    /// The files of a changed tokenizer.
    fn changed(
        &self,
        json: &Value,
        mut files: Vec<(String, Vec<u8>)>,
        config: Option<String>,
        entries: Vec<Option<u32>>,
    ) -> Result<ChangedTokenizer, Error> {
        let text = json.to_string();
        let tokenizer = Tokenizer::from_bytes(text.as_bytes(), &self.path)?;
        let config = config.unwrap_or_else(|| tokenizer.transformers_config().to_owned());
        files.push((FILE.to_owned(), text.into_bytes()));
        files.push((companion_files::CONFIG.to_owned(), config.into_bytes()));
        Ok(ChangedTokenizer { tokenizer, files, entries })
    }

    /// Refuses a SentencePiece file beside a `tokenizer.json` with other entries.
    fn check_pieces(&self, name: &str, file: &[u8]) -> Result<(), Error> {
        let pieces = sentence_piece::texts(file).map_err(|reason| super::unusable(&self.path, reason))?;
        let differs =
            pieces.iter().zip(0_u32..).find(|(text, id)| self.names.get(*id as usize) != Some(&Some((*text).clone())));
        match differs {
            None => Ok(()),
            Some((text, id)) => Err(super::unusable(
                &self.path,
                format!(
                    "{name} beside it has other entries: {id} is `{text}` there; leave out the file that the model was not trained with"
                ),
            )),
        }
    }

    fn piece_files(&self) -> impl Iterator<Item = &(String, Vec<u8>)> {
        self.beside
            .iter()
            .filter(|(name, _)| [sentence_piece::FILE, sentence_piece::OTHER_FILE].contains(&name.as_str()))
    }

    fn added(&self) -> impl Iterator<Item = &Value> {
        self.json["added_tokens"].as_array().into_iter().flatten()
    }

    fn id_of(&self, name: &str) -> Option<u32> {
        match &self.json["model"]["vocab"] {
            Value::Object(names) => names.get(name).and_then(id),
            _ => None,
        }
        .or_else(|| self.names.iter().position(|known| known.as_deref() == Some(name)).map(|id| id as u32))
    }
}

/// Characters that stand for tokens whose text the normalizer would change.
struct StandIns<'t> {
    tokenizer: &'t Tokenizer,
    free: Box<dyn Iterator<Item = char> + 't>,
    chosen: Vec<(String, char)>,
}

impl<'t> StandIns<'t> {
    fn new(vocabulary: &'t Vocabulary, tokenizer: &'t Tokenizer) -> Self {
        let is_free = move |letter: &char| {
            let text = letter.to_string();
            normalized(tokenizer, &text) == text
                && !vocabulary.names.iter().flatten().any(|name| name.contains(*letter))
        };
        Self { tokenizer, free: Box::new(('\u{e000}'..='\u{f8ff}').filter(is_free)), chosen: Vec::new() }
    }

    /// The text of the token's piece; `None`: there are no characters left.
    fn text(&mut self, token: &str) -> Option<String> {
        let is_changed = normalized(self.tokenizer, token) != token || token.contains(char::is_whitespace);
        if !is_changed {
            return Some(token.to_owned());
        }
        let letter = self.free.next()?;
        self.chosen.push((token.to_owned(), letter));
        Some(letter.to_string())
    }

    /// Puts the replacements before the normalizer and behind the decoder.
    fn put_into(&self, json: &mut Value) {
        if self.chosen.is_empty() {
            return;
        }
        let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let (mut before, mut behind) = (Vec::new(), steps(&json["decoder"], "decoders"));
        for (token, letter) in &self.chosen {
            before.push(replace(token, &letter.to_string()));
            behind.push(replace(&letter.to_string(), token));
        }
        // With the composition that this program puts before a table of SentencePiece.
        let normalizer = serde_json::to_value(self.tokenizer.inner.get_normalizer()).unwrap_or_default();
        before.extend(steps(&normalizer, "normalizers"));
        json["normalizer"] = json!({"type": "Sequence", "normalizers": before});
        json["decoder"] = json!({"type": "Sequence", "decoders": behind});
    }
}

/// The steps of a normalizer or a decoder.
fn steps(part: &Value, key: &str) -> Vec<Value> {
    match &part[key] {
        Value::Array(steps) => steps.clone(),
        _ if part.is_null() => Vec::new(),
        _ => vec![part.clone()],
    }
}

fn normalized(tokenizer: &Tokenizer, text: &str) -> String {
    let mut normalized = NormalizedString::from(text);
    match tokenizer.inner.get_normalizer().map(|normalizer| normalizer.normalize(&mut normalized)) {
        Some(Err(_)) => String::new(),
        _ => normalized.get().to_owned(),
    }
}

/// `<extra_id_0>` and its like; mT5 has a blank before them.
fn is_sentinel(name: &str) -> bool {
    let name = name.trim_start_matches('\u{2581}');
    name.strip_prefix("<extra_id_")
        .and_then(|rest| rest.strip_suffix('>'))
        .is_some_and(|number| number.parse::<u32>().is_ok())
}

/// `<0x0A>`: a byte of a character without a piece.
fn is_byte(name: &str) -> bool {
    let digits = name.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn push(list: &mut Value, value: Value) {
    match list {
        Value::Array(list) => list.push(value),
        other => *other = Value::Array(vec![value]),
    }
}

fn renumber(named: &mut Value, new_id: &impl Fn(u32) -> Option<u32>) {
    if let Some(new) = id(named).and_then(new_id) {
        *named = new.into();
    }
}

/// Hands each id to `each` that a `tokenizer.json` has in its template and its padding.
fn each_id(json: &mut Value, each: &mut impl FnMut(&mut Value)) {
    if let Some(padding) = json.get_mut("padding").and_then(|padding| padding.get_mut("pad_id")) {
        each(padding);
    }
    if let Some(template) = json.get_mut("post_processor") {
        each_id_of_template(template, each);
    }
}

fn each_id_of_template(part: &mut Value, each: &mut impl FnMut(&mut Value)) {
    match part {
        Value::Object(parts) => {
            for (key, part) in parts {
                match (key.as_str(), part) {
                    ("ids", Value::Array(ids)) => ids.iter_mut().for_each(&mut *each),
                    ("sep" | "cls", Value::Array(pair)) => pair.iter_mut().skip(1).for_each(&mut *each),
                    (_, part) => each_id_of_template(part, each),
                }
            }
        }
        Value::Array(parts) => parts.iter_mut().for_each(|part| each_id_of_template(part, each)),
        _ => {}
    }
}

/// Whether a part, or a part within it, is of this type.
fn has_type(part: &Value, name: &str) -> bool {
    let inner = part["pretokenizers"].as_array().into_iter().flatten();
    part["type"] == name || inner.into_iter().any(|part| has_type(part, name))
}

/// The ranks and the results of a byte-pair model's merges.
fn merges(model: &Value) -> HashMap<(u32, u32), (usize, u32)> {
    let Some(names) = model["vocab"].as_object() else { return HashMap::new() };
    let of = |name: &str| names.get(name).and_then(id);
    let prefix = continuing_prefix(model);
    let of_merge = |(rank, merge): (usize, &Value)| {
        let (one, other) = pair(merge)?;
        Some(((of(one)?, of(other)?), (rank, of(&joined(one, other, prefix))?)))
    };
    model["merges"].as_array().into_iter().flatten().enumerate().filter_map(of_merge).collect()
}

/// The two parts of a merge, which newer files write as a list.
fn pair(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(text) => text.split_once(' '),
        pair => Some((pair[0].as_str()?, pair[1].as_str()?)),
    }
}

fn continuing_prefix(model: &Value) -> &str {
    model["continuing_subword_prefix"].as_str().unwrap_or_default()
}

fn joined(one: &str, other: &str, prefix: &str) -> String {
    format!("{one}{}", other.strip_prefix(prefix).unwrap_or(other))
}

/// An `added_tokens.json` with the new ids.
fn renumbered_names(file: &[u8], new_id: &impl Fn(u32) -> Option<u32>) -> Vec<u8> {
    let mut names: Map<String, Value> = serde_json::from_slice(file).unwrap_or_default();
    names.retain(|_, named| id(named).and_then(new_id).is_some());
    names.values_mut().for_each(|named| renumber(named, new_id));
    format!("{:#}\n", Value::Object(names)).into_bytes()
}

/// A `tokenizer_config.json` with the new ids.
fn renumbered_config(text: &str, new_id: &impl Fn(u32) -> Option<u32>) -> String {
    let Ok(mut config) = serde_json::from_str::<Value>(text) else { return text.to_owned() };
    if let Some(Value::Object(tokens)) = config.get_mut("added_tokens_decoder") {
        let renumbered = std::mem::take(tokens).into_iter();
        *tokens = renumbered.filter_map(|(id, token)| Some((new_id(id.parse().ok()?)?.to_string(), token))).collect();
    }
    format!("{config:#}\n")
}

/// A `tokenizer_config.json` for more tokens. A class that makes its own tokenizer of the pieces would leave out the replacements.
fn grown_config(text: &str, is_unigram: bool, new: &[(usize, &String)]) -> String {
    let Ok(mut config) = serde_json::from_str::<Value>(text) else { return text.to_owned() };
    if is_unigram {
        config["tokenizer_class"] = PLAIN_CLASS.into();
        config["model_input_names"] = json!(["input_ids", "attention_mask"]);
    } else if let Some(Value::Object(tokens)) = config.get_mut("added_tokens_decoder") {
        tokens.extend(new.iter().map(|(id, token)| (id.to_string(), added_token(token))));
    }
    format!("{config:#}\n")
}

fn added_token(content: &str) -> Value {
    json!({"content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false})
}

#[cfg(test)]
#[path = "vocabulary/tests.rs"]
mod tests;
