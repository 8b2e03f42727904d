//! Attention on a card: on tensor cores for bf16 and the usual head sizes, otherwise without them. Few queries, as in generation, have a
//! block each. Blocks of keys compute the gradients of keys, values and bias, and blocks of queries those of queries, so no two blocks add
//! to one place. The bytes that a call holds do not depend on the card's kernels.

use candle_core::{DType, Device, Result, Tensor};
use cuda_device::launch::{
    Kernel, Module, address, bytes_to_add_in_order, count, has_shared_bytes, recording, rows_address, suffix,
    takes_alike, unwritten, uploaded,
};

use super::{Attended, Attention, Mask, Sizes};
use crate::ops::decoding::Position;
use crate::ops::dropout::cuda::{self as dropout, samples};
use crate::ops::dropout::{Dropout, active};

/// Threads of a block.
const THREADS: u32 = 128;
/// Threads of a block of the small kernels.
const SMALL: usize = 256;

/// Whether there are kernels for these operands.
pub(super) fn takes(operands: &[&Tensor], a: &Attention, s: &Sizes) -> bool {
    let of_bias =
        a.bias.is_none_or(|bias| bias.dtype() == DType::F32 && cuda_device::launch::takes([operands[0], bias]));
    s.has_kernels_on_device() && of_bias && takes_alike(operands.iter().copied())
}

/// Whether the backward's kernels read these statistics, and add to such a gradient.
pub(super) fn adds_to(lse: &Tensor, dbias: Option<&Tensor>) -> bool {
    let all = || [lse].into_iter().chain(dbias);
    all().all(|t| t.dtype() == DType::F32) && cuda_device::launch::takes(all())
}

/// The kernels of one call.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    TensorCores,
    /// For f32, and heads of up to 64: a block has twice the rows.
    Narrow,
    Plain(DType),
    /// For f32, with less shared memory: a block's own rows are read from global memory.
    Lean,
}

impl Kind {
    /// The kernels of both directions. Before Ampere, some cards lack shared memory for the plain kernels of the largest heads. Every card
    /// that computes in bf16 has enough.
    fn choose(q: &Tensor, s: &Sizes) -> Result<Self> {
        let plain = Kind::Plain(q.dtype());
        let fits = |kind: Self| has_shared_bytes(q.device(), kind.max_shared(s.head_size));
        match (q.dtype(), s.head_size) {
            (DType::BF16, 32 | 64 | 128) => Ok(Kind::TensorCores),
            (DType::F32, ..=64) if fits(Kind::Narrow)? => Ok(Kind::Narrow),
            (DType::F32, _) if !fits(plain)? => Ok(Kind::Lean),
            _ => Ok(plain),
        }
    }

    /// The kernel of this name, with its first arguments.
    fn kernel<'a>(self, device: &'a Device, name: &str, s: &Sizes) -> Result<Kernel<'a>> {
        let (module, suffix) = match self {
            Kind::TensorCores if name == "attention_forward" => (Module::AttentionForward, s.head_size.to_string()),
            Kind::TensorCores => (Module::AttentionBackward, s.head_size.to_string()),
            Kind::Narrow => (Module::Attention, "narrow_f32".to_owned()),
            Kind::Plain(dtype) => (Module::Attention, suffix(dtype).to_owned()),
            Kind::Lean => (Module::Attention, "lean_f32".to_owned()),
        };
        Kernel::new(device, module, format!("{name}_{suffix}"))
    }

    /// An operand as the kernels read it: tensor cores take contiguous rows that begin at multiples of 16 bytes.
    fn operand(self, x: &Tensor) -> Result<Tensor> {
        let x = x.contiguous()?;
        if self == Kind::TensorCores && !address(&x)?.is_multiple_of(16) { x.force_contiguous() } else { Ok(x) }
    }

    /// Rows of a block: the queries of the forward, and the queries or keys of the backward.
    fn rows(self) -> usize {
        match self {
            Kind::TensorCores | Kind::Narrow => 64,
            Kind::Plain(_) | Kind::Lean => 32,
        }
    }

    /// Numbers from one row in shared memory to the next, without tensor cores; and the numbers of the block's own rows of one operand
    /// there.
    fn rows_in_shared(self, head_size: usize) -> (usize, usize) {
        let row = if self == Kind::Narrow { 64 + 4 } else { (head_size.div_ceil(4) | 1) * 4 };
        (row, if self == Kind::Lean { 0 } else { self.rows() * row })
    }

    /// Bytes of shared memory of the forward; the kernels' sources describe the layouts.
    fn shared_by_forward(self, head_size: usize) -> usize {
        if self == Kind::TensorCores {
            return (64 + 4 * 64) * 2 * head_size + 2 * 128 * 4;
        }
        let (row, own) = self.rows_in_shared(head_size);
        4 * (2 * 32 * row + 40 * self.rows() + 2 * self.rows() + 32 + own)
    }

    /// Bytes of shared memory of the backward, by keys and by queries.
    fn shared_by_backward(self, head_size: usize) -> [usize; 2] {
        if self == Kind::TensorCores {
            let tiles = (2 * 64 + 4 * 32) * 2 * head_size;
            return [tiles + 4 * (512 + 2 * 192 + 8 * 128), tiles + 4 * 2 * 96];
        }
        let (row, own) = self.rows_in_shared(head_size);
        [4 * (4 * 32 + 2 * 32 * row + 40 * self.rows() + self.rows() + 32 + 2 * own); 2]
    }

    /// The most bytes of both directions.
    fn max_shared(self, head_size: usize) -> usize {
        let backward = self.shared_by_backward(head_size);
        backward.into_iter().fold(self.shared_by_forward(head_size), usize::max)
    }
}

/// Up to this many queries of a sequence, each query has a block of its own: a block of tiles would compute rows that do not exist.
const FEW_QUERIES: usize = 8;
/// Threads of such a block.
const FEW_THREADS: u32 = 256;

/// Attention of few queries without dropout. If the position lies on the card, lengths and bias are passed for position 0, and the kernel
/// adds the position that it reads there.
pub(super) fn attention_of_few(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    a: &Attention,
    s: &Sizes,
    at: Option<Position>,
) -> Result<(Tensor, Tensor)> {
    let (device, dtype) = (q.device(), q.dtype());
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let bias = match a.bias {
        Some(bias) if rows_address(bias)?.is_none() => Some(bias.contiguous()?),
        bias => bias.cloned(),
    };
    let (mut of_bias, bias_row) = bias.as_ref().map(rows_address).transpose()?.flatten().unwrap_or_default();
    let out = unwritten(q.shape(), dtype, device)?;
    let lse = unwritten((s.batch, s.heads, s.queries), DType::F32, device)?;
    // The rows of a cache have one length, which changes with each token.
    let mut length = a.key_lengths.first().map_or(0, |&length| length.min(s.keys));
    let are_alike = !recording::changes_lists() && a.key_lengths.iter().all(|other| (*other).min(s.keys) == length);
    let lengths = if are_alike { None } else { Some(lengths(a, s, device)?) };
    let on_card = at.and_then(|at| Some((at.number, at.on_card?)));
    if let Some((number, _)) = on_card {
        // As for position 0; the kernel adds the position.
        length -= number;
        of_bias += (number * size_of::<f32>()) as u64;
    }
    let kernel = Kernel::new(device, Module::Decoding, format!("attention_few_{}", suffix(dtype)))?;
    let kernel = kernel.tensor(&q)?.tensor(&k)?.tensor(&v)?.value(of_bias).size(bias_row)?;
    let kernel = kernel.tensor_or_null(lengths.as_ref())?.size(length)?.tensor_or_null(on_card.map(|(_, at)| at))?;
    let kernel = kernel.tensor(&out)?.tensor(&lse)?;
    let shared = FEW_THREADS as usize / 32 * (s.head_size + 2) * size_of::<f32>();
    // SAFETY: as in `attention`; each warp has room for a row and two numbers.
    unsafe { kernel.value(Shape::new(s, a)?).launch([s.batch * s.queries, s.heads, 1], FEW_THREADS, shared)? };
    Ok((out, lse))
}

/// The struct as the kernels define it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Shape {
    batches: [i64; 3],
    rows: [i32; 3],
    queries: i32,
    keys: i32,
    heads: i32,
    head_size: i32,
    is_causal: i32,
}

impl Shape {
    /// The shape of contiguous tensors.
    fn new(s: &Sizes, a: &Attention) -> Result<Self> {
        let width = s.heads * s.head_size;
        let batch = |rows: usize| (rows * width) as i64;
        Ok(Self {
            batches: [batch(s.queries), batch(s.keys), batch(s.keys)],
            rows: [count(width)?; 3],
            queries: count(s.queries)?,
            keys: count(s.keys)?,
            heads: count(s.heads)?,
            head_size: count(s.head_size)?,
            is_causal: i32::from(a.mask == Mask::CAUSAL),
        })
    }
}

/// Lists on the card besides the operands: lengths, and the samples of a dropout.
struct Lists<'a> {
    lengths: Tensor,
    dropout: Option<&'a Dropout<'a>>,
    samples: Option<Tensor>,
}

/// The keys of each sequence, on the card.
fn lengths(a: &Attention, s: &Sizes, device: &Device) -> Result<Tensor> {
    if let Some(place) = recording::place_of(a.key_lengths) {
        return Ok(place);
    }
    // A length beyond the number of keys counts as all keys.
    let lengths: Vec<u32> = a.key_lengths.iter().map(|&length| length.min(s.keys) as u32).collect();
    uploaded(&lengths, device)
}

impl<'a> Lists<'a> {
    fn new(a: &'a Attention, s: &Sizes, device: &Device) -> Result<Self> {
        let dropout = match &a.dropout {
            Some(d) => active("attention", Some(d), s.batch)?,
            None => None,
        };
        let samples = samples(dropout, device)?;
        Ok(Self { lengths: lengths(a, s, device)?, dropout, samples })
    }

    fn of_kernel<'k>(&self, kernel: Kernel<'k>) -> Result<Kernel<'k>> {
        kernel.tensor(&self.lengths)?.value(dropout::Mask::new(self.dropout)).tensor_or_null(self.samples.as_ref())
    }
}

/// Blocks for tiles of rows of each sequence and head, in the order of the kernels' `attention_block`.
fn grid(s: &Sizes, a: &Attention, rows: usize, tile: usize) -> [usize; 3] {
    let tiles = rows.div_ceil(tile);
    if a.mask == Mask::CAUSAL { [s.batch * s.heads, tiles, 1] } else { [tiles * s.batch, s.heads, 1] }
}

pub(super) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, a: &Attention, s: &Sizes) -> Result<(Tensor, Tensor)> {
    if s.queries <= FEW_QUERIES && a.dropout.is_none() {
        return attention_of_few(q, k, v, a, s, None);
    }
    let (device, dtype) = (q.device(), q.dtype());
    let (kind, lists) = (Kind::choose(q, s)?, Lists::new(a, s, device)?);
    let (q, k, v) = (kind.operand(q)?, kind.operand(k)?, kind.operand(v)?);
    let bias = a.bias.map(Tensor::contiguous).transpose()?;
    let out = unwritten(q.shape(), dtype, device)?;
    let lse = unwritten((s.batch, s.heads, s.queries), DType::F32, device)?;
    let kernel = kind.kernel(device, "attention_forward", s)?;
    let kernel = kernel.tensor(&q)?.tensor(&k)?.tensor(&v)?.tensor_or_null(bias.as_ref())?;
    let kernel = lists.of_kernel(kernel)?.tensor(&out)?.tensor(&lse)?.value(Shape::new(s, a)?);
    // SAFETY: `sizes` has checked these shapes; each sequence has a length and a sample.
    unsafe { kernel.launch(grid(s, a, s.queries, kind.rows()), THREADS, kind.shared_by_forward(s.head_size))? };
    Ok((out, lse))
}

/// Sums of the bias's gradient by blocks of keys, (B, H, blocks, T + rows - 1).
fn partial_sums(s: &Sizes, rows: usize) -> [usize; 4] {
    [s.batch, s.heads, s.keys.div_ceil(rows), s.queries + rows - 1]
}

pub(super) fn attention_backward(
    of: &Attended,
    dout: &Tensor,
    a: &Attention,
    s: &Sizes,
    dbias: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (device, dtype) = (of.q.device(), of.q.dtype());
    let (kind, lists, shape) = (Kind::choose(of.q, s)?, Lists::new(a, s, device)?, Shape::new(s, a)?);
    let [q, k, v, dout] = [of.q, of.k, of.v, dout].map(|x| kind.operand(x));
    let (q, k, v, dout, out, lse) = (q?, k?, v?, dout?, of.out.contiguous()?, of.lse.contiguous()?);
    let bias = a.bias.map(Tensor::contiguous).transpose()?;
    let [of_keys, of_queries] = kind.shared_by_backward(s.head_size);

    let delta = unwritten(lse.shape(), DType::F32, device)?;
    let kernel = Kernel::new(device, Module::Attention, format!("attention_delta_{}", suffix(dtype)))?;
    let kernel = kernel.tensor(&out)?.tensor(&dout)?.tensor(&delta)?;
    let kernel = kernel.size(s.batch)?.size(s.queries)?.size(s.heads)?.size(s.head_size)?;
    let sums = s.batch * s.queries * s.heads;
    // SAFETY: a block has a sum for four of its threads.
    unsafe { kernel.launch([sums.div_ceil(SMALL / 4), 1, 1], SMALL as u32, 0)? };

    let begin = |name: &str| {
        let kernel = kind.kernel(device, name, s)?.tensor(&q)?.tensor(&k)?.tensor(&v)?.tensor(&dout)?;
        lists.of_kernel(kernel.tensor_or_null(bias.as_ref())?.tensor(&lse)?.tensor(&delta)?)
    };
    let (dk, dv) = (unwritten(k.shape(), dtype, device)?, unwritten(v.shape(), dtype, device)?);
    let partial = match dbias {
        Some(_) => Some(unwritten(&partial_sums(s, kind.rows())[..], DType::F32, device)?),
        None => None,
    };
    let kernel = begin("attention_backward_keys")?.tensor(&dk)?.tensor(&dv)?;
    let kernel = kernel.tensor_or_null(partial.as_ref())?.value(shape);
    // SAFETY: as in the forward; each block has a row of partial sums.
    unsafe { kernel.launch(grid(s, a, s.keys, kind.rows()), THREADS, of_keys)? };

    let dq = unwritten(q.shape(), dtype, device)?;
    let kernel = begin("attention_backward_queries")?.tensor(&dq)?.value(shape);
    // SAFETY: as in the forward.
    unsafe { kernel.launch(grid(s, a, s.queries, kind.rows()), THREADS, of_queries)? };

    if let (Some(dbias), Some(partial)) = (dbias, &partial) {
        let kernel = Kernel::new(device, Module::Attention, "attention_add_bias_gradient")?;
        let kernel = kernel.tensor(partial)?.tensor(dbias)?.size(s.batch)?.size(s.heads)?;
        let kernel = kernel.size(s.queries)?.size(s.keys)?.size(kind.rows())?;
        let blocks = s.heads * (s.queries + s.keys - 1).div_ceil(32);
        // SAFETY: a lane for each element of the gradient, which is contiguous.
        unsafe { kernel.launch([blocks, 1, 1], SMALL as u32, bytes_to_add_in_order(SMALL as u32))? };
    }
    Ok((dq, dk, dv))
}
