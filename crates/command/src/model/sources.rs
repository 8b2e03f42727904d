//! The files beside a run on which its result depends, and which its checkpoints do not hold: the weights below an adapter, their
//! quantised copy in the run's directory, and those of a frozen model beside the trained one.
//!
//! They are a part of the run's identity, by their digests. So a run never goes on beside other weights unnoticed, and one whose files were
//! only moved does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use trainer::{FileDigests, digests_of};

use crate::config::Config;
use crate::failure::Outcome;
use crate::model::base_digests::OF_MODEL;
pub use crate::model::base_digests::STAMPS;
use crate::model::{base, model_directory};

/// The part of the identity, as `--allow-changed` names it.
pub const PART: &str = "base";

/// Digests by source, such as `model.init_from`, and then by file.
#[derive(Clone, Debug, Default)]
pub struct Sources(BTreeMap<String, FileDigests>);

impl Sources {
    /// The sources of a run in the directory `root`, whose model is at `init_from`. Files that have not changed since `saved`, the identity
    /// in a checkpoint, are not read. A quantised copy that is not there will be made again, and must then be the one in `saved`.
    pub fn read(config: &Config, init_from: Option<&Path>, root: &Path, saved: Option<&Value>) -> Outcome<Sources> {
        let known = saved.and_then(|saved| serde_json::from_value(saved[STAMPS].clone()).ok());
        let known: BTreeMap<String, FileDigests> = known.unwrap_or_default();
        let mut sources = BTreeMap::new();
        for (name, files) in rows(config, init_from, root)? {
            let before = known.get(&name).cloned().unwrap_or_default();
            let digests = files.map_or(Ok(before.clone()), |files| digests_of(&files, &before))?;
            sources.insert(name, digests);
        }
        Ok(Sources(sources))
    }

    /// The digests of a source's files, one after the other.
    pub fn digests(&self, source: &str) -> String {
        let files = self.0.get(source).into_iter().flatten();
        files.map(|(name, digest)| format!("{name} {} ", digest.sha256)).collect()
    }

    /// Adds the sources to an identity.
    pub fn add_to(&self, identity: &mut Value) {
        let digests = |files: &FileDigests| -> Value {
            files
                .iter()
                .map(|(name, digest)| (name.clone(), json!(digest.sha256)))
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        if !self.0.is_empty() {
            let sources = self.0.iter().map(|(name, files)| (name.clone(), digests(files)));
            identity[PART] = sources.collect::<serde_json::Map<_, _>>().into();
            identity[STAMPS] = json!(self.0);
        }
    }
}

/// The name and the files of each source; no files where they are still to be made. Another source is one row more.
fn rows(config: &Config, init_from: Option<&Path>, root: &Path) -> Outcome<Vec<(String, Option<Vec<PathBuf>>)>> {
    let mut rows = Vec::new();
    if let Some(of) = &config.frozen {
        rows.push((of.key.to_owned(), Some(t5::weight_files(&model_directory::find(&of.named)?)?)));
    }
    let (Some(_), Some(model)) = (&config.lora, init_from) else { return Ok(rows) };
    rows.push((OF_MODEL.to_owned(), Some(t5::weight_files(model)?)));
    if let Some(copy) = base::copy_of(model, config.model.base_precision, root)? {
        let files = t5::weight_files(&copy).ok().map(|files| [files, vec![copy.join("config.json")]].concat());
        rows.push((base::shown_name(&copy), files.filter(|files| files.iter().all(|file| file.is_file()))));
    }
    Ok(rows)
}
