//! The metrics by name.

use std::fmt;
use std::str::FromStr;

/// A score of generated texts; larger is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Metric {
    /// Corpus BLEU-4, 0 to 100.
    Bleu,
    /// Corpus chrF2, 0 to 100.
    Chrf,
    /// Corpus chrF2++, 0 to 100.
    ChrfPlusPlus,
    /// Mean F-measure of words, 0 to 1.
    Rouge1,
    /// Mean F-measure of pairs of words, 0 to 1.
    Rouge2,
    /// Mean F-measure of the longest common subsequence, 0 to 1.
    RougeL,
    /// Mean F-measure of the longest common subsequence line by line, 0 to 1.
    RougeLsum,
    /// The fraction of answers equal to their reference, ignoring white space at the ends, 0 to 1.
    ExactMatch,
    /// The fraction of labels equal to their reference, 0 to 1.
    Accuracy,
    /// F1 of all labels together, 0 to 1.
    MicroF1,
    /// Mean F1 of the labels, 0 to 1.
    MacroF1,
    /// Matthews' correlation of the labels, -1 to 1.
    Matthews,
    /// Pearson's correlation of numbers, -1 to 1.
    Pearson,
    /// Spearman's correlation of numbers, -1 to 1.
    Spearman,
    /// F1 of the spans that labels of words describe, 0 to 1.
    SpanF1,
}

use Metric::{
    Accuracy, Bleu, Chrf, ChrfPlusPlus, ExactMatch, MacroF1, Matthews, MicroF1, Pearson, Rouge1, Rouge2, RougeL,
    RougeLsum, SpanF1, Spearman,
};

/// The name is not a metric.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected one of {names}, got `{got}`", names = Metric::names())]
pub struct UnknownMetric {
    /// The name.
    pub got: String,
}

impl Metric {
    /// Every metric, in the order of reports.
    pub const ALL: [Metric; 15] = [
        Bleu,
        Chrf,
        ChrfPlusPlus,
        Rouge1,
        Rouge2,
        RougeL,
        RougeLsum,
        ExactMatch,
        Accuracy,
        MicroF1,
        MacroF1,
        Matthews,
        Pearson,
        Spearman,
        SpanF1,
    ];

    /// The metric's name in configs, on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Bleu => "bleu",
            Chrf => "chrf",
            ChrfPlusPlus => "chrf++",
            Rouge1 => "rouge1",
            Rouge2 => "rouge2",
            RougeL => "rougeL",
            RougeLsum => "rougeLsum",
            ExactMatch => "exact_match",
            Accuracy => "accuracy",
            MicroF1 => "micro_f1",
            MacroF1 => "macro_f1",
            Matthews => "matthews",
            Pearson => "pearson",
            Spearman => "spearman",
            SpanF1 => "span_f1",
        }
    }

    /// The metric's name for readers.
    pub const fn title(self) -> &'static str {
        match self {
            Bleu => "BLEU-4",
            Chrf => "chrF2",
            ChrfPlusPlus => "chrF2++",
            Rouge1 => "ROUGE-1",
            Rouge2 => "ROUGE-2",
            RougeL => "ROUGE-L",
            RougeLsum => "ROUGE-Lsum",
            ExactMatch => "exact match",
            Accuracy => "accuracy",
            MicroF1 => "micro-F1",
            MacroF1 => "macro-F1",
            Matthews => "Matthews",
            Pearson => "Pearson",
            Spearman => "Spearman",
            SpanF1 => "span F1",
        }
    }

    /// A value for readers: points out of 100 unchanged, fractions in percent.
    pub fn shown(self, value: f64) -> String {
        match self {
            Bleu | Chrf | ChrfPlusPlus => format!("{value:.2}"),
            Rouge1 | Rouge2 | RougeL | RougeLsum => format!("{:.2}", 100.0 * value),
            ExactMatch | Accuracy | MicroF1 | MacroF1 | SpanF1 => format!("{:.1} %", 100.0 * value),
            Matthews | Pearson | Spearman => format!("{value:.3}"),
        }
    }

    /// Parses a list with commas. `rouge` means all four ROUGE metrics.
    ///
    /// # Errors
    /// The first name that is not a metric.
    pub fn list(text: &str) -> Result<Vec<Metric>, UnknownMetric> {
        let mut metrics = Vec::new();
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            match plain(name).as_str() {
                "rouge" => metrics.extend([Rouge1, Rouge2, RougeL, RougeLsum]),
                _ => metrics.push(name.parse()?),
            }
        }
        metrics.sort_unstable();
        metrics.dedup();
        Ok(metrics)
    }

    /// Every name that [`Metric::list`] accepts.
    pub fn names() -> String {
        let names: Vec<&str> = ["rouge"].into_iter().chain(Metric::ALL.map(Metric::name)).collect();
        names.join(", ")
    }
}

/// A name without `-`, `_` and capital letters, for comparison.
fn plain(name: &str) -> String {
    name.replace(['-', '_'], "").to_lowercase()
}

impl FromStr for Metric {
    type Err = UnknownMetric;

    fn from_str(name: &str) -> Result<Self, UnknownMetric> {
        let metric = match plain(name).as_str() {
            "f1" => Some(MacroF1),
            "chrfpp" => Some(ChrfPlusPlus),
            "em" => Some(ExactMatch),
            plain_name => Metric::ALL.into_iter().find(|metric| plain(metric.name()) == plain_name),
        };
        metric.ok_or_else(|| UnknownMetric { got: name.to_owned() })
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_any_spelling_and_a_list_has_none_twice() {
        let metrics = Metric::list("accuracy, macro-f1,F1,rouge-l,rougeL,bleu").unwrap();
        assert_eq!(metrics, [Bleu, RougeL, Accuracy, MacroF1]);
        assert_eq!(Metric::list("rouge").unwrap(), [Rouge1, Rouge2, RougeL, RougeLsum]);
        assert_eq!(Metric::list("").unwrap(), []);
        for metric in Metric::ALL {
            assert_eq!(metric.name().parse(), Ok(metric));
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_those_that_there_are() {
        let error = Metric::list("bleu,rogue").unwrap_err().to_string();
        assert!(error.contains("`rogue`") && error.contains("rougeLsum, exact_match"), "{error}");
    }
}
