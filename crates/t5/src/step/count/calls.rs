//! The requests of a step to a card: its events are carried out once on counted tensors, micro-batch by micro-batch.

use std::cell::Cell;
use std::collections::HashSet;

use cuda_device::Turn;
use t5_ops::{Calls, LossSums, Needs, Path, SquareSums};

use super::{Counter, Shape};
use crate::error::{Error, Result};
use crate::gradients::Gradients;
use crate::levers::Levers;
use crate::micro_batch::MicroBatch;
use crate::ops::{Counted, Ledger};
use crate::parameters::ParameterSpec;
use crate::step::observer::Observer;
use crate::step::run::Step;
use crate::step::run::rounds::{GraphRunner, Round};

/// The trainer's needs for gradients that are handed over together: to be measured, and to be applied.
type Needed<'a> = &'a dyn Fn(&[&ParameterSpec]) -> [Needs; 2];

impl Counter {
    /// The requests of a step to a card, over a batch of this shape, where every sample is as long as the longest. `needed` gives the
    /// requests of an update.
    ///
    /// Uploads are an upper bound: a list of lengths or samples from the step before is on the card already. Lists of positions are
    /// left out, as each length is uploaded once.
    pub fn calls(&self, batch: Shape, levers: &Levers, needed: Needed) -> Calls {
        let (rehearsal, outline) =
            (self.rehearsal_of(levers), self.outline(levers.recompute_blocks, levers.layer_major.as_ref()));
        let ledger = rehearsal.ledger();
        let samples = levers.micro_batch_samples.clamp(1, batch.samples.max(1));
        let sizes = (0..batch.samples).step_by(samples).map(|first| samples.min(batch.samples - first));
        let micro = |(number, samples)| of_micro_batch(ledger, Shape { samples, ..batch }, number);
        let batches: Vec<MicroBatch<Counted>> = (0..).zip(sizes).map(micro).collect();
        let trained: HashSet<&str> = self.trained.specs().iter().map(|spec| spec.name.as_str()).collect();
        let mut gradients = Gradients::new(rehearsal.parameters(), self.precisions.gradients, &|parameter| {
            trained.contains(parameter.name.as_str())
        });
        let cx = crate::context::StepContext {
            loss_chunk_rows: levers.loss_chunk_rows,
            recompute_blocks: levers.recompute_blocks,
            ..*rehearsal.cx()
        };
        let specs = ParameterSpec::all(&self.config);
        let mut update =
            Update { specs: &specs, needed, is_decided: false, waiting: Vec::new(), calls: Calls::default() };
        ledger.begin();
        let recorded = Recorded { ledger, inside: Cell::default(), graphs: Cell::default() };
        let step = Step::new(rehearsal.network(), rehearsal.parameters(), &cx, &batches, None);
        let step = step.map(|step| if levers.repeats { step.repeating(&recorded) } else { step });
        let events = outline.training(batches.len());
        let run = step.and_then(|mut step| step.run(&events, &mut gradients, &mut update));
        run.expect("counting cannot fail");
        // The ids of the encoder and of the decoder.
        let of_batches = Calls { uploads: 2, ..Calls::default() } * batches.len() as u64;
        let totals = SquareSums::totals_needs(Path::Device, self.trained.specs().len()).calls;
        let copies = if levers.weight_copies { self.copied_weights().tensors } else { 0 };
        let copies = t5_ops::narrow_each_needs(Path::Device, copies).calls;
        ledger.calls() - recorded.inside.get() + of_batches + recorded.beside() + update.calls + totals + copies
    }
}

/// Counts the requests of recorded micro-batches: each phase is one graph.
#[derive(Debug)]
struct Recorded<'a> {
    ledger: &'a Ledger,
    /// Requests inside graphs, which are not made one by one.
    inside: Cell<Calls>,
    graphs: Cell<u64>,
}

impl Recorded<'_> {
    /// The requests that replace those inside graphs: two graphs for each micro-batch, and one upload of its numbers.
    fn beside(&self) -> Calls {
        let graphs = self.graphs.get();
        Calls { graphs, uploads: graphs / 2, ..Calls::default() }
    }
}

impl GraphRunner<Counted> for Recorded<'_> {
    fn begin(&self, _: &Round<Counted>) -> Result<bool> {
        Ok(true)
    }

    fn phase(&self, work: &mut dyn FnMut(Turn) -> Result<()>) -> Result<bool> {
        let before = self.ledger.calls();
        work(Turn::Work)?;
        self.inside.set(self.inside.get() + (self.ledger.calls() - before));
        self.graphs.set(self.graphs.get() + 1);
        Ok(true)
    }

    fn uncaptured(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        work()
    }

    fn leave(&self, x: Option<Counted>) -> Result<Option<Counted>> {
        Ok(x)
    }

    fn enter(&self, x: Counted) -> Result<Counted> {
        Ok(x)
    }

    fn is_recorded_now(&self) -> bool {
        false
    }

    fn recorded_host_state(&self) -> Option<Vec<bool>> {
        None
    }

    fn end(&self, _: Option<Vec<bool>>) {}
}

/// A micro-batch whose lists differ from every other's.
fn of_micro_batch(ledger: &Ledger, shape: Shape, number: u32) -> MicroBatch<Counted> {
    let list = |kind: u32| vec![3 * number + kind; shape.samples];
    let lengths = |kind| list(kind).into_iter().map(|length| length as usize).collect();
    MicroBatch {
        source_lengths: lengths(0),
        target_lengths: lengths(1),
        samples: list(2),
        ..super::rehearsal::batch(ledger, shape)
    }
}

/// Counts the requests of an update.
struct Update<'a> {
    specs: &'a [ParameterSpec],
    needed: Needed<'a>,
    is_decided: bool,
    /// Indices of parameters whose gradients have been handed over.
    waiting: Vec<usize>,
    calls: Calls,
}

impl Observer<Counted, Error> for Update<'_> {
    fn measure(&mut self, index: usize, _: &Counted) -> Result<()> {
        self.waiting.push(index);
        Ok(())
    }

    fn decide(&mut self, _: LossSums) -> Result<bool> {
        self.is_decided = true;
        Ok(true)
    }

    fn apply(&mut self, index: usize, _: &Counted) -> Result<()> {
        self.waiting.push(index);
        Ok(())
    }

    fn handed_over(&mut self) -> Result<()> {
        let together: Vec<&ParameterSpec> = self.waiting.drain(..).map(|index| &self.specs[index]).collect();
        if !together.is_empty() {
            self.calls = self.calls + (self.needed)(&together)[usize::from(self.is_decided)].calls;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::config::Config;
    use crate::levers::LayerMajor;
    use crate::step::count::{PassCalls, Precisions};

    const SHAPE: Shape = Shape { samples: 8, source_tokens: 64, target_tokens: 32 };

    fn calls(config: &Config, micro_batch_samples: usize, layer_major: Option<LayerMajor>) -> Calls {
        let f32s = Precisions { parameters: DType::F32, activations: DType::F32, gradients: DType::F32 };
        let counter = Counter::new(config, f32s, 0.1, &|_| true).unwrap().on_device(&|_| [0; 2]);
        let levers = Levers { micro_batch_samples, loss_chunk_rows: 1024, layer_major, ..Levers::default() };
        // An update that asks for a launch for each parameter.
        let one = |specs: &[&ParameterSpec]| {
            [0, 1].map(|uploads| {
                let launches = specs.len() as u64;
                Needs { calls: Calls { launches, uploads, ..Calls::default() }, ..Needs::default() }
            })
        };
        counter.calls(SHAPE, &levers, &one)
    }

    fn with_blocks(blocks: usize) -> Config {
        Config { num_layers: blocks, num_decoder_layers: blocks, ..Config::preset("tiny").unwrap() }
    }

    #[test]
    fn each_micro_batch_and_each_block_asks_for_as_much_as_the_others() {
        let launches = |blocks, samples, layers| calls(&with_blocks(blocks), samples, layers).launches;
        for layers in [None, Some(LayerMajor { kept_gradient_blocks: 99, ..LayerMajor::PLAIN })] {
            let [one, two, four] = [8, 4, 2].map(|samples| launches(3, samples, layers));
            assert_eq!(four - two, 2 * (two - one), "{layers:?}");
            let [few, more, most] = [2, 3, 5].map(|blocks| launches(blocks, 8, layers));
            assert_eq!(most - more, 2 * (more - few), "{layers:?}");
        }
    }

    #[test]
    fn requests_of_parts_add_up_to_those_of_a_step() {
        let bf16 = Precisions { parameters: DType::F32, activations: DType::BF16, gradients: DType::F32 };
        let counter = Counter::new(&with_blocks(3), bf16, 0.1, &|_| true).unwrap().on_device(&|_| [0; 2]);
        let totals = SquareSums::totals_needs(Path::Device, counter.trained.specs().len()).calls;
        let kept = LayerMajor { kept_gradient_blocks: 99, ..LayerMajor::PLAIN };
        let ways = [(0, None), (4, None), (6, Some(kept)), (6, Some(LayerMajor::PLAIN))];
        for (recompute_blocks, layer_major) in ways {
            for weight_copies in [false, true] {
                let levers = Levers {
                    micro_batch_samples: 2,
                    loss_chunk_rows: 16,
                    recompute_blocks,
                    layer_major,
                    weight_copies,
                    ..Levers::default()
                };
                let copies = if weight_copies { counter.copied_weights().tensors } else { 0 };
                let beside = totals + t5_ops::narrow_each_needs(Path::Device, copies).calls;
                let all = counter.calls(SHAPE, &levers, &|_| [Needs::default(); 2]) - beside;
                let PassCalls { blocks, head } = counter.pass_calls(SHAPE, &levers);
                let parts = if layer_major.is_some() { blocks + head * 4 } else { (blocks + head) * 4 };
                assert_eq!(parts.products, all.products, "{levers:?}");
                // Launches that begin the gradients that no product begins: those of the norms, and of two tables of positions.
                let begun = 2 * 3 + 3 * 3 + 2 + 2;
                let passes = if layer_major == Some(LayerMajor::PLAIN) { 1..=2 } else { 1..=1 };
                let more = all.launches - parts.launches;
                assert!((begun * passes.start()..=begun * passes.end()).contains(&more), "{levers:?}: {more}");
            }
        }
    }

    #[test]
    fn an_update_is_asked_for_once_for_what_is_handed_over_together() {
        let config = with_blocks(2);
        let parameters = ParameterSpec::all(&config).len() as u64;
        let major = calls(&config, 8, None);
        // Ids of encoder and decoder, two lists of lengths, one of samples, two of the loss, and the update. Losses, and totals.
        assert_eq!((major.uploads, major.downloads), (2 + 3 + 2 + 1, 2));
        // The launches without the update.
        let forward_and_backward = major.launches - 2 * parameters;
        assert!(forward_and_backward > 100, "{forward_and_backward} launches");
    }
}
