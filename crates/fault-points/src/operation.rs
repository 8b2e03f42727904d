//! A file operation that counts: its call, its file, and how to perform it in part.

use crate::Program;
use crate::calls::{self, Call, Shape};
use crate::enter::{Arguments, enter};

/// The most bytes of a path that are compared.
const PATH_BYTES: usize = 1024;

/// Mappings of counted files, to recognise `msync` by its address. The oldest mapping is replaced first.
static MAPPINGS: [[std::sync::atomic::AtomicU64; 2]; 256] =
    [const { [const { std::sync::atomic::AtomicU64::new(0) }; 2] }; 256];
static MAPPED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// A file operation that counts.
pub struct Operation<'a> {
    pub program: &'a Program,
    call: &'static Call,
    arguments: Arguments,
    path: Text,
    /// The second path of a rename.
    second: Text,
}

/// A path, as bytes.
struct Text {
    bytes: [u8; PATH_BYTES],
    length: usize,
}

impl Text {
    fn new() -> Self {
        Self { bytes: [0; PATH_BYTES], length: 0 }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn push(&mut self, more: &[u8]) {
        let length = more.len().min(PATH_BYTES - self.length);
        self.bytes[self.length..self.length + length].copy_from_slice(&more[..length]);
        self.length += length;
    }

    fn push_number(&mut self, number: i64) {
        let mut digits = [0; 20];
        let (mut at, mut left) = (digits.len(), number.unsigned_abs());
        loop {
            at -= 1;
            digits[at] = b'0' + (left % 10) as u8;
            left /= 10;
            if left == 0 {
                break;
            }
        }
        if number < 0 {
            self.push(b"-");
        }
        self.push(&digits[at..]);
    }

    /// The path of an open file, from the kernel.
    fn of_file(file: u64) -> Self {
        let mut link = Text::new();
        link.push(b"/proc/self/fd/");
        link.push_number(i64::from(file as i32));
        link.push(&[0]);
        let mut path = Text::new();
        let arguments = [
            libc::AT_FDCWD as u64,
            link.bytes.as_ptr() as u64,
            path.bytes.as_mut_ptr() as u64,
            PATH_BYTES as u64,
            0,
            0,
        ];
        path.length = usize::try_from(enter(libc::SYS_readlinkat, &arguments)).unwrap_or(0);
        path
    }

    /// A path relative to an open directory, or to the working directory.
    fn at(program: &Program, directory: u64, pointer: u64) -> Self {
        let mut name = Text::new();
        if pointer != 0 {
            // SAFETY: the program passed this address to the kernel as a zero-terminated text.
            let bytes = unsafe { std::ffi::CStr::from_ptr(pointer as *const libc::c_char) };
            name.push(bytes.to_bytes());
        }
        if name.bytes().first() == Some(&b'/') {
            return name;
        }
        let is_working_directory = directory as i32 == libc::AT_FDCWD;
        let mut path = if is_working_directory { Text::new() } else { Text::of_file(directory) };
        if is_working_directory {
            path.push(&program.working_directory);
        }
        if name.length > 0 {
            path.push(b"/");
            path.push(name.bytes());
        }
        path
    }
}

impl<'a> Operation<'a> {
    /// Returns the operation if it counts.
    pub fn parse(program: &'a Program, number: i64, arguments: &Arguments) -> Option<Self> {
        let call = calls::all().find(|call| call.number == number)?;
        let names = &program.settings.calls;
        if !names.is_empty() && names.iter().all(|name| name != call.name) {
            return None;
        }
        let here = libc::AT_FDCWD as u64;
        let [first, second] = match call.shape {
            Shape::Path => [Text::at(program, here, arguments[0]), Text::new()],
            Shape::At => [Text::at(program, arguments[0], arguments[1]), Text::new()],
            Shape::TextAt => [Text::at(program, arguments[1], arguments[2]), Text::new()],
            Shape::TwoPaths => [Text::at(program, here, arguments[0]), Text::at(program, here, arguments[1])],
            Shape::TwoAt => {
                [Text::at(program, arguments[0], arguments[1]), Text::at(program, arguments[2], arguments[3])]
            }
            Shape::File | Shape::Read | Shape::Write | Shape::ReadVector | Shape::WriteVector => {
                [Text::of_file(arguments[0]), Text::new()]
            }
            Shape::TwoFiles(other) => [Text::of_file(arguments[0]), Text::of_file(arguments[other])],
            Shape::Map => [Text::of_file(arguments[4]), Text::new()],
            Shape::Address if is_mapped(arguments[0]) => {
                let mut path = Text::new();
                path.push(b"(mapped)");
                return Some(Self { program, call, arguments: *arguments, path, second: Text::new() });
            }
            Shape::Address => return None,
        };
        let counts = |path: &Text| path.length > 0 && program.settings.covers(path.bytes());
        (counts(&first) || counts(&second)).then_some(Self {
            program,
            call,
            arguments: *arguments,
            path: first,
            second,
        })
    }

    /// The arguments of the program's call.
    pub fn arguments(&self) -> &Arguments {
        &self.arguments
    }

    /// Arguments for a part of a read or write: one of `parts`, at least a byte. Other calls are not divided.
    pub fn part(&self, parts: u64) -> Arguments {
        let mut arguments = self.arguments;
        // For a list of buffers, the first buffers remain whole.
        if matches!(self.call.shape, Shape::Read | Shape::Write | Shape::ReadVector | Shape::WriteVector) {
            arguments[2] = arguments[2].div_ceil(parts);
        }
        arguments
    }

    /// The return value of a successful call.
    pub fn success(&self) -> i64 {
        if self.call.shape == Shape::Write { self.arguments[2] as i64 } else { 0 }
    }

    /// Distinguishes calls of the same name: bytes of a read, write or mapping; flags of an open or removal.
    fn detail(&self) -> u64 {
        match self.call.shape {
            Shape::Path | Shape::File | Shape::Map => self.arguments[1],
            Shape::TwoPaths => 0,
            Shape::TwoAt => self.arguments[4],
            _ => self.arguments[2],
        }
    }

    /// Keeps a copy of a file that was synced. Directories have no copy.
    pub fn record(&self, count: u64) {
        let is_sync = self.call.number == libc::SYS_fsync || self.call.number == libc::SYS_fdatasync;
        let Some(directory) = self.program.settings.record.as_ref().filter(|_| is_sync) else { return };
        let open = |path: &Text, flags: i32| {
            let here = libc::AT_FDCWD as u64;
            enter(libc::SYS_openat, &[here, path.bytes.as_ptr() as u64, flags as u64, 0o600, 0, 0])
        };
        let mut from = Text::new();
        from.push(b"/proc/self/fd/");
        from.push_number(i64::from(self.arguments[0] as i32));
        from.push(&[0]);
        let mut to = Text::new();
        to.push(directory.as_bytes());
        to.push(b"/");
        to.push_number(count as i64);
        to.push(&[0]);
        let from = open(&from, libc::O_RDONLY | libc::O_CLOEXEC);
        let place = to;
        let to = open(&place, libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_CLOEXEC);
        let mut copied = 1;
        while copied > 0 {
            copied = enter(libc::SYS_sendfile, &[to as u64, from as u64, 0, 1 << 30, 0, 0]);
        }
        for file in [from, to] {
            enter(libc::SYS_close, &[file as u64, 0, 0, 0, 0, 0]);
        }
        if copied < 0 {
            enter(libc::SYS_unlinkat, &[libc::AT_FDCWD as u64, place.bytes.as_ptr() as u64, 0, 0, 0, 0]);
        }
    }

    /// Records mappings, and writes a line: number, call, paths, bytes or flags, result, note.
    pub fn trace(&self, count: u64, result: i64, note: &str) {
        use std::sync::atomic::Ordering::Relaxed;
        if self.call.shape == Shape::Map && result > 0 {
            let place = MAPPED.fetch_add(1, Relaxed) as usize % MAPPINGS.len();
            MAPPINGS[place][0].store(result as u64, Relaxed);
            MAPPINGS[place][1].store(self.arguments[1], Relaxed);
        }
        if self.program.trace < 0 {
            return;
        }
        let mut line = Text::new();
        line.push_number(count as i64);
        for word in [self.call.name.as_bytes(), self.path.bytes(), self.second.bytes()] {
            line.push(b"\t");
            line.push(&word[..word.len().min(400)]);
        }
        for number in [self.detail() as i64, result] {
            line.push(b"\t");
            line.push_number(number);
        }
        line.push(b"\t");
        line.push(note.as_bytes());
        line.push(b"\n");
        let arguments = [self.program.trace as u64, line.bytes.as_ptr() as u64, line.length as u64, 0, 0, 0];
        enter(libc::SYS_write, &arguments);
    }
}

fn is_mapped(address: u64) -> bool {
    use std::sync::atomic::Ordering::Relaxed;
    MAPPINGS.iter().any(|[start, length]| {
        let start = start.load(Relaxed);
        start > 0 && (start..start + length.load(Relaxed)).contains(&address)
    })
}
