//! The scores of each label of a classification, as text and as JSON.

use std::fmt::Write;

use memory_policy::counted;
use run_report::figures::clipped;
use run_report::visible;
use serde_json::{Value, json};
use text_metrics::labels::{Class, Labels, mean, weighted_mean};

/// The most labels in the text, and in an event.
const MAX_SHOWN: usize = 64;
/// The most labels whose confusion matrix is text.
const MAX_COLUMNS: usize = 12;

/// A mean of a score over labels.
type Mean = fn(&[Class], fn(&Class) -> f64) -> f64;

/// The scores as text, and as JSON: `labels`, each with precision, recall, F1 and support; their means; `confusion`, whose rows are the right
/// labels and whose columns are the answers, with other answers last. `None` if the texts are no labels.
pub fn compute(labels: &Labels) -> Option<(String, Value)> {
    let classes = labels.classes().ok().filter(|classes| !classes.is_empty())?;
    let confusion = labels.confusion();
    let variants = labels.spellings().variants();
    let scores = |of: Mean| {
        json!({"precision": of(&classes, |class| class.precision), "recall": of(&classes, |class| class.recall),
            "f1": of(&classes, |class| class.f1)})
    };
    let of_class = |class: &Class| {
        json!({"label": class.label, "precision": class.precision, "recall": class.recall, "f1": class.f1,
            "support": class.support, "predicted": class.predicted})
    };
    let mut json = json!({
        "labels": classes.iter().take(MAX_SHOWN).map(of_class).collect::<Vec<_>>(),
        "macro": scores(mean),
        "weighted": scores(weighted_mean),
    });
    if let Some(confusion) = &confusion {
        json["confusion"] = json!(confusion);
    }
    if !variants.is_empty() {
        json["variants"] = json!(variants);
    }
    let mut text = table(&classes);
    if let Some(confusion) = confusion.filter(|_| classes.len() <= MAX_COLUMNS) {
        text += &matrix(&classes, &confusion);
    }
    Some((text + &in_words(&variants), json))
}

/// Labels that differ only by capital letters or white space, one line each.
pub fn in_words(variants: &[Vec<(&str, u64)>]) -> String {
    let spelling = |(text, count): &(&str, u64)| format!("`{}` ({})", label(text), counted(*count));
    let line = |of: &Vec<(&str, u64)>| {
        format!(
            "labels that differ only by case or blanks: {}\n",
            of.iter().map(spelling).collect::<Vec<_>>().join(", ")
        )
    };
    variants.iter().take(8).map(line).collect()
}

fn label(text: &str) -> String {
    visible::line(&clipped(text, 24)).into_owned()
}

fn table(classes: &[Class]) -> String {
    let mut text = format!("{:<26}{:>10}{:>10}{:>10}{:>10}\n", "label", "precision", "recall", "F1", "rows");
    let mut row = |name: &str, [precision, recall, f1]: [f64; 3], rows: u64| {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let [precision, recall, f1] = [precision, recall, f1].map(percent);
        let _ = writeln!(text, "{name:<26}{precision:>10}{recall:>10}{f1:>10}{:>10}", counted(rows));
    };
    for class in classes.iter().take(MAX_SHOWN) {
        row(&label(&class.label), [class.precision, class.recall, class.f1], class.support);
    }
    let rows = classes.iter().map(|class| class.support).sum();
    let means: [(&str, Mean); 2] = [("mean of the labels", mean), ("mean of the rows", weighted_mean)];
    for (name, of) in means {
        let scores = [|class: &Class| class.precision, |class: &Class| class.recall, |class: &Class| class.f1];
        row(name, scores.map(|score| of(classes, score)), rows);
    }
    if let Some(more) = classes.len().checked_sub(MAX_SHOWN + 1) {
        let _ = writeln!(text, "and {} more labels", more + 1);
    }
    text
}

fn matrix(classes: &[Class], confusion: &[Vec<u64>]) -> String {
    let names: Vec<String> = classes.iter().map(|class| label(&clipped(&class.label, 9))).collect();
    let has_others = confusion.iter().any(|row| row.last() != Some(&0));
    let columns = names.len() + usize::from(has_others);
    let heads = names.iter().map(String::as_str).chain(["other"]).take(columns);
    let mut text = format!(
        "\n{:<26}{}\n",
        "right label, and answers",
        heads.map(|name| format!("{name:>11}")).collect::<String>()
    );
    for (class, row) in classes.iter().zip(confusion) {
        let cells = row.iter().take(columns).map(|count| format!("{:>11}", counted(*count)));
        let _ = writeln!(text, "{:<26}{}", label(&class.label), cells.collect::<String>());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_of_labels_are_a_table_a_matrix_and_json() {
        let mut labels = Labels::default();
        for (answer, right) in [("bug", "bug"), ("other", "bug"), ("BUG", "BUG"), ("bug", "feature")] {
            labels.add(answer, right);
        }
        let (text, json) = compute(&labels).unwrap();
        assert!(text.contains("bug                           50.0 %    50.0 %    50.0 %         2"), "{text}");
        assert!(text.contains("mean of the labels"), "{text}");
        assert!(text.contains("feature                             0          1          0          0"), "{text}");
        assert!(text.contains("labels that differ only by case or blanks: `BUG` (1), `bug` (2)"), "{text}");
        assert_eq!(json["confusion"], json!([[1, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 0]]));
        assert_eq!((&json["labels"][1]["label"], &json["labels"][1]["support"]), (&json!("bug"), &json!(2)));
        assert!(compute(&Labels::default()).is_none());
    }
}
