//! What people read: lines, bars and warnings on the standard streams, in text that a terminal can show.

pub mod lines;
pub mod output;
pub mod progress;
pub mod report;
pub mod shell_words;
pub mod stop;
pub mod terminal_text;
pub mod warnings;
