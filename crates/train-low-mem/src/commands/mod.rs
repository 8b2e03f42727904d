//! The subcommands beside `train`, a module each.

pub mod bench;
pub mod eval;
pub mod generate;
pub mod inspect;
pub mod plan;
pub mod train_tokenizer;
