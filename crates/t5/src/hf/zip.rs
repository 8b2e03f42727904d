//! The uncompressed members of a zip archive: the place of each one's bytes in the file.
//!
//! PyTorch writes `pytorch_model.bin` in this format. Nothing is unpacked: compressed or encrypted members are not listed.
//!
//! Invariant: every length is checked against the file's before memory is allocated for it.
//!
//! Source of the layout: PKWARE's APPNOTE.TXT, sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

/// The first bytes of an archive.
pub(crate) const FIRST_BYTES: [u8; 4] = *b"PK\x03\x04";

const MEMBER: [u8; 4] = FIRST_BYTES;
const DIRECTORY_ENTRY: [u8; 4] = *b"PK\x01\x02";
const END: [u8; 4] = *b"PK\x05\x06";
const END_64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR_64: [u8; 4] = *b"PK\x06\x07";

const MEMBER_BYTES: u64 = 30;
const DIRECTORY_ENTRY_BYTES: usize = 46;
const END_BYTES: usize = 22;
const END_64_BYTES: usize = 56;
const LOCATOR_64_BYTES: usize = 20;

/// Bytes from the end of the file in which the archive's end begins, even with the longest comment.
const LARGEST_END_BYTES: u64 = END_BYTES as u64 + 0xffff;
/// A directory has about 100 bytes a tensor, and the deepest model that is accepted has 3,000 tensors.
const LARGEST_DIRECTORY_BYTES: u64 = 4 << 20;
/// Marks a number that is in the 64-bit field of the entry.
const IN_EXTRA: u64 = 0xffff_ffff;

/// The directory of an archive.
#[derive(Debug)]
pub(crate) struct Archive {
    members: HashMap<String, Member>,
    file_bytes: u64,
}

/// A member, as the directory lists it.
#[derive(Clone, Copy, Debug)]
struct Member {
    header: u64,
    bytes: u64,
}

/// Why an archive is not read: a system error, or its format.
pub(crate) enum Fault {
    Io(io::Error),
    Format(String),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Fault::Format("it ends within its directory".into()),
            _ => Fault::Io(error),
        }
    }
}

impl From<&str> for Fault {
    fn from(problem: &str) -> Self {
        Fault::Format(problem.into())
    }
}

impl Archive {
    /// Reads the directory.
    pub fn read(file: &mut File) -> Result<Archive, Fault> {
        let file_bytes = file.metadata()?.len();
        let (start, bytes) = directory_of(file, file_bytes)?;
        if bytes > LARGEST_DIRECTORY_BYTES || start.checked_add(bytes).is_none_or(|end| end > file_bytes) {
            return Err(Fault::Format(format!("its directory of {bytes} bytes from byte {start} on is not in it")));
        }
        let mut directory = vec![0; bytes as usize];
        read_at(file, start, &mut directory)?;
        let (mut members, mut left) = (HashMap::new(), directory.as_slice());
        while let Some(entry) = Entry::next(&mut left)? {
            if let Some(member) = entry.stored {
                members.insert(entry.name, member);
            }
        }
        Ok(Archive { members, file_bytes })
    }

    /// The names of all members that can be read in place.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.members.keys().map(String::as_str)
    }

    /// The offset of a member's bytes in the file, and their number.
    pub fn place_of(&self, file: &mut File, name: &str) -> Result<(u64, u64), Fault> {
        let missing = || Fault::Format(format!("it has no member `{name}` that is stored without compression"));
        let &Member { header, bytes } = self.members.get(name).ok_or_else(missing)?;
        let mut local = [0; MEMBER_BYTES as usize];
        read_at(file, header, &mut local)?;
        if local[..4] != MEMBER {
            return Err(Fault::Format(format!("its member `{name}` is not where its directory says")));
        }
        let start = header + MEMBER_BYTES + number(&local, 26, 2) + number(&local, 28, 2);
        if start.checked_add(bytes).is_none_or(|end| end > self.file_bytes) {
            return Err(Fault::Format(format!("its member `{name}` goes beyond its end")));
        }
        Ok((start, bytes))
    }
}

/// An entry of the directory.
struct Entry {
    name: String,
    /// The place of its bytes; `None` if they are compressed or encrypted.
    stored: Option<Member>,
}

impl Entry {
    /// Takes the next entry off the directory.
    fn next(left: &mut &[u8]) -> Result<Option<Entry>, Fault> {
        if left.is_empty() {
            return Ok(None);
        }
        let damaged = || Fault::from("its directory is damaged");
        let (head, rest) = left.split_at_checked(DIRECTORY_ENTRY_BYTES).ok_or_else(damaged)?;
        if head[..4] != DIRECTORY_ENTRY {
            return Err(damaged());
        }
        let [name, extra, comment] = [28, 30, 32].map(|at| number(head, at, 2) as usize);
        let (name, rest) = rest.split_at_checked(name).ok_or_else(damaged)?;
        let (extra, rest) = rest.split_at_checked(extra).ok_or_else(damaged)?;
        *left = rest.get(comment..).ok_or_else(damaged)?;
        // Bytes unpacked, bytes packed, and offset: each is in the 64-bit field, in this order, if it does not fit here.
        let mut wide = extra_64(extra);
        let mut size = |at| match number(head, at, 4) {
            IN_EXTRA => {
                let (first, rest) = wide.split_at_checked(8).ok_or_else(damaged)?;
                wide = rest;
                Ok::<_, Fault>(number(first, 0, 8))
            }
            small => Ok(small),
        };
        let (bytes, packed, header) = (size(24)?, size(20)?, size(42)?);
        let is_stored = number(head, 8, 2) & 1 == 0 && number(head, 10, 2) == 0 && bytes == packed;
        let name = String::from_utf8_lossy(name).into_owned();
        Ok(Some(Entry { name, stored: is_stored.then_some(Member { header, bytes }) }))
    }
}

/// The content of the field of 64-bit numbers among an entry's extra fields.
fn extra_64(mut extra: &[u8]) -> &[u8] {
    while let Some((head, rest)) = extra.split_at_checked(4) {
        let Some((content, rest)) = rest.split_at_checked(number(head, 2, 2) as usize) else { break };
        if number(head, 0, 2) == 1 {
            return content;
        }
        extra = rest;
    }
    &[]
}

/// The offset of the directory and its length, from the end of the file.
fn directory_of(file: &mut File, file_bytes: u64) -> Result<(u64, u64), Fault> {
    let tail_start = file_bytes.saturating_sub(LARGEST_END_BYTES + LOCATOR_64_BYTES as u64);
    let mut tail = vec![0; (file_bytes - tail_start) as usize];
    read_at(file, tail_start, &mut tail)?;
    let is_end = |at: &usize| {
        let end = &tail[*at..];
        end.len() >= END_BYTES && end[..4] == END && number(end, 20, 2) as usize == end.len() - END_BYTES
    };
    let at = (0..tail.len()).rev().find(is_end).ok_or("it is cut short, or no archive of PyTorch's")?;
    let end = &tail[at..];
    let locator = at.checked_sub(LOCATOR_64_BYTES).map(|start| &tail[start..at]);
    if let Some(locator) = locator.filter(|locator| locator[..4] == LOCATOR_64) {
        let mut end = [0; END_64_BYTES];
        read_at(file, number(locator, 8, 8), &mut end)?;
        if end[..4] != END_64 {
            return Err("the end of its directory is damaged".into());
        }
        return Ok((number(&end, 48, 8), number(&end, 40, 8)));
    }
    Ok((number(end, 16, 4), number(end, 12, 4)))
}

fn read_at(file: &mut File, start: u64, bytes: &mut [u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(start))?;
    file.read_exact(bytes)
}

/// The little-endian number of `bytes` bytes at `at`.
fn number(from: &[u8], at: usize, bytes: usize) -> u64 {
    from[at..at + bytes].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
