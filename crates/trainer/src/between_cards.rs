//! Sums over the cards of several processes, straight from card to card.
//!
//! Where the order of a sum is fixed, cards send each other their values. Each card adds up a part of the sum in the order of
//! [`collective::sums`], so the bits are the same as for processes that send through the host.

use candle_core::{DType, Device, Tensor};
use collective::sums::{To, dealt, fold};
use collective::{Extent, Group, Shards, network};
use cuda_device::nccl::{Cards, PendingCollective, SumTo};

use crate::error::Result;

/// Bytes that a card receives at a time where the order of a sum is fixed.
const PIECE_BYTES: usize = 16 << 20;
/// Bytes of the sums that are timed.
const TIMED_BYTES: usize = 16 << 20;

/// Bytes on each card for sums between cards, without NCCL's own.
pub(crate) fn buffers(shards: Shards, is_in_order: bool) -> u64 {
    if is_in_order && shards.processes > 1 { PIECE_BYTES as u64 } else { 0 }
}

/// The cards of all processes of a group.
#[derive(Clone, Debug)]
pub(crate) struct BetweenCards {
    group: Group,
    cards: Cards,
    /// Bytes received at a time where the order of a sum is fixed.
    piece_bytes: usize,
}

impl BetweenCards {
    /// Joins the cards of a group, this process with `device`. NCCL has allocated its memory when this returns.
    ///
    /// # Errors
    /// NCCL reports an error, or another process has ended.
    pub fn join(group: &Group, device: &Device) -> Result<Self> {
        let id = if group.is_first() { Cards::id()? } else { Vec::new() };
        let cards = Cards::join(device, &group.broadcast_from_root(id)?, group.rank(), group.size())?;
        let joined = Self { group: group.clone(), cards, piece_bytes: PIECE_BYTES };
        let x = Tensor::zeros(group.size(), DType::F32, device)?;
        for to in [To::All, To::One(0)] {
            joined.begin_sum(&x, to)?.complete()?;
        }
        let all = joined.with_all(|process| x.narrow(0, process, 1))?;
        let received = joined.with_all(|_| Tensor::zeros(1, DType::F32, device))?;
        joined.cards.begin_exchange(&all, &received)?.complete()?;
        joined.begin_broadcast(0, &x)?.complete()?;
        device.synchronize()?;
        Ok(joined)
    }

    fn with_all(&self, of: impl Fn(usize) -> candle_core::Result<Tensor>) -> Result<Vec<(usize, Tensor)>> {
        (0..self.group.size()).map(|process| Ok((process, of(process)?))).collect()
    }

    /// Bits per second that a process sends in a sum. All processes return the slowest one's figure.
    ///
    /// # Errors
    /// NCCL reports an error, or another process has ended.
    #[expect(clippy::cast_precision_loss, reason = "some MiB")]
    pub fn bits_per_second(&self, device: &Device) -> Result<f64> {
        let x = Tensor::zeros(TIMED_BYTES / size_of::<f32>(), DType::F32, device)?;
        let said = |mine: &[u64]| Ok(self.group.gather_numbers(mine)?);
        let slowest = network::shortest(said, || -> Result<()> {
            self.cards.begin_sum(&x, SumTo::All)?.complete()?;
            Ok(device.synchronize()?)
        })?;
        Ok(8.0 * self.sent_in_a_sum(TIMED_BYTES as u64) as f64 / slowest)
    }

    /// Bytes that a process sends in a sum for all: each process adds up its share, and sends the result to the others.
    fn sent_in_a_sum(&self, bytes: u64) -> u64 {
        let size = self.group.size() as u64;
        2 * bytes * (size - 1) / size
    }

    /// Begins to add up a tensor over all cards, in NCCL's order.
    ///
    /// # Errors
    /// NCCL reports an error.
    pub fn begin_sum(&self, x: &Tensor, to: To) -> Result<PendingCollective> {
        let (bytes, rank) = (bytes(x), self.group.rank());
        let (to, sent) = match to {
            To::All => (SumTo::All, self.sent_in_a_sum(bytes)),
            To::One(one) => (SumTo::One(one), if one == rank { 0 } else { bytes }),
        };
        self.group.note_sent(sent);
        Ok(self.cards.begin_sum(x, to)?)
    }

    /// Begins to copy the values of a tensor from process `root` to every card.
    ///
    /// # Errors
    /// NCCL reports an error.
    pub fn begin_broadcast(&self, root: usize, x: &Tensor) -> Result<PendingCollective> {
        if self.group.rank() == root {
            self.group.note_sent(bytes(x) * (self.group.size() as u64 - 1));
        }
        Ok(self.cards.begin_broadcast(root, x)?)
    }

    /// Adds up the sums of all shards in the order of their tree, into the first of `parts`. `parts` are this process's sums.
    ///
    /// # Errors
    /// NCCL reports an error, or the card has no memory.
    pub fn sum_in_order(&self, shards: Shards, parts: &[Tensor], to: To) -> Result<()> {
        let flat = parts.iter().map(Tensor::flatten_all).collect::<candle_core::Result<Vec<_>>>()?;
        let Some(whole) = flat.first() else { return Ok(()) };
        let size = self.group.size();
        let nodes: usize = (0..size).map(|process| shards.extents(process).len()).sum();
        let most = self.piece_bytes / whole.dtype().size_in_bytes() / nodes;
        let piece = if to == To::All { most * size } else { most };
        let elements = whole.elem_count();
        let of = |start: usize, process| dealt(start..elements.min(start + piece), process, size, 1, to);
        // Allocated before anything is sent: a process that has no memory for it has then asked nothing of the others.
        let received = nodes * of(0, self.group.rank()).len();
        let received = Tensor::zeros(received.max(1), whole.dtype(), whole.device())?;
        for start in (0..elements).step_by(piece) {
            self.sum_piece(shards, &flat, &received, |process| of(start, process), to)?;
        }
        Ok(())
    }

    /// Adds up one piece. `received` has room for this process's elements from every node.
    fn sum_piece(
        &self,
        shards: Shards,
        flat: &[Tensor],
        received: &Tensor,
        of: impl Fn(usize) -> std::ops::Range<usize>,
        to: To,
    ) -> Result<()> {
        let (rank, size) = (self.group.rank(), self.group.size());
        let summing: Vec<usize> = (0..size).filter(|&process| !of(process).is_empty()).collect();
        let part = |of: &Tensor, range: std::ops::Range<usize>| of.narrow(0, range.start, range.len());
        let mut sent = Vec::new();
        for &process in &summing {
            for values in flat {
                sent.push((process, part(values, of(process))?));
            }
        }
        let (mut nodes, mut extents): (Vec<(usize, Tensor)>, Vec<Extent>) = (Vec::new(), Vec::new());
        for process in (0..size).filter(|_| summing.contains(&rank)) {
            for extent in shards.extents(process) {
                let (place, elements) = (extents.len(), of(rank).len());
                nodes.push((process, part(received, place * elements..(place + 1) * elements)?));
                extents.push(extent);
            }
        }
        self.exchange(&sent, &nodes)?;
        let nodes = extents.into_iter().zip(nodes.into_iter().map(|(_, values)| values));
        let sum = fold(nodes, &mut |left: &mut Tensor, right: Tensor| t5_ops::add_in_place(left, &right))?;
        // In sums for one process, the sum is already at that process, though not at its place.
        let others = |process: &usize| to == To::All || *process == rank;
        let sent = sum.iter().flat_map(|sum| (0..size).filter(others).map(|process| (process, sum.clone())));
        let from = summing.into_iter().filter(others);
        let whole = from.map(|process| Ok((process, part(&flat[0], of(process))?)));
        self.exchange(&sent.collect::<Vec<_>>(), &whole.collect::<Result<Vec<_>>>()?)
    }

    fn exchange(&self, sent: &[(usize, Tensor)], received: &[(usize, Tensor)]) -> Result<()> {
        let to_others = sent.iter().filter(|(process, _)| *process != self.group.rank());
        self.group.note_sent(to_others.map(|(_, values)| bytes(values)).sum());
        Ok(self.cards.begin_exchange(sent, received)?.complete()?)
    }
}

fn bytes(x: &Tensor) -> u64 {
    (x.elem_count() * x.dtype().size_in_bytes()) as u64
}

#[cfg(all(test, feature = "nccl"))]
mod tests {
    use std::process::Command;

    use collective::sums::{Element, sum};
    use collective::threads;

    use super::*;

    /// Whether this process has an emulated card for each process of a test. Otherwise the test runs in a new process that has them: the
    /// number of cards is fixed when the first one is opened.
    fn has_cards(test: &str) -> bool {
        let cards = ("LOW_MEM_T5_EMULATED_CARDS", "3");
        if std::env::var(cards.0).as_deref() == Ok(cards.1) {
            return true;
        }
        // A machine with real cards has its own number of cards, whatever the variable says.
        let bytes = cuda_device::device_bytes(&cuda_device::open_card(0).expect("a card"));
        if !bytes.is_some_and(|bytes| bytes.name.contains("emulated")) {
            return false;
        }
        let mut there = Command::new(std::env::current_exe().unwrap());
        let name = format!("between_cards::tests::{test}");
        let ran = there.args(["--exact", &name]).env(cards.0, cards.1).output().unwrap();
        let text = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && text.contains("1 passed"), "{text}");
        false
    }

    fn card(group: &Group) -> Device {
        cuda_device::open_card(group.rank()).expect("a card for each process")
    }

    /// The sums of process `rank`, of gradients in f32.
    fn parts(shards: Shards, rank: usize, elements: usize) -> Vec<Vec<f32>> {
        let gradient = |node: usize, i: usize| ((node * 31 + i * 7) as f32).sin().exp();
        let nodes = shards.extents(rank).into_iter();
        nodes.map(|node| (0..elements).map(|i| gradient(node.first, i)).collect()).collect()
    }

    fn values(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn cards_add_up_in_the_order_of_processes_that_go_through_the_host() {
        const ELEMENTS: usize = 1001;
        if !has_cards("cards_add_up_in_the_order_of_processes_that_go_through_the_host") {
            return;
        }
        for (count, processes) in [(2, 2), (4, 2), (6, 2), (3, 3), (7, 3)] {
            let shards = Shards { count, processes };
            for to in [To::All, To::One(1)] {
                let both = threads::run(processes, |group| {
                    let rank = group.rank();
                    let device = card(&group);
                    let between =
                        BetweenCards { piece_bytes: 512, ..BetweenCards::join(&group, &device).expect("they join") };
                    let mine = parts(shards, rank, ELEMENTS);
                    let tensor = |values: &Vec<f32>| Tensor::new(values.as_slice(), &device).unwrap();
                    let tensors: Vec<Tensor> = mine.iter().map(tensor).collect();
                    between.sum_in_order(shards, &tensors, to).expect("a sum");
                    let in_memory = group.submit(move |wire| {
                        let mut bytes = mine
                            .iter()
                            .map(|values| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() });
                        let (mut whole, rest) = (bytes.next().expect("a sum"), bytes.collect::<Vec<_>>());
                        let rest: Vec<&[u8]> = rest.iter().map(Vec::as_slice).collect();
                        sum(wire, shards, Element::F32, (whole.as_mut_slice(), &rest), to).map(|()| whole)
                    });
                    let in_memory = in_memory.wait().expect("it lives").expect("a sum");
                    let expected: Vec<f32> =
                        in_memory.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
                    (values(&tensors[0]), expected)
                });
                for (rank, (got, expected)) in both.iter().enumerate() {
                    let is_wanted = to == To::All || rank == 1;
                    assert!(!is_wanted || got == expected, "{count} shards, process {rank} of {processes}, {to:?}");
                }
                assert!(both[1].0.len() == ELEMENTS && both[1].0.iter().all(|value| value.is_finite()));
            }
        }
    }

    #[test]
    fn two_processes_on_one_card_are_refused() {
        let joined = threads::run(2, |group| {
            let device = cuda_device::open_card(0).expect("a card");
            BetweenCards::join(&group, &device).map(drop).map_err(|error| error.to_string())
        });
        let is_refused = |error: &String| error.contains("ncclInvalidUsage");
        assert!(joined.iter().all(|joined| joined.as_ref().is_err_and(is_refused)), "{joined:?}");
    }

    #[test]
    fn sums_of_nccl_are_those_of_all_cards_and_what_is_sent_is_counted() {
        if !has_cards("sums_of_nccl_are_those_of_all_cards_and_what_is_sent_is_counted") {
            return;
        }
        let sums = threads::run(3, |group| {
            let device = card(&group);
            let between = BetweenCards::join(&group, &device).expect("they join");
            let before = group.spent().sent_bytes;
            let x = |number: usize| Tensor::new(&[number as f32, 1.0, -2.5], &device).unwrap();
            let (all, one, sent) = (x(group.rank()), x(group.rank()), x(7 + group.rank()));
            let pending = between.begin_sum(&all, To::All).unwrap();
            between.begin_sum(&one, To::One(2)).unwrap().complete().unwrap();
            pending.complete().unwrap();
            between.begin_broadcast(1, &sent).unwrap().complete().unwrap();
            let spent = group.spent().sent_bytes - before;
            assert!(between.bits_per_second(&device).unwrap() > 0.0);
            ([all, one, sent].map(|x| values(&x)), spent)
        });
        for (rank, ([all, one, sent], spent)) in sums.into_iter().enumerate() {
            assert_eq!(all, [3.0, 3.0, -7.5]);
            assert!(rank != 2 || one == all);
            assert_eq!(sent, [8.0, 1.0, -2.5]);
            // Of 12 bytes: 16 in the sum for all, 12 in the sum for one, 24 in the broadcast.
            assert_eq!(spent, [16 + 12, 16 + 12 + 24, 16][rank]);
        }
    }
}
