//! A training step as a program: a list of events that is carried out, or counted.
//!
//! `schedule` makes the list from the trained parameters, the number of micro-batches and the levers. `run` is the one loop
//! that carries out the list. [`count`] adds up the bytes that a step holds and writes, and its arithmetic. Layers and the loop are written
//! over a trait of operations, so both use the same code of the same layers, and of gradients from their first contribution to their update.
//!
//! Invariants: the levers change the order of summation at most; a gradient is handed over once to be measured and once to be
//! applied; a parameter may change as soon as its gradient was handed over to be applied.

pub mod count;
pub(crate) mod disposition;
pub(crate) mod inference;
pub(crate) mod observer;
pub(crate) mod requests;
pub(crate) mod run;
pub(crate) mod schedule;
pub(crate) mod store;
