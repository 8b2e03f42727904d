//! Scores of searches: how many of the texts that were judged relevant for a query are found, and how early, as trec_eval defines them.
//!
//! recall@k is the share of a query's relevant texts among the first k. MRR@10 and NDCG@10 are those of [`crate::ranking`], where the best order
//! has all judged texts of the query, found or not. All are 0 for a query without a relevant text, and means over queries.

use std::cmp::Ordering;

/// The numbers of first texts of which recall is counted.
pub const CUTS: [usize; 6] = [1, 5, 10, 20, 50, 100];

/// The texts of a query that decide its scores.
pub const KEPT: usize = CUTS[CUTS.len() - 1];

/// The order of two texts with their scores: trec_eval's, whose scores are f32, and which puts the larger name first where they are equal.
pub fn order(one: (f32, &str), other: (f32, &str)) -> Ordering {
    other.0.total_cmp(&one.0).then_with(|| other.1.cmp(one.1))
}

/// The sums of the scores over queries.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Searches {
    queries: u64,
    recall: [f64; CUTS.len()],
    ranking: crate::ranking::Ranking,
}

/// The means over queries.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SearchScores {
    /// By [`CUTS`].
    pub recall: [f64; CUTS.len()],
    /// MRR@10.
    pub mrr: f64,
    /// NDCG@10.
    pub ndcg: f64,
}

impl Searches {
    /// Adds a query with the gain of each text that it found, the best first, and the gains of all its judged texts. A gain above 0 is relevant.
    #[expect(clippy::cast_precision_loss, reason = "numbers of texts")]
    pub fn add(&mut self, found: &[f64], judged: &[f64]) {
        let relevant = |gains: &[f64]| gains.iter().filter(|gain| **gain > 0.0).count() as f64;
        let all = relevant(judged);
        for (sum, cut) in self.recall.iter_mut().zip(CUTS) {
            *sum += if all > 0.0 { relevant(&found[..cut.min(found.len())]) / all } else { 0.0 };
        }
        self.ranking.add_found(found, judged);
        self.queries += 1;
    }

    /// The number of queries.
    pub fn queries(&self) -> u64 {
        self.queries
    }

    /// The means; `None` without a query.
    pub fn means(&self) -> Option<SearchScores> {
        let [mrr, ndcg] = self.ranking.means()?;
        #[expect(clippy::cast_precision_loss, reason = "a number of queries")]
        let queries = self.queries as f64;
        Some(SearchScores { recall: self.recall.map(|sum| sum / queries), mrr, ndcg })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_are_not_found_count_in_recall_and_in_the_best_order() {
        let mut searches = Searches::default();
        assert_eq!(searches.means(), None);
        searches.add(&[0.0, 2.0, 1.0], &[2.0, 1.0, 1.0, 0.0]);
        // Nothing is relevant.
        searches.add(&[0.0], &[0.0]);
        let means = searches.means().unwrap();
        assert_eq!(means.recall[..2], [0.0, 2.0 / 3.0 / 2.0]);
        assert_eq!(means.mrr, 0.25);
        let (got, best) = (2.0 / 3_f64.log2() + 0.5, 2.0 + 1.0 / 3_f64.log2() + 0.5);
        assert!((means.ndcg - got / best / 2.0).abs() < 1e-15);
        assert_eq!(order((1.0, "a"), (1.0, "b")), Ordering::Greater);
        assert_eq!(order((2.0, "a"), (1.0, "b")), Ordering::Less);
    }
}
