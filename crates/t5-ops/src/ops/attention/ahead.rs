//! Prefetches memory before it is needed.

use std::ops::Range;

use super::Sizes;
use super::task::{Head, Input, Output, Queries};
use crate::cache::{prefetch_read, prefetch_write};
use crate::parallel::{Shared, threads};

/// Bytes of a line of the cache.
const LINE: usize = 64;

/// Memory that is prefetched while a task computes: the next task's input and this task's output. Rows of one head lie far apart, so the
/// processor would not prefetch them itself.
pub(super) struct Ahead<'a, T> {
    head: Head,
    /// The queries of this task. Memory of keys is prefetched in this many shares.
    of: Range<usize>,
    /// The head of the next task and its first query.
    next: Option<(Head, usize)>,
    /// Rows of queries to read, (B, T, H*K).
    queries: [Option<&'a [T]>; 3],
    /// Keys and values to read, (B, S, KH*K).
    keys: Option<[&'a [T]; 2]>,
    /// Rows of queries to write, (B, T, H*K).
    to: Shared<T>,
    /// Keys and values to write, (B, S, KH*K).
    sums: Option<[Shared<T>; 2]>,
}

impl<'a, T> Ahead<'a, T> {
    /// For a task of the forward. The next task is that of the next queries.
    pub(super) fn forward(head: &Head, input: &Queries<'a, T>, of: Range<usize>, to: Shared<T>) -> Self {
        let (same, of) = (of.end < head.sizes.queries, of_one_head(head, of));
        Self {
            head: *head,
            next: if same { Some((*head, of.end)) } else { after(head, 1).map(|head| (head, 0)) },
            of,
            queries: [Some(input.q), None, None],
            keys: (!same).then_some([input.k, input.v]),
            to,
            sums: None,
        }
    }

    /// For a part of a task of the backward. The next task is the same part of another head. Threads take heads in turn, so that head is as
    /// many heads further as there are threads.
    pub(super) fn backward(head: &Head, input: &Input<'a, T>, of: Range<usize>, to: Output<T>) -> Self {
        Self {
            head: *head,
            next: after(head, threads()).map(|head| (head, of.start)),
            of: of_one_head(head, of),
            queries: [Some(input.q), Some(input.dout), Some(input.out)],
            keys: Some([input.k, input.v]),
            to: to.dq,
            sums: Some([to.dk, to.dv]),
        }
    }

    /// Prefetches, for one query of this task, the memory that this task writes and the memory that the next task reads in its place.
    pub(super) fn prefetch(&self, query: usize) {
        if !self.of.contains(&query) {
            return;
        }
        let (s, place, count) = (&self.head.sizes, query - self.of.start, self.of.len());
        prefetch_for_write(s, self.to, self.head.start(query));
        let keys = s.keys * place / count..s.keys * (place + 1) / count;
        for key in keys.clone() {
            self.sums.iter().flatten().for_each(|&to| prefetch_for_write(s, to, self.head.start_of_key(key)));
        }
        let Some((head, first)) = &self.next else { return };
        if first + place < s.queries {
            self.queries.iter().flatten().for_each(|data| prefetch(s, data, head.start(first + place)));
        }
        for key in keys {
            self.keys.iter().flatten().for_each(|data| prefetch(s, data, head.start_of_key(key)));
        }
    }
}

/// The queries of a task that has one head. Where heads share keys, rows of a task lie closer together, and nothing is prefetched.
fn of_one_head(head: &Head, of: Range<usize>) -> Range<usize> {
    if head.sizes.group() == 1 { of } else { 0..0 }
}

/// Prefetches the row of a head at `at` to the second-level cache.
fn prefetch<T>(s: &Sizes, data: &[T], at: usize) {
    for line in data[at..at + s.head_size].chunks(LINE / size_of::<T>()) {
        prefetch_read(line.as_ptr());
    }
}

/// Prefetches the row of a head at `at` for writing: a store would wait for its line otherwise.
fn prefetch_for_write<T>(s: &Sizes, data: Shared<T>, at: usize) {
    for line in (0..s.head_size).step_by(LINE / size_of::<T>()) {
        prefetch_write(data.pointer(at + line));
    }
}

/// The head that comes `count` heads after this one.
fn after(head: &Head, count: usize) -> Option<Head> {
    let s = &head.sizes;
    let number = head.sequence * s.heads + head.head + count;
    (number < s.batch * s.heads).then(|| Head { sequence: number / s.heads, head: number % s.heads, ..*head })
}
