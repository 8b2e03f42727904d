//! Reports on a run from its files: an HTML page, TensorBoard's events, and the figures of a terminal.
//!
//! [`Run`] holds the data for all outputs, in memory that does not grow with the run. It down-samples its curves as values arrive. Its
//! input are the lines of `metrics.jsonl`: from the run itself as it writes them, or from the file by [`read`].
//!
//! | output | is |
//! | --- | --- |
//! | [`page::of_run`], [`page::of_runs`] | HTML pages of one run, or of several side by side |
//! | [`page::of_plan`] | the HTML page of a memory plan |
//! | [`tensorboard::EventFile`] | TensorBoard's event file |
//! | [`screen`] | a run in a terminal, as it goes on |
//! | [`figures`] | numbers with their units |
//! | [`visible`] | text of others, safe for a terminal and a log |
//!
//! Invariants: no network, no clock. Every text from a file or a user is escaped, and every character in it can be seen. A page is smaller than
//! [`page::MAX_BYTES`] for any run.
//!
//! ```
//! let mut run = run_report::Run::new("runs/a");
//! run.note(r#"{"event":"step","step":1,"time":"2026-11-23T18:25:49.319Z","loss":7.5}"#);
//! assert_eq!(run.step(), 1);
//! ```

mod answers;
mod evaluation;
pub mod figures;
mod line;
pub mod page;
mod reading;
mod run;
pub mod screen;
mod series;
pub mod tensorboard;
pub mod visible;

pub use answers::{Answers, SampleAnswer};
pub use evaluation::Evaluation;
pub use line::{Line, Step};
pub use reading::{MetricsTail, ReadError, read, read_lines};
pub use run::{Note, Run, Totals};
pub use series::{Bucket, Series};
