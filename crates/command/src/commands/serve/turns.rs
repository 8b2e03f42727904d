//! [`Turns`]: the sizes of running answers that grow in a step.
//!
//! A step takes about as long as it has rows. The shortest answers take part in every step. All longer ones together do at most as much work as
//! they do, as far as each step allows it. So long answers, however many, at most double the time of short ones, and never stand still.

use std::collections::BTreeMap;

/// The turns of sizes.
#[derive(Debug, Default)]
pub struct Turns {
    /// Rows that each size may still compute. Below zero: rows that it had in advance.
    credit: BTreeMap<u32, i64>,
}

impl Turns {
    /// Whether each size takes part in the next step, for the rows in progress of each size.
    pub fn next(&mut self, rows: &BTreeMap<u32, usize>) -> BTreeMap<u32, bool> {
        let Some((&shortest, &own)) = rows.first_key_value() else { return BTreeMap::new() };
        for &size in rows.keys() {
            self.credit.entry(size).or_default();
        }
        self.credit.retain(|&size, _| size > shortest);
        let each = (own / self.credit.len().max(1)).max(1) as i64;
        self.credit.values_mut().for_each(|credit| *credit += each);
        let takes_part = |(&size, &rows): (&u32, &usize)| {
            let Some(credit) = self.credit.get_mut(&size) else { return (size, true) };
            let is_due = *credit >= rows as i64;
            // A turn that is not needed is not saved up.
            *credit = if is_due { 0 } else { *credit };
            (size, is_due)
        };
        rows.iter().map(takes_part).collect()
    }

    /// Counts a prompt of a size, which is computed before other answers go on.
    pub fn begins(&mut self, size: u32, tokens: usize) {
        *self.credit.entry(size).or_default() -= tokens as i64;
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

    #[test]
    fn longer_answers_together_do_as_much_work_as_the_shortest_and_go_on() {
        let check = |rows: &[(u32, usize)], expected: &[usize]| {
            let (mut turns, rows) = (Turns::default(), rows.iter().copied().collect());
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
        let rows = BTreeMap::from([(1, 8), (5, 1)]);
        turns.next(&rows);
        turns.begins(5, 80);
        let steps = (0..).take_while(|_| !turns.next(&rows)[&5]).count();
        assert!(steps == 10 && turns.may_begin(5), "{steps}");
        turns.begins(5, 80);
        assert!(!turns.may_begin(5) && turns.may_begin(1));
        // Without shorter answers no client waits for it.
        turns.next(&BTreeMap::from([(5, 1)]));
        assert!(turns.may_begin(5));
    }
}
