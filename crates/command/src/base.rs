//! `model.base_precision`: the base below an adapter in codes of 8 or 4 bits. Its directory beside the run is made once.

use std::path::{Path, PathBuf};
use std::time::Instant;

use memory_policy::Bytes;
use t5::Precision;
use trainer::checkpoint::keep_quantised;

use crate::failure::Outcome;
use crate::report;
use crate::run_dir::BASES;

/// The name of the directory of a base in this precision, inside the run's directory.
pub fn name(precision: Precision) -> &'static str {
    match precision {
        Precision::Int8 => BASES[0],
        Precision::Nf4 => BASES[1],
    }
}

/// The directory to load the base from: `source`, or its quantised copy beside the run.
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
