//! The implementor of operations that only counts. A [`Counted`] tensor has a shape and no elements.
//!
//! Each operation makes the results that the kernel makes and reuses the memory that the kernel reuses. A kernel states the memory that
//! a call needs beside them ([`t5_ops::Needs`]); this module adds it up.

mod calls;
mod files;
mod ledger;
mod sizes;

use std::ops::Range;
use std::rc::Rc;

use candle_core::DType;
use t5_ops::{
    Activation, CrossEntropy, Distillation, Dropout, LossSums, Mask, Needs, Path, RelativePosition, Rope, TokenLoss,
    TopLogits,
};

use super::{Attended, AttentionSettings, Files, Matrix, NormWeight, Ops, Position};
use crate::error::Result;
use crate::label_loss::LabelLoss;
use crate::pooling::Pooling;
use files::{CountedExtent, CountedFiles};
pub(crate) use ledger::Ledger;
pub use ledger::Work;
use ledger::{Memory, Placement};

/// A tensor of at most three dimensions without elements.
#[derive(Clone, Debug)]
pub(crate) struct Counted {
    memory: Rc<Memory>,
    dims: [usize; 3],
    rank: usize,
    dtype: DType,
}

impl Matrix<'_, Counted> {
    /// Calls `f`, which uses the weight. If the weight is paged by rows, all its rows are read `times` times.
    fn while_used(&self, times: u64, f: impl FnOnce()) {
        if self.is_paged_by_rows {
            return self.tensor.by_rows(times, f);
        }
        self.tensor.used();
        f();
    }

    /// The weight's (N, K).
    fn size(&self) -> (usize, usize) {
        self.quantisation.map_or_else(|| self.tensor.of_weight(), |quantisation| quantisation.shape())
    }
}

/// The width of the rows of a second product, which is added to the first.
fn added_width(added: Option<(&Counted, &Counted)>) -> usize {
    added.inspect(|(_, weight)| weight.used()).map_or(0, |(x, _)| x.width())
}

impl Ops for Counted {
    type OffloadStore = CountedFiles;
    type Extent = CountedExtent;

    fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn zeros(&self, dims: &[usize], dtype: DType) -> Result<Self> {
        Ok(self.ledger().tensor(dims, dtype))
    }

    fn clear(&self) -> Result<()> {
        self.calls(t5_ops::in_place_needs(self.path()));
        Ok(())
    }

    fn add_in_place(&self, _: &Self) -> Result<()> {
        self.calls(t5_ops::in_place_needs(self.path()));
        Ok(())
    }

    fn copied(&self) -> Result<Self> {
        Ok(self.like())
    }

    fn as_rows(&self) -> Result<Self> {
        self.shaped(&[self.rows(), self.width()])
    }

    fn shaped(&self, dims: &[usize]) -> Result<Self> {
        let mut all = [1; 3];
        all[..dims.len()].copy_from_slice(dims);
        Ok(Counted { memory: Rc::clone(&self.memory), dims: all, rank: dims.len(), dtype: self.dtype })
    }

    fn scaled(&self, scale: f64) -> Result<Self> {
        if scale == 1.0 {
            return Ok(self.clone());
        }
        self.calls(t5_ops::scaled_needs(self.path()));
        Ok(self.like())
    }

    fn offload_store(&self, _: &Files, copies_overlap: bool) -> Result<CountedFiles> {
        Ok(CountedFiles::new(self.ledger(), copies_overlap))
    }

    fn read_ahead(&self) {}

    fn page_in(&self) {
        let is_read = match &self.memory.home {
            Placement::Memory => false,
            Placement::File { is_resident } => !is_resident.get(),
            Placement::FileCountedElsewhere { is_here } => {
                if !is_here.replace(true) {
                    self.sums().come(Ops::bytes(self));
                }
                true
            }
        };
        if is_read {
            let paged_in = &self.sums().paged_in;
            paged_in.set(paged_in.get() + Ops::bytes(self));
        }
        self.used();
    }

    fn page_out(&self) {
        match &self.memory.home {
            Placement::File { is_resident } if is_resident.replace(false) => self.sums().take(Ops::bytes(self)),
            Placement::FileCountedElsewhere { is_here } if is_here.replace(false) => {
                self.sums().leave(Ops::bytes(self))
            }
            _ => {}
        }
    }

    fn release_unused(&self) {}

    fn embedding<'a>(ids: &Self, table: impl Into<Matrix<'a, Self>>, dtype: DType) -> Result<Self> {
        let Matrix { tensor: table, is_paged_by_rows, .. } = table.into();
        if !is_paged_by_rows {
            table.used();
        }
        let (rows, width) = (ids.count(), table.width());
        let x = table.ledger().tensor(&[ids.dims[0], ids.dims[1], width], dtype);
        x.calls(t5_ops::embedding_needs(x.path(), rows, width, [table.dtype, dtype]));
        Ok(x)
    }

    fn embedding_backward(ids: &Self, dy: &Self, dtable: &Self) -> Result<()> {
        let (rows, dtypes) = (ids.count(), [dy.dtype, dtable.dtype]);
        dy.calls(t5_ops::embedding_backward_needs(dy.path(), rows, dtable.of_weight(), dtypes));
        Ok(())
    }

    fn linear_plus_product<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        added: Option<(&Self, &Self)>,
    ) -> Result<Self> {
        let weight = weight.into();
        let (dtypes, added) = ([x.dtype, weight.tensor.dtype], added_width(added));
        let y = x.with_width(weight.size().0);
        let needs = t5_ops::linear_needs(x.path(), x.rows(), weight.size(), dtypes, added);
        weight.while_used(1, || x.calls(needs));
        Ok(y)
    }

    fn linear_scaled(x: &Self, weight: &Self, scale: f64) -> Result<Self> {
        Self::linear(x, weight)?.scaled_after(scale)
    }

    fn linear_backward_input_scaled(dy: &Self, weight: &Self, scale: f64) -> Result<Self> {
        Self::linear_backward_input(dy, weight, None)?.scaled_after(scale)
    }

    fn linear_backward_input_plus_product<'a>(
        dy: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        added: Option<(&Self, &Self)>,
        sum: Option<Self>,
    ) -> Result<Self> {
        let weight = weight.into();
        weight.tensor.used();
        let (accumulates, dtypes) = (sum.is_some(), [dy.dtype, weight.tensor.dtype]);
        let (weight, added) = (weight.size(), added_width(added));
        let dx = sum.unwrap_or_else(|| dy.with_width(weight.1));
        dy.calls(t5_ops::linear_backward_input_needs(dy.path(), dy.rows(), weight, dtypes, added, accumulates));
        Ok(dx)
    }

    fn linear_backward_weight(dy: &Self, x: &Self, dweight: &Self, _: bool) -> Result<()> {
        let (weight, dtypes) = ((dy.width(), x.width()), [dy.dtype, dweight.dtype]);
        dy.calls(t5_ops::linear_backward_weight_needs(dy.path(), dy.rows(), weight, dtypes));
        Ok(())
    }

    fn rms_norm<'a>(x: &Self, weight: impl Into<NormWeight<'a, Self>>, _: f64) -> Result<(Self, Self)> {
        weight.into().tensor.used();
        let results = (x.like(), x.ledger().tensor(&[x.rows()], x.statistics()));
        x.calls(t5_ops::rms_norm_needs(x.path(), x.elements(), x.dtype));
        Ok(results)
    }

    fn rms_norm_backward<'a>(
        x: &Self,
        weight: impl Into<NormWeight<'a, Self>>,
        _: &Self,
        dy: Self,
        _: Option<&Self>,
        dweight: Option<&Self>,
    ) -> Result<Self> {
        weight.into().tensor.used();
        let size = (x.rows() as u64, x.width() as u64);
        x.calls(t5_ops::rms_norm_backward_needs(x.path(), size, x.dtype, dweight.is_some()));
        Ok(dy)
    }

    fn rope(self, _: usize, _: &Rope) -> Result<Self> {
        self.replaces(t5_ops::rope_needs(self.path(), self.elements(), self.dtype), 0);
        Ok(self)
    }

    fn rope_backward(self, heads: usize, rope: &Rope) -> Result<Self> {
        self.rope(heads, rope)
    }

    fn soft_cap(self, _: f64) -> Result<Self> {
        self.replaces(t5_ops::soft_cap_needs(self.path(), self.elements(), self.dtype), 0);
        Ok(self)
    }

    fn attention(q: &Self, k: &Self, _: &Self, settings: &AttentionSettings<Self>) -> Result<(Self, Self)> {
        let sizes = q.attention_sizes(k, settings);
        let results = (q.like(), q.ledger().tensor(&[q.dims[0], settings.heads, q.dims[1]], q.statistics()));
        q.attends_by(settings);
        q.attends(t5_ops::attention_needs(q.path(), &sizes, q.dtype, settings.dropout.is_some()));
        Ok(results)
    }

    fn merge_attention(first: (Self, Self), _: (&Self, &Self), _: usize) -> Result<(Self, Self)> {
        let (out, path) = (&first.0, first.0.path());
        out.replaces(t5_ops::merge_attention_needs(path, out.elements(), out.dtype), 0);
        Ok(first)
    }

    fn attention_backward(
        of: &Attended<Self>,
        _: &Self,
        settings: &AttentionSettings<Self>,
        dbias: Option<&Self>,
    ) -> Result<(Self, Self, Self)> {
        let Attended { q, k, v, .. } = of;
        let sizes = q.attention_sizes(k, settings);
        let results = (q.like(), k.like(), v.like());
        q.attends_by(settings);
        let (drops, trains_bias) = (settings.dropout.is_some(), dbias.is_some());
        q.attends(t5_ops::attention_backward_needs(q.path(), &sizes, q.dtype, drops, trains_bias));
        Ok(results)
    }

    fn activation(gate: &Self, _: Option<&Self>, _: Activation, dropout: Option<&Dropout>) -> Result<Self> {
        let h = gate.like();
        gate.drops(dropout);
        gate.calls(t5_ops::feed_forward_activation_needs(gate.path(), gate.elements(), gate.dtype));
        Ok(h)
    }

    fn activation_backward(
        gate: Self,
        up: Option<Self>,
        _: Activation,
        dropout: Option<&Dropout>,
        dh: Self,
    ) -> Result<(Self, Self, Option<Self>)> {
        gate.drops(dropout);
        gate.calls(t5_ops::feed_forward_activation_backward_needs(gate.path(), gate.elements(), gate.dtype));
        Ok((gate, dh, up))
    }

    fn dropout(x: &Self, dropout: Option<&Dropout>) -> Result<Self> {
        if dropout.is_none() {
            return Ok(x.clone());
        }
        let y = x.like();
        x.drops(dropout);
        x.calls(t5_ops::dropout_needs(x.path(), x.elements(), x.dtype));
        Ok(y)
    }

    fn dropout_add(residual: &Self, x: &Self, dropout: Option<&Dropout>) -> Result<Self> {
        let sum = residual.like();
        x.drops(dropout);
        x.calls(t5_ops::dropout_add_needs(x.path(), x.elements(), x.dtype));
        Ok(sum)
    }

    fn relative_bias(table: &Self, _: &RelativePosition, queries: usize, keys: usize, _: usize) -> Result<Self> {
        table.used();
        table.calls(t5_ops::relative_bias_needs(table.path()));
        Ok(table.ledger().tensor(&[table.dims[1], queries + keys - 1], table.statistics()))
    }

    fn relative_bias_backward(_: &Self, _: &RelativePosition, _: usize, _: usize, dtable: &Self) -> Result<()> {
        dtable.calls(t5_ops::relative_bias_needs(dtable.path()));
        Ok(())
    }

    fn linear_cross_entropy<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        _: &[u32],
        settings: &CrossEntropy,
    ) -> Result<f64> {
        let weight = weight.into();
        let (rows, chunk, dtypes) = (x.rows(), settings.chunk_rows, [x.dtype, weight.tensor.dtype]);
        let needs = t5_ops::linear_cross_entropy_needs(x.path(), rows, weight.size(), dtypes, settings);
        let passes = t5_ops::linear_cross_entropy_passes(dtypes[0], rows, chunk, false);
        weight.while_used(passes, || x.loses(needs));
        Ok(0.0)
    }

    fn linear_cross_entropy_backward<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        _: &[u32],
        settings: &CrossEntropy,
        dweight: Option<(&Self, bool)>,
    ) -> Result<(LossSums, Self)> {
        let (dx, weight) = (x.like(), weight.into());
        let (rows, chunk, dtypes) = (x.rows(), settings.chunk_rows, [x.dtype, weight.tensor.dtype]);
        let (size, trains) = (weight.size(), dweight.is_some());
        let needs = t5_ops::linear_cross_entropy_backward_needs(x.path(), rows, size, dtypes, settings, trains);
        let passes = t5_ops::linear_cross_entropy_passes(dtypes[0], rows, chunk, true);
        weight.while_used(passes, || x.loses(needs));
        Ok((LossSums::default(), dx))
    }

    fn linear_cross_entropies<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        sizes: &[usize],
        settings: &CrossEntropy,
    ) -> Result<Vec<f64>> {
        let weight = weight.into();
        if x.path() == Path::Cpu {
            Self::linear_cross_entropy(x, weight, labels, settings)?;
        } else {
            for size in sizes {
                Self::linear_cross_entropy(&x.part(0, *size)?, Matrix { ..weight }, labels, settings)?;
            }
        }
        Ok(vec![0.0; sizes.len()])
    }

    fn weighted_linear_cross_entropy_backward<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        factors: &[f64],
        settings: &CrossEntropy,
    ) -> Result<(LossSums, Self)> {
        let weight = weight.into();
        if x.path() == Path::Cpu {
            return Self::linear_cross_entropy_backward(x, weight, labels, settings, None);
        }
        let (dx, size) = (x.like(), x.rows() / factors.len().max(1));
        for _ in factors {
            Self::linear_cross_entropy_backward(&x.part(0, size)?, Matrix { ..weight }, labels, settings, None)?;
        }
        Ok((LossSums::default(), dx))
    }

    fn logit_cross_entropy(logits: &Self, _: &[u32], soft_cap: Option<f64>) -> Result<f64> {
        logits.loses(t5_ops::logit_cross_entropy_needs(logits.path(), logits.elements(), logits.dtype, soft_cap));
        Ok(0.0)
    }

    fn logit_cross_entropy_backward(
        logits: Self,
        _: &[u32],
        _: f64,
        _: TokenLoss,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)> {
        logits.loses(t5_ops::logit_cross_entropy_needs(logits.path(), logits.elements(), logits.dtype, soft_cap));
        Ok((LossSums::default(), logits))
    }

    fn distillation_backward(
        logits: Self,
        _: &Self,
        _: &[u32],
        _: f64,
        _: Distillation,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)> {
        logits.loses(t5_ops::distillation_needs(logits.path(), logits.elements(), logits.dtype, soft_cap));
        Ok((LossSums::default(), logits))
    }

    fn top_distillation_backward(
        logits: Self,
        _: (&TopLogits, Range<usize>),
        _: &[u32],
        _: f64,
        _: Distillation,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)> {
        logits.loses(t5_ops::distillation_needs(logits.path(), logits.elements(), logits.dtype, soft_cap));
        Ok((LossSums::default(), logits))
    }

    fn adapted_row_norms(weight: Matrix<Self>, a: &Self, _: &Self, _: f64) -> Result<Self> {
        weight.tensor.used();
        let lengths = a.ledger().tensor(&[weight.size().0], weight.tensor.statistics());
        a.calls(t5_ops::adapted_row_norms_needs(a.path(), weight.size(), a.dims[0]));
        Ok(lengths)
    }

    fn ratio(a: &Self, _: &Self) -> Result<Self> {
        Ok(a.like())
    }

    fn minus(&self, _: &Self) -> Result<Self> {
        Ok(self.like())
    }

    fn scale_columns(self, _: &Self) -> Result<Self> {
        self.replaces(Needs::default(), Ops::bytes(&self));
        Ok(self)
    }

    fn magnitude_backward(_: &Self, _: &Self, _: &Self, _: &Self) -> Result<()> {
        Ok(())
    }

    fn plus_row(&self, _: &Self) -> Result<Self> {
        Ok(self.like())
    }

    fn add_rows_to(&self, sums: &Self) -> Result<()> {
        // The rows in the sums' dtype, and their sum.
        let width = sums.dtype.size_in_bytes() as u64;
        self.sums().note_transient((self.elements() + self.width() as u64) * width);
        Ok(())
    }

    fn tanh(&self) -> Result<Self> {
        Ok(self.like())
    }

    fn tanh_backward(&self, dy: &Self) -> Result<Self> {
        self.sums().note_transient(2 * Ops::bytes(self));
        Ok(dy.like())
    }

    fn label_loss_backward(&self, _: &[u32], _: LabelLoss, _: f64) -> Result<(LossSums, Self)> {
        // The values in f64, and a copy of them.
        self.sums().note_transient(2 * self.elements() * size_of::<f64>() as u64);
        Ok((LossSums::default(), self.like()))
    }

    fn pool_backward(&self, pooling: Pooling, _: &[usize], _: &[f64]) -> Result<Self> {
        // The values are made in f32, or f64, where they are not compared; and the largest ones are looked for in a copy.
        let wide = if self.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let _made = (self.dtype != wide).then(|| self.zeros(self.dims(), wide)).transpose()?;
        let _copy = (pooling == Pooling::Max).then(|| self.zeros(self.dims(), wide)).transpose()?;
        Ok(self.like())
    }

    fn set_positions(&self, _: &Self, _: usize) -> Result<()> {
        Ok(())
    }

    fn append(_: [&Self; 2], _: [&Self; 2], _: Position<Self>) -> Result<()> {
        Ok(())
    }

    fn attention_at(
        q: &Self,
        [k, v]: [&Self; 2],
        settings: &AttentionSettings<Self>,
        _: Position<Self>,
    ) -> Result<(Self, Self)> {
        let settings = AttentionSettings { mask: Mask::ALL, key_lengths: &[], ..*settings };
        Self::attention(q, k, v, &settings)
    }

    fn part(&self, _: usize, count: usize) -> Result<Self> {
        let mut dims = self.dims;
        dims[0] = count;
        self.shaped(&dims[..self.rank])
    }

    fn joined(mut parts: Vec<Self>) -> Result<Self> {
        let samples = parts.iter().map(|part| part.dims[0]).sum();
        let first = parts.swap_remove(0);
        let mut dims = first.dims;
        match parts.is_empty() {
            true => Ok(first),
            false => {
                dims[0] = samples;
                Ok(first.ledger().tensor(&dims[..first.rank], first.dtype))
            }
        }
    }

    fn transposed(&self) -> Result<Self> {
        let [batch, heads, length] = self.dims;
        Ok(self.ledger().tensor(&[batch, length, heads], self.dtype))
    }

    fn select(&self, rows: &[u32]) -> Result<Self> {
        let mut dims = self.dims;
        dims[0] = rows.len();
        Ok(self.ledger().tensor(&dims[..self.rank], self.dtype))
    }

    fn copy_rows(&self, _: &[(usize, usize)], _: usize) -> Result<()> {
        Ok(())
    }

    /// Counted tensors have no elements, so there is nothing to return.
    fn scores(&self, normalised: bool) -> Result<Vec<f32>> {
        self.calls(t5_ops::scores_needs(self.path(), (self.rows(), self.width()), self.dtype, normalised));
        Ok(Vec::new())
    }

    fn candidates(&self, _: &[f32], count: usize) -> Result<Option<(Vec<u32>, Vec<f32>)>> {
        let needs = t5_ops::candidates_needs(self.path(), (self.rows(), self.width()), count);
        Ok(needs.map(|needs| {
            self.calls(needs);
            (Vec::new(), Vec::new())
        }))
    }

    fn largest(&self) -> Result<Vec<u32>> {
        self.calls(t5_ops::largest_needs(self.path(), (self.rows(), self.width())));
        Ok(vec![0; self.rows()])
    }
}
