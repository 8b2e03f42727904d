//! The subcommands beside `train`, a module each.

pub mod add_tokens;
pub mod average;
pub mod bench;
mod bench_serve;
pub mod chat;
pub mod convert;
pub mod convert_base;
pub mod doctor;
pub mod embed;
pub mod eval;
pub mod export;
pub mod generate;
pub mod inspect;
pub mod jobs;
pub mod listing;
pub mod merge;
pub mod plan;
pub mod proof;
pub mod report;
pub mod score;
mod search;
pub mod serve;
mod text_lengths;
pub mod train_tokenizer;
pub mod trim_vocab;
pub mod watch;
