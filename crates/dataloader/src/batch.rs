//! [`Batch`]: one optimizer batch of token ids; and [`BatchMaker`], which makes any batch from its position in the
//! stream alone.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use parquet_dataset::{Dataset, Rows};

use crate::error::{BadRow, BadValue};
use crate::mixture::Sequence;
use crate::objective::{Judged, Prepared, Refused, Sample, SampleLimits};
use crate::random::Key;
use crate::row_text::{RowText, TextLocation};
use crate::side::Side;
use crate::tokenizer::{Lossy, LossyTexts, Prefixed, TextFault};
use crate::{Error, LoaderOptions, Tokenizer};

/// A run's position in the stream of samples: `sample` samples of epoch `epoch` have been consumed.
///
/// The count is of positions in the order, so skipped rows count too. A resumed run therefore meets every row exactly
/// where an uninterrupted run would.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Samples of that epoch that are done.
    pub sample: u64,
}

/// Treatment of a row with a null, empty or non-UTF-8 value in a column that is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BadRows {
    /// The row ends the run with [`Error::BadRow`].
    #[default]
    Error,
    /// The row is left out and counted. Its batch is smaller by one; no other row moves.
    Skip,
    /// As [`BadRows::Skip`], but a row with an image ends the run.
    Usual,
}

/// A list of token ids for each sample.
pub type TokenLists<'a> = Cow<'a, [Vec<u32>]>;

/// One optimizer batch. Sample `i` has the source `sources[i]`, the target `targets[i]` and the row `rows[i]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The epoch of all samples: a batch never spans two epochs.
    pub epoch: u64,
    /// Rows of the dataset, in the order of the samples.
    pub rows: Vec<u64>,
    /// Number of samples in each shard; see [`LoaderOptions::share`].
    pub shard_samples: Vec<usize>,
    /// Source ids, with the end-of-sequence id, without padding.
    pub sources: Vec<Vec<u32>>,
    /// Target ids, with the end-of-sequence id, without padding.
    pub targets: Vec<Vec<u32>>,
    /// The targets that were not chosen, as `targets`. Empty unless the objective is [`crate::Objective::Preference`].
    pub rejected: Vec<Vec<u32>>,
    /// Whether each target is desirable. Empty unless the objective is [`crate::Objective::Labelled`] without scores.
    pub labels: Vec<bool>,
    /// The numbers of samples of the lists that they are of, in order. Empty unless the objective is [`crate::Objective::Lists`].
    pub lists: Vec<usize>,
    /// The label of each sample of these lists, or the score of each row of two texts.
    pub gains: Vec<f64>,
    /// The text of each sample's target column, cut to [`KEPT_TEXT_BYTES`]. Empty unless [`LoaderOptions::keep_texts`] is
    /// set.
    pub texts: Vec<String>,
    /// The text of each sample's first column, if there are several; cut in the same way. Empty unless
    /// [`LoaderOptions::keep_prompts`] is set.
    pub prompts: Vec<String>,
    /// Rows that were left out, under [`BadRows::Skip`]. If all rows were left out, the batch is empty.
    pub bad_rows: u64,
    /// The first row that was left out.
    pub first_bad_row: Option<BadRow>,
    /// Sources that lost tokens to `max_source_tokens`.
    pub cut_sources: u64,
    /// Targets that lost tokens to `max_target_tokens`.
    pub cut_targets: u64,
    /// Texts with characters that the tokenizer does not give back; none for tasks that are not of texts.
    pub lossy: LossyTexts,
    /// The stream's position once this batch has been consumed.
    pub position_after: Position,
}

impl Batch {
    /// Rows in the batch: lists, or samples.
    pub fn row_count(&self) -> usize {
        if self.lists.is_empty() { self.len() } else { self.lists.len() }
    }

    /// Samples in the batch.
    pub fn len(&self) -> usize {
        self.sources.len()
    }

    /// True when every row of the batch was left out.
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// The sources, the targets and the shards' numbers of samples of a step. Where rows have rejected targets, sample `2 i` is the chosen
    /// target of row `i` and sample `2 i + 1` its rejected one.
    pub fn samples(&self) -> (TokenLists<'_>, TokenLists<'_>, Vec<usize>) {
        if self.rejected.is_empty() {
            let (sources, targets) = (Cow::from(&self.sources), Cow::from(&self.targets));
            return (sources, targets, self.shard_samples.clone());
        }
        let sources: Vec<Vec<u32>> = self.sources.iter().flat_map(|source| [source.clone(), source.clone()]).collect();
        let pairs = self.targets.iter().zip(&self.rejected);
        let targets: Vec<Vec<u32>> = pairs.flat_map(|(chosen, rejected)| [chosen.clone(), rejected.clone()]).collect();
        (sources.into(), targets.into(), self.shard_samples.iter().map(|rows| 2 * rows).collect())
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

/// The most bytes of a text that are kept beside its tokens: far more than an answer has.
pub const KEPT_TEXT_BYTES: usize = 16 << 10;

/// Bytes of values that are read at a time, however many rows a batch has. Batches that exceed it are read in parts.
pub(crate) const MAX_READ_BYTES: u64 = 2 << 20;

/// Makes batches. A batch is a pure function of its position, so any number of threads can make batches at once.
pub(crate) struct BatchMaker {
    dataset: Arc<Dataset>,
    tokenizer: Arc<Tokenizer>,
    sequence: Sequence,
    objective: Prepared,
    columns: Vec<usize>,
    /// Bytes of each value that are read with its batch, one entry for each column of the dataset.
    read_bytes: Vec<u64>,
    options: LoaderOptions,
    lossy: Lossy,
}

/// Keeps the samples' random choices apart from those of the order, which uses the same seed.
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
        let sequence = Sequence::new(dataset.rows(), options.order, options.mixture.as_ref())?;
        let limits = SampleLimits {
            max_source_tokens: options.max_source_tokens,
            max_target_tokens: options.max_target_tokens,
            eos_id: options.eos_id,
            decoder_start_id: options.decoder_start_id,
        };
        let objective = Prepared::new(&options.objective, limits, &tokenizer)?;
        let columns: Vec<usize> =
            options.objective.columns().iter().map(|name| column_index(&dataset, name)).collect::<Result<_, _>>()?;
        let mut read_bytes = vec![0; dataset.columns().len()];
        for (&column, bytes) in columns.iter().zip(read_bytes_of(&options, &tokenizer)) {
            read_bytes[column] = bytes;
        }
        Ok(Self { dataset, tokenizer, sequence, objective, columns, read_bytes, options, lossy: Lossy::new() })
    }

    /// Makes the batch of the samples `samples` of `epoch`. `stop` is asked before every row; `None` if it returned
    /// true.
    pub fn make(&self, epoch: u64, samples: Range<u64>, stop: &dyn Fn() -> bool) -> Result<Option<Batch>, Error> {
        let mut batch = Batch { epoch, position_after: self.position(epoch, samples.end), ..Batch::default() };
        let shards = self.options.share.positions(&samples);
        let length = shards.iter().map(|shard| (shard.end - shard.start) as usize).sum();
        batch.rows.reserve_exact(length);
        batch.sources.reserve_exact(length);
        batch.targets.reserve_exact(length);
        let key = Key::new(self.options.order.seed).derive(SAMPLES).derive(epoch);
        for positions in shards {
            let (rows, before) = (self.sequence.rows_at(epoch, positions), batch.len());
            if !rows.is_empty() && !self.add_rows(&mut batch, &rows, key, stop)? {
                return Ok(None);
            }
            batch.shard_samples.push(batch.len() - before);
        }
        Ok(Some(batch))
    }

    /// Adds rows to a batch, reading at most [`MAX_READ_BYTES`] at a time; false if `stop` returned true.
    fn add_rows(&self, batch: &mut Batch, rows: &[u64], key: Key, stop: &dyn Fn() -> bool) -> Result<bool, Error> {
        let whole = self.columns.iter().map(|&column| self.read_bytes[column]).min().unwrap_or(0);
        let part =
            |row, column: usize, bytes| self.objective.read_part(bytes, self.read_bytes[column], key.derive(row));
        let most = if rows.len() == 1 { u64::MAX } else { MAX_READ_BYTES };
        let values = match self.dataset.read_parts_within(rows, most, whole, &part) {
            Err(error) if error.is_read_too_large() && rows.len() > 1 => {
                let (first, second) = rows.split_at(rows.len() / 2);
                return Ok(self.add_rows(batch, first, key, stop)? && self.add_rows(batch, second, key, stop)?);
            }
            values => values?,
        };
        for (index, &row) in rows.iter().enumerate() {
            if stop() {
                return Ok(false);
            }
            match self.add(batch, &values, index, row, key, stop) {
                Ok(()) => {}
                Err(NoSample::Refused(refused)) => self.refuse(batch, row, refused)?,
                Err(NoSample::Stopped) => return Ok(false),
                Err(NoSample::Error(error)) => return Err(error),
            }
        }
        Ok(true)
    }

    fn position(&self, epoch: u64, samples_done: u64) -> Position {
        if samples_done == self.sequence.samples() {
            Position { epoch: epoch + 1, sample: 0 }
        } else {
            Position { epoch, sample: samples_done }
        }
    }

    /// Adds one row's sample to the batch, or returns why the row gives no sample.
    fn add(
        &self,
        batch: &mut Batch,
        values: &Rows,
        index: usize,
        row: u64,
        key: Key,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), NoSample> {
        let mut texts = Vec::with_capacity(self.columns.len());
        for (number, &column) in self.columns.iter().enumerate() {
            let refused = |value| NoSample::Refused(Refused { column: number, value });
            let (Some(held), Some(bytes)) = (values.bytes(column, index), values.value_bytes(column, index)) else {
                return Err(refused(BadValue::Null));
            };
            let place = TextLocation { dataset: &self.dataset, row, column };
            let mut text = self.objective.text(place, bytes, held, key.derive(row), stop);
            if text.is_blank().map_err(|fault| NoSample::new(fault, number))? && !self.objective.may_be_empty(number) {
                return Err(refused(BadValue::Empty));
            }
            if self.objective.is_of_labels(number) && (held.len() as u64) < bytes {
                return Err(refused(BadValue::TooLong));
            }
            texts.push(text);
        }
        if self.add_list(batch, row, &texts)? {
            return Ok(());
        }
        let sample = match self.sample_of_words(&texts)? {
            Some(sample) => (sample, false, None),
            None => self.sample_of_texts(&mut texts, row, key.derive(row))?,
        };
        self.check_images(&sample.0)?;
        self.push(batch, (row, &texts), sample)
    }

    /// Refuses a sample with a token that stands for an image.
    fn check_images(&self, sample: &Sample) -> Result<(), NoSample> {
        let target = target_column(self.columns.len());
        // Numbers of labels are no tokens.
        let of_target = (!self.objective.is_of_labels(target)).then_some(&sample.target);
        let lists = [(0, Some(&sample.source)), (target, of_target), (2, sample.rejected.as_ref())];
        let is_of_image = |id: &u32| self.options.image_ids.contains(id);
        let mut lists = lists.into_iter().filter_map(|(column, ids)| Some((column, ids?)));
        match lists.find(|(_, ids)| ids.iter().any(is_of_image)) {
            Some((column, _)) => Err(NoSample::Refused(Refused { column, value: BadValue::Image })),
            None => Ok(()),
        }
    }

    /// Adds the samples of a row that is a list; false for a row of another task.
    fn add_list(&self, batch: &mut Batch, row: u64, texts: &[RowText]) -> Result<bool, NoSample> {
        let [sources, labels] = texts else { return Ok(false) };
        let prefix = &self.options.source_prefix;
        let encode = |text: &str, room: usize| -> Result<_, NoSample> {
            Ok(self.tokenizer.encode_prompt(prefix, text, room, self.options.truncation_side)?)
        };
        if !self.objective.is_of_labels(0) {
            return Ok(false);
        }
        let texts = [sources.beginning(), labels.beginning()];
        let [sources, labels] = texts.map(|text| text.map_err(|fault| NoSample::new(fault, 0)));
        let Some(samples) = self.objective.samples_of_list([sources?, labels?], &encode)? else { return Ok(false) };
        samples.iter().try_for_each(|(sample, _)| self.check_images(sample))?;
        batch.lists.push(samples.len());
        for (sample, gain) in samples {
            batch.rows.push(row);
            batch.cut_sources += u64::from(sample.source_was_cut);
            batch.sources.push(sample.source);
            batch.targets.push(sample.target);
            batch.gains.push(gain);
        }
        Ok(true)
    }

    /// The sample of a row of words and labels. `None`: the row is of another task.
    fn sample_of_words(&self, texts: &[RowText]) -> Result<Option<Sample>, NoSample> {
        let [words, labels] = texts else { return Ok(None) };
        let (refused, encode) = (|fault| NoSample::new(fault, 1), |word: &str| Ok(self.tokenizer.encode(word)?));
        if !self.objective.is_of_labels(0) {
            return Ok(None);
        }
        let prefix = self.tokenizer.encode(&self.options.source_prefix)?;
        let texts = [words.beginning().map_err(refused)?, labels.beginning().map_err(refused)?];
        self.objective.sample_of_words(texts, &prefix, &encode)
    }

    /// The sample of a row of texts, whether its source lost its beginning, and its label, if answers have one.
    fn sample_of_texts(
        &self,
        texts: &mut [RowText],
        row: u64,
        key: Key,
    ) -> Result<(Sample, bool, Option<Judged>), NoSample> {
        let mut ids = Vec::with_capacity(texts.len());
        let (mut is_cut_left, mut label) = (false, None);
        for (number, text) in texts.iter_mut().enumerate() {
            if self.options.objective.is_label(number) {
                let said = text.beginning().map_err(|fault| NoSample::new(fault, number))?;
                let refused = |value| NoSample::Refused(Refused { column: number, value });
                label = Some(self.options.objective.judged(said).map_err(refused)?);
                continue;
            }
            if self.objective.is_of_labels(number) {
                let text = text.beginning().map_err(|fault| NoSample::new(fault, number))?;
                ids.push(self.objective.labels(text)?);
                continue;
            }
            let (prefix, most) = (self.prefix(number, row), self.objective.most_tokens(number));
            let of_text = match (self.is_cut_left(number), prefix.is_empty()) {
                (true, _) => self.tokenizer.encode_end(prefix, text, most - 1).map(|(ids, is_cut)| {
                    is_cut_left = is_cut;
                    ids
                }),
                (false, true) => self.tokenizer.encode_source(text, most),
                (false, false) => self.tokenizer.encode_source(&mut Prefixed::new(prefix, text), most),
            };
            let of_text = of_text.map_err(|fault| NoSample::new(fault, number))?;
            if of_text.is_empty() {
                // For example, white space that the tokenizer strips.
                return Err(NoSample::Refused(Refused { column: number, value: BadValue::Empty }));
            }
            ids.push(of_text);
        }
        Ok((self.objective.sample(ids, key), is_cut_left, label))
    }

    /// Adds a sample, with the texts that are kept.
    fn push(
        &self,
        batch: &mut Batch,
        (row, texts): (u64, &[RowText]),
        (sample, is_cut_left, label): (Sample, bool, Option<Judged>),
    ) -> Result<(), NoSample> {
        let target = target_column(texts.len());
        let wanted = [(self.options.keep_prompts && target > 0, 0), (self.options.keep_texts, target)];
        let kept = |number: usize| -> Result<String, NoSample> {
            let text = texts[number].beginning().map_err(|fault| NoSample::new(fault, number))?;
            Ok(text[..text.floor_char_boundary(KEPT_TEXT_BYTES)].to_owned())
        };
        let [prompt, text] = wanted.map(|(is_wanted, number)| is_wanted.then(|| kept(number)).transpose());
        let (prompt, text) = (prompt?, text?);
        if self.options.objective.is_of_texts() {
            self.note_lossy(batch, row, texts)?;
        }
        batch.prompts.extend(prompt);
        batch.texts.extend(text);
        batch.rows.push(row);
        batch.cut_sources += u64::from(sample.source_was_cut || is_cut_left);
        batch.cut_targets += u64::from(sample.target_was_cut);
        batch.sources.push(sample.source);
        batch.targets.push(sample.target);
        batch.rejected.extend(sample.rejected);
        match label {
            Some(Judged::Truth(is_desirable)) => batch.labels.push(is_desirable),
            Some(Judged::Score(score)) => batch.gains.push(score),
            None => {}
        }
        Ok(())
    }

    /// Notes which texts of a row have characters that the tokenizer does not give back.
    fn note_lossy(&self, batch: &mut Batch, row: u64, texts: &[RowText]) -> Result<(), NoSample> {
        // A row counts once on each side, however many targets it has.
        let mut is_counted = [false; 2];
        for (number, text) in texts.iter().enumerate().filter(|(number, _)| !self.options.objective.is_label(*number)) {
            let is_target = number > 0;
            if is_counted[usize::from(is_target)] {
                continue;
            }
            let text = text.beginning().map_err(|fault| NoSample::new(fault, number))?;
            let characters = self.lossy.characters(&self.tokenizer, text);
            if !characters.is_empty() {
                batch.lossy.add(is_target, row, characters);
                is_counted[usize::from(is_target)] = true;
            }
        }
        Ok(())
    }

    /// Whether a column's texts lose their beginning if they are too long.
    fn is_cut_left(&self, number: usize) -> bool {
        let is_source = self.options.objective.has_targets() && number == 0;
        is_source && self.options.truncation_side == Side::Left
    }

    /// The prefix of a column's texts of a row.
    fn prefix(&self, number: usize, row: u64) -> &str {
        match (&self.options.objective, &self.options.mixture) {
            (objective, _) if !objective.has_targets() => "",
            (_, Some(mixture)) if number == 0 => &mixture.tasks()[mixture.task_of(row)].source_prefix,
            _ if number == 0 => &self.options.source_prefix,
            _ => "",
        }
    }

    fn refuse(&self, batch: &mut Batch, row: u64, refused: Refused) -> Result<(), Error> {
        let bad_row = self.locate(row, refused);
        let ends = match self.options.bad_rows {
            BadRows::Error => true,
            BadRows::Usual => refused.value == BadValue::Image,
            BadRows::Skip => false,
        };
        if ends {
            return Err(Error::BadRow(bad_row));
        }
        batch.bad_rows += 1;
        batch.first_bad_row.get_or_insert(bad_row);
        Ok(())
    }

    /// Returns where in the files a row of the dataset lies.
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

/// Among `columns` columns of an objective, the one of the targets: the second, or the only one.
pub(crate) fn target_column(columns: usize) -> usize {
    columns.saturating_sub(1).min(1)
}

/// For each of the objective's columns, the bytes of a value that are read with its batch.
pub(crate) fn read_bytes_of(options: &LoaderOptions, tokenizer: &Tokenizer) -> Vec<u64> {
    let columns = options.objective.columns().len();
    let of_column = |number| {
        let bytes = options.objective.read_bytes(number, options, tokenizer);
        let is_target = number == target_column(columns);
        let keeps = options.keep_texts && is_target || options.keep_prompts && number == 0 && !is_target;
        bytes.max(if keeps { KEPT_TEXT_BYTES as u64 } else { 0 })
    };
    (0..columns).map(of_column).collect()
}

/// Why a row gives no sample.
/// A refused label: the second column has it.
impl From<BadValue> for NoSample {
    fn from(value: BadValue) -> Self {
        Self::Refused(Refused { column: 1, value })
    }
}

impl From<Error> for NoSample {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

enum NoSample {
    Refused(Refused),
    Stopped,
    Error(Error),
}

impl NoSample {
    fn new(fault: TextFault, column: usize) -> Self {
        match fault {
            TextFault::NotUtf8 => Self::Refused(Refused { column, value: BadValue::NotUtf8 }),
            TextFault::Stopped => Self::Stopped,
            TextFault::Error(error) => Self::Error(error),
        }
    }
}
