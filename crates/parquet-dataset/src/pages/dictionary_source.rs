//! [`DictionarySource`]: the place of a dictionary in its file.

use std::sync::Arc;

use super::bytes::{OpenPage, PageSource};
use super::entry::DictionaryPage;
use super::header::PageKind;
use super::map::ChunkMap;
use crate::error::Fault;
use crate::footer::{Codec, encoding};
use crate::io::Handle;

/// The most bytes of a dictionary without its long values. Writers stop at 1 MiB by default.
pub(crate) const MAX_HELD_BYTES: u64 = 256 << 20;

/// The place of a dictionary.
#[derive(Clone)]
pub(crate) struct DictionarySource {
    pub(crate) handle: Handle,
    pub(crate) page: DictionaryPage,
    /// The chunk's map, once it exists.
    pub(crate) map: Option<Arc<ChunkMap>>,
    pub(crate) codec: Codec,
    pub(crate) whole_page_bytes: usize,
}

impl DictionarySource {
    pub(crate) fn page_source(&self) -> PageSource<'_> {
        PageSource { handle: &self.handle, entry: &self.page.entry, check: self.map.as_ref().map(|map| (map, 0)) }
    }

    pub(crate) fn open(&self) -> Result<OpenPage, Fault> {
        let page = OpenPage::read(&self.page_source(), self.codec, self.whole_page_bytes)?;
        let header = &page.header;
        if header.kind != PageKind::Dictionary {
            return Fault::corrupt("a dictionary page was expected, another kind of page is there");
        }
        if !matches!(header.encoding, encoding::PLAIN | encoding::PLAIN_DICTIONARY) {
            return Err(Fault::Unsupported(format!("a dictionary in encoding {}", header.encoding)));
        }
        let size = page.bytes.remaining();
        if u64::from(header.values) * 4 > size {
            return Fault::corrupt(format!("a dictionary of {size} bytes declares {} values", header.values));
        }
        Ok(page)
    }
}

pub(crate) fn too_large(bytes: u64) -> Fault {
    Fault::TooLarge { what: "a dictionary", bytes, limit: MAX_HELD_BYTES }
}
