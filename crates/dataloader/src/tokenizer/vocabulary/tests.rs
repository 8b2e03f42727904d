use std::path::Path;

use super::*;

fn golden(case: &str) -> Tokenizer {
    Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(case)).unwrap()
}

/// The texts that the goldens of a tokenizer were made with.
fn texts(case: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(case).join("ids.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    golden["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// Trims a tokenizer to these texts.
fn trimmed_to(tokenizer: &Tokenizer, texts: &[String]) -> ChangedTokenizer {
    let vocabulary = Vocabulary::read(tokenizer).unwrap();
    let mut keep = vocabulary.lasting();
    for id in texts.iter().flat_map(|text| tokenizer.encode(text).unwrap()) {
        keep.extend(vocabulary.parts(id));
    }
    vocabulary.trimmed(&keep).unwrap()
}

/// The changed tokenizer, as it is loaded from its files.
fn loaded(changed: &ChangedTokenizer, without: Option<&str>) -> (tempfile::TempDir, Tokenizer) {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in changed.files.iter().filter(|(name, _)| Some(name.as_str()) != without) {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    std::fs::write(directory.path().join("config.json"), json!({"vocab_size": changed.entries.len()}).to_string())
        .unwrap();
    let tokenizer = Tokenizer::load(directory.path()).unwrap();
    (directory, tokenizer)
}

#[test]
fn texts_whose_entries_stay_have_the_same_tokens() {
    for case in
        ["sentence_piece/T5", "sentence_piece/none", "sentence_piece/bytes", "tokenizers/codet5", "tokenizers/t5-slow"]
    {
        let (before, texts) = (golden(case), texts(case));
        for some in [&texts[..1], &texts[..texts.len() / 2], &texts[..]] {
            let changed = trimmed_to(&before, some);
            let old = |id: &u32| changed.entries[*id as usize].unwrap();
            let (_directory, after) = loaded(&changed, None);
            assert!(some.len() == texts.len() || changed.entries.len() < before.vocab_size(), "{case}");
            assert_eq!(after.vocab_size(), changed.entries.len(), "{case}");
            for text in some {
                let ids: Vec<u32> = after.encode(text).unwrap().iter().map(old).collect();
                assert_eq!(ids, before.encode(text).unwrap(), "{case}: {text:?}");
                assert_eq!(after.encode(text).unwrap(), changed.tokenizer.encode(text).unwrap(), "{case}: {text:?}");
            }
            for (one, other) in [(before.eos_id(), after.eos_id()), (before.pad_id(), after.pad_id())] {
                assert_eq!(old(&other.unwrap()), one.unwrap(), "{case}");
            }
            let sentinels: Vec<u32> = after.sentinels().iter().map(old).collect();
            assert_eq!(sentinels, before.sentinels(), "{case}");
            assert_eq!(after.start_ids().iter().map(old).collect::<Vec<_>>(), before.start_ids(), "{case}");
        }
    }
}

#[test]
fn a_trimmed_sentence_piece_file_is_the_trimmed_tokenizer() {
    for case in ["sentence_piece/T5", "sentence_piece/none", "sentence_piece/bytes"] {
        let (before, texts) = (golden(case), texts(case));
        let changed = trimmed_to(&before, &texts[..texts.len() / 2]);
        let (_directory, of_pieces) = loaded(&changed, Some(FILE));
        assert_eq!(of_pieces.vocab_size(), changed.entries.len(), "{case}");
        for text in &texts {
            assert_eq!(of_pieces.encode(text).unwrap(), changed.tokenizer.encode(text).unwrap(), "{case}: {text:?}");
        }
    }
}

#[test]
fn a_new_token_leaves_the_blanks_around_it_alone_and_keeps_its_text() {
    let text = "{\"a\": 1}\n";
    let tokens = ["{", "}", "\n", "\"", "\t"].map(str::to_owned);
    for case in ["sentence_piece/T5", "sentence_piece/none", "tokenizers/t5-slow"] {
        let before = golden(case);
        assert_ne!(before.decode(&before.encode(text).unwrap()).unwrap(), text, "{case}: it loses something");
        let vocabulary = Vocabulary::read(&before).unwrap();
        let new: Vec<String> = tokens.iter().filter(|token| !vocabulary.holds(token)).cloned().collect();
        let changed = vocabulary.grown(&before, &new).unwrap();
        assert_eq!(changed.entries.len(), before.vocab_size() + new.len(), "{case}");
        assert!(changed.entries[before.vocab_size()..].iter().all(Option::is_none), "{case}");
        let (_directory, after) = loaded(&changed, None);
        for text in ["{\"a\": 1}\n", "{ \"a\" : [1,\n\t2] }", "a\n\nb", "x {y} z"] {
            let text = text.replace(['1', '2', '[', ']', ',', ':'], "a");
            let ids = after.encode(&text).unwrap();
            assert_eq!(after.decode(&ids).unwrap(), text, "{case}: {ids:?}");
        }
        // Other texts are what they were.
        for text in texts(case).iter().filter(|text| !tokens.iter().any(|token| text.contains(token))) {
            assert_eq!(after.encode(text).unwrap(), before.encode(text).unwrap(), "{case}: {text:?}");
        }
        // It can grow once more, and not by what is there.
        let again = Vocabulary::read(&after).unwrap();
        for known in ["\n", "{"] {
            let error = again.grown(&after, &[known.to_owned()]).unwrap_err().to_string();
            assert!(error.contains("it is there already"), "{case}: {error}");
        }
        let more = again.grown(&after, &["\u{b}".to_owned()]).unwrap();
        assert_eq!(more.tokenizer.decode(&more.tokenizer.encode("a\u{b}a\n").unwrap()).unwrap(), "a\u{b}a\n", "{case}");
    }
}

#[test]
fn a_byte_pair_tokenizer_gets_an_added_token() {
    let before = golden("tokenizers/codet5");
    let changed = Vocabulary::read(&before).unwrap().grown(&before, &["<lang_de>".to_owned()]).unwrap();
    let (_directory, after) = loaded(&changed, None);
    let id = before.vocab_size() as u32;
    assert_eq!(after.token_id("<lang_de>"), Some(id));
    assert_eq!(after.encode("x<lang_de> y").unwrap().iter().filter(|found| **found == id).count(), 1);
    assert_eq!(after.decode(&after.encode("x<lang_de> y").unwrap()).unwrap(), "x<lang_de> y");
}

#[test]
fn bytes_have_no_entries_to_change() {
    let error = Vocabulary::read(&golden("tokenizers/byt5-hub")).err().unwrap().to_string();
    assert!(error.contains("ByT5"), "{error}");
}

#[test]
fn a_piece_of_byte_pairs_stays_with_what_it_is_made_of() {
    let before = crate::testing::sample_tokenizer();
    let vocabulary = Vocabulary::read(before).unwrap();
    let piece = before.encode("nineteen").unwrap();
    let longest = *piece.iter().max_by_key(|id| before.token_name(**id).unwrap().len()).unwrap();
    let parts = vocabulary.parts(longest);
    assert!(parts.len() > 2, "{parts:?}");
    let whole: BTreeSet<u32> = vocabulary.lasting().into_iter().chain(parts).collect();
    let changed = vocabulary.trimmed(&whole).unwrap();
    let name = before.token_name(longest).unwrap().replace('\u{120}', " ");
    let ids = changed.tokenizer.encode(&name).unwrap();
    assert_eq!(
        ids.iter().map(|id| changed.entries[*id as usize].unwrap()).collect::<Vec<_>>(),
        before.encode(&name).unwrap()
    );
    assert!(changed.entries.len() < before.vocab_size() / 2);
}
