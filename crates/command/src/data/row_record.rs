//! The record of converted rows: the sources and settings that they were made from, and the files that were made.
//!
//! A record lists up to [`MAX_LISTED`] sources. Of more it has the number and two digests, so that it and its event stay small.

use std::path::{Path, PathBuf};

use row_files::{Conversion, Digested, Share};
use serde_json::{Value, json};

use crate::config::Config;
use crate::failure::{Failure, Outcome};

/// The version of the conversion. After a change of the version, files are converted again.
const FORMAT: u64 = 2;
/// A longer record is invalid.
const MAX_RECORD_BYTES: u64 = 64 << 20;
/// The end of a converted file, which its record has a digest of: the footer and more.
const TAIL_BYTES: u64 = 1 << 20;
/// Files that records and events list one by one.
pub const MAX_LISTED: usize = 1000;

/// All settings that the result depends on, besides the sources.
pub fn settings(conversion: &Conversion, columns: &[String], config: &Config, split: Option<Share>) -> Value {
    json!({
        "format": FORMAT,
        "columns": columns,
        "encoding": config.data.encoding,
        "quotes": config.data.has_quotes,
        "texts": listed(conversion.sources.iter().map(|(_, kind, pairing)| pairing.of_classes(&kind.classes))),
        // The debug form is part of the rows' identity, and is not shown.
        "bad_rows": format!("{:?}", config.data.bad_rows).to_lowercase(),
        "validation": split.map(|share| match share {
            Share::Of(share) => json!({"share": share, "seed": config.run.seed}),
            Share::Rows(rows) => json!({"rows": rows, "seed": config.run.seed}),
        }),
    })
}

/// A record of this program, even of an unfinished conversion.
pub fn read(path: &Path) -> Option<Value> {
    let record: Value = serde_json::from_slice(&regular_file::read(path, MAX_RECORD_BYTES).ok()?).ok()?;
    record["settings"]["format"].is_u64().then_some(record)
}

/// The sources, with digests of those that were read whole; the others are read for theirs.
pub fn sources(originals: &[PathBuf], digests: &[Option<Digested>]) -> Outcome<Value> {
    if originals.len() > MAX_LISTED {
        let contents = contents(originals, digests)?;
        return Ok(json!({"files": originals.len(), "stats_sha256": stats(originals), "sha256": contents}));
    }
    let source = |(path, digest): (&PathBuf, &Option<Digested>)| -> Outcome<Value> {
        let digest = digest_of(path, digest.as_ref())?;
        let file = path.display().to_string();
        Ok(json!({"file": file, "stat": stat(path), "bytes": digest.bytes, "sha256": digest.sha256}))
    };
    originals.iter().zip(digests).map(source).collect()
}

/// The files that were made.
pub fn outputs(paths: &[&Path]) -> Outcome<Value> {
    let output = |path: &&Path| {
        let (bytes, sha256) = tail(path).map_err(|error| Failure::io("read it again", path, &error))?;
        let file = path.file_name().map(|name| name.to_string_lossy());
        Ok(json!({"file": file, "bytes": bytes, "tail_sha256": sha256}))
    };
    paths.iter().map(output).collect()
}

/// Strings, or the digest of more than [`MAX_LISTED`].
fn listed(items: impl ExactSizeIterator<Item = String>) -> Value {
    if items.len() > MAX_LISTED { json!(chained(items)) } else { items.collect::<Vec<_>>().into() }
}

/// A digest of any number of strings, each in its place.
fn chained(items: impl Iterator<Item = String>) -> String {
    items.fold(String::new(), |so_far, item| row_files::sha256(format!("{so_far} {item}").as_bytes()))
}

/// The digest of the names of these files, with sizes, inodes and times.
fn stats(paths: &[PathBuf]) -> String {
    chained(paths.iter().map(|path| format!("{} {}", path.display(), stat(path))))
}

/// The digest of the contents of these files.
fn contents(paths: &[PathBuf], known: &[Option<Digested>]) -> Outcome<String> {
    let mut so_far = String::new();
    for (number, path) in paths.iter().enumerate() {
        let digest = digest_of(path, known.get(number).and_then(Option::as_ref))?;
        so_far = chained([so_far, digest.sha256].into_iter());
    }
    Ok(so_far)
}

fn digest_of(path: &Path, known: Option<&Digested>) -> Outcome<Digested> {
    Ok(known.map_or_else(|| row_files::digest(path), |digest| Ok(digest.clone()))?)
}

/// The length of a file, and the digest of its end, where its footer is.
fn tail(path: &Path) -> std::io::Result<(u64, String)> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = regular_file::open(path)?;
    let bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(bytes.saturating_sub(TAIL_BYTES)))?;
    let mut end = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut end)?;
    Ok((bytes, row_files::sha256(&end)))
}

/// Whether the converted files are those of the record. Checksums of their pages are compared when the pages are read.
pub fn holds(outputs: &Value, train: &Path, validation: Option<&Path>) -> bool {
    let paths: Vec<&Path> = [Some(train), validation].into_iter().flatten().collect();
    let Some(outputs) = outputs.as_array().filter(|outputs| outputs.len() == paths.len()) else { return false };
    outputs.iter().zip(paths).all(|(output, path)| {
        tail(path).is_ok_and(|(bytes, sha256)| {
            output["bytes"].as_u64() == Some(bytes) && output["tail_sha256"].as_str() == Some(&sha256)
        })
    })
}

/// Whether the sources are unchanged since they were converted.
pub fn are_the_same(originals: &[PathBuf], sources: &Value) -> Outcome<bool> {
    if sources["files"].as_u64() == Some(originals.len() as u64) {
        let is = |name: &str, digest: String| sources[name].as_str() == Some(&digest);
        return Ok(is("stats_sha256", stats(originals)) || is("sha256", contents(originals, &[])?));
    }
    let Some(sources) = sources.as_array().filter(|sources| sources.len() == originals.len()) else {
        return Ok(false);
    };
    for (path, source) in originals.iter().zip(sources) {
        if source["stat"] == stat(path) {
            continue;
        }
        let Some(sha256) = source["sha256"].as_str() else { return Ok(false) };
        let bytes = regular_file::metadata(path).map(|file| file.len()).ok();
        if source["bytes"].as_u64() != bytes || row_files::digest(path)?.sha256 != sha256 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Size, inode and times: unchanged for a file that was not written to.
fn stat(path: &Path) -> Value {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        regular_file::metadata(path).map_or(Value::Null, |file| {
            json!([
                file.dev(),
                file.ino(),
                file.size(),
                file.mtime(),
                file.mtime_nsec(),
                file.ctime(),
                file.ctime_nsec()
            ])
        })
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        json!({"unknown": true})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_many_sources_is_short_and_notices_each_change_of_bytes() {
        let directory = tempfile::tempdir().unwrap();
        for count in [3, MAX_LISTED + 1] {
            let paths: Vec<PathBuf> = (0..count).map(|number| directory.path().join(number.to_string())).collect();
            for path in &paths {
                std::fs::write(path, path.as_os_str().as_encoded_bytes()).unwrap();
            }
            let record = sources(&paths, &vec![None; count]).unwrap();
            assert!(record.to_string().len() < 1000, "{record}");
            assert!(are_the_same(&paths, &record).unwrap());
            assert!(!are_the_same(&paths[1..], &record).unwrap());
            let last = paths.last().unwrap();
            let bytes = std::fs::read(last).unwrap();
            // Other times and another inode, and the same bytes.
            std::fs::rename(last, directory.path().join("moved")).unwrap();
            std::fs::write(last, &bytes).unwrap();
            assert!(are_the_same(&paths, &record).unwrap());
            std::fs::write(last, "other").unwrap();
            assert!(!are_the_same(&paths, &record).unwrap());
            let exchanged = [&paths[1..], &paths[..1]].concat();
            assert!(!are_the_same(&exchanged, &record).unwrap());
        }
    }
}
