//! This machine: its devices, its speed, its processes, and the memory that other runs hold.

pub mod device;
pub mod ledger;
pub mod processes;
pub mod profile;
pub mod speed;
pub mod stages;
