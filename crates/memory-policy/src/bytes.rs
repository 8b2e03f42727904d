//! A number of bytes, as a type: read from `512MiB`, shown as `512 MiB`, never mistaken for a count.
//!
//! Binary units are the default, as with every tool that limits memory: `4G`, `4GiB` and `4gib` are
//! all 4 x 2^30; only a spelled-out decimal unit (`900MB`) is decimal.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

/// A number of bytes. Arithmetic saturates: a prediction too large for 64 bits simply never fits.
///
/// Serialized as a plain number of bytes; deserialized from a number or from a size such as `"4GiB"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// The binary units, largest first, with the exponent of two of each.
const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `count` KiB.
    pub const fn kib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 10))
    }

    /// `count` MiB.
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 20))
    }

    /// `count` GiB.
    pub const fn gib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 30))
    }

    /// `self - other`, or zero when `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `percent` hundredths of this, rounded down.
    pub const fn percent(self, percent: u64) -> Self {
        // Widened, so that no budget overflows; capped, so that no percentage does.
        let product = self.0 as u128 * percent as u128 / 100;
        if product > u64::MAX as u128 { Self(u64::MAX) } else { Self(product as u64) }
    }

    /// The next whole MiB at or above this: a size that a person can type and that is enough.
    pub const fn round_up_to_mib(self) -> Self {
        Self::mib(self.0.div_ceil(1 << 20))
    }
}

/// Shows the largest unit that gives at least one; whole numbers have no decimals.
///
/// `512 MiB`, `1.50 GiB`, `31.4 MiB`, `17 B`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((unit, bits)) = UNITS.iter().find(|(_, bits)| self.0 >= 1 << bits) else {
            return f.pad(&format!("{} B", self.0));
        };
        let one = 1u64 << bits;
        let decimals = match bits {
            _ if self.0.is_multiple_of(one) => 0,
            30.. => 2,
            _ => 1,
        };
        f.pad(&format!("{:.decimals$} {unit}", self.0 as f64 / one as f64))
    }
}

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseBytesError {
    /// The text does not begin with a number that is zero or more.
    #[error("`{0}` is not a size: expected a number and a unit, such as 512MiB, 4GiB or 4G")]
    NotANumber(String),
    /// The number is followed by something other than a unit of bytes.
    #[error("`{text}`: unknown unit `{unit}`: expected B, K, M, G, T, KiB, MiB, GiB, TiB, kB, MB, GB or TB")]
    UnknownUnit {
        /// The whole text.
        text: String,
        /// The text in the place of the unit.
        unit: String,
    },
    /// More than 64 bits of bytes.
    #[error("`{0}` is more bytes than any machine has")]
    TooLarge(String),
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, ParseBytesError> {
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let unit = unit.trim_start();
        let scale: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "ki" | "kib" => 1 << 10,
            "m" | "mi" | "mib" => 1 << 20,
            "g" | "gi" | "gib" => 1 << 30,
            "t" | "ti" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ if number.is_empty() => return Err(ParseBytesError::NotANumber(text.to_string())),
            _ => {
                return Err(ParseBytesError::UnknownUnit { text: text.to_string(), unit: unit.to_string() });
            }
        };
        let too_large = || ParseBytesError::TooLarge(text.to_string());
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Self).ok_or_else(too_large);
        }
        // The remaining cases: fractions, whole numbers beyond 64 bits, and texts that are no number.
        let fraction: f64 = number.parse().map_err(|_| ParseBytesError::NotANumber(text.to_string()))?;
        let bytes = fraction * scale as f64;
        if bytes < u64::MAX as f64 { Ok(Self(bytes as u64)) } else { Err(too_large()) }
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or a size such as \"512MiB\"")
            }
            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Bytes, E> {
                u64::try_from(bytes).map(Bytes).map_err(|_| E::invalid_value(de::Unexpected::Signed(bytes), &self))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Size)
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, count: u64) -> Self {
        Self(self.0.saturating_mul(count))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::ZERO, Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn check(text: &str, expected: u64) {
        assert_eq!(text.parse(), Ok(Bytes(expected)), "{text:?}");
    }

    #[track_caller]
    fn check_error(text: &str, expected: &str) {
        let error = text.parse::<Bytes>().expect_err(text).to_string();
        assert!(error.contains(expected), "{text:?} gave: {error}");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        check("512MiB", 512 << 20);
        check("512 MiB", 512 << 20);
        check("  4GiB ", 4 << 30);
        check("4G", 4 << 30);
        check("4g", 4 << 30);
        check("4Gi", 4 << 30);
        check("64k", 64 << 10);
        check("2T", 2 << 40);
        check("900MB", 900_000_000);
        check("1.5GiB", 3 << 29);
        check("0.5k", 512);
        check("1048576", 1 << 20);
        check("17B", 17);
        check("0", 0);
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_an_example_of_one() {
        check_error("", "is not a size: expected a number and a unit, such as 512MiB");
        check_error("lots", "`lots` is not a size");
        check_error("MiB", "is not a size");
        check_error("-1GiB", "is not a size");
        check_error("1.2.3G", "is not a size");
        check_error(".", "is not a size");
        check_error("4 gigs", "unknown unit `gigs`: expected B, K, M, G");
        check_error("4G4", "unknown unit `G4`");
        check_error("50%", "unknown unit `%`");
        check_error("99999999T", "more bytes than any machine has");
        check_error("99999999999999999999", "more bytes than any machine has");
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_fits() {
        let check = |bytes: u64, expected: &str| assert_eq!(Bytes(bytes).to_string(), expected);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1536, "1.5 KiB");
        check(512 << 20, "512 MiB");
        check(4 << 30, "4 GiB");
        check(3 << 29, "1.50 GiB");
        check((1 << 30) - 1, "1024.0 MiB");
        check(3 << 40, "3 TiB");
        assert_eq!(format!("[{:<8}]", Bytes::mib(5)), "[5 MiB   ]");
    }

    #[test]
    fn serde_writes_a_number_and_reads_numbers_and_sizes() {
        assert_eq!(serde_json::to_string(&Bytes::kib(1)).unwrap(), "1024");
        assert_eq!(serde_json::from_str::<Bytes>("1024").unwrap(), Bytes::kib(1));
        assert_eq!(serde_json::from_str::<Bytes>("\"1KiB\"").unwrap(), Bytes::kib(1));
        let error = serde_json::from_str::<Bytes>("\"1 banana\"").unwrap_err().to_string();
        assert!(error.contains("unknown unit `banana`"), "{error}");
        let error = serde_json::from_str::<Bytes>("-5").unwrap_err().to_string();
        assert!(error.contains("expected a number of bytes"), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".*") {
            let _ = text.parse::<Bytes>();
        }

        #[test]
        fn what_is_shown_reads_back_to_the_shown_digits(bytes in 0u64..1 << 50) {
            let read = Bytes(bytes).to_string().parse::<Bytes>().unwrap().0;
            prop_assert!(read.abs_diff(bytes) <= bytes / 20);
        }

        #[test]
        fn rounding_up_is_enough_and_not_a_mib_more(bytes in 0u64..1 << 50) {
            let rounded = Bytes(bytes).round_up_to_mib();
            prop_assert!(rounded.0 >= bytes && rounded.0 - bytes < 1 << 20 && rounded.0.is_multiple_of(1 << 20));
        }
    }
}
