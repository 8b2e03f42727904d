//! `embedding.*`: a loss of the vectors of texts, for `task.name = "embedding"`.

use t5::Pooling;
use trainer::contrastive::{Contrastive, ContrastiveLoss};

use super::loss::Loss;
use super::task::Task;
use super::{Config, Values, task_of};
use crate::failure::{Failure, Outcome};

/// The loss in these values, if they train vectors.
///
/// # Errors
/// A size that is no number.
pub fn from_values(values: &Values) -> Outcome<Option<Contrastive>> {
    if task_of(values) != Some(Task::Embedding) {
        return Ok(None);
    }
    let usual = Contrastive::default();
    let size = |text: String| match text.parse::<usize>() {
        Ok(size) if size > 0 => Ok(size),
        _ => Err(Failure::usage(format!("`embedding.sizes`: expected whole numbers from 1 up, got `{text}`"))
            .hint("such as `--set embedding.sizes=768,256,64`")),
    };
    Ok(Some(Contrastive {
        loss: values.text("embedding.loss").and_then(|name| ContrastiveLoss::named(&name)).unwrap_or(usual.loss),
        temperature: values.required_number("embedding.temperature"),
        margin: values.required_number("embedding.margin"),
        pooling: values.text("embedding.pooling").and_then(|name| Pooling::named(&name)).unwrap_or(usual.pooling),
        normalizes: values.switch("embedding.normalize"),
        sizes: values.list("embedding.sizes").unwrap_or_default().into_iter().map(size).collect::<Outcome<_>>()?,
        has_negatives: values.text("data.negative_column").is_some(),
        largest_score: values.required_number("embedding.largest_score"),
    }))
}

/// The loss of vectors.
pub static LOSS: Loss = Loss {
    key: "task.name",
    setting: "`task.name = \"embedding\"`",
    has_no_terms: ["a loss of vectors", "has no tokens"],
    has_dropout: true,
    keys: (
        &[
            "data.negative_column",
            "embedding.loss",
            "embedding.temperature",
            "embedding.margin",
            "embedding.largest_score",
            "embedding.pooling",
            "embedding.normalize",
            "embedding.sizes",
        ],
        "it is for `task.name = \"embedding\"`",
    ),
    is_chosen: |config| config.embedding.is_some(),
    check,
};

fn check(config: &Config) -> Outcome<()> {
    let Some(of) = &config.embedding else { return Ok(()) };
    let values = &config.values;
    if of.loss == ContrastiveLoss::Triplet && !of.has_negatives {
        return Err(Failure::usage(
            "`embedding.loss = \"triplet\"` compares with a negative text, and no column has one",
        )
        .hint("name the column: `--set data.negative_column=negative`")
        .hint("`--set embedding.loss=mnr` takes the other texts of a step as negatives"));
    }
    if of.loss.has_scores() && of.has_negatives {
        return Err(Failure::usage(format!(
            "`embedding.loss = \"{}\"` ({}) compares two texts with their score, and `data.negative_column` ({}) names a third text",
            of.loss.name(),
            values.origin("embedding.loss"),
            values.origin("data.negative_column")
        ))
        .hint("leave out `data.negative_column`, or `--set embedding.loss=mnr`"));
    }
    let has_third = of.has_negatives || of.loss.has_scores();
    let by_columns = ["data.source_template", "data.target_template", "data.source_lang", "data.target_lang"];
    let [third, column] = match of.has_negatives {
        true => ["data.negative_column"; 2],
        false => ["embedding.loss", "data.label_column"],
    };
    if let Some(key) = by_columns.into_iter().find(|key| has_third && values.text(key).is_some()) {
        return Err(Failure::usage(format!(
            "`{key}` ({}) cannot be combined with `{third}` ({}): what a row has are three columns",
            values.origin(key),
            values.origin(third)
        ))
        .hint(format!("name the columns: `data.prompt_column`, `data.response_column` and `{column}`")));
    }
    if of.loss == ContrastiveLoss::Mnr && config.train.batch_size < 2 && !of.has_negatives {
        return Err(Failure::usage(
            "`embedding.loss = \"mnr\"` compares the texts of a step, and `train.batch_size` is 1",
        )
        .hint("`--batch-size 64`: memory is that of a micro-batch, whatever the size"));
    }
    if of.loss == ContrastiveLoss::Cosent && config.train.batch_size < 2 {
        return Err(Failure::usage(
            "`embedding.loss = \"cosent\"` compares the rows of a step, and `train.batch_size` is 1",
        )
        .hint("`--batch-size 64`: memory is that of a micro-batch, whatever the size"));
    }
    LOSS.check_alone(config)
}
