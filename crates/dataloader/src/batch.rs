//! [`Batch`]: one optimizer batch of token ids; and [`BatchMaker`], which makes any of them from nothing but its
//! place in the stream.

use std::ops::Range;
use std::sync::Arc;

use parquet_dataset::{Dataset, Rows, Value};

use crate::error::{BadRow, BadValue};
use crate::objective::{Prepared, Refused, SampleLimits};
use crate::order::Order;
use crate::random::Key;
use crate::{Error, LoaderOptions, Tokenizer};

/// Where in the stream of samples a run stands: `sample` samples of epoch `epoch` have been consumed.
///
/// Counted in positions of the order, so that skipped rows count too and a resumed run meets every row again
/// exactly where it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Samples of that epoch that are done.
    pub sample: u64,
}

/// What happens to a row that is null, empty or not UTF-8 in a column that is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BadRows {
    /// It ends the run with [`Error::BadRow`].
    #[default]
    Error,
    /// It is left out and counted. Its batch is smaller by one; no other row moves.
    Skip,
}

/// One optimizer batch. Sample `i` has the source `sources[i]`, the target `targets[i]` and the row `rows[i]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The epoch of all its samples: a batch never spans two.
    pub epoch: u64,
    /// Rows of the dataset, in the order of the samples.
    pub rows: Vec<u64>,
    /// Source ids, ended, not padded.
    pub sources: Vec<Vec<u32>>,
    /// Target ids, ended, not padded.
    pub targets: Vec<Vec<u32>>,
    /// The texts of each sample, in the order of [`Objective::columns`](crate::Objective::columns); empty unless
    /// [`LoaderOptions::keep_texts`].
    pub texts: Vec<Vec<String>>,
    /// Rows that were left out, under [`BadRows::Skip`]. A batch in which all were is empty.
    pub bad_rows: u64,
    /// The first of them.
    pub first_bad_row: Option<BadRow>,
    /// Sources that lost tokens to `max_source_tokens`.
    pub cut_sources: u64,
    /// Targets that lost tokens to `max_target_tokens`.
    pub cut_targets: u64,
    /// Where the stream stands once this batch has been consumed.
    pub position_after: Position,
}

impl Batch {
    /// Samples in the batch.
    pub fn len(&self) -> usize {
        self.sources.len()
    }

    /// True when every row of the batch was left out.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Tokens of all sources, their ends included.
    pub fn source_tokens(&self) -> u64 {
        self.sources.iter().map(|ids| ids.len() as u64).sum()
    }

    /// Tokens of all targets, their ends included.
    pub fn target_tokens(&self) -> u64 {
        self.targets.iter().map(|ids| ids.len() as u64).sum()
    }
}

/// Makes batches: a pure function of the batch's place, used by any number of threads at once.
pub(crate) struct BatchMaker {
    dataset: Arc<Dataset>,
    tokenizer: Arc<Tokenizer>,
    order: Order,
    objective: Prepared,
    columns: Vec<usize>,
    options: LoaderOptions,
}

/// Keeps the samples' random choices apart from the order's, which come from the same seed.
const SAMPLES: u64 = 0x5a3b_1e77;

impl BatchMaker {
    pub fn new(dataset: Arc<Dataset>, tokenizer: Arc<Tokenizer>, options: LoaderOptions) -> Result<Self, Error> {
        if options.batch_size == 0 {
            return Err(Error::Options("`train.batch_size` is 0: expected at least 1".to_owned()));
        }
        if options.eos_id as usize >= tokenizer.vocab_size() {
            return Err(Error::Options(format!(
                "the end-of-sequence id is {}, but the tokenizer has {} tokens",
                options.eos_id,
                tokenizer.vocab_size()
            )));
        }
        let order = Order::new(dataset.rows(), options.order)?;
        let limits = SampleLimits {
            max_source_tokens: options.max_source_tokens,
            max_target_tokens: options.max_target_tokens,
            eos_id: options.eos_id,
        };
        let objective = Prepared::new(&options.objective, limits, &tokenizer)?;
        let columns =
            options.objective.columns().iter().map(|name| column_index(&dataset, name)).collect::<Result<_, _>>()?;
        Ok(Self { dataset, tokenizer, order, objective, columns, options })
    }

    /// The batch of the samples `samples` of `epoch`; `None` when `stop`, asked before every row, said so.
    pub fn make(&self, epoch: u64, samples: Range<u64>, stop: &dyn Fn() -> bool) -> Result<Option<Batch>, Error> {
        let mut batch = Batch { epoch, position_after: self.position(epoch, samples.end), ..Batch::default() };
        let rows = self.order.epoch(epoch).rows_at(samples);
        batch.rows.reserve_exact(rows.len());
        batch.sources.reserve_exact(rows.len());
        batch.targets.reserve_exact(rows.len());
        let values = self.dataset.read_rows(&rows)?;
        let key = Key::new(self.options.order.seed).of(SAMPLES).of(epoch);
        for (index, &row) in rows.iter().enumerate() {
            if stop() {
                return Ok(None);
            }
            if let Err(refused) = self.add(&mut batch, &values, index, row, key)? {
                self.refuse(&mut batch, row, refused)?;
            }
        }
        Ok(Some(batch))
    }

    fn position(&self, epoch: u64, samples_done: u64) -> Position {
        if samples_done == self.order.rows() {
            Position { epoch: epoch + 1, sample: 0 }
        } else {
            Position { epoch, sample: samples_done }
        }
    }

    /// Adds one row's sample to the batch, or says why it is none.
    fn add(
        &self,
        batch: &mut Batch,
        values: &Rows,
        index: usize,
        row: u64,
        key: Key,
    ) -> Result<Result<(), Refused>, Error> {
        let mut texts = Vec::with_capacity(self.columns.len());
        for (column, &column_of_dataset) in self.columns.iter().enumerate() {
            match usable(values.value(column_of_dataset, index)) {
                Ok(text) => texts.push(text),
                Err(value) => return Ok(Err(Refused { column, value })),
            }
        }
        let sample = match self.objective.sample(&texts, key.of(row), &self.tokenizer)? {
            Ok(sample) => sample,
            Err(refused) => return Ok(Err(refused)),
        };
        batch.rows.push(row);
        batch.cut_sources += u64::from(sample.source_was_cut);
        batch.cut_targets += u64::from(sample.target_was_cut);
        batch.sources.push(sample.source);
        batch.targets.push(sample.target);
        if self.options.keep_texts {
            batch.texts.push(texts.into_iter().map(str::to_owned).collect());
        }
        Ok(Ok(()))
    }

    fn refuse(&self, batch: &mut Batch, row: u64, refused: Refused) -> Result<(), Error> {
        let bad_row = self.locate(row, refused);
        match self.options.bad_rows {
            BadRows::Error => Err(Error::BadRow(bad_row)),
            BadRows::Skip => {
                batch.bad_rows += 1;
                batch.first_bad_row.get_or_insert(bad_row);
                Ok(())
            }
        }
    }

    /// Says where in the files a row of the dataset lies.
    fn locate(&self, row: u64, refused: Refused) -> BadRow {
        let mut row_in_file = row;
        let layout = self.dataset.layout();
        let file = layout.files.iter().find(|file| {
            let is_here = row_in_file < file.rows();
            row_in_file -= if is_here { 0 } else { file.rows() };
            is_here
        });
        let file = file.expect("a row that was read lies in some file");
        let mut row_in_group = row_in_file;
        let row_group = file.row_groups.iter().position(|&rows| {
            let is_here = row_in_group < rows;
            row_in_group -= if is_here { 0 } else { rows };
            is_here
        });
        BadRow {
            file: file.path.clone(),
            row_group: row_group.expect("a file's rows are those of its row groups"),
            row: row_in_file,
            column: self.options.objective.columns().swap_remove(refused.column),
            value: refused.value,
        }
    }

    pub fn options(&self) -> &LoaderOptions {
        &self.options
    }

    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

fn column_index(dataset: &Dataset, name: &str) -> Result<usize, Error> {
    let columns = dataset.columns();
    columns.iter().position(|column| column == name).ok_or_else(|| {
        Error::Options(format!(
            "the objective reads column `{name}`, but the dataset was opened with {}",
            columns.join(", ")
        ))
    })
}

/// The text of a value that can be a sample's; white space alone cannot.
fn usable(value: Value<'_>) -> Result<&str, BadValue> {
    match value {
        Value::Null => Err(BadValue::Null),
        Value::Invalid(_) => Err(BadValue::NotUtf8),
        Value::Text(text) if text.trim().is_empty() => Err(BadValue::Empty),
        Value::Text(text) => Ok(text),
    }
}
