//! `train_low_mem average`: a model with the mean of several models' weights, such as the last checkpoints of a run.

use std::path::{Path, PathBuf};
use std::time::Instant;

use memory_policy::{Bytes, Probe, SystemProbe, counted, plural};
use serde_json::json;
use trainer::checkpoint::export_average;

use crate::cli::export_flags::AverageArgs;
use crate::commands::merge::check_output;
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::model::model_directory;
use crate::screen::report;

/// Averages models.
pub fn average(flags: &AverageArgs) -> Outcome<()> {
    let began = Instant::now();
    if flags.models.len() < 2 {
        return Err(Failure::usage("average: one model, expected at least two")
            .hint("for example `train_low_mem average runs/a/checkpoints/* --output averaged`"));
    }
    let models = flags.models.iter().map(|model| find(model)).collect::<Outcome<Vec<PathBuf>>>()?;
    let inputs: Vec<&PathBuf> = models.iter().collect();
    check_output(&flags.output, flags.result.force, &inputs.iter().map(|path| path.as_path()).collect::<Vec<_>>())?;
    check_tokenizers(&models)?;
    outputs::make_directory_of(&flags.output)?;
    let averaged = export_average(&models, &flags.output)?;
    let peak = SystemProbe::new().snapshot()?.peak_rss;
    let (output, seconds) = (flags.output.display().to_string(), began.elapsed().as_secs_f64());
    if flags.result.json {
        let json = json!({
            "output": output, "models": models.iter().map(|path| path.display().to_string()).collect::<Vec<_>>(),
            "parameters": averaged.parameters, "bytes": averaged.bytes, "seconds": seconds, "peak_rss_bytes": peak.0,
        });
        return report::result(&format!("{json}\n"));
    }
    let (count, parameters) = (plural(models.len() as u64, "model"), counted(averaged.parameters));
    report::result(&format!("{output}: the mean of {count}, {parameters} parameters, {}\n", Bytes(averaged.bytes)))?;
    report::note(&format!("{seconds:.1} s, peak {peak}"));
    Ok(())
}

/// The directory of a model. An adapter is none.
fn find(named: &Path) -> Outcome<PathBuf> {
    if named.join("adapter_config.json").is_file() {
        return Err(Failure::usage(format!(
            "{}: an adapter: the mean of its factors is not its mean",
            named.display()
        ))
        .hint("`train_low_mem merge --adapter DIR --output DIR` makes a model of each"));
    }
    model_directory::find(named)
}

/// Refuses models whose entries of the vocabulary are others.
fn check_tokenizers(models: &[PathBuf]) -> Outcome<()> {
    let mut first = None;
    for model in models.iter().filter(|model| model_directory::tokenizer_path(model).is_ok()) {
        let fingerprint = model_directory::tokenizer(model)?.fingerprint().to_owned();
        let (of, expected) = first.get_or_insert_with(|| (model, fingerprint.clone()));
        if *expected != fingerprint {
            return Err(Failure::unusable(format!(
                "{}: its tokenizer is another one than that of {}",
                model.display(),
                of.display()
            ))
            .hint("average checkpoints of one run, or models that were tuned from the same one"));
        }
    }
    Ok(())
}
