//! `model.base_precision`: the base below an adapter in codes of 8 or 4 bits. Its directory beside the run is made once.

use std::path::{Path, PathBuf};
use std::time::Instant;

use memory_policy::Bytes;
use t5::Precision;
use trainer::checkpoint::keep_quantised;

use crate::failure::Outcome;
use crate::files::run_dir::BASES;
use crate::screen::report;

/// The name of the directory of a base in this precision, inside the run's directory.
pub fn name(precision: Precision) -> &'static str {
    match precision {
        Precision::Int8 => BASES[0],
        Precision::Nf4 => BASES[1],
    }
}

/// The directory of the quantised copy of a base in the run's directory `root`. `None` if the base itself is used.
pub fn copy_of(source: &Path, wanted: Option<Precision>, root: &Path) -> Outcome<Option<PathBuf>> {
    let Some(precision) = wanted else { return Ok(None) };
    let is_quantised = t5::Config::from_file(&source.join("config.json"))?.base_precision.is_some();
    Ok((!is_quantised).then(|| root.join(name(precision))))
}

/// The name of a quantised copy for people, as in the documents: `OUTPUT/base-nf4`.
pub fn shown_name(copy: &Path) -> String {
    format!("OUTPUT/{}", copy.file_name().unwrap_or_default().display())
}

/// The directory to load the base from: `source`, or its quantised copy beside the run.
pub fn prepare(source: &Path, wanted: Option<Precision>, root: &Path) -> Outcome<PathBuf> {
    let (Some(target), Some(precision)) = (copy_of(source, wanted, root)?, wanted) else {
        return Ok(source.to_owned());
    };
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
