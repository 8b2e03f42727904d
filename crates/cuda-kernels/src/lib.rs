//! The kernels for NVIDIA's cards, in CUDA C++ (`kernels/`).
//!
//! Those of `elementwise.cu`, `indexing.cu` and `reduce.cu` are launched by candle, the others by `t5-ops`. With the feature `ptx` they
//! are compiled by nvcc, and [`ptx`] has what a driver loads. Without it they are compiled for the host, over an emulation of
//! a card's execution model (`emulation/`), and [`emulation`] runs them: this is how they are tested on every machine.
//!
//! Invariants
//!
//! - A kernel allocates nothing. What it is called with says how much it works on; sizes are checked by who calls it.
//! - Sums are cut by sizes alone and added in a fixed order, without atomic operations: the same inputs give the same bits.
//! - Sums are in f32 or wider; activations and weights may be bf16. candle's additions in place are rounded to its dtype each time.

#[cfg(feature = "ptx")]
pub mod driver;
#[cfg(not(feature = "ptx"))]
pub mod emulation;

/// What a driver loads: one text for each source. Without the feature `ptx` they are empty.
pub mod ptx {
    #[cfg(feature = "ptx")]
    macro_rules! text {
        ($source:literal) => {
            include_str!(concat!(env!("OUT_DIR"), "/", $source, ".ptx"))
        };
    }
    // `candle-kernels` names these texts in a build of all crates, too, in which no card is asked for.
    #[cfg(not(feature = "ptx"))]
    macro_rules! text {
        ($source:literal) => {
            ""
        };
    }

    /// Attention without tensor cores, and what attention on them shares with it.
    pub const ATTENTION: &str = text!("attention");
    /// The backward of attention on tensor cores.
    pub const ATTENTION_BACKWARD: &str = text!("attention_backward");
    /// Attention on tensor cores.
    pub const ATTENTION_FORWARD: &str = text!("attention_forward");
    /// The cross-entropy of logits.
    pub const CROSS_ENTROPY: &str = text!("cross_entropy");
    /// The next tokens, and attention over a cache.
    pub const DECODING: &str = text!("decoding");
    /// Weights in codes as numbers.
    pub const DEQUANTISE: &str = text!("dequantise");
    /// Dropout and activations.
    pub const DROPOUT: &str = text!("dropout");
    /// candle's operations on each element by itself.
    pub const ELEMENTWISE: &str = text!("elementwise");
    /// Products of few rows with weights in codes.
    pub const FEW_ROWS: &str = text!("few_rows");
    /// candle's operations on elements by number.
    pub const INDEXING: &str = text!("indexing");
    /// RMS layer normalisation.
    pub const NORM: &str = text!("norm");
    /// Sums of squares, Adafactor, AdamW.
    pub const OPTIMIZER: &str = text!("optimizer");
    /// candle's sums and extremes.
    pub const REDUCE: &str = text!("reduce");
    /// Embeddings, and rows by number.
    pub const ROWS: &str = text!("rows");
}
