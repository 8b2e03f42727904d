//! Losses of a classifier's outputs that the host computes in f64: there are few outputs.
//!
//! With the outputs x of a row, its label y, and the factor w of each class:
//!
//! ```text
//! squared error   (x - y)²
//! cross-entropy   w[y] (log sum exp x - x[y])
//! binary          sum over outputs of -w y log σ(x) - (1 - y) log(1 - σ(x)), where y is 1 if the output is right, or 0
//! ```
//!
//! These are torch's `MSELoss`, `CrossEntropyLoss` and `BCEWithLogitsLoss`, whose `pos_weight` is w, before the mean.

use t5_ops::{IGNORED_LABEL, LossSums};

/// A loss of a classifier's outputs. Without factors, each is 1.
#[derive(Clone, Copy, Debug)]
pub enum LabelLoss<'a> {
    /// Of one output. A label is the bits of an f32.
    SquaredError,
    /// Of each output, with a label of its own.
    Binary(&'a [f64]),
    /// Of all outputs of a row, with one label.
    CrossEntropy(&'a [f64]),
}

impl LabelLoss<'_> {
    /// The sums of the losses without and with factors. The outputs (R, `width`) become the gradient of the second, times `scale`.
    pub fn to_gradient(self, (values, width): (&mut [f64], usize), labels: &[u32], scale: f64) -> LossSums {
        match self {
            LabelLoss::SquaredError => {
                let each = values.iter_mut().zip(labels).map(|(value, right)| {
                    let error = *value - f64::from(f32::from_bits(*right));
                    *value = 2.0 * scale * error;
                    LossSums::from(error * error)
                });
                each.sum()
            }
            LabelLoss::Binary(factors) => {
                let each = values
                    .iter_mut()
                    .zip(labels)
                    .enumerate()
                    .map(|(at, (value, label))| binary(value, *label == 1, factor(factors, at % width), scale));
                each.sum()
            }
            LabelLoss::CrossEntropy(factors) => {
                let rows = values.chunks_mut(width).zip(labels);
                rows.map(|(row, label)| cross_entropy(row, *label, factors, scale)).sum()
            }
        }
    }
}

fn factor(factors: &[f64], class: usize) -> f64 {
    factors.get(class).copied().unwrap_or(1.0)
}

fn binary(value: &mut f64, is_right: bool, factor: f64, scale: f64) -> LossSums {
    let logit = *value;
    // -log σ(x) = softplus(-x), without overflow.
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let sigmoid = if logit < 0.0 { logit.exp() / (1.0 + logit.exp()) } else { 1.0 / (1.0 + (-logit).exp()) };
    let (cross_entropy, factor, slope) = match is_right {
        true => (softplus(-logit), factor, sigmoid - 1.0),
        false => (softplus(logit), 1.0, sigmoid),
    };
    *value = scale * factor * slope;
    LossSums { cross_entropy, objective: factor * cross_entropy }
}

fn cross_entropy(row: &mut [f64], label: u32, factors: &[f64], scale: f64) -> LossSums {
    if label == IGNORED_LABEL {
        row.fill(0.0);
        return LossSums::default();
    }
    let label = label as usize;
    let (factor, largest) = (factor(factors, label), row.iter().copied().fold(f64::NEG_INFINITY, f64::max));
    let total: f64 = row.iter().map(|value| (value - largest).exp()).sum();
    let cross_entropy = total.ln() + largest - row[label];
    for value in &mut *row {
        *value = scale * factor * (*value - largest).exp() / total;
    }
    row[label] -= scale * factor;
    LossSums { cross_entropy, objective: factor * cross_entropy }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of torch 2.15 in f64: `CrossEntropyLoss` and `BCEWithLogitsLoss` with `reduction="sum"`, and the gradient.
    #[test]
    fn losses_and_gradients_are_those_of_torch() {
        let outputs = [0.5, -1.0, 2.0, 3.0, 0.0, -40.0];
        let check = |loss: LabelLoss, labels: &[u32], [plain, weighted]: [f64; 2], expected: [f64; 6]| {
            let mut values = outputs;
            let sums = loss.to_gradient((&mut values, 3), labels, 1.0);
            let near = |got: f64, expected: f64| (got - expected).abs() < 1e-9;
            assert!(near(sums.cross_entropy, plain) && near(sums.objective, weighted), "{sums:?}");
            assert!(values.iter().zip(expected).all(|(got, expected)| near(*got, expected)), "{values:?}");
        };
        check(
            LabelLoss::CrossEntropy(&[0.5, 2.0, 3.0]),
            &[1, 2],
            [46.2898986482309, 135.62838464803554],
            [
                0.3505807842800734,
                -1.9217748534586252,
                1.5711940691785518,
                2.8577223804672998,
                0.14227761953270035,
                -3.0,
            ],
        );
        check(
            LabelLoss::Binary(&[0.5, 2.0, 3.0]),
            &[1, 0, 0, 0, 1, 1],
            [46.65600121487499, 127.11210990334489],
            [-0.1887703343990727, 0.2689414213699951, 0.8807970779778823, 0.9525741268224334, -1.0, -3.0],
        );
    }

    #[test]
    fn a_row_without_a_label_has_no_loss_and_no_gradient() {
        let mut values = [1.0, 2.0];
        let sums = LabelLoss::CrossEntropy(&[2.0, 3.0]).to_gradient((&mut values, 2), &[IGNORED_LABEL], 1.0);
        assert_eq!((sums, values), (LossSums::default(), [0.0; 2]));
    }
}
