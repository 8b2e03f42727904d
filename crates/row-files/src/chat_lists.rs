//! [`ChatLists`]: messages that a parquet file holds as lists of structs.
//!
//! Writers nest them in different ways, which the dotted paths of the leaves show:
//!
//! ```text
//! messages.list.element.role       a list of structs, as arrow and Spark write it
//! messages.array.role              the same of older writers
//! messages.role.list.element       a struct of lists, as Hugging Face datasets write a `Sequence`
//! ```

/// Names of groups between a list and its elements.
const WRAPPERS: [&str; 6] = ["list", "element", "item", "array", "bag", "array_element"];

/// A column of messages, and the leaves with their roles and texts. Each leaf has one element per message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatLists {
    /// The column.
    pub column: String,
    /// Dotted path of the roles.
    pub role: String,
    /// Dotted path of the texts.
    pub content: String,
}

impl ChatLists {
    /// Finds the column of messages among `leaves`, which are lists of strings.
    pub(crate) fn among(leaves: &[String]) -> Option<Self> {
        ["messages", "conversations"].into_iter().find_map(|column| {
            let leaf = |names: [&str; 2]| names.into_iter().find_map(|name| leaf(leaves, column, name)).cloned();
            let (role, content) = (leaf(["role", "from"])?, leaf(["content", "value"])?);
            Some(Self { column: column.to_owned(), role, content })
        })
    }
}

/// The leaf named `name` in the elements of `column`.
fn leaf<'a>(leaves: &'a [String], column: &str, name: &str) -> Option<&'a String> {
    leaves.iter().find(|leaf| {
        let rest = leaf.strip_prefix(column).and_then(|rest| rest.strip_prefix('.'));
        rest.is_some_and(|rest| rest.split('.').filter(|part| !WRAPPERS.contains(part)).eq([name]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(leaves: &[&str], expected: Option<[&str; 3]>) {
        let leaves: Vec<String> = leaves.iter().map(|leaf| (*leaf).to_owned()).collect();
        let expected = expected.map(|[column, role, content]| ChatLists {
            column: column.to_owned(),
            role: role.to_owned(),
            content: content.to_owned(),
        });
        assert_eq!(ChatLists::among(&leaves), expected, "{leaves:?}");
    }

    #[test]
    fn messages_are_found_however_a_writer_nests_them() {
        let arrow = ["messages.list.element.content", "messages.list.element.name", "messages.list.element.role"];
        check(&arrow, Some(["messages", arrow[2], arrow[0]]));
        let old = ["id.array", "conversations.array.from", "conversations.array.value"];
        check(&old, Some(["conversations", old[1], old[2]]));
        let sequence = ["messages.role.list.element", "messages.content.list.element"];
        check(&sequence, Some(["messages", sequence[0], sequence[1]]));
        check(&["messages.list.element", "tags.list.element.role"], None);
        check(&["messages.list.element.role", "messages.list.element.parts.content"], None);
    }
}
