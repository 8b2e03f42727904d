//! Losses over the samples of a whole step, however it is cut into micro-batches.

use candle_core::{DType, Device, Tensor};
use t5::{LayerMajor, Levers};
use trainer::{StepStats, Trainer};

use super::golden::micro_batches_of;

/// Another plan for each step.
pub fn levers_of_step(i: usize) -> Levers {
    let layers = LayerMajor { boundaries_on_disk: i.is_multiple_of(3), ..LayerMajor::default() };
    Levers { recompute_blocks: i % 3, layer_major: (i % 4 == 3).then_some(layers), ..micro_batches_of(1 + 3 * (i % 5)) }
}

/// All gradients of a step, in f64 on the host.
fn gradients(trainer: &Trainer) -> Vec<f64> {
    let all = 0..trainer.model().parameters().len();
    // The host alone: that is where values are compared.
    let values = |gradient: &Tensor| gradient.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    let of = |index| trainer.gradients().get(index).map(|gradient| values(gradient).flatten_all().unwrap());
    all.filter_map(of).flat_map(|gradient| gradient.to_vec1::<f64>().unwrap()).collect()
}

/// With micro-batches of one and three samples, a step has the loss and the gradients of the whole batch. `step` makes a trainer in f64 with
/// this dropout, and its first step.
pub fn check_cuts(name: &str, step: impl Fn(f64, Levers) -> (Trainer, StepStats)) {
    for dropout in [0.0, 0.2] {
        let of_cut = |micro_batch: usize| {
            let (trainer, stats) = step(dropout, micro_batches_of(micro_batch));
            (stats.loss, gradients(&trainer))
        };
        let (loss, whole) = of_cut(100);
        let largest = whole.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
        assert!(largest > 1e-4, "{name}: {largest}");
        for micro_batch in [1, 3] {
            let (of_other, other) = of_cut(micro_batch);
            assert!((loss - of_other).abs() < 1e-12 * loss.abs().max(1.0), "{name}: {loss}, {of_other}");
            for (one, other) in whole.iter().zip(&other) {
                assert!((one - other).abs() < 1e-10 * largest, "{name}, {micro_batch}: {one}, {other}");
            }
        }
    }
}
