//! A thread that has the system read pages of files before they are used. The system takes a request at once only where its queue has
//! room for all of it: whoever computes would wait for the rest.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};

use crate::in_files::Mapping;

/// Pages of a mapping: their address and bytes.
type Pages = (usize, usize);

/// Bytes that are asked for at a time.
const PIECE_BYTES: usize = 4 << 20;

/// Requests that wait: the weights of a few blocks.
const MOST_WAITING: usize = 256;

static READER: OnceLock<Option<SyncSender<(Arc<Mapping>, Pages)>>> = OnceLock::new();

/// Has the thread ask for pages, or asks for them itself where there is none.
pub(crate) fn read(mapping: &Arc<Mapping>, pages: Pages) {
    let sent = READER.get_or_init(start).as_ref().map(|reader| reader.try_send((Arc::clone(mapping), pages)));
    match sent {
        Some(Ok(())) => {}
        None | Some(Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) => ask(pages),
    }
}

fn start() -> Option<SyncSender<(Arc<Mapping>, Pages)>> {
    let (asked, requests) = sync_channel::<(Arc<Mapping>, Pages)>(MOST_WAITING);
    let work = move || {
        // The mapping lives until its pages were asked for.
        for (_mapping, pages) in requests {
            ask(pages);
        }
    };
    std::thread::Builder::new().name("read-ahead".to_owned()).spawn(work).ok()?;
    Some(asked)
}

fn ask((start, bytes): Pages) {
    for first in (0..bytes).step_by(PIECE_BYTES) {
        crate::in_files::ask_ahead((start + first, PIECE_BYTES.min(bytes - first)));
    }
}
