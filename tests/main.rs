//! Whole-command tests: every promise of the public interface, kept by the binary that users run.
//!
//! One test binary with a module per topic. [`run::Scene`] starts the command in a directory of its own and waits for it. A test may only
//! use the command's output and files. A test trains a tiny model for a few steps and takes seconds.

mod files;
mod run;

mod adapters;
mod answers;
mod before_the_plan;
mod budget;
mod chat;
mod classify;
mod configs;
mod convert;
mod convert_base;
mod distillation;
mod divergence;
mod doctor;
mod effects;
mod embed;
mod embedding;
mod export;
mod finetune;
mod flag_effects;
mod flags;
mod gemma;
mod gemma_features;
mod hostile_text;
mod inference;
mod jobs;
mod leaving;
mod listing;
mod long_rows;
mod lost_files;
mod merge;
mod metrics;
mod mixtures;
mod models;
mod odd_times;
mod other_commands;
mod own_files;
mod page_answers;
mod preferences;
mod prices;
#[cfg(unix)]
mod proof;
mod ranking;
mod reading;
mod resume;
mod row_files;
mod same_bits;
mod same_mathematics;
mod serve;
mod shown_commands;
mod situations;
mod training;
mod views;
mod vocabulary;
mod wrong_input;
