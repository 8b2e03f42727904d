//! [`Column`]: a column of a file, as texts or as chats.

/// A column of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The column's name.
    pub name: String,
    /// Whether the column holds lists of messages.
    pub is_chat: bool,
    /// Whether a list is given as a text in JSON.
    pub is_list: bool,
    /// Whether numbers in a list are texts: those of labels. Elsewhere they may be tokens.
    pub has_numbers: bool,
}

impl Column {
    /// Returns a column of text.
    pub fn text(name: impl Into<String>) -> Self {
        let name = name.into();
        // A tag of each word may be the number of a class, such as in `ner_tags` of CoNLL.
        let has_numbers = name.ends_with("tags");
        Self { name, is_chat: false, is_list: false, has_numbers }
    }

    /// Returns a column of messages.
    pub fn chat(name: impl Into<String>) -> Self {
        Self { is_chat: true, ..Self::text(name) }
    }

    /// Returns a column of texts or lists.
    pub fn list(name: impl Into<String>) -> Self {
        Self { is_list: true, ..Self::text(name) }
    }
}
