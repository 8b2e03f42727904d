//! [`ModelDirectory`]: which model is wanted of a directory, and [`Loaded`]: the model that was read.

use std::path::Path;
use std::rc::Rc;

use super::carried::Carried;
use crate::config::Config;
use crate::head::Head;
use crate::parameters::Parameter;
use crate::weight_file::WeightFile;

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

/// A model that was read from a directory.
pub(crate) struct Loaded {
    pub config: Config,
    pub parameters: Vec<Parameter>,
    /// The file of large weights, if there is one.
    pub file: Option<WeightFile>,
    /// Tensors that no text uses.
    pub carried: Option<Rc<Carried>>,
}
