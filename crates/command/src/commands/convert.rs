//! `train_low_mem convert`: writes rows of any files as parquet; cleans, deduplicates and splits them on request.

use std::cell::Cell;
use std::fmt::Write;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use durable_files::AtomicFile;
use memory_policy::{Bytes, Probe, SystemProbe, counted, plural};
use row_files::{
    Conversion, Counts, Duplicates, ParquetWriter, Part, ReadOptions, Settings, Share, Sizes, conversion_bytes,
};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::cli::row_flags::{BadRowRule, ConvertArgs, Deduplicate};
use crate::commands::text_lengths::TextLengths;
use crate::data::reading::unused_in_words;
use crate::data::splits::{self, Purpose};
use crate::data::unpacked::Unpacked;
use crate::data::{data_files, row_budget, row_data};
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::screen::shell_words::quoted;
use crate::screen::{report, stop};

/// The time between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Converts files.
pub fn convert(flags: &ConvertArgs) -> Outcome<()> {
    let share = flags.validation_split.map(share).transpose()?;
    let ending = row_files::extension(&flags.output).filter(|ending| row_files::FILE_EXTENSIONS.contains(&&**ending));
    if ending.is_some_and(|ending| ending != "parquet") {
        let shown = flags.output.display();
        return Err(Failure::usage(format!("--output {shown}: `convert` writes parquet, whatever the name says"))
            .hint(format!("`--output {}`", flags.output.with_extension("parquet").display())));
    }
    let validation = share.map(|_| beside(&flags.output));
    for output in [Some(&flags.output), validation.as_ref()].into_iter().flatten() {
        if output.exists() && !flags.force {
            return Err(Failure::usage(format!("{} already exists", output.display())).hint("`--force` overwrites it"));
        }
    }
    let mut unpacked = Unpacked::default();
    let divided = splits::divide(data_files::groups("FILE", &flags.files)?, Purpose::Training, "")?;
    let left = [divided.validation, divided.left].concat();
    if !left.is_empty() {
        let other = flags.output.with_file_name(left[0].file_stem().unwrap_or_default()).with_extension("parquet");
        let command = format!("`convert {} --output {}`", quoted(&left[0]), quoted(&other));
        report::note(&format!("{}; to convert them as well: {command}", splits::left_in_words(&left)));
    }
    let originals = divided.wanted;
    let files = unpacked.files(&originals, report::note)?;
    let (max_bytes, options) = shares(flags, &files)?;
    let conversion = Conversion::new(&files, &flags.columns.chosen(), &options).map_err(named_by_flags)?;
    let mut lengths = TextLengths::new(&flags.lengths, conversion.is_text())?;
    let table = || match flags.deduplicate {
        Some(Deduplicate::Minhash) => Duplicates::near(max_bytes),
        _ => Duplicates::exact(max_bytes),
    };
    let interrupted = interrupted()?;
    let (began, said) = (Instant::now(), Cell::new(Instant::now()));
    let settings = Settings {
        bad_rows: flags.bad_rows.into(),
        clean: flags.clean,
        duplicates: flags.deduplicate.map(|_| &table as &dyn Fn() -> Duplicates),
        validation: share.map(|share| (share, flags.seed)),
        stop: &|| interrupted.load(Ordering::Relaxed),
        progress: &|counts| {
            if said.get().elapsed() >= PROGRESS_INTERVAL {
                said.set(Instant::now());
                report::note(&format!(
                    "{} rows read, {:.0} % of the files",
                    counted(counts.read),
                    100.0 * counts.share
                ));
            }
        },
        ..Settings::default()
    };
    let columns: &[&str] = if conversion.is_text() { &["text"] } else { &["prompt", "response"] };
    let mut outputs = vec![Output::begin(&flags.output, columns, &conversion)?];
    if let Some(validation) = &validation {
        outputs.push(Output::begin(validation, columns, &conversion)?);
    }
    let mut failed = None;
    let counts = conversion.run(&settings, &mut |part, texts, rejected| {
        let mut row = row_data::row(&conversion, texts, rejected);
        if !conversion.is_text() {
            row[0].insert_str(0, &flags.source_prefix);
        }
        lengths.add(&row.iter().map(String::as_str).collect::<Vec<_>>()).map_err(|failure| {
            failed = Some(failure);
            row_files::Error::Stopped
        })?;
        outputs[usize::from(part == Part::Validation)].writer.write(row).map_err(row_files::Error::Write)
    });
    let counts = counts.map_err(|error| ended(error, failed, flags))?;
    if counts.train == 0 {
        return Err(match &counts.first_bad {
            Some(first) => {
                let read = plural(counts.read, "row");
                Failure::unusable(format!("no usable row: {read} read, and all were skipped"))
                    .hint(format!("the first of them: {first}"))
            }
            None if counts.read == 0 => Failure::unusable("no rows: the files have a header or nothing"),
            None => Failure::unusable("no row is left for training")
                .hint("expected at least one row besides those that `--validation-split` takes"),
        });
    }
    let bytes = outputs.into_iter().map(Output::finish).collect::<Outcome<Vec<u64>>>()?;
    let peak = SystemProbe::new().snapshot()?.peak_rss;
    let seconds = began.elapsed().as_secs_f64();
    if flags.json {
        let mut json = row_data::counts_json(&counts);
        json["output"] = json!(flags.output.display().to_string());
        json["validation_output"] = json!(validation.map(|path| path.display().to_string()));
        json["bytes"] = json!(bytes);
        json["texts"] = json!(sources(&conversion, &originals));
        json["lengths"] = lengths.to_json();
        json["seconds"] = json!(seconds);
        json["peak_rss_bytes"] = json!(peak.0);
        return report::result(&format!("{json}\n"));
    }
    let written = Written { flags, originals: &originals, validation: validation.as_deref(), bytes: &bytes };
    report::result(&format!("{}{}", steps(&conversion, &counts, &written), lengths.in_words()))?;
    #[expect(clippy::cast_precision_loss, reason = "a rate of rows")]
    let rate = counts.read as f64 / seconds.max(1e-9);
    report::note(&format!("{seconds:.1} s, {} rows/s, peak {peak}", counted(rate as u64)));
    Ok(())
}

/// One output file.
struct Output {
    path: PathBuf,
    file: AtomicFile,
    writer: ParquetWriter<BufWriter<File>>,
}

impl Output {
    fn begin(path: &Path, columns: &[&str], conversion: &Conversion) -> Outcome<Self> {
        let failed = |error| Failure::io("write rows", path, &error);
        outputs::remove_leftovers_beside(path);
        let file = AtomicFile::create(path)?;
        let handle = file.file().try_clone().map_err(failed)?;
        let sizes = Sizes::for_bytes(conversion.bytes());
        let writer = ParquetWriter::new(BufWriter::new(handle), columns, sizes).map_err(failed)?;
        Ok(Self { path: path.to_owned(), file, writer })
    }

    /// Renames the file into place. Returns its bytes.
    fn finish(self) -> Outcome<u64> {
        let (_, bytes) = self.writer.finish().map_err(|error| Failure::io("write rows", &self.path, &error))?;
        self.file.commit()?;
        Ok(bytes)
    }
}

/// The written files, for the report.
struct Written<'a> {
    flags: &'a ConvertArgs,
    /// The files as the user named them, even if one was unpacked.
    originals: &'a [PathBuf],
    validation: Option<&'a Path>,
    bytes: &'a [u64],
}

/// A line for each step, with the rows that it skipped or changed.
fn steps(conversion: &Conversion, counts: &Counts, written: &Written<'_>) -> String {
    let flags = written.flags;
    let mut text = String::new();
    for source in sources(conversion, written.originals) {
        let _ = writeln!(text, "{source}");
    }
    let mut line = |name: &str, count: u64, note: &str| {
        let _ = writeln!(text, "{}", format!("  {name:<22}{:>9}  {note}", counted(count)).trim_end());
    };
    let first = |is_first: bool| match &counts.first_bad {
        Some(row) if is_first => format!("skipped; the first: {row}"),
        _ => "skipped".to_string(),
    };
    line("rows read", counts.read, "");
    if counts.malformed > 0 {
        line(
            "malformed",
            counts.malformed,
            &first(counts.first_bad.as_ref().is_some_and(|row| row.fault.is_malformed())),
        );
    }
    if counts.empty > 0 {
        line(
            "null or empty",
            counts.empty,
            &first(counts.first_bad.as_ref().is_some_and(|row| !row.fault.is_malformed())),
        );
    }
    row_data::quote_notes(counts).iter().for_each(|(name, rows, note)| line(name, *rows, note));
    if flags.clean {
        line("cleaned", counts.cleaned, "changed");
    }
    match flags.deduplicate {
        Some(Deduplicate::Exact) => line("duplicates", counts.duplicates, "left out, the same byte for byte"),
        Some(Deduplicate::Minhash) => {
            line("duplicates", counts.duplicates, "left out, Jaccard similarity of 0.85 or more")
        }
        None => {}
    }
    let files = [Some(flags.output.as_path()), written.validation].into_iter().flatten().zip(written.bytes);
    for ((name, count), (path, bytes)) in
        [("written", counts.train), ("for validation", counts.validation)].iter().zip(files)
    {
        line(name, *count, &format!("{} ({})", path.display(), Bytes(*bytes)));
    }
    text
}

/// A line for each of the first files: its form, and the columns of its texts.
fn sources(conversion: &Conversion, originals: &[PathBuf]) -> Vec<String> {
    const SHOWN: usize = 8;
    let mut lines: Vec<String> = conversion
        .sources
        .iter()
        .zip(originals)
        .take(SHOWN)
        .map(|((_, kind, pairing), path)| {
            let unused = unused_in_words(&pairing.unused(&kind.columns));
            format!("{}: {}, {}{unused}", path.display(), kind.in_words(), pairing.of_classes(&kind.classes))
        })
        .collect();
    if conversion.sources.len() > SHOWN {
        lines.push(format!("and {} more files", conversion.sources.len() - SHOWN));
    }
    lines
}

/// `rows.parquet` to `rows-validation.parquet`.
fn beside(output: &Path) -> PathBuf {
    let mut name = output.file_stem().unwrap_or_default().to_os_string();
    name.push("-validation");
    if let Some(ending) = output.extension() {
        name.push(".");
        name.push(ending);
    }
    output.with_file_name(name)
}

fn share(number: f64) -> Outcome<Share> {
    #[expect(clippy::cast_sign_loss, reason = "it is positive here")]
    match number {
        share if share > 0.0 && share < 1.0 => Ok(Share::Of(share)),
        rows if (1.0..1e15).contains(&rows) => Ok(Share::Rows(rows as u64)),
        other => Err(Failure::usage(format!("--validation-split: expected a share below 1 or a count, got {other}"))
            .hint("for example `--validation-split 0.05` or `--validation-split 500`")),
    }
}

/// Bytes that the table of duplicates may use, and how files are read in the rest of the budget.
fn shares(flags: &ConvertArgs, files: &[PathBuf]) -> Outcome<(u64, ReadOptions)> {
    let bytes = files.iter().map(|path| regular_file::metadata(path).map_or(0, |file| file.len())).sum();
    let outputs = if flags.validation_split.is_some() { 2 } else { 1 };
    let left = row_budget::left("convert", flags.memory_budget.as_deref(), conversion_bytes(bytes, outputs, 0))?;
    // A table of duplicates comes first: with it, rows are short.
    let for_rows = if flags.deduplicate.is_some() { left / 2 } else { left };
    let options = flags.text.options().within(for_rows, bytes, outputs);
    Ok((left - for_rows, options))
}

/// Set by the first signal that asks to stop. The unfinished output is then removed.
fn interrupted() -> Outcome<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&flag)))
            .map_err(|error| Failure::internal(format!("cannot install handlers for signals: {error}")))?;
    }
    Ok(flag)
}

/// An error of the conversion, with flags that help.
fn ended(error: row_files::Error, failed: Option<Failure>, flags: &ConvertArgs) -> Failure {
    match error {
        row_files::Error::Stopped => failed.unwrap_or_else(stop::without_result),
        row_files::Error::Write(error) => Failure::io("write rows", &flags.output, &error),
        row_files::Error::Row(row) => {
            let is_of_column = row.fault.is_of_column();
            let failure = Failure::from(row_files::Error::Row(row));
            match flags.bad_rows {
                BadRowRule::Skip => failure,
                _ if is_of_column => failure,
                _ => failure.hint("`--bad-rows skip` skips and counts rows that cannot be used"),
            }
        }
        error => error.into(),
    }
}

/// An error of columns, with hints that name flags rather than keys.
pub fn named_by_flags(error: row_files::Error) -> Failure {
    let meanings = error.meanings();
    let mut failure = Failure::from(error);
    // Those of the meanings are the last ones.
    failure.hints.truncate(failure.hints.len() - meanings.len());
    for hint in &mut failure.hints {
        for (key, flag) in [
            ("`data.objective=span-corruption` with `data.text_column`", "`--text-column`"),
            ("data.prompt_column", "--prompt-column"),
            ("data.response_column", "--response-column"),
            ("data.source_template=", "--source-template "),
            ("data.target_template", "--target-template"),
            ("data.source_lang=", "--source-lang "),
            ("data.target_lang=", "--target-lang "),
        ] {
            *hint = hint.replace(key, flag);
        }
        // A template has characters of the shell.
        *hint = hint.replace("--source-template {", "--source-template '{").replace("}`, or", "}'`, or");
    }
    let meanings = meanings.iter().map(|meaning| format!("{}: `{}`", meaning.words, meaning.flags()));
    meanings.fold(failure, Failure::hint)
}
