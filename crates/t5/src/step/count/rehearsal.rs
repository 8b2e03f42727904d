//! Events carried out on counted tensors, one unit and one micro-batch at a time. The counts are remembered.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use candle_core::DType;
use t5_ops::{Calls, Distillation, Mask, TokenLoss, TopLogits};

use super::{BlockArithmetic, Precisions, Shape};
use crate::config::Config;
use crate::context::{Noise, StepContext};
use crate::error::Result;
use crate::gradients::Gradients;
use crate::layers::attention::SourceGradient;
use crate::layers::logit_head::LogitHead;
use crate::micro_batch::{MicroBatch, Taught, Teacher};
use crate::network::Network;
use crate::ops::{Counted, Kept, Ledger, Ops, Work};
use crate::parameters::{Parameter, ParameterSpec, Part};
use crate::pooling::{Pooling, VectorGradients};
use crate::reach::{Keep, Reach};
use crate::step::observer::Interrupts;
use crate::step::run::Step;
use crate::step::schedule::{Backward, Event, ToEmbedding, Unit};

/// The counts of one event for one micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    /// The largest number of bytes alive during the event, beyond the bytes alive before it.
    pub extra: u64,
    /// The bytes by which `extra` grows where weights are read from files matrix by matrix, or by rows.
    pub weights: u64,
    /// Bytes alive after the event, less those alive before it; negative where the event frees memory.
    pub after: i64,
    /// Saved activations in `after`.
    pub saved: u64,
    /// Logits and the sums of the loss in `extra`.
    pub loss: u64,
    pub work: Work,
    pub packed: Kept,
    /// Bytes in the host's memory, for a device.
    pub on_host: u64,
    /// Bytes that are read from files where weights are read matrix by matrix.
    pub paged_in: u64,
    /// The requests to a card.
    pub calls: Calls,
}

/// The gradient of the encoder's output when a decoder block begins its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    NotWanted,
    First,
    Later,
}

/// The most counts that are remembered. A run that cuts batches asks for new shapes in every step, so the table is as large as it can be: 0.2 MiB
/// with 1,024 places, of which seven in eight can be taken.
const MAX_REMEMBERED: usize = 896;

/// A teacher of a rehearsal.
#[derive(Debug)]
enum CountedTeacher {
    /// Its head, and the width of its states.
    Head(Box<LogitHead<Counted>>, usize),
    /// Its largest logits are there.
    TopLogits,
}

/// One event of one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scene {
    Embed {
        decoder: bool,
    },
    Forward {
        unit: Unit,
        keep: Keep,
    },
    Head {
        chunk_rows: usize,
    },
    /// The gradient of the decoder's output, kept for a second pass.
    Begin,
    Backward(BackwardScene),
    /// The gradient of a stack's first activations enters the embedding without its unit.
    Enter {
        decoder: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BackwardScene {
    pub unit: Unit,
    pub keep: Keep,
    pub is_last_use: bool,
    /// Whether the gradient of the decoder's output stays for a second pass.
    pub keeps_dz: bool,
    pub passes_on: bool,
    pub trains_table: bool,
    /// Whether this is the first block of its stack that backward enters.
    pub is_first: bool,
    pub source: Source,
    pub into_embedding: bool,
}

#[derive(Debug)]
pub(super) struct Rehearsal {
    ledger: Ledger,
    network: Network<Counted>,
    parameters: Vec<Parameter<Counted>>,
    /// Accumulators of all trained parameters. They are counted as gradients, not here.
    gradients: RefCell<Gradients<Counted>>,
    /// The same before the first contribution.
    no_gradients: Gradients<Counted>,
    trains_tables: [Vec<bool>; 2],
    cx: StepContext,
    /// Whether each sample's cross-entropy has a weight.
    weighs_samples: bool,
    weighs_classes: bool,
    /// The teacher whose logits the loss compares with.
    teacher: Option<CountedTeacher>,
    /// How vectors are made whose gradients are what backward begins with.
    pulls: Option<Pooling>,
    /// For each block of encoder and decoder, the first block that is like it.
    like: [Vec<usize>; 2],
    remembered: RefCell<HashMap<(Shape, Scene), Cost>>,
}

/// The multiply-adds of a block.
pub(super) struct BlockWork {
    pub forward: f64,
    /// Recomputation and backward; `None` where backward does not enter the block.
    pub entered: Option<BlockArithmetic>,
}

impl Rehearsal {
    pub fn new(
        config: &Config,
        precisions: Precisions,
        dropout: f64,
        is_trained: &dyn Fn(&ParameterSpec) -> bool,
        has_copies: bool,
    ) -> Result<Rehearsal> {
        let ledger = Ledger::default();
        let specs = ParameterSpec::all(config);
        let parameters = parameters(&specs, precisions.parameters, &ledger);
        let copies: Vec<Option<Counted>> =
            if has_copies { copies(config, &specs, &precisions, &ledger) } else { Vec::new() };
        let network = Network::new(config, &parameters, &copies, true)?;
        let trains: Vec<bool> = specs.iter().map(is_trained).collect();
        let names: HashSet<&str> =
            specs.iter().zip(&trains).filter(|(_, trains)| **trains).map(|(spec, _)| spec.name.as_str()).collect();
        let mut gradients =
            Gradients::new(&parameters, precisions.gradients, &|parameter| names.contains(parameter.name.as_str()));
        let no_gradients = gradients.clone();
        for (index, parameter) in parameters.iter().enumerate().filter(|(index, _)| trains[*index]) {
            gradients.complete(index, &parameter.tensor)?;
        }
        let cx = StepContext {
            seed: 0,
            step: 0,
            dropout,
            adapter_dropout: config.lora.as_ref().map_or(0.0, |lora| lora.dropout),
            activations: precisions.activations,
            recompute_blocks: 0,
            loss_chunk_rows: 1,
            target_tokens: 1,
            token_loss: TokenLoss::default(),
        };
        let like = [false, true].map(|decoder| alike(config, (&specs, &trains), decoder));
        let trains_tables = [false, true].map(|decoder| network.stack(decoder).trained_tables(&gradients));
        let (gradients, remembered) = (RefCell::new(gradients), RefCell::default());
        Ok(Rehearsal {
            ledger,
            network,
            parameters,
            gradients,
            no_gradients,
            trains_tables,
            cx,
            weighs_samples: false,
            weighs_classes: false,
            teacher: None,
            pulls: None,
            like,
            remembered,
        })
    }

    pub fn minimise(&mut self, token_loss: TokenLoss) {
        self.cx.token_loss = token_loss;
    }

    pub fn weigh_samples(&mut self) {
        self.weighs_samples = true;
    }

    pub fn weigh_classes(&mut self) {
        self.weighs_classes = true;
    }

    /// # Errors
    /// The teacher's activation is not known.
    pub fn learn_from(&mut self, teacher: Option<(&Config, DType)>) -> Result<()> {
        self.teacher = Some(match teacher {
            None => CountedTeacher::TopLogits,
            Some((teacher, dtype)) => {
                let parameters = parameters(&ParameterSpec::all(teacher), dtype, &self.ledger);
                let head = Network::new(teacher, &parameters, &[], true)?.logit_head();
                CountedTeacher::Head(Box::new(head), teacher.stack(true).width)
            }
        });
        Ok(())
    }

    pub fn pull_vectors(&mut self, pooling: Pooling) {
        self.pulls = Some(pooling);
    }

    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub fn network(&self) -> &Network<Counted> {
        &self.network
    }

    pub fn parameters(&self) -> &[Parameter<Counted>] {
        &self.parameters
    }

    /// Gradients before their first contribution.
    pub fn no_gradients(&self) -> Gradients<Counted> {
        self.no_gradients.clone()
    }

    pub fn cx(&self) -> &StepContext {
        &self.cx
    }

    /// Blocks of a stack.
    pub fn blocks(&self, decoder: bool) -> usize {
        self.like[usize::from(decoder)].len()
    }

    /// Whether there is a decoder.
    pub fn has_decoder(&self) -> bool {
        self.network.has_decoder()
    }

    /// Whether the position tables of the encoder and of the decoder are trained.
    pub fn trains_tables(&self) -> [&[bool]; 2] {
        self.trains_tables.each_ref().map(Vec::as_slice)
    }

    /// The first unit that is like this one.
    pub fn like(&self, unit: Unit) -> Unit {
        match unit {
            Unit::Norm { .. } => unit,
            Unit::Block { decoder, block } => Unit::Block { decoder, block: self.like[usize::from(decoder)][block] },
        }
    }

    pub fn head(&self, shape: Shape, chunk_rows: usize) -> Cost {
        self.cost(shape, Scene::Head { chunk_rows })
    }

    /// The counts of a scene. The caller has replaced each unit by the first one like it.
    pub fn cost(&self, shape: Shape, scene: Scene) -> Cost {
        if let Some(cost) = self.remembered.borrow().get(&(shape, scene)) {
            return *cost;
        }
        let cost = self.rehearse(shape, scene).expect("counting cannot fail");
        let mut remembered = self.remembered.borrow_mut();
        if remembered.len() >= MAX_REMEMBERED {
            remembered.clear();
        }
        remembered.insert((shape, scene), cost);
        cost
    }

    fn rehearse(&self, shape: Shape, scene: Scene) -> Result<Cost> {
        let (ledger, mut gradients) = (&self.ledger, self.gradients.borrow_mut());
        let batches = [self.micro_batch(shape, scene)];
        if let Scene::Enter { decoder } = scene {
            let dx = self.activations(shape, decoder);
            ledger.begin();
            let (live, ids) = (ledger.live(), batches[0].ids(decoder));
            let noise = Noise { dropout: self.cx.dropout, ..Noise::NONE };
            let (stack, table) = (self.network.stack(decoder), self.network.table(decoder));
            stack.embed_backward(ids, table, dx, &noise, &mut gradients)?;
            return Ok(self.counted_since(live, 0));
        }
        let cx = match scene {
            Scene::Head { chunk_rows } => StepContext { loss_chunk_rows: chunk_rows, ..self.cx },
            _ => self.cx,
        };
        let mut step = Step::new(&self.network, &self.parameters, &cx, &batches, None)?;
        let event = self.prepare(&mut step, (&batches[0], shape), scene, &mut gradients)?;
        ledger.begin();
        let live = ledger.live();
        run(&mut step, event, &mut gradients)?;
        Ok(self.counted_since(live, step.saved_bytes()))
    }

    /// Activations of a stack, (B, T, D).
    fn activations(&self, shape: Shape, decoder: bool) -> Counted {
        let tokens = if decoder { shape.target_tokens } else { shape.source_tokens };
        let width = self.network.table(decoder).tensor.dims()[1];
        self.ledger.tensor(&[shape.samples, tokens, width], self.cx.activations)
    }

    /// Gives a stack's own and cross attention its bias and the encoder's output.
    fn enter(
        &self,
        step: &mut Step<Counted>,
        (batch, shape): (&MicroBatch<Counted>, Shape),
        decoder: bool,
    ) -> Result<()> {
        let bias = self.network.bias_of(batch, decoder, 0)?;
        step.set_stage(decoder, bias, decoder.then(|| self.activations(shape, false)));
        Ok(())
    }

    /// The event of a scene, in a step that is just before it.
    fn prepare(
        &self,
        step: &mut Step<Counted>,
        batch: (&MicroBatch<Counted>, Shape),
        scene: Scene,
        gradients: &mut Gradients<Counted>,
    ) -> Result<Event> {
        let (of, last) = (0..1, self.network.has_decoder());
        Ok(match scene {
            Scene::Embed { decoder } => Event::Embed { decoder, of },
            Scene::Forward { unit, keep } => {
                self.enter(step, batch, unit.is_decoder())?;
                step.set_activations(self.activations(batch.1, unit.is_decoder()));
                Event::Forward { unit, of, keep, in_memory: true }
            }
            Scene::Head { .. } => {
                step.set_activations(self.activations(batch.1, last));
                Event::Head { of }
            }
            Scene::Begin => {
                step.set_output_gradient(self.activations(batch.1, last));
                Event::Begin { of, is_last_use: false, wants_source: false }
            }
            Scene::Enter { .. } => unreachable!("no event of a unit"),
            Scene::Backward(scene) => Event::Backward(self.prepare_backward(step, batch, scene, gradients)?),
        })
    }

    fn prepare_backward(
        &self,
        step: &mut Step<Counted>,
        batch: (&MicroBatch<Counted>, Shape),
        scene: BackwardScene,
        gradients: &mut Gradients<Counted>,
    ) -> Result<Backward> {
        let decoder = scene.unit.is_decoder();
        self.enter(step, batch, decoder)?;
        step.set_activations(self.activations(batch.1, decoder));
        run(step, Event::Forward { unit: scene.unit, of: 0..1, keep: scene.keep, in_memory: true }, gradients)?;
        drop(step.take_output());
        self.enter(step, batch, decoder)?;
        let gradient = self.activations(batch.1, decoder);
        if scene.keeps_dz {
            step.set_output_gradient(gradient.clone());
        }
        let is_encoder_norm = self.network.has_decoder() && matches!(scene.unit, Unit::Norm { decoder: false });
        let source = match scene.source {
            _ if is_encoder_norm => SourceGradient::Wanted(Some(gradient.clone())),
            Source::NotWanted => SourceGradient::NotWanted,
            Source::First => SourceGradient::Wanted(None),
            Source::Later => SourceGradient::Wanted(Some(self.activations(batch.1, false))),
        };
        let has_dbias = scene.trains_table && !scene.is_first && !self.network.stack(decoder).has_own_biases();
        let dbias = has_dbias.then(|| self.network.bias_of(batch.0, decoder, 0)).transpose()?.flatten();
        step.set_gradients((!is_encoder_norm).then_some(gradient), source, dbias);
        Ok(Backward {
            unit: scene.unit,
            of: 0..1,
            next: None,
            is_last_use: scene.is_last_use,
            passes_on: scene.passes_on,
            trains_table: scene.trains_table,
            to_embedding: if scene.into_embedding { ToEmbedding::Now } else { ToEmbedding::No },
        })
    }

    fn micro_batch(&self, shape: Shape, scene: Scene) -> MicroBatch<Counted> {
        let is_head = matches!(scene, Scene::Head { .. });
        let by = self.teacher.as_ref().filter(|_| is_head).map(|teacher| match teacher {
            // The states are counted with the batch.
            CountedTeacher::Head(head, width) => Teacher::States {
                states: self.ledger.beside(&[shape.samples, shape.target_tokens, *width], self.cx.activations),
                head: LogitHead::clone(head),
            },
            CountedTeacher::TopLogits => Teacher::Top(TopLogits::none().expect("counting cannot fail")),
        });
        let taught = by.map(|by| Taught { by, of: Distillation { alpha: 1.0, temperature: 1.0 } });
        MicroBatch {
            weights: (self.weighs_samples && is_head).then(Vec::new),
            class_factors: self.weighs_classes.then(Vec::new),
            vectors: self.pulls.map(|pooling| VectorGradients { pooling, values: Vec::new() }),
            taught,
            ..batch(&self.ledger, shape)
        }
    }

    fn counted_since(&self, live: u64, saved: u64) -> Cost {
        let ledger = &self.ledger;
        Cost {
            extra: ledger.peak() - live,
            weights: ledger.peak_with_weights() - ledger.peak(),
            after: ledger.live().cast_signed() - live.cast_signed(),
            saved,
            loss: ledger.loss(),
            work: ledger.work(),
            packed: ledger.kept(),
            on_host: ledger.on_host(),
            paged_in: ledger.paged_in(),
            calls: ledger.calls(),
        }
    }

    /// The arithmetic of a block, forward and backward.
    pub fn block_work(&self, shape: Shape, decoder: bool, block: usize, reach: Reach) -> BlockWork {
        let unit = self.like(Unit::Block { decoder, block });
        let stack = if decoder { reach.decoder } else { reach.encoder };
        let forward = self.cost(shape, Scene::Forward { unit, keep: Keep::Nothing }).work.all;
        let passes_on = block.checked_sub(1).map_or(stack.enters_embedding(), |below| stack.enters_block(below));
        let source = if decoder && reach.encoder.enters_norm() { Source::Later } else { Source::NotWanted };
        let entered = stack.enters_block(block).then(|| {
            let backward = |keep| {
                let scene = BackwardScene {
                    unit,
                    keep,
                    is_last_use: true,
                    keeps_dz: false,
                    passes_on,
                    trains_table: false,
                    is_first: false,
                    source,
                    into_embedding: false,
                };
                self.cost(shape, Scene::Backward(scene)).work
            };
            let (everything, input) = (backward(Keep::Everything), backward(Keep::Input));
            let again = input - everything;
            BlockArithmetic { again: again.all, heads: again.attention, backward: everything.all }
        });
        BlockWork { forward, entered }
    }
}

fn run(step: &mut Step<Counted>, event: Event, gradients: &mut Gradients<Counted>) -> Result<()> {
    step.run(&[event], gradients, &mut Interrupts(&|| false)).map(|_| ())
}

/// The parameters of a model, whose memory is counted elsewhere. Those of blocks and tables count the bytes that are read from a file.
fn parameters(specs: &[ParameterSpec], dtype: DType, ledger: &Ledger) -> Vec<Parameter<Counted>> {
    let parameter = |spec: &ParameterSpec| {
        let (shape, dtype) = (spec.tensor_shape(), spec.dtype(dtype));
        let tensor = match spec.part {
            Part::EncoderNorm | Part::DecoderNorm => ledger.beside(&shape, dtype),
            _ => ledger.in_file_beside(&shape, dtype),
        };
        Parameter { name: spec.name.clone(), tensor, part: spec.part, quantisation: spec.quantisation }
    };
    specs.iter().map(parameter).collect()
}

/// The copies of weights that products would cast. Their memory is counted elsewhere.
fn copies(config: &Config, specs: &[ParameterSpec], precisions: &Precisions, ledger: &Ledger) -> Vec<Option<Counted>> {
    let copy = |spec: &ParameterSpec| {
        spec.takes_copy(precisions.parameters, config).then(|| ledger.beside(&spec.tensor_shape(), DType::BF16))
    };
    specs.iter().map(copy).collect()
}

/// A micro-batch without tokens.
pub(super) fn batch(ledger: &Ledger, shape: Shape) -> MicroBatch<Counted> {
    let Shape { samples, source_tokens, target_tokens } = shape;
    let ids = |tokens| ledger.beside(&[samples, tokens], DType::U32);
    MicroBatch {
        sources: ids(source_tokens),
        decoder_inputs: ids(target_tokens),
        source_lengths: Vec::new(),
        target_lengths: Vec::new(),
        labels: Vec::new(),
        samples: Vec::new(),
        weights: None,
        class_factors: None,
        vectors: None,
        answers: Vec::new(),
        skips_adapter: false,
        taught: None,
    }
}

/// For each block of a stack, the first block that has and trains the same parameters.
fn alike(config: &Config, (specs, trains): (&[ParameterSpec], &[bool]), decoder: bool) -> Vec<usize> {
    let blocks = config.stack(decoder).blocks;
    let seen: Vec<Mask> = (0..blocks).map(|block| config.block(decoder, block).own.mask).collect();

    // Backward of block 0 ends with the table of positions.
    let mut masks: Vec<Vec<(bool, &str, &[usize])>> =
        (0..blocks).map(|block| vec![(block == 0, "", &[][..])]).collect();
    for (spec, trains) in specs.iter().zip(trains) {
        let block = match spec.part {
            Part::Encoder { block } if !decoder => block,
            Part::Decoder { block } if decoder => block,
            _ => continue,
        };
        // Adapters may be in some blocks only, and of different ranks.
        let number = format!(".{block}.");
        let name = spec.name.split_once(&number).map_or(spec.name.as_str(), |(_, name)| name);
        masks[block].push((*trains, name, &spec.shape));
    }
    let first = |block: usize| {
        (0..block).find(|&other| masks[other] == masks[block] && seen[other] == seen[block]).unwrap_or(block)
    };
    (0..blocks).map(first).collect()
}
