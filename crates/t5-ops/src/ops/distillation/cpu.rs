//! The loss on the CPU, a row at a time.

use candle_core::{Result, Tensor};

use super::{Distillation, TopLogits};
use crate::dispatch::rows_and_width;
use crate::ops::logit_cross_entropy::cpu::each_row;
use crate::ops::token_loss::LossSums;
use crate::storage::{Element, View, update, with_element};
use crate::vector::{exp, sum, sum_of_two, vectorized};

pub(super) fn gradient(
    logits: Tensor,
    teacher: &Tensor,
    labels: &[u32],
    scale: f64,
    of: Distillation,
) -> Result<(LossSums, Tensor)> {
    let (_, width) = rows_and_width("distillation", "logits", &logits)?;
    let teacher = teacher.contiguous()?;
    let view = View::new(&teacher)?;
    let losses = with_element!(logits.dtype(), T, {
        let teacher_rows = view.slice::<T>()?;
        update::<T, _>("distillation_backward", &logits, &[&teacher], |data| {
            Ok(each_row(data, labels, |row, logits, label| {
                of_row(logits, &teacher_rows[row * width..][..width], label, (scale, of))
            }))
        })?
    });
    Ok((losses, logits))
}

/// As [`gradient`], beside the largest logits of a teacher.
pub(super) fn top_gradient(
    logits: Tensor,
    teacher: &TopLogits,
    labels: &[u32],
    scale: f64,
    of: Distillation,
) -> Result<(LossSums, Tensor)> {
    let (values, count) = (teacher.values.contiguous()?, teacher.count());
    let view = View::new(&values)?;
    let losses = with_element!(logits.dtype(), T, {
        let values = view.slice::<T>()?;
        update::<T, _>("top_distillation_backward", &logits, &[&teacher.values], |data| {
            Ok(each_row(data, labels, |row, logits, label| {
                let of_row = row * count..(row + 1) * count;
                of_top_row(logits, (&teacher.entries[of_row.clone()], &values[of_row]), label, (scale, of))
            }))
        })?
    });
    Ok((losses, logits))
}

/// What follows from a row of logits and one of a teacher's.
struct Row {
    /// The label's logit.
    logit: f32,
    student: Softmax,
    cooled: Softmax,
    of_teacher: Softmax,
    /// The sum of the teacher's exponentials.
    of_teachers: f32,
    /// log p - log q = (k - l) / T - `between`, which is log-sum-exp(k / T) - log-sum-exp(l / T): small terms where the two agree.
    between: f64,
    cross_entropy: f64,
    /// Factors in the gradient: of the label, of the student's exponentials, of the cooled ones, and of the teacher's probabilities.
    factors: [f32; 4],
}

impl Row {
    fn new<T: Element>(logits: &[T], teacher: &[T], label: usize, (scale, of): (f64, Distillation)) -> Self {
        let Distillation { alpha, temperature } = of;
        let inverse = (1.0 / temperature) as f32;
        let logit = logits[label].to_f32();
        let student = Softmax { largest: largest(logits), inverse: 1.0 };
        let total = exponentials(logits, student);
        let cooled = Softmax { inverse, ..student };
        let of_teacher = Softmax { largest: largest(teacher), inverse };
        let [of_cooled, of_teachers] = [exponentials(logits, cooled), exponentials(teacher, of_teacher)];
        let cross_entropy = f64::from(total).ln() + f64::from(student.largest) - f64::from(logit);
        let between = f64::from(of_teachers).ln() - f64::from(of_cooled).ln()
            + (f64::from(of_teacher.largest) - f64::from(student.largest)) * f64::from(inverse);
        let [own, others] = [(1.0 - alpha) * scale, alpha * temperature * scale].map(|factor| factor as f32);
        let factors = [own, own / total, others / of_cooled, others];
        Self { logit, student, cooled, of_teacher, of_teachers, between, cross_entropy, factors }
    }

    fn losses(&self, divergence: f64, of: Distillation) -> LossSums {
        let Distillation { alpha, temperature } = of;
        let cross_entropy = self.cross_entropy;
        let objective = alpha * temperature * temperature * divergence + (1.0 - alpha) * cross_entropy;
        LossSums { cross_entropy, objective }
    }
}

/// As [`of_row`], beside the largest logits of the teacher.
fn of_top_row<T: Element>(
    logits: &mut [T],
    (entries, teacher): (&[u32], &[T]),
    label: usize,
    (scale, of): (f64, Distillation),
) -> LossSums {
    let of_row = Row::new(logits, teacher, label, (scale, of));
    let Row { student, cooled, of_teacher, of_teachers, between, factors: [own, of_own, of_cool, others], .. } = of_row;
    // The gradients of the label and of the teacher's entries are differences of numbers that may be close: rounded once.
    let slope = |logit: f32, entry: usize, p: f32| {
        let of_label = if entry == label { own } else { 0.0 };
        student.probability(logit) * of_own - of_label + (cooled.probability(logit) * of_cool - others * p)
    };
    let mut divergence = 0.0;
    let mut label_gradient = slope(of_row.logit, label, 0.0);
    let gradients: Vec<f32> = entries
        .iter()
        .zip(teacher)
        .map(|(&entry, k)| {
            let (l, k) = (logits[entry as usize].to_f32(), k.to_f32());
            let p = of_teacher.probability(k) / of_teachers;
            divergence += f64::from(p) * (f64::from(k - l) * f64::from(cooled.inverse) - between);
            slope(l, entry as usize, p)
        })
        .collect();
    to_own_gradient(logits, student, of_own, (of_cool, cooled.inverse));
    for (&entry, gradient) in entries.iter().zip(gradients) {
        logits[entry as usize] = T::from_f32(gradient);
        if entry as usize == label {
            label_gradient = gradient;
        }
    }
    logits[label] = T::from_f32(label_gradient);
    of_row.losses(divergence, of)
}

/// The losses of a row, whose gradient overwrites the logits.
fn of_row<T: Element>(logits: &mut [T], teacher: &[T], label: usize, (scale, of): (f64, Distillation)) -> LossSums {
    let of_row = Row::new(logits, teacher, label, (scale, of));
    let Row {
        logit, student, cooled, of_teacher, of_teachers, between, factors: [own, of_own, of_cool, others], ..
    } = of_row;
    let divergence = divergence(logits, teacher, of_teacher, 1.0 / of_teachers, between as f32);
    let of_k = others / of_teachers;
    // The difference of numbers that may be close: rounded once, after the subtractions.
    let k = teacher[label].to_f32();
    let label_gradient = student.probability(logit) * of_own - own
        + (cooled.probability(logit) * of_cool - of_teacher.probability(k) * of_k);
    to_gradient(logits, teacher, student, of_own, (of_cool, cooled.inverse), of_teacher, of_k);
    logits[label] = T::from_f32(label_gradient);
    of_row.losses(f64::from(divergence), of)
}

/// The exponentials of logits, times `inverse`, below the largest.
#[derive(Clone, Copy)]
struct Softmax {
    largest: f32,
    inverse: f32,
}

impl Softmax {
    #[inline(always)]
    fn probability(self, logit: f32) -> f32 {
        exp((logit - self.largest) * self.inverse)
    }
}

vectorized! {
    fn largest<T: Element>(logits: &[T]) -> f32 {
        let mut largest = f32::NEG_INFINITY;
        for logit in logits {
            let logit = logit.to_f32();
            // NaN stays, so that the loss is NaN.
            largest = if logit > largest || logit.is_nan() { logit } else { largest };
        }
        largest
    }

    fn exponentials<T: Element>(logits: &[T], softmax: Softmax) -> f32 {
        sum(logits, |logit| softmax.probability(logit.to_f32()))
    }

    fn divergence<T: Element>(logits: &[T], teacher: &[T], of_teacher: Softmax, factor: f32, between: f32) -> f32 {
        sum_of_two(logits, teacher, |l, k| {
            let (l, k) = (l.to_f32(), k.to_f32());
            of_teacher.probability(k) * factor * ((k - l) * of_teacher.inverse - between)
        })
    }

    fn to_own_gradient<T: Element>(logits: &mut [T], student: Softmax, own: f32, cooled: (f32, f32)) {
        let (factor, inverse) = cooled;
        let soft = Softmax { largest: student.largest, inverse };
        for logit in logits {
            let l = logit.to_f32();
            *logit = T::from_f32(student.probability(l) * own + soft.probability(l) * factor);
        }
    }

    fn to_gradient<T: Element>(
        logits: &mut [T],
        teacher: &[T],
        student: Softmax,
        own: f32,
        cooled: (f32, f32),
        of_teacher: Softmax,
        of_teachers: f32,
    ) {
        let (factor, inverse) = cooled;
        let soft = Softmax { largest: student.largest, inverse };
        for (logit, k) in logits.iter_mut().zip(teacher) {
            let l = logit.to_f32();
            let others = soft.probability(l) * factor - of_teacher.probability(k.to_f32()) * of_teachers;
            *logit = T::from_f32(student.probability(l) * own + others);
        }
    }
}
