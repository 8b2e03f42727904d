//! `embedding.*`: a loss of the vectors of texts, for `task.name = "embedding"`.

use t5::Pooling;
use trainer::Sharding;
use trainer::contrastive::{Contrastive, ContrastiveLoss};

use super::task::Task;
use super::{Config, Objective, Values};
use crate::failure::{Failure, Outcome};

/// The loss in these values, if they train vectors.
///
/// # Errors
/// A size that is no number.
pub fn from_values(values: &Values) -> Outcome<Option<Contrastive>> {
    if Task::from_values(values) != Some(Task::Embedding) {
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
    }))
}

/// Refuses settings that contradict the loss.
///
/// # Errors
/// The contradiction.
pub fn check(config: &Config) -> Outcome<()> {
    let Some(of) = &config.embedding else { return Ok(()) };
    let (values, origin) = (&config.values, config.values.origin("task.name"));
    if of.loss == ContrastiveLoss::Triplet && !of.has_negatives {
        return Err(Failure::usage(
            "`embedding.loss = \"triplet\"` compares with a negative text, and no column has one",
        )
        .hint("name the column: `--set data.negative_column=negative`")
        .hint("`--set embedding.loss=mnr` takes the other texts of a step as negatives"));
    }
    let by_columns = ["data.source_template", "data.target_template", "data.source_lang", "data.target_lang"];
    if let Some(key) = by_columns.into_iter().find(|key| of.has_negatives && values.text(key).is_some()) {
        return Err(Failure::usage(format!(
            "`{key}` ({}) cannot be combined with `data.negative_column` ({}): the three texts of a row are three columns",
            values.origin(key),
            values.origin("data.negative_column")
        ))
        .hint("name the columns: `data.prompt_column`, `data.response_column` and `data.negative_column`"));
    }
    if of.loss == ContrastiveLoss::Mnr && config.train.batch_size < 2 && !of.has_negatives {
        return Err(Failure::usage(
            "`embedding.loss = \"mnr\"` compares the texts of a step, and `train.batch_size` is 1",
        )
        .hint("`--batch-size 64`: memory is that of a micro-batch, whatever the size"));
    }
    if config.preference.is_some() || config.data.objective == Some(Objective::Denoising) {
        let key = if config.preference.is_some() { "preference.loss" } else { "data.objective" };
        return Err(Failure::usage(format!("`task.name = \"embedding\"` ({origin}) has no `{key}`"))
            .hint("leave out one of them"));
    }
    let beside = [("train.z_loss", config.train.z_loss), ("train.label_smoothing", config.train.label_smoothing)];
    if let Some((key, value)) = beside.into_iter().find(|(_, value)| *value != 0.0) {
        return Err(Failure::usage(format!(
            "`{key}` ({}) is {value}, and a loss of vectors ({origin}) has no tokens",
            values.origin(key)
        ))
        .hint(format!("`--set {key}=0`")));
    }
    if config.parallel.sharding == Sharding::Weights {
        return Err(Failure::usage(format!(
            "`parallel.shard = \"weights\"` ({}) cannot be combined with `task.name = \"embedding\"` ({origin}) yet",
            values.origin("parallel.shard")
        ))
        .hint("`--set parallel.shard=gradients` divides all other state"));
    }
    Ok(())
}
