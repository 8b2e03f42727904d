//! [`Classes`]: the names of the classes that columns of numbers stand for, as Hugging Face's `datasets` writes them into parquet.
//!
//! A number counts from 0. A negative one is a row without a class, as in the test files of GLUE.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

/// The most names that words show.
const SHOWN: usize = 6;

/// Columns of numbers with the names of their classes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classes(BTreeMap<String, Arc<[String]>>);

/// The class of a number.
pub(crate) enum Class<'a> {
    /// Its name.
    Named(&'a str),
    /// The row has no class.
    None,
    /// The number is of no class.
    Unknown,
}

impl Classes {
    /// The classes in a description of columns by `datasets`. A description that cannot be read has none.
    pub(crate) fn of_features(features: &str) -> Self {
        let Ok(described) = serde_json::from_str::<Value>(features) else { return Self::default() };
        let columns = described["info"]["features"].as_object().into_iter().flatten();
        Self(columns.filter_map(|(column, feature)| Some((column.clone(), names(feature)?))).collect())
    }

    /// The names of a column's classes, in the order of their numbers.
    pub fn names(&self, column: &str) -> Option<&Arc<[String]>> {
        self.0.get(column)
    }

    /// Each of these columns that has classes, with some of their names.
    pub fn in_words<'a>(&self, columns: impl IntoIterator<Item = &'a str>) -> String {
        let of_column = |column: &str| {
            let names = self.names(column)?;
            let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
            let more = names.len().saturating_sub(SHOWN);
            let others = if more > 0 { format!(" and {more} more") } else { String::new() };
            Some(format!("; the numbers of `{column}` are read as {}{others}", shown.join(", ")))
        };
        columns.into_iter().filter_map(of_column).collect()
    }
}

/// The class of a number among these names.
pub(crate) fn class(names: &[String], number: i64) -> Class<'_> {
    match usize::try_from(number) {
        Err(_) => Class::None,
        Ok(number) => names.get(number).map_or(Class::Unknown, |name| Class::Named(name)),
    }
}

/// The names of a feature that is a class, or a list of classes.
fn names(feature: &Value) -> Option<Arc<[String]>> {
    if feature["_type"] != "ClassLabel" {
        let element = feature.get("feature").or_else(|| feature.get(0))?;
        return if element["_type"] == "ClassLabel" { names(element) } else { None };
    }
    let names: Option<Vec<String>> =
        feature["names"].as_array()?.iter().map(|name| name.as_str().map(str::to_owned)).collect();
    names.filter(|names| !names.is_empty()).map(Arc::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_classes_are_those_of_the_description() {
        let classes = Classes::of_features(
            r#"{"info": {"features": {
                "text": {"dtype": "string", "_type": "Value"},
                "label": {"names": ["World", "Sports"], "_type": "ClassLabel"},
                "tags": {"feature": {"names": ["a", "b"], "_type": "ClassLabel"}, "_type": "List"},
                "old": [{"names": ["c"], "_type": "ClassLabel"}],
                "size": {"dtype": "int64", "_type": "Value"}
            }}}"#,
        );
        let of = |column| classes.names(column).map(|names| names.join(" "));
        assert_eq!(of("label").as_deref(), Some("World Sports"));
        assert_eq!((of("tags").as_deref(), of("old").as_deref()), (Some("a b"), Some("c")));
        assert_eq!((of("text"), of("size")), (None, None));
        assert_eq!(classes.in_words(["text", "label"]), "; the numbers of `label` are read as `World`, `Sports`");
        assert_eq!(Classes::of_features("no JSON"), Classes::default());
    }

    #[test]
    fn a_negative_number_is_no_class_and_one_beyond_the_names_is_unknown() {
        let names = ["no".to_owned(), "yes".to_owned()];
        assert!(matches!(class(&names, 1), Class::Named("yes")));
        assert!(matches!(class(&names, -1), Class::None));
        assert!(matches!(class(&names, 2), Class::Unknown));
    }
}
