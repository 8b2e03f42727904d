//! Rounds that are recorded on a card have the bits of rounds launch by launch, although values change from one to the next. Rounds that
//! cannot be recorded run anyway. Runs on a card, or on the emulated one. There it also runs in processes whose streams work as early or
//! as late as their order allows, and whose driver records nothing.
#![cfg(feature = "cuda")]

#[path = "support/tensors.rs"]
mod tensors;

use candle_core::{DType, Device, Result, Tensor};
use cuda_device::{GraphInputs, GraphRounds, Turn};
use t5_ops::{Attended, Attention, CrossEntropy, Dropout, RelativePosition};

use self::tensors::{bits, is_emulated, tensor, test_alone};

/// Variables of the emulated card (`cuda-kernels/emulation`), and the last one of the program.
const STREAMS: &str = "LOW_MEM_T5_EMULATED_STREAMS";
const GRAPHS: &str = "LOW_MEM_T5_EMULATED_GRAPHS";
const SWITCH: &str = "LOW_MEM_T5_GRAPHS";
const WIDTH: usize = 32;
const HEADS: usize = 2;
const VOCABULARY: usize = 19;
const ROUNDS: usize = 9;

fn card() -> Device {
    cuda_device::open_card(0).expect("a card, or the emulated one")
}

fn is_recording() -> bool {
    [GRAPHS, SWITCH].iter().all(|name| std::env::var(name).is_err())
}

/// The input of a round: ids (B, T), lengths, samples, labels and step, whose values change each time.
struct Batch {
    ids: Tensor,
    lengths: Vec<usize>,
    samples: Vec<u32>,
    labels: Vec<u32>,
    step: u64,
}

impl Batch {
    fn new(round: usize, rows: usize, length: usize, card: &Device) -> Self {
        let lengths: Vec<usize> = (0..rows).map(|row| length - (row * 3 + round) % (length / 2)).collect();
        let id = |i: usize| ((i * 7 + round * 5) % VOCABULARY) as u32;
        let of_row = |row: usize| (0..length).map(move |t| (row, t));
        let label = |(row, t): (usize, usize)| if t < lengths[row] { id(row + t) } else { t5_ops::IGNORED_LABEL };
        Self {
            ids: Tensor::from_vec((0..rows * length).map(id).collect(), (rows, length), card).unwrap(),
            labels: (0..rows).flat_map(of_row).map(label).collect(),
            samples: (0..rows).map(|row| (row * 5 + round) as u32).collect(),
            step: round as u64,
            lengths,
        }
    }

    fn changing<'a>(&'a self, tensors: &'a [&'a Tensor]) -> GraphInputs<'a> {
        let Self { lengths, samples, step, .. } = self;
        GraphInputs { tensors, lengths: [lengths, &[]], samples, key: t5_ops::dropout_key(11, *step) }
    }
}

/// A layer: its weights, and the gradients of the table, the weight and the bias.
struct Layer {
    table: Tensor,
    weight: Tensor,
    bias: Tensor,
    probability: f32,
    gradients: [Tensor; 3],
}

/// The tensors that forward keeps.
#[derive(Clone)]
struct Saved {
    n: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
}

impl Layer {
    fn new(length: usize, probability: f32, card: &Device) -> Self {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, card).unwrap();
        let (table, weight) = ([VOCABULARY, WIDTH], [WIDTH, WIDTH]);
        let bias = [HEADS, 2 * length - 1];
        Self {
            table: tensor(1, &table, DType::F32, card),
            weight: tensor(2, &weight, DType::F32, card),
            bias: tensor(3, &bias, DType::F32, card),
            probability,
            gradients: [zeros(&table), zeros(&weight), zeros(&bias)],
        }
    }

    fn dropout<'a>(&self, site: u32, batch: &'a Batch) -> Option<Dropout<'a>> {
        let Self { probability, .. } = *self;
        let Batch { samples, step, .. } = batch;
        (probability > 0.0).then_some(Dropout { probability, seed: 11, step: *step, site, samples })
    }

    fn attention<'a>(&'a self, batch: &'a Batch) -> Attention<'a> {
        let (bias, dropout) = (Some(&self.bias), self.dropout(2, batch));
        Attention { bias, dropout, ..Attention::new(HEADS, &batch.lengths) }
    }

    fn forward(&self, batch: &Batch, dtype: DType) -> Result<(Tensor, Saved)> {
        let x = t5_ops::embedding(&batch.ids, &self.table, dtype)?;
        let norm = self.weight.narrow(0, 0, 1)?.flatten_all()?;
        let (n, _) = t5_ops::rms_norm(&x, &norm, 1e-6)?;
        let q = t5_ops::linear(&n, &self.weight)?;
        let (out, lse) = t5_ops::attention(&q, &n, &n, &self.attention(batch))?;
        let z = t5_ops::dropout_add(&x, &out, self.dropout(1, batch).as_ref())?;
        Ok((z, Saved { n, q, out, lse }))
    }

    fn backward(&self, saved: Saved, dz: Tensor, batch: &Batch) -> Result<()> {
        let Saved { n, q, out, lse } = saved;
        let [dtable, dweight, dbias] = &self.gradients;
        let dout = t5_ops::dropout(&dz, self.dropout(1, batch).as_ref())?;
        // Zeroed in each round, as a model does with the gradient of its bias: this launch has to be recorded, too.
        let fresh = t5_ops::zeros(dbias.dims(), DType::F32, dbias.device())?;
        let of = Attended { q: &q, k: &n, v: &n, out: &out, lse: &lse };
        let (dq, dk, dv) = t5_ops::attention_backward(&of, &dout, &self.attention(batch), Some(&fresh))?;
        t5_ops::add_in_place(dbias, &fresh)?;
        t5_ops::linear_backward_weight(&dq, &n, dweight, true)?;
        let dx = t5_ops::linear_backward_input_plus_product(&dq, &self.weight, None, Some(dk))?;
        t5_ops::add_in_place(&dx, &dv)?;
        t5_ops::embedding_backward(&batch.ids, &dx, dtable)
    }

    /// The loss and the gradient of the output. Only rows that have a label count, and these differ each time.
    fn head(&self, z: &Tensor, labels: &[u32]) -> Result<(f64, Tensor)> {
        let settings = CrossEntropy { logit_scale: 1.0, gradient_scale: 0.1, chunk_rows: 5, ..CrossEntropy::default() };
        let rows = z.flatten_to(1)?;
        let (loss, drows) = t5_ops::linear_cross_entropy_backward(&rows, &self.table, labels, &settings, None)?;
        Ok((loss.cross_entropy, drows.reshape(z.shape())?))
    }
}

type Kinds = GraphRounds<(usize, usize), usize>;

/// Runs a round, and returns its loss and whether its phases were launched.
fn round(rounds: &mut Kinds, layer: &Layer, batch: &Batch, dtype: DType) -> Result<(f64, bool)> {
    let external = layer.gradients.iter().map(Tensor::id).collect();
    rounds.begin(batch.ids.dims2()?, external, &batch.changing(&[&batch.ids]))?;
    let (mut z, mut saved) = (None, None);
    let was_done = rounds.phase(&mut |turn| {
        (z, saved) = (None, None);
        if turn == Turn::Work {
            let done = layer.forward(batch, dtype)?;
            (z, saved) = (Some(done.0), Some(done.1));
        }
        Ok::<_, candle_core::Error>(())
    })?;
    let z = rounds.leave(z)?.expect("the phase leaves it");
    let (loss, dz) = rounds.uncaptured(|| layer.head(&z, &batch.labels))?;
    let dz = rounds.enter(dz)?;
    rounds.phase(&mut |turn| match turn {
        Turn::Undo => Ok::<_, candle_core::Error>(()),
        Turn::Work => layer.backward(saved.clone().expect("kept"), dz.clone(), batch),
    })?;
    assert_eq!(rounds.recorded_host_state().copied(), (!was_done).then_some(3));
    rounds.end(Some(3));
    Ok((loss, !was_done))
}

/// Losses of rounds over batches of one size or two, the sums of gradients, and which rounds were launched.
fn trained(rounds: &mut Kinds, probability: f32, dtype: DType, card: &Device) -> (Vec<u64>, [Vec<u32>; 3], Vec<bool>) {
    let layer = Layer::new(12, probability, card);
    let mut losses = Vec::new();
    let launched = (0..ROUNDS).flat_map(|number| {
        // Batches of another size come between some.
        let rows: &[usize] = if number % 2 == 1 { &[3, 4] } else { &[3] };
        let each = |rows: &usize| {
            let (loss, was_launched) = round(rounds, &layer, &Batch::new(number, *rows, 12, card), dtype).unwrap();
            losses.push(loss.to_bits());
            was_launched
        };
        rows.iter().map(each).collect::<Vec<_>>()
    });
    let launched = launched.collect();
    (losses, layer.gradients.each_ref().map(bits), launched)
}

/// The losses and gradients of [`trained`] without [`GraphRounds`].
fn launch_by_launch(probability: f32, dtype: DType, card: &Device) -> (Vec<u64>, [Vec<u32>; 3]) {
    let layer = Layer::new(12, probability, card);
    let mut losses = Vec::new();
    for number in 0..ROUNDS {
        for rows in if number % 2 == 1 { &[3, 4][..] } else { &[3] } {
            let batch = Batch::new(number, *rows, 12, card);
            let (z, saved) = layer.forward(&batch, dtype).unwrap();
            let (loss, dz) = layer.head(&z, &batch.labels).unwrap();
            layer.backward(saved, dz, &batch).unwrap();
            losses.push(loss.to_bits());
        }
    }
    (losses, layer.gradients.each_ref().map(bits))
}

#[test]
fn recorded_rounds_have_the_bits_of_rounds_launch_by_launch() {
    let card = card();
    for (probability, dtype) in [(0.25, DType::F32), (0.25, DType::BF16), (0.0, DType::F32)] {
        let (losses, gradients) = launch_by_launch(probability, dtype, &card);
        assert!(losses.iter().all(|loss| f64::from_bits(*loss).is_finite()));
        let mut rounds = Kinds::default();
        let (got, of_rounds, launched) = trained(&mut rounds, probability, dtype, &card);
        assert_eq!(got, losses, "{probability} {dtype:?}: losses");
        assert!(of_rounds == gradients, "{probability} {dtype:?}: other gradients");
        // Batches of three rows are measured in the second round and recorded in the fifth. The sixth measures four rows, and releases the
        // arena. The eighth records three rows again, and the ninth four rows, in a larger arena, so the tenth records three once more.
        let expected: Vec<bool> = (0..13).map(|number| number >= 10 && is_recording()).collect();
        assert_eq!(launched, expected, "{probability} {dtype:?}");
        let held = rounds.bytes();
        assert_eq!(held > 0, is_recording());
        rounds.forget();
        assert_eq!(rounds.bytes(), 0);
    }
}

#[test]
fn rounds_that_cannot_be_recorded_are_done_all_the_same() {
    let card = card();
    let x = Tensor::new(&[1f32, 2., 3.], &card).unwrap();
    let samples = [0u32];
    // Memory that candle allocates, which would be the graph's; a copy to the host, which waits; a list that is not in `GraphInputs`.
    let others = [4usize];
    let q = tensor(5, &[1, 4, WIDTH], DType::F32, &card);
    let of_list = Attention::new(HEADS, &others);
    let works: [(&str, &dyn Fn() -> Result<Tensor>); 4] = [
        ("memory", &|| &x * 3.0),
        ("waits", &|| t5_ops::scaled(&x, f64::from(x.to_vec1::<f32>()?[1]))),
        ("list", &|| Ok(t5_ops::attention(&q, &q, &q, &of_list)?.0)),
        ("recorded", &|| t5_ops::scaled(&x, 2.0)),
    ];
    for (name, work) in works {
        let mut rounds = GraphRounds::<(), ()>::default();
        let expected = bits(&work().unwrap());
        for number in 0..6 {
            let changing = GraphInputs {
                tensors: &[&x],
                lengths: [&[], &[]],
                samples: &samples,
                key: t5_ops::dropout_key(1, number),
            };
            rounds.begin((), Vec::new(), &changing).unwrap();
            let mut y = None;
            let was_done = rounds.phase(&mut |turn| {
                y = if turn == Turn::Work { Some(work()?) } else { None };
                Ok::<_, candle_core::Error>(())
            });
            let is_launched = !was_done.unwrap();
            let y = rounds.leave(y).unwrap().unwrap();
            assert_eq!(bits(&y), expected, "{name}, round {number}");
            rounds.end(Some(()));
            assert_eq!(is_launched, name == "recorded" && number > 3 && is_recording(), "{name}, round {number}");
        }
    }
}

#[test]
fn rounds_with_other_memory_beside_their_own_are_recorded_again() {
    let card = card();
    let (mut rounds, mut launched) = (Kinds::default(), Vec::new());
    let [got, expected] = [true, false].map(|is_recorded| {
        let layers = [0, 1].map(|_| Layer::new(12, 0.25, &card));
        for number in 0..ROUNDS {
            // The second layer has the same values, and gradients at other addresses.
            let (layer, batch) = (&layers[usize::from(number > 5)], Batch::new(number, 3, 12, &card));
            let fresh = &mut Kinds::default();
            let (_, is_launched) =
                round(if is_recorded { &mut rounds } else { fresh }, layer, &batch, DType::F32).unwrap();
            launched.extend(is_recorded.then_some(is_launched));
        }
        layers.map(|layer| layer.gradients.each_ref().map(bits))
    });
    assert!(got == expected, "other gradients");
    let expected = [false, false, false, false, true, true, false, true, true].map(|is| is && is_recording());
    assert_eq!(launched, expected);
}

#[test]
fn rounds_that_are_recorded_long_after_they_were_measured_find_their_lists() {
    let card = card();
    let position = RelativePosition { buckets: 8, max_distance: 20, bidirectional: true };
    let table = tensor(7, &[position.buckets, HEADS], DType::F32, &card);
    // Buckets that are kept on the card for later requests, and more buckets than are kept.
    for tokens in [6, 5000] {
        let mut rounds = GraphRounds::<(), ()>::default();
        let bias = || t5_ops::relative_bias(&table, &position, tokens, tokens, 0);
        let expected = bits(&bias().unwrap());
        let ids = Tensor::new(&[3u32, 4], &card).unwrap();
        let mut launched = Vec::new();
        for number in 0..12 {
            let changing = GraphInputs {
                tensors: &[&ids],
                lengths: [&[], &[]],
                samples: &[],
                key: t5_ops::dropout_key(1, number),
            };
            rounds.begin((), Vec::new(), &changing).unwrap();
            let mut found = None;
            let was_done = rounds.phase(&mut |turn| {
                found = if turn == Turn::Work { Some(bias()?) } else { None };
                Ok::<_, candle_core::Error>(())
            });
            launched.push(!was_done.unwrap());
            let found = rounds.leave(found).unwrap().unwrap();
            assert_eq!(bits(&found), expected, "{tokens} tokens, round {number}");
            rounds.end(Some(()));
            if number == 6 {
                // As before an evaluation, which has lists of its own: enough that other lists are no longer kept.
                rounds.release();
                for other in 0..300 {
                    t5_ops::relative_bias(&table, &position, 1, 8 + other, 0).unwrap();
                }
            }
        }
        let expected = [false, false, false, false, true, true, true, false, true, true, true, true];
        assert_eq!(launched, expected.map(|is| is && is_recording()), "{tokens} tokens");
        assert_eq!(rounds.launched(), launched.iter().filter(|is| **is).count() as u64);
        assert_eq!(rounds.may_record(), std::env::var(SWITCH).is_err() && std::env::var(GRAPHS).is_err());
    }
}

#[test]
fn lists_of_a_recording_that_is_refused_are_not_found_by_others() {
    let card = card();
    let position = RelativePosition { buckets: 8, max_distance: 20, bidirectional: true };
    let table = tensor(7, &[position.buckets, HEADS], DType::F32, &card);
    let ids = Tensor::new(&[3u32, 4], &card).unwrap();
    let mut rounds = GraphRounds::<(), ()>::default();
    for number in 0..6 {
        let changing =
            GraphInputs { tensors: &[&ids], lengths: [&[], &[]], samples: &[], key: t5_ops::dropout_key(1, number) };
        rounds.begin((), Vec::new(), &changing).unwrap();
        // The fourth round is recorded, and has a list that was never uploaded.
        let keys = if number == 3 { 9 } else { 8 };
        let mut found = None;
        let work = &mut |turn| {
            found = if turn == Turn::Work { Some(t5_ops::relative_bias(&table, &position, 5, keys, 0)?) } else { None };
            Ok::<_, candle_core::Error>(())
        };
        assert!(rounds.phase(work).unwrap(), "round {number}");
        rounds.end(Some(()));
        let got = bits(&t5_ops::relative_bias(&table, &position, 5, keys, 0).unwrap());
        let on_host = t5_ops::relative_bias(&table.to_device(&Device::Cpu).unwrap(), &position, 5, keys, 0).unwrap();
        assert_eq!(got, bits(&on_host), "round {number}");
    }
    assert!(!is_recording() || !rounds.may_record());
}

#[test]
fn streams_that_do_their_work_late_and_what_records_nothing_change_no_bit() {
    let name = "recorded_rounds_have_the_bits_of_rounds_launch_by_launch";
    // A real card ignores variables of the emulated one, and has made recordings where the test expects none.
    let is_emulated = is_emulated(&card());
    let variables = [(STREAMS, "early"), (STREAMS, "late"), (GRAPHS, "none"), (SWITCH, "none")];
    for (variable, value) in variables.into_iter().filter(|(name, _)| is_emulated || *name == SWITCH) {
        let ran = test_alone(name, &[(variable, value)]);
        assert!(ran.status.success(), "{variable}={value}: {}", String::from_utf8_lossy(&ran.stdout));
    }
}
