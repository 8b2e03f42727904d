//! The sources of prompts: the command line, a text file, standard input, or a column of a data file.

use std::io::{BufReader, Read};
use std::path::Path;

use memory_policy::{Bytes, MemorySnapshot};
use row_files::{Column, Encoding, Form, Kind, ReadOptions, Row, RowFault, Rows, Template};

use crate::answers::fasta;
use crate::cli::row_flags::TextFlags;
use crate::data::row_data;
use crate::failure::{Failure, Outcome};
use crate::screen::lines::Lines;
use crate::screen::report;

/// The most bytes of a prompt in a file. A model reads some thousand tokens of it.
pub const MAX_PROMPT_BYTES: usize = 1 << 20;

const MOST: Bytes = Bytes(MAX_PROMPT_BYTES as u64);

/// Where prompts come from.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Prompts of the command line, which come first.
    pub typed: &'a [String],
    /// A file of lines or rows.
    pub file: Option<&'a Path>,
    /// How rows become prompts.
    pub source: Source<'a>,
    /// How text files are read.
    pub text: &'a TextFlags,
}

/// How a row becomes a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The flags that name the columns, for hints.
    pub flags: &'static str,
    /// The template that a flag gives: a column, or a text from several.
    pub given: Option<&'a Template>,
    /// The template of the run that made the model.
    pub of_run: Option<&'a Template>,
    /// The column in files for which neither is there.
    pub usual: &'static str,
}

impl Source<'_> {
    /// The template for a file with these columns.
    fn template(&self, columns: &[String]) -> Template {
        let usual = Template::of_column(self.usual);
        let of_run = self.of_run.filter(|template| missing(template, columns).is_none());
        match (self.given, of_run) {
            (Some(given), _) => given.clone(),
            (None, Some(of_run)) => {
                report::note(&format!("prompts are `{of_run}`, as the run read them; `{}` names others", self.flags));
                of_run.clone()
            }
            (None, None) if missing(&usual, columns).is_some() => self.of_run.unwrap_or(&usual).clone(),
            (None, None) => usual,
        }
    }

    /// Refuses a template of columns that the file lacks.
    fn check(&self, template: &Template, input: &Path, columns: &[String]) -> Outcome<()> {
        let Some(missing) = missing(template, columns) else { return Ok(()) };
        let of_template = match template.column() {
            Some(_) => String::new(),
            None => format!(", which `{template}` names"),
        };
        Err(Failure::unusable(format!("{}: no column `{missing}`{of_template}", input.display())).hint(format!(
            "use `{}` with one of: {}",
            self.flags,
            columns.join(", ")
        )))
    }
}

/// A column of a template that is none of these.
fn missing<'a>(template: &'a Template, columns: &[String]) -> Option<&'a str> {
    template.columns().find(|name| !columns.iter().any(|column| column == name))
}

/// How much of a file is in memory while prompts are read from it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// The bytes beside a prompt.
    pub bytes: u64,
    /// A budget with which every row can be read; none where these limits are wide enough.
    enough: Option<Bytes>,
}

impl Limits {
    /// The limits of an input within this budget, the widest first. The last are for a plan that has no room for the others.
    ///
    /// # Errors
    /// The input has rows, and cannot be read.
    pub fn within(inputs: Inputs<'_>, budget: Bytes, now: &MemorySnapshot) -> Outcome<Vec<Self>> {
        let Some(input) = inputs.file.filter(|input| is_data(input)) else {
            return Ok(vec![Self::default()]);
        };
        let share = budget.0.saturating_sub(now.rss.0) / SHARE_OF_ROWS;
        let enough_for = |most: u64| Bytes(budget.0.max(now.rss.0) + SHARE_OF_ROWS * most);
        let [_, of_any_row] = ReadOptions::bytes_to_read(false, ReadOptions::default().max_row_bytes as u64);
        let any = Self { bytes: share, enough: Some(enough_for(of_any_row)) };
        let kind = kind_of(input, inputs, any)?;
        // Of parquet, only the prompts are read.
        let is_parquet = kind.form == Form::Parquet;
        let longest = kind.longest_possible_row(input).min(if is_parquet { MAX_PROMPT_BYTES as u64 } else { u64::MAX });
        let [least, most] = ReadOptions::bytes_to_read(is_parquet, longest);
        let limits = |bytes| Self { bytes, enough: (bytes < most).then_some(enough_for(most)) };
        Ok(vec![limits(share.clamp(least, most)), limits(least)])
    }
}

/// The kind of a file of rows. Its first rows say which columns it has, so they are read within the limits, too.
fn kind_of(input: &Path, inputs: Inputs<'_>, limits: Limits) -> Outcome<Kind> {
    let options = inputs.text.options().within(limits.bytes, 0, 0);
    Kind::detect(input, &options).map_err(|error| match (error, limits.enough) {
        (row_files::Error::Row(row), Some(enough)) if row.fault.is_over_budget() => row_data::over_budget(&row, enough),
        (error, _) => error.into(),
    })
}

/// Reading rows takes at most this fraction of a budget.
const SHARE_OF_ROWS: u64 = 4;

/// The prompts, read within these limits. Those on the command line come first.
pub fn prompts(inputs: Inputs<'_>, limits: Limits) -> Outcome<Box<dyn Iterator<Item = Outcome<String>> + '_>> {
    let typed = inputs.typed.iter().cloned().map(Ok);
    Ok(match inputs.file {
        None => Box::new(typed),
        Some(input) if fasta::is_fasta(input) => {
            let lines = lines(input, inputs.text.encoding)?;
            Box::new(typed.chain(fasta::texts(lines, input.display().to_string())))
        }
        Some(input) if is_data(input) => Box::new(typed.chain(rows(input, inputs, limits)?)),
        Some(input) => Box::new(typed.chain(lines(input, inputs.text.encoding)?)),
    })
}

/// Prompts, and the text of a column beside each.
pub type WithReferences<'a> = Box<dyn Iterator<Item = Outcome<(String, Option<String>)>> + 'a>;

/// The prompts with the texts of a column beside each, where a row has one. A file without the column, and prompts of the command line, have
/// none.
pub fn with_references<'a>(inputs: Inputs<'a>, column: &str, limits: Limits) -> Outcome<WithReferences<'a>> {
    let columns = match inputs.file.filter(|input| is_data(input)) {
        Some(input) => Kind::detect(input, &inputs.text.options().within(limits.bytes, 0, 0))?.columns,
        None => Vec::new(),
    };
    let (Some(input), true) = (inputs.file, columns.iter().any(|known| known == column)) else {
        return Ok(Box::new(prompts(inputs, limits)?.map(|prompt| Ok((prompt?, None)))));
    };
    let templates = vec![inputs.source.template(&columns), Template::of_column(column)];
    let rows = cells_of(input, inputs, Some(templates), limits, 1)?;
    let rows = rows.map(|row| {
        let mut texts = row?;
        let reference = texts.pop().filter(|text| !text.trim().is_empty());
        Ok((texts.swap_remove(0), reference))
    });
    Ok(Box::new(inputs.typed.iter().map(|prompt| Ok((prompt.clone(), None))).chain(rows)))
}

/// Whether a file has rows, by its name. Other files are text.
fn is_data(input: &Path) -> bool {
    row_files::extension(input).is_some_and(|extension| row_files::FILE_EXTENSIONS.contains(&extension.as_str()))
}

fn lines(input: &Path, encoding: Option<Encoding>) -> Outcome<impl Iterator<Item = Outcome<String>>> {
    let (name, bytes): (String, Box<dyn Read>) = if input == Path::new("-") {
        ("standard input".to_owned(), Box::new(std::io::stdin()))
    } else {
        let file = regular_file::open(input).map_err(|error| {
            Failure::unusable(format!("{}: {error}", input.display()))
                .hint("expected a text file with one prompt per line, or rows; `-` reads standard input")
        })?;
        (input.display().to_string(), Box::new(file))
    };
    let text = match encoding {
        Some(encoding) => encoding.decode(bytes),
        None => bytes,
    };
    Ok(Lines::new(BufReader::new(text), name, MAX_PROMPT_BYTES))
}

/// The texts of a column.
fn rows<'a>(
    input: &'a Path,
    inputs: Inputs<'a>,
    limits: Limits,
) -> Outcome<impl Iterator<Item = Outcome<String>> + 'a> {
    let rows = cells_of(input, inputs, None, limits, 1)?;
    Ok(rows.map(|row| Ok(row?.swap_remove(0))))
}

/// The texts of some columns of each row of a file.
pub fn cells<'a>(
    inputs: Inputs<'a>,
    columns: &[&str],
    limits: Limits,
) -> Outcome<impl Iterator<Item = Outcome<Vec<String>>> + use<'a>> {
    match inputs.file {
        Some(input) if is_data(input) => {
            let templates: Vec<Template> = columns.iter().map(|column| Template::of_column(column)).collect();
            let needed = templates.len();
            cells_of(input, inputs, Some(templates), limits, needed)
        }
        input => {
            let shown = input.map(|input| input.display().to_string()).unwrap_or_default();
            Err(Failure::usage(format!("{shown}: expected rows with columns"))
                .hint("name a .jsonl, .csv or .parquet file"))
        }
    }
}

/// The texts of these templates, or of the one of the prompts. A row without a text of the first `needed` ends the answers, because each
/// answer belongs to a row.
fn cells_of<'a>(
    input: &'a Path,
    inputs: Inputs<'a>,
    templates: Option<Vec<Template>>,
    limits: Limits,
    needed: usize,
) -> Outcome<impl Iterator<Item = Outcome<Vec<String>>> + use<'a>> {
    let kind = kind_of(input, inputs, limits)?;
    let templates = match templates {
        Some(templates) => templates,
        None => vec![inputs.source.template(&kind.columns)],
    };
    templates.iter().try_for_each(|template| inputs.source.check(template, input, &kind.columns))?;
    let mut names: Vec<String> = Vec::new();
    for name in templates.iter().flat_map(Template::columns) {
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    let texts: Vec<Column> = names.iter().map(Column::text).collect();
    let mut rows = Rows::open(input, &kind, &texts, false)?;
    let mut row = Row::default();
    Ok(std::iter::from_fn(move || match rows.next(&mut row) {
        Err(error) => Some(Err(error.into())),
        Ok(None) => None,
        Ok(Some(Err(error))) if error.fault.is_over_budget() => Some(Err(match limits.enough {
            Some(enough) => row_data::over_budget(&error, enough),
            None => {
                let (path, row) = (error.path.display(), error.line);
                too_long(format!("{path}: row {row}: the prompt is too long, expected at most {MOST}"))
            }
        })),
        Ok(Some(Err(error))) => Some(Err(of_row(&error))),
        Ok(Some(Ok(()))) => {
            let text = |(number, template): (usize, &Template)| {
                let cell = |name: &str| {
                    let at = names.iter().position(|known| known == name)?;
                    row.cells.get(at).and_then(row_files::Cell::text)
                };
                // One column of a template is enough, as in training; the others leave their place empty.
                let is_one = template.column().is_some();
                let has_text = template.columns().filter_map(cell).any(|text| is_one || !text.trim().is_empty());
                let text = has_text.then(|| template.fill(|name| cell(name).unwrap_or_default()));
                match text {
                    Some(text) if text.len() > MAX_PROMPT_BYTES => {
                        let got = Bytes(text.len() as u64);
                        Err(too_long(format!("{}: a prompt has {got}, expected at most {MOST}", input.display())))
                    }
                    Some(text) => Ok(text),
                    None if number >= needed => Ok(String::new()),
                    None => {
                        let column = template.columns().next().unwrap_or_default().to_owned();
                        Err(of_row(&rows.error(&row, RowFault::Null(column))))
                    }
                }
            };
            Some(templates.iter().enumerate().map(text).collect())
        }
    }))
}

fn too_long(what: String) -> Failure {
    Failure::unusable(what).hint("a model reads some thousand tokens of a prompt; cut it, or name another column")
}

fn of_row(error: &row_files::RowError) -> Failure {
    Failure::unusable(error.to_string()).with_hint(error.fault.hint())
}
