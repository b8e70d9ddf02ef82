//! Sizes as people write them: "64KiB", "1.5 GiB", "4096".

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A number of bytes, parsed from and printed as "64GiB".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

impl FromStr for ByteSize {
    type Err = Error;

    /// Takes a decimal number and an optional unit (B, KB … TB, KiB … TiB, upper or lower case; K, M, G, T mean KiB … TiB).
    fn from_str(text: &str) -> Result<Self> {
        let refuse = || {
            Error::invalid(format!(
                "size \"{text}\" is not understood: write for example 512MiB, 6GiB or 4096"
            ))
        };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = (&trimmed[..digits], trimmed[digits..].trim());
        let unit = match unit {
            "" => "B".to_string(),
            one if one.len() == 1 && !one.eq_ignore_ascii_case("b") => format!("{one}iB"),
            other => other.to_string(),
        };
        let factor = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(&unit)).ok_or_else(refuse)?.1;
        let bytes = match number.split_once('.') {
            None => number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)),
            Some((_, "")) => None,
            Some(_) => fractional(number, factor),
        };
        bytes.map(ByteSize).ok_or_else(refuse)
    }
}

fn fractional(number: &str, factor: u64) -> Option<u64> {
    let bytes = number.parse::<f64>().ok()? * factor as f64;
    // Exact below 2^53, which is 8 PiB: more than any tier of one node.
    (bytes < (1u64 << 53) as f64).then_some(bytes.round() as u64)
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((name, factor)) = UNITS[..4].iter().find(|(_, factor)| self.0 >= *factor) else {
            return write!(f, "{}B", self.0);
        };
        if self.0.is_multiple_of(*factor) {
            return write!(f, "{}{name}", self.0 / factor);
        }
        write!(f, "{:.2}{name}", self.0 as f64 / *factor as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        let good = [
            ("4096", 4096),
            ("512MiB", 512 << 20),
            ("6 GiB", 6 << 30),
            ("64k", 64 << 10),
            ("1.5GiB", 3 << 29),
            ("2TB", 2_000_000_000_000),
            ("0", 0),
            ("7b", 7),
        ];
        for (text, bytes) in good {
            assert_eq!(text.parse::<ByteSize>().unwrap(), ByteSize(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1.2.3GiB", "5 parsecs", "99999999999GiB", "1.", "é", "1é"] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.message().contains(text), "{error} does not name {text:?}");
        }
    }

    #[test]
    fn prints_what_it_reads() {
        for bytes in [0, 1, 4096, 512 << 20, 6 << 30, 1 << 40] {
            assert_eq!(ByteSize(bytes).to_string().parse::<ByteSize>().unwrap(), ByteSize(bytes));
        }
        assert_eq!(ByteSize(1_500_000).to_string(), "1.43MiB");
    }
}
