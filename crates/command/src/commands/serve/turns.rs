//! [`Turns`]: the sizes of running answers that grow in a step.
//!
//! A step takes about as long as it has rows. The shortest answers take part in every step. Those of another size do as much work for each of
//! their clients as the shortest for each of theirs, and all longer ones together at most as much as the shortest, as far as each step allows it.
//! So long answers, however many, at most double the time of short ones, and never stand still.

use std::collections::BTreeMap;

/// The parts of a row in which it is counted.
const PARTS: i64 = 1 << 10;

/// The answers in progress of a size.
#[derive(Clone, Copy, Debug, Default)]
pub struct InProgress {
    pub rows: usize,
    pub clients: usize,
}

/// The turns of sizes.
#[derive(Debug, Default)]
pub struct Turns {
    /// Parts of rows that each size may still compute. Below zero: rows that it had in advance.
    credit: BTreeMap<u32, i64>,
}

impl Turns {
    /// Whether each size takes part in the next step, for the answers in progress of each size.
    pub fn next(&mut self, sizes: &BTreeMap<u32, InProgress>) -> BTreeMap<u32, bool> {
        let Some((&shortest, own)) = sizes.first_key_value() else { return BTreeMap::new() };
        for &size in sizes.keys() {
            self.credit.entry(size).or_default();
        }
        self.credit.retain(|&size, _| size > shortest);
        let clients = |size: &u32| sizes.get(size).map_or(1, |of_size| of_size.clients.max(1)) as i64;
        let shares = self.credit.keys().map(clients).sum::<i64>().max(own.clients as i64).max(1);
        let own = own.rows as i64 * PARTS;
        self.credit.iter_mut().for_each(|(size, credit)| *credit += (own * clients(size) / shares).max(PARTS));
        let takes_part = |(&size, of_size): (&u32, &InProgress)| {
            let Some(credit) = self.credit.get_mut(&size) else { return (size, true) };
            let is_due = *credit >= of_size.rows as i64 * PARTS;
            // A turn that is not needed is not saved up.
            *credit = if is_due { 0 } else { *credit };
            (size, is_due)
        };
        sizes.iter().map(takes_part).collect()
    }

    /// Counts a prompt of a size, which is computed before other answers go on.
    pub fn begins(&mut self, size: u32, tokens: usize) {
        *self.credit.entry(size).or_default() -= tokens as i64 * PARTS;
    }

    /// Whether a size may begin an answer. Otherwise it has had more than its part.
    pub fn may_begin(&self, size: u32) -> bool {
        self.credit.get(&size).is_none_or(|&credit| credit >= 0)
    }

    /// Nothing is in progress, so no client has waited.
    pub fn clear(&mut self) {
        self.credit.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_one_client(rows: &[(u32, usize)]) -> BTreeMap<u32, InProgress> {
        rows.iter().map(|&(size, rows)| (size, InProgress { rows, clients: 1 })).collect()
    }

    #[test]
    fn a_client_of_long_answers_does_as_much_work_as_one_of_short_answers() {
        let sizes = BTreeMap::from([
            (1, InProgress { rows: 8, clients: 8 }),
            (4, InProgress { rows: 16, clients: 1 }),
            (5, InProgress { rows: 4, clients: 2 }),
        ]);
        let (mut turns, mut taken) = (Turns::default(), [0; 3]);
        for _ in 0..160 {
            turns.next(&sizes).values().zip(&mut taken).for_each(|(&takes, taken)| *taken += usize::from(takes));
        }
        // Of 160 rows of each short client: 10 steps of 16 rows, and 80 of 4 for two.
        assert_eq!(taken, [160, 10, 80]);
    }

    #[test]
    fn longer_answers_together_do_as_much_work_as_the_shortest_and_go_on() {
        let check = |rows: &[(u32, usize)], expected: &[usize]| {
            let (mut turns, rows) = (Turns::default(), of_one_client(rows));
            let mut taken = vec![0; expected.len()];
            for _ in 0..120 {
                turns.next(&rows).values().zip(&mut taken).for_each(|(&takes, taken)| *taken += usize::from(takes));
            }
            assert_eq!(taken, expected, "steps of {rows:?} in 120");
        };
        check(&[(1, 8)], &[120]);
        check(&[(1, 8), (5, 4)], &[120, 120]);
        check(&[(1, 8), (5, 64)], &[120, 15]);
        check(&[(1, 8), (4, 8), (5, 64)], &[120, 60, 7]);
        check(&[(1, 1), (4, 30), (5, 40), (6, 60)], &[120, 4, 3, 2]);
        assert!(Turns::default().next(&BTreeMap::new()).is_empty());
    }

    #[test]
    fn a_long_prompt_counts_before_its_size_begins_another_or_goes_on() {
        let mut turns = Turns::default();
        let rows = of_one_client(&[(1, 8), (5, 1)]);
        turns.next(&rows);
        turns.begins(5, 80);
        let steps = (0..).take_while(|_| !turns.next(&rows)[&5]).count();
        assert!(steps == 10 && turns.may_begin(5), "{steps}");
        turns.begins(5, 80);
        assert!(!turns.may_begin(5) && turns.may_begin(1));
        // Without shorter answers no client waits for it.
        turns.next(&of_one_client(&[(5, 1)]));
        assert!(turns.may_begin(5));
    }
}
