//! Rows of a table in a file, copied to memory while an operation works on them, so that the table never lies there whole.
//!
//! They are copied and not mapped: the system maps more than is asked for, as much as its page cache has in one piece. The operation
//! states how many rows it has at a time ([`window_bytes`]). It works on the same rows in the same order as on a table in memory: no bit
//! depends on how many there are.

use std::ops::Range;

use candle_core::{DType, WithDType};
use half::{bf16, f16};
use heap::{Stretch, counting_wait};

use crate::bytes::{bytes, bytes_mut};
use crate::matmul::{Factor, Stored};
use crate::narrow::{Form, Narrow};
use crate::needs::elements;
use crate::parallel::{Shared, for_each_part, rows_per_part};
use crate::processor::processor;
use crate::storage::Operand;

/// Rows that operations have in memory at a time, at most, where few threads share them: as many as the largest tile of the loss has.
pub(crate) const WINDOW: usize = 1920;

/// Rows of a thread at a time, at most, where each has its own: a block of the loss.
pub(crate) const OF_THREAD: usize = 96;

/// Columns of a product, at least: with fewer of them other kernels may be better.
const LEAST: usize = 192;

/// Bytes of a table (V, D) in a file that operations have in memory at a time, where it comes by rows.
pub fn window_bytes((vocabulary, width): (usize, usize), dtype: DType) -> u64 {
    let rows = WINDOW.max(processor().threads * OF_THREAD).min(vocabulary);
    elements([rows, width, dtype.size_in_bytes()])
}

/// A weight whose rows may have to be brought to memory.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    weight: Factor<'a>,
    /// Whether they are in a file, and have to be.
    come: bool,
}

/// Room for rows that come.
pub(crate) enum Room {
    /// They are there.
    None,
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl<'a> Rows<'a> {
    /// Those of a weight, which `come` if they are in a file.
    pub(crate) fn new(weight: Factor<'a>, come: bool) -> Self {
        let is_in_file = || weight.bytes().is_some_and(|bytes| Stretch::of(bytes).is_some());
        Self { weight, come: come && is_in_file() }
    }

    /// Whether they are not there.
    pub(crate) fn come(&self) -> bool {
        self.come
    }

    /// Room for so many rows, if they have to come.
    pub(crate) fn room(&self, rows: usize) -> Room {
        let count = rows.min(self.weight.rows()) * self.weight.width();
        match self.weight.data() {
            _ if !self.come => Room::None,
            Stored::Wide(Operand::F32(_)) => Room::F32(vec![0.0; count]),
            Stored::Wide(Operand::Bf16(_)) => Room::Bf16(vec![bf16::ZERO; count]),
            Stored::Narrow(narrow) => narrow.f16().map_or(Room::None, |_| Room::F16(vec![f16::ZERO; count])),
        }
    }

    /// Some rows where they are, or as the room has them, which this thread fills.
    pub(crate) fn here<'r>(&self, rows: Range<usize>, room: &'r mut Room) -> Factor<'r>
    where
        'a: 'r,
    {
        self.filled(rows, room, &|from, to| from.read_beside(to).is_ok())
    }

    /// The same, all threads filling the room.
    pub(crate) fn all_here<'r>(&self, rows: Range<usize>, room: &'r mut Room) -> Factor<'r>
    where
        'a: 'r,
    {
        match room {
            Room::None => self.weight.some_rows(rows),
            room => counting_wait(|| self.filled(rows, room, &in_parts)),
        }
    }

    fn filled<'r>(&self, rows: Range<usize>, room: &'r mut Room, read: Read) -> Factor<'r>
    where
        'a: 'r,
    {
        let (part, count, columns) = (self.weight.some_rows(rows.clone()), rows.len(), self.weight.width());
        let stored = match (room, part.data()) {
            (Room::F32(room), Stored::Wide(Operand::F32(data))) => {
                copy(data, &mut room[..count * columns], read).map(|data| Stored::Wide(Operand::F32(data)))
            }
            (Room::Bf16(room), Stored::Wide(Operand::Bf16(data))) => {
                copy(data, &mut room[..count * columns], read).map(|data| Stored::Wide(Operand::Bf16(data)))
            }
            (Room::F16(room), Stored::Narrow(narrow)) => {
                let copied = narrow.f16().and_then(|data| copy(data, &mut room[..count * columns], read));
                copied.map(|data| Stored::Narrow(Narrow::new(Form::F16(data), data.len())))
            }
            _ => None,
        };
        // Of a file that has lost its pages, who touches them says which file it is.
        stored.map_or(part, |stored| Factor::new(stored, count, columns))
    }

    /// Has the system read rows that will be worked on soon.
    pub(crate) fn read_ahead(&self, rows: Range<usize>) {
        if self.come
            && let Some(stretch) = self.weight.some_rows(rows).bytes().and_then(Stretch::of)
        {
            stretch.read_ahead();
        }
    }

    /// All rows together.
    #[expect(clippy::single_range_in_vec_init, reason = "one window")]
    pub(crate) fn whole(&self) -> Vec<Range<usize>> {
        vec![0..self.weight.rows()]
    }

    /// The rows that a product has in memory at a time: all of them, unless they have to come. The last are not so few that another
    /// kernel would multiply them.
    pub(crate) fn windows(&self) -> Vec<Range<usize>> {
        let rows = self.weight.rows();
        if !self.come {
            return self.whole();
        }
        let mut windows: Vec<_> = (0..rows).step_by(WINDOW).map(|first| first..rows.min(first + WINDOW)).collect();
        if let [.., before, last] = &mut *windows
            && last.len() < LEAST
        {
            before.end -= LEAST;
            last.start = before.end;
        }
        windows
    }
}

type Read<'a> = &'a dyn Fn(&Stretch, &mut [u8]) -> bool;

/// The first elements of `from`, read from the file into `to`. `None` where that fails.
fn copy<'r, T: WithDType>(from: &[T], to: &'r mut [T], read: Read) -> Option<&'r [T]> {
    let stretch = Stretch::of(bytes(&from[..to.len()]))?;
    read(&stretch, bytes_mut(to)).then_some(to)
}

/// Reads a stretch on all threads.
fn in_parts(from: &Stretch, to: &mut [u8]) -> bool {
    let (count, failed) = (to.len(), std::sync::atomic::AtomicBool::new(false));
    let (each, to) = (rows_per_part(count, 1).max(64 << 10), Shared::new(to));
    for_each_part(count.div_ceil(each), |part| {
        let (start, bytes) = (part * each, each.min(count - part * each));
        // SAFETY: each part has its own bytes.
        let to = unsafe { to.slice(start, bytes) };
        let is_read = from.part(start, bytes).is_some_and(|from| from.read_beside(to).is_ok());
        failed.fetch_or(!is_read, std::sync::atomic::Ordering::Relaxed);
    });
    !failed.into_inner()
}
