use candle_core::DType;

use super::*;
use crate::testing::{Numbers, device};

#[test]
fn scores_are_those_of_the_reference() {
    for shape in [&[1, 1][..], &[3, 31], &[5, 1000]] {
        for dtype in [DType::F32, DType::BF16] {
            let logits = (Numbers::new(3).tensor(shape, DType::F32) * 9.0).unwrap().to_dtype(dtype).unwrap();
            assert_eq!(scores(&logits, false).unwrap(), reference::scores(&logits, false).unwrap());
            let (got, expected) = (scores(&logits, true).unwrap(), reference::scores(&logits, true).unwrap());
            let far = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far < 1e-5, "{shape:?} {dtype:?}: {far}");
        }
    }
}

#[test]
fn copies_go_one_after_the_other_and_leave_later_positions() {
    let cache = || Tensor::arange(0f32, 24., &device()).unwrap().reshape((4, 3, 2)).unwrap();
    let (got, whole) = (cache(), cache());
    copy_rows(&got, &[(0, 2), (2, 3)], 2).unwrap();
    reference::copy_rows(&whole, &[(0, 2), (2, 3)]).unwrap();
    let values = |x: &Tensor| x.to_vec3::<f32>().unwrap();
    assert_eq!(values(&got.narrow(1, 0, 2).unwrap()), values(&whole.narrow(1, 0, 2).unwrap()));
    assert_eq!(values(&got.narrow(1, 2, 1).unwrap()), values(&cache().narrow(1, 2, 1).unwrap()));
    assert!(copy_rows(&got, &[(0, 4)], 1).is_err() && copy_rows(&got, &[(0, 1)], 4).is_err());
}
