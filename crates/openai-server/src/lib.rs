//! OpenAI's HTTP interface in front of somebody who answers.
//!
//! The server reads requests on a thread of its own, checks them, and puts them into a bounded [`Queue`]. Whoever makes the
//! answers takes each [`Job`] out, whenever it has memory for it, and sends [`Event`]s until the job is answered:
//!
//! ```no_run
//! use openai_server::{Event, Finish, Hooks, Queue, Server, Settings};
//!
//! let queue = Queue::new(64);
//! let server = Server::start(Settings::new("127.0.0.1:8080".parse().unwrap(), &["parrot"]), &queue, Hooks::default())?;
//! while let Some(job) = queue.next() {
//!     job.send(Event::Started { prompt_tokens: 1 });
//!     job.send(Event::Text { choice: 0, text: format!("{:?}", job.prompt), tokens: 1 });
//!     job.send(Event::Finished { choice: 0, reason: Finish::Stop });
//! }
//! server.join();
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # Invariants
//!
//! * Lengths are checked before memory is taken: connections, headers, bodies, and bodies in flight have limits.
//! * Every wait has an end: for a head, a body, an answer, and a client that reads.
//! * A job is dropped when its client has gone, its time is over, or it is answered. What it held is free then.
//! * Nothing of this crate knows tensors, tokens or files.

mod access;
mod answer;
mod error;
mod http;
mod keys;
mod metrics;
mod queue;
mod request;
mod response;

pub use access::Access;
pub use answer::Outgoing;
pub use error::ApiError;
pub use http::{Drainer, Hooks, Limits, Server, Settings};
pub use keys::Keys;
pub use metrics::Gauge;
pub use queue::{Event, Finish, Job, Load, Queue};
pub use request::{Interface, Message, Options, Prompt, Request, RequestLimits};
