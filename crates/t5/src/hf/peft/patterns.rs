//! Names of modules in the entries of `adapter_config.json`: their last names, or Python's regular expressions.
//!
//! The rules are PEFT 0.21's (`check_target_module_exists` and `get_pattern_key`). A module is `encoder.block.0.layer.0.SelfAttention.q`.

use fancy_regex::{Regex, RegexBuilder};

/// The longest accepted pattern of module names.
const LONGEST_PATTERN: usize = 4096;
/// Limits: backtracking steps for matching one name, and bytes of a compiled pattern.
const MAX_STEPS: usize = 10_000;
const MAX_COMPILED_BYTES: usize = 1 << 20;

/// Modules by name.
#[derive(Clone, Debug)]
pub(super) enum Selection {
    /// Each name is a module's whole name, or its end behind a dot.
    Names(Vec<String>),
    /// An expression for the whole name.
    Pattern(Pattern),
}

impl Selection {
    /// Whether the selection has a module.
    pub(super) fn has(&self, module: &str) -> Result<bool, String> {
        match self {
            Selection::Names(names) => Ok(names.iter().any(|name| is_end(module, name))),
            Selection::Pattern(pattern) => pattern.matches(module),
        }
    }
}

/// Whether a name is the whole name of a module, or its end behind a dot.
pub(super) fn is_end(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// A regular expression with Python's meaning.
#[derive(Clone, Debug)]
pub(super) struct Pattern(Regex);

impl Pattern {
    /// An expression that matches whole names: `re.fullmatch`.
    pub(super) fn whole(text: &str) -> Result<Pattern, String> {
        Pattern::compile(text, &format!(r"\A(?:{text})\z"))
    }

    /// A key of `rank_pattern` or `alpha_pattern`: it matches whole names and endings behind a dot.
    pub(super) fn of_key(key: &str) -> Result<Pattern, String> {
        Pattern::compile(key, &format!(r"\A(?:.*\.)?(?:{key})\z"))
    }

    /// An entry of `modules_to_save`. The module and all modules below it are no targets.
    pub(super) fn below(name: &str) -> Result<Pattern, String> {
        Pattern::compile(name, &format!(r"\A(?:.*\.)?{name}(?:\..*)?\z"))
    }

    /// The index of a layer: the first number behind `.NAME.`, for any of the names.
    pub(super) fn index_below(name: Option<&str>) -> Result<Pattern, String> {
        match name {
            None => Pattern::compile("", r"\A.*?\.[^.]*\.(\d+)\."),
            Some(name) => Pattern::compile(name, &format!(r"\A(?:.*?\.)?{name}\.(?P<idx>\d+)\.")),
        }
    }

    fn compile(text: &str, expression: &str) -> Result<Pattern, String> {
        if text.len() > LONGEST_PATTERN {
            return Err(format!("a pattern of {} bytes, more than {LONGEST_PATTERN}", text.len()));
        }
        let mut builder = RegexBuilder::new(expression);
        builder.backtrack_limit(MAX_STEPS).delegate_size_limit(MAX_COMPILED_BYTES);
        builder.build().map(Pattern).map_err(|error| format!("the pattern `{text}`, which is not understood: {error}"))
    }

    pub(super) fn matches(&self, name: &str) -> Result<bool, String> {
        self.0.is_match(name).map_err(|error| format!("a pattern that is too hard to match: {error}"))
    }

    /// The last group's number, if the pattern matches a name.
    pub(super) fn number_in(&self, name: &str) -> Result<Option<usize>, String> {
        let found = self.0.captures(name).map_err(|error| format!("a pattern that is too hard to match: {error}"))?;
        let group = found.as_ref().and_then(|found| found.name("idx").or_else(|| found.get(1)));
        Ok(group.and_then(|number| number.as_str().parse().ok()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: &str = "encoder.block.0.layer.0.SelfAttention.q";

    #[test]
    fn names_match_whole_or_behind_a_dot() {
        let of = |names: &[&str]| Selection::Names(names.iter().map(|&name| name.to_owned()).collect());
        for (names, module, expected) in [
            (&["q"][..], Q, true),
            (&["Attention.q"], Q, false),
            (&["SelfAttention.q"], Q, true),
            (&["v", Q], Q, true),
            (&[".q"], Q, false),
            (&["wi"], "encoder.block.0.layer.1.DenseReluDense.wi_0", false),
            (&["lm_head"], "lm_head", true),
        ] {
            assert_eq!(of(names).has(module), Ok(expected), "{names:?} {module}");
        }
    }

    #[test]
    fn patterns_match_as_in_python() {
        for (pattern, expected) in [
            (r".*\.(q|v)", true),
            (r".*SelfAttention", false),
            (r"q|.*\.q", true),
            (r"(?!decoder).*q$", true),
            (r"(?!encoder).*q$", false),
            (r"(?i).*selfattention\.Q", true),
        ] {
            assert_eq!(Pattern::whole(pattern).unwrap().matches(Q), Ok(expected), "{pattern}");
        }
        for (key, expected) in
            [("q", true), ("Attention.q", false), ("SelfAttention.q", true), ("block.*q", true), ("layer.0", false)]
        {
            assert_eq!(Pattern::of_key(key).unwrap().matches(Q), Ok(expected), "{key}");
        }
        assert_eq!(Pattern::index_below(None).unwrap().number_in("decoder.block.7.layer.2.x.wo"), Ok(Some(7)));
        assert_eq!(Pattern::index_below(Some("layer")).unwrap().number_in("decoder.block.7.layer.2.x.wo"), Ok(Some(2)));
        assert_eq!(Pattern::index_below(Some("block")).unwrap().number_in("lm_head"), Ok(None));
    }

    #[test]
    fn a_pattern_without_end_or_sense_is_an_error() {
        assert!(Pattern::whole("(").is_err());
        assert!(Pattern::whole(&"a".repeat(LONGEST_PATTERN + 1)).is_err());
        let endless = Pattern::whole(r"(?:(?=a)(a|aa))+\1$").unwrap();
        assert!(endless.matches(&format!("{}!", "a".repeat(400))).is_err());
    }
}
