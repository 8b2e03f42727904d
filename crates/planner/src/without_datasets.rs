//! Rows where this crate is built without `datasets`: there are none.

use std::convert::Infallible;
use std::marker::PhantomData;

use crate::FeedingChoice;
use crate::lever::Pins;
use crate::reading_bytes::Reading;

/// Rows of an open dataset.
#[derive(Clone, Copy)]
pub struct Rows<'a>(Infallible, PhantomData<&'a ()>);

impl Rows<'_> {
    pub(crate) fn choices(&self, _: &Pins) -> Vec<FeedingChoice> {
        match self.0 {}
    }
}

/// The rows that an evaluation reads.
#[derive(Clone)]
pub struct EvaluatedRows<'a>(Infallible, PhantomData<&'a ()>);

impl EvaluatedRows<'_> {
    /// How many rows there are.
    pub fn count(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn bytes(&self, _: usize) -> Reading {
        match self.0 {}
    }
}
