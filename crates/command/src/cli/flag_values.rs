//! The values that flags take.

use clap::ValueEnum;
use clap::builder::{OsStringValueParser, TypedValueParser};
use memory_policy::{Budget, Budgets};

use crate::config::{paths, values};
use crate::failure::{Failure, Outcome};

/// `--master-weights`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MasterWeights {
    /// float32
    F32,
    /// bfloat16 with stochastic rounding
    StochasticRounding,
    /// bfloat16 with rounding to nearest
    NearestRounding,
}

impl From<MasterWeights> for trainer::MasterWeights {
    fn from(flag: MasterWeights) -> Self {
        match flag {
            MasterWeights::F32 => Self::F32,
            MasterWeights::StochasticRounding => Self::StochasticRounding,
            MasterWeights::NearestRounding => Self::NearestRounding,
        }
    }
}

/// `--precision`, `--gradient-precision`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// float32
    F32,
    /// bfloat16
    Bf16,
}

impl Precision {
    /// The word of the flag.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// `merge --dtype`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StoredPrecision {
    /// float32
    F32,
    /// bfloat16
    Bf16,
    /// float16
    F16,
}

impl From<StoredPrecision> for candle_core::DType {
    fn from(flag: StoredPrecision) -> Self {
        match flag {
            StoredPrecision::F32 => Self::F32,
            StoredPrecision::Bf16 => Self::BF16,
            StoredPrecision::F16 => Self::F16,
        }
    }
}

/// `convert-base --precision`
#[derive(ValueEnum, Clone, Copy, Debug)]
pub enum BasePrecision {
    /// 8 bits
    Int8,
    /// 4 bits
    Nf4,
}

impl From<BasePrecision> for t5::Precision {
    fn from(flag: BasePrecision) -> Self {
        match flag {
            BasePrecision::Int8 => Self::Int8,
            BasePrecision::Nf4 => Self::Nf4,
        }
    }
}

impl From<Precision> for trainer::Precision {
    fn from(flag: Precision) -> Self {
        match flag {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

impl From<Precision> for trainer::GradientPrecision {
    fn from(flag: Precision) -> Self {
        match flag {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

/// The parser of a switch with a value.
pub fn truth(text: &str) -> Result<bool, &'static str> {
    values::truth(text).ok_or("expected true or false")
}

/// The parser of a path or a glob. Its result is the text that a config has for it.
pub fn typed_path() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().map(|path| paths::to_text(&path))
}

/// The parser of `KEY=VALUE`. The value of a key for paths may not be UTF-8.
pub fn assignment_text() -> impl TypedValueParser<Value = String> {
    OsStringValueParser::new().try_map(|typed| match typed.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => paths::assignment(&typed).ok_or("expected UTF-8: only paths may have other bytes"),
    })
}

/// The budget of a `--memory-budget` flag; without one, the usual share of the available memory.
pub fn budget(flag: Option<&str>) -> Outcome<Budget> {
    budget_of_flag("--memory-budget", flag)
}

/// The budgets of `--memory-budget` and `--device-memory-budget`, each as for [`budget`].
pub fn budgets(process: Option<&str>, device: Option<&str>) -> Outcome<Budgets> {
    Ok(Budgets { process: budget(process)?, device: budget_of_flag("--device-memory-budget", device)? })
}

fn budget_of_flag(name: &str, text: Option<&str>) -> Outcome<Budget> {
    let Some(text) = text else { return Ok(Budget::ShareOfAvailable) };
    let bytes = text
        .parse()
        .map_err(|error| Failure::usage(format!("{name}: {error}")).hint("a size such as `512MiB` or `4GiB`"))?;
    Ok(Budget::Explicit(bytes))
}
