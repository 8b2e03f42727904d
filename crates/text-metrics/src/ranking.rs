//! Scores of rankings: how early the relevant texts of a query come, as trec_eval defines them, cut at ten.
//!
//! MRR@10 is the mean over queries of 1 / rank of the first relevant text. NDCG@10 is the mean of the discounted gain Σ gain / log2(1 + rank) over
//! that of the best order (Järvelin and Kekäläinen, 2002). Both are 0 for a query without a relevant text.

use std::collections::BTreeSet;

/// The texts that are looked at.
const CUT: usize = 10;

/// Removes the texts of a query that no longer decide its scores, given the score and the gain of each. The order stays.
pub fn keep_leaders(texts: &mut Vec<(f64, f64)>) {
    let leaders = |key: fn(&(f64, f64)) -> f64| {
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by(|one, other| key(&texts[*other]).total_cmp(&key(&texts[*one])));
        order.truncate(CUT);
        order
    };
    let kept: BTreeSet<usize> = leaders(|text| text.0).into_iter().chain(leaders(|text| text.1)).collect();
    *texts = kept.into_iter().map(|at| texts[at]).collect();
}

/// The sums of both scores over queries.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ranking {
    queries: u64,
    mrr: f64,
    ndcg: f64,
}

impl Ranking {
    /// Adds a query with the score and the gain of each of its texts; a gain above 0 is relevant. Texts with equal scores keep their order.
    pub fn add(&mut self, texts: &[(f64, f64)]) {
        let mut ranked = texts.to_vec();
        ranked.sort_by(|one, other| other.0.total_cmp(&one.0));
        let gains: Vec<f64> = ranked.iter().map(|(_, gain)| *gain).collect();
        self.add_found(&gains, &gains);
    }

    /// Adds a query with the gains of its texts, the best first, and those of all that were judged.
    pub(crate) fn add_found(&mut self, gains: &[f64], judged: &[f64]) {
        let discounted = |gains: &[f64]| -> f64 {
            let places = gains.iter().take(CUT).enumerate();
            #[expect(clippy::cast_precision_loss, reason = "at most ten places")]
            places.map(|(place, gain)| gain.max(0.0) / (place as f64 + 2.0).log2()).sum()
        };
        let mut best = judged.to_vec();
        best.sort_by(|one, other| other.total_cmp(one));
        let ideal = discounted(&best);
        self.queries += 1;
        self.ndcg += if ideal > 0.0 { discounted(gains) / ideal } else { 0.0 };
        let first = gains.iter().take(CUT).position(|gain| *gain > 0.0);
        #[expect(clippy::cast_precision_loss, reason = "at most ten places")]
        let reciprocal = first.map_or(0.0, |place| 1.0 / (place as f64 + 1.0));
        self.mrr += reciprocal;
    }

    /// The number of queries.
    pub fn queries(&self) -> u64 {
        self.queries
    }

    /// MRR@10 and NDCG@10; `None` without a query.
    pub fn means(&self) -> Option<[f64; 2]> {
        #[expect(clippy::cast_precision_loss, reason = "a number of queries")]
        let queries = self.queries as f64;
        (self.queries > 0).then(|| [self.mrr / queries, self.ndcg / queries])
    }
}

#[cfg(test)]
mod tests {
    use super::{Ranking, keep_leaders};

    #[test]
    fn the_texts_that_stay_decide_the_scores() {
        let texts: Vec<(f64, f64)> =
            (0..500_u32).map(|at| (f64::from(at * 37 % 101), f64::from(at * 53 % 7))).collect();
        let of = |texts: &[(f64, f64)]| {
            let mut ranking = Ranking::default();
            ranking.add(texts);
            ranking
        };
        let mut kept = Vec::new();
        for text in &texts {
            kept.push(*text);
            if kept.len() == 50 {
                keep_leaders(&mut kept);
                assert!(kept.len() <= 20);
            }
        }
        assert_eq!(of(&kept), of(&texts));
    }

    #[test]
    fn scores_are_those_of_trec_eval() {
        let mut ranking = Ranking::default();
        assert_eq!(ranking.means(), None);
        // Ranks of the gains: 0, 2, 1, 0.
        ranking.add(&[(0.3, 1.0), (0.9, 0.0), (0.1, 0.0), (0.5, 2.0)]);
        let (got, best) = (2.0 / 3_f64.log2() + 1.0 / 2.0, 2.0 + 1.0 / 3_f64.log2());
        assert_eq!(ranking.means(), Some([0.5, got / best]));
        // Nothing relevant, and the only relevant text beyond the tenth.
        ranking.add(&[(1.0, 0.0)]);
        let eleven: Vec<(f64, f64)> = (0..11).map(|at| (f64::from(-at), if at == 10 { 1.0 } else { 0.0 })).collect();
        ranking.add(&eleven);
        assert_eq!(ranking.means(), Some([0.5 / 3.0, got / best / 3.0]));
        assert_eq!(ranking.queries(), 3);
        // Equal scores keep the order of the rows.
        let mut equal = Ranking::default();
        equal.add(&[(0.0, 0.0), (0.0, 1.0)]);
        assert_eq!(equal.means(), Some([0.5, 1.0 / 3_f64.log2()]));
    }
}
