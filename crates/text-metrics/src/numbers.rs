//! Answers that are numbers: the correlations of SciPy's `pearsonr` and `spearmanr`.

/// The numbers of a corpus.
#[derive(Clone, Debug, Default)]
pub struct Numbers {
    answers: Vec<f64>,
    references: Vec<f64>,
}

impl Numbers {
    /// Adds the texts of an answer and of the right number, which have the precision of f32. A text that is no number counts as 0.
    pub fn add_texts(&mut self, hypothesis: &str, reference: &str) {
        let number = |text: &str| f64::from(text.trim().parse::<f32>().unwrap_or(0.0));
        self.add(number(hypothesis), number(reference));
    }

    /// Adds a number and the right one.
    pub fn add(&mut self, answer: f64, reference: f64) {
        self.answers.push(answer);
        self.references.push(reference);
    }

    /// Pearson's correlation, -1 to 1; 0 where it is not defined.
    pub fn pearson(&self) -> f64 {
        correlation(&self.answers, &self.references)
    }

    /// Spearman's correlation: Pearson's of the ranks.
    pub fn spearman(&self) -> f64 {
        correlation(&ranks(&self.answers), &ranks(&self.references))
    }
}

/// The rank of each value. Equal values have the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    for equal in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let first = order.partition_point(|&at| values[at] < values[equal[0]]);
        let mean = first as f64 + (equal.len() as f64 + 1.0) / 2.0;
        equal.iter().for_each(|&at| ranks[at] = mean);
    }
    ranks
}

fn correlation(one: &[f64], other: &[f64]) -> f64 {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let means = [mean(one), mean(other)];
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        one.iter().zip(other).map(|(a, b)| of(a - means[0], b - means[1])).sum()
    };
    let spread = (sum(&|a, _| a * a) * sum(&|_, b| b * b)).sqrt();
    if spread == 0.0 { 0.0 } else { sum(&|a, b| a * b) / spread }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_a_rank_and_no_spread_is_no_correlation() {
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0]), [3.5, 1.0, 3.5, 2.0]);
        let mut flat = Numbers::default();
        [("1", "2"), ("1", "3")].iter().for_each(|(answer, right)| flat.add_texts(answer, right));
        assert_eq!((flat.pearson(), flat.spearman()), (0.0, 0.0));
    }
}
