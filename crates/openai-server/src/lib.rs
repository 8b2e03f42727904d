//! OpenAI's HTTP interface in front of any engine.
//!
//! The server reads requests on its own thread, checks them, and puts them into a bounded [`Queue`]. The engine takes out a
//! [`Job`] whenever it has memory for it, and sends [`Event`]s until the job is answered:
//!
//! ```no_run
//! use openai_server::{Event, Finish, Hooks, Queue, Server, Settings};
//!
//! let queue = Queue::new(64);
//! let server = Server::start(Settings::new("127.0.0.1:8080".parse().unwrap(), &["parrot"]), &queue, Hooks::default())?;
//! while let Some(job) = queue.next() {
//!     job.send(Event::Started { prompt_tokens: 1, is_cut: false });
//!     job.token_made();
//!     let text = format!("{:?}", job.prompt);
//!     job.send(Event::Text { choice: 0, text, tokens: 1, logprobs: Vec::new() });
//!     job.send(Event::Finished { choice: 0, reason: Finish::Stop });
//! }
//! server.join();
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! # Invariants
//!
//! * Sizes are checked before memory is taken: connections, headers, bodies, waiting prompts and untaken answers have limits.
//! * No client keeps others out: whoever makes the server wait longest gives way, and the client with the least work is next, its short
//!   requests beside its long ones.
//! * Every wait has a time limit: for a head, a body, an answer, and a client's reading.
//! * A job is dropped when its client disconnects, its time is over, or it is answered. Dropping it frees its memory.
//! * This crate does not depend on tensors, tokens or files.

mod access;
mod answer;
mod delivery;
mod error;
mod event;
mod http;
mod keys;
mod metrics;
mod queue;
mod request;
mod response;

pub use access::Access;
pub use answer::StreamedText;
pub use delivery::BYTES_OF_A_NUMBER;
pub use error::ApiError;
pub use event::{Event, Finish, TokenLogprob};
pub use http::{Drainer, Hooks, Limits, Server, Settings};
pub use keys::Keys;
pub use metrics::Gauge;
pub use queue::{Admission, Job, Load, Queue, Share};
pub use request::{Interface, Message, Options, Overflow, Prompt, Request, RequestLimits, Results, Wanted};
