//! The kernels' view of parameters that are updated.

use candle_core::{DType, Result, Tensor};
use cuda_device::launch::{Kernel, Module, address, count};

use super::rows_of_block;
use crate::ops::rounding::Rounding;
use crate::ops::rounding::cuda::Noise;

/// Threads of a block.
pub(crate) const THREADS: u32 = 256;
/// Shared memory of a sum over a block.
pub(crate) const OF_SUM: usize = 32 * size_of::<f64>();
/// Shared memory of the keys of the rows that a block updates between two barriers.
pub(crate) const OF_KEYS: usize = 128 * size_of::<u64>();

/// A parameter, its gradient and its first moment: `Parameter` of `optimizer.cu`, which has no padding.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Parameter {
    values: u64,
    gradient: u64,
    first_moment: u64,
    noise: Noise,
    rows: i32,
    rows_each: i32,
    width: i32,
    first_part: i32,
    is_bf16: u32,
    has_bf16_gradient: u32,
}

impl Parameter {
    /// An entry whose blocks begin at `blocks`. Advances `blocks` past them. A vector is one row.
    pub(crate) fn next(
        [values, gradient]: [&Tensor; 2],
        first_moment: Option<&Tensor>,
        (rows, width): (usize, usize),
        (rounding, first_row): (Rounding, usize),
        blocks: &mut usize,
    ) -> Result<Self> {
        let (rows_each, first_part) = (rows_of_block(rows, width), count(*blocks)?);
        *blocks += rows.div_ceil(rows_each);
        let is_bf16 = |t: &Tensor| u32::from(t.dtype() == DType::BF16);
        Ok(Self {
            values: address(values)?,
            gradient: address(gradient)?,
            first_moment: first_moment.map_or(Ok(0), address)?,
            noise: Noise::new(rounding, first_row),
            rows: count(rows)?,
            rows_each: count(rows_each)?,
            width: count(width)?,
            first_part,
            is_bf16: is_bf16(values),
            has_bf16_gradient: is_bf16(gradient),
        })
    }
}

/// Parameters that a card can update at once. Their table, and the memory that it points to, are uploaded. Only the launches and the scale
/// of the gradients are missing.
#[derive(Debug)]
pub(crate) struct Ready {
    /// The span in a profile.
    span: fn() -> tracing::Span,
    /// Entries, with the launches over each group of them.
    table: Tensor,
    groups: Vec<Group>,
    /// The memory that entries point to.
    _held: Vec<Tensor>,
}

/// Launches over some entries of a table.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) entries: usize,
    pub(crate) launches: Vec<Launch>,
}

/// A launch over a group.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) kernel: &'static str,
    pub(crate) blocks: usize,
    pub(crate) shared_bytes: usize,
    /// Whether the scale of gradients is one of its arguments.
    pub(crate) takes_scale: bool,
}

impl Ready {
    /// Prepares the parameters of a table in groups, whose entries point to `held`.
    pub(crate) fn new(span: fn() -> tracing::Span, table: Tensor, groups: Vec<Group>, held: Vec<Tensor>) -> Self {
        Self { span, table, groups, _held: held }
    }

    /// [`Ready::launch`] as an operation of its own.
    pub(crate) fn make(&self, gradient_scale: f64) -> Result<()> {
        let _span = (self.span)().entered();
        self.launch(gradient_scale)
    }

    /// Updates the parameters, with each gradient times `gradient_scale`.
    pub(crate) fn launch(&self, gradient_scale: f64) -> Result<()> {
        let entries: usize = self.groups.iter().map(|group| group.entries).sum();
        let words = self.table.elem_count() / entries.max(1);
        let mut first = 0;
        for Group { entries, launches } in &self.groups {
            let table = self.table.narrow(0, first * words, entries * words)?;
            first += entries;
            for Launch { kernel, blocks, shared_bytes, takes_scale } in launches {
                let kernel = Kernel::new(table.device(), Module::Optimizer, *kernel)?.tensor(&table)?.size(*entries)?;
                let kernel = if *takes_scale { kernel.value(gradient_scale) } else { kernel };
                // SAFETY: the table has these entries, whose tensors are held and have these sizes. Each row and column is in one block.
                unsafe { kernel.launch([*blocks, 1, 1], THREADS, *shared_bytes)? };
            }
        }
        Ok(())
    }
}

/// Applies updates in order. Consecutive updates with one scale of their gradients are applied together.
pub(crate) fn each_scale<U>(
    updates: &[U],
    scale: impl Fn(&U) -> f64,
    ready: impl Fn(&[U]) -> Result<Ready>,
) -> Result<()> {
    let mut alike = updates.chunk_by(|a, b| scale(a) == scale(b));
    alike.try_for_each(|updates| ready(updates)?.launch(scale(&updates[0])))
}

/// Gradients as kernels read them: strided ones are copied.
pub(crate) fn contiguous<'a>(gradients: impl Iterator<Item = &'a Tensor>) -> Result<Vec<Tensor>> {
    gradients.map(Tensor::contiguous).collect()
}
