//! [`Fair`]: which of the waiting texts are computed next, and [`Sides`]: whether texts or running answers are.
//!
//! Texts that get a score or a vector are computed in batches of few tokens. The next one is of the share with the least work so far, as in
//! start-time fair queueing (Goyal et al., 1996): the tokens of a share's texts move its place in time, and a share that comes back begins at
//! the present. A client's work counts as often as it has sizes of jobs, so that many sizes have no more than one.
//!
//! A text of more tokens than a batch is computed alone, and not two of these in a row while there are shorter ones. So whatever others send, a
//! text waits for at most as many tokens of another share as its own share had since it came, and for a batch and a longest text.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use openai_server::Share;

/// A text that waits.
#[derive(Clone, Copy, Debug)]
pub struct Waiting<K> {
    /// Texts of a share are computed in this order.
    pub key: u64,
    pub share: Share,
    pub tokens: usize,
    /// Texts of different kinds are computed apart.
    pub kind: K,
}

/// The places of shares in the order.
#[derive(Debug, Default)]
pub struct Fair {
    /// The work that each share had, if it is ahead of the present.
    had: BTreeMap<Share, u64>,
    present: u64,
    /// Whether the last text was longer than a batch.
    was_long: bool,
}

impl Fair {
    /// The keys of the next texts: together at most `most` tokens, each counted as long as the longest, or one text alone.
    /// `fits(texts, tokens)`: whether there is memory for so many of this length.
    pub fn next<K: Copy + PartialEq>(
        &mut self,
        waiting: &[Waiting<K>],
        most: usize,
        fits: impl Fn(usize, usize) -> bool,
    ) -> Vec<u64> {
        let mut of_share: BTreeMap<Share, Vec<Waiting<K>>> = BTreeMap::new();
        waiting.iter().for_each(|text| of_share.entry(text.share).or_default().push(*text));
        // The next one of each share is its last.
        of_share.values_mut().for_each(|texts| texts.sort_by_key(|text| std::cmp::Reverse(text.key)));
        let mut sizes: BTreeMap<IpAddr, u64> = BTreeMap::new();
        of_share.keys().for_each(|share| *sizes.entry(share.client).or_default() += 1);
        let least = of_share.keys().map(|share| self.place(*share)).min();
        self.present = least.unwrap_or(self.present);
        let (mut batch, mut longest, mut kind) = (Vec::new(), 0, None);
        loop {
            let is_next = |text: &Waiting<K>| match kind {
                None => true,
                Some(kind) => {
                    let tokens = text.tokens.max(longest);
                    text.kind == kind && (batch.len() + 1) * tokens <= most && fits(batch.len() + 1, tokens)
                }
            };
            let heads = of_share.values().filter_map(|texts| texts.last()).filter(|text| is_next(text));
            let place = |text: &&Waiting<K>| (self.place(text.share), text.tokens, text.key);
            let mut heads: Vec<&Waiting<K>> = heads.collect();
            if batch.is_empty() && self.was_long && heads.iter().any(|text| text.tokens <= most) {
                heads.retain(|text| text.tokens <= most);
            }
            let Some(&text) = heads.into_iter().min_by_key(place) else { break };
            if batch.is_empty() {
                (self.was_long, kind) = (text.tokens > most, Some(text.kind));
            }
            let had = self.place(text.share) + text.tokens as u64 * sizes[&text.share.client];
            self.had.insert(text.share, had);
            of_share.get_mut(&text.share).and_then(Vec::pop);
            longest = longest.max(text.tokens);
            batch.push(text.key);
        }
        self.had.retain(|_, had| *had > self.present);
        batch
    }

    fn place(&self, share: Share) -> u64 {
        self.had.get(&share).map_or(self.present, |had| *had.max(&self.present))
    }

    /// Nothing waits.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Divides the time between texts and running answers, so that each share of either has the same.
#[derive(Debug, Default)]
pub struct Sides {
    texts: Duration,
    answers: Duration,
}

impl Sides {
    /// Whether it is the texts' turn, rather than that of running answers, for the shares that have some of each.
    pub fn is_turn_of_texts(&mut self, texts: &BTreeSet<Share>, answers: &BTreeSet<Share>) -> bool {
        // Who does nothing saves nothing up.
        match (texts.is_empty(), answers.is_empty()) {
            (true, _) => self.texts = self.texts.max(self.answers),
            (_, true) => self.answers = self.answers.max(self.texts),
            _ => {}
        }
        !texts.is_empty() && (answers.is_empty() || self.texts <= self.answers)
    }

    /// Whether answers had more time than texts, with a time for answers of so many shares that was not counted yet.
    pub fn answers_are_ahead(&self, time: Duration, shares: usize) -> bool {
        self.answers + each(time, shares) > self.texts
    }

    /// Counts time for texts of so many shares.
    pub fn texts_took(&mut self, time: Duration, shares: usize) {
        self.texts += each(time, shares);
    }

    /// Counts time for answers of so many shares.
    pub fn answers_took(&mut self, time: Duration, shares: usize) {
        self.answers += each(time, shares);
    }

    /// Nothing is in progress.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The part of each of some shares.
fn each(time: Duration, shares: usize) -> Duration {
    time / u32::try_from(shares.max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(client: u8, size: u32) -> Share {
        Share { client: IpAddr::from([10, 0, 0, client]), size }
    }

    const MOST: usize = 256;

    /// A server of texts: what waits, and for each text what others had since it came.
    #[derive(Default)]
    struct Texts {
        fair: Fair,
        waiting: Vec<Waiting<()>>,
        key: u64,
        /// Of each text that waits: the tokens of each client since it came, its own included.
        since: BTreeMap<u64, BTreeMap<IpAddr, usize>>,
    }

    impl Texts {
        fn come(&mut self, share: Share, tokens: usize) {
            self.waiting.push(Waiting { key: self.key, share, tokens, kind: () });
            self.since.insert(self.key, BTreeMap::new());
            self.key += 1;
        }

        /// Computes a batch. For each text of it: itself, and the tokens of each client from its coming to its end.
        fn step(&mut self) -> Vec<(Waiting<()>, BTreeMap<IpAddr, usize>)> {
            let batch = self.fair.next(&self.waiting, MOST, |_, _| true);
            let texts: Vec<Waiting<()>> =
                batch.iter().flat_map(|key| self.waiting.iter().find(|text| text.key == *key)).copied().collect();
            let longest = texts.iter().map(|text| text.tokens).max().unwrap_or(0);
            assert!(texts.len() == 1 || texts.len() * longest <= MOST, "{texts:?}");
            self.waiting.retain(|text| !batch.contains(&text.key));
            for since in self.since.values_mut() {
                texts.iter().for_each(|text| *since.entry(text.share.client).or_default() += text.tokens);
            }
            texts.into_iter().map(|text| (text, self.since.remove(&text.key).expect("it waited"))).collect()
        }
    }

    /// Steps of eight clients that each have a few short texts again and again, beside clients who always have as many of their lengths as the
    /// engine takes up. Returns for each client the tokens that it had.
    fn beside(hostile: &[&[usize]], steps: usize) -> BTreeMap<IpAddr, usize> {
        let (mut texts, mut had, mut random) = (Texts::default(), BTreeMap::new(), 1_u64);
        for step in 0..steps {
            for client in 0..8 {
                let own = share(client, 1);
                // A client waits for its answer, and then for a moment.
                if texts.waiting.iter().all(|text| text.share != own) && !(step + client as usize).is_multiple_of(3) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (0..1 + (random >> 62)).for_each(|_| texts.come(own, 8 + (random >> 59) as usize % 8));
                }
            }
            for (number, lengths) in hostile.iter().enumerate() {
                let own = share(100 + number as u8, 2 + lengths[0].ilog2() / 2);
                while texts.waiting.iter().filter(|text| text.share == own).map(|text| text.tokens).sum::<usize>()
                    < MOST
                {
                    texts.come(own, lengths[texts.key as usize % lengths.len()]);
                }
            }
            for (text, since) in texts.step() {
                *had.entry(text.share.client).or_default() += text.tokens;
                let own = since[&text.share.client];
                let longest = hostile.iter().flat_map(|lengths| lengths.iter()).max().copied().unwrap_or(0).max(16);
                let worst =
                    since.iter().filter(|(client, _)| **client != text.share.client).max_by_key(|(_, tokens)| **tokens);
                if let Some((client, &tokens)) = worst.filter(|_| text.tokens <= MOST) {
                    assert!(
                        tokens <= own + longest + MOST,
                        "{client} had {tokens} before {text:?}, whose client had {own}"
                    );
                }
            }
        }
        had
    }

    #[test]
    fn a_text_waits_for_no_more_of_another_client_than_its_own_had_and_a_batch_and_a_text() {
        let floods: [&[&[usize]]; 7] = [
            &[],
            &[&[511]],
            &[&[511], &[511], &[511], &[400]],
            &[&[8]],
            &[&[8, 9], &[511], &[100, 30]],
            &[&[200]],
            &[&[255], &[257], &[64], &[1]],
        ];
        for hostile in floods {
            let had = beside(hostile, 600);
            let of = |client: u8| had.get(&share(client, 0).client).copied().unwrap_or(0);
            assert!((0..8).all(|client| of(client) > 0));
            for number in 0..hostile.len() as u8 {
                assert!(of(100 + number) > 0, "{hostile:?}: client {number} stands still");
            }
        }
    }

    #[test]
    fn clients_who_always_have_texts_have_the_same_whatever_their_lengths() {
        let mut texts = Texts::default();
        let (mut had, lengths) = (BTreeMap::new(), [8, 30, 100, 250]);
        for _ in 0..8000 {
            for (client, &tokens) in lengths.iter().enumerate() {
                let own = share(client as u8, 1);
                while texts.waiting.iter().filter(|text| text.share == own).count() < MOST / tokens {
                    texts.come(own, tokens);
                }
            }
            texts.step().into_iter().for_each(|(text, _)| *had.entry(text.share.client).or_insert(0) += text.tokens);
        }
        let (least, most) = (had.values().min().expect("four"), had.values().max().expect("four"));
        assert!(most - least <= 2 * MOST, "{had:?}");
    }

    #[test]
    fn the_longest_texts_are_not_computed_one_after_the_other_while_there_are_shorter_ones() {
        let mut texts = Texts::default();
        (1..4).for_each(|client| texts.come(share(client, 4), 500));
        let mut order = Vec::new();
        while order.len() < 6 {
            texts.come(share(0, 1), 10);
            order.extend(texts.step().into_iter().map(|(text, _)| text.tokens));
        }
        assert!(order.windows(2).all(|pair| pair != [500, 500]) && order.contains(&500), "{order:?}");
    }

    #[test]
    fn who_comes_back_saved_nothing_up_and_owes_what_it_had() {
        let mut texts = Texts::default();
        texts.come(share(1, 4), 500);
        texts.step();
        for _ in 0..20 {
            texts.come(share(2, 1), 10);
            assert_eq!(texts.step()[0].0.tokens, 10);
        }
        texts.come(share(1, 4), 500);
        texts.come(share(2, 1), 10);
        assert_eq!(texts.step()[0].0.tokens, 10, "it had 500 before, and the other one 200");
    }

    #[test]
    fn a_batch_has_one_kind_and_what_fits() {
        let mut fair = Fair::default();
        let text = |key, tokens, kind| Waiting { key, share: share(1, 1), tokens, kind };
        let waiting = [text(0, 10, 'a'), text(1, 10, 'a'), text(2, 10, 'b'), text(3, 10, 'a')];
        assert_eq!(fair.next(&waiting, MOST, |_, _| true), [0, 1]);
        assert_eq!(fair.next(&waiting[2..], MOST, |_, _| true), [2]);
        let many: Vec<_> = (0..9).map(|key| text(key, 10, 'a')).collect();
        assert_eq!(fair.next(&many, 50, |_, _| true).len(), 5);
        assert_eq!(fair.next(&many, MOST, |texts, _| texts <= 3).len(), 3);
        assert_eq!(fair.next(&[text(0, 1000, 'a')], MOST, |_, _| false), [0], "one alone has its memory");
    }

    #[test]
    fn texts_and_answers_have_time_by_their_shares_and_save_nothing_up() {
        let (texts, answers) =
            (BTreeSet::from([share(1, 4)]), (2..10).map(|client| share(client, 1)).collect::<BTreeSet<_>>());
        let (mut sides, mut steps) = (Sides::default(), [0; 2]);
        for _ in 0..1000 {
            if sides.is_turn_of_texts(&texts, &answers) {
                sides.texts_took(Duration::from_millis(8), texts.len());
                steps[0] += 1;
            } else {
                sides.answers_took(Duration::from_millis(1), answers.len());
                steps[1] += 1;
            }
        }
        // An eighth of the time in texts: one of 8 ms, and then 64 steps of 1 ms.
        assert!((14..=16).contains(&steps[0]), "{steps:?}");
        let none = BTreeSet::new();
        (0..1000).for_each(|_| {
            assert!(!sides.is_turn_of_texts(&none, &answers));
            sides.answers_took(Duration::from_millis(1), 8);
        });
        let in_a_row = (0..).take_while(|_| {
            let is_turn = sides.is_turn_of_texts(&texts, &answers);
            sides.texts_took(Duration::from_millis(8), 1);
            is_turn
        });
        assert!(in_a_row.count() <= 1, "a side that did nothing has no more than its turn");
        assert!(sides.is_turn_of_texts(&texts, &none));
    }
}
