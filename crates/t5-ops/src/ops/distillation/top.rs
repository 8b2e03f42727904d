//! The loss beside the largest logits of each row of a teacher alone. Its other logits count as minus infinity, so p is the softmax of the k
//! largest, and a row of a teacher is k entries in place of the whole vocabulary.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{Distillation, cpu, reference};
use crate::dispatch::{Path, rows_and_width};
use crate::ops::token_loss::LossSums;
use crate::storage::{Element, View, with_element};

/// The largest logits of some rows, those of a row by entry.
#[derive(Clone, Debug)]
pub struct TopLogits {
    /// Their entries, row after row.
    pub entries: Vec<u32>,
    /// Their values (rows, k).
    pub values: Tensor,
}

/// A logit, ordered by its value; of equal ones the first entry is the largest.
#[derive(Clone, Copy, PartialEq)]
struct Logit(f64, Reverse<u32>);

impl Eq for Logit {}

impl PartialOrd for Logit {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Logit {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

impl TopLogits {
    /// The `count` largest of each row of `logits` (.., V).
    ///
    /// # Errors
    /// `count` is 0 or above V; the logits are on a device.
    pub fn of_logits(logits: &Tensor, count: usize) -> Result<Self> {
        let (rows, width) = rows_and_width("largest logits", "logits", logits)?;
        if count == 0 || count > width {
            bail!("largest logits: expected a number from 1 to {width}, got {count}")
        }
        if !logits.device().is_cpu() {
            bail!("largest logits: there is no kernel for a device")
        }
        let logits = logits.contiguous()?;
        let mut entries = Vec::with_capacity(rows * count);
        match logits.dtype() {
            DType::F64 => {
                let values = logits.flatten_all()?.to_vec1::<f64>()?;
                values.chunks(width).for_each(|row| largest(row.iter().copied(), count, &mut entries));
            }
            dtype => with_element!(dtype, T, {
                let view = View::new(&logits)?;
                let values = view.slice::<T>()?;
                for row in values.chunks(width) {
                    largest(row.iter().map(|value| f64::from(value.to_f32())), count, &mut entries);
                }
            }),
        }
        let at = Tensor::from_slice(&entries, (rows, count), logits.device())?;
        let values = logits.reshape((rows, width))?.gather(&at, 1)?;
        Ok(Self { entries, values })
    }

    /// Those of no row.
    ///
    /// # Errors
    /// Never.
    pub fn none() -> Result<Self> {
        Ok(Self { entries: Vec::new(), values: Tensor::zeros((0, 1), DType::F32, &Device::Cpu)? })
    }

    /// The number of logits of a row.
    pub fn count(&self) -> usize {
        self.values.dims().last().copied().unwrap_or(0)
    }

    /// Some of the rows.
    ///
    /// # Errors
    /// There are not so many.
    pub fn rows(&self, first: usize, count: usize) -> Result<Self> {
        let width = self.count();
        let entries = self.entries.get(first * width..(first + count) * width).unwrap_or_default().to_vec();
        Ok(Self { entries, values: self.values.narrow(0, first, count)?.contiguous()? })
    }

    /// The rows of these, one after the other.
    ///
    /// # Errors
    /// They have different numbers of logits.
    pub fn concatenated(parts: &[Self]) -> Result<Self> {
        let values: Vec<&Tensor> = parts.iter().map(|part| &part.values).collect();
        let entries = parts.iter().flat_map(|part| part.entries.iter().copied()).collect();
        Ok(Self { entries, values: Tensor::cat(&values, 0)? })
    }
}

/// Appends the entries of the largest values, the first entry first.
fn largest(values: impl Iterator<Item = f64>, count: usize, entries: &mut Vec<u32>) {
    let mut heap: BinaryHeap<Reverse<Logit>> = BinaryHeap::with_capacity(count + 1);
    for (entry, value) in (0..).zip(values) {
        // NaN is the largest, whatever its sign, so that the loss is NaN.
        let logit = Logit(if value.is_nan() { f64::NAN } else { value }, Reverse(entry));
        if heap.len() < count {
            heap.push(Reverse(logit));
        } else if heap.peek().is_some_and(|least| least.0 < logit) {
            heap.pop();
            heap.push(Reverse(logit));
        }
    }
    let first = entries.len();
    entries.extend(heap.into_iter().map(|Reverse(Logit(_, Reverse(entry)))| entry));
    entries[first..].sort_unstable();
}

/// As [`super::distillation_backward`], beside the largest logits of a teacher. It needs the same memory.
///
/// # Errors
/// Shapes, labels or entries that do not fit; on a device there is no kernel.
pub fn top_distillation_backward(
    logits: Tensor,
    teacher: &TopLogits,
    labels: &[u32],
    gradient_scale: f64,
    of: Distillation,
    soft_cap: Option<f64>,
) -> Result<(LossSums, Tensor)> {
    let (rows, width) = rows_and_width("distillation", "logits", &logits)?;
    let count = teacher.count();
    if teacher.values.dims() != [rows, count] || teacher.entries.len() != rows * count || labels.len() != rows {
        bail!(
            "distillation: expected {rows} rows of a teacher's logits and {rows} labels, got {:?} and {}",
            teacher.values.dims(),
            labels.len()
        )
    }
    super::check_labels(labels, width)?;
    if let Some(entry) = teacher.entries.iter().find(|&&entry| entry as usize >= width) {
        bail!("distillation: expected a teacher's entries below {width}, got {entry}")
    }
    if let Some(cap) = soft_cap {
        let capped = crate::soft_cap(logits.copy()?, cap)?;
        let (loss, gradient) = top_distillation_backward(capped, teacher, labels, gradient_scale, of, None)?;
        return Ok((loss, crate::soft_cap_backward(&logits, gradient, cap)?));
    }
    let is_alike = logits.is_contiguous() && logits.dtype() == teacher.values.dtype();
    match Path::choose(&[&logits, &teacher.values]).provided(is_alike) {
        Path::Cpu => cpu::top_gradient(logits, teacher, labels, gradient_scale, of),
        Path::Reference => {
            let whole = reference::whole(teacher, &logits)?;
            reference::distillation_backward(&logits, &whole, labels, gradient_scale, of)
        }
        Path::Device => bail!("distillation: there is no kernel for a device"),
    }
}
