//! State shared by all connections: settings, limits, the queue, counters.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::connections::Connections;
use crate::access::Access;
use crate::delivery::Untaken;
use crate::error::ApiError;
use crate::keys::Keys;
use crate::metrics::{Gauge, Metrics};
use crate::queue::{Queue, places};
use crate::request::RequestLimits;

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The address to listen on. Port 0: any port.
    pub listen: SocketAddr,
    /// Names of the models; the first answers requests without a model.
    pub models: Vec<String>,
    /// The accepted keys.
    pub keys: Keys,
    /// Accepted values of the `Host` header, beside the names of this machine. Checked only on a loopback address without
    /// keys: a web page of another site must not reach the server through a host name that the site points at this machine.
    pub hosts: Vec<String>,
    /// The limits.
    pub limits: Limits,
}

impl Settings {
    /// Settings without keys, with the default limits.
    pub fn new(listen: SocketAddr, models: &[&str]) -> Self {
        let models = models.iter().map(|&model| model.to_owned()).collect();
        Settings { listen, models, keys: Keys::default(), hosts: Vec::new(), limits: Limits::default() }
    }
}

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time. For another one, a connection that keeps the server waiting gives way.
    pub connections: usize,
    /// The most bytes of a request's head.
    pub head_bytes: usize,
    /// The most bytes of a request's body.
    pub body_bytes: usize,
    /// The memory of the bodies that are read at a time, in bodies of the largest size.
    pub bodies: usize,
    /// Time limit for a head. A connection that is idle for this long is closed.
    pub head_timeout: Duration,
    /// Time limit for a body.
    pub body_timeout: Duration,
    /// Time limit for the client to accept some bytes of its answer.
    pub write_timeout: Duration,
    /// Time limit for an answer, including the wait in the queue.
    pub request_timeout: Duration,
    /// Time limit for requests to finish after `Server::drain`.
    pub drain_timeout: Duration,
    /// The most bytes of answers that no client has taken yet.
    pub answer_bytes: usize,
    /// Limits of one request.
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
            answer_bytes: 4 << 20,
            request: RequestLimits::default(),
        }
    }
}

impl Limits {
    /// The most bytes that a server holds at its limits, with so many places for `waiting` requests.
    pub fn bytes(&self, waiting: usize) -> u64 {
        // A connection: hyper's two buffers, the task, and the parsed head.
        let connections = self.connections * (self.head_bytes * 2 + READ_AND_TASK_BYTES);
        let bodies = self.bodies * self.body_bytes;
        // One body is parsed at a time: a text is unescaped into a buffer that grows, and then kept.
        let parsed = PARSED_BYTES_A_BYTE * self.body_bytes + PARSED_BYTES;
        let waiting = {
            let largest = places::largest(&self.request, self.body_bytes);
            places::bytes(waiting, places::place_bytes(&self.request), largest)
        };
        (connections + bodies + parsed + waiting + self.answer_bytes) as u64
    }
}

/// Bytes of a connection beside its buffers.
const READ_AND_TASK_BYTES: usize = 12 << 10;

/// Bytes for each byte of the body that is parsed.
const PARSED_BYTES_A_BYTE: usize = 6;

/// Bytes of the nodes of a body that is parsed.
const PARSED_BYTES: usize = 512 << 10;

/// Called with each finished request; returns whether the log line could be written.
pub(super) type Log = Box<dyn Fn(&Access) -> bool + Send + Sync>;

/// Callbacks from the server to its program.
pub struct Hooks {
    /// Called with each finished request; returns whether the log line was written.
    pub log: Log,
    /// Values for `/metrics` that the server does not know.
    pub gauges: Box<dyn Fn() -> Vec<Gauge> + Send + Sync>,
}

impl Default for Hooks {
    fn default() -> Self {
        Hooks { log: Box::new(|_| true), gauges: Box::new(Vec::new) }
    }
}

/// State shared by all connections.
pub(super) struct Shared {
    pub settings: Settings,
    pub queue: Arc<Queue>,
    pub metrics: Metrics,
    pub log: Log,
    pub gauges: Box<dyn Fn() -> Vec<Gauge> + Send + Sync>,
    pub connections: Arc<Connections>,
    pub untaken: Arc<Untaken>,
    pub is_draining: AtomicBool,
    /// Requests so far.
    pub number: AtomicU64,
    /// Part of every id: makes the ids of this start unique.
    pub begun: u64,
    /// Whether only this machine can reach the address.
    pub is_loopback: bool,
}

impl Shared {
    /// The number of a new request.
    pub fn next_number(&self) -> u64 {
        self.number.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether the server is about to end.
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// The error for a model that is not served.
    pub fn unknown_model(&self, name: &str) -> ApiError {
        let name: String = name.chars().take(64).collect();
        let models = self.settings.models.join(", ");
        let error = ApiError::new(404, "model_not_found", format!("no model `{name}`; there are: {models}"));
        ApiError { parameter: Some("model".to_owned()), ..error }
    }
}
