//! The files with rows: which are read, how, and what becomes of them.

pub mod data_files;
pub mod file_texts;
pub mod labels;
pub mod objective;
pub mod reading;
pub mod row_budget;
pub mod row_data;
pub mod row_record;
pub mod run_files;
pub mod splits;
pub mod survival;
pub mod tasks;
pub mod unpacked;
