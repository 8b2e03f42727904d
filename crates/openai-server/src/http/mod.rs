//! HTTP/1.1 over hyper, on one thread of its own: connections, limits and routes.

mod body;
mod record;
mod routes;
mod server;
mod shared;
mod socket;

pub use server::{Drainer, Server};
pub use shared::{Hooks, Limits, Settings};
