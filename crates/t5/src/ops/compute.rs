//! The implementor of operations that computes: candle's tensors and the kernels of [`t5_ops`].

use std::ops::Range;

use candle_core::{DType, Tensor};
use t5_ops::{
    Activation, AddedProduct, CrossEntropy, Distillation, Dropout, LossSums, Quantised, RelativePosition, Rope,
    TokenLoss, TopLogits, Weight,
};

use super::files::Files;
use super::offload_store::{Extent, TensorOffloadStore};
use super::{Attended, AttentionSettings, Matrix, NormWeight, Ops, Position};
use crate::error::Result;
use crate::label_loss::LabelLoss;
use crate::pooling::Pooling;

impl Matrix<'_, Tensor> {
    /// Calls `f` with the weight in the form that kernels take.
    fn with<R>(self, f: impl FnOnce(Weight) -> candle_core::Result<R>) -> Result<R> {
        match self.quantisation {
            Some(quantisation) => Ok(f((&Quantised::new(quantisation, self.tensor.clone())?).into())?),
            None if self.is_paged_by_rows => Ok(f(Weight::ByRows(self.tensor))?),
            None => Ok(f(self.tensor.into())?),
        }
    }
}

impl AttentionSettings<'_, Tensor> {
    fn of_kernel(&self) -> t5_ops::Attention<'_> {
        self.with_bias(self.bias)
    }
}

impl<'a> From<NormWeight<'a, Tensor>> for t5_ops::NormWeight<'a> {
    fn from(weight: NormWeight<'a, Tensor>) -> Self {
        Self { tensor: weight.tensor, offset: weight.offset }
    }
}

/// Up to this many rows of a table in a file are read one by one, even where the whole table may be in memory.
const FEW_ROWS: usize = 256;

impl Ops for Tensor {
    type OffloadStore = TensorOffloadStore;
    type Extent = Extent;

    fn dims(&self) -> &[usize] {
        Tensor::dims(self)
    }

    fn dtype(&self) -> DType {
        Tensor::dtype(self)
    }

    fn zeros(&self, dims: &[usize], dtype: DType) -> Result<Self> {
        Ok(t5_ops::zeros(dims, dtype, self.device())?)
    }

    fn clear(&self) -> Result<()> {
        Ok(t5_ops::zero(self)?)
    }

    fn add_in_place(&self, other: &Self) -> Result<()> {
        Ok(t5_ops::add_in_place(self, other)?)
    }

    fn copied(&self) -> Result<Self> {
        Ok(self.copy()?)
    }

    fn as_rows(&self) -> Result<Self> {
        Ok(self.flatten_to(self.rank().saturating_sub(2))?)
    }

    fn shaped(&self, dims: &[usize]) -> Result<Self> {
        Ok(self.reshape(dims)?)
    }

    fn scaled(&self, scale: f64) -> Result<Self> {
        if scale == 1.0 { Ok(self.clone()) } else { Ok(t5_ops::scaled(self, scale)?) }
    }

    fn offload_store(&self, files: &Files, copies_overlap: bool) -> Result<TensorOffloadStore> {
        TensorOffloadStore::create(files, self.device(), copies_overlap)
    }

    fn read_ahead(&self) {
        tensor_storage::read_ahead(self);
    }

    fn page_in(&self) {
        tensor_storage::page_in(self);
    }

    fn page_out(&self) {
        tensor_storage::page_out(self);
    }

    fn release_unused(&self) {
        heap::release_unused();
    }

    fn embedding<'a>(ids: &Self, table: impl Into<Matrix<'a, Self>>, dtype: DType) -> Result<Self> {
        let Matrix { tensor: table, is_paged_by_rows, .. } = table.into();
        let by_rows = is_paged_by_rows || ids.elem_count() <= FEW_ROWS;
        Ok(if by_rows { t5_ops::embedding_by_rows } else { t5_ops::embedding }(ids, table, dtype)?)
    }

    fn embedding_backward(ids: &Self, dy: &Self, dtable: &Self) -> Result<()> {
        Ok(t5_ops::embedding_backward(ids, dy, dtable)?)
    }

    fn linear_plus_product<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        added: Option<(&Self, &Self)>,
    ) -> Result<Self> {
        let added = added.map(|(x, w)| AddedProduct { x, w });
        weight.into().with(|weight| t5_ops::linear_plus_product(x, weight, added))
    }

    fn linear_scaled(x: &Self, weight: &Self, scale: f64) -> Result<Self> {
        Ok(t5_ops::linear_scaled(x, weight, scale)?)
    }

    fn linear_backward_input_scaled(dy: &Self, weight: &Self, scale: f64) -> Result<Self> {
        Ok(t5_ops::linear_backward_input_scaled(dy, weight, scale)?)
    }

    fn linear_backward_input_plus_product<'a>(
        dy: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        added: Option<(&Self, &Self)>,
        sum: Option<Self>,
    ) -> Result<Self> {
        let added = added.map(|(x, w)| AddedProduct { x, w });
        weight.into().with(|weight| t5_ops::linear_backward_input_plus_product(dy, weight, added, sum))
    }

    fn linear_backward_weight(dy: &Self, x: &Self, dweight: &Self, accumulate: bool) -> Result<()> {
        Ok(t5_ops::linear_backward_weight(dy, x, dweight, accumulate)?)
    }

    fn rms_norm<'a>(x: &Self, weight: impl Into<NormWeight<'a, Self>>, epsilon: f64) -> Result<(Self, Self)> {
        Ok(t5_ops::rms_norm(x, weight.into(), epsilon)?)
    }

    fn rms_norm_backward<'a>(
        x: &Self,
        weight: impl Into<NormWeight<'a, Self>>,
        inv_rms: &Self,
        dy: Self,
        residual: Option<&Self>,
        dweight: Option<&Self>,
    ) -> Result<Self> {
        Ok(t5_ops::rms_norm_backward(x, weight.into(), inv_rms, dy, residual, dweight)?)
    }

    fn rope(self, heads: usize, rope: &Rope) -> Result<Self> {
        Ok(t5_ops::rope(self, heads, rope)?)
    }

    fn rope_backward(self, heads: usize, rope: &Rope) -> Result<Self> {
        Ok(t5_ops::rope_backward(self, heads, rope)?)
    }

    fn soft_cap(self, cap: f64) -> Result<Self> {
        Ok(t5_ops::soft_cap(self, cap)?)
    }

    fn attention(q: &Self, k: &Self, v: &Self, settings: &AttentionSettings<Self>) -> Result<(Self, Self)> {
        Ok(t5_ops::attention(q, k, v, &settings.of_kernel())?)
    }

    fn merge_attention(first: (Self, Self), second: (&Self, &Self), heads: usize) -> Result<(Self, Self)> {
        Ok(t5_ops::merge_attention(first, second, heads)?)
    }

    fn attention_backward(
        of: &Attended<Self>,
        dout: &Self,
        settings: &AttentionSettings<Self>,
        dbias: Option<&Self>,
    ) -> Result<(Self, Self, Self)> {
        let &Attended { q, k, v, out, lse } = of;
        let of = t5_ops::Attended { q, k, v, out, lse };
        Ok(t5_ops::attention_backward(&of, dout, &settings.of_kernel(), dbias)?)
    }

    fn activation(gate: &Self, up: Option<&Self>, function: Activation, dropout: Option<&Dropout>) -> Result<Self> {
        Ok(t5_ops::feed_forward_activation(gate, up, function, dropout)?)
    }

    fn activation_backward(
        gate: Self,
        up: Option<Self>,
        function: Activation,
        dropout: Option<&Dropout>,
        dh: Self,
    ) -> Result<(Self, Self, Option<Self>)> {
        Ok(t5_ops::feed_forward_activation_backward(gate, up, function, dropout, dh)?)
    }

    fn dropout(x: &Self, dropout: Option<&Dropout>) -> Result<Self> {
        Ok(t5_ops::dropout(x, dropout)?)
    }

    fn dropout_add(residual: &Self, x: &Self, dropout: Option<&Dropout>) -> Result<Self> {
        Ok(t5_ops::dropout_add(residual, x, dropout)?)
    }

    fn relative_bias(
        table: &Self,
        position: &RelativePosition,
        queries: usize,
        keys: usize,
        first_query: usize,
    ) -> Result<Self> {
        Ok(t5_ops::relative_bias(table, position, queries, keys, first_query)?)
    }

    fn relative_bias_backward(
        dbias: &Self,
        position: &RelativePosition,
        queries: usize,
        keys: usize,
        dtable: &Self,
    ) -> Result<()> {
        Ok(t5_ops::relative_bias_backward(dbias, position, queries, keys, 0, dtable)?)
    }

    fn linear_cross_entropy<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        settings: &CrossEntropy,
    ) -> Result<f64> {
        weight.into().with(|weight| t5_ops::linear_cross_entropy(x, weight, labels, settings))
    }

    fn linear_cross_entropy_backward<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        settings: &CrossEntropy,
        dweight: Option<(&Self, bool)>,
    ) -> Result<(LossSums, Self)> {
        weight.into().with(|weight| t5_ops::linear_cross_entropy_backward(x, weight, labels, settings, dweight))
    }

    fn linear_cross_entropies<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        sizes: &[usize],
        settings: &CrossEntropy,
    ) -> Result<Vec<f64>> {
        weight.into().with(|weight| t5_ops::linear_cross_entropies(x, weight, labels, sizes, settings))
    }

    fn weighted_linear_cross_entropy_backward<'a>(
        x: &Self,
        weight: impl Into<Matrix<'a, Self>>,
        labels: &[u32],
        factors: &[f64],
        settings: &CrossEntropy,
    ) -> Result<(LossSums, Self)> {
        weight
            .into()
            .with(|weight| t5_ops::weighted_linear_cross_entropy_backward(x, weight, labels, factors, settings))
    }

    fn logit_cross_entropy(logits: &Self, labels: &[u32], soft_cap: Option<f64>) -> Result<f64> {
        Ok(t5_ops::logit_cross_entropy(logits, labels, soft_cap)?)
    }

    fn logit_cross_entropy_backward(
        logits: Self,
        labels: &[u32],
        gradient_scale: f64,
        loss: TokenLoss,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)> {
        Ok(t5_ops::logit_cross_entropy_backward(logits, labels, gradient_scale, loss, soft_cap)?)
    }

    fn distillation_backward(
        logits: Self,
        teacher: &Self,
        labels: &[u32],
        gradient_scale: f64,
        of: Distillation,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)> {
        Ok(t5_ops::distillation_backward(logits, teacher, labels, gradient_scale, of, soft_cap)?)
    }

    fn top_distillation_backward(
        logits: Self,
        (teacher, rows): (&TopLogits, Range<usize>),
        labels: &[u32],
        gradient_scale: f64,
        of: Distillation,
        soft_cap: Option<f64>,
    ) -> Result<(LossSums, Self)> {
        let teacher = teacher.rows(rows.start, rows.len())?;
        Ok(t5_ops::top_distillation_backward(logits, &teacher, labels, gradient_scale, of, soft_cap)?)
    }

    fn adapted_row_norms(weight: Matrix<Self>, a: &Self, b: &Self, scale: f64) -> Result<Self> {
        weight.with(|weight| t5_ops::adapted_row_norms(weight, a, b, scale))
    }

    fn ratio(a: &Self, b: &Self) -> Result<Self> {
        Ok((a / b)?)
    }

    fn minus(&self, other: &Self) -> Result<Self> {
        Ok((self - other)?)
    }

    fn scale_columns(self, factors: &Self) -> Result<Self> {
        Ok(t5_ops::scale_columns(self, factors)?)
    }

    fn magnitude_backward(dy: &Self, z: &Self, lengths: &Self, dmagnitude: &Self) -> Result<()> {
        Ok(t5_ops::magnitude_backward(dy, z, lengths, dmagnitude)?)
    }

    fn plus_row(&self, row: &Self) -> Result<Self> {
        Ok(self.broadcast_add(&row.to_dtype(self.dtype())?)?)
    }

    fn add_rows_to(&self, sums: &Self) -> Result<()> {
        let rows = self.as_rows()?.to_dtype(sums.dtype())?;
        Ok(t5_ops::add_in_place(sums, &rows.sum(0)?)?)
    }

    fn tanh(&self) -> Result<Self> {
        Ok(Tensor::tanh(self)?)
    }

    fn tanh_backward(&self, dy: &Self) -> Result<Self> {
        Ok((dy * self.sqr()?.affine(-1.0, 1.0)?)?)
    }

    fn label_loss_backward(&self, labels: &[u32], loss: LabelLoss, scale: f64) -> Result<(LossSums, Self)> {
        let mut values = self.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        let width = Ops::dims(self).last().copied().unwrap_or(1);
        let sums = loss.to_gradient((&mut values, width), labels, scale);
        Ok((sums, Tensor::from_vec(values, Ops::dims(self), self.device())?.to_dtype(self.dtype())?))
    }

    fn pool_backward(&self, pooling: Pooling, lengths: &[usize], dvectors: &[f64]) -> Result<Self> {
        fn gradient<V: Copy + Into<f64> + Default>(
            z: &Tensor,
            pooling: Pooling,
            (lengths, dvectors): (&[usize], &[f64]),
            values: impl Fn(Tensor) -> Result<Vec<V>>,
            narrow: impl Fn(f64) -> V,
        ) -> Result<Vec<V>> {
            let (samples, longest, width) = z.dims3()?;
            // Only the largest values are looked at.
            let here = if pooling == Pooling::Max { values(z.flatten_all()?)? } else { Vec::new() };
            let mut gradient = vec![V::default(); samples * longest * width];
            for (sample, dvector) in dvectors.chunks(width).enumerate() {
                let first = sample * longest * width;
                let rows = here.get(first..).unwrap_or_default();
                pooling.backward((rows, lengths[sample]), dvector, |at, value| gradient[first + at] = narrow(value));
            }
            Ok(gradient)
        }
        let of = (lengths, dvectors);
        let made = match self.dtype() {
            DType::F64 => {
                let made = gradient(self, pooling, of, |z| Ok(z.to_vec1::<f64>()?), |value| value)?;
                Tensor::from_vec(made, self.shape(), self.device())?
            }
            dtype => {
                #[expect(clippy::cast_possible_truncation, reason = "activations are f32")]
                let narrow = |value: f64| value as f32;
                let values = |z: Tensor| Ok(z.to_dtype(DType::F32)?.to_vec1::<f32>()?);
                let made = gradient(self, pooling, of, values, narrow)?;
                Tensor::from_vec(made, self.shape(), self.device())?.to_dtype(dtype)?
            }
        };
        Ok(made)
    }

    fn set_positions(&self, rows: &Self, position: usize) -> Result<()> {
        Ok(self.slice_set(rows, 1, position)?)
    }

    fn append(caches: [&Self; 2], new: [&Self; 2], position: Position<Self>) -> Result<()> {
        Ok(t5_ops::append(caches, new, position)?)
    }

    fn attention_at(
        q: &Self,
        caches: [&Self; 2],
        settings: &AttentionSettings<Self>,
        position: Position<Self>,
    ) -> Result<(Self, Self)> {
        Ok(t5_ops::attention_at(q, caches, &settings.of_kernel(), position)?)
    }

    fn part(&self, from: usize, count: usize) -> Result<Self> {
        Ok(self.narrow(0, from, count)?)
    }

    fn joined(mut parts: Vec<Self>) -> Result<Self> {
        match parts.len() {
            1 => Ok(parts.swap_remove(0)),
            _ => Ok(t5_ops::join(&parts)?),
        }
    }

    fn transposed(&self) -> Result<Self> {
        Ok(self.transpose(1, 2)?.contiguous()?)
    }

    fn select(&self, rows: &[u32]) -> Result<Self> {
        let rows = Tensor::from_slice(rows, rows.len(), self.device())?;
        Ok(self.index_select(&rows, 0)?)
    }

    fn copy_rows(&self, pairs: &[(usize, usize)], positions: usize) -> Result<()> {
        Ok(t5_ops::copy_rows(self, pairs, positions)?)
    }

    fn scores(&self, normalised: bool) -> Result<Vec<f32>> {
        Ok(t5_ops::scores(self, normalised)?)
    }

    fn candidates(&self, offsets: &[f32], count: usize) -> Result<Option<(Vec<u32>, Vec<f32>)>> {
        Ok(t5_ops::candidates(self, offsets, count)?)
    }

    fn largest(&self) -> Result<Vec<u32>> {
        Ok(t5_ops::largest(self)?)
    }
}
