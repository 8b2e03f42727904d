//! The sum of a gradient over all shards, in an order that does not depend on which process computed which.
//!
//! Shards are the leaves of a binary tree, in their order. A node is the elementwise sum of its two halves. So a process can add up
//! the nodes that are its own alone, and the owner of an element adds the nodes of all processes in the tree's order.

use std::ops::Range;

use half::bf16;

use crate::engine::{PIECE_BYTES, Result};
use crate::shards::{Extent, Shards};
use crate::values::Values;
use crate::wire::Wire;

/// The elements of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Single precision.
    F32,
    /// Double precision.
    F64,
    /// bfloat16: two elements are added in f32, and their sum is rounded to nearest.
    Bf16,
}

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F64 => 8,
            Self::Bf16 => 2,
        }
    }

    /// Adds `other` to `sum`, element by element.
    pub fn add(self, sum: &mut [u8], other: &[u8]) {
        match self {
            Self::F32 => add(sum, other, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes()),
            Self::F64 => add(sum, other, |a, b| (f64::from_le_bytes(a) + f64::from_le_bytes(b)).to_le_bytes()),
            Self::Bf16 => add(sum, other, |a, b| {
                let [a, b] = [a, b].map(|value| bf16::from_le_bytes(value).to_f32());
                bf16::from_f32(a + b).to_le_bytes()
            }),
        }
    }
}

fn add<const N: usize>(sum: &mut [u8], other: &[u8], of: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    let (sum, other) = (sum.as_chunks_mut::<N>().0, other.as_chunks::<N>().0);
    sum.iter_mut().zip(other).for_each(|(sum, other)| *sum = of(*sum, *other));
}

/// The processes that get a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// Every process.
    All,
    /// This process alone.
    One(usize),
}

/// Bytes in memory during a sum: the bytes to send, the received bytes, and the sums. `is_elsewhere`: values are not in memory, so
/// those of a piece are copied there.
pub fn buffers(shards: Shards, is_elsewhere: bool) -> u64 {
    let most = (0..shards.processes).map(|rank| shards.extents(rank).len()).max().unwrap_or(1);
    let pieces = 2 * most + 1 + usize::from(is_elsewhere);
    if shards.processes == 1 { 0 } else { (PIECE_BYTES * pieces) as u64 }
}

/// Sums a gradient over all shards. `whole` and then `rest` are this process's sums, those of [`Shards::extents`].
/// Afterwards `whole` is the whole sum in the processes of `to`, and undefined in the others.
///
/// # Errors
/// As [`Wire::exchange`] and [`Values`].
pub fn sum<V: Values + ?Sized>(
    wire: &Wire,
    shards: Shards,
    element: Element,
    (whole, rest): (&mut V, &[&V]),
    to: To,
) -> Result<()> {
    let (size, rank) = (wire.size(), wire.rank());
    if size == 1 && rest.is_empty() {
        return Ok(());
    }
    let extents: Vec<Vec<Extent>> = (0..size).map(|process| shards.extents(process)).collect();
    let bytes = whole.bytes();
    // Elements of each process. A process that adds up all of them receives as many from each of the others.
    let share = PIECE_BYTES / size / element.bytes() * element.bytes();
    let piece = if to == To::All { share * size } else { share };
    let (mut send, mut received) = (Vec::new(), Vec::new());
    for start in (0..bytes).step_by(piece.max(1)) {
        let here = start..bytes.min(start + piece);
        // The elements of each process, which adds them up.
        let of = |process: usize| dealt(here.clone(), process, size, element.bytes(), to);
        send.clear();
        for process in 0..size {
            whole.read(of(process), &mut send)?;
            rest.iter().try_for_each(|part| part.read(of(process), &mut send))?;
        }
        let mine = of(rank).len();
        let send_bytes: Vec<usize> = (0..size).map(|process| of(process).len() * (1 + rest.len())).collect();
        let received_bytes: Vec<usize> = extents.iter().map(|extents| extents.len() * mine).collect();
        // If nothing is added up here, `received` is empty.
        received.resize(received_bytes.iter().sum(), 0);
        wire.exchange(&send, &send_bytes, &mut received, &received_bytes)?;
        let nodes = extents.iter().flatten().copied();
        let mut add = |left: &mut &mut [u8], right: &mut [u8]| -> Result<()> {
            element.add(left, right);
            Ok(())
        };
        let sum = fold(nodes.zip(received.chunks_mut(mine.max(1))), &mut add)?.unwrap_or_default();
        match to {
            To::One(_) if mine == 0 => {}
            To::One(_) => whole.write(of(rank), &mut |bytes| {
                bytes.copy_from_slice(sum);
                Ok(())
            })?,
            To::All => {
                let bytes: Vec<usize> = (0..size).map(|process| of(process).len()).collect();
                whole.write(here, &mut |gathered| wire.gather_into(sum, gathered, &bytes))?;
            }
        }
    }
    Ok(())
}

/// The part of a range that a process adds up. An element has the length `units`: its bytes, or 1.
pub fn dealt(here: Range<usize>, process: usize, size: usize, units: usize, to: To) -> Range<usize> {
    match to {
        To::One(one) if one == process => here,
        To::One(_) => here.start..here.start,
        To::All => {
            let elements = here.len() / units;
            let place = |process: usize| here.start + process * elements / size * units;
            place(process)..place(process + 1)
        }
    }
}

/// The sum of consecutive nodes, in the tree's order. `add` adds the second to the first. `None` without nodes.
///
/// # Errors
/// `add` returns an error.
pub fn fold<T, E>(
    nodes: impl Iterator<Item = (Extent, T)>,
    add: &mut impl FnMut(&mut T, T) -> Result<(), E>,
) -> Result<Option<T>, E> {
    let mut sums: Vec<(Extent, T)> = Vec::new();
    for node in nodes {
        sums.push(node);
        while let [.., (left, _), (right, _)] = &sums[..]
            && let Some(both) = left.with(*right)
        {
            join(&mut sums, both, add)?;
        }
    }
    // If the number of shards is no power of two, the smaller nodes at the end come first.
    while let [.., (left, _), (right, _)] = &sums[..] {
        let both = Extent { first: left.first, count: left.count + right.count };
        join(&mut sums, both, add)?;
    }
    Ok(sums.pop().map(|(_, sum)| sum))
}

fn join<T, E>(
    sums: &mut Vec<(Extent, T)>,
    both: Extent,
    add: &mut impl FnMut(&mut T, T) -> Result<(), E>,
) -> Result<(), E> {
    if let (Some((_, right)), Some((extent, left))) = (sums.pop(), sums.last_mut()) {
        add(left, right)?;
        *extent = both;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads;

    /// The sum of one gradient from each shard by `processes` processes, as each of them has it.
    fn sums(count: usize, processes: usize, elements: usize, to: To) -> Vec<Vec<u8>> {
        let shards = Shards { count, processes };
        threads::run(processes, move |group| {
            let gradient = |shard: usize| -> Vec<u8> {
                (0..elements).flat_map(|i| ((shard * 31 + i * 7) as f32).sin().exp().to_le_bytes()).collect()
            };
            let mut parts: Vec<(Extent, Vec<u8>)> = Vec::new();
            for shard in shards.owned_by(group.rank()) {
                parts.push((Extent::single(shard), gradient(shard)));
                while let [.., (left, _), (right, _)] = &parts[..]
                    && let Some(both) = left.with(*right)
                {
                    let (_, right) = parts.pop().expect("two");
                    let (extent, left) = parts.last_mut().expect("two");
                    Element::F32.add(left, &right);
                    *extent = both;
                }
            }
            let extents: Vec<Extent> = parts.iter().map(|(extent, _)| *extent).collect();
            assert_eq!(extents, shards.extents(group.rank()));
            let summed = group.submit(move |wire| {
                let rest: Vec<&[u8]> = parts.iter().skip(1).map(|(_, part)| part.as_slice()).collect();
                let mut whole = parts[0].1.clone();
                sum(wire, shards, Element::F32, (whole.as_mut_slice(), &rest), to).map(|()| whole)
            });
            summed.wait().expect("the thread lives").expect("threads do not get lost")
        })
    }

    #[test]
    fn any_number_of_processes_gets_the_same_bits() {
        for count in [4, 6, 8] {
            let alone = sums(count, 1, 1001, To::All).swap_remove(0);
            for processes in (2..=count).filter(|processes| count % processes == 0) {
                for (rank, sum) in sums(count, processes, 1001, To::All).into_iter().enumerate() {
                    assert_eq!(sum, alone, "{count} shards, process {rank} of {processes}");
                }
                assert_eq!(sums(count, processes, 1001, To::One(1))[1], alone);
            }
        }
    }

    #[test]
    fn a_gradient_of_many_pieces_is_summed_to_its_last_element() {
        let elements = PIECE_BYTES / 4 + 12_345;
        let alone = sums(2, 1, elements, To::All).swap_remove(0);
        assert!(sums(2, 2, elements, To::All).iter().all(|sum| *sum == alone));
    }

    #[test]
    fn bf16_is_added_in_f32_and_rounded_once() {
        let bytes = |values: [f32; 2]| values.map(|value| bf16::from_f32(value).to_le_bytes()).concat();
        let mut sum = bytes([1.0, 256.0]);
        Element::Bf16.add(&mut sum, &bytes([2.0, 1.0]));
        // 257 has nine bits: the nearest with eight is 256.
        assert_eq!(sum, bytes([3.0, 256.0]));
    }
}
