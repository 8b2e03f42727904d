//! Computes any of the metrics over a corpus, in one pass.

use crate::bleu::{Bleu, BleuByLanguage, Tokenization};
use crate::chrf::{CHRF_PLUS_PLUS, Chrf};
use crate::labels::{Labels, NoLabels};
use crate::metric::Metric;
use crate::numbers::Numbers;
use crate::rouge::Rouge;
use crate::spans::Spans;

/// The settings of metrics that have some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// BLEU's tokenizer; `None`: chosen by the language of the references.
    pub tokenization: Option<Tokenization>,
    /// Whether ROUGE stems words.
    pub rouge_stems: bool,
    /// Whether ROUGE cuts references in other scripts than Latin into words of their script.
    pub rouge_any_script: bool,
    /// What a text is to the metrics of labels.
    pub labels_in_text: LabelsInText,
}

/// What a text is to the metrics of labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LabelsInText {
    /// A label.
    #[default]
    One,
    /// The labels of its words, parted by blanks. They are counted word by word.
    OfWords,
    /// Any number of labels, parted by commas.
    Set,
}

/// The metrics of a corpus.
#[derive(Clone, Debug)]
pub struct Scores {
    metrics: Vec<Metric>,
    rows: u64,
    bleu: AnyBleu,
    chrf: Chrf,
    chrf_plus_plus: Chrf,
    rouge: Rouge,
    /// Sums over the rows.
    rouge_sums: [f64; 4],
    /// Rows that ROUGE cut by their script.
    rouge_by_script: u64,
    exact_matches: u64,
    labels: Labels,
    labels_in_text: LabelsInText,
    numbers: Numbers,
    spans: Spans,
}

/// BLEU with one tokenizer, or with the tokenizer of the references' language.
#[derive(Clone, Debug)]
enum AnyBleu {
    With(Bleu),
    ByLanguage(Box<BleuByLanguage>),
}

/// Scores of one row, for the metrics that are defined for a single row.
pub type RowScores = Vec<(Metric, f64)>;

impl Scores {
    /// An empty corpus, for these metrics.
    pub fn new(metrics: &[Metric], settings: Settings) -> Self {
        Scores {
            metrics: metrics.to_vec(),
            rows: 0,
            bleu: match settings.tokenization {
                Some(tokenization) => AnyBleu::With(Bleu::new(tokenization)),
                None => AnyBleu::ByLanguage(Box::default()),
            },
            chrf: Chrf::new(0),
            chrf_plus_plus: Chrf::new(CHRF_PLUS_PLUS),
            rouge: Rouge { stems: settings.rouge_stems, any_script: settings.rouge_any_script },
            rouge_sums: [0.0; 4],
            rouge_by_script: 0,
            exact_matches: 0,
            labels: Labels::default(),
            labels_in_text: settings.labels_in_text,
            numbers: Numbers::default(),
            spans: Spans::default(),
        }
    }

    /// Counts one row, and returns its own scores: all metrics except BLEU, which is defined for a corpus, and labels'
    /// metrics.
    pub fn add(&mut self, hypothesis: &str, reference: &str) -> RowScores {
        let mut row = RowScores::new();
        self.rows += 1;
        let is_any = |of: &[Metric]| self.metrics.iter().any(|metric| of.contains(metric));
        if is_any(&[Metric::Bleu]) {
            match &mut self.bleu {
                AnyBleu::With(bleu) => bleu.add(hypothesis, reference),
                AnyBleu::ByLanguage(bleu) => bleu.add(hypothesis, reference),
            }
        }
        if is_any(&[Metric::Chrf]) {
            row.push((Metric::Chrf, self.chrf.add(hypothesis, reference)));
        }
        if is_any(&[Metric::ChrfPlusPlus]) {
            row.push((Metric::ChrfPlusPlus, self.chrf_plus_plus.add(hypothesis, reference)));
        }
        if is_any(&ROUGE) {
            let score = self.rouge.score(hypothesis, reference);
            self.rouge_by_script += u64::from(self.rouge.cuts_by_script(reference));
            let values = [score.rouge1, score.rouge2, score.rouge_l, score.rouge_l_sum];
            for (i, (metric, value)) in ROUGE.into_iter().zip(values).enumerate() {
                self.rouge_sums[i] += value;
                if self.metrics.contains(&metric) {
                    row.push((metric, value));
                }
            }
        }
        if is_any(&[Metric::ExactMatch]) {
            let is_exact = hypothesis.trim() == reference.trim();
            self.exact_matches += u64::from(is_exact);
            row.push((Metric::ExactMatch, f64::from(u8::from(is_exact))));
        }
        if is_any(&[Metric::Pearson, Metric::Spearman]) {
            self.numbers.add_texts(hypothesis, reference);
        }
        if is_any(&[Metric::SpanF1]) {
            self.spans.add(hypothesis, reference);
        }
        match self.labels_in_text {
            _ if !is_any(&LABELS) => {}
            LabelsInText::OfWords => {
                let pairs = hypothesis.split_whitespace().zip(reference.split_whitespace());
                pairs.for_each(|(hypothesis, reference)| self.labels.add(hypothesis, reference));
            }
            LabelsInText::Set => self.labels.add_sets(hypothesis, reference),
            LabelsInText::One => self.labels.add(hypothesis, reference),
        }
        row
    }

    /// The values over everything added so far; 0 for an empty corpus.
    ///
    /// # Errors
    /// Macro-F1 was requested, and the references are not labels.
    pub fn values(&self) -> Result<Vec<(Metric, f64)>, NoLabels> {
        self.metrics.iter().map(|&metric| Ok((metric, self.value(metric)?))).collect()
    }

    fn value(&self, metric: Metric) -> Result<f64, NoLabels> {
        let mean = |sum: f64| sum / self.rows.max(1) as f64;
        Ok(match metric {
            Metric::Bleu => match &self.bleu {
                AnyBleu::With(bleu) => bleu.score().score,
                AnyBleu::ByLanguage(bleu) => bleu.score().score,
            },
            Metric::Chrf => self.chrf.score(),
            Metric::ChrfPlusPlus => self.chrf_plus_plus.score(),
            Metric::Rouge1 => mean(self.rouge_sums[0]),
            Metric::Rouge2 => mean(self.rouge_sums[1]),
            Metric::RougeL => mean(self.rouge_sums[2]),
            Metric::RougeLsum => mean(self.rouge_sums[3]),
            Metric::ExactMatch => mean(self.exact_matches as f64),
            Metric::Accuracy => self.labels.accuracy(),
            Metric::MicroF1 => self.labels.micro_f1()?,
            Metric::MacroF1 => self.labels.macro_f1()?,
            Metric::Matthews => self.labels.matthews()?,
            Metric::Pearson => self.numbers.pearson(),
            Metric::Spearman => self.numbers.spearman(),
            Metric::SpanF1 => self.spans.f1(),
        })
    }

    /// The labels, if they were counted: with accuracy or macro-F1.
    pub fn labels(&self) -> Option<&Labels> {
        self.metrics.iter().any(|metric| LABELS.contains(metric)).then_some(&self.labels)
    }

    /// The settings of the corpus metrics in sacreBLEU's form, and ROUGE's.
    pub fn signatures(&self) -> Vec<(Metric, String)> {
        let stems = if self.rouge.stems { "yes" } else { "no" };
        let by_script = match self.rouge_by_script {
            0 => String::new(),
            rows => format!("|words by script in {rows} of {} rows", self.rows),
        };
        let signature = |metric| match metric {
            Metric::Bleu => Some(match &self.bleu {
                AnyBleu::With(bleu) => bleu.signature(),
                AnyBleu::ByLanguage(bleu) => bleu.signature(),
            }),
            Metric::Chrf => Some(self.chrf.signature()),
            Metric::ChrfPlusPlus => Some(self.chrf_plus_plus.signature()),
            metric if ROUGE.contains(&metric) => {
                Some(format!("stemmer:{stems}|split:newline|f-measure|mean{by_script}"))
            }
            _ => None,
        };
        self.metrics.iter().filter_map(|&metric| Some((metric, signature(metric)?))).collect()
    }
}

/// The metrics of labels.
const LABELS: [Metric; 4] = [Metric::Accuracy, Metric::MicroF1, Metric::MacroF1, Metric::Matthews];

/// The ROUGE metrics, in the order of the sums.
const ROUGE: [Metric; 4] = [Metric::Rouge1, Metric::Rouge2, Metric::RougeL, Metric::RougeLsum];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_corpus_agree_for_means_and_only_wanted_metrics_are_there() {
        let metrics = Metric::list("rougeL,exact_match,macro_f1").unwrap();
        let mut scores = Scores::new(&metrics, Settings::default());
        let rows = [("a b", "a b"), ("a c", "a b"), ("", "a b")].map(|(h, r)| scores.add(h, r));
        assert_eq!(rows[0], [(Metric::RougeL, 1.0), (Metric::ExactMatch, 1.0)]);
        let values = scores.values().unwrap();
        assert_eq!(values.iter().map(|(metric, _)| *metric).collect::<Vec<_>>(), metrics);
        let mean = rows.iter().map(|row| row[0].1).sum::<f64>() / 3.0;
        assert!((values[0].1 - mean).abs() < 1e-12 && values[1].1 == 1.0 / 3.0, "{values:?}");
        assert_eq!(values[2].1, 0.5);
    }
}
