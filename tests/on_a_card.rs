//! What the tests of the command on cards share.

/// A step small enough for an emulated card, with gated gelu: a relu's kink would make more of rounding.
pub const SMALL: [&str; 6] = [
    "--set",
    "model.overrides={num_layers=1, num_decoder_layers=1, d_model=64, d_ff=96, feed_forward_proj=\"gated-gelu\"}",
    "--set",
    "train.batch_size=4",
    "--set",
    "train.eval_generate_samples=1",
];
