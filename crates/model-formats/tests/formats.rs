//! Reads written files again by the formats' own rules.

use std::collections::BTreeMap;

use model_formats::{Dtype, Error, T5, Unsupported, Vocabulary, Weights, ctranslate2, gguf};

/// Weights in which each (row, column) of a parameter has its own number, handed out two rows at a time.
struct Counted;

fn value(name: &str, row: usize, column: usize) -> f32 {
    let seed = name.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    ((seed.wrapping_add((row * 131 + column) as u32) % 1009) as f32 - 504.0) / 256.0
}

fn values(name: &str, shape: &[usize]) -> Vec<f32> {
    let columns = if shape.len() == 1 { 1 } else { shape[1] };
    (0..shape[0]).flat_map(|row| (0..columns).map(move |column| value(name, row, column))).collect()
}

impl Weights for Counted {
    type Error = Error;

    fn each_rows(
        &self,
        name: &str,
        shape: &[usize],
        each: &mut dyn FnMut(&[f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let columns = if shape.len() == 1 { shape[0] } else { shape[1] };
        values(name, shape).chunks(2 * columns).try_for_each(each)
    }
}

fn tiny() -> T5 {
    T5 {
        vocab_size: 12,
        d_model: 64,
        d_kv: 16,
        d_ff: 96,
        heads: 2,
        encoder_blocks: 2,
        decoder_blocks: 1,
        buckets: 4,
        ..T5::small("tiny")
    }
}

fn gated() -> T5 {
    T5 { activation: "gelu_new".into(), is_gated: true, is_tied: false, scales_logits: false, ..tiny() }
}

const UNIGRAMS: &str = r#"{
  "added_tokens": [{"id": 0, "content": "<pad>", "special": true}, {"id": 1, "content": "</s>", "special": true},
    {"id": 2, "content": "<unk>", "special": true}, {"id": 6, "content": "<sep>", "special": false}],
  "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAABhAA=="},
  "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}]},
  "model": {"type": "Unigram", "unk_id": 2, "vocab": [["<pad>", 0], ["</s>", 0], ["<unk>", 0], ["▁a", -1.5], ["b", -2.5]]}
}"#;

const BYTE_PAIRS: &str = r#"{
  "added_tokens": [{"id": 0, "content": "<pad>", "special": true}, {"id": 1, "content": "</s>", "special": true}],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
  "model": {"type": "BPE", "vocab": {"<pad>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}, "merges": [["a", "b"]]}
}"#;

fn unigrams() -> Vocabulary {
    Vocabulary::of_json(UNIGRAMS, &[], 1).expect("a tokenizer")
}

/// A reader of bytes from the front.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(count);
        self.0 = rest;
        first
    }

    fn number(&mut self, bytes: usize) -> usize {
        self.take(bytes).iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
    }

    fn f32(&mut self) -> f32 {
        f32::from_le_bytes(self.take(4).try_into().expect("four bytes"))
    }

    fn text(&mut self, length_bytes: usize) -> String {
        let length = self.number(length_bytes);
        String::from_utf8(self.take(length).to_vec()).expect("UTF-8")
    }
}

/// A parsed GGUF file: its keys as text, and the type, shape (outermost first) and bytes of its tensors.
struct Gguf {
    keys: BTreeMap<String, String>,
    tensors: BTreeMap<String, (usize, Vec<usize>, Vec<u8>)>,
}

impl Gguf {
    fn read(bytes: &[u8]) -> Gguf {
        let mut at = Bytes(bytes);
        assert_eq!(at.take(4), b"GGUF");
        assert_eq!(at.number(4), 3, "the version");
        let (tensors, keys) = (at.number(8), at.number(8));
        let keys = (0..keys).map(|_| (at.text(8), Self::value(&mut at))).collect();
        let heads: Vec<(String, Vec<usize>, usize, usize)> = (0..tensors)
            .map(|_| {
                let (name, rank) = (at.text(8), at.number(4));
                let mut shape: Vec<usize> = (0..rank).map(|_| at.number(8)).collect();
                shape.reverse();
                (name, shape, at.number(4), at.number(8))
            })
            .collect();
        let start = (bytes.len() - at.0.len()).next_multiple_of(32);
        let tensors = heads.into_iter().map(|(name, shape, kind, offset)| {
            assert!(offset % 32 == 0);
            let count: usize = shape.iter().product();
            let length = match kind {
                0 => count * 4,
                1 | 30 => count * 2,
                8 => count / 32 * 34,
                kind => panic!("type {kind}"),
            };
            (name, (kind, shape, bytes[start + offset..][..length].to_vec()))
        });
        Gguf { keys, tensors: tensors.collect() }
    }

    fn value(at: &mut Bytes) -> String {
        let kind = at.number(4);
        Self::value_of(at, kind)
    }

    fn value_of(at: &mut Bytes, kind: usize) -> String {
        match kind {
            0 | 7 => at.number(1).to_string(),
            4 => at.number(4).to_string(),
            5 => (at.number(4) as u32).cast_signed().to_string(),
            6 => at.f32().to_string(),
            8 => at.text(8),
            9 => {
                let (kind, length) = (at.number(4), at.number(8));
                (0..length).map(|_| Self::value_of(at, kind)).collect::<Vec<_>>().join(" ")
            }
            kind => panic!("type {kind}"),
        }
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        let (kind, _, bytes) = &self.tensors[name];
        assert_eq!(*kind, 0, "{name}");
        bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four"))).collect()
    }
}

fn written(file: &gguf::File) -> Gguf {
    let mut bytes = Vec::new();
    file.write(&mut bytes, &Counted).expect("a file in memory");
    assert_eq!(bytes.len() as u64, file.bytes());
    Gguf::read(&bytes)
}

#[test]
fn a_file_for_llama_cpp_has_its_names_its_keys_and_the_head_with_its_scale() {
    let model = tiny();
    let file = written(&gguf::File::for_llama_cpp(&model, &unigrams(), Dtype::F32).expect("a T5"));
    for (key, expected) in [
        ("general.architecture", "t5"),
        ("general.file_type", "0"),
        ("t5.context_length", "512"),
        ("t5.embedding_length", "64"),
        ("t5.feed_forward_length", "96"),
        ("t5.block_count", "2"),
        ("t5.decoder_block_count", "1"),
        ("t5.attention.head_count", "2"),
        ("t5.attention.key_length", "16"),
        ("t5.attention.relative_buckets_count", "4"),
        ("t5.decoder_start_token_id", "0"),
        ("tokenizer.ggml.model", "t5"),
        ("tokenizer.ggml.tokens", "<pad> </s> <unk> ▁a b [PAD5] <sep> [PAD7] [PAD8] [PAD9] [PAD10] [PAD11]"),
        ("tokenizer.ggml.scores", "0 0 0 -1.5 -2.5 -10000 0 -10000 -10000 -10000 -10000 -10000"),
        ("tokenizer.ggml.token_type", "3 3 2 1 1 5 4 5 5 5 5 5"),
        ("tokenizer.ggml.precompiled_charsmap", "4 0 0 0 0 0 0 0 97 0"),
        ("tokenizer.ggml.add_space_prefix", "1"),
        ("tokenizer.ggml.remove_extra_whitespaces", "1"),
        ("tokenizer.ggml.eos_token_id", "1"),
        ("tokenizer.ggml.unknown_token_id", "2"),
        ("tokenizer.ggml.padding_token_id", "0"),
        ("tokenizer.ggml.add_eos_token", "1"),
        ("tokenizer.ggml.add_bos_token", "0"),
    ] {
        assert_eq!(file.keys.get(key).map(String::as_str), Some(expected), "{key}");
    }
    // One table in the first block of each stack, and none for cross attention.
    let tables = file.tensors.keys().filter(|name| name.contains("rel_b")).count();
    assert_eq!((file.tensors.len(), tables), (2 + 2 * 8 + 13 + 2 + 2, 2));
    let shared = values("shared.weight", &[12, 64]);
    assert_eq!(file.f32s("token_embd.weight"), shared);
    let scaled: Vec<f32> = shared.iter().map(|value| value * 0.125).collect();
    assert_eq!(file.f32s("output.weight"), scaled);
    let name = "decoder.block.0.layer.1.EncDecAttention.k.weight";
    assert_eq!(file.f32s("dec.blk.0.cross_attn_k.weight"), values(name, &[32, 64]));
    assert_eq!(file.tensors["dec.blk.0.cross_attn_k.weight"].1, [32, 64]);
    assert_eq!(file.tensors["enc.blk.0.attn_rel_b.weight"].1, [4, 2]);
    assert_eq!(
        file.f32s("enc.blk.1.ffn_down.weight"),
        values("encoder.block.1.layer.1.DenseReluDense.wo.weight", &[64, 96])
    );
}

#[test]
fn a_head_that_is_not_scaled_is_written_once_and_a_gate_has_its_names() {
    let unscaled = T5 { scales_logits: false, ..tiny() };
    let file = written(&gguf::File::for_llama_cpp(&unscaled, &unigrams(), Dtype::F32).expect("a T5"));
    assert!(!file.tensors.contains_key("output.weight"));
    let file = written(&gguf::File::for_llama_cpp(&gated(), &unigrams(), Dtype::F32).expect("a T5"));
    assert_eq!(file.f32s("output.weight"), values("lm_head.weight", &[12, 64]));
    assert_eq!(
        file.f32s("enc.blk.0.ffn_gate.weight"),
        values("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", &[96, 64])
    );
    assert_eq!(
        file.f32s("dec.blk.0.ffn_up.weight"),
        values("decoder.block.0.layer.2.DenseReluDense.wi_1.weight", &[96, 64])
    );
    let everywhere = T5 { has_a_table_in_every_block: true, ..gated() };
    let file = written(&gguf::File::for_llama_cpp(&everywhere, &unigrams(), Dtype::F32).expect("a UMT5"));
    assert_eq!(file.tensors.keys().filter(|name| name.contains("rel_b")).count(), 3);
}

#[test]
fn narrow_files_keep_vectors_in_f32_and_values_within_half_a_step() {
    for (dtype, kind, file_type) in [(Dtype::F16, 1, "1"), (Dtype::BF16, 30, "32"), (Dtype::Q8_0, 8, "7")] {
        let file = written(&gguf::File::for_llama_cpp(&gated(), &unigrams(), dtype).expect("a T5"));
        assert_eq!(file.keys["general.file_type"], file_type);
        assert_eq!(file.tensors["enc.blk.0.attn_norm.weight"].0, 0);
        assert_eq!(file.tensors["enc.blk.0.attn_rel_b.weight"].0, 0);
        assert_eq!(file.tensors["enc.blk.0.attn_q.weight"].0, kind, "{dtype:?}");
    }
    let file = written(&gguf::File::for_llama_cpp(&gated(), &unigrams(), Dtype::Q8_0).expect("a T5"));
    let (_, _, bytes) = &file.tensors["token_embd.weight"];
    let exact = values("shared.weight", &[12, 64]);
    for (block, values) in bytes.chunks(34).zip(exact.chunks(32)) {
        let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        for (code, value) in block[2..].iter().zip(values) {
            // The stored scale is an f16: 11 bits.
            let step = largest / 127.0;
            assert!((f32::from(code.cast_signed()) * step - value).abs() <= 0.5 * step * 1.001, "{value}");
        }
    }
    // Rows that are not whole blocks.
    let odd = T5 { d_ff: 80, ..gated() };
    let file = written(&gguf::File::for_llama_cpp(&odd, &unigrams(), Dtype::Q8_0).expect("a T5"));
    assert_eq!((file.tensors["enc.blk.0.ffn_down.weight"].0, file.tensors["enc.blk.0.ffn_up.weight"].0), (1, 8));
}

#[test]
fn hugging_face_names_come_without_a_tokenizer_and_without_a_tied_head() {
    let file = written(&gguf::File::with_hugging_face_names(&tiny(), Dtype::F32).expect("a T5"));
    assert!(file.keys.keys().all(|key| !key.starts_with("tokenizer.")));
    assert!(!file.tensors.contains_key("lm_head.weight"));
    for name in ["shared.weight", "decoder.final_layer_norm.weight", "decoder.block.0.layer.1.EncDecAttention.o.weight"]
    {
        assert!(file.tensors.contains_key(name), "{name}");
    }
    assert_eq!(file.f32s("shared.weight"), values("shared.weight", &[12, 64]));
}

#[test]
fn pairs_of_bytes_inside_gpt2s_words_are_said_as_such() {
    let vocabulary = Vocabulary::of_json(BYTE_PAIRS, &[0], 1).expect("a tokenizer");
    let file = written(&gguf::File::for_llama_cpp(&tiny(), &vocabulary, Dtype::F32).expect("a T5"));
    for (key, expected) in
        [("model", "gpt2"), ("pre", "gpt-2"), ("merges", "a b"), ("bos_token_id", "0"), ("add_bos_token", "1")]
    {
        assert_eq!(file.keys[&format!("tokenizer.ggml.{key}")], expected);
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Unsupported>, words: &str) {
    let error = result.expect_err("a refusal");
    assert!(error.to_string().contains(words) && !error.hint.is_empty(), "{error}");
}

#[test]
fn what_a_format_cannot_hold_is_refused_by_name() {
    let vocabulary = unigrams();
    let gguf = |model: &T5, vocabulary: &Vocabulary, dtype| gguf::File::for_llama_cpp(model, vocabulary, dtype);
    refused(gguf(&T5 { activation: "silu".into(), ..gated() }, &vocabulary, Dtype::F32), "`gated-silu`");
    refused(gguf(&T5 { activation: "gelu_new".into(), ..tiny() }, &vocabulary, Dtype::F32), "`gelu_new`");
    refused(gguf(&T5 { max_distance: 256, ..tiny() }, &vocabulary, Dtype::F32), "256");
    refused(gguf(&tiny(), &vocabulary, Dtype::Int8), "int8");
    refused(gguf(&T5 { vocab_size: 5, ..tiny() }, &vocabulary, Dtype::F32), "6 for `<sep>`");
    refused(gguf(&tiny(), &Vocabulary::of_bytes(&[]), Dtype::F32), "ids below 12");
    let many = T5 { vocab_size: 384, ..tiny() };
    refused(gguf(&many, &Vocabulary::of_bytes(&[]), Dtype::F32), "the bytes of ByT5");
    for (from, to) in [
        (r#""use_regex": true"#, r#""use_regex": false"#),
        (r#""add_prefix_space": false"#, r#""add_prefix_space": true"#),
        (r#""model": {"#, r#""normalizer": {"type": "NFC"}, "model": {"#),
    ] {
        let vocabulary = Vocabulary::of_json(&BYTE_PAIRS.replace(from, to), &[], 1).expect("a tokenizer");
        refused(gguf(&tiny(), &vocabulary, Dtype::F32), "byte pairs");
    }
    let lower = UNIGRAMS.replace("Precompiled", "Lowercase");
    let lower = Vocabulary::of_json(&lower, &[], 1).expect("a tokenizer");
    refused(gguf(&tiny(), &lower, Dtype::F32), "Lowercase");
    let ct2 = |model: &T5, dtype| ctranslate2::Model::new(model, &vocabulary, dtype);
    refused(ct2(&T5 { has_a_table_in_every_block: true, ..gated() }, Dtype::F32), "every block");
    refused(ct2(&tiny(), Dtype::Q8_0), "q8_0");
    refused(ct2(&T5 { activation: "mish".into(), ..tiny() }, Dtype::F32), "mish");
    refused(ct2(&T5 { vocab_size: 1 << 24, d_model: 128, ..tiny() }, Dtype::F32), "4 GiB");
    assert!(ct2(&T5 { activation: "silu".into(), ..gated() }, Dtype::F32).is_ok());
    for broken in ["", "{}", r#"{"model": {"vocab": 3}}"#, r#"{"model": {"vocab": [["a"]]}}"#] {
        assert!(Vocabulary::of_json(broken, &[], 1).is_err(), "{broken}");
    }
}

/// A `model.bin`: dtype, shape and bytes of each variable in its order, and the aliases.
type ModelBin = (Vec<(String, usize, Vec<usize>, Vec<u8>)>, Vec<(String, String)>);

fn model_bin(model: &ctranslate2::Model) -> ModelBin {
    let mut bytes = Vec::new();
    model.write(&mut bytes, &Counted).expect("a file in memory");
    let mut at = Bytes(&bytes);
    let text = |at: &mut Bytes| at.text(2).trim_end_matches('\0').to_owned();
    assert_eq!((at.number(4), text(&mut at), at.number(4)), (6, "TransformerSpec".to_owned(), 7));
    let count = at.number(4);
    let variables = (0..count).map(|_| {
        let (name, rank) = (text(&mut at), at.number(1));
        let shape = (0..rank).map(|_| at.number(4)).collect();
        let (dtype, length) = (at.number(1), at.number(4));
        (name, dtype, shape, at.take(length).to_vec())
    });
    let variables = variables.collect();
    let count = at.number(4);
    let aliases = (0..count).map(|_| (text(&mut at), text(&mut at))).collect();
    assert!(at.0.is_empty());
    (variables, aliases)
}

#[test]
fn a_model_of_ctranslate2_has_its_variables_in_order_with_fused_rows_and_aliases() {
    let (variables, aliases) = model_bin(&ctranslate2::Model::new(&tiny(), &unigrams(), Dtype::F32).expect("a T5"));
    let names: Vec<&String> = variables.iter().map(|(name, ..)| name).collect();
    assert!(names.is_sorted());
    let of = |name: &str| variables.iter().find(|(other, ..)| other == name).expect(name);
    let (_, dtype, shape, bytes) = of("encoder/layer_0/self_attention/linear_0/weight");
    assert_eq!((*dtype, &shape[..]), (0, &[96, 64][..]));
    let parts =
        ["q", "k", "v"].map(|part| values(&format!("encoder.block.0.layer.0.SelfAttention.{part}.weight"), &[32, 64]));
    let expected: Vec<u8> = parts.concat().iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(*bytes, expected);
    assert_eq!(of("decoder/layer_0/attention/linear_1/weight").2, [64, 64]);
    assert_eq!(of("decoder/scale_outputs").3, 0.125_f32.to_le_bytes());
    assert_eq!(of("decoder/num_heads").3, [2, 0]);
    assert_eq!(of("encoder/layer_1/self_attention/relative_attention_max_distance").3, 128_u32.to_le_bytes());
    let expected = [
        ("decoder/projection/weight", "decoder/embeddings/weight"),
        ("encoder/embeddings_0/weight", "decoder/embeddings/weight"),
        (
            "encoder/layer_1/self_attention/relative_attention_bias",
            "encoder/layer_0/self_attention/relative_attention_bias",
        ),
    ];
    assert_eq!(aliases, expected.map(|(alias, name)| (alias.to_owned(), name.to_owned())));
    let model = ctranslate2::Model::new(&gated(), &unigrams(), Dtype::F32).expect("a T5");
    let (variables, aliases) = model_bin(&model);
    assert!(variables.iter().any(|(name, ..)| name == "decoder/projection/weight"));
    assert!(variables.iter().all(|(name, ..)| name != "decoder/scale_outputs"));
    assert_eq!(aliases.len(), 2);
    let vocabulary: Vec<String> = serde_json::from_str(model.vocabulary()).expect("JSON");
    assert_eq!((vocabulary.len(), vocabulary[3].as_str(), vocabulary[5].as_str()), (12, "▁a", "[PAD5]"));
    assert!(model.config().contains(r#""decoder_start_token": "<pad>""#), "{}", model.config());
}

#[test]
fn eight_bits_have_a_scale_for_each_row_right_after_them() {
    let (variables, _) = model_bin(&ctranslate2::Model::new(&tiny(), &unigrams(), Dtype::Int8).expect("a T5"));
    let at = variables.iter().position(|(name, ..)| name == "decoder/embeddings/weight").expect("a table");
    let ((_, dtype, shape, codes), (scale_name, scale_dtype, scale_shape, scales)) =
        (&variables[at], &variables[at + 1]);
    assert_eq!((*dtype, &shape[..], scale_name.as_str()), (1, &[12, 64][..], "decoder/embeddings/weight_scale"));
    assert_eq!((*scale_dtype, &scale_shape[..]), (0, &[12][..]));
    let exact = values("shared.weight", &[12, 64]);
    for ((codes, scale), row) in codes.chunks(64).zip(scales.chunks(4)).zip(exact.chunks(64)) {
        let scale = f32::from_le_bytes(scale.try_into().expect("four"));
        let largest = row.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
        assert_eq!(scale, 127.0 / largest);
        let expected: Vec<u8> = row.iter().map(|value| (value * scale).round_ties_even() as i8 as u8).collect();
        assert_eq!(codes, expected);
    }
}

/// A model in which every value is this one.
struct Constant(f32);

impl Weights for Constant {
    type Error = Error;

    fn each_rows(
        &self,
        _: &str,
        shape: &[usize],
        each: &mut dyn FnMut(&[f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        each(&vec![self.0; shape.iter().product()])
    }
}

#[test]
fn a_value_that_does_not_fit_is_named_and_zeros_do_no_harm() {
    let write = |dtype, value| {
        gguf::File::for_llama_cpp(&gated(), &unigrams(), dtype).expect("a T5").write(&mut Vec::new(), &Constant(value))
    };
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::Q8_0] {
        write(dtype, 0.0).expect("zeros");
        let error = write(dtype, f32::NAN).expect_err("no number");
        assert!(error.to_string().contains("token_embd.weight"), "{error}");
    }
    let error = write(Dtype::F16, 7e4).expect_err("beyond f16");
    assert!(error.to_string().contains("70000") && error.hint().expect("a hint").contains("bf16"), "{error}");
    write(Dtype::BF16, 7e4).expect("bf16 reaches as far as f32");
    let eight = ctranslate2::Model::new(&gated(), &unigrams(), Dtype::Int8).expect("a T5");
    eight.write(&mut Vec::new(), &Constant(0.0)).expect("zeros");
    assert!(eight.write(&mut Vec::new(), &Constant(f32::INFINITY)).is_err());
}
