//! Rules about the workflows that build and release: nothing that they use can be exchanged, and no credentials stay on the machine.

use super::{Finding, Tree};

/// Digits of a commit's hash.
const HASH_DIGITS: usize = 40;

/// Actions are named by hash, packages by version, and a checkout keeps no credentials.
pub fn workflows_name_what_cannot_be_exchanged(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let of_workflow = |path: &str| path.starts_with(".github/workflows/") || path == ".gitlab-ci.yml";
    for (path, text) in tree.files().filter(|(path, _)| of_workflow(path)) {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (at, line) in lines.iter().enumerate() {
            let mut find = |what: &str| findings.push(Finding::new(path, at + 1, what));
            if let Some((_, action)) = line.split_once("uses: ") {
                let hash = action.split_once('@').map(|(_, rest)| rest.split(' ').next().unwrap_or_default());
                if !hash.is_some_and(|hash| hash.len() == HASH_DIGITS && hash.bytes().all(|b| b.is_ascii_hexdigit())) {
                    find("an action whose tag can be moved; expected the hash of a commit");
                }
                let next = &lines[at..lines.len().min(at + 4)];
                if action.starts_with("actions/checkout@") && !next.contains(&"persist-credentials: false") {
                    find("a checkout that keeps its credentials; expected `persist-credentials: false`");
                }
            }
            // Its path may be quoted: `"tools/bin/pip" install`.
            let words =
                line.split_once("pip").and_then(|(_, rest)| rest.split_once(" install ")).map(|(_, words)| words);
            let mut packages = words.into_iter().flat_map(str::split_whitespace).filter(|word| !word.starts_with('-'));
            if packages.any(|package| !package.contains("==")) {
                find("a package of any version; expected `NAME==VERSION`");
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_a_kept_credential_and_any_version_are_found() {
        let lines = |text: &str| {
            let tree = Tree::from_files(&[(".github/workflows/a.yml", text)]);
            workflows_name_what_cannot_be_exchanged(&tree).iter().map(|finding| finding.line).collect::<Vec<usize>>()
        };
        let hash = "0123456789abcdef0123456789abcdef01234567";
        let kept = format!("- uses: actions/checkout@{hash} # v1\n");
        assert_eq!(lines(&kept), [1]);
        assert_eq!(lines(&format!("{kept}  with:\n    persist-credentials: false\n")), [0; 0]);
        assert_eq!(lines("- uses: actions/upload-artifact@v4\n- run: pip install maturin"), [1, 2]);
        assert_eq!(lines("- run: pip install maturin==1.11.5"), [0; 0]);
        assert_eq!(lines("\"$HOME/bin/pip\" install --quiet nvidia-{nvcc,crt}==13.0.* maturin"), [1]);
        assert_eq!(lines("\"$HOME/bin/pip\" install --quiet nvidia-{nvcc,crt}==13.0.* maturin==1.11.5"), [0; 0]);
    }
}
