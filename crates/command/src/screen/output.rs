//! The output of a run while it trains. A slow or absent reader never makes the run wait.
//!
//! A thread of its own writes. Text waits for it in a short queue. The streams stay in blocking mode: `O_NONBLOCK` belongs to the open file,
//! which the shell and other processes share. So the thread asks whether there is room, and then writes a little.
//!
//! Invariants:
//! * Text of others cannot control the terminal: only [`Shown`] is written, and it has no other control sequences than our own.
//! * [`show`] never waits for a reader.
//! * The queue holds at most [`MAX_BYTES`] of progress. Progress that does not fit is dropped. A message (a warning, an error, the last
//!   line) replaces the oldest progress instead.
//! * Dropped lines are counted, and the count is shown once there is room again.
//! * Pieces of one stream keep their order. While both streams accept bytes, the order between them is kept, too.
//! * [`drain`] waits for a bounded time.
//!
//! Before [`start`], and if the system provides no thread, [`show`] writes at once, like any other tool.

use std::collections::VecDeque;
use std::io::{Stderr, Stdout, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use run_report::visible;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::screen::terminal_text;

/// Bytes that may wait for the thread.
const MAX_BYTES: usize = 64 << 10;

/// Bytes written at a time: a pipe that reports room accepts this many.
const CHUNK_BYTES: usize = 4096;

/// The time that the thread waits for a blocked stream before it checks the other stream for new text.
const RECHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The time that the end of the program waits for readers.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// The stream of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// The treatment of a piece when the queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A state of the progress bar: dropped without being counted.
    Frame,
    /// A line of progress: dropped and counted.
    Progress,
    /// A warning, an error, the last line: replaces progress.
    Message,
}

/// Text that is safe for a terminal and a log.
#[derive(Clone, Debug, Default)]
pub struct Shown(String);

impl Shown {
    /// Text from anywhere. Characters that control a terminal or hide text become visible ([`run_report::visible`]).
    pub fn text(text: &str) -> Self {
        Self(terminal_text::suited(visible::lines(text)).into_owned())
    }

    /// A paragraph that begins with a word of ours. Its further lines are indented, so none of them looks like another message.
    pub fn paragraph(word: &str, text: &str) -> Self {
        let text = terminal_text::suited(visible::lines(text.trim_end_matches('\n')));
        Self(format!("{word}{}\n", text.replace('\n', "\n  ")))
    }

    /// A drawing of ours, with the control sequences that place and colour its texts.
    pub fn drawing(text: String) -> Self {
        Self(terminal_text::drawing(text.into()).into_owned())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromIterator<Shown> for Shown {
    fn from_iter<I: IntoIterator<Item = Shown>>(pieces: I) -> Self {
        Self(pieces.into_iter().map(|piece| piece.0).collect())
    }
}

static OUTPUT: Output = Output { queue: Mutex::new(Queue::new()), changed: Condvar::new() };
static HAS_THREAD: AtomicBool = AtomicBool::new(false);
/// The rank of a silent process, which prints only its error; 0 for a process that prints.
static SILENT: AtomicUsize = AtomicUsize::new(0);

/// Silences this process, number `rank` of several: from here on it prints only its error.
#[cfg(feature = "mpi")]
pub fn be_silent(rank: usize) {
    SILENT.store(rank, Ordering::Release);
}

/// The rank of this process, if it is silent.
pub fn silent_rank() -> Option<usize> {
    Some(SILENT.load(Ordering::Acquire)).filter(|rank| *rank > 0)
}

/// Starts the thread. If the system provides none, [`show`] writes at once.
pub fn start() {
    let thread = std::thread::Builder::new().name("output".into()).stack_size(256 << 10);
    let started = thread.spawn(|| OUTPUT.write_all(&std::io::stdout(), &std::io::stderr()));
    HAS_THREAD.store(started.is_ok(), Ordering::Release);
}

/// Shows a piece of text, unless this process is silent.
pub fn show(stream: Stream, kind: Kind, text: &Shown) {
    if silent_rank().is_none() {
        show_anyway(stream, kind, text);
    }
}

/// Shows a piece of text.
pub fn show_anyway(stream: Stream, kind: Kind, text: &Shown) {
    let text = text.as_str();
    if HAS_THREAD.load(Ordering::Acquire) {
        OUTPUT.lock().push(stream, kind, text);
        OUTPUT.changed.notify_all();
        return;
    }
    // An error is ignored: the text may have no reader.
    let _ = match stream {
        Stream::Out => std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush()),
        Stream::Err => std::io::stderr().write_all(text.as_bytes()),
    };
}

/// Waits until everything was written, but at most [`PATIENCE`]. Then tries remaining messages on standard error once more.
pub fn drain() {
    let (mut queue, _) = OUTPUT
        .changed
        .wait_timeout_while(OUTPUT.lock(), PATIENCE, |queue| !queue.is_done())
        .unwrap_or_else(PoisonError::into_inner);
    for text in queue.take_messages(Stream::Err) {
        write_stderr_now(&text.as_bytes()[..text.len().min(CHUNK_BYTES)]);
    }
}

/// Writes to standard error without the queue, if that accepts bytes at once. For ends of the process that must not allocate.
pub fn write_stderr_now(text: &[u8]) {
    let stderr = std::io::stderr();
    let mut polled = [PollFd::new(&stderr, PollFlags::OUT)];
    if poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0) {
        let _ = rustix::io::write(&stderr, text);
    }
}

/// The queue, and the condition that wakes the thread.
#[derive(Debug)]
struct Output {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's loop: writes pieces for ever.
    fn write_all(&self, out: &Stdout, err: &Stderr) {
        let fds = [out.as_fd(), err.as_fd()];
        loop {
            let mut queue = self.lock();
            while queue.is_done() {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            queue.take_up();
            let waiting: Vec<Stream> = queue.waiting();
            drop(queue);
            let of = waiting.iter().map(|stream| fds[*stream as usize]).collect::<Vec<_>>();
            let ready = takes_bytes(&of, &RECHECK);
            let Some(stream) = waiting.into_iter().zip(ready).find_map(|(stream, ready)| ready.then_some(stream))
            else {
                continue;
            };
            // The write is outside the lock, because a terminal that reports room may still block.
            let chunk = self.lock().chunk(stream);
            let written = rustix::io::write(fds[stream as usize], &chunk);
            self.lock().note_written(stream, written);
            self.changed.notify_all();
        }
    }
}

/// Whether each of these files accepts bytes without waiting. A file whose reader has gone does: it returns an error at once.
fn takes_bytes(fds: &[BorrowedFd<'_>], patience: &Timespec) -> Vec<bool> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::OUT)).collect();
    match poll(&mut polled, Some(patience)) {
        Ok(_) => polled.iter().map(|fd| !fd.revents().is_empty()).collect(),
        Err(_) => vec![false; fds.len()],
    }
}

/// A piece of text and its progress.
#[derive(Debug)]
struct Piece {
    stream: Stream,
    kind: Kind,
    text: String,
    /// Its number among the pieces of both streams.
    number: u64,
    written: usize,
}

/// Output that waits to be written.
#[derive(Debug)]
struct Queue {
    pieces: VecDeque<Piece>,
    /// The piece that the thread is writing, by stream. It cannot be dropped any more.
    taken_up: [Option<Piece>; 2],
    bytes: usize,
    next_number: u64,
    /// Lines dropped since the count was last shown, by stream.
    dropped: [u64; 2],
    /// Whether a stream's reader has gone.
    is_gone: [bool; 2],
}

impl Queue {
    const fn new() -> Self {
        let (taken_up, dropped, is_gone) = ([None, None], [0, 0], [false, false]);
        Self { pieces: VecDeque::new(), taken_up, bytes: 0, next_number: 0, dropped, is_gone }
    }

    fn push(&mut self, stream: Stream, kind: Kind, text: &str) {
        if self.is_gone[stream as usize] || text.is_empty() {
            return;
        }
        let dropped = self.dropped[stream as usize];
        let text = match dropped {
            0 => text.to_owned(),
            _ if kind == Kind::Frame => return,
            1 => format!("1 line was dropped\n{text}"),
            lines => format!("{lines} lines were dropped\n{text}"),
        };
        // Messages are few. If nothing can be dropped for them, they may use twice the room.
        let most = if kind == Kind::Message { 2 * MAX_BYTES } else { MAX_BYTES };
        if kind == Kind::Message {
            self.make_room(text.len());
        }
        // A piece that is larger than the queue must be alone.
        if self.bytes > 0 && self.bytes + text.len() > most {
            self.dropped[stream as usize] += lines(kind, &text).saturating_sub(u64::from(dropped > 0));
            return;
        }
        self.dropped[stream as usize] = 0;
        self.bytes += text.len();
        self.pieces.push_back(Piece { stream, kind, text, number: self.next_number, written: 0 });
        self.next_number += 1;
    }

    /// Drops the oldest progress until `bytes` bytes fit, or no progress is left.
    fn make_room(&mut self, bytes: usize) {
        while self.bytes + bytes > MAX_BYTES
            && let Some(oldest) = self.pieces.iter().position(|piece| piece.kind != Kind::Message)
            && let Some(piece) = self.pieces.remove(oldest)
        {
            self.bytes -= piece.text.len();
            self.dropped[piece.stream as usize] += lines(piece.kind, &piece.text);
        }
    }

    /// Takes the next piece of each stream for which the thread is writing none.
    fn take_up(&mut self) {
        for stream in [Stream::Out, Stream::Err] {
            if self.taken_up[stream as usize].is_none()
                && let Some(next) = self.pieces.iter().position(|piece| piece.stream == stream)
            {
                self.taken_up[stream as usize] = self.pieces.remove(next);
            }
        }
    }

    /// Streams with a piece in progress. The older piece's stream comes first.
    fn waiting(&self) -> Vec<Stream> {
        let mut pieces: Vec<&Piece> = self.taken_up.iter().flatten().collect();
        pieces.sort_by_key(|piece| piece.number);
        pieces.into_iter().map(|piece| piece.stream).collect()
    }

    /// The next bytes of the stream's piece in progress.
    fn chunk(&self, stream: Stream) -> Vec<u8> {
        let piece = self.taken_up[stream as usize].as_ref();
        let left = piece.map_or(&[][..], |piece| &piece.text.as_bytes()[piece.written..]);
        left[..left.len().min(CHUNK_BYTES)].to_vec()
    }

    /// Notes the result of writing them.
    fn note_written(&mut self, stream: Stream, written: Result<usize, Errno>) {
        let Some(piece) = &mut self.taken_up[stream as usize] else { return };
        match written {
            Ok(bytes) => piece.written += bytes,
            Err(Errno::INTR | Errno::AGAIN) => return,
            Err(error) => {
                if error == Errno::PIPE {
                    self.is_gone[stream as usize] = true;
                    let of_stream = |piece: &&Piece| piece.stream == stream;
                    self.bytes -= self.pieces.iter().filter(of_stream).map(|piece| piece.text.len()).sum::<usize>();
                    self.pieces.retain(|piece| piece.stream != stream);
                } else {
                    // A full disk, for example: later lines may be written.
                    self.dropped[stream as usize] += lines(piece.kind, &piece.text);
                }
                piece.written = piece.text.len();
            }
        }
        if piece.written == piece.text.len() {
            self.bytes -= piece.text.len();
            self.taken_up[stream as usize] = None;
        }
    }

    /// Removes a stream's remaining messages from the queue and returns them.
    fn take_messages(&mut self, stream: Stream) -> Vec<String> {
        let (taken, kept): (Vec<Piece>, Vec<Piece>) =
            self.pieces.drain(..).partition(|piece| piece.stream == stream && piece.kind == Kind::Message);
        self.pieces = kept.into();
        taken.into_iter().map(|piece| piece.text).collect()
    }

    fn is_done(&self) -> bool {
        self.pieces.is_empty() && self.taken_up.iter().all(Option::is_none)
    }
}

/// The lines of a piece that count as dropped.
fn lines(kind: Kind, text: &str) -> u64 {
    if kind == Kind::Frame { 0 } else { text.lines().count() as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes all waiting pieces to streams that accept every byte, in the order of the thread.
    fn written(queue: &mut Queue) -> String {
        let mut all = String::new();
        while !queue.is_done() {
            queue.take_up();
            let stream = queue.waiting()[0];
            let chunk = queue.chunk(stream);
            all.push_str(std::str::from_utf8(&chunk).unwrap());
            queue.note_written(stream, Ok(chunk.len()));
        }
        all
    }

    #[test]
    fn both_streams_keep_their_order_and_long_pieces_go_in_chunks() {
        let mut queue = Queue::new();
        let long = "x".repeat(3 * CHUNK_BYTES + 5) + "\n";
        queue.push(Stream::Out, Kind::Progress, "a\n");
        queue.push(Stream::Err, Kind::Message, "b\n");
        queue.push(Stream::Out, Kind::Progress, &long);
        queue.push(Stream::Err, Kind::Frame, "c");
        assert_eq!(written(&mut queue), format!("a\nb\n{long}c"));
    }

    #[test]
    fn progress_that_finds_no_room_is_dropped_counted_and_the_count_is_shown() {
        let mut queue = Queue::new();
        let line = "y".repeat(1023) + "\n";
        for _ in 0..MAX_BYTES / line.len() + 7 {
            queue.push(Stream::Out, Kind::Progress, &line);
        }
        queue.push(Stream::Err, Kind::Frame, "[##]");
        assert!(queue.bytes <= MAX_BYTES);
        assert_eq!(written(&mut queue).lines().count(), MAX_BYTES / line.len());
        queue.push(Stream::Err, Kind::Frame, "[##]");
        queue.push(Stream::Out, Kind::Progress, "there again\n");
        assert_eq!(written(&mut queue), "[##]7 lines were dropped\nthere again\n");
        queue.push(Stream::Out, Kind::Progress, "and again\n");
        assert_eq!(written(&mut queue), "and again\n");
    }

    #[test]
    fn a_message_takes_the_place_of_the_oldest_progress() {
        let mut queue = Queue::new();
        let line = |i: usize| format!("{i:1023}\n");
        for i in 0..MAX_BYTES / 1024 {
            queue.push(Stream::Out, Kind::Progress, &line(i));
        }
        queue.push(Stream::Err, Kind::Message, "error: no\n");
        assert!(queue.bytes <= MAX_BYTES);
        let all = written(&mut queue);
        assert!(!all.contains(&line(0)) && all.contains(&line(1)) && all.ends_with("error: no\n"));
        queue.push(Stream::Out, Kind::Message, "the end\n");
        assert_eq!(written(&mut queue), "1 line was dropped\nthe end\n");
    }

    #[test]
    fn a_stream_that_takes_nothing_does_not_hold_up_the_other() {
        let mut queue = Queue::new();
        queue.push(Stream::Out, Kind::Progress, "stuck\n");
        queue.push(Stream::Err, Kind::Message, "seen\n");
        queue.take_up();
        assert_eq!(queue.waiting(), [Stream::Out, Stream::Err]);
        queue.note_written(Stream::Err, Ok(5));
        assert!(queue.taken_up[Stream::Err as usize].is_none() && !queue.is_done());
    }

    #[test]
    fn a_reader_that_went_away_is_written_to_no_more_and_a_full_disk_is() {
        let mut queue = Queue::new();
        for _ in 0..2 {
            queue.push(Stream::Out, Kind::Progress, "a\n");
        }
        queue.push(Stream::Err, Kind::Message, "b\n");
        queue.take_up();
        queue.note_written(Stream::Out, Err(Errno::PIPE));
        queue.push(Stream::Out, Kind::Message, "c\n");
        assert_eq!(queue.waiting(), [Stream::Err]);
        queue.note_written(Stream::Err, Err(Errno::NOSPC));
        assert!(queue.is_done() && queue.bytes == 0);
        queue.push(Stream::Err, Kind::Message, "d\n");
        assert_eq!(written(&mut queue), "1 line was dropped\nd\n");
    }

    #[test]
    fn a_piece_in_the_making_is_not_dropped_for_a_message() {
        let mut queue = Queue::new();
        queue.push(Stream::Out, Kind::Progress, &("z".repeat(MAX_BYTES) + "\n"));
        queue.take_up();
        queue.note_written(Stream::Out, Ok(10));
        queue.push(Stream::Out, Kind::Progress, "no room\n");
        queue.push(Stream::Err, Kind::Message, "error: no\n");
        assert_eq!(queue.dropped, [1, 0]);
        assert_eq!(queue.take_messages(Stream::Err), ["error: no\n"]);
        assert!(written(&mut queue).ends_with("zzz\n"));
    }
}
