//! candle-transformers' own T5, where it is comparable: the encoder of one source without padding. (Its
//! decoder uses the encoder's buckets, and an odd number of buckets is split differently.)

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::t5 as candle_t5;
use t5::T5;

use crate::support::*;

#[test]
fn the_encoder_agrees_with_candle_transformers() {
    for name in ["v1_0_relu_tied", "gated_gelu_tied", "v1_1_gated_gelu_untied"] {
        let (directory, golden, _) = case(name);
        let model = T5::load(&directory, DType::F32, &device()).unwrap();
        let config = serde_json::from_value(model.config().to_json()).unwrap();
        // The host alone: the emulated card does not have all of candle's operations.
        let on_host = |p: &t5::Parameter| (p.name.clone(), p.tensor.to_device(&Device::Cpu).unwrap());
        let weights = model.parameters().iter().map(on_host).collect();
        let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        let mut theirs = candle_t5::T5EncoderModel::load(weights, &config).unwrap();
        for source in &golden.sources {
            let ids = Tensor::new(source.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let expected = theirs.forward(&ids).unwrap();
            let batch = micro_batch(std::slice::from_ref(source), &golden.targets[..1], model.config());
            let far = distance(&model.encode(&batch, DType::F32).unwrap(), &expected);
            assert!(far < 1e-5, "{name}: the encoders differ by {far:e}");
        }
    }
}
