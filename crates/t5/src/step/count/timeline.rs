//! A step from moment to moment: the most bytes that are held during each of its events.

use super::StepCount;
use super::live::Live;
use crate::step::disposition::GradientDisposition;
use crate::step::schedule::{Event, Stage, Unit};

/// The most bytes that are held during one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The part of the step: `encoder`, `loss`, `decoder backward`, `update`.
    pub pass: &'static str,
    /// The event within it: `block 3`, `embedding`, `norm`.
    pub what: String,
    /// The bytes, in the rows of [`super::Counter::step`]. Saved activations and workspace are those of this moment.
    pub held: StepCount,
}

/// The notes of a tally for a timeline.
#[derive(Debug, Default)]
pub(super) struct Noted {
    /// The largest moment of the current event.
    most: Live,
    begun: usize,
    moments: Vec<(&'static str, String, Live)>,
}

impl Noted {
    /// Begins an event at which `live` is held.
    pub fn begin(&mut self, live: Live) {
        self.most = live;
    }

    /// Notes a moment of the current event.
    pub fn moment(&mut self, now: Live) {
        if now.total() > self.most.total() {
            self.most = now;
        }
    }

    /// The moments. `always`: the bytes of weights that are always in memory, where the others lie in a file.
    pub fn moments(self, always: Option<u64>) -> Vec<Moment> {
        let held = |live: Live| {
            let Live { weights, activations, gradients, loss, workspace } = live;
            let parameters = always.map(|always| always + weights);
            StepCount { parameters, activations, gradients, loss, workspace, packed: 0, on_host: 0 }
        };
        self.moments.into_iter().map(|(pass, what, live)| Moment { pass, what, held: held(live) }).collect()
    }

    /// Ends the event. An event that computes nothing adds no moment.
    pub fn end(&mut self, event: &Event) {
        self.begun += usize::from(matches!(event, Event::Begin { .. }));
        if let Some((pass, what)) = words(event, self.begun) {
            self.moments.push((pass, what, self.most));
        }
    }
}

/// The part of the step that an event belongs to, and the event's name. `begun` is the number of backward passes that have begun.
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
        Event::EmbeddingBackward => ("update", "gradients of the embedding".to_owned()),
        Event::ReadBack => ("update", "gradients from the file".to_owned()),
        Event::HandOver {
            part: None,
            stage: Stage::Apply,
            disposition: GradientDisposition::Keep | GradientDisposition::Free,
        } => ("update", "parameters".to_owned()),
        _ => return None,
    })
}
