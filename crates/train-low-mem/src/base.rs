//! `model.base_precision`: the base below an adapter in codes of 8 or 4 bits, in a directory beside the run that is made once.

use std::path::{Path, PathBuf};
use std::time::Instant;

use memory_policy::Bytes;
use t5::Precision;
use trainer::checkpoint::keep_quantised;

use crate::failure::{Failure, Outcome};
use crate::report;
use crate::run_dir::BASES;

fn name(precision: Precision) -> &'static str {
    match precision {
        Precision::Int8 => BASES[0],
        Precision::Nf4 => BASES[1],
    }
}

/// Sets the precision of a model's base to the one that is asked for, which a quantised model must have already, and refuses to train
/// weights that are quantised.
pub fn set_precision(model: &mut t5::Config, wanted: Option<Precision>, origin: Option<&Path>) -> Outcome<()> {
    let shown = origin.map_or_else(|| "the model".to_owned(), |path| path.display().to_string());
    match (model.base_precision, wanted) {
        (Some(has), Some(wanted)) if has != wanted => Err(Failure::usage(format!(
            "`model.base_precision` is {}, and the weights of {shown} are in {} already",
            wanted.name(),
            has.name()
        ))
        .hint("leave out `model.base_precision`, or name the model that they were made from")),
        (None, Some(wanted)) => {
            model.base_precision = Some(wanted);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Refuses a run that would train quantised weights.
pub fn check_trainable(model: &t5::Config, origin: Option<&Path>) -> Outcome<()> {
    let (Some(precision), None) = (model.base_precision, &model.lora) else { return Ok(()) };
    let shown = origin.map_or_else(|| "the model".to_owned(), |path| path.display().to_string());
    Err(Failure::usage(format!("the weights of {shown} are in {} and cannot be trained", precision.name()))
        .hint("train an adapter beside them: `--lora`")
        .hint("or name the model that they were made from"))
}

/// The directory to load the base from: `source`, or where it is to be quantised, its copy beside the run.
pub fn prepare(source: &Path, wanted: Option<Precision>, root: &Path) -> Outcome<PathBuf> {
    let is_quantised =
        || -> Outcome<bool> { Ok(t5::Config::from_file(&source.join("config.json"))?.base_precision.is_some()) };
    let Some(precision) = wanted else { return Ok(source.to_owned()) };
    if is_quantised()? {
        return Ok(source.to_owned());
    }
    let target = root.join(name(precision));
    let began = Instant::now();
    if let Some(weights) = keep_quantised(source, precision, &target)? {
        let (bytes, seconds) = (Bytes(weights.bytes), began.elapsed().as_secs_f64());
        report::note(&format!(
            "{}: {bytes}, {} weights in {}, {seconds:.1} s",
            target.display(),
            weights.quantised,
            precision.name()
        ));
    }
    Ok(target)
}
