//! The tensors of a file in both dialects. Vectors and tables of relative positions are f32 in both.

use crate::t5::{Parameter, Stack, T5};
use crate::values::{Dtype, Tensor};

/// The tensors with llama.cpp's names. `narrow` gives a matrix's dtype from its number of columns.
pub(super) fn llama_cpp(model: &T5, narrow: impl Fn(usize) -> Dtype) -> Vec<Tensor> {
    let mut tensors = vec![matrix("token_embd.weight", model.table(), &narrow)];
    let factor = model.logits_scale();
    if !model.is_tied || factor != 1.0 {
        tensors.push(Tensor { factor, ..matrix("output.weight", model.head(), &narrow) });
    }
    for stack in Stack::BOTH {
        let short = if stack == Stack::Encoder { "enc" } else { "dec" };
        for block in 0..model.blocks(stack) {
            let named = |name: &str| format!("{short}.blk.{block}.{name}.weight");
            let attention = |crosses: bool, layer: usize| {
                let prefix = if crosses { "cross_attn" } else { "attn" };
                let norm =
                    Tensor::single(named(&format!("{prefix}_norm")), model.norm(stack, block, layer), Dtype::F32);
                let each = ["q", "k", "v", "o"].map(|name| {
                    matrix(&named(&format!("{prefix}_{name}")), model.attention(stack, block, crosses, name), &narrow)
                });
                std::iter::once(norm).chain(each)
            };
            tensors.extend(attention(false, 0));
            if model.has_table(block) {
                tensors.push(Tensor::single(named("attn_rel_b"), model.relative_positions(stack, block), Dtype::F32));
            }
            if stack == Stack::Decoder {
                tensors.extend(attention(true, 1));
            }
            let layer = T5::feed_forward_layer(stack);
            tensors.push(Tensor::single(named("ffn_norm"), model.norm(stack, block, layer), Dtype::F32));
            let feed_forward: &[(&str, &str)] = match model.is_gated {
                true => &[("ffn_gate", "wi_0"), ("ffn_up", "wi_1"), ("ffn_down", "wo")],
                false => &[("ffn_up", "wi"), ("ffn_down", "wo")],
            };
            for (name, parameter) in feed_forward {
                tensors.push(matrix(&named(name), model.feed_forward(stack, block, parameter), &narrow));
            }
        }
        tensors.push(Tensor::single(format!("{short}.output_norm.weight"), model.last_norm(stack), Dtype::F32));
    }
    tensors
}

/// The tensors with transformers' names: the same parameters, without a tied head.
pub(super) fn hugging_face(model: &T5, narrow: impl Fn(usize) -> Dtype) -> Vec<Tensor> {
    let plain = T5 { scales_logits: false, ..model.clone() };
    let named = |mut tensor: Tensor| {
        tensor.name.clone_from(&tensor.parts[0].name);
        tensor
    };
    llama_cpp(&plain, narrow).into_iter().map(named).collect()
}

fn matrix(name: &str, parameter: Parameter, narrow: impl Fn(usize) -> Dtype) -> Tensor {
    let dtype = narrow(parameter.shape[1]);
    Tensor::single(name, parameter, dtype)
}
