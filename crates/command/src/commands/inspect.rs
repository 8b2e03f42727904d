//! `train_low_mem inspect`: the rows of files (columns, nulls, duplicates, lengths, samples). Of parquet files, also the shape, and the
//! cost of reading one row.

use std::fmt::Write;
use std::path::Path;

use memory_policy::{Bytes, counted, plural};
use parquet_dataset::Inspection;
use row_files::{Cell, Column, Compression, Duplicates, Form, Kind, Labels, Pairing, Row, RowError, Rows};
use run_report::visible;
use serde_json::{Map, Value, json};

use crate::cli::row_flags::InspectArgs;
use crate::commands::convert::named_by_flags;
use crate::commands::text_lengths::TextLengths;
use crate::data::unpacked::Unpacked;
use crate::data::{data_files, reading, row_budget};
use crate::failure::Outcome;
use crate::screen::report;

/// The most columns that are inspected.
const MAX_COLUMNS: usize = 256;
/// The most bytes of the table of duplicates. In a file with more rows, duplicates are not counted.
const MAX_TABLE_BYTES: u64 = 256 << 20;

/// Inspects files.
pub fn inspect(flags: &InspectArgs) -> Outcome<()> {
    let mut unpacked = Unpacked::default();
    let files = data_files::files("FILE", &flags.files)?;
    // Half of what is left is for rows, and half for the table of duplicates.
    let options = flags.text.options();
    let left = row_budget::left("inspect", flags.memory_budget.as_deref(), 2 * row_budget::LEAST)? / 2;
    let (options, table_bytes) = (options.within(left, 0, 0), left.min(MAX_TABLE_BYTES));
    for (shown, path) in files.iter().zip(unpacked.files(&files, report::note)?) {
        let kind = Kind::detect(&path, &options)?;
        let is_plain_parquet = kind.form == Form::Parquet && kind.compression == Compression::None;
        let shape = if is_plain_parquet { Some(parquet_dataset::inspect(&path)?) } else { None };
        let content = Content::read(&path, &kind, (flags, table_bytes))?;
        let text = match flags.json {
            true => format!("{}\n", as_json(shown, &kind, shape.as_ref(), &content)),
            false => as_text(shown, &kind, shape.as_ref(), &content),
        };
        report::result(&text)?;
    }
    Ok(())
}

/// The rows of a file that were read.
struct Content {
    rows: u64,
    /// The share of the file that was read.
    share: f64,
    columns: Vec<ColumnContent>,
    more_columns: usize,
    malformed: u64,
    first_malformed: Option<RowError>,
    /// Rows that repeat an earlier row in all columns; `None` if there are too many rows to count.
    duplicates: Option<u64>,
    pairing: Option<Pairing>,
    /// Why there is no pairing.
    unpaired: Option<row_files::Error>,
    /// Rows without a prompt or a response.
    unusable: u64,
    lengths: Option<TextLengths>,
    labels: Labels,
    samples: Vec<Value>,
}

/// The content of a column.
struct ColumnContent {
    name: String,
    nulls: u64,
    empty: u64,
    longest: u64,
    other: Option<&'static str>,
}

impl Content {
    fn read(path: &Path, kind: &Kind, (flags, table_bytes): (&InspectArgs, u64)) -> Outcome<Self> {
        let delimiter = kind.dialect().map(|(delimiter, _)| delimiter);
        let pairing = Pairing::choose(&kind.columns, &flags.columns.chosen());
        let (pairing, unpaired) = match pairing
            .map_err(|unpaired| row_files::Error::unpaired(path, unpaired, kind.columns.clone(), delimiter))
        {
            Ok(pairing) => (Some(pairing), None),
            // What the user named is there, or the command says that it is not.
            Err(unpaired) if flags.columns.keys().next().is_some() => return Err(named_by_flags(unpaired)),
            Err(unpaired) => (None, Some(unpaired)),
        };
        let chat = match &pairing {
            Some(Pairing::Chat { column, .. }) => Some(column.clone()),
            _ => None,
        };
        let mut wanted = pairing.as_ref().map(Pairing::columns).unwrap_or_default();
        let of_pairing = wanted.len();
        for name in kind.columns.iter().take(MAX_COLUMNS) {
            if !wanted.iter().any(|column| column.name == *name) {
                wanted.push(Column::text(name));
            }
        }
        let mut content = Self {
            rows: 0,
            share: 1.0,
            columns: wanted.iter().map(|column| ColumnContent::new(&column.name)).collect(),
            more_columns: kind.columns.len().saturating_sub(wanted.len()),
            malformed: 0,
            first_malformed: None,
            duplicates: Some(0),
            lengths: pairing.as_ref().map(|pairing| TextLengths::new(&flags.lengths, pairing.is_text())).transpose()?,
            pairing,
            unpaired,
            unusable: 0,
            labels: Labels::default(),
            samples: Vec::new(),
        };
        let mut rows = Rows::open(path, kind, &wanted, false)?;
        let (mut row, mut table) = (Row::default(), Duplicates::exact(table_bytes));
        loop {
            if content.rows == flags.rows && flags.rows > 0 {
                content.share = rows.share_read();
                break;
            }
            let Some(read) = rows.next(&mut row)? else { break };
            content.rows += 1;
            match read {
                Err(error) => {
                    content.malformed += 1;
                    content.first_malformed.get_or_insert(error);
                }
                Ok(()) => content.add(&row, &mut table, of_pairing, flags.show)?,
            }
        }
        // The column of a chat is a list, as expected.
        for column in content.columns.iter_mut().filter(|column| Some(&column.name) == chat.as_ref()) {
            column.other = Some("messages");
        }
        Ok(content)
    }

    fn add(&mut self, row: &Row, table: &mut Duplicates, of_pairing: usize, show: usize) -> Outcome<()> {
        for (column, cell) in self.columns.iter_mut().zip(&row.cells) {
            column.add(cell);
        }
        // The debug form tells texts from numbers. It is compared, and never shown.
        let whole = format!("{:?}", row.cells);
        self.duplicates = match (self.duplicates, table.is_duplicate("", &whole)) {
            (Some(found), Ok(is_duplicate)) => Some(found + u64::from(is_duplicate)),
            _ => None,
        };
        let texts = self.pairing.as_ref().map(|pairing| pairing.texts(row));
        match (texts, &mut self.lengths) {
            (Some(Ok([prompt, response])), Some(lengths)) => {
                let is_text = self.pairing.as_ref().is_some_and(Pairing::is_text);
                let shown: Vec<&str> = if is_text { vec![&response] } else { vec![&prompt, &response] };
                lengths.add(&shown)?;
                if !is_text {
                    self.labels.add(&response);
                }
                if self.samples.len() < show {
                    self.samples.push(match is_text {
                        true => json!({"text": response}),
                        false => json!({"prompt": prompt, "response": response}),
                    });
                }
            }
            (Some(_), _) => self.unusable += 1,
            (None, _) if self.samples.len() < show => {
                let of_columns = self.columns.iter().zip(&row.cells).skip(of_pairing);
                let sample: Map<String, Value> = of_columns
                    .map(|(column, cell)| (column.name.clone(), cell.text().map_or(Value::Null, |text| json!(text))))
                    .collect();
                self.samples.push(Value::Object(sample));
            }
            (None, _) => {}
        }
        Ok(())
    }

    /// Rows of the whole file: counted, or estimated from the share that was read.
    #[expect(clippy::cast_precision_loss, clippy::cast_sign_loss, reason = "an estimate of rows")]
    fn rows_in_words(&self, known: Option<u64>) -> String {
        match (known, self.share < 1.0) {
            (Some(rows), _) => plural(rows, "row"),
            (None, false) => plural(self.rows, "row"),
            (None, true) => format!("about {} rows", counted((self.rows as f64 / self.share.max(1e-9)) as u64)),
        }
    }
}

impl ColumnContent {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), nulls: 0, empty: 0, longest: 0, other: None }
    }

    fn add(&mut self, cell: &Cell) {
        match cell {
            Cell::Null => self.nulls += 1,
            Cell::Text(text) => {
                self.empty += u64::from(text.trim().is_empty());
                self.longest = self.longest.max(text.chars().count() as u64);
            }
            Cell::Turns(_) => self.other = Some("messages"),
            Cell::Other(kind) => self.other = Some(kind),
        }
    }
}

fn compression(kind: &Kind) -> &'static str {
    match kind.compression {
        Compression::None => "",
        Compression::Gzip => ", gzip",
        Compression::Zstd => ", zstd",
    }
}

fn as_json(path: &Path, kind: &Kind, shape: Option<&Inspection>, content: &Content) -> Value {
    let of_column = |name: &str| content.columns.iter().find(|column| column.name == name);
    let add = |json: &mut Value, column: &ColumnContent| {
        json["nulls"] = json!(column.nulls);
        json["empty"] = json!(column.empty);
        json["longest_characters"] = json!(column.longest);
    };
    let columns: Vec<Value> = match shape {
        Some(file) => {
            let columns = file.columns.iter().map(|column| {
                let mut json = json!({
                    "name": column.name, "type": column.type_name, "is_string": column.is_string,
                    "is_nullable": column.is_nullable, "encodings": column.encodings,
                    "compressions": column.compressions, "compressed_bytes": column.compressed_bytes,
                    "uncompressed_bytes": column.uncompressed_bytes, "pages": column.pages,
                    "largest_page_bytes": column.largest_page_bytes,
                });
                of_column(&column.name).inspect(|content| add(&mut json, content));
                json
            });
            columns.collect()
        }
        None => {
            let columns = content.columns.iter().map(|column| {
                let mut json = json!({"name": column.name, "type": column.other.unwrap_or("text"), "is_string": column.other.is_none()});
                add(&mut json, column);
                json
            });
            columns.collect()
        }
    };
    let mut json = json!({
        "file": path.display().to_string(), "form": kind.form.name(), "columns": columns,
        "bytes": regular_file::metadata(path).map_or(0, |file| file.len()),
        "rows": shape.map_or(content.rows, Inspection::rows),
        "rows_read": content.rows, "share_read": content.share, "malformed_rows": content.malformed,
        "first_malformed": content.first_malformed.as_ref().map(ToString::to_string),
        "duplicate_rows": content.duplicates, "texts": content.pairing.as_ref().map(Pairing::in_words),
        "not_used": content.pairing.as_ref().map(|pairing| pairing.unused(&kind.columns)),
        "labels": content.labels.counts().into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "rows_without_texts": content.unusable, "lengths": content.lengths.as_ref().map(TextLengths::to_json),
        "samples": content.samples,
    });
    if let Some(file) = shape {
        json["row_groups"] = json!(file.row_groups);
        json["page_index"] = json!(file.has_page_index);
        json["checksums"] = json!(file.has_checksums);
        json["created_by"] = json!(file.created_by);
        json["bytes_to_read_one_row"] = json!(file.bytes_to_read_one_row);
    }
    json
}

fn as_text(path: &Path, kind: &Kind, shape: Option<&Inspection>, content: &Content) -> String {
    let mut text = String::new();
    let bytes = Bytes(regular_file::metadata(path).map_or(0, |file| file.len()));
    let rows = content.rows_in_words(shape.map(Inspection::rows));
    let _ = writeln!(text, "{}: {}{}, {rows}, {bytes}", path.display(), kind.in_words(), compression(kind));
    if let Some(file) = shape {
        storage(&mut text, file);
    }
    if content.rows == 0 {
        return text;
    }
    let _ = writeln!(
        text,
        "  {:<30}{:>9}{:>9}{:>14}",
        format!("of {}", plural(content.rows, "row")),
        "null",
        "empty",
        "longest"
    );
    for column in &content.columns {
        let longest = column.other.map_or_else(|| format!("{} chars", counted(column.longest)), str::to_owned);
        let _ = writeln!(
            text,
            "  {:<30}{:>9}{:>9}{longest:>14}",
            visible::line(&column.name),
            counted(column.nulls),
            counted(column.empty)
        );
    }
    if content.more_columns > 0 {
        let _ = writeln!(text, "  and {} more columns", content.more_columns);
    }
    if let Some(first) = &content.first_malformed {
        let _ = writeln!(text, "  malformed rows    {}; the first: {first}", counted(content.malformed));
        if let Some(hint) = first.fault.hint() {
            let _ = writeln!(text, "  hint              {hint}");
        }
    }
    let duplicates = content.duplicates.map_or("not counted: too many rows".to_string(), counted);
    let _ = writeln!(text, "  duplicate rows    {duplicates}");
    match &content.pairing {
        Some(pairing) => {
            let _ = writeln!(text, "  texts             {}", pairing.of_classes(&kind.classes));
            for names in pairing.unused(&kind.columns).chunks(8) {
                let names: Vec<&str> = names.iter().map(|name| reading::shown_column(name)).collect();
                let _ = writeln!(text, "  not used          {}", names.join(", "));
            }
            if content.unusable > 0 {
                let (rows, lack) =
                    (plural(content.unusable, "row"), if content.unusable == 1 { "lacks" } else { "lack" });
                let _ = writeln!(text, "  skipped           {rows} {lack} a text");
            }
            if let Some(words) = content.labels.in_words() {
                let _ = writeln!(text, "  labels            {words}");
            }
            if let Some(words) = content.labels.alike_in_words() {
                let _ = writeln!(text, "  warning           {words}");
            }
        }
        None => {
            let meanings = content.unpaired.as_ref().map(row_files::Error::meanings).unwrap_or_default();
            for (number, meaning) in meanings.iter().enumerate() {
                let label = if number == 0 { "texts" } else { "or" };
                let _ = writeln!(text, "  {label:<18}{}: `{}`", meaning.words, meaning.flags());
            }
            if meanings.is_empty() {
                let _ = writeln!(text, "  texts             unknown: name `--prompt-column` and `--response-column`");
            }
            if let Some(command) = content.unpaired.as_ref().and_then(row_files::Error::header_command) {
                let _ = writeln!(
                    text,
                    "  header            the first line looks like a row; name the columns: `{command}`"
                );
            }
        }
    }
    text += &content.lengths.as_ref().map(TextLengths::in_words).unwrap_or_default();
    if !content.samples.is_empty() {
        let _ = writeln!(text, "\n  first rows");
    }
    for sample in &content.samples {
        for (number, (name, value)) in sample.as_object().into_iter().flatten().enumerate() {
            let mark = if number == 0 { "-" } else { " " };
            let _ = writeln!(text, "  {mark} {}: {}", visible::line(name), shown(value));
        }
    }
    text
}

/// A value on one line.
fn shown(value: &Value) -> String {
    const MAX_CHARS: usize = 120;
    visible::line(&run_report::figures::clipped(value.as_str().unwrap_or("null"), MAX_CHARS)).into_owned()
}

/// The shape of a parquet file.
fn storage(text: &mut String, file: &Inspection) {
    let largest = file.row_groups.iter().max().copied().unwrap_or(0);
    let yes_no = |yes: bool| if yes { "yes" } else { "no" };
    let _ = writeln!(
        text,
        "  row groups        {}, the largest of {}",
        counted(file.row_groups.len() as u64),
        plural(largest, "row")
    );
    let _ = writeln!(text, "  page index        {}", yes_no(file.has_page_index));
    let _ = writeln!(text, "  checksums         {}", yes_no(file.has_checksums));
    let _ = writeln!(text, "  written by        {}", visible::line(file.created_by.as_deref().unwrap_or("not said")));
    if let Some(bytes) = file.bytes_to_read_one_row {
        let _ = writeln!(text, "  to read one row   {} of all string columns", Bytes(bytes));
    }
    for column in &file.columns {
        let pages = match (column.pages, column.largest_page_bytes) {
            (Some(pages), Some(largest)) => format!(", {} of at most {}", plural(pages, "page"), Bytes(largest)),
            _ => String::new(),
        };
        let nullable = if column.is_nullable { ", may be null" } else { "" };
        let _ = writeln!(
            text,
            "  column {:<20} {}{nullable}, {}, {} in the file, {} decompressed{pages}",
            visible::line(&column.name),
            column.type_name,
            column.compressions.join("+"),
            Bytes(column.compressed_bytes),
            Bytes(column.uncompressed_bytes),
        );
    }
}
