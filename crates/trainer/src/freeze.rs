//! Freezing: which parameters train, decided by name before anything is allocated for them.
//!
//! An item is a part (`encoder`, `decoder`, `shared`, `lm_head`), a prefix of parameter names that ends at a dot
//! (`decoder.block.0`), a whole name, or a glob (`*.layer_norm.weight`) in which `*` stands for any characters and `?` for one.
//! Names of a T5Gemma begin with `model.`, which may be left out; its tables are `shared` and not in `encoder` or `decoder`.
//!
//! Beside an adapter the base is frozen: the adapter trains, and the layers that are saved with it.
//!
//! Invariants:
//! * An item that names no parameter is an error, so a spelling mistake never trains what should be frozen.
//! * A prefix ends where a component ends: `decoder.block.1` is not `decoder.block.10`.

use t5::Lora;

use crate::error::{Error, Result};

/// One `bool` per name, in order: does it train?
///
/// # Errors
/// [`Error::UnknownFreezeItem`] for the first item that matches no name; [`Error::NothingToTrain`] when all are frozen.
pub fn trainable<'a>(
    names: impl Iterator<Item = &'a str> + Clone,
    freeze: &[String],
    lora: Option<&Lora>,
) -> Result<Vec<bool>> {
    for item in freeze {
        if !names.clone().any(|name| item_matches(item, name)) {
            return Err(Error::UnknownFreezeItem { item: item.clone(), known: parts(names) });
        }
    }
    let is_frozen = |name: &str| freeze.iter().any(|item| item_matches(item, name));
    let trains = |name: &str| lora.is_none_or(|lora| lora.trains(name)) && !is_frozen(name);
    let trainable: Vec<bool> = names.map(trains).collect();
    if trainable.contains(&true) { Ok(trainable) } else { Err(Error::NothingToTrain) }
}

/// The first components of the names, each once, in order.
fn parts<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let bare = |name: &'a str| name.strip_prefix("model.").unwrap_or(name);
    for part in names.map(bare).map(|name| name.split('.').next().unwrap_or(name)) {
        if !parts.iter().any(|known| known == part) {
            parts.push(part.to_owned());
        }
    }
    parts
}

pub(crate) fn item_matches(item: &str, name: &str) -> bool {
    if item.contains(['*', '?']) {
        return glob_matches(item.as_bytes(), name.as_bytes());
    }
    let item = item.trim_end_matches('.');
    let is_within = |name: &str| name.strip_prefix(item).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    let bare = name.strip_prefix("model.").unwrap_or(name);
    let is_table = bare.ends_with(".embed_tokens.weight");
    match item {
        "" => false,
        "shared" if is_table => true,
        "encoder" | "decoder" | "model" | "model.encoder" | "model.decoder" if is_table => false,
        _ => is_within(name) || is_within(bare),
    }
}

/// Linear in the name: on a mismatch only the last `*` takes one character more.
fn glob_matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut last_star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                last_star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == b'?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((star, taken)) = last_star else { return false };
                last_star = Some((star, taken + 1));
                p = star + 1;
                n = taken + 1;
            }
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 6] = [
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "encoder.final_layer_norm.weight",
        "decoder.block.1.layer.0.layer_norm.weight",
        "decoder.block.10.layer.0.layer_norm.weight",
        "lm_head.weight",
    ];

    fn check(freeze: &[&str], frozen: &[usize]) {
        let freeze: Vec<String> = freeze.iter().map(|&item| item.to_owned()).collect();
        let trainable = trainable(NAMES.into_iter(), &freeze, None).unwrap();
        let got: Vec<usize> = (0..NAMES.len()).filter(|&i| !trainable[i]).collect();
        assert_eq!(got, frozen, "{freeze:?}");
    }

    #[test]
    fn items_are_parts_prefixes_names_or_globs() {
        check(&[], &[]);
        check(&["encoder", "shared"], &[0, 1, 2]);
        check(&["lm_head"], &[5]);
        check(&["decoder.block.1"], &[3]);
        check(&["decoder.block.1."], &[3]);
        check(&["encoder.final_layer_norm.weight"], &[2]);
        check(&["*layer_norm.weight"], &[2, 3, 4]);
        check(&["decoder.block.?.*"], &[3]);
    }

    #[test]
    fn parts_of_a_gemma_have_the_same_names_as_those_of_a_t5() {
        const NAMES: [&str; 5] = [
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
            "model.encoder.layers.0.self_attn.q_proj.weight",
            "model.decoder.layers.1.mlp.up_proj.weight",
            "model.decoder.norm.weight",
        ];
        for (item, frozen) in [
            ("shared", &[0, 1][..]),
            ("encoder", &[2]),
            ("decoder", &[3, 4]),
            ("decoder.layers.1", &[3]),
            ("model.encoder", &[2]),
            ("model.encoder.layers", &[2]),
            ("encoder.embed_tokens", &[0]),
        ] {
            let trainable = trainable(NAMES.into_iter(), &[item.to_owned()], None).unwrap();
            let got: Vec<usize> = (0..NAMES.len()).filter(|&i| !trainable[i]).collect();
            assert_eq!(got, frozen, "{item}");
        }
    }

    #[test]
    fn an_item_that_names_nothing_is_an_error_that_lists_the_parts() {
        for item in ["encodr", "enc", "", "*.q.bias", "."] {
            let error = trainable(NAMES.into_iter(), &[item.to_owned()], None).unwrap_err();
            assert!(matches!(&error, Error::UnknownFreezeItem { item: got, .. } if got == item), "{error}");
            assert!(error.to_string().contains("shared, encoder, decoder, lm_head"), "{error}");
        }
    }

    #[test]
    fn beside_an_adapter_only_the_adapter_trains_and_what_is_saved_with_it() {
        let lora = Lora { modules_to_save: vec!["lm_head".into()], ..Lora::default() };
        let names = NAMES.into_iter().chain(["encoder.block.0.layer.0.SelfAttention.q.lora_A.weight"]);
        let trains = |freeze: &[String]| trainable(names.clone(), freeze, Some(&lora)).unwrap();
        assert_eq!(trains(&[]), [false, false, false, false, false, true, true]);
        assert_eq!(trains(&["encoder".to_owned()]), [false, false, false, false, false, true, false]);
    }

    #[test]
    fn freezing_everything_is_an_error() {
        for freeze in ["*", "????*"] {
            assert!(matches!(trainable(NAMES.into_iter(), &[freeze.to_owned()], None), Err(Error::NothingToTrain)));
        }
    }
}
