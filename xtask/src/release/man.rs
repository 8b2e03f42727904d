//! The manual page: the help of every command, as roff.

use std::fmt::Write as _;

/// The page from the program's help and that of its commands, each with the command's name.
pub fn page(version: &str, help: &str, commands: &[(String, String)]) -> String {
    let mut page = format!(".TH TRAIN_LOW_MEM 1 \"\" \"{}\"\n.SH NAME\ntrain_low_mem \\- ", text(version));
    let (summary, rest) = help.split_once('\n').unwrap_or((help, ""));
    let _ = writeln!(page, "{}", text(summary));
    // The options of `train` are those of the program, and stand once.
    verbatim(&mut page, "DESCRIPTION", rest);
    for (name, help) in commands.iter().filter(|(name, _)| name != "train") {
        verbatim(&mut page, &format!("train_low_mem {name}"), help);
    }
    page
}

/// The names of the commands that a help lists.
pub fn commands(help: &str) -> Vec<&str> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // Further lines of a description are indented more.
    let names =
        list.filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   ")));
    names.filter(|name| *name != "help").collect()
}

/// A section whose lines stay as they are.
fn verbatim(page: &mut String, heading: &str, lines: &str) {
    let _ = writeln!(page, ".SH {}\n.nf", text(heading));
    for line in lines.trim().lines() {
        let _ = writeln!(page, "{}", text(line));
    }
    page.push_str(".fi\n");
}

/// A line as roff: no character of it is a command.
fn text(line: &str) -> String {
    let escaped = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq").replace('`', "\\(ga");
    if escaped.starts_with(['.', ' ']) { format!("\\&{escaped}") } else { escaped }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "Trains T5\n\nCommands:\n  train  Train\n         a model\n  plan   Plan\n  help   Help\n\nOptions:\n  -h  Help\n";

    #[test]
    fn a_page_has_a_section_for_each_command_and_no_line_of_it_is_an_instruction() {
        assert_eq!(commands(HELP), ["train", "plan"]);
        let help = |name: &str| (name.to_owned(), format!("Use of {name}\n.so /etc/passwd\n'x \\n `--a-b`\n"));
        let page = page("train_low_mem 1", HELP, &[help("train"), help("plan")]);
        assert!(
            page.starts_with(".TH TRAIN_LOW_MEM 1 \"\" \"train_low_mem 1\"\n.SH NAME\ntrain_low_mem \\- Trains T5\n")
        );
        assert!(
            page.contains(
                ".SH train_low_mem plan\n.nf\nUse of plan\n\\&.so /etc/passwd\n\\(aqx \\en \\(ga\\-\\-a\\-b\\(ga\n.fi\n"
            ),
            "{page}"
        );
        assert!(!page.contains("Use of train"));
    }
}
