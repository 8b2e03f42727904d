//! A `vocab.json` with its `merges.txt` as a `tokenizer.json`: the byte-level pairs of RoBERTa, which CodeT5 has.
//!
//! The tokenizer is the one that transformers' `RobertaTokenizer` (5.23) makes of them and of the files beside them, which name the
//! tokens that are found by name: `tokenizer_config.json`, and where that has no list of all of them
//! `special_tokens_map.json` and `added_tokens.json`.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::beside::Beside;

/// The names under which models are published.
pub(super) const VOCABULARY: &str = "vocab.json";
pub(super) const MERGES: &str = "merges.txt";

/// The roles of tokens, with RoBERTa's names for them, in the order in which transformers looks at them.
const ROLES: [(&str, &str); 7] = [
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("unk_token", "<unk>"),
    ("sep_token", "</s>"),
    ("pad_token", "<pad>"),
    ("cls_token", "<s>"),
    ("mask_token", "<mask>"),
];

/// The text of the `tokenizer.json` that these are.
///
/// # Errors
/// What is wrong with them.
pub(super) fn tokenizer_json(vocabulary: &str, merges: &str, beside: &Beside) -> Result<String, String> {
    let entries: Map<String, Value> = serde_json::from_str(vocabulary).map_err(|error| error.to_string())?;
    let merges = merges.lines().filter(|line| !line.is_empty() && !line.starts_with("#version"));
    let merges = merges.map(|line| {
        let pair = line.split_once(' ').filter(|(_, second)| !second.contains(' '));
        pair.map(|(first, second)| [first, second]).ok_or_else(|| format!("{MERGES}: `{line}`: expected two tokens"))
    });
    let merges: Vec<[&str; 2]> = merges.collect::<Result<_, _>>()?;
    let mut named = Named { entries: &entries, tokens: Vec::new(), known: HashSet::new() };
    let tokens = tokens(beside)?;
    for token in &tokens {
        named.add(token)?;
    }
    let of_role = |role: &str| {
        let (_, usual) = ROLES.into_iter().find(|(other, _)| *other == role).unwrap_or_default();
        let name = beside.role(role).and_then(name_of).unwrap_or(usual).to_owned();
        let id = named.id_of(&name).ok_or_else(|| format!("`{name}`, the {role}, is no token"))?;
        Ok::<_, String>(json!([name, id]))
    };
    let flag = |key: &str| beside.setting(key).and_then(Value::as_bool);
    let prefix = flag("add_prefix_space").unwrap_or(false);
    let (separator, first) = (of_role("sep_token")?, of_role("cls_token")?);
    let bytes = |prefix: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": named.tokens,
        "normalizer": null,
        "pre_tokenizer": bytes(prefix),
        "post_processor": {"type": "RobertaProcessing", "sep": separator, "cls": first,
            "trim_offsets": flag("trim_offsets").unwrap_or(true), "add_prefix_space": prefix},
        "decoder": bytes(true),
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": entries, "merges": merges},
    });
    Ok(json.to_string())
}

/// A token's settings, as the files say them or as transformers makes them of a name.
fn settings(token: &Value, is_special: bool) -> Value {
    let flag = |key: &str, usual: bool| token[key].as_bool().unwrap_or(usual);
    let special = flag("special", is_special);
    json!({"content": name_of(token).unwrap_or_default(), "single_word": flag("single_word", false),
           "lstrip": flag("lstrip", false), "rstrip": flag("rstrip", false),
           "normalized": flag("normalized", !special), "special": special})
}

fn name_of(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// The tokens that are found by name, in the order in which transformers adds them.
fn tokens(beside: &Beside) -> Result<Vec<Value>, String> {
    let number = |id: &Value| id.as_u64().ok_or_else(|| format!("`{id}`: expected the id of a token"));
    let mut tokens: Vec<(u64, Value)> = Vec::new();
    let further = beside.further();
    let roles = ROLES.iter().map(|(role, usual)| beside.role(role).cloned().unwrap_or_else(|| (*usual).into()));
    if let Some(list) = beside.list() {
        for (id, token) in list {
            let id = id.parse().map_err(|_| format!("added_tokens_decoder: `{id}`: expected the id of a token"))?;
            tokens.push((id, settings(token, false)));
        }
    } else {
        // A role counts for a legacy list where a file names it, by its name.
        let is_named = |name: &str| {
            let in_files = ROLES.iter().filter_map(|(role, _)| beside.role(role));
            in_files.chain(further).any(|token| name_of(token) == Some(name))
        };
        for (name, id) in beside.added.iter().flatten() {
            tokens.push((number(id)?, settings(&name.as_str().into(), is_named(name))));
        }
    }
    tokens.sort_by_key(|(id, _)| *id);
    let listed = tokens.into_iter().map(|(_, token)| token);
    let special = roles.chain(further.iter().cloned()).map(|token| settings(&token, true));
    Ok(listed.chain(special).collect())
}

/// Tokens with their ids: that of the vocabulary, or the next one.
struct Named<'a> {
    entries: &'a Map<String, Value>,
    tokens: Vec<Value>,
    known: HashSet<String>,
}

impl Named<'_> {
    fn id_of(&self, name: &str) -> Option<u64> {
        let in_vocabulary = self.entries.get(name).and_then(Value::as_u64);
        let added = || self.tokens.iter().find(|token| token["content"] == name)?["id"].as_u64();
        in_vocabulary.or_else(added)
    }

    fn add(&mut self, token: &Value) -> Result<(), String> {
        let name = token["content"].as_str().filter(|name| !name.is_empty());
        let name = name.ok_or("a token without a name")?;
        if !self.known.insert(name.to_owned()) {
            return Ok(());
        }
        let largest = self.tokens.iter().filter_map(|token| token["id"].as_u64()).max();
        let next = largest.map_or(0, |id| id + 1).max(self.entries.len() as u64);
        let mut token = token.clone();
        token["id"] = self.id_of(name).unwrap_or(next).into();
        self.tokens.push(token);
        Ok(())
    }
}
