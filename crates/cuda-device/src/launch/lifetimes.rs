//! The lifetimes of tensors of a round, and their places in the arena: two tensors whose lifetimes overlap lie apart.
//!
//! A tensor's lifetime is counted in launches. It begins with the launch before which the tensor is taken. It ends with the last launch that is
//! given an address in it, and so does not depend on when the tensor is dropped.

use std::collections::BTreeMap;

use candle_core::DType;

/// A tensor in an arena begins at a multiple of this many elements: the strictest alignment of any kernel or product.
pub(super) const ALIGNMENT: usize = 64;
/// How many kinds of elements there are. Each has its own part of the arena.
pub(super) const KINDS: usize = 2;
/// The dtype of each kind.
pub(super) const DTYPES: [DType; KINDS] = [DType::F32, DType::BF16];
/// A number of elements for each kind.
pub(super) type Sizes = [usize; KINDS];

/// The kind of elements of a dtype, if the arena has it.
pub(super) fn kind_of(dtype: DType) -> Option<usize> {
    DTYPES.iter().position(|other| *other == dtype)
}

/// The lifetime of a tensor: its number of elements, and the numbers of its first and last launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Lifetime {
    pub kind: usize,
    pub elements: usize,
    pub first: u64,
    pub last: u64,
}

/// The lifetimes of a round's tensors, in the order in which they are taken.
#[derive(Clone, Debug, Default)]
pub(super) struct Lifetimes {
    all: Vec<Lifetime>,
    /// The tensors whose memory no later tensor has taken: the address of the first byte, with the end and the tensor's number.
    at: BTreeMap<u64, (u64, usize)>,
    launches: u64,
}

impl Lifetimes {
    /// Notes that a tensor is taken, with `bytes` bytes of memory at `address`.
    pub(super) fn take(&mut self, kind: usize, elements: usize, address: u64, bytes: u64) {
        let end = address + bytes;
        // Tensors that had some of this memory have been dropped.
        while let Some((&from, _)) = self.at.range(..end).next_back().filter(|(_, (until, _))| *until > address) {
            self.at.remove(&from);
        }
        self.at.insert(address, (end, self.all.len()));
        self.all.push(Lifetime { kind, elements, first: self.launches, last: self.launches });
    }

    /// Notes that the next launch is given this address.
    pub(super) fn use_at(&mut self, address: u64) {
        let found = self.at.range(..=address).next_back().filter(|(_, (end, _))| address < *end);
        if let Some((_, &(_, number))) = found {
            self.all[number].last = self.launches;
        }
    }

    pub(super) fn launch(&mut self) {
        self.launches += 1;
    }

    pub(super) fn all(&self) -> &[Lifetime] {
        &self.all
    }

    /// Whether the lifetimes noted so far are those that were measured.
    pub(super) fn follows(&self, measured: &Lifetimes) -> bool {
        let same = |(now, then): (&Lifetime, &Lifetime)| {
            Lifetime { last: then.last, ..*now } == *then && now.last <= then.last
        };
        self.all.len() <= measured.all.len() && self.all.iter().zip(&measured.all).all(same)
    }

    /// The first element of each tensor in its kind's part of the arena, and the number of elements of each part.
    pub(super) fn places(&self) -> (Vec<usize>, Sizes) {
        // No order in which tensors choose their place is the best for every round, so several are tried.
        let area = |life: &Lifetime| life.elements as u64 * (life.last - life.first + 1);
        let by = |key: &dyn Fn(&Lifetime) -> u64| {
            let mut order: Vec<usize> = (0..self.all.len()).collect();
            order.sort_by_key(|&number| std::cmp::Reverse((key(&self.all[number]), number)));
            self.placed(&order)
        };
        let ways = [
            by(&|life| life.elements as u64),
            by(&area),
            by(&|life| life.last - life.first),
            by(&|life| life.last),
            by(&|life| u64::MAX - life.first),
        ];
        let least = |kind: usize| (0..ways.len()).min_by_key(|&way| ways[way].1[kind]).unwrap_or(0);
        let least: [usize; KINDS] = std::array::from_fn(least);
        let place = |(number, life): (usize, &Lifetime)| ways[least[life.kind]].0[number];
        let places = self.all.iter().enumerate().map(place).collect();
        (places, std::array::from_fn(|kind| ways[least[kind]].1[kind]))
    }

    /// The places where tensors choose in this order: each takes the first place that is free during its whole lifetime.
    fn placed(&self, order: &[usize]) -> (Vec<usize>, Sizes) {
        let (mut places, mut sizes) = (vec![0; self.all.len()], Sizes::default());
        let mut placed: [Vec<usize>; KINDS] = Default::default(); // by place
        for &number in order {
            let life = self.all[number];
            let mut from = 0;
            let overlaps = |other: &Lifetime| other.first <= life.last && life.first <= other.last;
            for &other in placed[life.kind].iter().filter(|&&other| overlaps(&self.all[other])) {
                if places[other] >= from + life.elements {
                    break;
                }
                from = from.max((places[other] + self.all[other].elements).next_multiple_of(ALIGNMENT));
            }
            places[number] = from;
            sizes[life.kind] = sizes[life.kind].max(from + life.elements);
            let position = placed[life.kind].partition_point(|&other| places[other] <= from);
            placed[life.kind].insert(position, number);
        }
        (places, sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lifetimes of one kind: elements, first launch, last launch.
    fn lifetimes(all: &[(usize, u64, u64)]) -> Lifetimes {
        let life = |&(elements, first, last): &(usize, u64, u64)| Lifetime { kind: 0, elements, first, last };
        Lifetimes { all: all.iter().map(life).collect(), ..Lifetimes::default() }
    }

    #[test]
    fn tensors_that_live_at_the_same_time_lie_apart_and_others_share() {
        let mut bits = 7u64;
        for count in [1, 2, 5, 40, 200] {
            let mut next = |most: u64| {
                // Knuth's constants for a linear congruential generator.
                bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (bits >> 33) % most
            };
            let all: Vec<_> = (0..count).map(|i| (1 + next(900) as usize, i, i + next(6))).collect();
            let work = lifetimes(&all);
            let (places, sizes) = work.places();
            for (i, a) in work.all().iter().enumerate() {
                assert!(places[i] % ALIGNMENT == 0 && places[i] + a.elements <= sizes[0]);
                for (j, b) in work.all().iter().enumerate().skip(i + 1) {
                    let apart = places[i] + a.elements <= places[j] || places[j] + b.elements <= places[i];
                    assert!(apart || a.last < b.first || b.last < a.first, "{a:?} and {b:?}");
                }
            }
            // At most a tenth more than the elements that live at one time, with an alignment for each tensor.
            let held =
                |at: u64| all.iter().filter(move |(_, first, last)| (*first..=*last).contains(&at)).map(|one| one.0);
            let most = (0..count + 6).map(|at| held(at).map(|n| n + ALIGNMENT).sum::<usize>()).max().unwrap();
            assert!(sizes[0] <= most + most / 10 + 900, "{} for {most} of {count}", sizes[0]);
        }
    }

    #[test]
    fn a_tensor_lives_until_the_last_launch_that_is_given_an_address_in_it() {
        let mut seen = Lifetimes::default();
        seen.take(0, 64, 1000, 256);
        seen.launch();
        seen.take(0, 64, 2000, 256);
        seen.use_at(1255);
        seen.use_at(1256);
        seen.launch();
        // The first tensor is gone, and another has a part of its memory.
        seen.take(1, 16, 1100, 32);
        seen.use_at(1000);
        seen.use_at(1110);
        seen.use_at(999);
        let of = |number: usize| (seen.all()[number].first, seen.all()[number].last);
        assert_eq!([of(0), of(1), of(2)], [(0, 1), (1, 1), (2, 2)]);
    }

    #[test]
    fn other_work_does_not_follow_what_was_measured() {
        let measured = lifetimes(&[(8, 0, 3), (4, 1, 1)]);
        for (now, follows) in [
            (vec![], true),
            (vec![(8, 0, 2)], true),
            (vec![(8, 0, 3), (4, 1, 1)], true),
            (vec![(8, 0, 4)], false),
            (vec![(9, 0, 3)], false),
            (vec![(8, 0, 3), (4, 2, 2)], false),
            (vec![(8, 0, 3), (4, 1, 1), (4, 1, 1)], false),
        ] {
            assert_eq!(lifetimes(&now).follows(&measured), follows, "{now:?}");
        }
    }
}
