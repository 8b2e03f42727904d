//! A model in GGUF with Hugging Face's names, computed by candle's `quantized_t5`.
//!
//! candle's decoder uses the encoder's buckets of relative positions. They are the same for distances below 8, so the first 8 tokens of
//! an answer are compared.
//!
//! The host alone: the test is about a file, and candle's model reads it there.

use std::path::Path;

use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_t5 as candle_t5;
use candle_transformers::quantized_var_builder::VarBuilder;
use model_formats::{Dtype, Weights, gguf};
use t5::StoredModel;

/// Tokens of an answer for which candle's decoder has the right buckets.
const COMPARED: usize = 8;

/// The first error during the conversion, as text.
#[derive(Debug)]
struct Problem(#[expect(dead_code, reason = "shown by an expectation that fails")] String);

impl From<t5::Error> for Problem {
    fn from(error: t5::Error) -> Self {
        Self(error.to_string())
    }
}

impl From<model_formats::Error> for Problem {
    fn from(error: model_formats::Error) -> Self {
        Self(error.to_string())
    }
}

struct Stored(StoredModel);

impl Weights for Stored {
    type Error = Problem;

    fn each_rows(
        &self,
        name: &str,
        shape: &[usize],
        each: &mut dyn FnMut(&[f32]) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        self.0.each_rows(name, shape, each)
    }
}

/// Writes the model of a directory, and loads it in candle.
fn in_candle(directory: &Path, dtype: Dtype) -> candle_t5::T5ForConditionalGeneration {
    let stored = StoredModel::open(directory, None).expect("a model");
    let config = stored.config().clone();
    let model = model_formats::T5 {
        vocab_size: config.vocab_size,
        d_model: config.d_model,
        d_kv: config.d_kv,
        d_ff: config.d_ff,
        heads: config.num_heads,
        encoder_blocks: config.num_layers,
        decoder_blocks: config.num_decoder_layers,
        buckets: config.relative_attention_num_buckets,
        activation: config.dense_act_fn,
        is_gated: config.is_gated_act,
        is_tied: config.tie_word_embeddings,
        scales_logits: config.scale_decoder_outputs,
        ..model_formats::T5::small("golden")
    };
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("model.gguf");
    let mut file = std::fs::File::create(&path).expect("a file");
    let written = gguf::File::with_hugging_face_names(&model, dtype).expect("a T5");
    written.write(&mut file, &Stored(stored)).expect("a file");
    let text = std::fs::read_to_string(directory.join("config.json")).expect("a config");
    let mut config: candle_t5::Config = serde_json::from_str(&text).expect("a config of candle's");
    config.use_cache = false;
    let builder = VarBuilder::from_gguf(&path, &Device::Cpu).expect("GGUF");
    candle_t5::T5ForConditionalGeneration::load(builder, &config).expect("every tensor by its name")
}

#[test]
fn candle_answers_from_gguf_as_transformers_does_from_the_model() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models/v1_0_relu_tied");
    let golden = std::fs::read_to_string(directory.join("golden.json")).expect("a golden");
    let golden: serde_json::Value = serde_json::from_str(&golden).expect("JSON");
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    let mut model = in_candle(&directory, Dtype::F32);
    let pairs =
        golden["sources"].as_array().expect("sources").iter().zip(golden["generated"].as_array().expect("answers"));
    for (source, answer) in pairs {
        let (source, answer) = (ids(source), ids(answer));
        let source = Tensor::new(&source[..], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let encoded = model.encode(&source).unwrap();
        let mut decoded = vec![0_u32];
        while decoded.len() <= COMPARED {
            let so_far = Tensor::new(&decoded[..], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let logits = model.decode(&so_far, &encoded).unwrap();
            let next = logits.squeeze(0).unwrap().argmax(0).unwrap();
            decoded.push(next.to_scalar::<u32>().unwrap());
        }
        assert_eq!(decoded[1..], answer[..COMPARED]);
        model.clear_kv_cache();
    }
}
