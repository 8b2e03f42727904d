//! The flags of `export`, `merge`, `average` and `convert-base`: commands that write a model anew.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::flag_values::{BasePrecision, StoredPrecision};

/// Flags of `export`.
#[derive(Args, Debug)]
pub struct ExportArgs {
    /// The model: a directory, a run or a model of the hub; or an adapter, whose base is found
    #[arg(long, value_name = "MODEL")]
    pub model: PathBuf,
    /// Merge this LoRA adapter on the way: its directory, or the run that trained it
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Files of which program: llama.cpp's GGUF, or a directory of CTranslate2
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Format,
    /// Precision of the matrices: f32, f16, bf16 or q8_0 in GGUF, f32 or int8 in CTranslate2
    #[arg(long, alias = "outtype", alias = "quantization", value_enum, value_name = "DTYPE", default_value = "f32")]
    pub dtype: Dtype,
    /// A file that ends in .gguf, or a directory that is made, with a README.md of the model's scores beside the files
    #[arg(long, short, alias = "outfile", alias = "output-dir", value_name = "PATH")]
    pub output: PathBuf,
    /// Names of the tensors in GGUF: llama.cpp's with the tokenizer, or Hugging Face's without, as candle wants them
    #[arg(long, value_enum, value_name = "NAMES", default_value = "llama.cpp")]
    pub gguf_names: GgufNames,
    /// Replace an existing file or export
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `--format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// GGUF, for llama.cpp and transformers' `gguf_file`
    Gguf,
    /// CTranslate2's model.bin
    #[value(alias = "ct2")]
    Ctranslate2,
}

/// `--gguf-names`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GgufNames {
    /// llama.cpp's
    #[value(name = "llama.cpp")]
    LlamaCpp,
    /// Hugging Face's
    Hf,
}

/// `--dtype`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// float32
    #[value(alias = "float32")]
    F32,
    /// float16
    #[value(alias = "float16")]
    F16,
    /// bfloat16
    #[value(alias = "bfloat16")]
    Bf16,
    /// 8 bits, a scale for 32 values
    #[value(name = "q8_0", alias = "q8-0")]
    Q8,
    /// 8 bits, a scale for each row
    Int8,
}

impl From<Dtype> for model_formats::Dtype {
    fn from(flag: Dtype) -> Self {
        match flag {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::BF16,
            Dtype::Q8 => Self::Q8_0,
            Dtype::Int8 => Self::Int8,
        }
    }
}

impl Format {
    /// Its name in `--json` and in the card.
    pub fn name(self) -> &'static str {
        match self {
            Format::Gguf => "gguf",
            Format::Ctranslate2 => "ctranslate2",
        }
    }
}

/// Flags of `merge`.
#[derive(Args, Debug)]
pub struct MergeArgs {
    /// Directory of the adapter, as PEFT saves it, or the run that trained it
    #[arg(long, value_name = "DIR")]
    pub adapter: PathBuf,
    /// The model below it: a directory, a run or a model of the hub [default: the one that adapter_config.json names]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Directory of the merged model
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// Precision of the merged matrices [default: as each is stored]
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub dtype: Option<StoredPrecision>,
    /// The result
    #[command(flatten)]
    pub result: ResultFlags,
}

/// Flags of commands that make a model directory.
#[derive(Args, Debug)]
pub struct ResultFlags {
    /// Replace an existing output directory that holds a model and no run
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Flags of `average`.
#[derive(Args, Debug)]
pub struct AverageArgs {
    /// Models of one shape: directories, such as the checkpoints of a run, runs or models of the hub
    #[arg(value_name = "MODEL", required = true)]
    pub models: Vec<PathBuf>,
    /// Directory of the mean
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// The result
    #[command(flatten)]
    pub result: ResultFlags,
}

/// Flags of `convert-base`.
#[derive(Args, Debug)]
pub struct ConvertBaseArgs {
    /// The model: a directory, a run or a model of the hub
    #[arg(long, value_name = "MODEL")]
    pub model: PathBuf,
    /// Codes of the weights in the blocks: 8 bits with a scale for each row, or NF4, 4.1 bits with its scales
    #[arg(long, value_enum, value_name = "PRECISION")]
    pub precision: BasePrecision,
    /// Directory of the quantised model
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// The result
    #[command(flatten)]
    pub result: ResultFlags,
}
