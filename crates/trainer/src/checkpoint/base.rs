//! The quantised base of an adapter's run: a model directory beside the run, made once from the model that the run names.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::export::export_quantised_as;
use crate::error::{Error, Result};
use crate::files::hexadecimal;

/// The key in the weights' header under which the fingerprint of the source model is stored.
const SOURCE: &str = "source_sha256";

/// Of each file, `READ_BYTES` are read at each of `PLACES` evenly spaced places, including its start and its end. More would amount to
/// reading the model once more at the start of a run.
const PLACES: u64 = 64;
const READ_BYTES: u64 = 16 << 10;

/// Makes `target` the quantised model of `source`. `None` if it already is, by the fingerprint of the source: the lengths of its files
/// and their contents at some places.
///
/// # Errors
/// As [`super::export_quantised`]; a source that cannot be read.
/// Those of [`super::export_quantised`]; a source that cannot be read.
pub fn keep_quantised(source: &Path, precision: t5::Precision, target: &Path) -> Result<Option<t5::QuantisedWeights>> {
    let fingerprint = fingerprint(source)?;
    let weights = target.join("model.safetensors");
    let made_from = t5::safetensors::Reader::open(&weights).ok();
    let is_there = made_from.is_some_and(|reader| reader.metadata(SOURCE) == Some(&fingerprint));
    let has = t5::Config::from_file(&target.join("config.json")).ok().and_then(|config| config.base_precision);
    if is_there && has == Some(precision) {
        return Ok(None);
    }
    export_quantised_as(source, precision, target, &[(SOURCE, &fingerprint)]).map(Some)
}

/// The fingerprint of the files in a model directory that its quantised weights depend on.
fn fingerprint(source: &Path) -> Result<String> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| Error::io("read", &path, error)
    };
    let mut files: Vec<PathBuf> = Vec::new();
    for path in regular_file::list(source).map_err(failed(source))? {
        let path = path.map_err(failed(source))?;
        // Files about answers or the tokenizer change no weight.
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_of_model = name == "config.json"
            || [".safetensors", ".bin", ".index.json"].iter().any(|ending| name.ends_with(ending));
        if is_of_model && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    let mut hash = Sha256::new();
    for path in files {
        let mut file = regular_file::open(&path).map_err(failed(&path))?;
        add(&mut hash, &path, &mut file).map_err(failed(&path))?;
    }
    Ok(hexadecimal(&hash.finalize()))
}

fn add(hash: &mut Sha256, path: &Path, file: &mut File) -> io::Result<()> {
    let length = file.metadata()?.len();
    hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
    hash.update(length.to_le_bytes());
    let mut bytes = vec![0; length.min(READ_BYTES) as usize];
    let last = length - bytes.len() as u64;
    // A short file is read completely, and parts of it more than once.
    for place in 0..PLACES {
        file.seek(SeekFrom::Start(last * place / (PLACES - 1)))?;
        file.read_exact(&mut bytes)?;
        hash.update(&bytes);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use candle_core::DType;

    use super::*;
    use crate::test_device::device;

    #[test]
    fn a_base_is_made_once_and_again_where_its_model_or_its_precision_changed() {
        let directory = tempfile::tempdir().unwrap();
        let (source, target) = (directory.path().join("model"), directory.path().join("base"));
        let config = t5::Config {
            vocab_size: 300,
            d_model: 64,
            d_ff: 64,
            num_layers: 1,
            num_decoder_layers: 1,
            ..t5::Config::default()
        };
        let write = |seed| t5::T5::init(&config, seed, DType::F32, &device()).unwrap().save(&source).unwrap();
        let made = |precision| keep_quantised(&source, precision, &target).unwrap().is_some();
        write(1);
        assert!(made(t5::Precision::Nf4));
        assert!(!made(t5::Precision::Nf4));
        assert!(made(t5::Precision::Int8));
        assert!(!made(t5::Precision::Int8));
        fs::write(source.join("generation_config.json"), "{\"num_beams\": 3}").unwrap();
        assert!(!made(t5::Precision::Int8), "the settings of answers change no weight");
        // The same lengths, other weights.
        write(2);
        assert!(made(t5::Precision::Int8));
        // A truncated file is no base.
        let weights = target.join("model.safetensors");
        let length = fs::metadata(&weights).unwrap().len();
        File::options().write(true).open(&weights).unwrap().set_len(length - 1).unwrap();
        assert!(made(t5::Precision::Int8));
        assert_eq!(fs::metadata(&weights).unwrap().len(), length);
        assert!(!made(t5::Precision::Int8));
    }
}
