//! A run, from its command line to its last screen.

pub mod bad_rows;
pub mod bits;
pub mod dry_run;
pub mod faster_device;
pub mod identity;
mod lossy_texts;
pub mod open;
pub mod options;
pub mod planned_run;
pub mod resume;
pub mod run_data;
pub mod saved;
pub mod session;
pub mod setup;
pub mod start_screen;
pub mod summary;
pub mod target_machine;
pub mod teacher_logits;
pub mod train;
pub mod views;
