//! Whether a teacher's largest logits are kept in a file, so that it reads each sample once, or the teacher reads every batch.
//!
//! Both make the same steps. The choice follows from the number of times that the run reads a sample, the teacher's arithmetic, the bytes of
//! the file and built-in prices. So a resumed run chooses the same.

use t5::AnswerShape;
use trainer::{KeptLogitsOf, TrainerOptions};

use crate::counted::Counter;
use crate::error::Result;
use crate::job::KeptLogits;
use crate::prices::Prices;

/// Rows of logits at a time in the arithmetic of a pass: any number has the same.
const CHUNK: usize = 256;

/// The reading of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplesRead {
    /// Different samples.
    pub different: u64,
    /// Samples of all steps, each counted as often as it is read.
    pub all: u64,
}

/// The file, if it costs less than the passes that it spares, and may be written. `most_bytes` are those that a run may write in place of
/// memory.
///
/// # Errors
/// The teacher's config is not a T5's.
#[expect(clippy::cast_precision_loss, reason = "samples and bytes are far below 2^53")]
pub fn kept_logits(
    teacher: &t5::Config,
    options: &TrainerOptions,
    of: &KeptLogitsOf,
    (read, longest): (SamplesRead, (usize, usize)),
    most_bytes: u64,
) -> Result<Option<KeptLogits>> {
    let prices = Prices::of_units(options.precision.activations());
    let counter = Counter::new(teacher, options.parameter_dtype(), options.precision.activations(), longest)?;
    let [pass, _] = counter.evaluation([1, 0], CHUNK, AnswerShape::greedy(0)).multiply_adds;
    let sample_bytes = of.sample_bytes(longest.1);
    let file_bytes = sample_bytes.saturating_mul(read.different);
    // A byte may go to the disk, and is read again each time.
    let byte = prices.file_byte * prices.disk * sample_bytes as f64;
    let kept = read.different as f64 * pass + read.all as f64 * byte;
    let is_cheaper = kept < read.all as f64 * pass;
    Ok((is_cheaper && file_bytes <= most_bytes).then(|| KeptLogits { table_bytes: of.table_bytes(), file_bytes }))
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use trainer::distillation::Distillation;

    use super::*;

    #[test]
    fn logits_are_kept_if_a_run_reads_samples_again_and_the_file_is_cheaper_than_the_teacher() {
        let teacher = t5::Config::preset("t5-base").unwrap();
        let keeps = |count: usize, different: u64, all: u64, most: u64| {
            let distillation = Distillation { alpha: 0.5, temperature: 2.0, top_k: Some(count) };
            let options = TrainerOptions { distillation: Some(distillation), ..TrainerOptions::default() };
            let of = KeptLogitsOf { count, dtype: DType::F32, depends_on: String::new(), samples: different };
            kept_logits(&teacher, &options, &of, (SamplesRead { different, all }, (64, 64)), most).unwrap()
        };
        let kept = keeps(32, 1000, 3000, u64::MAX).unwrap();
        // 64 tokens of 32 entries of 8 bytes, a key, a length and a checksum.
        assert_eq!(kept, KeptLogits { table_bytes: 1250 * 8, file_bytes: 1000 * (64 * 32 * 8 + 28) });
        assert_eq!(keeps(32, 1000, 1000, u64::MAX), None);
        assert_eq!(keeps(32, 1000, 3000, kept.file_bytes - 1), None);
        // The whole vocabulary of each token costs more than the teacher.
        assert_eq!(keeps(32_128, 1000, 1100, u64::MAX), None);
    }
}
