//! Checksums of payload: XXH3, 64 bits, seed 0.

use xxhash_rust::xxh3::Xxh3Default;

/// The checksum of some bytes.
pub fn of(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// The checksum of bytes that come piece by piece.
#[derive(Clone, Default)]
pub struct Checksum(Xxh3Default);

impl Checksum {
    /// Of no bytes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Of all bytes so far.
    pub fn value(&self) -> u64 {
        self.0.digest()
    }
}

impl core::fmt::Debug for Checksum {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Checksum({:#018x})", self.value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn checksums_are_xxh3s_and_do_not_depend_on_the_pieces() {
        // The published value of XXH3_64bits over nothing.
        assert_eq!(of(b""), 0x2d06_8005_38d3_94c2);
        let bytes: Vec<u8> = (0..1000u32).map(|at| (at * 7) as u8).collect();
        for piece in [1, 3, 256, 999] {
            let mut checksum = Checksum::new();
            bytes.chunks(piece).for_each(|piece| checksum.update(piece));
            assert_eq!(checksum.value(), of(&bytes));
        }
        let mut other = bytes.clone();
        other[500] ^= 1;
        assert_ne!(of(&other), of(&bytes));
    }
}
