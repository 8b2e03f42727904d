//! The kernels for NVIDIA's cards, in CUDA C++ (`kernels/`).
//!
//! candle launches the kernels of `elementwise.cu`, `indexing.cu` and `reduce.cu`; `t5-ops` launches the others. With the feature `ptx`,
//! nvcc compiles them, and [`ptx`] has the texts that a driver loads. Without the feature, they are compiled for the host, over an
//! emulation of a card's execution model (`emulation/`), and [`emulation`] runs them. So they are tested on every machine.
//!
//! Invariants
//!
//! - A kernel allocates nothing. Its arguments give the sizes of its work, and the caller checks them.
//! - Sums are cut by sizes alone and added in a fixed order, without atomic operations: the same inputs give the same bits.
//! - Sums are in f32 or wider; activations and weights may be bf16. candle's additions in place are rounded to its dtype each time.

#[cfg(feature = "ptx")]
pub mod driver;
#[cfg(not(feature = "ptx"))]
pub mod emulation;
#[cfg(feature = "ptx")]
pub mod libraries;

/// The texts that a driver loads, one for each source. Without the feature `ptx` they are empty.
pub mod ptx {
    #[cfg(feature = "ptx")]
    macro_rules! text {
        ($source:literal) => {
            include_str!(concat!(env!("OUT_DIR"), "/", $source, ".ptx"))
        };
    }
    // `candle-kernels` also names these texts in a build of all crates that needs no card.
    #[cfg(not(feature = "ptx"))]
    macro_rules! text {
        ($source:literal) => {
            ""
        };
    }

    /// Attention without tensor cores, and the code that it shares with attention on tensor cores.
    pub const ATTENTION: &str = text!("attention");
    /// The backward of attention on tensor cores.
    pub const ATTENTION_BACKWARD: &str = text!("attention_backward");
    /// Attention on tensor cores.
    pub const ATTENTION_FORWARD: &str = text!("attention_forward");
    /// The cross-entropy of logits.
    pub const CROSS_ENTROPY: &str = text!("cross_entropy");
    /// The next tokens, and attention over a cache.
    pub const DECODING: &str = text!("decoding");
    /// Conversion of weights in codes to numbers.
    pub const DEQUANTISE: &str = text!("dequantise");
    /// Dropout and activations.
    pub const DROPOUT: &str = text!("dropout");
    /// candle's operations on each element by itself.
    pub const ELEMENTWISE: &str = text!("elementwise");
    /// Products of few rows with weights in codes.
    pub const SMALL_M: &str = text!("small_m");
    /// candle's operations on elements by index.
    pub const INDEXING: &str = text!("indexing");
    /// RMS layer normalisation.
    pub const NORM: &str = text!("norm");
    /// Sums of squares, Adafactor, AdamW.
    pub const OPTIMIZER: &str = text!("optimizer");
    /// candle's sums and extremes.
    pub const REDUCE: &str = text!("reduce");
    /// Embeddings, and rows by index.
    pub const ROWS: &str = text!("rows");
}
