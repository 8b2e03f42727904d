//! Links of documents: each leads to a file of the repository, and its `#part` to a heading of that file.

use super::{Finding, Tree};

/// Every relative link of a document leads to a file or directory, and to a heading where it names one.
pub fn links_lead_to_files_and_headings(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files().filter(|(path, _)| path.ends_with(".md")) {
        for (line, link) in links(text) {
            let (file, part) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.to_owned() } else { resolved(path, file) };
            if !tree.has(&target) {
                findings.push(Finding::new(path, line, format!("links to `{link}`, which does not exist")));
            } else if !part.is_empty() && !tree.get(&target).is_some_and(|text| anchors(text).any(|one| one == part)) {
                findings.push(Finding::new(path, line, format!("links to `{link}`, and {target} has no such heading")));
            }
        }
    }
    findings
}

/// The targets of links within the repository, each with its line. Code is no link.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().flat_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        let line = if is_code || is_fence { "" } else { line };
        let ends = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        ends.map(|(link, _)| link).filter(|link| !link.contains("://")).map(move |link| (at + 1, link))
    })
}

/// A path relative to a document's directory, from the root.
fn resolved(document: &str, link: &str) -> String {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." | "" => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The names by which a page's headings are linked, as GitHub makes them.
fn anchors(text: &str) -> impl Iterator<Item = String> {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    headings.map(|heading| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: &[&str]) {
        let other = "# Title\n\n## The kernels' PTX, `eval` and more\n";
        let tree = Tree::from_files(&[
            ("docs/a.md", text),
            ("docs/b.md", other),
            ("README.md", ""),
            ("crates/t5/src/lib.rs", ""),
        ]);
        let findings = links_lead_to_files_and_headings(&tree);
        assert_eq!(findings.iter().map(Finding::to_string).collect::<Vec<_>>(), expected, "{text}");
    }

    #[test]
    fn a_link_to_a_missing_file_or_heading_is_found() {
        check("[b](b.md), [r](../README.md), [c](../crates/t5), [x](https://example.org/#y)", &[]);
        check("# Own part\n[b](b.md#the-kernels-ptx-eval-and-more) and [own](#own-part)", &[]);
        check("```text\n[a](none.md)\n```", &[]);
        check("\n[b](c.md)", &["docs/a.md:2: links to `c.md`, which does not exist"]);
        check("[b](b.md#more)", &["docs/a.md:1: links to `b.md#more`, and docs/b.md has no such heading"]);
        check("[own](#more)", &["docs/a.md:1: links to `#more`, and docs/a.md has no such heading"]);
    }
}
