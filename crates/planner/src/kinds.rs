//! The shapes of micro-batches. If the shapes are the same step after step, a card can launch recordings of micro-batches.

use t5_ops::keys::mix;
use trainer::micro_batches::cut_within;

/// Steps that are simulated.
const STEPS: u64 = 8;
/// The most samples of each step.
const MAX_SAMPLES: usize = 256;
/// The most shapes of a step. A card remembers sixteen kinds of micro-batches. The first micro-batch of a step is of another kind than
/// later ones of the same shape.
const MAX_SHAPES: usize = 8;

/// Samples of a micro-batch, and the most source and target tokens of a sample in it.
pub type Shape = (usize, (usize, usize));

/// Source and target tokens together.
pub fn tokens((source, target): (usize, usize)) -> usize {
    source + target
}

/// The shapes of the micro-batches that samples of these `lengths` are cut into. No micro-batch has more tokens than `samples` of the
/// `longest` samples.
pub fn shapes(lengths: &[(usize, usize)], samples: usize, longest: (usize, usize)) -> Vec<Shape> {
    let most = samples.max(1) * tokens(longest);
    let micro_batches = cut_within(lengths, &|samples, longest| samples * tokens(longest) <= most);
    let shape = |indices: Vec<usize>| {
        let of_all = indices.iter().map(|&i| lengths[i]);
        (indices.len(), of_all.fold((0, 0), |(source, target), of| (source.max(of.0), target.max(of.1))))
    };
    micro_batches.into_iter().map(shape).collect()
}

/// Whether steps of `samples` samples have the same micro-batches, each with at most the tokens of `micro_batch_samples` of the `longest`
/// samples. `lengths` are source and target tokens of some rows of the run, from which the samples of some steps are drawn. If `lengths` is
/// empty, all samples are as long as allowed.
pub fn repeat(lengths: &[(usize, usize)], samples: usize, micro_batch_samples: usize, longest: (usize, usize)) -> bool {
    if lengths.is_empty() {
        return true;
    }
    let samples = samples.min(MAX_SAMPLES.max(micro_batch_samples));
    let of_step = |step: u64| {
        let row = |sample: usize| lengths[(mix(step << 32 | sample as u64) % lengths.len() as u64) as usize];
        let drawn: Vec<(usize, usize)> = (0..samples).map(row).collect();
        shapes(&drawn, micro_batch_samples, longest)
    };
    let first = of_step(0);
    let mut different = first.clone();
    different.sort_unstable();
    different.dedup();
    different.len() <= MAX_SHAPES && (1..STEPS).all(|step| of_step(step) == first)
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
        // Most rows are cut, and a short row is never alone.
        let mostly: Vec<(usize, usize)> = (0..32).map(|i| if i == 5 { (9, 9) } else { (64, 32) }).collect();
        assert!(repeats(&mostly, 4));
        assert!(!repeats(&mostly, 1), "a short row has a micro-batch of its own in some steps");
    }
}
