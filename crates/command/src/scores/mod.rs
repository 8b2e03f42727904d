//! Evaluation: scores of a model on rows, of each class, and the best of a run.

pub mod best;
pub mod class_scores;
pub mod evaluation;
pub mod figures;
