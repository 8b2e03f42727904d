//! Text to text: the prompt is the source, the response is the target.
//!
//! Truncation counts tokens and keeps the end-of-sequence id: the first `max - 1` tokens of a long text stay and that
//! id follows. So a model never learns from a sequence that does not end.

use super::{Sample, SampleLimits};

pub(super) fn sample(mut source: Vec<u32>, mut target: Vec<u32>, limits: &SampleLimits) -> Sample {
    let source_was_cut = end(&mut source, limits.max_source_tokens, limits.eos_id);
    let target_was_cut = end(&mut target, limits.max_target_tokens, limits.eos_id);
    Sample { source, target, rejected: None, source_was_cut, target_was_cut }
}

/// Cuts `ids` to `max_tokens`, with the end-of-sequence id last; true if tokens were lost.
fn end(ids: &mut Vec<u32>, max_tokens: usize, eos_id: u32) -> bool {
    let is_too_long = ids.len() >= max_tokens;
    ids.truncate(max_tokens - 1);
    ids.push(eos_id);
    ids.shrink_to_fit(); // The bill counts the bytes of ids that wait in the queue.
    is_too_long
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_counts_tokens_and_keeps_the_end() {
        let check = |tokens: usize, max: usize, expected: &[u32], was_cut: bool| {
            let mut ids: Vec<u32> = (10..10 + tokens as u32).collect();
            assert_eq!(end(&mut ids, max, 1), was_cut);
            assert_eq!(ids, expected, "{tokens} tokens, {max} at most");
        };
        check(2, 8, &[10, 11, 1], false);
        check(3, 4, &[10, 11, 12, 1], false);
        check(4, 4, &[10, 11, 12, 1], true);
        check(9, 2, &[10, 1], true);
    }
}
