//! The files that belong beside a model's weights: those of its tokenizer.

use dataloader::{Tokenizer, TokenizerJson};
use trainer::checkpoint::{TokenizerFiles, TokenizerJson as SavedJson};

/// The tokenizer's files, to be saved with a model.
pub fn of_tokenizer(tokenizer: &Tokenizer) -> TokenizerFiles<'_> {
    let json = match tokenizer.json() {
        TokenizerJson::File(path) => SavedJson::File(path),
        TokenizerJson::Text(text) => SavedJson::Text(text),
        TokenizerJson::None => SavedJson::None,
    };
    TokenizerFiles { json, config: tokenizer.transformers_config(), companions: tokenizer.companions() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_file_that_goes_with_a_tokenizer_is_one_that_checkpoints_know() {
        let known = trainer::checkpoint::COMPANION_FILES;
        assert!(dataloader::COMPANION_FILES.iter().all(|name| known.contains(name)));
    }
}
