use candle_core::DType;

use super::*;
use crate::testing::{Numbers, check_gradient, values, weighted};

const ENCODER: RelativePosition = RelativePosition { buckets: 32, max_distance: 128, bidirectional: true };
const DECODER: RelativePosition = RelativePosition { bidirectional: false, ..ENCODER };

#[test]
fn buckets_are_those_of_transformers() {
    // transformers' _relative_position_bucket with 32 buckets and maximal distance 128.
    for (r, position, expected) in [
        (ENCODER, 0, 0),
        (ENCODER, -1, 1),
        (ENCODER, -7, 7),
        (ENCODER, -8, 8),
        (ENCODER, -11, 8),
        (ENCODER, -12, 9),
        (ENCODER, -16, 10),
        (ENCODER, -32, 12),
        (ENCODER, -64, 14),
        (ENCODER, -127, 15),
        (ENCODER, -100_000, 15),
        (ENCODER, 1, 17),
        (ENCODER, 8, 24),
        (ENCODER, 500, 31),
        (DECODER, 3, 0),
        (DECODER, -15, 15),
        (DECODER, -16, 16),
        (DECODER, -19, 17),
        (DECODER, -64, 26),
        (DECODER, -128, 31),
    ] {
        assert_eq!(r.bucket(position), expected, "{r:?} at {position}");
    }
}

#[test]
fn an_entry_is_the_bucket_of_key_minus_query() {
    let table = Numbers::new(40).tensor(&[32, 3], DType::F64);
    let rows = table.to_vec2::<f64>().unwrap();
    for (r, queries, keys, first_query) in
        [(ENCODER, 5, 9, 0), (DECODER, 4, 4, 0), (DECODER, 1, 12, 11), (DECODER, 3, 40, 37)]
    {
        let bias = relative_bias(&table, &r, queries, keys, first_query).unwrap().to_vec2::<f64>().unwrap();
        for (head, bias) in bias.iter().enumerate() {
            for i in 0..queries {
                for j in 0..keys {
                    let bucket = r.bucket(j as i64 - (first_query + i) as i64);
                    assert_eq!(bias[j + queries - 1 - i], rows[bucket][head]);
                }
            }
        }
    }
}

#[test]
fn the_gradient_agrees_with_finite_differences_and_accumulates() {
    let mut numbers = Numbers::new(41);
    let table = numbers.tensor(&[32, 2], DType::F64);
    let dbias = numbers.tensor(&[2, 20], DType::F64);
    let dtable = table.zeros_like().unwrap();
    relative_bias_backward(&dbias, &ENCODER, 9, 12, 0, &dtable).unwrap();
    check_gradient("dtable", &table, &dtable, |t| weighted(&relative_bias(t, &ENCODER, 9, 12, 0)?, &dbias));
    let once = values(&dtable);
    relative_bias_backward(&dbias, &ENCODER, 9, 12, 0, &dtable).unwrap();
    assert!(values(&dtable).iter().zip(once).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-12));
}

#[test]
fn tables_that_do_not_fit_are_errors() {
    let table = Numbers::new(42).tensor(&[16, 2], DType::F32);
    assert!(relative_bias(&table, &ENCODER, 2, 2, 0).is_err());
    assert!(
        relative_bias(&table, &RelativePosition { buckets: 16, max_distance: 4, bidirectional: true }, 2, 2, 0)
            .is_err()
    );
    assert!(relative_bias(&table, &RelativePosition { buckets: 16, ..ENCODER }, 0, 2, 0).is_err());
}
