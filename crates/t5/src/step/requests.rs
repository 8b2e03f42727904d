//! The sums and weights for which the processes of a step ask each other until the decision, in order. The list does not depend on
//! a process's own work: it is the same for all of them.
//!
//! A process that cannot continue therefore knows the requests that the others still wait for.

use std::collections::HashSet;

use super::schedule::Event;
use crate::network::Network;
use crate::ops::Ops;
use crate::parameters::{Parameter, Part, Weight};

/// A request in which all processes take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveRequest {
    /// The gradient of parameter `index` is summed.
    Sum {
        /// The parameter.
        index: usize,
    },
    /// The values of parameter `index` come from the process that holds them, if one process alone does.
    Weight {
        /// The parameter.
        index: usize,
    },
}

/// The requests of the events before the decision. `trains`: whether a parameter has a gradient.
pub(crate) fn collective_requests<T: Ops>(
    network: &Network<T>,
    parameters: &[Parameter<T>],
    events: &[Event],
    trains: &dyn Fn(usize) -> bool,
) -> Vec<CollectiveRequest> {
    let mut list = List { trains, requests: Vec::new(), is_resident: HashSet::new(), in_flight: HashSet::new() };
    let indices = |part: Option<Part>| {
        let meant = parameters.iter().enumerate().filter(move |(_, of)| part.is_none_or(|part| part == of.part));
        meant.map(|(index, _)| index)
    };
    for event in events {
        match event {
            Event::Decide => break,
            Event::Embed { decoder, .. } => list.fetch_remote(network.table(*decoder)),
            Event::Prefetch(part) | Event::PageIn(part) => {
                network.weights_of(*part).for_each(|weight| list.fetch_remote(weight))
            }
            Event::PageOut(part) => network.weights_of(*part).for_each(|weight| list.release(weight)),
            Event::SumHead if network.has_tied_head() => list.begin_sum(network.head.weight.index),
            Event::EndHead => list.end_sum(network.head.weight.index),
            Event::Send { part, .. } => indices(Some(*part)).for_each(|index| list.begin_sum(index)),
            Event::HandOver { part, .. } => indices(*part).for_each(|index| {
                list.begin_sum(index);
                list.end_sum(index);
            }),
            _ => {}
        }
    }
    list.requests
}

/// The requests so far.
struct List<'a> {
    trains: &'a dyn Fn(usize) -> bool,
    requests: Vec<CollectiveRequest>,
    /// Weights that are here or are being fetched, and were not released.
    is_resident: HashSet<usize>,
    /// Gradients that are being summed.
    in_flight: HashSet<usize>,
}

impl List<'_> {
    fn fetch_remote<T>(&mut self, weight: &Weight<T>) {
        if self.is_resident.insert(weight.index) {
            self.requests.push(CollectiveRequest::Weight { index: weight.index });
        }
    }

    fn release<T>(&mut self, weight: &Weight<T>) {
        self.is_resident.remove(&weight.index);
    }

    fn begin_sum(&mut self, index: usize) {
        if (self.trains)(index) && self.in_flight.insert(index) {
            self.requests.push(CollectiveRequest::Sum { index });
        }
    }

    fn end_sum(&mut self, index: usize) {
        self.in_flight.remove(&index);
    }
}
