//! Published tokenizers give the same ids as transformers (`scripts/make_goldens.py tokenizers`).

use std::path::{Path, PathBuf};

use dataloader::{Tokenizer, TokenizerJson};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    tokens: usize,
    start: Vec<u32>,
    texts: Vec<String>,
    ids: Vec<Vec<u32>>,
}

fn directory(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tokenizers").join(case)
}

#[test]
fn ids_are_those_of_transformers() {
    for (case, eos) in [("t5-slow", 1), ("codet5", 2), ("byt5", 1), ("byt5-hub", 1)] {
        let path = Tokenizer::in_directory(&directory(case)).expect("a tokenizer");
        let tokenizer = Tokenizer::load(&path).unwrap();
        let golden: Golden = serde_json::from_slice(&std::fs::read(directory(case).join("ids.json")).unwrap()).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.start_ids()), (golden.tokens, &golden.start[..]), "{case}");
        assert_eq!((tokenizer.pad_id().unwrap(), tokenizer.eos_id().unwrap()), (0, eos), "{case}");
        for (text, ids) in golden.texts.iter().zip(&golden.ids) {
            assert_eq!(tokenizer.encode(text).unwrap(), *ids, "{case}: {text:?}");
        }
    }
}

#[test]
fn the_beginning_of_a_text_has_the_same_ids_as_the_whole() {
    for case in ["codet5", "byt5"] {
        let tokenizer = Tokenizer::load(&directory(case)).unwrap();
        let text = "a naïve  fox </s>  x <extra_id_3>\u{3000}".repeat(300);
        let whole = tokenizer.encode(&text).unwrap();
        for most in [1, 2, 17, 500, 3000] {
            let start = tokenizer.encode_start(&text, most).unwrap();
            assert_eq!(start[..most], whole[..most], "{case}: {most}");
        }
    }
}

#[test]
fn ids_that_are_handed_out_some_at_a_time_are_those_of_the_whole() {
    for case in ["t5-slow", "codet5", "byt5"] {
        let tokenizer = Tokenizer::in_directory(&directory(case)).expect("a tokenizer");
        let tokenizer = Tokenizer::load(&tokenizer).unwrap();
        let text = "a naïve  fox </s>  x <extra_id_3>\u{3000}".repeat(300);
        for text in ["", &text, &format!("{}b{}", " ".repeat(5000), " ".repeat(5000)), &"ab".repeat(20_000)] {
            let (mut ids, mut times) = (Vec::new(), 0);
            let each = |some: &[u32]| {
                ids.extend_from_slice(some);
                times += 1;
            };
            tokenizer.encode_each(text, each).unwrap();
            assert_eq!(ids, tokenizer.encode(text).unwrap(), "{case}: {} bytes", text.len());
            assert!(times > 2 || text.is_empty() || case == "byt5", "{case}: {times} times");
        }
    }
}

#[test]
fn files_that_belong_to_a_tokenizer_go_with_it() {
    let names = |case: &str| {
        let tokenizer = Tokenizer::load(&directory(case)).unwrap();
        let names = tokenizer.companions().iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned());
        (names.collect::<Vec<_>>(), matches!(tokenizer.json(), TokenizerJson::None))
    };
    let check = |case: &str, expected: &[&str], is_known_by_class: bool| {
        assert_eq!(
            names(case),
            (expected.iter().map(|name| (*name).to_owned()).collect(), is_known_by_class),
            "{case}"
        );
    };
    check("t5-slow", &["spiece.model", "special_tokens_map.json", "added_tokens.json"], false);
    check("codet5", &["vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"], false);
    check("byt5", &[], true);
    let alone = Tokenizer::load(&directory("byt5")).unwrap();
    assert!(alone.transformers_config().contains("\"ByT5Tokenizer\""));
}

#[test]
fn what_is_wrong_with_a_file_beside_the_vocabulary_is_said() {
    let check = |name: &str, text: &str, expected: &str| {
        let scratch = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(directory("codet5")).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, scratch.path().join(path.file_name().unwrap())).unwrap();
        }
        match text {
            "" => std::fs::remove_file(scratch.path().join(name)).unwrap(),
            text => std::fs::write(scratch.path().join(name), text).unwrap(),
        }
        let error = Tokenizer::load(scratch.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    };
    check("merges.txt", "", "merges.txt: No such file");
    check("merges.txt", "a b c\n", "merges.txt: `a b c`: expected two tokens");
    check("vocab.json", "[]", "vocab.json: not a usable tokenizer");
    check("tokenizer_config.json", "[]", "tokenizer_config.json: not a usable tokenizer");
    check("added_tokens.json", "{\"x\": \"y\"}", "expected the id of a token");
    let side = "`truncation_side` is \"middle\", expected \"right\" or \"left\"";
    check("tokenizer_config.json", "{\"truncation_side\": \"middle\"}", side);
}

#[test]
fn the_end_of_texts_is_the_one_of_the_map_of_special_tokens() {
    let scratch = tempfile::tempdir().unwrap();
    std::fs::copy(directory("t5-slow").join("spiece.model"), scratch.path().join("spiece.model")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(scratch.path().join(name), text).unwrap();
    let end = || {
        let tokenizer = Tokenizer::load(scratch.path()).unwrap();
        let ids = [tokenizer.eos_id().unwrap(), tokenizer.pad_id().unwrap()];
        ids.map(|id| tokenizer.token_name(id).unwrap())
    };
    assert_eq!(end(), ["</s>", "<pad>"]);
    write("special_tokens_map.json", "{\"eos_token\": \"<pad>\", \"pad_token\": {\"content\": \"</s>\"}}");
    assert_eq!(end(), ["<pad>", "</s>"]);
    write("tokenizer_config.json", "{\"eos_token\": \"<unk>\"}");
    assert_eq!(end(), ["<pad>", "</s>"], "transformers reads the map after the config");
    write("tokenizer_config.json", "{\"eos_token\": \"</s>\", \"pad_token\": \"<pad>\", \"added_tokens_decoder\": {}}");
    assert_eq!(end(), ["</s>", "<pad>"], "but not where the config lists the added tokens");
}
