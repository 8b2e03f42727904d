//! The rows of a run. Parquet files are read in place; all other files are converted to parquet once, beside the run.
//!
//! ```text
//! OUTPUT/data/train-rows.parquet        the rows of `data.train`
//! OUTPUT/data/validation-rows.parquet   the rows of `data.validation`, or those that `data.validation_split` took
//! OUTPUT/data/train-rows.json           the bytes and settings that they were made from; written last
//! ```
//!
//! Invariants:
//! * Parquet files with the two columns of text are read in place, unless rows are split off.
//! * Converted files are used again while the sources, the settings and the result are unchanged. A source is unchanged if its size, times
//!   and inode are, or else if its SHA-256 is.
//! * A file of these names that no run made is never replaced: without a record that names it, the run is refused.
//! * A resumed run refuses changed sources, unless `--allow-changed data` permits them.

use std::cell::Cell;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dataloader::{Side, Tokenizer};
use durable_files::AtomicFile;
use memory_policy::{Bytes, MemorySnapshot, Probe, SystemProbe, counted, plural};
use row_files::{Conversion, Counts, ParquetWriter, ReadOptions, RowError, Settings, Share, Sizes};
use serde_json::{Value, json};

use crate::config::task::Task;
use crate::config::{BadRows, Config, evaluating};
use crate::data::reading::{self, Part, Reading, RowData};
use crate::data::row_record;
use crate::data::run_files::{Files, files};
use crate::data::splits::{self, Purpose};
use crate::data::tasks;
use crate::failure::{Exit, Failure, Outcome};
use crate::files::run_dir::{ROWS, RunDir};
use crate::job;
use crate::screen::report;
use crate::screen::stop::Stop;

const TRAIN: &str = "train-rows";
const VALIDATION: &str = "validation-rows";
/// Rows that planning reads; the number of the others is estimated.
const PLANNED_ROWS: u64 = 100_000;
/// The time between two lines of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// The caller's requirements for the rows.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// The purpose of the files of `data.train`.
    pub purpose: Purpose,
    /// Whether the run resumes. Then it must read the same rows as before.
    pub resumes: bool,
    /// Whether an estimated number of rows is enough.
    pub to_plan: bool,
    /// The request to stop, if any.
    pub stop: &'a Stop,
    /// Prints a line for people.
    pub say: fn(&str),
}

/// Finds the rows that the config names, and converts files that are not parquet, or have other columns.
pub fn prepare(
    config: &Config,
    (model, tokenizer): (&t5::Config, &Tokenizer),
    run: &mut RunDir,
    wanted: Wanted<'_>,
) -> Outcome<RowData> {
    let task = reading::task(config, model);
    if !config.data.tasks.tasks.is_empty() && task != Task::TextToText {
        return Err(Failure::usage("`data.tasks`: only tasks of `task.name = \"text-to-text\"` are mixed")
            .hint("train a classifier on one list of files: `data.train`"));
    }
    let Files { train, validation, left, of_tasks, unpacked } = files(config, task, wanted.purpose, wanted.say)?;
    let has_validation = validation.is_some();
    let reading = Reading::resolve(config, (model, tokenizer), train, validation, left)?;
    evaluating::check(config, has_validation || config.data.validation_split.is_some())?;
    if !reading.left.is_empty() {
        (wanted.say)(&splits::left_in_words(&reading.left));
    }
    let mut data = RowData {
        reading,
        train: Vec::new(),
        validation: Vec::new(),
        estimated_rows: None,
        bytes_to_convert: None,
        events: Vec::new(),
        unpacked: None,
        rows_of_tasks: None,
    };
    let room = config.data.max_source_tokens.saturating_sub(1);
    // A prompt that cannot be tokenized is reported by the step that reads it.
    let fits = |prompt: &str| {
        tokenizer.encode_prompt(model.prefix(), prompt, room, Side::Right).map_or(true, |(_, is_cut)| !is_cut)
    };
    let chats = Chats { fits: &fits, tokenizer: tokenizer.fingerprint() };
    let converted = parquet_of(&data.reading, &data.reading.train, TRAIN, (config, &chats), run, wanted)?;
    (data.train, data.estimated_rows) = (converted.files, converted.estimated_rows);
    data.reading.train.rows.extend(converted.rows);
    data.bytes_to_convert = converted.bytes;
    data.validation.extend(converted.validation);
    data.events.extend(converted.event);
    let mut rows_of_tasks = of_tasks.as_ref().map(|[train, _]| {
        [tasks::rows_of(train, converted.kept.as_ref().unwrap_or(&data.reading.train.rows)), Vec::new()]
    });
    if let Some(validation) = &data.reading.validation {
        warn_of_labels(&data.reading.train, validation)?;
        let converted = parquet_of(&data.reading, validation, VALIDATION, (config, &chats), run, wanted)?;
        data.validation = converted.files;
        data.bytes_to_convert = data.bytes_to_convert.max(converted.bytes);
        data.events.extend(converted.event);
        data.reading.validation.iter_mut().for_each(|part| part.rows.extend(&converted.rows));
        let part = data.reading.validation.as_ref();
        if let (Some(rows), Some([_, validation]), Some(part)) = (&mut rows_of_tasks, &of_tasks, part) {
            rows[1] = tasks::rows_of(validation, converted.kept.as_ref().unwrap_or(&part.rows));
        }
    }
    // A plan has only seen some of the rows.
    data.rows_of_tasks = rows_of_tasks.filter(|_| data.estimated_rows.is_none());
    data.unpacked = (wanted.purpose == Purpose::Scores).then_some(unpacked);
    Ok(data)
}

/// Warns of validation rows whose labels are all other ones, such as numbers instead of names: no answer is right then.
fn warn_of_labels(train: &Part, validation: &Part) -> Outcome<()> {
    let [of_train, of_validation] = [train, validation].map(|part| part.labels(PLANNED_ROWS as usize));
    let words = of_validation?.foreign_in_words(&of_train?);
    words.inspect(|words| report::warn(&format!("{}: {words}", validation.key)));
    Ok(())
}

/// Prints a line among those of a run.
pub fn print_line(text: &str) {
    report::print(&format!("{text}\n"));
}

/// The first of some names, and the number of the others.
fn listed(mut names: impl ExactSizeIterator<Item = String>) -> String {
    const SHOWN: usize = 12;
    let first = names.by_ref().take(SHOWN).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => first,
        more => format!("{first}, and {} more", counted(more as u64)),
    }
}

/// The texts that are written of a row.
pub fn row(conversion: &Conversion, [prompt, response]: [String; 2], rejected: Option<String>) -> Vec<String> {
    if conversion.is_text() { vec![response] } else { [prompt, response].into_iter().chain(rejected).collect() }
}

/// What is noticed about lists of texts.
fn list_notes(counts: &Counts) -> Vec<String> {
    let lists = |count: u64| plural(count, "list");
    let all = [
        (
            counts.lists.lone_texts,
            format!(
                "{} of {} have one text: nothing is compared with it",
                lists(counts.lists.lone_texts),
                counted(counts.train + counts.validation)
            ),
        ),
        (
            counts.lists.cut_texts,
            format!(
                "lists were longer than `ranking.list_size` and lost {} with the lowest labels",
                plural(counts.lists.cut_texts, "text")
            ),
        ),
        (
            counts.lists.queries_again,
            format!(
                "{} of a query that had one before, such as `{}`: its texts are not compared with those; sort the rows by query",
                lists(counts.lists.queries_again),
                run_report::figures::clipped(counts.lists.first_query_again.as_deref().unwrap_or_default(), 60)
            ),
        ),
    ];
    all.into_iter().filter(|(count, _)| *count > 0).map(|(_, note)| note).collect()
}

/// Rows whose quotes may mean something else: a name, their number, and a sentence with the first of them.
pub fn quote_notes(counts: &Counts) -> Vec<(&'static str, u64, String)> {
    let Some((path, notes)) = &counts.notes else { return Vec::new() };
    let of = |name, (rows, line): (u64, u64), what: &str, remedy: &str| {
        let note = format!("{what}; the first: {}:{line}. If that is wrong: {remedy}", path.display());
        (rows > 0).then_some((name, rows, note))
    };
    let spanning = of("over several lines", notes.spanning, "a quoted field spans lines", "`--quoting none`");
    let quoted = of("in quotes", notes.quoted, "quotes around a field are part of its text", "`--quoting all`");
    let what = "text follows the closing quote of a field, such as a quote that is written `\\\"` and not twice";
    let unescaped =
        of("with text behind a quote", notes.unescaped, what, "`--quoting none`, or write such quotes twice");
    let what = "a field such as `NaN` or `None` is read as this text";
    let missing = of("with `NaN` or the like", notes.missing, what, "leave such fields empty");
    [spanning, quoted, unescaped, missing].into_iter().flatten().collect()
}

/// `data.validation_split`: below 1 a share, otherwise a count.
#[expect(clippy::cast_sign_loss, reason = "the table of keys has its range")]
fn share(rows: f64) -> Share {
    if rows < 1.0 { Share::Of(rows) } else { Share::Rows(rows as u64) }
}

fn bad_rows(bad_rows: BadRows) -> row_files::BadRows {
    match bad_rows {
        BadRows::Usual => row_files::BadRows::Usual,
        BadRows::Error => row_files::BadRows::Error,
        BadRows::Skip => row_files::BadRows::Skip,
    }
}

/// The rule for chats that are too long.
struct Chats<'a> {
    fits: row_files::Fits<'a>,
    /// The fingerprint of the tokenizer that decides.
    tokenizer: &'a str,
}

/// A set of files as parquet.
struct Converted {
    files: Vec<PathBuf>,
    /// The rows that were written of each source; `None`: all rows are read in place.
    kept: Option<Vec<u64>>,
    /// The rows of each source, where the source did not say it.
    rows: Vec<u64>,
    validation: Option<PathBuf>,
    event: Option<Value>,
    estimated_rows: Option<u64>,
    /// The most bytes that the conversion was predicted to take, if there was one.
    bytes: Option<u64>,
}

impl Converted {
    /// Files that are read where they lie, or that were converted before.
    fn of_files(files: Vec<PathBuf>) -> Self {
        Self { files, kept: None, rows: Vec::new(), validation: None, event: None, estimated_rows: None, bytes: None }
    }
}

/// The files of a part as parquet: in place, or converted.
fn parquet_of(
    reading: &Reading,
    part: &Part,
    name: &'static str,
    (config, chats): (&Config, &Chats<'_>),
    run: &mut RunDir,
    wanted: Wanted<'_>,
) -> Outcome<Converted> {
    if part.is_in_place {
        if !part.is_usual() {
            (wanted.say)(&part.in_words());
        }
        let labels = part.labels(PLANNED_ROWS as usize)?;
        labels.alike_in_words().inspect(|words| report::warn(&format!("{}: {words}", part.key)));
        return Ok(Converted::of_files(part.originals.clone()));
    }
    let Part { conversion, originals, .. } = part;
    let columns = reading.objective.columns();
    let split = config.data.validation_split.filter(|_| name == TRAIN).map(share);
    let directory = run.root().join(ROWS);
    let path = |name: &str| directory.join(format!("{name}.parquet"));
    let (train, validation) = (path(name), split.map(|_| path(VALIDATION)));
    let record_path = directory.join(format!("{name}.json"));
    let mut settings = row_record::settings(conversion, &columns, config, split);
    if conversion.sources.iter().any(|(.., pairing)| pairing.is_chat()) {
        settings["chats"] = json!({"max_source_tokens": config.data.max_source_tokens,
            "source_prefix": reading.source_prefix, "tokenizer": chats.tokenizer});
    }
    let record = row_record::read(&record_path);
    if let Some(record) = &record
        && record["settings"] == settings
        && row_record::holds(&record["outputs"], &train, validation.as_deref())
        && row_record::are_the_same(originals, &record["sources"])?
    {
        return Ok(converted_before(part, record, (train, validation), wanted.say));
    }
    let is_bound = wanted.resumes && record.is_some() && !config.run.allow_changes.iter().any(|part| part == "data");
    if is_bound {
        return Err(Failure::usage(format!(
            "cannot resume: {}, or how its rows are read, changed since this run turned it into {}",
            originals[0].display(),
            train.display()
        ))
        .hint("restore the files and settings that the run was started with, or start a new run with `--output DIR`")
        .hint("to resume anyway, add `--allow-changed data`"));
    }
    for made in durable_files::create_directories(&directory)? {
        run.note_made(made);
    }
    // Checked before anything is replaced: files of these names without a record are not this program's.
    let theirs = |path: &Path| record.is_none() && durable_files::Identity::at(path).is_ok();
    let outputs: Vec<&Path> = [Some(train.as_path()), validation.as_deref()].into_iter().flatten().collect();
    if let Some(path) = outputs.iter().copied().chain([record_path.as_path()]).find(|path| theirs(path)) {
        return Err(Failure::usage(format!("{}: exists, and was not made by a run", path.display()))
            .hint("move it away, or choose another `--output`"));
    }
    let claim = json!({"settings": settings, "outputs": null});
    durable_files::write_atomic(&record_path, format!("{claim:#}\n").as_bytes())?;
    run.note_made(record_path.clone());
    let began = Instant::now();
    let counts = write(conversion, &columns, (config, split, chats), &train, validation.as_deref(), wanted)?;
    outputs.iter().for_each(|made| run.note_made(made.to_path_buf()));
    let record = json!({
        "settings": settings,
        "sources": row_record::sources(originals, &counts.digests)?,
        "counts": counts_json(&counts),
        "outputs": row_record::outputs(&outputs)?,
    });
    if counts.share >= 1.0 {
        durable_files::write_atomic(&record_path, format!("{record:#}\n").as_bytes())?;
    }
    (wanted.say)(&in_words(part, &counts, began.elapsed().as_secs_f64()));
    warn_of_rows(part.key, &counts, config.data.max_source_tokens);
    converted_now(part, counts, &record, (train, validation))
}

/// Files that a record describes: an earlier run or command has converted them.
fn converted_before(
    part: &Part,
    record: &Value,
    (train, validation): (PathBuf, Option<PathBuf>),
    say: fn(&str),
) -> Converted {
    let (key, counts) = (part.key, &record["counts"]);
    let rows = counts["train"].as_u64().unwrap_or(0);
    say(&format!("{key}: {}, turned before into {}", plural(rows, "row"), train.display()));
    let numbers = |name: &str| counts[name].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    Converted {
        kept: Some(numbers("kept_of_files")),
        rows: if part.rows.is_empty() { numbers("of_files") } else { Vec::new() },
        validation,
        event: Some(event(key, record, true)),
        ..Converted::of_files(vec![train])
    }
}

/// Files that were just written, of all rows or, to plan, of the first.
fn converted_now(
    part: &Part,
    counts: Counts,
    record: &Value,
    (train, validation): (PathBuf, Option<PathBuf>),
) -> Outcome<Converted> {
    if counts.train == 0 {
        return Err(no_rows(part.key, &part.conversion, &counts));
    }
    let is_partial = counts.share < 1.0;
    #[expect(clippy::cast_precision_loss, clippy::cast_sign_loss, reason = "an estimate of rows")]
    let estimated_rows = is_partial.then(|| (counts.train as f64 / counts.share) as u64);
    Ok(Converted {
        kept: Some(counts.kept_of_files),
        rows: if part.rows.is_empty() && !is_partial { counts.of_files } else { Vec::new() },
        event: Some(event(part.key, record, false)),
        estimated_rows,
        bytes: Some(bytes_to_convert(&part.conversion, validation.is_some())[1]),
        validation,
        ..Converted::of_files(vec![train])
    })
}

/// Warns of rows that were left out, shortened, or read in a way that may not be meant.
fn warn_of_rows(key: &str, counts: &Counts, max_source_tokens: usize) {
    let warn = |words: &str| report::warn(&format!("{key}: {words}"));
    counts.labels.alike_in_words().inspect(|words| warn(words));
    if counts.shortened_chats > 0 {
        let (chats, turns) = (plural(counts.shortened_chats, "chat"), plural(counts.left_out_turns, "turn"));
        let all = counted(counts.train + counts.validation);
        warn(&format!(
            "{chats} of {all} were longer than {max_source_tokens} tokens and lost their oldest turns, {turns} together"
        ));
    }
    if counts.chats_with_more > 0 {
        let chats = plural(counts.chats_with_more, "chat");
        warn(&format!(
            "{chats} with tool calls, images or other parts that are no text: these are left out, and the text is kept"
        ));
    }
    if let Some(first) = &counts.first_bad {
        let (left_out, all) = (counted(counts.malformed + counts.empty), plural(counts.read, "row"));
        warn(&format!("{left_out} of {all} were skipped; the first: {first}"));
    }
    list_notes(counts).iter().for_each(|note| warn(note));
    for (_, rows, note) in quote_notes(counts) {
        warn(&format!("{}: {note}", plural(rows, "row")));
    }
}

/// Refuses a conversion before its rows are read, if not even short rows fit. A process that is above its budget already is left to its
/// plan, which names the least budget.
fn check_room(budget: Bytes, now: &MemorySnapshot, [least, enough]: [u64; 2]) -> Outcome<()> {
    let needed = now.rss + Bytes(least);
    if budget < now.rss || budget >= needed {
        return Ok(());
    }
    let what = format!("memory budget: expected at least {needed} to read the rows, got {budget}");
    Err(Failure::new(Exit::DoesNotFit, what).hint(enough_for_rows(budget_to_convert(now, enough))))
}

/// A budget in which a conversion may take `bytes`. The plan that follows refuses one below the peak so far, such as that of loading the tokenizer.
fn budget_to_convert(now: &MemorySnapshot, bytes: u64) -> Bytes {
    let peak = now.peak_rss.max(now.rss + Bytes(bytes));
    peak + memory_policy::headroom(peak)
}

fn enough_for_rows(budget: Bytes) -> String {
    let mib = budget.round_up_to_mib().0 >> 20;
    format!("`--memory-budget {mib}MiB` is enough for every row that can be read; the plan may need more")
}

/// The bytes that a conversion takes: at least, and at most for the longest row that can be read.
fn bytes_to_convert(conversion: &Conversion, splits: bool) -> [u64; 2] {
    let outputs = if splits { 2 } else { 1 };
    ReadOptions::bytes_to_convert(conversion.bytes(), outputs, conversion.longest_possible_row())
}

/// Reads the sources and writes the parquet files.
fn write(
    conversion: &Conversion,
    columns: &[String],
    (config, split, chats): (&Config, Option<Share>, &Chats<'_>),
    train: &Path,
    validation: Option<&Path>,
    wanted: Wanted<'_>,
) -> Outcome<Counts> {
    let now = SystemProbe::new().snapshot()?;
    let bytes = bytes_to_convert(conversion, validation.is_some());
    check_room(job::budgets(config).process.resolve(&now), &now, bytes)?;
    let names: Vec<&str> = columns.iter().map(String::as_str).collect();
    let sizes = Sizes::for_bytes(conversion.bytes());
    let begin = |path: &Path| -> Outcome<(AtomicFile, ParquetWriter<BufWriter<std::fs::File>>)> {
        let file = AtomicFile::create(path)?;
        let handle = file.file().try_clone().map_err(|error| Failure::io("write rows", path, &error))?;
        let writer = ParquetWriter::new(BufWriter::new(handle), &names, sizes)
            .map_err(|error| Failure::io("write rows", path, &error))?;
        Ok((file, writer))
    };
    let mut writers = vec![begin(train)?];
    if let Some(path) = validation {
        writers.push(begin(path)?);
    }
    let stop = || wanted.stop.requested();
    let said = Cell::new(Instant::now());
    let progress = |counts: &Counts| {
        if said.get().elapsed() >= PROGRESS_INTERVAL {
            said.set(Instant::now());
            (wanted.say)(&format!(
                "turned {} into parquet, {:.0} % of the files",
                plural(counts.read, "row"),
                100.0 * counts.share
            ));
        }
    };
    let settings = Settings {
        bad_rows: bad_rows(config.data.bad_rows),
        // A plan needs lengths, which a cut gives as well.
        fits: (!wanted.to_plan).then_some(chats.fits),
        validation: split.map(|share| (share, config.run.seed)),
        max_rows: wanted.to_plan.then_some(PLANNED_ROWS),
        stop: &stop,
        progress: &progress,
        ..Settings::default()
    };
    let counts = conversion.run(&settings, &mut |part, texts, rejected| {
        let writer = &mut writers[usize::from(part == row_files::Part::Validation)].1;
        writer.write(row(conversion, texts, rejected)).map_err(row_files::Error::Write)
    });
    let counts = counts.map_err(|error| match error {
        row_files::Error::Write(error) => Failure::io("write rows", train, &error),
        row_files::Error::Stopped => {
            Failure::new(Exit::Interrupted, "interrupted while the rows were turned into parquet; nothing was saved")
                .hint("run the same command again")
        }
        row_files::Error::Row(row) if row.fault.is_over_budget() => {
            over_budget(&row, budget_to_convert(&now, bytes[1]))
        }
        // Rows share a fault of their column: without them none would be left.
        row_files::Error::Row(row) if config.data.bad_rows != BadRows::Skip && !row.fault.is_of_column() => {
            Failure::from(row_files::Error::Row(row))
                .hint("`--set data.bad_rows=skip` skips and counts rows that cannot be used")
        }
        error => error.into(),
    })?;
    for (file, writer) in writers {
        writer.finish().map_err(|error| Failure::io("write rows", train, &error))?;
        file.commit()?;
    }
    Ok(counts)
}

/// The failure for a row that would be read with more memory. A budget of `enough` is enough for every row.
pub fn over_budget(row: &RowError, enough: Bytes) -> Failure {
    Failure::new(Exit::DoesNotFit, row.to_string()).hint(enough_for_rows(enough))
}

fn no_rows(key: &str, conversion: &Conversion, counts: &Counts) -> Failure {
    let files = listed(conversion.sources.iter().map(|(path, ..)| path.display().to_string()));
    let failure =
        Failure::unusable(format!("`{key}`: no usable row in {files}; {} were skipped", counted(counts.read)));
    match &counts.first_bad {
        Some(first) => failure.hint(format!("the first of them: {first}")),
        None => failure.hint("expected at least one row"),
    }
}

/// One line for people: the files, the columns of their texts, and the numbers of rows.
fn in_words(part: &Part, counts: &Counts, seconds: f64) -> String {
    let rows = match (counts.share < 1.0, counts.validation) {
        (true, _) => format!("the first {} were read to plan", plural(counts.read, "row")),
        (false, 0) => plural(counts.train, "row"),
        (false, validation) => format!("{}, {} more for validation", plural(counts.train, "row"), counted(validation)),
    };
    format!("{}; {rows} ({seconds:.1} s)", part.in_words())
}

fn event(key: &str, record: &Value, is_reused: bool) -> Value {
    json!({"key": key, "sources": record["sources"], "counts": record["counts"], "reused": is_reused})
}

/// Numbers of a conversion for records and events.
pub fn counts_json(counts: &Counts) -> Value {
    json!({
        "read": counts.read, "of_files": counts.of_files.iter().take(row_record::MAX_LISTED).collect::<Vec<_>>(),
        "kept_of_files": counts.kept_of_files,
        "malformed": counts.malformed, "empty": counts.empty, "cleaned": counts.cleaned,
        "labels": counts.labels.counts().into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "lists_of_one_text": counts.lists.lone_texts, "texts_cut_from_lists": counts.lists.cut_texts, "queries_again": counts.lists.queries_again,
        "duplicates": counts.duplicates, "shortened_chats": counts.shortened_chats,
        "left_out_turns": counts.left_out_turns, "chats_with_more": counts.chats_with_more, "train": counts.train, "validation": counts.validation,
        "first_skipped": counts.first_bad.as_ref().map(ToString::to_string),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_without_room_for_short_rows_is_refused_before_they_are_read() {
        let of_peak = |budget, peak| {
            let now = MemorySnapshot { rss: Bytes::mib(20), peak_rss: Bytes::mib(peak), ..MemorySnapshot::default() };
            check_room(Bytes::mib(budget), &now, [4 << 20, 60 << 20])
        };
        let of = |budget| of_peak(budget, 20);
        assert!(of(24).is_ok() && of(4000).is_ok());
        // Above its budget already: the plan names the least budget.
        assert!(of(1).is_ok());
        let refused = of(23).unwrap_err();
        assert_eq!(refused.exit, Exit::DoesNotFit);
        assert_eq!(refused.message, "memory budget: expected at least 24 MiB to read the rows, got 23 MiB");
        assert!(refused.hints[0].starts_with("`--memory-budget 88MiB` is enough for every row"), "{:?}", refused.hints);
        let after_a_large_tokenizer = of_peak(23, 110).unwrap_err();
        assert!(
            after_a_large_tokenizer.hints[0].starts_with("`--memory-budget 118MiB`"),
            "{after_a_large_tokenizer:?}"
        );
    }

    #[test]
    fn a_long_list_of_names_is_its_beginning_and_a_number() {
        let names = |count: usize| listed((0..count).map(|number| number.to_string()));
        assert_eq!(names(2), "0, 1");
        assert_eq!(names(1012), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 1,000 more");
    }
}
