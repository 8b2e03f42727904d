//! Groups of parameters with a learning rate and a weight decay of their own, chosen by name.
//!
//! An item is an item of [`crate::freeze`], or one of the words `norms` and `biases`. These select what transformers' `Trainer` does not
//! decay: the weights of norms, and parameters called bias, which in T5 are the tables of relative positions. The spellings of other
//! trainers mean the same: `bias`, `LayerNorm.weight`, `layer_norm`.
//!
//! Invariants:
//! * A parameter belongs to the first group that names it. torch refuses a parameter in two groups; order decides here, so that a group
//!   for one block can stand before a group for all.
//! * An item that names no parameter is an error, and so is a group that no trained parameter belongs to.
//! * A parameter without a group has the optimizer's own numbers, to the bit.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::freeze;

/// A group of parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The items that name its parameters.
    pub parameters: Vec<String>,
    /// Multiplies the learning rate of each step.
    pub learning_rate_factor: f64,
    /// The weight decay; `None`: the optimizer's.
    pub weight_decay: Option<f64>,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.parameters.join(", "))?;
        if self.learning_rate_factor != 1.0 {
            write!(f, ", learning rate x {}", self.learning_rate_factor)?;
        }
        self.weight_decay.map_or(Ok(()), |decay| write!(f, ", weight decay {decay}"))
    }
}

/// The numbers of one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OfParameter {
    pub learning_rate_factor: f64,
    pub weight_decay: Option<f64>,
}

impl Default for OfParameter {
    fn default() -> Self {
        Self { learning_rate_factor: 1.0, weight_decay: None }
    }
}

/// The number of the group of each name, in order; `None` for parameters that have no group or do not train.
///
/// # Errors
/// [`Error::UnknownGroupItem`] for an item that names nothing, [`Error::EmptyGroup`] for a group without a trained parameter.
pub fn group_of_each(names: &[&str], trainable: &[bool], groups: &[Group]) -> Result<Vec<Option<usize>>> {
    for (number, group) in groups.iter().enumerate() {
        let names_nothing = |item: &&String| !names.iter().any(|name| matches(item, name));
        if let Some(item) = group.parameters.iter().find(names_nothing) {
            return Err(Error::UnknownGroupItem { group: number + 1, item: item.clone(), known: components(names) });
        }
    }
    let first = |name: &str| groups.iter().position(|group| group.parameters.iter().any(|item| matches(item, name)));
    let of_each: Vec<_> = names.iter().zip(trainable).map(|(name, trains)| first(name).filter(|_| *trains)).collect();
    match (0..groups.len()).find(|number| !of_each.contains(&Some(*number))) {
        Some(number) => Err(Error::EmptyGroup { group: number + 1, parameters: groups[number].parameters.join(", ") }),
        None => Ok(of_each),
    }
}

/// The numbers of each parameter.
///
/// # Errors
/// As [`group_of_each`].
pub(crate) fn of_each(names: &[&str], trainable: &[bool], groups: &[Group]) -> Result<Vec<OfParameter>> {
    let numbers = |group: Option<usize>| {
        group.map_or_else(OfParameter::default, |number| OfParameter {
            learning_rate_factor: groups[number].learning_rate_factor,
            weight_decay: groups[number].weight_decay,
        })
    };
    Ok(group_of_each(names, trainable, groups)?.into_iter().map(numbers).collect())
}

fn matches(item: &str, name: &str) -> bool {
    let word = item.strip_suffix(".weight").unwrap_or(item).replace(['_', '-'], "").to_lowercase();
    match word.as_str() {
        "norm" | "norms" | "layernorm" | "layernorms" => name.split('.').any(|component| component.ends_with("norm")),
        "bias" | "biases" => name.split('.').any(|component| component.ends_with("bias")),
        _ => freeze::item_matches(item, name),
    }
}

/// The components of the names, each once, without numbers of blocks and layers.
fn components(names: &[&str]) -> Vec<String> {
    let mut components: Vec<String> = Vec::new();
    for component in names.iter().flat_map(|name| name.split('.')) {
        let is_number = component.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number && component != "weight" && !components.iter().any(|known| known == component) {
            components.push(component.to_owned());
        }
    }
    components
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 6] = [
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.block.0.layer.0.layer_norm.weight",
        "encoder.final_layer_norm.weight",
        "lm_head.weight",
    ];

    fn group(parameters: &[&str]) -> Group {
        let parameters = parameters.iter().map(|&item| item.to_owned()).collect();
        Group { parameters, learning_rate_factor: 0.5, weight_decay: Some(0.0) }
    }

    fn found(groups: &[&[&str]]) -> Result<Vec<Option<usize>>> {
        let groups: Vec<Group> = groups.iter().map(|items| group(items)).collect();
        group_of_each(&NAMES, &[true, true, true, true, true, false], &groups)
    }

    #[test]
    fn the_first_group_that_names_a_parameter_has_it() {
        let of = |groups: &[&[&str]]| found(groups).unwrap();
        assert_eq!(of(&[]), [None; 6]);
        assert_eq!(of(&[&["*.q.*"], &["encoder"]]), [None, Some(0), Some(1), Some(1), Some(1), None]);
        assert_eq!(of(&[&["*"]])[5], None, "it does not train");
    }

    #[test]
    fn norms_and_biases_are_what_the_trainer_of_transformers_does_not_decay() {
        let norms = [None, None, None, Some(0), Some(0), None];
        for item in ["norms", "norm", "LayerNorm.weight", "layer_norm", "layer_norm.weight", "*layer_norm.weight"] {
            assert_eq!(found(&[&[item]]).unwrap(), norms, "{item}");
        }
        let both = [None, None, Some(0), Some(0), Some(0), None];
        assert_eq!(found(&[&["norms", "biases"]]).unwrap(), both);
        assert_eq!(found(&[&["bias", "LayerNorm.weight"]]).unwrap(), both);
    }

    #[test]
    fn an_item_without_a_parameter_and_a_group_without_one_are_errors() {
        for item in ["encodr", "*LayerNorm*", ""] {
            let error = found(&[&["shared"], &["encoder", item]]).unwrap_err();
            assert!(matches!(&error, Error::UnknownGroupItem { group: 2, item: got, .. } if got == item), "{error}");
        }
        for groups in [&[&["lm_head"][..]][..], &[&["encoder"], &["*.q.*", "norms"]]] {
            let error = found(groups).unwrap_err();
            assert!(matches!(&error, Error::EmptyGroup { group, .. } if *group == groups.len()), "{error}");
        }
    }
}
