//! [`Family`]: the T5s that transformers distinguishes by `model_type`, and their differences beside sizes.
//!
//! ByT5, CodeT5, flan-T5, MADLAD-400 and UL2 are of [`Family::T5`], mT0 is of [`Family::Mt5`].

/// A `model_type` of transformers that is a T5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Family {
    /// `t5`: the decoder's output is scaled where the file says so, or else where the head is tied.
    #[default]
    T5,
    /// `mt5`: the decoder's output is never scaled.
    Mt5,
    /// `umt5`: a table of relative positions in every block; the decoder's output is scaled.
    Umt5,
    /// `t5gemma`: two stacks of Gemma 2's blocks, each with its own table, and cross attention.
    T5Gemma,
    /// `t5gemma2`: two stacks of Gemma 3's blocks with one table; a decoder's attention sees its own keys and the encoder's.
    T5Gemma2,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 5] = [Family::T5, Family::Mt5, Family::Umt5, Family::T5Gemma, Family::T5Gemma2];

    /// The family with this `model_type`.
    pub fn of_model_type(model_type: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.model_type() == model_type)
    }

    /// The family of an entry of `architectures`, whatever model is built on the T5: `MT5Model`, `T5WithLMHeadModel`.
    pub fn of_architecture(architecture: &str) -> Option<Family> {
        let is_of = |family: &Family| {
            let class = architecture.strip_prefix(family.class_prefix());
            class.is_some_and(|class| ["For", "With", "Model", "Encoder"].iter().any(|next| class.starts_with(next)))
        };
        Family::ALL.into_iter().find(is_of)
    }

    /// Its `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::T5 => "t5",
            Family::Mt5 => "mt5",
            Family::Umt5 => "umt5",
            Family::T5Gemma => "t5gemma",
            Family::T5Gemma2 => "t5gemma2",
        }
    }

    /// The start of the names of its classes in transformers.
    pub(crate) fn class_prefix(self) -> &'static str {
        match self {
            Family::T5 => "T5",
            Family::Mt5 => "MT5",
            Family::Umt5 => "UMT5",
            Family::T5Gemma => "T5Gemma",
            Family::T5Gemma2 => "T5Gemma2",
        }
    }

    /// Whether its blocks are Gemma's rather than T5's.
    pub fn is_gemma(self) -> bool {
        matches!(self, Family::T5Gemma | Family::T5Gemma2)
    }

    /// Whether each block has a table of relative positions of its own, rather than block 0 one for all.
    pub fn has_a_table_in_every_block(self) -> bool {
        self == Family::Umt5
    }

    /// Whether the decoder's output is scaled before the head, where the file does not say so. `tie_word_embeddings` is the
    /// file's value. As in transformers 5.23; version 4 followed `tie_word_embeddings` in every family.
    pub fn scales_decoder_outputs(self, tie_word_embeddings: bool) -> bool {
        match self {
            Family::T5 => tie_word_embeddings,
            Family::Mt5 | Family::T5Gemma | Family::T5Gemma2 => false,
            Family::Umt5 => true,
        }
    }
}
