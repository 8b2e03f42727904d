//! From a config to the plan of its run.
//!
//! [`config`] resolves keys and values into numbers, [`options`] says them in the trainer's words, and [`job`] says them in
//! the planner's. [`pace`] is the time and the writes of the planned run, and [`ways_out`] are the settings with which a
//! refused run would fit.
//!
//! The command does this with rows that are open (feature `datasets`) and with measured memory and prices. [`answer()`] does
//! it without any of that, from values alone: it is `train_low_mem plan` as a function, which the page "Will it fit?" calls.
//!
//! # Invariants
//!
//! * Nothing here opens a file, reads a clock or looks at the machine.
//! * Without `datasets`, this crate and those below it build for WebAssembly.

pub mod answer;
pub mod config;
pub mod explanation;
pub mod failure;
pub mod job;
pub mod model;
pub mod options;
pub mod pace;
pub mod priced;
pub mod ways_out;

pub use answer::{Answer, Question, answer};
