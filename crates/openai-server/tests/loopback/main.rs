//! The server over loopback, with an engine that answers by its prompt.

mod answers;
mod endings;
mod refusals;
mod support;
