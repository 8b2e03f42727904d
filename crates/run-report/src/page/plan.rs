//! The page of a plan.

use serde_json::Value;

use super::{bill, escape, page, section};
use crate::figures;

/// The page of a plan, from the JSON that `plan --json` prints.
pub fn of_plan(plan: &Value, title: &str) -> String {
    let of = &plan["bill"];
    let bytes = |value: &Value| figures::bytes(value.as_u64().unwrap_or(0));
    let text = |value: &Value| escape::text(value.as_str().unwrap_or_default());
    let mut top = String::from("<dl class=\"top\">");
    let mut fact = |name: &str, value: String, more: String| {
        top += &format!("<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>");
    };
    fact("predicted peak", bytes(&plan["predicted_peak"]), format!("largest phase: {}", text(&of["binding"])));
    fact("budget", bytes(&plan["budget"]), text(&of["budget_source"]));
    fact("smallest budget of this plan", bytes(&plan["smallest_budget_bytes"]), "peak and safety margin".to_owned());
    if let Some(seconds) = plan["step_seconds"].as_f64() {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds of a run")]
        let run = plan["run_seconds"].as_f64().map(|seconds| figures::duration((seconds * 1e3) as u64));
        let run = run.map_or_else(String::new, |run| format!("{run} for all steps"));
        fact("time of a step", format!("{} s", figures::decimal(seconds)), run);
    }
    top += "</dl>";
    let device = match of["device"].as_object() {
        Some(_) => format!("<p>On the device: {} predicted.</p>", bytes(&plan["predicted_device_peak"])),
        None => String::new(),
    };
    let step = format!("<p>{}. {}.</p>", text(&of["conclusion"]), sentence(&text(&of["next"])));
    let body = format!(
        "<h1>{}</h1><p class=\"status\">Memory plan, before anything is allocated</p>{top}{}{}{}",
        escape::text(title),
        section("The phases of the run", &(device + &bill::of_phases(plan))),
        section("A step", &(step + &bill::of_step(plan))),
        "<footer>made by <code>train_low_mem plan --html</code></footer>"
    );
    page(title, &body, plan)
}

/// The text with a capital first letter.
fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect()
}
