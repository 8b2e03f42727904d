//! The embedded default: a tiny T5 and sample data inside the program. With them a fresh installation can demonstrate training in any
//! directory.
//!
//! The config is `configs/tiny.toml`, and the files are those of `data/`. They are written beside the run, so that users can look at them
//! and `--keep-training` finds them again.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use toml::Value;

use crate::config::{Origin, Values, paths};
use crate::failure::{Failure, Outcome};

/// The origin that values of the embedded config have.
pub const EMBEDDED: &str = "embedded default";
/// The directory of the embedded files, below the output directory.
pub const DIRECTORY: &str = "sample-data";

const CONFIG: &str = include_str!("../../../../configs/tiny.toml");
const FILES: [(&str, &[u8]); 3] = [
    ("sample-train.parquet", include_bytes!("../../../../data/sample-train.parquet")),
    ("sample-validation.parquet", include_bytes!("../../../../data/sample-validation.parquet")),
    ("sample-tokenizer.json", include_bytes!("../../../../data/sample-tokenizer.json")),
];

/// The names of the directory of the embedded files and of the files in it.
pub fn names() -> impl Iterator<Item = &'static str> {
    std::iter::once(DIRECTORY).chain(FILES.iter().map(|(name, _)| *name))
}

/// Sets the values of the embedded config.
pub fn apply(values: &mut Values) -> Outcome<()> {
    values.apply_file(EMBEDDED, CONFIG)
}

/// Whether the embedded config applies. It is a demo, and its settings suit its own model and rows. With a model or data of the user's, the
/// defaults of the table of keys apply.
pub fn is_wanted(typed: &Values) -> bool {
    ["run.finetune", "model.config", "model.init_from", "data.train"]
        .iter()
        .all(|key| *typed.origin(key) == Origin::Default)
}

/// Writes the embedded files that the config still needs below `output`, and sets their paths in the config. An existing file with the same
/// content is left alone; a file with other content is never replaced. `made` is called with each new file and directory.
pub fn place(values: &mut Values, output: &Path, made: &mut impl FnMut(PathBuf)) -> Outcome<()> {
    for key in ["data.train", "data.validation", "data.tokenizer"] {
        let setting = values.setting(key);
        let origin = setting.origin.clone();
        if !matches!(&origin, Origin::File(file, _) if file == EMBEDDED) {
            continue;
        }
        let placed = match &setting.value {
            Value::Array(names) => {
                let names: Vec<Value> = names
                    .iter()
                    .filter_map(Value::as_str)
                    .map(|name| place_file(name, output, made))
                    .collect::<Outcome<_>>()?;
                Value::Array(names)
            }
            Value::String(name) if name != "auto" => place_file(name, output, made)?,
            other => other.clone(),
        };
        values.set(key, placed, origin)?;
    }
    Ok(())
}

/// Writes all sample files below `output`.
pub fn place_all(output: &Path) -> Outcome<()> {
    FILES.iter().try_for_each(|(name, _)| place_file(name, output, &mut |_| ()).map(drop))
}

fn place_file(name: &str, output: &Path, made: &mut impl FnMut(PathBuf)) -> Outcome<Value> {
    let file_name = name.rsplit('/').next().unwrap_or(name);
    let (_, bytes) = FILES
        .iter()
        .find(|(embedded, _)| *embedded == file_name)
        .ok_or_else(|| Failure::internal(format!("configs/tiny.toml names `{name}`, which is not embedded")))?;
    let directory = output.join(DIRECTORY);
    let path = directory.join(file_name);
    match regular_file::read(&path, bytes.len() as u64) {
        Ok(present) if present == *bytes => return Ok(Value::String(paths::to_text(path.as_os_str()))),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) if error.kind() != ErrorKind::FileTooLarge => return Err(Failure::io("read it", &path, &error)),
        _ => {
            return Err(Failure::usage(format!(
                "{}: expected the embedded sample data, found other content",
                path.display()
            ))
            .hint("move the file away, or choose another `--output`"));
        }
    }
    durable_files::create_directories(&directory)?.into_iter().for_each(&mut *made);
    durable_files::write_atomic(&path, bytes)?;
    made(path.clone());
    Ok(Value::String(paths::to_text(path.as_os_str())))
}
