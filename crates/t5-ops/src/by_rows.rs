//! Rows of a table in a file, copied to memory while an operation uses them, so that the whole table is never in memory.
//!
//! A *window* is the range of rows that are in memory at a time; [`window_bytes`] states its bytes. A *buffer* is the memory that the
//! rows are copied to.
//!
//! Rows are copied and not mapped, because the system maps more than was asked for: everything that its page cache holds in one piece. Sums
//! are computed in the same order as on a table in memory, so no bit depends on the size of a window.

use std::ops::Range;

use candle_core::{DType, WithDType};
use half::{bf16, f16};
use heap::{Extent, counting_wait};
use tensor_storage::{bytes, bytes_mut};

use crate::matmul::{Factor, Stored};
use crate::narrow::{Form, Narrow};
use crate::needs::elements;
use crate::parallel::{Shared, for_each_part, rows_per_part};
use crate::processor::processor;
use crate::storage::Operand;

/// The most rows of a window that all threads share: the rows of the loss's largest tile.
pub(crate) const WINDOW: usize = 1920;

/// The most rows of a window where each thread has its own: the rows of a block of the loss.
pub(crate) const OF_THREAD: usize = 96;

/// The fewest rows of the last of several windows. Rows are columns of a product, and fewer columns might choose another kernel.
const LEAST: usize = 192;

/// The most bytes of a table (V, D) in a file that an operation has in memory at a time.
pub fn window_bytes((vocabulary, width): (usize, usize), dtype: DType) -> u64 {
    let rows = WINDOW.max(processor().threads * OF_THREAD).min(vocabulary);
    elements([rows, width, dtype.size_in_bytes()])
}

/// A weight whose rows may have to be copied to memory.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    weight: Factor<'a>,
    /// Whether the rows lie in a file and are copied.
    is_copied: bool,
}

/// Memory for a window of rows.
pub(crate) enum RowBuffer {
    /// No memory is needed: rows are used in place.
    None,
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl<'a> Rows<'a> {
    /// The rows of a weight, which are copied if `is_copied` is true and they lie in a file.
    pub(crate) fn new(weight: Factor<'a>, is_copied: bool) -> Self {
        let is_in_file = || weight.bytes().is_some_and(|bytes| Extent::find(bytes).is_some());
        Self { weight, is_copied: is_copied && is_in_file() }
    }

    /// Whether rows are copied before they are used.
    pub(crate) fn is_copied(&self) -> bool {
        self.is_copied
    }

    /// Memory for at most `rows` rows, if they have to be copied.
    pub(crate) fn buffer(&self, rows: usize) -> RowBuffer {
        let count = rows.min(self.weight.rows()) * self.weight.width();
        match self.weight.data() {
            _ if !self.is_copied => RowBuffer::None,
            Stored::Wide(Operand::F32(_)) => RowBuffer::F32(vec![0.0; count]),
            Stored::Wide(Operand::Bf16(_)) => RowBuffer::Bf16(vec![bf16::ZERO; count]),
            Stored::Narrow(narrow) => narrow.f16().map_or(RowBuffer::None, |_| RowBuffer::F16(vec![f16::ZERO; count])),
        }
    }

    /// Returns some rows: in place, or as a copy in the buffer, which this thread fills.
    pub(crate) fn here<'r>(&self, rows: Range<usize>, buffer: &'r mut RowBuffer) -> Factor<'r>
    where
        'a: 'r,
    {
        self.filled(rows, buffer, &by_this_thread)
    }

    /// [`Rows::here`], with all threads filling the buffer.
    pub(crate) fn load_in_parallel<'r>(&self, rows: Range<usize>, buffer: &'r mut RowBuffer) -> Factor<'r>
    where
        'a: 'r,
    {
        match buffer {
            RowBuffer::None => self.weight.some_rows(rows),
            buffer => counting_wait(|| self.filled(rows, buffer, &in_parts)),
        }
    }

    fn filled<'r>(&self, rows: Range<usize>, buffer: &'r mut RowBuffer, read: Read) -> Factor<'r>
    where
        'a: 'r,
    {
        let (part, count, columns) = (self.weight.some_rows(rows.clone()), rows.len(), self.weight.width());
        let stored = match (buffer, part.data()) {
            (RowBuffer::F32(buffer), Stored::Wide(Operand::F32(data))) => {
                copy(data, &mut buffer[..count * columns], read).map(|data| Stored::Wide(Operand::F32(data)))
            }
            (RowBuffer::Bf16(buffer), Stored::Wide(Operand::Bf16(data))) => {
                copy(data, &mut buffer[..count * columns], read).map(|data| Stored::Wide(Operand::Bf16(data)))
            }
            (RowBuffer::F16(buffer), Stored::Narrow(narrow)) => {
                let copied = narrow.f16().and_then(|data| copy(data, &mut buffer[..count * columns], read));
                copied.map(|data| Stored::Narrow(Narrow::new(Form::F16(data), data.len())))
            }
            _ => None,
        };
        // If reading fails, the file was shortened. Touching its pages then ends the process with a message that names the file.
        stored.map_or(part, |stored| Factor::new(stored, count, columns))
    }

    /// Asks the system to read rows that are used soon, without waiting.
    pub(crate) fn read_ahead(&self, rows: Range<usize>) {
        if self.is_copied
            && let Some(extent) = self.weight.some_rows(rows).bytes().and_then(Extent::find)
        {
            extent.read_ahead();
        }
    }

    /// All rows as one window.
    #[expect(clippy::single_range_in_vec_init, reason = "one window")]
    pub(crate) fn whole(&self) -> Vec<Range<usize>> {
        vec![0..self.weight.rows()]
    }

    /// The windows of a product: one window of all rows, unless they have to be copied. The last of several has at least [`LEAST`] rows, so
    /// that the same kernel multiplies all windows.
    pub(crate) fn windows(&self) -> Vec<Range<usize>> {
        let rows = self.weight.rows();
        if !self.is_copied {
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

type Read<'a> = &'a dyn Fn(&Extent, &mut [u8]) -> bool;

/// Reads the first elements of `from` from the file until `to` is full. `None` if reading fails.
fn copy<'r, T: WithDType>(from: &[T], to: &'r mut [T], read: Read) -> Option<&'r [T]> {
    let extent = Extent::find(bytes(&from[..to.len()]))?;
    read(&extent, bytes_mut(to)).then_some(to)
}

/// Copies elements in a file to `to`, on this thread. `None` if reading fails. The caller then touches the file's pages, and the process
/// ends with a message that names the shortened file.
pub(crate) fn copied<'r, T: WithDType>(from: &[T], to: &'r mut [T]) -> Option<&'r [T]> {
    copy(from, to, &by_this_thread)
}

fn by_this_thread(from: &Extent, to: &mut [u8]) -> bool {
    from.read_untimed(to).is_ok()
}

/// Reads an extent on all threads.
fn in_parts(from: &Extent, to: &mut [u8]) -> bool {
    let (count, failed) = (to.len(), std::sync::atomic::AtomicBool::new(false));
    let (each, to) = (rows_per_part(count, 1).max(64 << 10), Shared::new(to));
    for_each_part(count.div_ceil(each), |part| {
        let (start, bytes) = (part * each, each.min(count - part * each));
        // SAFETY: each part has its own bytes.
        let to = unsafe { to.slice(start, bytes) };
        let is_read = from.part(start, bytes).is_some_and(|from| from.read_untimed(to).is_ok());
        failed.fetch_or(!is_read, std::sync::atomic::Ordering::Relaxed);
    });
    !failed.into_inner()
}
