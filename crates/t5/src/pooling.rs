//! [`Pooling`]: how the vectors of a source's tokens become one.

use serde::{Deserialize, Serialize};

/// How the encoder's output becomes one vector of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The mean over its tokens.
    #[default]
    Mean,
    /// Its first token's.
    Cls,
    /// The largest value over its tokens.
    Max,
    /// Its last token's.
    Last,
}

impl Pooling {
    /// The pooling of this name.
    pub fn named(name: &str) -> Option<Pooling> {
        match name {
            "mean" => Some(Pooling::Mean),
            "cls" | "first" => Some(Pooling::Cls),
            "max" => Some(Pooling::Max),
            "last" => Some(Pooling::Last),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Max => "max",
            Pooling::Last => "last",
        }
    }

    /// Writes the vector (D) of rows (S, D).
    pub(crate) fn pool<V: Copy + Into<f64>>(self, rows: &[V], vector: &mut [f64]) {
        let width = vector.len();
        let mut put = |row: &[V]| vector.iter_mut().zip(row).for_each(|(to, value)| *to = (*value).into());
        match self {
            Pooling::Cls => put(&rows[..width]),
            Pooling::Last => put(&rows[rows.len() - width..]),
            Pooling::Max => {
                vector.fill(f64::NEG_INFINITY);
                let each =
                    |row: &[V]| vector.iter_mut().zip(row).for_each(|(most, value)| *most = most.max((*value).into()));
                rows.chunks(width).for_each(each);
            }
            Pooling::Mean => {
                vector.fill(0.0);
                let each = |row: &[V]| vector.iter_mut().zip(row).for_each(|(sum, value)| *sum += (*value).into());
                rows.chunks(width).for_each(each);
                #[expect(clippy::cast_precision_loss, reason = "few tokens")]
                let count = (rows.len() / width) as f64;
                vector.iter_mut().for_each(|sum| *sum /= count);
            }
        }
    }

    /// Writes the gradient of `count` rows (S, D) from that of their vector (D). Of equal largest values, the first has the gradient. Only
    /// [`Pooling::Max`] looks at the rows.
    pub(crate) fn backward<V: Copy + Into<f64>>(
        self,
        (rows, count): (&[V], usize),
        dvector: &[f64],
        mut write: impl FnMut(usize, f64),
    ) {
        let width = dvector.len();
        let (last, all) = ((count - 1) * width, count * width);
        for (column, &gradient) in dvector.iter().enumerate() {
            match self {
                Pooling::Cls => write(column, gradient),
                Pooling::Last => write(last + column, gradient),
                Pooling::Max => {
                    let larger = |best: usize, at: usize| if rows[at].into() > rows[best].into() { at } else { best };
                    write((column..all).step_by(width).fold(column, larger), gradient);
                }
                Pooling::Mean => {
                    #[expect(clippy::cast_precision_loss, reason = "few tokens")]
                    let share = gradient / count as f64;
                    (column..all).step_by(width).for_each(|at| write(at, share));
                }
            }
        }
    }
}

/// The gradient of a loss by the vector of each source, for a pass that goes on from it.
#[derive(Clone, Debug)]
pub(crate) struct VectorGradients {
    pub pooling: Pooling,
    /// The gradients (B, D), one after the other.
    pub values: Vec<f64>,
}
