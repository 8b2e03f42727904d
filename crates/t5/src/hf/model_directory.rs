//! [`ModelDirectory`]: which model is wanted of a directory.

use std::path::Path;

use crate::head::Head;

/// A directory of Hugging Face files, and the model that is wanted of it.
#[derive(Clone, Copy, Debug)]
pub struct ModelDirectory<'a> {
    /// The directory.
    pub path: &'a Path,
    /// The part above the stacks; `None`: the one that the directory names. Of another one, the stacks are taken, and a classifier that the
    /// files do not have is made.
    pub head: Option<&'a Head>,
    /// The seed of such a classifier.
    pub seed: u64,
}

impl<'a, P: AsRef<Path> + ?Sized> From<&'a P> for ModelDirectory<'a> {
    fn from(path: &'a P) -> Self {
        ModelDirectory { path: path.as_ref(), head: None, seed: 0 }
    }
}
