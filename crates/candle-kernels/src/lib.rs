//! The kernels for NVIDIA's cards that candle-core 0.11.1 launches by name, in place of the crate of this name on crates.io.
//!
//! That crate takes nvcc 12 minutes of processor time. Nearly all of it is for quantised and mixture-of-experts products, which this
//! project never calls. The kernels here are those of `cuda-kernels`, whose tests compare them with candle's own operations on every
//! machine.
//!
//! Invariants
//!
//! - The names are those that candle-core uses, and nothing else is public.
//! - A kernel that is missing here is an error of the driver, which finds no function of its name.
//! - A launcher that is missing here panics ([`ffi`]).

pub mod ffi;

use cuda_kernels::ptx;

/// Groups of kernels, as candle divides them.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Id {
    /// x * a + b.
    Affine,
    /// Operations on two elements, and comparisons.
    Binary,
    /// Conversions between dtypes.
    Cast,
    /// Convolutions and pools: none.
    Conv,
    /// Setting values, and copies in two dimensions.
    Fill,
    /// Elements by number.
    Indexing,
    /// Quantised products: none.
    Quantized,
    /// Sums and extremes.
    Reduce,
    /// Sorting: none.
    Sort,
    /// Selection by a condition.
    Ternary,
    /// Functions of an element.
    Unary,
}

/// Every group: candle has a place for each of these modules.
pub const ALL_IDS: [Id; 11] = [
    Id::Affine,
    Id::Binary,
    Id::Cast,
    Id::Conv,
    Id::Fill,
    Id::Indexing,
    Id::Quantized,
    Id::Reduce,
    Id::Sort,
    Id::Ternary,
    Id::Unary,
];

/// A text that a driver loads, and the index at which candle keeps the loaded module.
#[derive(Debug)]
pub struct Module {
    index: usize,
    ptx: &'static str,
}

impl Module {
    const fn new(id: Id, ptx: &'static str) -> Self {
        Self { index: id as usize, ptx }
    }

    /// The index, below the length of [`ALL_IDS`]. Groups with the same text share an index, so that the text is loaded once.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The text.
    pub fn ptx(&self) -> &'static str {
        self.ptx
    }
}

/// A module without functions, which every card can load.
const EMPTY: &str = ".version 7.0\n.target sm_52\n.address_size 64\n";

/// [`Id::Affine`]
pub const AFFINE: Module = Module::new(Id::Affine, ptx::ELEMENTWISE);
/// [`Id::Binary`]
pub const BINARY: Module = AFFINE;
/// [`Id::Cast`]
pub const CAST: Module = AFFINE;
/// [`Id::Conv`]
pub const CONV: Module = Module::new(Id::Conv, EMPTY);
/// [`Id::Fill`]
pub const FILL: Module = AFFINE;
/// [`Id::Indexing`]
pub const INDEXING: Module = Module::new(Id::Indexing, ptx::INDEXING);
/// [`Id::Quantized`]
pub const QUANTIZED: Module = Module::new(Id::Quantized, EMPTY);
/// [`Id::Reduce`]
pub const REDUCE: Module = Module::new(Id::Reduce, ptx::REDUCE);
/// [`Id::Sort`]
pub const SORT: Module = Module::new(Id::Sort, EMPTY);
/// [`Id::Ternary`]
pub const TERNARY: Module = AFFINE;
/// [`Id::Unary`]
pub const UNARY: Module = AFFINE;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_one_source_share_a_place_and_the_others_have_their_own() {
        let modules = [AFFINE, BINARY, CAST, CONV, FILL, INDEXING, QUANTIZED, REDUCE, SORT, TERNARY, UNARY];
        for (module, id) in modules.iter().zip(ALL_IDS) {
            let expected = match id {
                Id::Binary | Id::Cast | Id::Fill | Id::Ternary | Id::Unary => Id::Affine,
                other => other,
            };
            assert_eq!(module.index(), ALL_IDS.iter().position(|&id| id == expected).unwrap(), "{id:?}");
        }
    }
}
