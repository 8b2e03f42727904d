//! A rehearsal: a step, a loss and an answer of the smallest possible model, before memory is measured.
//!
//! The program's own memory is measured, not guessed. But code is paged in when it first runs, and threads get their stacks and buffers
//! when they first work. After a rehearsal both are in memory, so the bill's row `process` has the same bytes as during the run. A
//! rehearsal takes milliseconds and leaves nothing else behind.

use candle_core::{DType, Device};
use memory_policy::{MemorySnapshot, Probe};
use t5::{EvalContext, GenerateOptions, Head, MicroBatch, Pooling, T5};
use trainer::{Batch, Levers, RowLabels, StepPlan, Trainer, TrainerOptions};

use crate::error::Result;

const SAMPLES: usize = 4;
const TOKENS: usize = 64;

/// Rehearses a run with these options and this kind of model, and takes the snapshot that planning starts from.
///
/// # Errors
/// The rehearsal failed, or the machine's memory cannot be read.
pub fn rehearse(
    model: &t5::Config,
    options: &TrainerOptions,
    device: &Device,
    probe: &dyn Probe,
) -> Result<MemorySnapshot> {
    let smallest = smallest(model);
    let options = TrainerOptions { freeze: Vec::new(), groups: Vec::new(), ..options.clone() };
    let activations = options.precision.activations();
    let (dtype, has_frozen_model) = (options.parameter_dtype(), options.has_frozen_model());
    let mut trainer = Trainer::new(T5::init(&smallest, 0, dtype, device)?, options)?;
    if has_frozen_model {
        trainer.compare_with(T5::init(&smallest, 0, dtype, device)?)?;
    }
    let samples = samples();
    let targets = smallest.head.targets_like(&samples);
    let plan = StepPlan {
        levers: Levers {
            micro_batch_samples: SAMPLES,
            recompute_blocks: 1,
            loss_chunk_rows: TOKENS,
            layer_major: None,
            ..Levers::default()
        },
        longest: None,
    };
    // One list, if the loss is of lists.
    let labels = RowLabels { lists: &[SAMPLES], gains: &[1.0, 0.0, 0.0, 0.0], ..RowLabels::default() };
    trainer.step_of_labels((&Batch { sources: &samples, targets: &targets }, labels), &[SAMPLES], &plan, &|| false)?;
    infer(trainer.model(), &samples, activations)?;
    drop(trainer);
    release();
    Ok(probe.snapshot()?)
}

/// Rehearses a loss and an answer only, and takes the snapshot.
///
/// # Errors
/// As [`rehearse`].
pub fn rehearse_inference(
    model: &t5::Config,
    (parameters, activations): (DType, DType),
    device: &Device,
    probe: &dyn Probe,
) -> Result<MemorySnapshot> {
    let smallest = T5::init(&smallest(model), 0, parameters, device)?;
    infer(&smallest, &samples(), activations)?;
    drop(smallest);
    release();
    Ok(probe.snapshot()?)
}

/// Frees memory that a rehearsal leaves and that other rows of a bill count, such as packed operands.
fn release() {
    t5_ops::release_kept();
    heap::release_unused();
}

fn samples() -> Vec<Vec<u32>> {
    vec![(2..2 + TOKENS as u32).collect(); SAMPLES]
}

fn infer(model: &T5, samples: &[Vec<u32>], activations: DType) -> Result<()> {
    let slices: Vec<&[u32]> = samples.iter().map(Vec::as_slice).collect();
    let head = &model.config().head;
    if *head == Head::Encoder {
        model.vectors(&slices, Pooling::Mean, true, activations, &|| ())?;
        return Ok(());
    }
    let targets = head.targets_like(samples);
    let targets: Vec<&[u32]> = targets.iter().map(Vec::as_slice).collect();
    let micro_batch = MicroBatch::new(&slices, &targets, &[0, 1, 2, 3], model.config(), model.device())?;
    if head.labels().is_some() {
        model.class_logits(&micro_batch, activations, &|| ())?;
    }
    model.loss(&micro_batch, &EvalContext { activations, loss_chunk_rows: TOKENS })?;
    if head.is_language() {
        model.generate(&slices, &GenerateOptions { max_new_tokens: 2, activations, ..GenerateOptions::default() })?;
    }
    Ok(())
}

/// The smallest model of this kind.
pub(crate) fn smallest(model: &t5::Config) -> t5::Config {
    t5::Config {
        vocab_size: 256,
        d_model: 64,
        d_kv: 32,
        d_ff: 128,
        num_heads: 2,
        num_layers: 1,
        num_decoder_layers: model.num_decoder_layers.min(1),
        relative_attention_num_buckets: 32,
        relative_attention_max_distance: 128,
        eos_token_ids: vec![1],
        pad_token_id: 0,
        decoder_start_token_id: 0,
        // The model's own files name tokens for answers that this vocabulary may not have.
        rest: t5::Rest::default(),
        gemma: model.gemma.as_ref().map(|gemma| Box::new(gemma.smallest())),
        // Its weights are new, so there is no base to read.
        base_precision: None,
        stored: None,
        ..model.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Its answers ended with token 506 of 1,152, and every command that rehearsed refused it.
    #[test]
    fn a_rehearsal_knows_no_token_that_its_small_vocabulary_lacks() {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).expect("it is written");
        write("config.json", r#"{"model_type": "t5", "vocab_size": 1152, "eos_token_id": 700, "pad_token_id": 600}"#);
        write("generation_config.json", r#"{"eos_token_id": [1, 506], "decoder_start_token_id": 600}"#);
        let model = t5::Config::from_file(&directory.path().join("config.json")).expect("a config");
        assert_eq!(model.answer_ends(), [1, 506]);
        smallest(&model).validate().expect("a config that can be rehearsed");
    }
}
