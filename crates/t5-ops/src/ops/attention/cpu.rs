//! Attention on the CPU: cuts the work into tasks. A [`Forward`] or a [`Backward`] carries a task out: with vectors ([`super::vectors`]),
//! for few queries ([`super::few`]), or in bf16 on tile registers or AVX512-BF16 ([`super::tiles`]).
//!
//! Forward: a task is some queries of one head of one sequence. Backward: a task is one head of one sequence. If there are few heads, the
//! queries of a head are cut into parts, in the same way for any number of threads. Each part sums its own dk and dv in f32, and the parts
//! are added in order. Heads are columns of the (B, T, H*K) tensors, read and written with a stride. Heads of queries that share a head of
//! keys are one task, which packs the keys once.

use candle_core::{DType, Result, Tensor};
use half::bf16;

use super::task::{Backward, Forward, Head, Input, Output, Queries};
use super::{Attended, Attention, Sizes, few, tiles, vectors};
#[cfg(target_arch = "x86_64")]
use crate::isa::Isa;
use crate::isa::isa;
#[cfg(target_arch = "x86_64")]
use crate::matmul::amx::Amx;
#[cfg(target_arch = "x86_64")]
use crate::matmul::avx512::Avx512Bf16;
use crate::matmul::software::SoftwareTiles;
use crate::needs::Needs;
use crate::ops::dropout::active;
use crate::parallel::{Shared, for_each_part, for_each_part_by, for_each_part_with, for_each_rows, threads};
use crate::processor::processor;
use crate::storage::{Element, View, filled, update, with_element};
use crate::vector::{self, vectorized};

/// The queries of all heads are cut into at least this many parts, if there are as many: a thread takes a part at a time.
const FEWEST_PARTS: usize = 16;

/// The parts of a head have sums of dk and dv of at most this size, unless two parts have more. T5's are always smaller.
const MOST_BYTES_OF_SUMS: usize = 64 << 20;

/// Scores, and sums of values. If strips of tiles are multiplied, the buffers of a thread have all keys of a head. T5's buffers for vectors
/// have a few rows only, and are left out.
pub(super) fn forward_needs(s: &Sizes, dtype: DType) -> Needs {
    let of_thread = match in_strips(s, dtype) {
        true => tiles::forward_bytes(s),
        false if few::applies_to(s) => 0,
        false => vectors::packed_bytes(s, dtype, vectors::task_queries(s), 2),
    };
    Needs::bytes((processor().threads * of_thread) as u64).with_products(2, s.product())
}

/// Two products for each product of the forward; the scores that are computed again are hidden behind them.
pub(super) fn backward_needs(s: &Sizes, dtype: DType) -> Needs {
    let (strips, threads) = (in_strips(s, dtype), processor().threads);
    let of_head = parts(s, if strips { tiles::GROUP } else { vectors::FEWEST_OF_PART });
    let parts = threads.min(s.batch * s.key_heads) * of_head;
    let buffers = if strips {
        parts * tiles::backward_bytes(s)
    } else {
        let queries = s.queries.div_ceil(of_head.max(1));
        let of_part = vectors::bytes_of_sums(s) + vectors::bytes_of_tiles(s, dtype);
        parts * of_part + threads.min(parts) * vectors::packed_bytes(s, dtype, queries, 3)
    };
    Needs::bytes(buffers as u64).with_products(4, s.product())
}

/// Whether the processor that needs are stated for multiplies strips of tiles.
fn in_strips(s: &Sizes, dtype: DType) -> bool {
    dtype == DType::BF16 && processor().multiplies_pairs() && tiles::fit(s)
}

/// The number of parts that the queries of a head are cut into in the backward, where a part has groups of `each`.
fn parts(s: &Sizes, each: usize) -> usize {
    let most = match vectors::bytes_of_sums(s) {
        0 => FEWEST_PARTS,
        bytes => (MOST_BYTES_OF_SUMS / bytes).max(2),
    };
    FEWEST_PARTS.div_ceil((s.batch * s.key_heads).max(1)).min(most).min(s.queries.div_ceil(each))
}

pub(super) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, a: &Attention, s: &Sizes) -> Result<(Tensor, Tensor)> {
    match q.dtype() {
        DType::BF16 if tiles::apply_to(s) => match isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => forward::<bf16, tiles::Forward<Amx>>(q, k, v, a, s),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => forward::<bf16, tiles::Forward<Avx512Bf16>>(q, k, v, a, s),
            _ => forward::<bf16, tiles::Forward<SoftwareTiles>>(q, k, v, a, s),
        },
        DType::BF16 if few::applies_to(s) => forward::<bf16, few::Forward<bf16>>(q, k, v, a, s),
        DType::BF16 => forward::<bf16, vectors::Forward<bf16>>(q, k, v, a, s),
        _ if few::applies_to(s) => forward::<f32, few::Forward<f32>>(q, k, v, a, s),
        _ => forward::<f32, vectors::Forward<f32>>(q, k, v, a, s),
    }
}

pub(super) fn forward<T: Element, F: Forward<T>>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    a: &Attention,
    s: &Sizes,
) -> Result<(Tensor, Tensor)> {
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let (q_view, k_view, v_view) = (View::new(&q)?, View::new(&k)?, View::new(&v)?);
    let bias = a.bias.map(Tensor::contiguous).transpose()?;
    let bias_view = bias.as_ref().map(View::new).transpose()?;
    let bias_data = bias_view.as_ref().map(View::to_f32).transpose()?;
    let input = Queries {
        q: q_view.slice::<T>()?,
        k: k_view.slice::<T>()?,
        v: v_view.slice::<T>()?,
        bias: bias_data.as_deref(),
        dropout: active("attention", a.dropout.as_ref(), s.batch)?,
    };

    let each = F::queries(a, s);
    let tasks = s.queries.div_ceil(each);
    let mut lse = vec![f32::NEG_INFINITY; s.batch * s.heads * s.queries];
    let lse_out = Shared::new(&mut lse);
    let out = filled::<T>(q.shape(), |out| {
        let out = Shared::new(out);
        for_each_part_with(
            s.batch * s.key_heads * tasks,
            || F::new(a, s),
            |forward, task| {
                let head = Head::of_group(task / tasks, s);
                let first = task % tasks * each;
                let queries = first..s.queries.min(first + each);
                // SAFETY: each task has its own queries of its own heads.
                unsafe { forward.run(&head, a, &input, queries, out, lse_out) };
            },
        );
        Ok(())
    })?;
    Ok((out, Tensor::from_vec(lse, (s.batch, s.heads, s.queries), q.device())?))
}

pub(super) fn attention_backward(
    of: &Attended,
    dout: &Tensor,
    a: &Attention,
    s: &Sizes,
    dbias: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    match of.q.dtype() {
        DType::BF16 if tiles::apply_to(s) => match isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => backward::<bf16, tiles::Backward<Amx>>(of, dout, a, s, dbias),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => backward::<bf16, tiles::Backward<Avx512Bf16>>(of, dout, a, s, dbias),
            _ => backward::<bf16, tiles::Backward<SoftwareTiles>>(of, dout, a, s, dbias),
        },
        DType::BF16 => backward::<bf16, vectors::Backward<bf16>>(of, dout, a, s, dbias),
        _ => backward::<f32, vectors::Backward<f32>>(of, dout, a, s, dbias),
    }
}

pub(super) fn backward<T: Element, B: Backward<T> + Send>(
    of: &Attended,
    dout: &Tensor,
    a: &Attention,
    s: &Sizes,
    dbias: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (q, k, v) = (of.q.contiguous()?, of.k.contiguous()?, of.v.contiguous()?);
    let (out, lse, dout) = (of.out.contiguous()?, of.lse.contiguous()?, dout.contiguous()?);
    let bias = a.bias.map(Tensor::contiguous).transpose()?;
    let bias_view = bias.as_ref().map(View::new).transpose()?;
    let bias_data = bias_view.as_ref().map(View::to_f32).transpose()?;
    let lse_view = View::new(&lse)?;
    let views = [&q, &k, &v, &out, &dout].map(View::new);
    let [q_view, k_view, v_view, out_view, dout_view] = &views;
    let input = Input {
        q: slice::<T>(q_view)?,
        k: slice::<T>(k_view)?,
        v: slice::<T>(v_view)?,
        out: slice::<T>(out_view)?,
        dout: slice::<T>(dout_view)?,
        lse: lse_view.slice::<f32>()?,
        bias: bias_data.as_deref(),
        dropout: active("attention_backward", a.dropout.as_ref(), s.batch)?,
    };

    let each = B::queries(a, s);
    let (groups, heads) = (s.queries.div_ceil(each), s.batch * s.key_heads);
    let parts = parts(s, each);
    // Each part of each head of each sequence sums its own gradient of the bias; they are added in order at the end.
    let (offsets, of_part) = (s.queries + s.keys - 1, s.group() * (s.queries + s.keys - 1));
    let mut partial = vec![0f32; if dbias.is_some() { heads * parts * of_part } else { 0 }];
    let partials = Shared::new(&mut partial);
    let (mut dk, mut dv) = (None, None);
    let dq = filled::<T>(q.shape(), |dq| {
        let dq = Shared::new(dq);
        dk = Some(filled::<T>(k.shape(), |dk| {
            let dk = Shared::new(dk);
            dv = Some(filled::<T>(v.shape(), |dv| {
                let to = Output { dq, dk, dv: Shared::new(dv) };
                // Each thread has a head, whose parts follow one another. A thread without a head takes parts of the others' heads.
                let worker = |_| (0..parts).map(|_| B::new(a, s)).collect::<Vec<_>>();
                let mut workers: Vec<_> = (0..threads().min(heads)).map(worker).collect();
                for_each_part_by(&mut workers, heads, |scratch, task| {
                    let head = Head::of_group(task, s);
                    let workers = Shared::new(scratch);
                    for_each_part(parts, |part| {
                        // SAFETY: each part has its own buffers and its own row of partial sums.
                        let backward = unsafe { &mut workers.slice(part, 1)[0] };
                        let dbias = dbias.is_some().then(|| {
                            // SAFETY: as above.
                            unsafe { partials.slice((task * parts + part) * of_part, of_part) }
                        });
                        let end = |part: usize| s.queries.min(groups * part / parts * each);
                        // SAFETY: each part has its own queries of its own head.
                        unsafe { backward.run(&head, a, &input, end(part)..end(part + 1), to, dbias) };
                    });
                    // SAFETY: each task has its own head.
                    unsafe { B::add_up(scratch, &head, a.scale as f32, to) };
                });
                Ok(())
            })?);
            Ok(())
        })?);
        Ok(())
    })?;
    if let Some(dbias) = dbias {
        let operands = [&q, &k, &v, &out, &lse, &dout];
        update::<f32, _>("attention_backward", dbias, &operands, |dbias| {
            for (i, partial) in partial.chunks_exact(offsets).enumerate() {
                let head = i / s.group() / parts % s.key_heads * s.group() + i % s.group();
                vector::add(&mut dbias[head * offsets..][..offsets], partial);
            }
            Ok(())
        })?;
    }
    match (dk, dv) {
        (Some(dk), Some(dv)) => Ok((dq, dk, dv)),
        _ => candle_core::bail!("attention_backward: gradients were not computed"),
    }
}

/// Merges the second result into the memory of the first.
pub(super) fn merge(first: (Tensor, Tensor), second: (&Tensor, &Tensor), heads: usize) -> Result<(Tensor, Tensor)> {
    let (out, lse) = first;
    let (batch, queries, width) = out.dims3()?;
    let views = [View::new(second.0)?, View::new(second.1)?];
    let other_lse = views[1].slice::<f32>()?;
    with_element!(out.dtype(), T, {
        let other = views[0].slice::<T>()?;
        update::<T, _>("merge_attention", &out, &[second.0], |out| {
            update::<f32, _>("merge_attention", &lse, &[second.1], |lse| {
                let (out, lse) = (Shared::new(out), Shared::new(lse));
                for_each_rows(batch * queries, width, |rows| {
                    for row in rows {
                        let (sequence, query) = (row / queries, row % queries);
                        for head in 0..heads {
                            let size = width / heads;
                            let (at, of_lse) = (row * width + head * size, (sequence * heads + head) * queries + query);
                            // SAFETY: each row has its own elements.
                            let (out, lse) = unsafe { (out.slice(at, size), lse.slice(of_lse, 1)) };
                            merge_row(out, &other[at..][..size], &mut lse[0], other_lse[of_lse]);
                        }
                    }
                });
                Ok(())
            })
        })?;
    });
    Ok((out, lse))
}

vectorized! {
    fn merge_row<T: Element>(out: &mut [T], other: &[T], lse: &mut f32, other_lse: f32) {
        let largest = if *lse > other_lse { *lse } else { other_lse };
        if largest == f32::NEG_INFINITY {
            return;
        }
        let (own, others) = ((*lse - largest).exp(), (other_lse - largest).exp());
        let sum = own + others;
        let (own, others) = (own / sum, others / sum);
        for i in 0..out.len() {
            out[i] = T::from_f32(own * out[i].to_f32() + others * other[i].to_f32());
        }
        *lse = largest + sum.ln();
    }
}

fn slice<'a, T: Element>(view: &'a Result<View<'_>>) -> Result<&'a [T]> {
    match view {
        Ok(view) => view.slice::<T>(),
        Err(error) => candle_core::bail!("attention_backward: {error}"),
    }
}
