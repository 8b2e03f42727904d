//! [`TableNames`]: the names of a model's tables in its files.

use crate::config::Config;
use crate::family::Family;

/// The names of a model's tables in its files.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableNames {
    /// The table of the encoder's embedding.
    pub shared: &'static str,
    /// Other names of it. Writers that drop duplicates keep the one that they meet first.
    pub others: &'static [&'static str],
    /// The head's own table.
    pub head: &'static str,
    /// The table that a tied head is.
    pub of_head: &'static str,
}

impl TableNames {
    pub fn from_config(config: &Config) -> TableNames {
        let shared = config.shared_table();
        let (others, head): (&[&str], _) = match config.family {
            Family::T5Gemma => (&[], GEMMA_HEAD),
            Family::T5Gemma2 => (&["model.decoder.embed_tokens.weight"], GEMMA_HEAD),
            _ => (&["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"], "lm_head.weight"),
        };
        TableNames { shared, others, head, of_head: config.decoder_table().unwrap_or(shared) }
    }

    /// Whether a tensor is the shared table, under its own name or another, or the head.
    pub fn has(&self, name: &str) -> bool {
        name == self.shared || name == self.head || self.others.contains(&name)
    }
}

pub(super) const GEMMA_HEAD: &str = "lm_head.out_proj.weight";
