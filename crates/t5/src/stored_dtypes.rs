//! The dtypes of a model's matrices in its files. Weights that are not trained keep them, in memory and where they lie.
//!
//! Invariant: a weight has the same values in its stored dtype as in the model's, so it gives the same bits.

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
