//! The dtypes in which a model's files have its matrices: weights that nobody trains stay in them, in memory and where they lie.
//!
//! Invariant: a weight in its stored dtype has the values that it has in the model's, so it gives the same bits.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType;

/// The dtype of each matrix, by the name of its parameter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredDtypes {
    by_name: Arc<BTreeMap<String, DType>>,
}

impl StoredDtypes {
    pub(crate) fn new(dtypes: impl Iterator<Item = (String, DType)>) -> Self {
        StoredDtypes { by_name: Arc::new(dtypes.collect()) }
    }

    /// The dtype that a parameter of a model of `model` can stay in.
    pub(crate) fn kept(&self, parameter: &str, model: DType) -> Option<DType> {
        let stored = *self.by_name.get(parameter)?;
        (model == DType::F32 && matches!(stored, DType::F16 | DType::BF16)).then_some(stored)
    }
}
