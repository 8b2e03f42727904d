//! How far backward reaches, and so which tensors forward keeps: pure functions of which parameters are trained.
//!
//! A stack is, from below, its embedding, its blocks, its final norm. Backward enters everything above the
//! lowest trained place and nothing below it. A block that backward does not enter keeps nothing. With a frozen encoder
//! and embedding the encoder keeps not a byte.

use crate::config::Config;
use crate::parameters::Part;

/// The tensors that a block keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keep {
    /// Nothing: backward does not enter the block.
    Nothing,
    /// The block's input; backward runs forward again.
    Input,
    /// The block's input and its attention outputs, which backward then does not recompute.
    Heads,
    /// Everything that its layers' backward needs.
    Everything,
}

impl Keep {
    /// Returns `again` for a block that keeps its input alone, and otherwise this value.
    pub fn instead_of_input(self, again: Keep) -> Keep {
        if self == Keep::Input { again } else { self }
    }
}

/// How far backward reaches into one stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StackReach {
    blocks: usize,
    /// 0 the embedding, 1 + i block i, 1 + blocks the final norm, 2 + blocks nothing.
    lowest: usize,
}

impl StackReach {
    /// A stack of that many blocks that backward does not enter.
    pub fn nothing(blocks: usize) -> StackReach {
        StackReach { blocks, lowest: blocks + 2 }
    }

    /// A stack without blocks is not there.
    fn down_to(&mut self, place: usize) {
        if self.blocks == 0 {
            return;
        }
        self.lowest = self.lowest.min(place);
    }

    /// Blocks of the stack.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    pub fn enters_norm(&self) -> bool {
        self.lowest <= self.blocks + 1
    }

    pub fn enters_block(&self, block: usize) -> bool {
        self.lowest <= block + 1
    }

    pub fn enters_embedding(&self) -> bool {
        self.lowest == 0
    }

    fn blocks_entered(&self) -> usize {
        self.blocks - self.lowest.saturating_sub(1).min(self.blocks)
    }
}

/// How far backward reaches into both stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reach {
    pub encoder: StackReach,
    pub decoder: StackReach,
}

impl Reach {
    /// Neither stack is entered by backward.
    pub fn nothing(config: &Config) -> Reach {
        Reach {
            encoder: StackReach::nothing(config.num_layers),
            decoder: StackReach::nothing(config.num_decoder_layers),
        }
    }

    /// As far as backward must go to reach all trained parts.
    pub fn to(config: &Config, trained: impl Iterator<Item = Part>) -> Reach {
        let mut reach = Reach::nothing(config);
        let Reach { encoder, decoder } = &mut reach;
        for part in trained {
            match part {
                Part::Shared => {
                    encoder.down_to(0);
                    decoder.down_to(0);
                }
                Part::Encoder { block } => encoder.down_to(block + 1),
                Part::EncoderNorm => encoder.down_to(encoder.blocks + 1),
                Part::Decoder { block } => decoder.down_to(block + 1),
                Part::DecoderNorm => decoder.down_to(decoder.blocks + 1),
                Part::LmHead => {}
            }
        }
        if encoder.enters_norm() {
            decoder.down_to(1); // every cross attention contributes to the encoder's gradient
        }
        reach
    }

    /// Whether a stack's contribution to the gradient of the embedding is wanted.
    pub fn enters_embedding(&self, decoder: bool) -> bool {
        if decoder { self.decoder.enters_embedding() } else { self.encoder.enters_embedding() }
    }

    /// The number of blocks that backward enters: the most that can be recomputed.
    pub fn blocks_entered(&self) -> usize {
        self.encoder.blocks_entered() + self.decoder.blocks_entered()
    }

    pub fn keep_encoder_block(&self, block: usize, recompute_blocks: usize) -> Keep {
        keep(self.encoder, block, recompute_blocks)
    }

    pub fn keep_decoder_block(&self, block: usize, recompute_blocks: usize) -> Keep {
        keep(self.decoder, block, recompute_blocks.saturating_sub(self.encoder.blocks_entered()))
    }
}

/// How a block is kept: the first `recompute_blocks` of the entered blocks keep their input.
fn keep(stack: StackReach, block: usize, recompute_blocks: usize) -> Keep {
    if !stack.enters_block(block) {
        return Keep::Nothing;
    }
    let rank = block - (stack.blocks - stack.blocks_entered());
    if rank < recompute_blocks { Keep::Input } else { Keep::Everything }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config { num_layers: 3, num_decoder_layers: 2, ..Config::default() }
    }

    /// What every block keeps, encoder first, one letter for each.
    fn kept(trained: &[Part], recompute_blocks: usize) -> String {
        let reach = Reach::to(&config(), trained.iter().copied());
        let letter = |keep| match keep {
            Keep::Nothing => '-',
            Keep::Input => 'i',
            Keep::Heads => 'h',
            Keep::Everything => 'E',
        };
        let encoder = (0..3).map(|b| letter(reach.keep_encoder_block(b, recompute_blocks)));
        let decoder = (0..2).map(|b| letter(reach.keep_decoder_block(b, recompute_blocks)));
        encoder.chain(['|']).chain(decoder).collect()
    }

    #[test]
    fn backward_enters_nothing_below_the_lowest_trained_place() {
        let check = |trained: &[Part], recompute: usize, expected: &str| assert_eq!(kept(trained, recompute), expected);
        check(&[Part::Shared], 0, "EEE|EE");
        check(&[Part::Shared], 4, "iii|iE");
        check(&[Part::Shared], 9, "iii|ii");
        check(&[Part::Decoder { block: 0 }, Part::Decoder { block: 1 }], 0, "---|EE");
        check(&[Part::Decoder { block: 0 }], 1, "---|iE");
        check(&[Part::Decoder { block: 1 }, Part::LmHead], 0, "---|-E");
        check(&[Part::DecoderNorm], 0, "---|--");
        check(&[Part::Encoder { block: 1 }], 2, "-ii|EE");
        check(&[Part::EncoderNorm], 0, "---|EE");
        check(&[], 3, "---|--");
    }
}
