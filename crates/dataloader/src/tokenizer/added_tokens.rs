//! The added tokens (found by name), in the order in which transformers (5.23) adds them to a tokenizer.
//!
//! First come the tokens that a file lists with their ids, then tokens with a role, then further special tokens. If two have
//! the same name, the first counts. A token of the vocabulary keeps its id; any other token gets the next id.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::companion_files::CompanionFiles;

/// A role, and the usual name of its token.
pub(super) type Role = (&'static str, Option<&'static str>);

/// Returns the tokens as a `tokenizer.json` lists them, without their ids.
///
/// `further` are the special tokens beside those with a role.
///
/// # Errors
/// The fault in the files.
pub(super) fn in_order(
    companion_files: &CompanionFiles,
    roles: &[Role],
    further: &[Value],
) -> Result<Vec<Value>, String> {
    let role = |role: &Role| companion_files.role(role.0).cloned().or(role.1.map(Value::from));
    let special = roles.iter().filter_map(role).chain(further.iter().cloned()).map(|token| settings(&token, true));
    Ok(listed(companion_files, roles)?.into_iter().chain(special).collect())
}

/// The names of the tokens that the files beside a `tokenizer.json` add, or end and pad texts with.
pub(super) fn names(companion_files: &CompanionFiles) -> Vec<String> {
    let further = companion_files.further().unwrap_or_default();
    let roles = ["eos_token", "pad_token"].into_iter().filter_map(|role| companion_files.role(role));
    let values = companion_files.list().into_iter().flat_map(Map::values).chain(&further).chain(roles);
    let added = companion_files.added.iter().filter(|_| companion_files.list().is_none()).flat_map(Map::keys);
    let mut names: Vec<String> =
        values.filter_map(name_of).chain(added.map(String::as_str)).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    names
}

/// The tokens that a file lists, in the order of their ids.
fn listed(companion_files: &CompanionFiles, roles: &[Role]) -> Result<Vec<Value>, String> {
    let mut tokens: Vec<(u64, Value)> = Vec::new();
    if let Some(list) = companion_files.list() {
        for (id, token) in list {
            let id = id.parse().map_err(|_| format!("added_tokens_decoder: `{id}`: expected the id of a token"))?;
            tokens.push((id, settings(token, false)));
        }
    } else {
        let further = companion_files.further().unwrap_or_default();
        let named = roles.iter().filter_map(|(role, _)| companion_files.role(role)).chain(&further).filter_map(name_of);
        let special: HashSet<&str> = named.collect();
        for (name, id) in companion_files.added.iter().flatten() {
            let id = id.as_u64().ok_or_else(|| format!("`{id}`: expected the id of a token"))?;
            tokens.push((id, settings(&name.as_str().into(), special.contains(name.as_str()))));
        }
    }
    tokens.sort_by_key(|(id, _)| *id);
    Ok(tokens.into_iter().map(|(_, token)| token).collect())
}

/// A token's settings: from the files, or the defaults that transformers gives to a name.
fn settings(token: &Value, is_special: bool) -> Value {
    let flag = |key: &str, usual: bool| token[key].as_bool().unwrap_or(usual);
    let special = flag("special", is_special);
    json!({"content": name_of(token).unwrap_or_default(), "single_word": flag("single_word", false),
           "lstrip": flag("lstrip", false), "rstrip": flag("rstrip", false),
           "normalized": flag("normalized", !special), "special": special})
}

/// The name of a token that is given as a name or as an object.
pub(super) fn name_of(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// Numbers the tokens: a token of the vocabulary gets its id there, any other the next id after `entries`. Tokens without a name,
/// and repeated names, are left out.
pub(super) fn with_ids(tokens: Vec<Value>, entries: u64, id_of: impl Fn(&str) -> Option<u64>) -> Vec<Value> {
    let (mut known, mut next) = (HashSet::new(), entries);
    let mut numbered = Vec::with_capacity(tokens.len());
    for mut token in tokens {
        let name = token["content"].as_str().unwrap_or_default().to_owned();
        if name.is_empty() || !known.insert(name.clone()) {
            continue;
        }
        let id = id_of(&name).unwrap_or(next);
        next = next.max(id.saturating_add(1));
        token["id"] = id.into();
        numbered.push(token);
    }
    numbered
}

/// The ids of numbered tokens, by their names.
pub(super) fn ids(tokens: &[Value]) -> HashMap<&str, u64> {
    tokens.iter().filter_map(|token| Some((token["content"].as_str()?, token["id"].as_u64()?))).collect()
}
