//! From a config to the plan of its run.
//!
//! [`config`] resolves keys and values into numbers. [`options`] converts them to the trainer's options, and [`job`] to the planner's job.
//! [`pace`] is the time and the writes of the planned run. [`remedies`] finds settings with which a refused run would fit.
//!
//! The command uses these modules with opened rows (feature `datasets`) and with measured memory and prices. [`answer()`] uses values only:
//! it is `train_low_mem plan` as a function, which the page "Will it fit?" calls.
//!
//! # Invariants
//!
//! * No function here opens a file, reads a clock or looks at the machine.
//! * Without `datasets`, this crate and those below it build for WebAssembly.

pub mod answer;
pub mod config;
pub mod explanation;
pub mod failure;
pub mod job;
pub mod model;
mod near_names;
pub mod options;
pub mod pace;
pub mod priced;
pub mod remedies;

pub use answer::{PlanOutput, Question, answer};
