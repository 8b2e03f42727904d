//! Warnings of the libraries. Libraries do not print; they raise `tracing` events, and [`listen`] turns these into warnings of the program.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::screen::report;

/// Shows every warning of a library from now on. Spans stay as cheap as without a listener: a load and a branch.
pub fn listen() {
    // It fails only if it was called before.
    let _ = tracing::subscriber::set_global_default(Warnings);
}

/// Whether an event is a warning, or worse.
pub fn is_one(metadata: &Metadata<'_>) -> bool {
    metadata.is_event() && *metadata.level() <= Level::WARN
}

/// Shows a warning once, even if it is raised several times.
pub fn show(event: &Event<'_>) {
    static SHOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut message = Message(String::new());
    event.record(&mut message);
    if SHOWN.lock().unwrap_or_else(PoisonError::into_inner).insert(message.0.clone()) {
        report::warn(&message.0);
    }
}

struct Warnings;

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        is_one(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        show(event);
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The message of an event.
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // The debug form of a message is its text.
            self.0 = format!("{value:?}");
        }
    }
}
