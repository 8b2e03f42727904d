//! Asking for memory before it is needed.

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use half::bf16;

use crate::attention::cpu::Head;
use crate::matmul::tiles::BLOCK;
use crate::parallel::Shared;

/// Memory that is asked for while a task computes, because rows of one head lie far apart and nothing else would fetch them
/// ahead: what the next task will read, and what this one will write.
pub(super) struct Ahead<'a> {
    pub(super) head: Head,
    /// The queries of this task: what belongs to keys is asked for in as many shares.
    pub(super) of: Range<usize>,
    /// The head of the next task and its first query.
    pub(super) next: Option<(Head, usize)>,
    /// Rows of queries to read, (B, T, H*K).
    pub(super) queries: &'a [&'a [bf16]],
    /// Keys and values to read, (B, S, H*K).
    pub(super) keys: &'a [&'a [bf16]],
    /// Rows of queries to write, (B, T, H*K).
    pub(super) to: Shared<bf16>,
    /// Keys and values to write, (B, S, H*K).
    pub(super) sums: &'a [Shared<bf16>],
}

impl Ahead<'_> {
    /// Asks for what this task writes for one of its queries, and the next task reads in its place.
    pub(super) fn fetch(&self, query: usize) {
        if !self.of.contains(&query) {
            return;
        }
        let (s, place, count) = (&self.head.sizes, query - self.of.start, self.of.len());
        fetch_to_write(&self.head, self.to, s.queries, query);
        let keys = s.keys * place / count..s.keys * (place + 1) / count;
        for key in keys.clone() {
            self.sums.iter().for_each(|&to| fetch_to_write(&self.head, to, s.keys, key));
        }
        let Some((head, first)) = &self.next else { return };
        if first + place < s.queries {
            self.queries.iter().for_each(|data| fetch(head, data, s.queries, first + place));
        }
        for key in keys {
            self.keys.iter().for_each(|data| fetch(head, data, s.keys, key));
        }
    }
}

/// Asks for one row of a head to come to the second-level cache.
fn fetch(head: &Head, data: &[bf16], length: usize, row: usize) {
    let at = head.start(length, row);
    for line in data[at..at + head.sizes.head_size].chunks(BLOCK) {
        // SAFETY: a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
}

/// Asks for one row of a head that will be written: a store waits for its line otherwise.
fn fetch_to_write(head: &Head, data: Shared<bf16>, length: usize, row: usize) {
    for line in (0..head.sizes.head_size).step_by(BLOCK) {
        let line = data.pointer(head.start(length, row) + line);
        // SAFETY: a prefetch changes nothing; every machine with tile registers has this one.
        unsafe { asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) };
    }
}

/// The head whose turn is after this one's.
pub(super) fn next(head: &Head) -> Option<Head> {
    let s = &head.sizes;
    if head.head + 1 < s.heads {
        Some(Head { head: head.head + 1, ..*head })
    } else {
        (head.sequence + 1 < s.batch).then(|| Head { sequence: head.sequence + 1, head: 0, ..*head })
    }
}
