//! Operations of T5Gemma and T5Gemma 2 beside transformers' own functions: `scripts/golden_cases/t5gemma_operations.py`.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor};
#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use t5_ops::{Attended, Attention, Mask, NormWeight, Rope, attention, attention_backward, merge_attention};

const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const LENGTHS: [usize; 2] = [9, 8];
const SOURCE_LENGTHS: [usize; 2] = [6, 3];

struct Goldens {
    tensors: HashMap<String, Tensor>,
    dtype: DType,
}

impl Goldens {
    /// The goldens in a dtype: in f64 the references compute, in f32 the kernels.
    fn each() -> [Goldens; 2] {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goldens/t5gemma/t5gemma.safetensors");
        [DType::F64, DType::F32].map(|dtype| {
            let tensors = candle_core::safetensors::load(path, &device::device()).unwrap();
            Goldens { tensors, dtype }
        })
    }

    fn get(&self, name: &str) -> Tensor {
        self.tensors[name].to_dtype(self.dtype).unwrap()
    }

    #[track_caller]
    fn check(&self, name: &str, got: &Tensor, tolerance: f64) {
        let expected = &self.tensors[name];
        assert_eq!(got.dims(), expected.dims(), "{name}");
        let flat = |x: &Tensor| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let (got, expected) = (flat(got), flat(expected));
        let scale = expected.iter().fold(1e-30f64, |m, x| m.max(x.abs()));
        let error = got.iter().zip(&expected).fold(0f64, |m, (a, b)| m.max((a - b).abs())) / scale;
        assert!(error <= tolerance, "{name} in {:?}: {error}", self.dtype);
    }

    /// The tolerance of this dtype.
    fn tolerance(&self) -> f64 {
        if self.dtype == DType::F64 { 1e-13 } else { 3e-6 }
    }
}

#[test]
fn rotary_positions_are_those_of_transformers() -> Result<()> {
    for goldens in Goldens::each() {
        for (name, base, factor) in [("10000-1", 1e4, 1.0), ("1000000-1", 1e6, 1.0), ("1000000-8", 1e6, 8.0)] {
            let rope = Rope { base, factor, first_position: 0 };
            let of = |part: &str| format!("rope.{name}.{part}");
            // Both compute angles in f32, whose sines differ in the last place.
            let tolerance = goldens.tolerance().max(1e-7);
            goldens.check(&of("y"), &t5_ops::rope(goldens.get(&of("x")), HEADS, &rope)?, tolerance);
            goldens.check(&of("dx"), &t5_ops::rope_backward(goldens.get(&of("dy")), HEADS, &rope)?, tolerance);
        }
    }
    Ok(())
}

#[test]
fn norms_with_one_plus_their_weight_are_those_of_transformers() -> Result<()> {
    for goldens in Goldens::each() {
        let [x, weight, dy] = ["x", "weight", "dy"].map(|part| goldens.get(&format!("norm.{part}")));
        let gemma = NormWeight { tensor: &weight, offset: 1.0 };
        let (y, inv_rms) = t5_ops::rms_norm(&x, gemma, 1e-6)?;
        let dweight = weight.zeros_like()?;
        let dx = t5_ops::rms_norm_backward(&x, gemma, &inv_rms, dy, None, Some(&dweight))?;
        goldens.check("norm.y", &y, goldens.tolerance());
        goldens.check("norm.dx", &dx, goldens.tolerance());
        goldens.check("norm.dweight", &dweight, goldens.tolerance());
    }
    Ok(())
}

#[test]
fn attention_with_groups_windows_scales_and_caps_is_that_of_transformers() -> Result<()> {
    let plain = Attention { key_heads: KEY_HEADS, scale: 0.25, ..Attention::new(HEADS, &LENGTHS) };
    for goldens in Goldens::each() {
        for (name, a) in [
            ("encoder", Attention { mask: Mask::window_around(5), ..plain }),
            ("even", Attention { mask: Mask::window_around(4), ..plain }),
            ("capped", Attention { mask: Mask::CAUSAL, scale: 0.3, soft_cap: Some(1.5), ..plain }),
        ] {
            let [q, k, v, dout] = ["q", "k", "v", "dout"].map(|part| goldens.get(&format!("{name}.{part}")));
            let (out, lse) = attention(&q, &k, &v, &a)?;
            let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
            let (dq, dk, dv) = attention_backward(&of, &dout, &a, None)?;
            for (part, got) in [("out", out.clone()), ("dq", dq), ("dk", dk), ("dv", dv)] {
                goldens.check(&format!("{name}.{part}"), &got, goldens.tolerance());
            }
        }
    }
    Ok(())
}

#[test]
fn one_softmax_over_two_sets_of_keys_is_the_merged_attention_of_transformers() -> Result<()> {
    let plain = Attention { key_heads: KEY_HEADS, scale: 0.25, ..Attention::new(HEADS, &LENGTHS) };
    let own = Attention { mask: Mask::causal_window(3), ..plain };
    let source = Attention { key_lengths: &SOURCE_LENGTHS, ..plain };
    for goldens in Goldens::each() {
        let of = |part: &str| goldens.get(&format!("merged.{part}"));
        let [q, k, v, source_k, source_v, dout] = ["q", "k", "v", "source_k", "source_v", "dout"].map(of);
        let of_source = attention(&q, &source_k, &source_v, &source)?;
        let (out, lse) = merge_attention(attention(&q, &k, &v, &own)?, (&of_source.0, &of_source.1), HEADS)?;
        let backward = |k, v, a| attention_backward(&Attended { q: &q, k, v, out: &out, lse: &lse }, &dout, a, None);
        let (dq, dk, dv) = backward(&k, &v, &own)?;
        let (source_dq, source_dk, source_dv) = backward(&source_k, &source_v, &source)?;
        let dq = (dq + source_dq)?;
        for (part, got) in [("dq", dq), ("dk", dk), ("dv", dv), ("source_dk", source_dk), ("source_dv", source_dv)] {
            goldens.check(&format!("merged.{part}"), &got, goldens.tolerance());
        }
        goldens.check("merged.out", &out, goldens.tolerance());
    }
    Ok(())
}

#[test]
fn a_window_in_generation_is_a_cache_of_its_size() -> Result<()> {
    let goldens = &Goldens::each()[1];
    let of = |part: &str| goldens.get(&format!("merged.{part}"));
    let [q, k, v] = ["q", "k", "v"].map(of);
    let lengths = [9, 9];
    let a = Attention {
        key_heads: KEY_HEADS,
        scale: 0.25,
        mask: Mask::causal_window(3),
        ..Attention::new(HEADS, &lengths)
    };
    let (whole, whole_lse) = attention(&q, &k, &v, &a)?;
    let caches = [&k, &v].map(|x| x.narrow(1, 0, 3).and_then(|x| x.zeros_like()));
    let [keys, values] = &caches;
    let caches = [keys.as_ref().unwrap(), values.as_ref().unwrap()];
    for position in 0..9 {
        let at = |number| t5_ops::Position { number, on_card: None };
        let of = |x: &Tensor| x.narrow(1, position, 1)?.contiguous();
        t5_ops::append(caches, [&of(&k)?, &of(&v)?], at(position % 3))?;
        let (out, lse) = t5_ops::attention_at(&of(&q)?, caches, &a, at(position.min(2)))?;
        let difference = (out - of(&whole)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
        let of_lse = (lse - whole_lse.narrow(2, position, 1)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(difference < 1e-6 && of_lse < 1e-6, "{position}: {difference} {of_lse}");
    }
    Ok(())
}
