use super::*;
use crate::testing::{Numbers, assert_close, check_gradient, device, tolerance, weighted};

fn random_ids(b: usize, t: usize, entries: usize) -> Tensor {
    let mut numbers = Numbers::new(8);
    let ids: Vec<u32> = (0..b * t).map(|_| numbers.below(entries) as u32).collect();
    Tensor::from_vec(ids, (b, t), &device()).unwrap()
}

#[test]
fn the_reference_agrees_with_finite_differences() {
    let mut numbers = Numbers::new(9);
    let (ids, table) = (random_ids(2, 6, 5), numbers.tensor(&[5, 3], DType::F64));
    let dy = numbers.tensor(&[2, 6, 3], DType::F64);
    let dtable = table.zeros_like().unwrap();
    embedding_backward(&ids, &dy, &dtable).unwrap();
    check_gradient("dtable", &table, &dtable, |table| weighted(&embedding(&ids, table, DType::F64)?, &dy));
}

#[test]
fn kernels_agree_with_the_reference() {
    for (b, t, v, d) in [(1, 1, 1, 1), (2, 7, 9, 65), (4, 100, 50, 300)] {
        for (dtype, table_dtype) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::BF16, DType::BF16)] {
            let mut numbers = Numbers::new(10);
            let (ids, table) = (random_ids(b, t, v), numbers.tensor(&[v, d], table_dtype));
            let what = format!("({b}, {t}, {v}, {d}) {dtype:?}");
            let got = embedding(&ids, &table, dtype).unwrap();
            assert_eq!(got.dtype(), dtype);
            assert_close(&what, &got, &reference::embedding(&ids, &table, dtype).unwrap(), 0.0);
            let dy = numbers.tensor(&[b, t, d], dtype);
            let dtable = numbers.tensor(&[v, d], DType::F32);
            let expected = dtable.copy().unwrap();
            reference::embedding_backward(&ids, &dy, &expected).unwrap();
            embedding_backward(&ids, &dy, &dtable).unwrap();
            assert_close(&what, &dtable, &expected, tolerance(DType::F32));
        }
    }
}

#[test]
fn an_id_outside_the_table_is_an_error() {
    // The host alone: ids on a card are not checked.
    if !device().is_cpu() {
        return;
    }
    let table = Tensor::zeros((4, 2), DType::F32, &device()).unwrap();
    let ids = Tensor::new(&[[0u32, 4]], &device()).unwrap();
    let message = embedding(&ids, &table, DType::F32).unwrap_err().to_string();
    assert!(message.contains("expected ids below 4, got 4"), "{message}");
    let dy = Tensor::zeros((1, 2, 2), DType::F32, &device()).unwrap();
    assert!(embedding_backward(&ids, &dy, &table).is_err());
}
