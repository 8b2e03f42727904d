//! Tests the function behind libFuzzer's targets. It sets the process's panic hook, so the test has a process of its
//! own.

use std::panic::catch_unwind;
use std::path::Path;

use foreign_bytes::{corpus, fuzz, parser};

#[test]
fn a_panic_that_the_product_catches_is_no_finding_and_any_other_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // Some of these inputs make the tokenizers crate panic.
    for input in corpus(&root, parser("tokenizer").unwrap()).unwrap() {
        fuzz("tokenizer", &input);
    }
    fuzz("planted_panic", b"even");
    assert!(catch_unwind(|| fuzz("planted_panic", b"odd")).is_err());
}
