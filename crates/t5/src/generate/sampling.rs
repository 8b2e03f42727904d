//! Tokens drawn at random from the likeliest: temperature, then top-k, then top-p, like the warpers of transformers and in
//! their order.
//!
//! Invariant: a draw is a function of the seed and of its place (the answer's number, its sequence, the position). It does not
//! depend on how many prompts are in a batch, or how many threads there are.

use t5_ops::keys::mix;

/// The settings. By default every token is drawn with the probability that the model gives it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Scores are divided by this.
    pub temperature: f32,
    /// The number of likeliest tokens to draw from; 0: all.
    pub top_k: usize,
    /// Only the likeliest tokens, whose probabilities add up to at least this; 1: all.
    pub top_p: f32,
    /// The seed of all draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// The place of a draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// The number of the source among all.
    pub source: u64,
    /// The number of the answer among the source's.
    pub sequence: u64,
    /// The position in the answer.
    pub position: u64,
}

impl Sampling {
    /// Sets the scores of tokens that cannot be drawn to -inf, and divides the others by the temperature. At least `keep`
    /// tokens are left.
    pub fn filter(&self, scores: &mut [f32], keep: usize) {
        if self.temperature != 1.0 {
            scores.iter_mut().for_each(|score| *score /= self.temperature);
        }
        if self.top_k > 0 {
            let least = nth_largest(scores, self.top_k.max(keep));
            scores.iter_mut().filter(|score| **score < least).for_each(|score| *score = f32::NEG_INFINITY);
        }
        if self.top_p < 1.0 {
            self.keep_likeliest(scores, keep);
        }
    }

    /// Forbids the least likely tokens, whose probabilities add up to at most `1 - top_p`.
    fn keep_likeliest(&self, scores: &mut [f32], keep: usize) {
        let possible = |score: f32| score > f32::NEG_INFINITY;
        let mut order: Vec<u32> = (0..scores.len() as u32).filter(|&token| possible(scores[token as usize])).collect();
        order.sort_by(|&a, &b| scores[a as usize].total_cmp(&scores[b as usize]));
        let Some(&likeliest) = order.last() else { return };
        let largest = f64::from(scores[likeliest as usize]);
        let weight = |token: u32| (f64::from(scores[token as usize]) - largest).exp();
        let total: f64 = order.iter().map(|&token| weight(token)).sum();
        let (mut sum, mut forbidden) = (0.0, 0);
        for &token in &order[..order.len().saturating_sub(keep.max(1))] {
            sum += weight(token) / total;
            if sum > 1.0 - f64::from(self.top_p) {
                break;
            }
            forbidden += 1;
        }
        order[..forbidden].iter().for_each(|&token| scores[token as usize] = f32::NEG_INFINITY);
    }

    /// Draws a token. Its probability is that of the softmax of the filtered scores.
    pub fn token(&self, scores: &[f32], draw: Draw) -> u32 {
        let largest = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let weight = |score: f32| if score > f32::NEG_INFINITY { (f64::from(score) - largest).exp() } else { 0.0 };
        let total: f64 = scores.iter().map(|&score| weight(score)).sum();
        let mut left = self.uniform(draw, 0) * total;
        let mut last = 0;
        for (token, weight) in scores.iter().enumerate().map(|(token, &score)| (token, weight(score))) {
            if weight > 0.0 {
                last = token as u32;
                if left < weight {
                    break;
                }
                left -= weight;
            }
        }
        last
    }

    /// Standard Gumbel noise. The largest of log-probabilities with such noise is a draw by the probabilities, and the
    /// largest few are draws without replacement (Kool et al., 2019).
    pub fn gumbel(&self, draw: Draw, candidate: u64) -> f64 {
        -(-self.uniform(draw, candidate + 1).ln()).ln()
    }

    /// A number above 0 and below 1.
    fn uniform(&self, draw: Draw, word: u64) -> f64 {
        let key = [draw.source, draw.sequence, draw.position, word]
            .iter()
            .fold(mix(self.seed), |key, word| mix(key ^ mix(*word)));
        ((key >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }
}

/// The n-th largest value, or the smallest if there are fewer.
fn nth_largest(values: &[f32], n: usize) -> f32 {
    let mut sorted = values.to_vec();
    let last = n.min(values.len()).saturating_sub(1);
    if values.is_empty() {
        return f32::NEG_INFINITY;
    }
    *sorted.select_nth_unstable_by(last, |a, b| b.total_cmp(a)).1
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: f32 = f32::NEG_INFINITY;

    fn filtered(sampling: Sampling, keep: usize) -> Vec<bool> {
        // Probabilities 0.4, 0.1, 0.3, 0.2.
        let mut scores = [0.4f32, 0.1, 0.3, 0.2].map(f32::ln);
        sampling.filter(&mut scores, keep);
        scores.iter().map(|&score| score > NEVER).collect()
    }

    #[test]
    fn top_k_then_top_p_keep_the_likeliest_tokens_and_never_none() {
        let top = |top_k, top_p| Sampling { top_k, top_p, ..Sampling::default() };
        assert_eq!(filtered(top(2, 1.0), 1), [true, false, true, false]);
        assert_eq!(filtered(top(0, 0.65), 1), [true, false, true, false]);
        assert_eq!(filtered(top(0, 0.75), 1), [true, false, true, true]);
        // Among the three likeliest, 0.4 is 4 of 9.
        assert_eq!(filtered(top(3, 0.4), 1), [true, false, false, false]);
        assert_eq!(filtered(top(1, 0.0), 1), [true, false, false, false]);
        assert_eq!(filtered(top(1, 0.0), 2), [true, false, true, false]);
        assert_eq!(filtered(Sampling::default(), 1), [true; 4]);
    }

    /// Pearson's statistic for draws and expected counts.
    fn chi_square(counts: &[u64], expected: &[f64]) -> f64 {
        let draws = counts.iter().sum::<u64>() as f64;
        let cells = counts.iter().zip(expected).filter(|(_, share)| **share > 0.0);
        cells.map(|(&count, share)| (count as f64 - draws * share).powi(2) / (draws * share)).sum()
    }

    #[test]
    fn draws_have_the_distribution_of_the_filtered_softmax() {
        let scores: Vec<f32> = (0..40).map(|i| ((i * 17) % 40) as f32 / 8.0 - 2.0).collect();
        for (temperature, top_k, top_p) in [(1.0, 0, 1.0), (0.7, 12, 1.0), (1.5, 0, 0.8), (0.9, 20, 0.9)] {
            let sampling = Sampling { temperature, top_k, top_p, seed: 23 };
            let mut filtered = scores.clone();
            sampling.filter(&mut filtered, 1);
            let weights: Vec<f64> = filtered.iter().map(|&score| f64::from(score).exp()).collect();
            let total: f64 = weights.iter().sum();
            let expected: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
            let mut counts = vec![0; scores.len()];
            for source in 0..20_000 {
                let draw = Draw { source, sequence: source % 3, position: source % 7 };
                counts[sampling.token(&filtered, draw) as usize] += 1;
            }
            assert!(
                counts.iter().zip(&expected).all(|(&count, share)| count == 0 || *share > 0.0),
                "a forbidden token"
            );
            let cells = expected.iter().filter(|share| **share > 0.0).count() as f64;
            // The mean of the statistic is cells - 1, its variance twice that; five deviations above it.
            let most = cells - 1.0 + 5.0 * (2.0 * (cells - 1.0)).sqrt();
            let statistic = chi_square(&counts, &expected);
            assert!(statistic < most, "{sampling:?}: {statistic} of at most {most}");
        }
    }

    #[test]
    fn the_largest_of_noisy_scores_has_the_distribution_of_the_softmax() {
        let (sampling, scores) = (Sampling { seed: 3, ..Sampling::default() }, [0.5f64, 0.3, 0.15, 0.05].map(f64::ln));
        let mut counts = [0; 4];
        for position in 0..20_000 {
            let draw = Draw { source: 1, sequence: 0, position };
            let noisy = |token: usize| scores[token] + sampling.gumbel(draw, token as u64);
            counts[(0..4).max_by(|&a, &b| noisy(a).total_cmp(&noisy(b))).unwrap()] += 1;
        }
        let statistic = chi_square(&counts, &scores.map(f64::exp));
        assert!(statistic < 3.0 + 5.0 * 6f64.sqrt(), "{statistic}, {counts:?}");
    }

    #[test]
    fn a_draw_depends_on_the_seed_and_on_what_is_drawn() {
        let draw = Draw { source: 0, sequence: 0, position: 0 };
        let scores = [0.0; 1000];
        let token = |seed, draw| Sampling { seed, ..Sampling::default() }.token(&scores, draw);
        assert_eq!(token(1, draw), token(1, draw));
        let others = [Draw { source: 1, ..draw }, Draw { sequence: 1, ..draw }, Draw { position: 1, ..draw }];
        assert!(others.iter().all(|&other| token(1, other) != token(1, draw)) && token(2, draw) != token(1, draw));
    }
}
