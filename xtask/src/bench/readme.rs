//! `bench readme`: measures the README's table of training steps beside PyTorch, and writes it into the README in both languages.
//!
//! `scripts/compare_pytorch.py` measures each case in turn with PyTorch, in processes of their own. What a case measured is kept below
//! `target` until the commit changes, so that a benchmark that was stopped continues.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};

use super::Options;
use super::record::{self, Origin};

/// Models, samples, and tokens of each side.
const CASES: [(&str, u64, u64); 3] = [("t5-small", 8, 256), ("chatlm-0.2b", 4, 256), ("t5-base", 4, 256)];
/// Precisions as the README names them, the contender's name in the script, and the modes of PyTorch beside it. PyTorch has no stochastic
/// rounding; pure bf16 has the same bytes.
const PRECISIONS: [(&str, &str, &[&str]); 3] = [
    ("f32", "train_low_mem f32", &["PyTorch f32"]),
    ("bf16", "train_low_mem bf16", &["PyTorch bf16-autocast", "PyTorch bf16-pure"]),
    (
        "stochastic rounding",
        "train_low_mem bf16, master-weights stochastic-rounding",
        &["PyTorch bf16-autocast", "PyTorch bf16-pure"],
    ),
];
const ROUNDS: &str = "2";
/// Minutes of a case on two cores of 2023, for the first announcement. Later ones are measured.
const MINUTES: u64 = 6;

/// The lines around a table in a README.
const BEGIN: &str = "<!-- cargo xtask bench readme -->\n";
const END: &str = "<!-- end -->\n";

/// A line of the table.
struct Row {
    name: String,
    rival: String,
    rival_ms: f64,
    our_ms: f64,
    rival_mib: f64,
    our_mib: f64,
}

/// Measures what the latest run left out, and writes the pages.
pub fn run(root: &Path, options: &Options) -> Result<(), String> {
    let kept = root.join("target/bench-readme").join(record::commit(root).replace(", ", "-"));
    fs::create_dir_all(&kept).map_err(|error| format!("{}: {error}", kept.display()))?;
    let cases: Vec<_> = CASES.into_iter().filter(|(model, ..)| model.contains(&options.filter)).collect();
    let left = cases.iter().filter(|(model, ..)| !kept.join(format!("{model}.json")).exists()).count() as u64;
    println!("{left} of {} cases to measure, about {} minutes on two cores", cases.len(), left * MINUTES);
    let (mut rows, mut machine) = (Vec::new(), String::new());
    for (model, samples, tokens) in cases {
        let path = kept.join(format!("{model}.json"));
        if !path.exists() {
            let start = Instant::now();
            measure(root, options, (model, samples, tokens), &path)?;
            println!("{model}: {} s", start.elapsed().as_secs());
        }
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let result: Value = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        machine = result["machine"].as_str().unwrap_or_default().to_owned();
        rows.extend(rows_of(&format!("{model} NAME, {samples} x ({tokens}+{tokens})"), &result["summary"])?);
    }
    if !options.is_whole() {
        println!("{}", table(&rows));
        return Ok(());
    }
    let text = format!("# A training step beside PyTorch\n\n{machine}\n\n{}", table(&rows));
    for path in Origin::here(root, "steps", options.origin.command.clone()).write(
        &options.pages,
        &text,
        &json!({ "rows": rows.iter().map(Row::json).collect::<Vec<_>>() }),
    )? {
        println!("wrote {}", path.display());
    }
    for (name, language) in [("README.md", Language::English), ("README.zh.md", Language::Chinese)] {
        let path = root.join(name);
        let page = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let page = replaced(&page, &format!("{}\n\n{}", language.caption(&machine), language.table(&rows)))
            .ok_or_else(|| format!("{}: expected a line `{}`", path.display(), BEGIN.trim_end()))?;
        fs::write(&path, page).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// Runs the script for one case. Its JSON is in place only if every contender ended well.
fn measure(
    root: &Path,
    options: &Options,
    (model, samples, tokens): (&str, u64, u64),
    to: &PathBuf,
) -> Result<(), String> {
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let unfinished = to.with_extension("unfinished");
    let [samples, tokens] = [samples, tokens].map(|number| number.to_string());
    let mut script = Command::new(python);
    script
        .arg(root.join("scripts/compare_pytorch.py"))
        .arg("--binary")
        .arg(&options.program)
        .arg("--json")
        .arg(&unfinished);
    script.args(["--model", model, "--batch", &samples, "--source-tokens", &tokens, "--target-tokens", &tokens]);
    script.args(["--rounds", ROUNDS, "--steps", "2", "--variant", "bf16:--master-weights stochastic-rounding"]);
    let status = script.status().map_err(|error| format!("{script:?}: {error}"))?;
    if !status.success() {
        return Err(format!(
            "{script:?}: {status}\nhint: it needs torch and transformers: PYTHON=environment/bin/python cargo xtask bench readme"
        ));
    }
    fs::rename(&unfinished, to).map_err(|error| format!("{}: {error}", to.display()))
}

/// The rows of one case: each precision beside the fastest mode of PyTorch.
fn rows_of(name: &str, summary: &Value) -> Result<Vec<Row>, String> {
    let number =
        |contender: &str, key: &str| summary[contender][key].as_f64().ok_or_else(|| format!("{contender}: no {key}"));
    let mut rows = Vec::new();
    for (precision, ours, modes) in PRECISIONS {
        let mut timed = Vec::new();
        for mode in modes {
            timed.push((number(mode, "step_ms")?, *mode));
        }
        let (rival_ms, rival) = timed.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).ok_or("no mode of PyTorch")?;
        rows.push(Row {
            name: name.replace("NAME", precision),
            rival: rival.to_owned(),
            rival_ms,
            our_ms: number(ours, "step_ms")?,
            rival_mib: number(rival, "peak_rss_mib")?,
            our_mib: number(ours, "peak_rss_mib")?,
        });
    }
    Ok(rows)
}

impl Row {
    fn json(&self) -> Value {
        let Row { name, rival, rival_ms, our_ms, rival_mib, our_mib } = self;
        json!({ "name": name, "rival": rival, "rival_ms": rival_ms, "our_ms": our_ms, "rival_mib": rival_mib, "our_mib": our_mib })
    }

    fn cells(&self) -> String {
        let Row { name, rival_ms, our_ms, rival_mib, our_mib, .. } = self;
        format!(
            "| {name} | {:.2} | {:.2} | **{:.2}** | {rival_mib:.0} | {our_mib:.0} |\n",
            rival_ms / 1000.0,
            our_ms / 1000.0,
            rival_ms / our_ms
        )
    }
}

/// The page's table, which names PyTorch's fastest mode.
fn table(rows: &[Row]) -> String {
    let head = "| | PyTorch's fastest | ms | ours, ms | speed | MiB | ours, MiB | share |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n";
    let line = |row: &Row| {
        let Row { name, rival, rival_ms, our_ms, rival_mib, our_mib } = row;
        let (speed, share) = (rival_ms / our_ms, our_mib / rival_mib);
        format!(
            "| {name} | {rival} | {rival_ms:.0} | {our_ms:.0} | {speed:.2} | {rival_mib:.0} | {our_mib:.0} | {share:.2} |\n"
        )
    };
    head.to_owned() + &rows.iter().map(line).collect::<String>()
}

#[derive(Clone, Copy)]
enum Language {
    English,
    Chinese,
}

impl Language {
    /// Where the numbers are from, in a sentence.
    fn caption(self, machine: &str) -> String {
        let (version, today) = (env!("CARGO_PKG_VERSION"), record::today());
        match self {
            Language::English => format!("Measured on {machine}; version {version}, {today} ([page](bench/steps.md))."),
            Language::Chinese => format!("测量环境：{machine}；version {version}，{today}（[记录](bench/steps.md)）。"),
        }
    }

    fn table(self, rows: &[Row]) -> String {
        let head = match self {
            Language::English => {
                "| samples x (source + target tokens) | PyTorch s | ours s | speed | PyTorch MiB | ours MiB |"
            }
            Language::Chinese => {
                "| 模型，样本数 x（源 + 目标 token 数） | PyTorch 秒 | 本项目 秒 | 倍数 | PyTorch MiB | 本项目 MiB |"
            }
        };
        format!("{head}\n| --- | --- | --- | --- | --- | --- |\n{}", rows.iter().map(Row::cells).collect::<String>())
    }
}

/// The page with this text between the lines around its table; `None` if it has no such lines.
fn replaced(page: &str, text: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}{text}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary() -> Value {
        let row = |ms: f64, mib: f64| json!({ "step_ms": ms, "peak_rss_mib": mib });
        json!({
            "PyTorch f32": row(4000.0, 5000.0), "PyTorch bf16-autocast": row(3000.0, 4000.0), "PyTorch bf16-pure": row(2500.0, 4500.0),
            "train_low_mem f32": row(2000.0, 800.0), "train_low_mem bf16": row(1000.0, 600.0),
            "train_low_mem bf16, master-weights stochastic-rounding": row(800.0, 400.0),
        })
    }

    #[test]
    fn each_precision_stands_beside_the_fastest_mode_of_pytorch() {
        let rows = rows_of("t5-small NAME, 8 x (256+256)", &summary()).unwrap();
        let lines: String = rows.iter().map(Row::cells).collect();
        let expected = "| t5-small f32, 8 x (256+256) | 4.00 | 2.00 | **2.00** | 5000 | 800 |\n\
                        | t5-small bf16, 8 x (256+256) | 2.50 | 1.00 | **2.50** | 4500 | 600 |\n\
                        | t5-small stochastic rounding, 8 x (256+256) | 2.50 | 0.80 | **3.12** | 4500 | 400 |\n";
        assert_eq!(lines, expected);
        assert!(rows_of("", &json!({})).is_err());
    }

    /// A table from before kernels, planner and loader changed is no evidence, so a new version needs a new one.
    #[test]
    fn the_readmes_tables_are_at_most_one_version_old() {
        let number = |text: &str| {
            let mut parts = text.split('.').map(|part| part.parse::<u32>().expect("a number"));
            let [major, minor] = [(); 2].map(|()| parts.next().expect("major.minor.patch"));
            (major, minor)
        };
        let now = number(env!("CARGO_PKG_VERSION"));
        for name in ["README.md", "README.zh.md"] {
            let page = fs::read_to_string(crate::root().join(name)).unwrap();
            let (_, table) = page.split_once(BEGIN).expect(name);
            let (_, rest) = table.split_once("version ").expect("the caption has the version that was measured");
            let measured = number(rest.split([',', '，', ' ']).next().expect("a version"));
            assert!(
                measured.0 == now.0 && measured.1 + 1 >= now.1,
                "{name}: measured with {measured:?}, this is {now:?}"
            );
        }
    }

    #[test]
    fn both_readmes_have_a_place_for_the_table_and_keep_the_rest() {
        for name in ["README.md", "README.zh.md"] {
            let page = fs::read_to_string(crate::root().join(name)).unwrap();
            let written = replaced(&page, "| new |\n").expect(name);
            assert!(written.contains(&format!("{BEGIN}| new |\n{END}")));
            assert_eq!(replaced(&written, "| new |\n").as_deref(), Some(written.as_str()));
            assert_eq!(written.split(BEGIN).next(), page.split(BEGIN).next());
        }
    }
}
