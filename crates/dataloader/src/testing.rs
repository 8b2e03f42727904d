//! What the tests of this crate share.

use std::path::Path;
use std::sync::LazyLock;

use crate::Tokenizer;

/// The tokenizer of the sample data.
pub fn sample_tokenizer() -> &'static Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sample-tokenizer.json")).unwrap()
    });
    &TOKENIZER
}
