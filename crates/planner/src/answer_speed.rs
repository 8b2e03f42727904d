//! The speed of answers: a token takes products of few rows with every weight of the decoder, and many small operations.
//!
//! A step's products have hundreds of rows, and their time is that of their arithmetic. A token's products have one row for each answer.
//! They take the time of reading the weight, and more with more rows. So they are measured separately.

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// The time of a token's work on a machine, with activations of one dtype. Times are picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswerSpeed {
    /// Products of few rows with weights of f32.
    pub f32_weights: FewRows,
    /// Products of few rows with weights of bf16.
    pub bf16_weights: FewRows,
    /// A multiply-add of attention of one query a row, over the row's own keys and values.
    pub query_ps: f64,
    /// The fixed time of a decoder block's operations, however small its sizes are.
    pub block_ps: f64,
    /// The fixed time of a decoder block's operations for each further source with its own cache, as in a server.
    pub source_ps: f64,
    /// The fixed time of a token outside the blocks: embedding, head and choice.
    pub token_ps: f64,
}

/// The time of a product for each element of its weight, in picoseconds, by the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FewRows {
    /// A product of one row.
    pub one_row_ps: f64,
    /// A product of eight rows.
    pub eight_rows_ps: f64,
    /// A product of 32 rows. Each further row takes the time of its arithmetic.
    pub most_rows_ps: f64,
}

/// The numbers of rows that are measured.
pub const MEASURED_ROWS: [usize; 3] = [1, 8, 32];

impl FewRows {
    /// The time of an element of the weight in a product of `rows` rows. It is interpolated between measured numbers of rows; each row
    /// beyond the last of them adds `a_row`.
    #[expect(clippy::cast_precision_loss, reason = "a few rows")]
    pub(crate) fn element_ps(&self, rows: f64, a_row: f64) -> f64 {
        let [one, eight, most] = MEASURED_ROWS.map(|rows| rows as f64);
        let between = |(from, at_from): (f64, f64), (to, at_to): (f64, f64)| {
            at_from + (at_to - at_from) * (rows - from) / (to - from)
        };
        match rows {
            _ if rows <= one => self.one_row_ps,
            _ if rows <= eight => between((one, self.one_row_ps), (eight, self.eight_rows_ps)),
            _ if rows <= most => between((eight, self.eight_rows_ps), (most, self.most_rows_ps)),
            _ => self.most_rows_ps + a_row * (rows - most),
        }
    }
}

/// Elements of weights, by the dtype in which they are read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Elements {
    /// Elements read as f32.
    pub f32: f64,
    /// Elements read as bf16 or as codes; codes are counted as bf16.
    pub narrow: f64,
}

impl Elements {
    /// All of them.
    pub fn total(self) -> f64 {
        self.f32 + self.narrow
    }

    /// These elements, and `elements` more of `dtype`.
    #[expect(clippy::cast_precision_loss, reason = "elements of a model")]
    pub fn with(self, elements: u64, dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F64 => Self { f32: self.f32 + elements as f64, ..self },
            _ => Self { narrow: self.narrow + elements as f64, ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_product_grows_with_its_rows_and_meets_what_was_measured() {
        let few = FewRows { one_row_ps: 100.0, eight_rows_ps: 170.0, most_rows_ps: 650.0 };
        let times = [1.0, 8.0, 32.0, 132.0].map(|rows| few.element_ps(rows, 10.0));
        assert_eq!(times, [100.0, 170.0, 650.0, 1650.0]);
        assert_eq!([2.0, 20.0].map(|rows| few.element_ps(rows, 10.0)), [110.0, 410.0]);
    }

    #[test]
    fn weights_are_counted_by_the_bytes_that_are_read() {
        let elements = Elements::default().with(10, DType::F32).with(7, DType::BF16).with(3, DType::U8);
        assert_eq!(elements, Elements { f32: 10.0, narrow: 10.0 });
        assert_eq!(elements.total(), 20.0);
    }
}
