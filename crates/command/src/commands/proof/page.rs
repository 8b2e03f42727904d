//! The page of a proof: Markdown, which forums and trackers show as tables.

use std::fmt::Write as _;

use run_report::visible;

use super::{Proof, number};

/// The page.
pub fn write(proof: &Proof) -> String {
    let failed = proof.checks.iter().filter(|check| !check.holds).count();
    let mut page = String::from("# A proof of train_low_mem\n\n");
    let verdict = if failed == 0 { "All promises hold".to_owned() } else { format!("**{failed} did not hold**") };
    let (steps, seed) = (proof.steps, proof.seed);
    let _ = writeln!(
        page,
        "{verdict}: {steps} steps, seed {seed}. To repeat it: `train_low_mem proof --steps {steps} --seed {seed}`.\n"
    );
    page += "| promise | | found |\n| --- | --- | --- |\n";
    for check in &proof.checks {
        let word = if check.holds { "holds" } else { "**fails**" };
        let _ = writeln!(page, "| {} | {word} | {} |", check.promise, cell(&check.found));
    }
    page += "\n## Runs\n\nOne small T5 on the sample data, with dropout and AdamW.\n\n";
    page += "| run | budget | predicted peak | measured peak | first loss | last loss | seconds |\n";
    page += "| --- | --- | --- | --- | --- | --- | --- |\n";
    for run in &proof.runs {
        let loss = |step: Option<&serde_json::Value>| step.map_or("-".into(), |step| number(step, "loss").to_string());
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {:.0} |",
            run.name.title(),
            run.budget,
            run.predicted,
            run.peak,
            loss(run.steps.first()),
            loss(run.steps.last()),
            run.seconds
        );
    }
    let _ = writeln!(
        page,
        "\nEach run was limited by {}. A peak is the largest resident set that the system counted.",
        proof.limited_by
    );
    if let Some(beside) = &proof.beside {
        page += &beside.in_markdown();
    }
    page += "\n## Machine\n\n| | |\n| --- | --- |\n";
    for (name, found) in &proof.machine {
        let _ = writeln!(page, "| {name} | {} |", cell(found));
    }
    page
}

/// Text as a cell of a table.
pub fn cell(text: &str) -> String {
    visible::line(text).replace('|', "\\|")
}
