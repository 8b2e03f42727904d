//! A teacher's largest logits in a file of the run: whether they are kept there, and the file.

use std::path::Path;

use planner::SamplesRead;
use trainer::{KeptLogits, KeptLogitsOf};

use crate::config::Config;
use crate::failure::Outcome;
use crate::files::run_dir;
use crate::machine::processes::OptionalGroup;
use crate::model::sources::Sources;
use crate::run::open::Opened;
use crate::run::options;

/// The file that the run would keep, but for what its logits depend on; `None` if the run needs all logits.
fn file(config: &Config, opened: &Opened) -> Option<(KeptLogitsOf, SamplesRead)> {
    let count = config.distillation?.top_k?;
    // Other objectives make other samples of a row in each epoch.
    if !opened.reading.objective.is_of_texts() {
        return None;
    }
    let all = options::rows_read(config, opened.epoch_samples()).samples;
    let different = opened.epoch_samples().min(all);
    let dtype = options::trainer_options(config, &opened.model, 1).precision.activations();
    let of = KeptLogitsOf { count, dtype, depends_on: String::new(), samples: different };
    Some((of, SamplesRead { different, all }))
}

/// The bytes of the file, if keeping it costs less than the teacher's passes that it spares.
pub fn planned(config: &Config, opened: &Opened) -> Option<planner::KeptLogits> {
    let ((of, read), teacher) = (file(config, opened)?, opened.frozen.as_ref()?);
    let options = options::trainer_options(config, &opened.model, 1);
    let longest = (config.data.max_source_tokens, config.data.max_target_tokens);
    // Opening the teacher refused a config that is not a T5's.
    planner::kept_logits(&teacher.config, &options, &of, (read, longest), config.memory.disk_writes).ok()?
}

/// Opens the file in the directory of the run, if it is planned.
pub fn open(
    (config, opened, sources): (&Config, &Opened, &Sources),
    root: &Path,
    together: OptionalGroup,
) -> Outcome<Option<KeptLogits>> {
    let (Some(_), Some((of, _)), Some(teacher)) = (planned(config, opened), file(config, opened), &opened.frozen)
    else {
        return Ok(None);
    };
    // The debug form has every setting of the model, and is not shown.
    let depends_on = format!("{:?} {}", teacher.config, sources.digests("distill.teacher"));
    let of = KeptLogitsOf { depends_on, ..of };
    let writes = together.0.is_none_or(|group| group.is_first());
    let open = || Ok(KeptLogits::open(&root.join(run_dir::TEACHER_LOGITS), of, writes)?);
    together.main_process_first(open).map(Some)
}
