//! Work that finds no memory for its recording is recorded when memory is free again. Runs on a card, or on the emulated one. The test is a
//! process of its own, because the limit of the card's memory applies to a process.
#![cfg(feature = "cuda")]

use candle_core::{DType, Tensor};
use cuda_device::Replay;

const MIB: usize = 1 << 20;
/// Elements of a tensor of the work, which has 4 MiB. Launch by launch two tensors exist at a time, in a recording all of them.
const ELEMENTS: usize = MIB;
const TENSORS: i32 = 8;
/// Free bytes: fewer than the recording takes, and more than the launches take.
const LEFT: usize = 16 * MIB;
const MOST: usize = 64 * MIB;

#[test]
fn work_without_memory_is_recorded_when_there_is_memory_again() {
    let card = cuda_device::open_card(0).expect("a card, or the emulated one");
    cuda_device::limit_device(&card, MOST as u64).unwrap();
    let x = Tensor::ones(ELEMENTS, DType::F32, &card).unwrap();
    let of_others = Tensor::zeros(MOST - 4 * ELEMENTS - LEFT, DType::U8, &card).unwrap();
    let mut replay = Replay::default();
    let mut run = || {
        let halves = replay
            .run(&[&x], &[0], |_| (1..TENSORS).try_fold(t5_ops::scaled(&x, 0.5)?, |y, _| t5_ops::scaled(&y, 0.5)));
        let half = halves.unwrap().narrow(0, ELEMENTS - 1, 1).unwrap().to_vec1::<f32>().unwrap()[0];
        assert!((half - 0.5f32.powi(TENSORS)).abs() < 1e-9, "{half}");
        replay.is_recorded()
    };
    assert!((0..12).all(|_| !run()), "there is no memory for it");
    drop(of_others);
    assert!((0..100).any(|_| run()), "there is memory again");
    assert!(run(), "it stays recorded");
}
