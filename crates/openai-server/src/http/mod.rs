//! HTTP/1.1 over hyper, on one thread of its own: connections, limits and routes.

mod ask;
mod body;
mod connections;
mod record;
mod reply;
mod routes;
mod server;
mod shared;
mod socket;

pub use server::{Drainer, Server};
pub use shared::{Hooks, Limits, Settings};
