//! Scores of texts against their references, each equal to the implementation that papers cite.
//!
//! | metric | equals |
//! | --- | --- |
//! | [`bleu`] | sacreBLEU's `BLEU(tokenize=..)` |
//! | [`chrf`] | sacreBLEU's `CHRF(word_order=0 or 2)` |
//! | [`rouge`] | google's `rouge_score`, averaged over the rows; for other scripts than Latin with words of these scripts |
//! | [`labels`] | scikit-learn's `accuracy_score`, `precision_recall_fscore_support` and `confusion_matrix` over the references' labels; `matthews_corrcoef` |
//! | span F1 | seqeval's `f1_score` |
//! | [`ranking`] | trec_eval's `ndcg_cut_10`, and `recip_rank` of the first ten |
//! | [`searches`] | trec_eval's `recall_K` and `ndcg_cut_10`, and `recip_rank` of the first ten |
//! | Pearson, Spearman | SciPy's `pearsonr` and `spearmanr` |
//!
//! [`Scores`] computes any of them in one pass over a corpus.
//!
//! Invariants: a corpus of any size takes the memory of one row, and of the distinct labels if labels are counted, and sixteen bytes a row for correlations. The
//! order of the rows does not matter, except for the last bits of a mean.
//!
//! ```
//! use text_metrics::{Metric, Scores, Settings};
//! let metrics = Metric::list("bleu,chrf,rouge").unwrap();
//! let mut scores = Scores::new(&metrics, Settings::default());
//! scores.add("the cat sat on the mat.", "the cat is on the mat.");
//! assert_eq!(scores.values().unwrap()[2], (Metric::Rouge1, 5.0 / 6.0));
//! ```

pub mod bleu;
pub mod chrf;
pub mod labels;
mod metric;
mod ngrams;
pub mod numbers;
mod porter;
mod python;
pub mod ranking;
pub mod rouge;
mod scores;
mod script;
pub mod searches;
mod spans;

pub use metric::{Metric, UnknownMetric};
pub use porter::stem;
pub use scores::{LabelsInText, RowScores, Scores, Settings};
