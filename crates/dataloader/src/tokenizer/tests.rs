//! Compares windows with whole texts, over every kind of model and cutter. Windows are so small that most texts take
//! many.

use super::windows::Windows;
use super::*;
use crate::random::{Key, Stream};
use crate::testing::sample_tokenizer;
use serde_json::{Value, json};

const TINY: Windows =
    Windows { step_bytes: 160, context_bytes: 48, margin_bytes: 48, word_bytes: 320, word_margin_bytes: 64 };

/// Tokens over a small alphabet: its characters, and joins of two tokens as byte-pair merges make them.
fn merges(stream: &mut Stream, alphabet: &[&str], count: usize) -> (Vec<String>, Vec<(String, String)>) {
    let mut tokens: Vec<String> = alphabet.iter().map(|&letter| letter.to_owned()).collect();
    let mut merges = Vec::new();
    while merges.len() < count {
        let [left, right] = [0; 2].map(|_| tokens[stream.below(tokens.len() as u64) as usize].clone());
        let joined = format!("{left}{right}");
        if joined.len() <= 12 && !tokens.contains(&joined) {
            tokens.push(joined);
            merges.push((left, right));
        }
    }
    (tokens, merges)
}

const LETTERS: [&str; 10] = ["a", "b", "c", "d", "e", "t", "▁", "é", "中", "0"];

fn bpe(stream: &mut Stream, alphabet: &[&str], more: Value) -> Value {
    let (tokens, merges) = merges(stream, alphabet, 60);
    let mut names = vec!["<unk>".to_owned()];
    names.extend(tokens);
    names.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    let vocab: Value = names.into_iter().zip(0..).map(|(name, id): (String, u32)| (name, Value::from(id))).collect();
    let mut model = json!({"type": "BPE", "vocab": vocab, "merges": merges});
    model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    model
}

fn unigram(stream: &mut Stream, byte_fallback: bool) -> Value {
    let (tokens, _) = merges(stream, &LETTERS, 120);
    let mut vocab = vec![json!(["<unk>", 0.0])];
    for token in tokens {
        // Sums of thousands of these scores are exact. Rounded sums may break ties differently in a whole word and in its
        // parts.
        let score = -2.0 - token.chars().count() as f64 - stream.below(1 << 32) as f64 / (1_u64 << 32) as f64;
        vocab.push(json!([token, score]));
    }
    if byte_fallback {
        vocab.extend((0..256).map(|byte| json!([format!("<0x{byte:02X}>"), -20.0])));
    }
    json!({"type": "Unigram", "unk_id": 0, "byte_fallback": byte_fallback, "vocab": vocab})
}

fn words(names: &[&str], more: Value) -> Value {
    let vocab: Value =
        names.iter().zip(0..).map(|(name, id): (&&str, u32)| ((*name).to_owned(), Value::from(id))).collect();
    let mut model = json!({"vocab": vocab});
    model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    model
}

fn tokenizer(normalizer: Value, cutter: Value, model: Value) -> Tokenizer {
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let file = json!({"version": "1.0", "added_tokens": [added(9000, "<extra_id_7>"), added(9001, "<sep>")],
        "normalizer": normalizer, "pre_tokenizer": cutter, "model": model, "decoder": null, "post_processor": null});
    Tokenizer::from_bytes(file.to_string().as_bytes(), Path::new("test.json")).unwrap()
}

/// Every kind of model with the cutters and normalizers that it is used with.
fn kinds() -> Vec<(&'static str, Tokenizer)> {
    let mut stream = Key::new(17).stream();
    let stream = &mut stream;
    let metaspace = || json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let whitespace = || json!({"type": "Whitespace"});
    let spaces = |content: &str| json!({"type": "Replace", "pattern": {"String": " "}, "content": content});
    let llama = || json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces("▁")]});
    let t5 = || {
        json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Strip", "strip_left": false, "strip_right": true},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}]})
    };
    let deletes = || {
        json!({"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
            {"type": "Replace", "pattern": {"Regex": "[et]+"}, "content": ""}]})
    };
    let grows = || json!({"type": "Replace", "pattern": {"String": "0"}, "content": "abc\u{4e2d}de"});
    let digits = || {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}| ?[^\\s\\p{N}]+|\\s+(?!\\S)|\\s+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})
    };
    let byte_level = || json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let bytes = ["a", "b", "c", "d", "e", "t", "Ġ", "Ã", "©", "ä", "¸", "Ń", "0", "1", "2", "Ċ"];
    let known = json!({"unk_token": "<unk>"});
    let fused = json!({"unk_token": "<unk>", "fuse_unk": true});
    let fallback = json!({"unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true});
    let dropped = json!({});
    let suffix = json!({"unk_token": "<unk>", "fuse_unk": true, "end_of_word_suffix": "</w>"});
    let pieces =
        ["[UNK]", "a", "b", "ab", "##a", "##b", "##c", "##d", "##e", "##t", "##ab", "c", "d", "e", "t", "中", "0"];
    let word_piece = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 60});
    let word_level = json!({"type": "WordLevel", "unk_token": "[UNK]"});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
    vec![
        ("byte-level BPE", tokenizer(Value::Null, byte_level(), bpe(stream, &bytes, dropped.clone()))),
        (
            "byte-level BPE, digits in threes",
            tokenizer(json!({"type": "NFC"}), digits(), bpe(stream, &bytes, dropped.clone())),
        ),
        (
            "BPE, bytes for the unknown, no cutter",
            tokenizer(llama(), Value::Null, bpe(stream, &LETTERS, fallback.clone())),
        ),
        ("BPE, fused unknown", tokenizer(Value::Null, metaspace(), bpe(stream, &LETTERS, fused.clone()))),
        ("BPE, unknown", tokenizer(grows(), whitespace(), bpe(stream, &LETTERS, known))),
        ("BPE that drops the unknown", tokenizer(deletes(), metaspace(), bpe(stream, &LETTERS, dropped))),
        ("BPE, suffix", tokenizer(Value::Null, whitespace(), bpe(stream, &LETTERS, suffix))),
        ("BPE that deletes", tokenizer(deletes(), metaspace(), bpe(stream, &LETTERS, fallback))),
        ("Unigram", tokenizer(t5(), metaspace(), unigram(stream, false))),
        ("Unigram, bytes for the unknown", tokenizer(llama(), Value::Null, unigram(stream, true))),
        ("Unigram that grows", tokenizer(grows(), metaspace(), unigram(stream, false))),
        ("WordPiece", tokenizer(bert, json!({"type": "BertPreTokenizer"}), words(&pieces, word_piece))),
        ("WordLevel", tokenizer(Value::Null, whitespace(), words(&["[UNK]", "ab", "a", "cde", "中"], word_level))),
    ]
}

/// A text of words, runs and names; words of up to `longest` characters.
fn text(stream: &mut Stream, bytes: usize, longest: u64) -> String {
    let mut text = String::new();
    while text.len() < bytes {
        let most = if stream.below(4) == 0 { longest } else { 9 };
        let length = 1 + stream.below(most);
        match stream.below(12) {
            0 => text.push_str(["<extra_id_7>", "<sep>", "<extra_id_", "\n", "...", "?!"][stream.below(6) as usize]),
            1 => text.extend(std::iter::repeat_n(' ', length as usize)),
            2 => text.extend((0..length).map(|_| ['0', '1', '2', '7'][stream.below(4) as usize])),
            3 => text.extend((0..length.min(60)).map(|_| ['中', '文', '字', '龘'][stream.below(4) as usize])),
            4 => text.extend((0..length.min(60)).map(|_| ['\u{1f600}', '\u{1f469}', 'ß'][stream.below(3) as usize])),
            5 => text
                .extend(std::iter::repeat_n(['a', 'b', '中', '0'][stream.below(4) as usize], length.min(60) as usize)),
            6 => text.extend((0..length.min(60)).map(|_| ['e', 't', 'é', '\u{301}'][stream.below(4) as usize])),
            _ => text.extend((0..length).map(|_| ['a', 'b', 'c', 'd', 'e', 't'][stream.below(6) as usize])),
        }
        if stream.below(2) == 0 {
            text.push(' ');
        }
    }
    text
}

/// A text with runs longer than a window: blanks, which some normalizers strip or join, and letters that some
/// normalizers delete.
fn text_with_runs(stream: &mut Stream, bytes: usize, longest: u64) -> String {
    let mut runs = String::new();
    for _ in 0..1 + stream.below(3) {
        runs.push_str(&text(stream, bytes / 8, 60));
        let letters = [[' ', '\n', '\u{a0}'], [' ', ' ', ' '], ['e', 't', '\u{301}'], ['\u{1f600}', 'ß', '龘']];
        let letters = letters[stream.below(4) as usize];
        runs.extend((0..stream.below(longest)).map(|_| letters[stream.below(3) as usize]));
        runs.push_str(["", "", "<sep>", "a", "<extra_id_7>", "<ex"][stream.below(6) as usize]);
    }
    runs
}

fn whole(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.inner.encode_fast(text, false).unwrap().get_ids().to_vec()
}

fn windowed(tokenizer: &Tokenizer, text: &str, max_tokens: usize) -> Vec<u32> {
    tokenizer.encode_in(TINY, &mut &*text, max_tokens).unwrap()
}

type RandomText = fn(&mut Stream, usize, u64) -> String;

/// The difference between windows and the whole text on the random text `seed` of a kind; `None` if there is none.
fn difference(tokenizer: &Tokenizer, number: u64, seed: u64, longest: u64, text: RandomText) -> Option<String> {
    let mut stream = Key::new(seed).derive(number).stream();
    let bytes = 200 + stream.below(1800) as usize;
    let text = text(&mut stream, bytes, longest);
    let (all, whole) = (windowed(tokenizer, &text, usize::MAX), whole(tokenizer, &text));
    if all != whole {
        let at = all.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        return Some(format!("seed {seed} from token {at} of {}", whole.len()));
    }
    let most = stream.below(200) as usize;
    let start = windowed(tokenizer, &text, most);
    (start != whole[..whole.len().min(most + 1)]).then(|| format!("seed {seed} with {most} tokens"))
}

/// Fails if windows give other ids than the whole text for any of `texts` random texts of a kind; prints the number for
/// each kind.
#[track_caller]
fn check(texts: u64, longest: u64, text: RandomText) {
    let mut failures = Vec::new();
    for (number, (kind, tokenizer)) in (0..).zip(kinds()) {
        let different: Vec<String> =
            (0..texts).filter_map(|seed| difference(&tokenizer, number, seed, longest, text)).collect();
        if !different.is_empty() {
            let first = different[..different.len().min(3)].join(", ");
            failures.push(format!("{kind}: {} of {texts} texts differ: {first}", different.len()));
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}

/// Texts of each kind. `WINDOW_TEXTS=10000` tries more.
fn texts() -> u64 {
    std::env::var("WINDOW_TEXTS").ok().and_then(|texts| texts.parse().ok()).unwrap_or(200)
}

#[test]
fn windows_give_the_tokens_of_the_whole_text_where_words_fit_them() {
    check(texts(), 60, text);
}

#[test]
fn words_longer_than_a_window_give_the_tokens_of_the_whole_text() {
    check(texts(), 1500, text);
}

#[test]
fn runs_longer_than_a_window_give_the_tokens_of_the_whole_text_though_they_are_stripped_or_deleted() {
    check(texts(), 700, text_with_runs);
}

#[test]
fn blanks_before_a_name_are_stripped_wherever_a_window_cuts_the_name() {
    for (kind, tokenizer) in kinds() {
        for (blanks, name) in [(" ", "<sep>"), (" \n\u{a0}", "<extra_id_7>"), ("\n ", "<extra_id_"), ("\n", "e")] {
            for count in 0..2 * TINY.step_bytes {
                let run: String = blanks.chars().cycle().take(count).collect();
                let text = format!("ab cd{run}{name}e");
                let (parts, all) = (windowed(&tokenizer, &text, usize::MAX), whole(&tokenizer, &text));
                assert_eq!(parts, all, "{kind}: {count} of {blanks:?} before {name}");
            }
        }
    }
}

#[test]
fn a_megabyte_without_a_border_is_tokenized_as_far_as_it_matters() {
    let mut stream = Key::new(3).stream();
    let mut random = |letters: &[u8]| -> String {
        (0..1 << 20).map(|_| char::from(letters[stream.below(letters.len() as u64) as usize])).collect()
    };
    let texts = [
        random(b"ACGT"),
        random(b"0123456789abcdef"),
        random(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"),
        "\u{1f600}".repeat(1 << 18),
        "\u{4e2d}\u{6587}\u{5b57}".repeat(100_000),
        format!("{}after the spaces", " ".repeat(1 << 20)),
    ];
    for (kind, tokenizer) in
        kinds().iter().map(|(kind, tokenizer)| (*kind, tokenizer)).chain([("sample", &**sample_tokenizer())])
    {
        for text in &texts {
            let start = tokenizer.encode_start(text, 64).unwrap();
            // If the first tokens of a text take much less, a short beginning has the same first tokens.
            let short = whole(tokenizer, &text[..text.floor_char_boundary(20_000)]);
            if short.len() > 128 {
                assert!(start == short[..65], "{kind}: {:?}", &text[..8]);
            }
            assert!(start.len() <= 65 && (!start.is_empty() || short.is_empty()), "{kind}: {:?}", &text[..8]);
        }
        // A run of unknown characters gives one token, however long the run, and the text after it is found.
        let unknown = format!("{} ab", "\u{1f600}".repeat(1 << 14));
        assert!(windowed(tokenizer, &unknown, usize::MAX) == whole(tokenizer, &unknown), "{kind}");
    }
}

#[test]
fn files_on_which_the_library_panics_or_overflows_are_refused_by_name() {
    let check = |part: &str, value: Value| {
        let bytes = std::fs::read(sample_tokenizer().path()).unwrap();
        let mut file: Value = serde_json::from_slice(&bytes).unwrap();
        if part == "continuing_subword_prefix" {
            file["model"][part] = value;
        } else {
            file[part] = value;
        }
        let error = Tokenizer::from_bytes(file.to_string().as_bytes(), Path::new("bad.json")).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, Error::Tokenizer { .. }) && said.starts_with("bad.json: "), "{part}: {said}");
        said
    };
    check("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": ""}));
    check("normalizer", json!({"type": "Precompiled"}));
    check("decoder", json!({"type": "Replace", "pattern": {"String": "a"}}));
    check("decoder", json!(7));
    check("continuing_subword_prefix", json!("\u{4e2d}\u{4e2d}\u{4e2d}\u{4e2d}"));
    let ones = json!({"type": "Replace", "pattern": {"String": "1"}, "content": "1".repeat(1000)});
    let bomb = json!({"type": "Sequence", "normalizers": [ones, ones, ones, ones]});
    assert!(check("normalizer", bomb).contains("its normalizer can turn one byte of text into"));
    let decoders = json!({"type": "Sequence", "decoders": [ones, ones, ones, ones]});
    assert!(check("decoder", decoders).contains("its decoder can turn one byte of text into"));
    let pieces =
        |bytes: usize| json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a".repeat(bytes), -1.0]]});
    assert!(check("model", pieces(1 << 20)).contains("its longest token has 1048576 bytes: expected at most 1024"));
    let file = json!({"version": "1.0", "added_tokens": [], "model": pieces(1024)});
    Tokenizer::from_bytes(file.to_string().as_bytes(), Path::new("long.json")).unwrap();
}
