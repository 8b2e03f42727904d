//! A step for which one of several processes has no memory, at each of its calls to the others.

use std::ops::Range;

use candle_core::DType;
use collective::threads;
use t5::{Config, LayerMajor, Levers, T5};

use super::*;
use crate::test_device::{device, every};

const PROCESSES: usize = 3;
const SAMPLES: usize = 5;

fn config() -> Config {
    let (vocab_size, d_model, d_kv, d_ff, num_heads) = (37, 16, 4, 24, 4);
    Config { vocab_size, d_model, d_kv, d_ff, num_heads, num_layers: 2, num_decoder_layers: 2, ..Config::default() }
}

fn plan(layer_major: Option<LayerMajor>) -> StepPlan {
    let levers =
        Levers { micro_batch_samples: 1, recompute_blocks: 0, loss_chunk_rows: 16, layer_major, ..Levers::default() };
    StepPlan { levers, longest: None }
}

/// Steps of the same samples. Each process has the samples of its shards.
struct Steps {
    trainer: Trainer,
    plan: StepPlan,
    samples: (Vec<Vec<u32>>, Vec<Vec<u32>>),
    of_shards: Vec<usize>,
}

impl Steps {
    fn new(group: collective::Group, shards: Option<usize>, sharding: Sharding, plan: StepPlan) -> Self {
        let model = T5::init(&config(), 7, DType::F32, &device()).expect("a model");
        let options = TrainerOptions { seed: 3, total_steps: 1000, ..TrainerOptions::default() };
        let mut trainer = Trainer::new(model, options).expect("a trainer");
        let parallel = Parallel::new(group, shards).expect("as many shards");
        let (shards, rank) = (parallel.shards(), parallel.group().rank());
        trainer.join(parallel, sharding).expect("they join");
        let of_shards: Vec<Range<usize>> =
            shards.owned_by(rank).map(|shard| shards.positions(shard, SAMPLES)).collect();
        let mine = of_shards[0].start..of_shards[of_shards.len() - 1].end;
        let ids = |sample: usize, first: u32| (0..3 + sample as u32 % 4).map(|i| 2 + (first + i * 5) % 35).collect();
        let samples = mine.map(|sample| (ids(sample, sample as u32), ids(sample + 1, 9))).unzip();
        Self { trainer, plan, samples, of_shards: of_shards.iter().map(ExactSizeIterator::len).collect() }
    }

    fn step(&mut self) -> Result<StepOutcome> {
        let batch = Batch { sources: &self.samples.0, targets: &self.samples.1 };
        self.trainer.step_of_shards(&batch, &self.of_shards, &self.plan, &|| false)
    }

    fn loss(&mut self) -> f64 {
        match self.step().expect("a step") {
            StepOutcome::Done(stats) => stats.loss,
            other => panic!("{other:?}"),
        }
    }

    fn parallel(&self) -> &Parallel {
        self.trainer.parallel.as_ref().expect("it has joined others")
    }
}

/// The losses of some steps. Before each step one process, in turn, has no memory for its next call. Checks that a step that ended so
/// has changed nothing. `None`: no process lacks memory, for that many steps.
fn losses(shards: Option<usize>, sharding: Sharding, plan: StepPlan, undisturbed: Option<usize>) -> Vec<Vec<f64>> {
    threads::run(PROCESSES, |group| {
        let rank = group.rank();
        let mut steps = Steps::new(group, shards, sharding, plan);
        if let Some(number) = undisturbed {
            return (0..number).map(|_| steps.loss()).collect();
        }
        let mut losses = vec![steps.loss()];
        let calls = steps.parallel().transport().turns_before_decision();
        assert!(calls > 20, "{calls}");
        for turn in (0..calls).step_by(every(23)) {
            let lacks = turn % PROCESSES == rank;
            if lacks {
                steps.parallel().transport().without_memory_at(turn);
            }
            match steps.step() {
                Err(Error::DeviceMemory(_)) if lacks => {}
                Err(Error::DeviceMemoryElsewhere) if !lacks => {}
                other => panic!("call {turn} of {calls}, process {rank}: {other:?}"),
            }
            losses.push(steps.loss());
        }
        losses
    })
}

#[test]
fn a_process_without_memory_has_all_of_them_make_the_step_again_with_the_same_bits() {
    let plain = LayerMajor { kept_gradient_blocks: 1, ..LayerMajor::PLAIN };
    let overlapping = LayerMajor { overlaps: true, ..plain };
    let check = |sharding, shards, layer_major| {
        let plan = plan(layer_major);
        let got = losses(shards, sharding, plan, None);
        let expected = losses(shards, sharding, plan, Some(got[0].len()));
        assert_eq!(got, expected, "{sharding:?}, {shards:?} shards, {layer_major:?}");
    };
    for sharding in [Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Weights] {
        [None, Some(plain), Some(overlapping)].into_iter().for_each(|layer_major| check(sharding, None, layer_major));
    }
    // Of six shards of five samples, one is empty, and each process has two.
    check(Sharding::None, Some(6), Some(overlapping));
    [None, Some(plain)].into_iter().for_each(|layer_major| check(Sharding::Weights, Some(6), layer_major));
}
