//! What all connections share: settings, limits, the queue, counters.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::access::Access;
use crate::keys::Keys;
use crate::metrics::{Gauge, Metrics};
use crate::queue::Queue;
use crate::request::RequestLimits;

/// What a server serves, and how.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where it listens. Port 0: any.
    pub listen: SocketAddr,
    /// The names of the models; the first answers requests that name none.
    pub models: Vec<String>,
    /// Who may ask.
    pub keys: Keys,
    /// Values of the `Host` header that are accepted beside those of this machine. Counts on a loopback address without keys:
    /// a page of somebody else's must not reach a server by a name that it lets point here.
    pub hosts: Vec<String>,
    /// The limits.
    pub limits: Limits,
}

impl Settings {
    /// Without keys, and with the default limits.
    pub fn new(listen: SocketAddr, models: &[&str]) -> Self {
        let models = models.iter().map(|&model| model.to_owned()).collect();
        Settings { listen, models, keys: Keys::default(), hosts: Vec::new(), limits: Limits::default() }
    }
}

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time. Others wait to be accepted.
    pub connections: usize,
    /// Bytes of a request's head.
    pub head_bytes: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Bodies that are read at a time.
    pub bodies: usize,
    /// The time for a head. A connection that is idle for so long is closed.
    pub head_timeout: Duration,
    /// The time for a body.
    pub body_timeout: Duration,
    /// The time in which a client has to take something of its answer.
    pub write_timeout: Duration,
    /// The time for an answer, waiting included.
    pub request_timeout: Duration,
    /// The time for requests to end after `Server::drain`.
    pub drain_timeout: Duration,
    /// Bounds of one request.
    pub request: RequestLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 128,
            head_bytes: 16 << 10,
            body_bytes: 128 << 10,
            bodies: 16,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(10),
            write_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(300),
            drain_timeout: Duration::from_secs(30),
            request: RequestLimits::default(),
        }
    }
}

impl Limits {
    /// Bytes that a server may hold at its limits, for answers of so many bytes, `waiting` of them.
    pub fn bytes(&self, waiting: usize, answer_bytes: usize) -> u64 {
        // A connection: hyper's buffers of either direction, the task, and what the head is taken apart into.
        let connections = self.connections * (self.head_bytes * 2 + READ_AND_TASK_BYTES);
        // Values of JSON take up to 24 times their text (a list of one-digit numbers); one body is taken apart at a time.
        let bodies = self.bodies * self.body_bytes + 24 * self.body_bytes;
        (connections + bodies + waiting * (self.body_bytes / 8 + answer_bytes)) as u64
    }
}

/// What a connection takes beside its buffers.
const READ_AND_TASK_BYTES: usize = 12 << 10;

/// A hook that is told a request that is over, and returns whether the line could be written.
pub(super) type Log = Box<dyn Fn(&Access) -> bool + Send + Sync>;

/// What the server asks its program for.
pub struct Hooks {
    /// Told each request that is over; whether its line was written.
    pub log: Log,
    /// Numbers for `/metrics` that the server does not know.
    pub gauges: Box<dyn Fn() -> Vec<Gauge> + Send + Sync>,
}

impl Default for Hooks {
    fn default() -> Self {
        Hooks { log: Box::new(|_| true), gauges: Box::new(Vec::new) }
    }
}

/// What all connections share.
pub(super) struct Shared {
    pub settings: Settings,
    pub queue: Arc<Queue>,
    pub metrics: Metrics,
    pub log: Log,
    pub gauges: Box<dyn Fn() -> Vec<Gauge> + Send + Sync>,
    pub bodies: Semaphore,
    pub is_draining: AtomicBool,
    /// Requests so far.
    pub number: AtomicU64,
    /// Part of every id.
    pub begun: u64,
    /// Whether the address is of this machine alone.
    pub is_loopback: bool,
}
