//! A `spiece.model` alone gives the same ids as transformers, or as SentencePiece where its settings are not T5's (`scripts/make_goldens.py sentence-piece`).

use std::path::{Path, PathBuf};

use dataloader::{Tokenizer, TokenizerJson};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    tokens: usize,
    texts: Vec<String>,
    ids: Vec<Vec<u32>>,
}

fn directory(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/sentence_piece").join(case)
}

#[test]
fn ids_are_those_of_transformers() {
    for (case, sentinels) in [("T5", 100), ("none", 0), ("bytes", 0), ("blanks", 0)] {
        let path = Tokenizer::in_directory(&directory(case)).expect("a tokenizer");
        let tokenizer = Tokenizer::load(&path).unwrap();
        let golden: Golden = serde_json::from_slice(&std::fs::read(directory(case).join("ids.json")).unwrap()).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.sentinels().len()), (golden.tokens, sentinels), "{case}");
        assert_eq!((tokenizer.pad_id().unwrap(), tokenizer.eos_id().unwrap(), tokenizer.unknown_id()), (0, 1, Some(2)));
        for (text, ids) in golden.texts.iter().zip(&golden.ids) {
            assert_eq!(tokenizer.encode(text).unwrap(), *ids, "{case}: {text:?}");
        }
    }
}

#[test]
fn what_t5_does_not_have_is_followed_in_answers_too() {
    let load = |case: &str| Tokenizer::load(&directory(case).join("spiece.model")).unwrap();
    let there_and_back = |case: &str, text: &str| {
        let tokenizer = load(case);
        tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap()
    };
    assert_eq!(there_and_back("bytes", "it is 😀\n{x}"), "it is 😀\n{x}");
    assert_eq!(there_and_back("blanks", " the  quick "), " the  quick ");
    // A blank before a requested piece is a token of its own.
    let requested = load("none");
    let [at, piece] = [requested.encode("@user").unwrap(), requested.encode("the @user").unwrap()];
    assert_eq!(at, [requested.token_id("▁").unwrap(), requested.token_id("@user").unwrap()]);
    assert_eq!(piece[piece.len() - 2..], at);
    // A longer composed text is composed across the borders of windows, too.
    let (composed, decomposed) = ("가".repeat(1000), "\u{1100}\u{1161}".repeat(1000));
    assert_eq!(load("T5").encode(&decomposed).unwrap(), load("T5").encode(&composed).unwrap());
}

#[test]
fn the_name_of_other_families_is_known_too() {
    let scratch = tempfile::tempdir().unwrap();
    std::fs::copy(directory("none").join("spiece.model"), scratch.path().join("tokenizer.model")).unwrap();
    let path = Tokenizer::in_directory(scratch.path()).expect("a tokenizer");
    assert!(path.ends_with("tokenizer.model"));
    assert!(Tokenizer::load(&path).is_ok());
}

#[test]
fn the_json_that_it_is_made_into_is_the_same_tokenizer() {
    let tokenizer = Tokenizer::load(&directory("T5").join("spiece.model")).unwrap();
    let TokenizerJson::Text(json) = tokenizer.json() else { panic!("its file is of another kind") };
    let again = Tokenizer::from_bytes(json.as_bytes(), Path::new("tokenizer.json")).unwrap();
    for text in ["The  naïve café\u{3000}①", "<extra_id_0> x </s>", "我们 \n"] {
        assert_eq!(again.encode(text).unwrap(), tokenizer.encode(text).unwrap());
    }
    assert_eq!(again.fingerprint(), tokenizer.fingerprint());
}

#[test]
fn damaged_files_and_files_of_other_kinds_are_errors_that_name_them() {
    let whole = std::fs::read(directory("none").join("spiece.model")).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("spiece.model");
    let load = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Tokenizer::load(&path)
    };
    for bytes in [&b""[..], b"{}", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", &whole[..whole.len() - 1]] {
        let error = load(bytes).unwrap_err().to_string();
        assert!(error.contains("spiece.model: not a usable tokenizer: "), "{error}");
    }
    let pointer = load(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n").unwrap_err().to_string();
    assert!(pointer.contains("git lfs pull"), "{pointer}");
    // A number of sentinels that no model has.
    std::fs::write(scratch.path().join("tokenizer_config.json"), "{\"extra_ids\": 1e9}").unwrap();
    assert!(load(&whole).unwrap_err().to_string().contains("extra_ids"));
    // Every byte changed: ids or an error, never a panic.
    std::fs::remove_file(scratch.path().join("tokenizer_config.json")).unwrap();
    for place in (0..whole.len()).step_by(61) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x55;
        if let Ok(tokenizer) = load(&bytes) {
            let _ = tokenizer.encode("a text");
        }
    }
}
