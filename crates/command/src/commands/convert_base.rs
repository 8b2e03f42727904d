//! `train_low_mem convert-base`: a model with quantised weights.

use std::time::Instant;

use memory_policy::{Bytes, Probe, SystemProbe};
use serde_json::json;
use trainer::checkpoint::export_quantised;

use crate::cli::export_flags::ConvertBaseArgs;
use crate::commands::merge::check_output;
use crate::failure::Outcome;
use crate::files::outputs;
use crate::model::model_directory;
use crate::screen::report;

/// Quantises a model.
pub fn convert_base(flags: &ConvertBaseArgs) -> Outcome<()> {
    let began = Instant::now();
    let model = model_directory::find(&flags.model)?;
    check_output(&flags.output, flags.result.force, &[&model])?;
    outputs::make_directory_of(&flags.output)?;
    let precision: t5::Precision = flags.precision.into();
    let weights = export_quantised(&model, precision, &flags.output)?;
    let peak = SystemProbe::new().snapshot()?.peak_rss;
    let (output, seconds) = (flags.output.display().to_string(), began.elapsed().as_secs_f64());
    if flags.result.json {
        let json = json!({
            "output": output,
            "model": model.display().to_string(),
            "precision": precision.name(),
            "quantised": weights.quantised,
            "kept": weights.kept,
            "bytes": weights.bytes,
            "seconds": seconds,
            "peak_rss_bytes": peak.0,
        });
        return report::result(&format!("{json}\n"));
    }
    let (name, bytes) = (precision.name(), Bytes(weights.bytes));
    let (quantised, kept) = (weights.quantised, weights.kept);
    report::result(&format!("{output}: {bytes}, {quantised} weights in {name}, {kept} as they were\n"))?;
    report::note(&format!("{seconds:.1} s, peak {peak}"));
    Ok(())
}
