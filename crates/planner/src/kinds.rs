//! Whether micro-batches come in the same shapes step after step, so that a card can launch recordings of them.

use trainer::micro_batches::cut_within;

/// Steps that are looked at.
const STEPS: u64 = 8;
/// Samples of each, at most.
const MOST_SAMPLES: usize = 256;
/// Shapes of a step, at most. A card remembers sixteen kinds of micro-batches, and the first one of a step is of another kind than later
/// ones of its shape.
const MOST_SHAPES: usize = 8;

/// Whether steps of `samples` samples have the same micro-batches of at most `micro_batch_samples` of the `longest` ones. `lengths` are source
/// and target tokens of some rows of the run, from which the samples of some steps are drawn. Without any, all samples are as long as they
/// may be.
pub fn repeat(lengths: &[(usize, usize)], samples: usize, micro_batch_samples: usize, longest: (usize, usize)) -> bool {
    if lengths.is_empty() {
        return true;
    }
    let tokens = |(source, target): (usize, usize)| source + target;
    let most = micro_batch_samples.max(1) * tokens(longest);
    let samples = samples.min(MOST_SAMPLES.max(micro_batch_samples));
    let shapes = |step: u64| -> Vec<(usize, usize, usize)> {
        let row = |sample: usize| lengths[(mixed(step << 32 | sample as u64) % lengths.len() as u64) as usize];
        let drawn: Vec<(usize, usize)> = (0..samples).map(row).collect();
        let micro_batches = cut_within(&drawn, &|samples, longest| samples * tokens(longest) <= most);
        let longest = |indices: &[usize], of: fn(&(usize, usize)) -> usize| {
            indices.iter().map(|&i| of(&drawn[i])).max().unwrap_or(0)
        };
        let shape = |indices: &Vec<usize>| (indices.len(), longest(indices, |l| l.0), longest(indices, |l| l.1));
        micro_batches.iter().map(shape).collect()
    };
    let first = shapes(0);
    let mut different = first.clone();
    different.sort_unstable();
    different.dedup();
    different.len() <= MOST_SHAPES && (1..STEPS).all(|step| shapes(step) == first)
}

/// The finaliser of splitmix64, which spreads neighbouring numbers.
fn mixed(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_one_length_repeat_and_uneven_ones_do_not() {
        let repeats = |lengths: &[(usize, usize)], micro| repeat(lengths, 16, micro, (64, 32));
        assert!(repeats(&[], 4) && repeats(&[(64, 32)], 4) && repeats(&[(10, 7)], 4));
        let uneven: Vec<(usize, usize)> = (0..32).map(|i| (64 - i, 32 - i / 2)).collect();
        assert!(!repeats(&uneven, 4) && !repeats(&uneven, 1));
        // Most rows are cut, and a short one is never alone.
        let mostly: Vec<(usize, usize)> = (0..32).map(|i| if i == 5 { (9, 9) } else { (64, 32) }).collect();
        assert!(repeats(&mostly, 4));
        assert!(!repeats(&mostly, 1), "a short row has a micro-batch of its own in some steps");
    }
}
