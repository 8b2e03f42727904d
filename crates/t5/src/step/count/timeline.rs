//! A step from moment to moment: the most that is held while each of its events goes on.

use super::StepCount;
use super::live::Live;
use crate::step::schedule::{Event, Stage, Then, Unit};

/// The most that is held during one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The part of the step: `encoder`, `loss`, `decoder backward`, `update`.
    pub pass: &'static str,
    /// The event within it: `block 3`, `embedding`, `norm`.
    pub what: String,
    /// The bytes, as [`super::Counter::step`] counts them; saved activations and workspace as they are at this moment.
    pub held: StepCount,
}

/// What a tally notes for a timeline.
#[derive(Debug, Default)]
pub(super) struct Noted {
    /// The most of the event that goes on.
    most: Live,
    begun: usize,
    moments: Vec<(&'static str, String, Live)>,
}

impl Noted {
    /// An event begins, with so much held.
    pub fn begin(&mut self, live: Live) {
        self.most = live;
    }

    /// A moment of the event that goes on.
    pub fn moment(&mut self, now: Live) {
        if now.total() > self.most.total() {
            self.most = now;
        }
    }

    /// The moments, with the weights that always are in memory where the others lie in a file.
    pub fn moments(self, always: Option<u64>) -> Vec<Moment> {
        let held = |live: Live| {
            let Live { weights, activations, gradients, loss, workspace } = live;
            let parameters = always.map(|always| always + weights);
            StepCount { parameters, activations, gradients, loss, workspace, packed: 0, on_host: 0 }
        };
        self.moments.into_iter().map(|(pass, what, live)| Moment { pass, what, held: held(live) }).collect()
    }

    /// The event is over. One that computes nothing is no moment of its own.
    pub fn end(&mut self, event: &Event) {
        self.begun += usize::from(matches!(event, Event::Begin { .. }));
        if let Some((pass, what)) = words(event, self.begun) {
            self.moments.push((pass, what, self.most));
        }
    }
}

/// The part of a step that an event belongs to, and its own name. `begun` backward passes have begun.
fn words(event: &Event, begun: usize) -> Option<(&'static str, String)> {
    let of_unit = |unit: Unit| match unit {
        Unit::Norm { .. } => "norm".to_owned(),
        Unit::Block { block, .. } => format!("block {}", block + 1),
    };
    Some(match event {
        Event::Embed { decoder, .. } => (if *decoder { "decoder" } else { "encoder" }, "embedding".to_owned()),
        Event::Forward { unit, .. } => (if unit.is_decoder() { "decoder" } else { "encoder" }, of_unit(*unit)),
        Event::Head { .. } => ("loss", "output projection".to_owned()),
        Event::Backward(way) => {
            let pass = match (way.unit.is_decoder(), begun > 1) {
                (true, false) => "decoder backward",
                (false, false) => "encoder backward",
                (true, true) => "decoder, second backward",
                (false, true) => "encoder, second backward",
            };
            (pass, of_unit(way.unit))
        }
        Event::EnterEmbedding => ("update", "gradients of the embedding".to_owned()),
        Event::ReadBack => ("update", "gradients from the file".to_owned()),
        Event::HandOver { part: None, stage: Stage::Apply, then: Then::Keep | Then::Free } => {
            ("update", "parameters".to_owned())
        }
        _ => return None,
    })
}
