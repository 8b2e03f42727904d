//! The corpus of a parser: `fuzz/corpus/PARSER/*`, and the files of the repository that the parser names.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::Parser;

/// Reads the inputs of a parser in the repository at `root`, in the order of their names.
///
/// # Errors
/// I/O errors, and a corpus without inputs: then nothing would be tried.
pub fn corpus(root: &Path, parser: &Parser) -> io::Result<Vec<Vec<u8>>> {
    let mut paths = files(&root.join("fuzz/corpus").join(parser.name), "")?;
    for (place, ending) in parser.also {
        paths.extend(files(&root.join(place), ending)?);
    }
    if paths.is_empty() {
        return Err(io::Error::other(format!("the parser {} has no corpus", parser.name)));
    }
    paths.iter().map(fs::read).collect()
}

/// Returns `place` itself if it is a file, else the files below it whose names end with `ending`.
fn files(place: &Path, ending: &str) -> io::Result<Vec<PathBuf>> {
    if place.is_file() {
        return Ok(vec![place.to_owned()]);
    }
    let entries = match fs::read_dir(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let matches = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.ends_with(ending));
        if path.is_dir() {
            paths.extend(files(&path, ending)?);
        } else if matches {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PARSERS;

    #[test]
    fn every_parser_has_a_corpus_and_a_fuzz_target_and_no_other_target_is_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let manifest = fs::read_to_string(root.join("fuzz/Cargo.toml")).unwrap();
        for parser in PARSERS {
            assert!(!corpus(&root, parser).unwrap().is_empty(), "{}", parser.name);
            let target = fs::read_to_string(root.join(format!("fuzz/fuzz_targets/{}.rs", parser.name))).unwrap();
            assert!(target.contains(&format!("fuzz(\"{}\", input)", parser.name)), "{target}");
            assert!(manifest.contains(&format!("path = \"fuzz_targets/{}.rs\"", parser.name)), "{}", parser.name);
        }
        assert_eq!(manifest.matches("[[bin]]").count(), PARSERS.len());
    }
}
