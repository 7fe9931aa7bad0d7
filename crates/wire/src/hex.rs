//! Bytes as hexadecimal digits.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::{self, Debug, Display};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// 16 bytes, written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id(pub [u8; 16]);

impl Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode(&self.0))
    }
}

impl Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl Serialize for Id {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        array(&text).map(Self).ok_or_else(|| de::Error::custom("expected 32 hexadecimal digits"))
    }
}

/// 16 bytes, written as 8-4-4-4-12 hexadecimal digits: a device, or the boot of a host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Reads what [`Display`] wrote.
    pub fn parse(text: &str) -> Option<Self> {
        let dash = |index| matches!(index, 8 | 13 | 18 | 23);
        if text.len() != 36
            || !text.bytes().enumerate().all(|(index, byte)| dash(index) == (byte == b'-'))
        {
            return None;
        }
        array(&text.replace('-', "")).map(Self)
    }
}

impl Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = encode(&self.0);
        write!(
            f,
            "{}-{}-{}-{}-{}",
            &digits[..8],
            &digits[8..12],
            &digits[12..16],
            &digits[16..20],
            &digits[20..]
        )
    }
}

impl Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl Serialize for Uuid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Uuid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text)
            .ok_or_else(|| de::Error::custom("expected 8-4-4-4-12 hexadecimal digits"))
    }
}

/// For `#[serde(with = "hex::bytes")]`: any number of bytes.
pub(crate) mod bytes {
    use alloc::string::String;
    use alloc::vec::Vec;

    use super::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::encode(bytes))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(deserializer)?;
        super::decode(&text)
            .ok_or_else(|| de::Error::custom("expected pairs of hexadecimal digits"))
    }
}

fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    pairs.iter().map(|&[high, low]| Some(digit(high)? << 4 | digit(low)?)).collect()
}

fn array(text: &str) -> Option<[u8; 16]> {
    decode(text)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;

    #[test]
    fn bytes_survive_their_hexadecimal_form() {
        let every: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&every)), Some(every.clone()));
        assert_eq!(encode(&[0x0f, 0xa0]), "0fa0");
        assert_eq!(decode("0FA0"), Some(vec![0x0f, 0xa0]));
    }

    #[test]
    fn a_uuid_is_written_with_dashes_and_read_back() {
        let uuid = Uuid([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(uuid.to_string(), "00010203-0405-0607-0809-0a0b0c0d0eff");
        assert_eq!(Uuid::parse(&uuid.to_string()), Some(uuid));
    }

    #[test]
    fn what_is_not_hexadecimal_is_refused() {
        for text in ["0", "0g", "+1", "é", " 1", "0x12"] {
            assert_eq!(decode(text), None, "{text:?}");
        }
        for text in [
            "",
            "000102030405060708090a0b0c0d0eff",
            "00010203-0405-0607-0809-0a0b0c0d0ef",
            "0001020--0405-0607-0809-0a0b0c0d0eff",
            "00010203-0405-0607-08090-a0b0c0d0eff",
            "00010203-0405-0607-0809-0a0b0c0d0éf",
        ] {
            assert_eq!(Uuid::parse(text), None, "{text:?}");
        }
    }
}
