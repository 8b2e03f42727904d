use candle_core::{DType, Tensor};

use super::*;
use crate::testing::device;

#[test]
fn copies_are_casts_and_other_tensors_are_refused() {
    let wide = Tensor::arange(0f32, 12.0, &device()).unwrap().affine(0.37, 0.001).unwrap().reshape((3, 4)).unwrap();
    let narrow = Tensor::zeros((3, 4), DType::BF16, &device()).unwrap();
    narrow_each(&[(&wide, &narrow)]).unwrap();
    let values = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(values(&narrow), values(&wide.to_dtype(DType::BF16).unwrap()));
    narrow_each(&[]).unwrap();
    for (from, to) in [(&narrow, &narrow), (&wide, &wide), (&wide, &narrow.narrow(0, 0, 2).unwrap())] {
        let error = narrow_each(&[(from, to)]).unwrap_err().to_string();
        assert!(error.contains("expected F32 and BF16 of one shape"), "{error}");
    }
    assert_eq!(narrow_each_needs(Path::Device, 0), Needs::default());
}
