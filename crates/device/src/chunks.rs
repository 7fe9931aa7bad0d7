//! Memory of a virtual memory API: physical chunks that are mapped side by side, each of them
//! exported alone. A registered range may cross several, so what is exported for it is the run of
//! all that it touches.

use sha2::{Digest, Sha256};

use crate::device::{Allocation, Chunk};

/// Why a chunk that was made without the right cannot be exported, and the remedy.
pub(crate) const NOT_SHAREABLE: &str = "it is memory of the virtual memory API, as PyTorch's expandable \
     segments are, and was made without the right to be exported as a file descriptor: set \
     PYTORCH_CUDA_ALLOC_CONF (on AMD, PYTORCH_HIP_ALLOC_CONF) to expandable_segments:False, or \
     allocate with cudaMalloc (hipMalloc)";

/// Collects the chunks under a range, in order of address.
#[derive(Debug)]
struct Run {
    base: u64,
    len: u64,
    digest: Sha256,
}

impl Run {
    /// No chunk yet; the first one begins at `base`.
    fn new(base: u64) -> Self {
        Self { base, len: 0, digest: Sha256::new() }
    }

    /// Where the next chunk must begin.
    fn end(&self) -> u64 {
        self.base.saturating_add(self.len)
    }

    /// Adds the chunk of `len` bytes at [`Self::end`].
    fn push(&mut self, len: u64, id: u64) {
        self.len = self.len.saturating_add(len);
        self.digest.update(len.to_le_bytes());
        self.digest.update(id.to_le_bytes());
    }

    /// The run as one unit. Its number depends on every chunk and its place, and has the top bit
    /// set, so that it is never the number of a single allocation: drivers count those up from 1.
    fn finish(self) -> Allocation {
        let digest = self.digest.chain_update(self.base.to_le_bytes()).finalize();
        let word = u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes"));
        Allocation { base: self.base, len: self.len, id: word | 1 << 63 }
    }
}

/// The run that begins with the chunk `first` and goes on until `end`, or until there is no chunk:
/// `next` gives the one at an address. Each comes with a number that no other chunk of this
/// process and device has or had.
pub(crate) fn run<E>(
    first: Allocation,
    end: u64,
    mut next: impl FnMut(u64) -> Result<Option<Allocation>, E>,
) -> Result<Allocation, E> {
    let mut run = Run::new(first.base);
    run.push(first.len, first.id);
    while run.end() < end {
        let Some(chunk) = next(run.end())? else { break };
        run.push(chunk.len, chunk.id);
    }
    Ok(run.finish())
}

/// Whether chunks that came from another process make up the `len` bytes that came with them.
pub(crate) fn check(chunks: &[Chunk], len: u64) -> Result<(), String> {
    if chunks.iter().any(|chunk| chunk.len == 0) {
        return Err("one of its chunks is empty".into());
    }
    let sum = chunks.iter().try_fold(0u64, |sum, chunk| sum.checked_add(chunk.len));
    match sum {
        Some(sum) if sum == len => Ok(()),
        Some(sum) => {
            Err(format!("its {} chunks have {sum} bytes, {len} bytes were announced", chunks.len()))
        }
        None => Err("its chunks are longer than any address space".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(base: u64, chunks: &[(u64, u64)]) -> Allocation {
        let mut run = Run::new(base);
        chunks.iter().for_each(|&(len, id)| run.push(len, id));
        run.finish()
    }

    #[test]
    fn a_runs_number_changes_with_every_chunk_its_length_its_order_and_its_place() {
        let all = [
            run(4096, &[(10, 1), (10, 2)]),
            run(8192, &[(10, 1), (10, 2)]),
            run(4096, &[(10, 2), (10, 1)]),
            run(4096, &[(10, 1), (10, 3)]),
            run(4096, &[(10, 1), (11, 2)]),
            run(4096, &[(10, 1)]),
            run(4096, &[(10, 1), (10, 2), (10, 3)]),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(one.id >> 63 == 1, "run {at}");
            assert!(all[..at].iter().all(|other| other.id != one.id), "run {at}");
        }
        assert_eq!(run(4096, &[(10, 1), (10, 2)]), all[0]);
        assert_eq!((all[0].base, all[0].len), (4096, 20));
    }

    #[test]
    fn chunks_that_do_not_make_up_the_announced_length_are_refused() {
        let chunks = |lengths: &[u64]| -> Vec<Chunk> {
            let null = || std::fs::File::open("/dev/null").expect("always there").into();
            lengths.iter().map(|&len| Chunk { fd: null(), len }).collect()
        };
        assert_eq!(check(&chunks(&[4096, 8192]), 12_288), Ok(()));
        for (lengths, len) in [
            (&[4096, 4096][..], 12_288),
            (&[4096, 4096], 4096),
            (&[], 4096),
            (&[4096, 0], 4096),
            (&[u64::MAX, 2], 1),
            (&[u64::MAX, u64::MAX], u64::MAX - 1),
        ] {
            assert!(check(&chunks(lengths), len).is_err(), "{lengths:?} for {len}");
        }
    }
}
