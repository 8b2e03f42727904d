//! A thread for requests to the system that the caller need not wait for. The system starts a request to read at once only if its queue has
//! room for all of it. Otherwise the thread that computes would wait for the rest.

use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

type Request = Box<dyn FnOnce() + Send>;

/// The most requests that wait: enough for the weights of a few blocks.
const QUEUE_CAPACITY: usize = 256;

static THREAD: OnceLock<Option<SyncSender<Request>>> = OnceLock::new();

/// Has the thread make a request, after the requests before it. If there is no thread, or too many requests wait, the request is made at
/// once.
pub(crate) fn request(request: impl FnOnce() + Send + 'static) {
    let request: Request = Box::new(request);
    let Some(thread) = THREAD.get_or_init(start) else { return request() };
    if let Err(TrySendError::Full(request) | TrySendError::Disconnected(request)) = thread.try_send(request) {
        request();
    }
}

fn start() -> Option<SyncSender<Request>> {
    let (asked, requests) = sync_channel::<Request>(QUEUE_CAPACITY);
    let work = move || requests.into_iter().for_each(|request| request());
    std::thread::Builder::new().name("read-ahead".to_owned()).spawn(work).ok()?;
    Some(asked)
}
