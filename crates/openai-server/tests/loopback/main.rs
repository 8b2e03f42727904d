//! Tests the server over loopback, with an engine whose answers depend on the prompt.

mod answers;
mod endings;
mod refusals;
mod support;
