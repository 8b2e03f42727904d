//! `[[optimizer.groups]]`: parameters with a learning rate and a weight decay of their own.

use toml::Value;
use trainer::groups::Group;

use super::{Values, keys};
use crate::failure::{Failure, Outcome};

const KEY: &str = "optimizer.groups";

/// The groups in these values, in their order.
pub fn from_values(values: &Values) -> Outcome<Vec<Group>> {
    let tables = values.tables(KEY);
    let groups = tables.iter().enumerate().map(|(index, table)| {
        from_table(table).map_err(|problem| {
            let place = format!("{}: `{KEY}`: group {}", values.origin(KEY), index + 1);
            Failure::usage(format!("{place}: {problem}"))
                .hint("for example `{ parameters = [\"norms\", \"biases\"], weight_decay = 0 }`")
        })
    });
    groups.collect()
}

/// One group, or the problem in words.
fn from_table(table: &toml::Table) -> Result<Group, String> {
    keys::check_fields(KEY, table)?;
    let number = |field: &str| match table.get(field) {
        None => Ok(None),
        Some(Value::Float(number)) if number.is_finite() && *number >= 0.0 => Ok(Some(*number)),
        #[expect(clippy::cast_precision_loss, reason = "a setting, not a count")]
        Some(Value::Integer(number)) if *number >= 0 => Ok(Some(*number as f64)),
        Some(other) => Err(format!("`{field}`: expected a number of at least 0, got {other}")),
    };
    let parameters: Option<Vec<String>> = match table.get("parameters") {
        Some(Value::String(text)) => Some(text.split(',').map(|item| item.trim().to_owned()).collect()),
        Some(Value::Array(items)) => items.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
        _ => None,
    };
    let parameters = parameters
        .filter(|items| !items.is_empty())
        .ok_or("`parameters`: expected parts, blocks or globs of parameter names, or the words `norms` and `biases`")?;
    let (factor, weight_decay) = (number("learning_rate_factor")?, number("weight_decay")?);
    if factor.is_none() && weight_decay.is_none() {
        return Err("expected `learning_rate_factor`, `weight_decay` or both".to_owned());
    }
    Ok(Group { parameters, learning_rate_factor: factor.unwrap_or(1.0), weight_decay })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(text: &str) -> Outcome<Vec<Group>> {
        let mut values = Values::defaults();
        values.apply_file("my.toml", text)?;
        from_values(&values)
    }

    #[test]
    fn groups_are_tables_of_a_file_or_a_list_on_the_command_line() {
        let expected = [
            Group {
                parameters: vec!["norms".into(), "biases".into()],
                learning_rate_factor: 1.0,
                weight_decay: Some(0.0),
            },
            Group { parameters: vec!["encoder.block.?.*".into()], learning_rate_factor: 0.1, weight_decay: None },
        ];
        let text = "[[optimizer.groups]]\nparameters = \"norms, biases\"\nweight_decay = 0\n\
                    [[optimizer.groups]]\nparameters = [\"encoder.block.?.*\"]\nlearning_rate_factor = 0.1\n";
        assert_eq!(groups(text).unwrap(), expected);
        let mut values = Values::defaults();
        let list = "optimizer.groups=[{ parameters = [\"norms\", \"biases\"], weight_decay = 0.0 }, \
                    { parameters = [\"encoder.block.?.*\"], learning_rate_factor = 0.1 }]";
        values.apply_assignment(list).unwrap();
        assert_eq!(from_values(&values).unwrap(), expected);
        assert!(groups("").unwrap().is_empty());
    }

    #[test]
    fn a_wrong_group_says_which_one_and_what_was_expected() {
        for (fields, expected) in [
            ("parameters = \"*\"\nlearning_rate_facter = 1", "did"),
            ("parameters = \"*\"\nlr = 1", "unknown field `lr`, expected one of parameters"),
            ("parameters = \"*\"", "expected `learning_rate_factor`, `weight_decay` or both"),
            ("weight_decay = 0", "`parameters`: expected"),
            ("parameters = []\nweight_decay = 0", "`parameters`: expected"),
            ("parameters = \"*\"\nweight_decay = -1", "`weight_decay`: expected a number of at least 0, got -1"),
            ("parameters = \"*\"\nweight_decay = \"none\"", "`weight_decay`: expected"),
        ] {
            let failure = groups(&format!("[[optimizer.groups]]\n{fields}\n")).expect_err("a wrong group");
            let expected = if expected == "did" { "expected `learning_rate_factor`" } else { expected };
            assert!(failure.message.contains("my.toml:1: `optimizer.groups`: group 1: "), "{failure}");
            assert!(failure.message.contains(expected), "{fields}: {failure}");
        }
        let failure = groups("[optimizer]\ngroups = 3\n").expect_err("no list");
        assert!(failure.message.contains("expected a list of tables, got 3"), "{failure}");
    }
}
