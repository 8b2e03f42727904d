//! The flags of commands that read files with rows: `convert`, `inspect`, `eval`, and where prompts or texts are read.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use row_files::{Chosen, Encoding, Quoting, ReadOptions};

use crate::cli::flag_values::typed_path;

/// Flags that name columns.
#[derive(Args, Clone, Debug, Default)]
pub struct ColumnFlags {
    /// Column of the source text [default: found by the columns, see docs/data.md]
    #[arg(long, value_name = "NAME")]
    pub prompt_column: Option<String>,
    /// Column of the target text
    #[arg(long, value_name = "NAME")]
    pub response_column: Option<String>,
    /// Source text from several columns, such as "{subject}\n{body}"; {{ for a brace
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_column")]
    pub source_template: Option<String>,
    /// Target text from several columns
    #[arg(long, value_name = "TEXT", conflicts_with = "response_column")]
    pub target_template: Option<String>,
    /// Language of the sources of rows with a column `translation`
    #[arg(long, value_name = "NAME", requires = "target_lang")]
    pub source_lang: Option<String>,
    /// Language of the targets
    #[arg(long, value_name = "NAME", requires = "source_lang")]
    pub target_lang: Option<String>,
    /// Column of one text for span corruption, in place of prompt and response
    #[arg(long, value_name = "NAME", conflicts_with_all = ["prompt_column", "response_column"])]
    pub text_column: Option<String>,
}

/// Flags that say how text files are read.
#[derive(Args, Clone, Debug, Default)]
pub struct TextFlags {
    /// Encoding of JSON, CSV and TSV: windows-1252, gb18030, shift_jis, utf-16le and others [default: utf-8]
    #[arg(long, value_name = "NAME", value_parser = encoding)]
    pub encoding: Option<Encoding>,
    /// Whether quotes enclose fields; auto: those of CSV, and in TSV they are ordinary characters
    #[arg(long, value_enum, value_name = "RULE", default_value_t = QuotingRule::Auto)]
    pub quoting: QuotingRule,
}

/// `--quoting`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum QuotingRule {
    /// In CSV they do, in TSV they do not
    #[default]
    Auto,
    /// They do
    All,
    /// They do not
    None,
}

/// An encoding by its name.
pub fn encoding(name: &str) -> Result<Encoding, String> {
    Encoding::of_name(name).ok_or_else(|| {
        format!("no encoding `{name}`; expected one such as utf-8, windows-1252, gb18030, big5, shift_jis, euc-kr or utf-16le")
    })
}

impl TextFlags {
    /// The keys that the flags set.
    pub fn keys(&self) -> impl Iterator<Item = (&'static str, &'static str, String)> {
        let quoting = match self.quoting {
            QuotingRule::Auto => None,
            QuotingRule::All => Some("all".to_owned()),
            QuotingRule::None => Some("none".to_owned()),
        };
        let keys = [
            ("data.encoding", "--encoding", self.encoding.map(Encoding::name)),
            ("data.quoting", "--quoting", quoting),
        ];
        keys.into_iter().filter_map(|(key, flag, value)| Some((key, flag, value?)))
    }

    /// How files are read.
    pub fn options(&self) -> ReadOptions {
        let quoting = match self.quoting {
            QuotingRule::Auto => Quoting::Auto,
            QuotingRule::All => Quoting::Quoted,
            QuotingRule::None => Quoting::Plain,
        };
        ReadOptions { encoding: self.encoding, quoting, ..ReadOptions::default() }
    }
}

impl ColumnFlags {
    /// The keys that the flags set.
    pub fn keys(&self) -> impl Iterator<Item = (&'static str, &'static str, &String)> {
        let keys = [
            ("data.prompt_column", "--prompt-column", &self.prompt_column),
            ("data.response_column", "--response-column", &self.response_column),
            ("data.source_template", "--source-template", &self.source_template),
            ("data.target_template", "--target-template", &self.target_template),
            ("data.source_lang", "--source-lang", &self.source_lang),
            ("data.target_lang", "--target-lang", &self.target_lang),
            ("data.text_column", "--text-column", &self.text_column),
        ];
        keys.into_iter().filter_map(|(key, flag, value)| Some((key, flag, value.as_ref()?)))
    }

    /// The columns that the flags name.
    pub fn chosen(&self) -> Chosen {
        Chosen {
            prompt: self.prompt_column.clone(),
            response: self.response_column.clone(),
            text: self.text_column.clone(),
            source: self.source_template.clone(),
            target: self.target_template.clone(),
            source_lang: self.source_lang.clone(),
            target_lang: self.target_lang.clone(),
            is_text: self.text_column.is_some(),
            preference: None,
            has_labels: false,
            label: None,
            is_of_words: false,
            is_of_sets: false,
            is_of_vectors: false,
            ranked: None,
            query: None,
        }
    }
}

/// Flags that say how long texts may be.
#[derive(Args, Clone, Debug)]
pub struct LengthFlags {
    /// Count tokens as well, with this tokenizer.json or spiece.model, or the one in this model directory
    #[arg(long, value_name = "FILE|DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Tokens of a source that training keeps, EOS included; longer ones are counted
    #[arg(long, value_name = "N", default_value_t = 256, requires = "tokenizer")]
    pub max_source_tokens: u64,
    /// Tokens of a target that training keeps, EOS included
    #[arg(long, value_name = "N", default_value_t = 256, requires = "tokenizer")]
    pub max_target_tokens: u64,
}

/// Flags of `convert`.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// JSONL, JSON, CSV, TSV or parquet files, plain, .gz or .zst; directories or globs
    #[arg(value_name = "FILE", required = true, value_parser = typed_path())]
    pub files: Vec<String>,
    /// Output file, parquet with the columns `prompt` and `response`, or `text`
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Columns
    #[command(flatten)]
    pub columns: ColumnFlags,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// Put this text before every prompt
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub source_prefix: String,
    /// Remove control characters, repeated punctuation, and white space at both ends
    #[arg(long)]
    pub clean: bool,
    /// Leave out rows that were there before: exactly, or nearly (MinHash, Jaccard similarity of 0.85)
    #[arg(long, value_enum, value_name = "HOW")]
    pub deduplicate: Option<Deduplicate>,
    /// Rows for validation, in a second file OUTPUT-validation.parquet: a share below 1, or a count
    #[arg(long, value_name = "X")]
    pub validation_split: Option<f64>,
    /// Seed of the choice of those rows
    #[arg(long, value_name = "N", default_value_t = 42, requires = "validation_split")]
    pub seed: u64,
    /// Rows that cannot be used; auto: malformed ones are errors, null and empty ones are skipped and counted
    #[arg(long, value_enum, value_name = "RULE", default_value_t = BadRowRule::Auto)]
    pub bad_rows: BadRowRule,
    /// Lengths
    #[command(flatten)]
    pub lengths: LengthFlags,
    /// Memory limit of the whole process, which bounds the table of duplicates
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// Overwrite existing output files
    #[arg(long)]
    pub force: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `--deduplicate`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Deduplicate {
    /// The same prompt and response, byte for byte
    Exact,
    /// Nearly the same, by their letters and digits
    Minhash,
}

/// `--bad-rows`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BadRowRule {
    /// Malformed rows are errors, null and empty ones are skipped and counted
    Auto,
    /// All are errors
    Error,
    /// All are skipped and counted
    Skip,
}

impl From<BadRowRule> for row_files::BadRows {
    fn from(rule: BadRowRule) -> Self {
        match rule {
            BadRowRule::Auto => Self::Usual,
            BadRowRule::Error => Self::Error,
            BadRowRule::Skip => Self::Skip,
        }
    }
}

/// Flags of `inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// Parquet, JSONL, JSON, CSV or TSV files, plain, .gz or .zst; directories or globs
    #[arg(value_name = "FILE", required = true, value_parser = typed_path())]
    pub files: Vec<String>,
    /// Columns
    #[command(flatten)]
    pub columns: ColumnFlags,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// Rows that are read of each file, from the first (0: all)
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub rows: u64,
    /// Sample rows to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub show: usize,
    /// Lengths
    #[command(flatten)]
    pub lengths: LengthFlags,
    /// Memory limit of the process; a row that does not fit counts as malformed
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// Print one JSON object per file, one per line
    #[arg(long)]
    pub json: bool,
}

/// Flags of `train-tokenizer`.
#[derive(Args, Debug)]
pub struct TrainTokenizerArgs {
    /// Parquet, JSONL, JSON, CSV, TSV (columns of text) or text files; directories or globs
    #[arg(long, value_name = "FILE", required = true, num_args = 1.., value_parser = typed_path())]
    pub input: Vec<String>,
    /// Vocabulary size, special tokens included
    #[arg(long, value_name = "N")]
    pub vocab_size: usize,
    /// Output file
    #[arg(long, value_name = "FILE", default_value = "tokenizer.json")]
    pub output: PathBuf,
    /// Columns to read [default: prompt and response where they are known, else every column of text]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub columns: Vec<String>,
    /// Text files
    #[command(flatten)]
    pub text: TextFlags,
    /// Number of sentinel tokens for span corruption
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub sentinels: usize,
    /// Memory limit of the whole process; a smaller limit drops rare words sooner
    #[arg(long, value_name = "SIZE")]
    pub memory_budget: Option<String>,
    /// Overwrite an existing output file
    #[arg(long)]
    pub force: bool,
}
