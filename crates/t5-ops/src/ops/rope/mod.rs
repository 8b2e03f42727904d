//! Rotary positions (Su et al. 2021, arXiv 2104.09864), in the layout of transformers: element `i` of a head and element `i + K/2` are
//! the two coordinates of a point, which is rotated by the angle `position / (factor base^(2i/K))`.
//!
//! Angles are f32 in every dtype, computed as transformers does: the power, its reciprocal, the division by the factor and the product
//! with the position are each rounded to f32.
//!
//! Shapes: x (B, T, H*K).

mod cpu;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use crate::dispatch::Path;
use crate::needs::{Needs, copies};

/// The angles of rotary positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// `rope_theta`: 10,000 or 1,000,000 in T5Gemma 2.
    pub base: f64,
    /// The factor of `linear` scaling, by which frequencies are divided; 1 without.
    pub factor: f64,
    /// The position of the first of the T rows.
    pub first_position: usize,
}

impl Rope {
    /// The angle of each pair of elements by one position: (K/2).
    fn frequencies(&self, head_size: usize) -> Vec<f32> {
        let of_pair = |i: usize| {
            let exponent = (2 * i) as f32 / head_size as f32;
            1.0 / (self.base.powf(f64::from(exponent)) as f32) / self.factor as f32
        };
        (0..head_size / 2).map(of_pair).collect()
    }
}

/// Rotates the heads of `x` by their positions, row `t` by position `first_position + t`. The caller gives up `x`: its memory may be
/// overwritten with the result.
///
/// # Errors
/// A number of heads that does not divide the width, or heads of an odd size; a base or factor that is not above 0; positions beyond 2^24,
/// which f32 does not tell apart.
pub fn rope(x: Tensor, heads: usize, rope: &Rope) -> Result<Tensor> {
    let _span = tracing::debug_span!("rope").entered();
    rotated(x, heads, rope, false)
}

/// The gradient of the argument of [`rope`], from the gradient of its result: the rotation back. The caller gives up `dy`.
///
/// # Errors
/// As [`rope`].
pub fn rope_backward(dy: Tensor, heads: usize, rope: &Rope) -> Result<Tensor> {
    let _span = tracing::debug_span!("rope_backward").entered();
    rotated(dy, heads, rope, true)
}

fn rotated(x: Tensor, heads: usize, rope: &Rope, back: bool) -> Result<Tensor> {
    let (_, length, width) = x.dims3()?;
    if heads == 0 || !width.is_multiple_of(2 * heads) {
        bail!("rope: expected a number of heads that divides half the width of {width}, got {heads}")
    }
    let is_positive = |x: f64| x.is_finite() && x > 0.0;
    if !is_positive(rope.base) || !is_positive(rope.factor) {
        bail!("rope: expected a base and a factor above 0, got {} and {}", rope.base, rope.factor)
    }
    if rope.first_position.saturating_add(length) > 1 << 24 {
        bail!("rope: expected positions below {}, got {length} from {} on", 1 << 24, rope.first_position)
    }
    match Path::choose(&[&x]).provided(x.is_contiguous()) {
        Path::Cpu => cpu::rotated(x, heads, rope, back),
        Path::Reference | Path::Device => reference::rotated(&x, heads, rope, back),
    }
}

/// Returns the needs of [`rope`] and its backward for this many elements, besides `x`. Where the result has memory of its own, this is part
/// of them.
pub fn rope_needs(path: Path, elements: u64, dtype: DType) -> Needs {
    match path {
        Path::Cpu => Needs::default(),
        Path::Reference | Path::Device => Needs::bytes(copies(4, elements, dtype)),
    }
}
