//! HTML pages: self-contained, small, readable without a script, and suited to dark mode and paper.
//!
//! | page | shows |
//! | --- | --- |
//! | [`of_run`] | a run: learning, speed, memory beside the predicted bill, answers, data, recipe, machine |
//! | [`of_runs`] | several runs in the same charts, with their figures and the settings in which they differ |
//! | [`of_plan`] | the bill of a plan: over the phases of a run, and over the events of a step |
//!
//! A policy in the page's head allows only our own style and script; in particular it forbids the network.

mod bill;
mod chart;
mod classes;
mod escape;
mod plan;
mod recipe;
mod run;
mod runs;
mod scale;
mod tasks;

pub use plan::of_plan;
pub use run::of_run;
pub use runs::{MAX_RUNS, of_runs};

/// The most bytes of a page.
pub const MAX_BYTES: usize = 300_000;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");
/// The hash of the script in a page; a test prints the expected value.
const SCRIPT_SHA256: &str = "+eMzP8FsOBrpe6+WhdqbZo3zlnvb/kHRSIPA3hnXSdA=";

/// Returns a whole page. `title` is a text, `body` is HTML.
fn page(title: &str, body: &str, figures: &serde_json::Value) -> String {
    let (title, figures) = (escape::text(title), escape::json(figures));
    format!(
        r#"<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';style-src 'unsafe-inline';script-src 'sha256-{SCRIPT_SHA256}';base-uri 'none';form-action 'none'">
<meta name="generator" content="train_low_mem"><title>{title}</title>
<style>{STYLE}</style></head><body>
{body}
<script type="application/json" id="figures">{figures}</script>
<script>{SCRIPT}</script></body></html>
"#
    )
}

/// A section with its heading; empty if its content is.
fn section(title: &str, content: &str) -> String {
    if content.is_empty() { String::new() } else { format!("<h2>{title}</h2>\n{content}") }
}

#[cfg(test)]
mod tests;
