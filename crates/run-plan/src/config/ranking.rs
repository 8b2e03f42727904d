//! `ranking.*`: a loss of lists of texts, for `task.name = "ranking"`.

use trainer::ranking::{Ranking, RankingLoss};

use super::loss::Loss;
use super::task::Task;
use super::{Values, class_weights, size, task_of};
use crate::failure::{Failure, Outcome};

/// `ranking.*`
#[derive(Clone, Debug, PartialEq)]
pub struct RankingSettings {
    /// The loss.
    pub of: Ranking,
    /// The texts of the tokens that a score is made of: two answers, or one.
    pub answers: Vec<String>,
    /// The most texts of a list.
    pub list_size: usize,
}

/// The settings in these values, if they train a ranking.
///
/// # Errors
/// Another number of answers than the loss has; a weight of a class that rankings do not have.
pub fn from_values(values: &Values) -> Outcome<Option<RankingSettings>> {
    if task_of(values) != Some(Task::Ranking) {
        return Ok(None);
    }
    let name = values.text("ranking.loss").unwrap_or_default();
    let loss = RankingLoss::named(&name).unwrap_or(RankingLoss::Monot5);
    let usual: &[&str] = if loss.is_of_logits() { &["<extra_id_10>"] } else { &["true", "false"] };
    let given = values.list("ranking.answers").unwrap_or_default();
    let answers = if given.is_empty() { usual.iter().map(|answer| (*answer).to_owned()).collect() } else { given };
    if answers.len() != usual.len() {
        let expected = if loss.is_of_logits() { "one token" } else { "two answers" };
        return Err(Failure::usage(format!(
            "`ranking.answers` ({}): expected {expected} for `ranking.loss = \"{name}\"`, got {}",
            values.origin("ranking.answers"),
            answers.join(", ")
        ))
        .hint(format!("such as `--set ranking.answers={}`", usual.join(","))));
    }
    let weights = values.table("task.class_weights");
    if let Some(class) = weights.keys().find(|class| !["true", "false"].contains(&class.as_str())) {
        return Err(Failure::usage(format!("`task.class_weights`: rankings have no class `{class}`")).hint(
            "`--set 'task.class_weights={ true = 3 }'` is the weight of relevant texts, `false` that of others",
        ));
    }
    let weight = |class: &str| class_weights::weight(values, class).map(|weight| weight.unwrap_or(1.0));
    let weights = [weight("true")?, weight("false")?];
    if loss.is_of_lists() && weights != [1.0; 2] {
        return Err(Failure::usage(format!(
            "`task.class_weights` weighs single texts, and `ranking.loss = \"{name}\"` compares them"
        ))
        .hint("`--set ranking.loss=pointwise`, or `monot5`"));
    }
    Ok(Some(RankingSettings { of: Ranking { loss, weights }, answers, list_size: size(values, "ranking.list_size") }))
}

/// The loss of lists.
pub static LOSS: Loss = Loss {
    key: "task.name",
    setting: "`task.name = \"ranking\"`",
    has_no_terms: ["a loss of rankings", "is computed without it"],
    has_dropout: true,
    keys: (
        &["data.query_column", "ranking.loss", "ranking.answers", "ranking.list_size"],
        "it is for `task.name = \"ranking\"`",
    ),
    is_chosen: |config| config.ranking.is_some(),
    check: |config| LOSS.check_alone(config),
};
