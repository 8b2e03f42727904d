//! A task of attention on the CPU: a head of a sequence, its inputs and outputs, and the traits that carry it out.

use std::ops::Range;

use super::{Attention, Sizes};
use crate::matmul::Matrix;
use crate::parallel::Shared;
use crate::storage::Element;

/// The head of a sequence that a task works on, and how to find it in memory.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) sequence: usize,
    pub(super) head: usize,
    pub(super) sizes: Sizes,
}

impl Head {
    /// The first of the heads of queries that share head `number` of keys, where the heads of all sequences are counted.
    pub(super) fn of_group(number: usize, sizes: &Sizes) -> Self {
        let (sequence, key_head) = (number / sizes.key_heads, number % sizes.key_heads);
        Self { sequence, head: key_head * sizes.group(), sizes: *sizes }
    }

    /// The heads of queries that share this one's keys, from this one on.
    pub(super) fn group(&self) -> impl Iterator<Item = Head> + use<> {
        let first = *self;
        (first.head..first.head + first.sizes.group()).map(move |head| Head { head, ..first })
    }

    /// The start of this head of queries in row `position` of (B, T, H*K).
    pub(super) fn start(&self, position: usize) -> usize {
        let s = &self.sizes;
        ((self.sequence * s.queries + position) * s.heads + self.head) * s.head_size
    }

    /// The start of this head's keys in row `position` of (B, S, KH*K).
    pub(super) fn start_of_key(&self, position: usize) -> usize {
        let s = &self.sizes;
        ((self.sequence * s.keys + position) * s.key_heads + self.head / s.group()) * s.head_size
    }

    /// These rows of this head of (B, T, H*K): (rows, K).
    pub(super) fn read<'a, T: Element>(&self, data: &'a [T], rows: Range<usize>) -> Matrix<'a> {
        let s = &self.sizes;
        Matrix::strided(T::operand(&data[self.start(rows.start)..]), rows.len(), s.head_size, s.heads * s.head_size)
    }

    /// These rows of this head of keys or values, (B, S, KH*K): (rows, K).
    pub(super) fn read_keys<'a, T: Element>(&self, data: &'a [T], rows: Range<usize>) -> Matrix<'a> {
        let s = &self.sizes;
        let data = T::operand(&data[self.start_of_key(rows.start)..]);
        Matrix::strided(data, rows.len(), s.head_size, s.key_heads * s.head_size)
    }

    /// The index of query `position` of this head in (B, H, T).
    pub(super) fn row(&self, position: usize) -> usize {
        (self.sequence * self.sizes.heads + self.head) * self.sizes.queries + position
    }

    /// The entries of the bias for query `i`: one for each key.
    pub(super) fn bias_of<'a>(&self, bias: &'a [f32], i: usize) -> &'a [f32] {
        let s = &self.sizes;
        &bias[self.head * (s.queries + s.keys - 1) + s.queries - 1 - i..][..s.keys]
    }
}

/// A task of the forward: some queries of the heads that share a head of keys.
pub(super) trait Forward<T> {
    /// The number of queries of each task but the last.
    fn queries(a: &Attention, s: &Sizes) -> usize;

    fn new(a: &Attention, s: &Sizes) -> Self;

    /// Writes the results of these queries of the group of heads that begins with `head`, and the log-sum-exp of their scores.
    ///
    /// # Safety
    ///
    /// Nothing else reaches these queries of these heads of `out` and `lse`.
    unsafe fn run(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Queries<T>,
        queries: Range<usize>,
        out: Shared<T>,
        lse: Shared<f32>,
    );
}

/// A part of a task of the backward: some queries of the heads that share a head of keys.
pub(super) trait Backward<T>: Sized {
    /// The queries of a part are a multiple of this.
    fn queries(a: &Attention, s: &Sizes) -> usize;

    fn new(a: &Attention, s: &Sizes) -> Self;

    /// Writes dq of these queries of the group of heads that begins with `head`, sums their parts of dk and dv, and adds to `dbias`
    /// (G, T+S-1).
    ///
    /// # Safety
    ///
    /// Nothing else reaches these queries of these heads of dq.
    unsafe fn run(
        &mut self,
        head: &Head,
        a: &Attention,
        input: &Input<T>,
        queries: Range<usize>,
        to: Output<T>,
        dbias: Option<&mut [f32]>,
    );

    /// Adds the parts' sums of dk and dv to the first part's, in order, and writes them. Those of dk are multiplied by `scale`.
    ///
    /// # Safety
    ///
    /// Nothing else reaches this head of dk and dv.
    unsafe fn add_up(parts: &mut [Self], head: &Head, scale: f32, to: Output<T>);
}

/// Outputs of the backward: (B, T, H*K) and two (B, S, H*K).
#[derive(Clone, Copy)]
pub(super) struct Output<T> {
    pub(super) dq: Shared<T>,
    pub(super) dk: Shared<T>,
    pub(super) dv: Shared<T>,
}

/// Inputs of the forward.
pub(super) struct Queries<'a, T> {
    pub(super) q: &'a [T],
    pub(super) k: &'a [T],
    pub(super) v: &'a [T],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) dropout: Option<&'a crate::Dropout<'a>>,
}

/// Inputs of the backward.
pub(super) struct Input<'a, T> {
    pub(super) q: &'a [T],
    pub(super) k: &'a [T],
    pub(super) v: &'a [T],
    pub(super) out: &'a [T],
    pub(super) dout: &'a [T],
    pub(super) lse: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) dropout: Option<&'a crate::Dropout<'a>>,
}
