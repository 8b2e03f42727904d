//! Converts a `vocab.json` with its `merges.txt` to a `tokenizer.json`: RoBERTa's byte-level BPE, which CodeT5 uses.
//!
//! The result equals the tokenizer that transformers' `RobertaTokenizer` (5.23) makes from them and from the files beside them.
//! Those files name the added tokens: `tokenizer_config.json`, and if that does not list all of them, `special_tokens_map.json` and
//! `added_tokens.json`.

use serde_json::{Map, Value, json};

use super::added_tokens::{self, Role};
use super::companion_files::CompanionFiles;

/// The file names in published models.
pub(super) const VOCABULARY: &str = "vocab.json";
pub(super) const MERGES: &str = "merges.txt";

/// The roles of tokens, with RoBERTa's names for them, in the order in which transformers checks them.
const ROLES: [Role; 7] = [
    ("bos_token", Some("<s>")),
    ("eos_token", Some("</s>")),
    ("unk_token", Some("<unk>")),
    ("sep_token", Some("</s>")),
    ("pad_token", Some("<pad>")),
    ("cls_token", Some("<s>")),
    ("mask_token", Some("<mask>")),
];

/// Returns the text of the `tokenizer.json`.
///
/// # Errors
/// The fault in the files.
pub(super) fn tokenizer_json(
    vocabulary: &str,
    merges: &str,
    companion_files: &CompanionFiles,
) -> Result<String, String> {
    let entries: Map<String, Value> = serde_json::from_str(vocabulary).map_err(|error| error.to_string())?;
    let merges = merges.lines().filter(|line| !line.is_empty() && !line.starts_with("#version"));
    let merges = merges.map(|line| {
        let pair = line.split_once(' ').filter(|(_, second)| !second.contains(' '));
        pair.map(|(first, second)| [first, second]).ok_or_else(|| format!("{MERGES}: `{line}`: expected two tokens"))
    });
    let merges: Vec<[&str; 2]> = merges.collect::<Result<_, _>>()?;
    let further = companion_files
        .further()
        .or_else(|| companion_files.further_by_names().map(<[Value]>::to_vec))
        .unwrap_or_default();
    let in_vocabulary = |name: &str| entries.get(name).and_then(Value::as_u64);
    let tokens = added_tokens::in_order(companion_files, &ROLES, &further)?;
    let mut tokens = added_tokens::with_ids(tokens, entries.len() as u64, in_vocabulary);
    // RoBERTa has roles that no file here mentions. If the table has no row for such a token, the model does not have
    // it.
    let is_implied = |name: &Value| {
        ROLES
            .iter()
            .any(|(role, usual)| companion_files.role(role).is_none() && usual.is_some_and(|usual| name == usual))
    };
    let has_row = |token: &Value| token["id"].as_u64() < Some(companion_files.rows.unwrap_or(u64::MAX));
    tokens.retain(|token| has_row(token) || !is_implied(&token["content"]));
    let ids = added_tokens::ids(&tokens);
    let of_role = |role: &str| {
        let usual = ROLES.iter().find(|(other, _)| *other == role).and_then(|(_, usual)| *usual);
        let name = companion_files.role(role).and_then(added_tokens::name_of).or(usual).unwrap_or_default();
        let id = in_vocabulary(name).or_else(|| ids.get(name).copied());
        Ok::<_, String>(json!([name, id.ok_or_else(|| format!("`{name}`, the {role}, is no token"))?]))
    };
    let flag = |key: &str| companion_files.setting(key).and_then(Value::as_bool);
    let prefix = flag("add_prefix_space").unwrap_or(false);
    let (separator, first) = (of_role("sep_token")?, of_role("cls_token")?);
    let bytes = |prefix: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": tokens,
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
