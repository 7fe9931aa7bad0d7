//! The copy kernel as data: its source, its launch geometry, and a disk cache of its compiled
//! forms.
//!
//! The cache only saves time. Whatever is wrong with it (no directory, no space, foreign or
//! altered files) means a compile, never an error. A cached file is code that runs on the device,
//! so it counts only if nobody but this user can have written it.

#![cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "only backends that compile use most of it")
)]

use std::ffi::c_void;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::compact::CompactDescriptor;
use crate::private_file;
use crate::queue::CopyDescriptor;

/// The source of the copy kernel, for NVRTC and hipRTC.
pub(crate) const SOURCE: &str = include_str!("../kernels/copy.cu");

/// A kernel of [`SOURCE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Descriptors in pinned memory.
    Ring,
    /// The same, and finds out whether destinations overlap.
    Claimed,
    /// Descriptors in the kernel's parameters.
    Inline,
    /// A few of them: fewer parameters are quicker to hand over.
    InlineFew,
    /// Compact descriptors in the kernel's parameters.
    Compact,
    /// A few of them.
    CompactFew,
}

impl Entry {
    pub(crate) const ALL: [Self; 6] =
        [Self::Ring, Self::Claimed, Self::Inline, Self::InlineFew, Self::Compact, Self::CompactFew];

    /// Its name in [`SOURCE`].
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ring => "kvferry_copy",
            Self::Claimed => "kvferry_copy_claimed",
            Self::Inline => "kvferry_copy_inline",
            Self::InlineFew => "kvferry_copy_inline_few",
            Self::Compact => "kvferry_copy_compact",
            Self::CompactFew => "kvferry_copy_compact_few",
        }
    }
}

/// Threads of a block; the kernels are compiled for exactly this many.
pub(crate) const BLOCK_THREADS: u32 = 256;

/// Descriptors that fit into the parameters of [`Entry::Inline`].
pub(crate) const INLINE_DESCRIPTORS: usize = 160;

/// As [`INLINE_DESCRIPTORS`], of [`Entry::InlineFew`].
pub(crate) const INLINE_FEW_DESCRIPTORS: usize = 16;

/// Compact descriptors that fit into the parameters of [`Entry::Compact`].
pub(crate) const COMPACT_DESCRIPTORS: usize = 32;

/// As [`COMPACT_DESCRIPTORS`], of [`Entry::CompactFew`].
pub(crate) const COMPACT_FEW_DESCRIPTORS: usize = 4;

/// How [`Entry::Claimed`] finds out whether destinations overlap, as `kernels/copy.cu` reads it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Claims {
    /// Of `1 << log2` entries of a u64, all zero before the first launch with it.
    pub(crate) table: u64,
    /// A u32 in pinned memory that becomes the index of a piece whose destination overlaps another's.
    pub(crate) verdict: u64,
    /// Where the lowest destination begins.
    pub(crate) low: u64,
    pub(crate) log2: u32,
    /// Destinations begin at multiples of `1 << shift` bytes from `low` on, and end at such.
    pub(crate) shift: u32,
    /// Index of the launch's first descriptor among all pieces.
    pub(crate) first: u32,
    /// Blocks of the launch that claim; the others copy.
    pub(crate) blocks: u32,
}

const _: () = assert!(size_of::<Claims>() == 40, "kernels/copy.cu reads 40 bytes");

/// What says that a launch with its list in its parameters is over, as `kernels/copy.cu` reads it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct EndWord {
    /// A u32 in pinned memory, which becomes `value` when all bytes of the launch are visible; 0: none.
    pub(crate) address: u64,
    /// A u32 in device memory, 0 before the launch and when the word is stored.
    pub(crate) arrivals: u64,
    pub(crate) value: u32,
    unused: u32,
}

impl EndWord {
    pub(crate) fn new(address: u64, arrivals: u64, value: u32) -> Self {
        Self { address, arrivals, value, unused: 0 }
    }
}

const _: () = assert!(size_of::<EndWord>() == 24, "kernels/copy.cu reads 24 bytes");

/// The parameters of the entries with lists in them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Parameters<T, const N: usize> {
    list: [T; N],
    count: u64,
    end: EndWord,
}

impl<T: Copy + Default, const N: usize> Parameters<T, N> {
    /// Of the first `N` of a list.
    fn new(list: &[T], end: Option<EndWord>) -> Self {
        let count = list.len().min(N);
        let end = end.unwrap_or_default();
        let mut parameters = Self { list: [T::default(); N], count: count as u64, end };
        parameters.list[..count].copy_from_slice(&list[..count]);
        parameters
    }
}

/// Hands the descriptors' entry and its one parameter to `launch`, which copies it.
pub(crate) fn with_inline<R>(
    descriptors: &[CopyDescriptor],
    end: Option<EndWord>,
    launch: impl FnOnce(Entry, *mut c_void) -> R,
) -> R {
    if descriptors.len() <= INLINE_FEW_DESCRIPTORS {
        let mut few = Parameters::<_, INLINE_FEW_DESCRIPTORS>::new(descriptors, end);
        return launch(Entry::InlineFew, (&raw mut few).cast());
    }
    let mut many = Parameters::<_, INLINE_DESCRIPTORS>::new(descriptors, end);
    launch(Entry::Inline, (&raw mut many).cast())
}

/// As [`with_inline`], for compact descriptors.
pub(crate) fn with_compact<R>(
    descriptors: &[CompactDescriptor],
    end: Option<EndWord>,
    launch: impl FnOnce(Entry, *mut c_void) -> R,
) -> R {
    if descriptors.len() <= COMPACT_FEW_DESCRIPTORS {
        let mut few = Parameters::<_, COMPACT_FEW_DESCRIPTORS>::new(descriptors, end);
        return launch(Entry::CompactFew, (&raw mut few).cast());
    }
    let mut many = Parameters::<_, COMPACT_DESCRIPTORS>::new(descriptors, end);
    launch(Entry::Compact, (&raw mut many).cast())
}

/// Blocks for `units` units of work: one warp of `lanes` threads each while that fits into
/// `max_blocks`; beyond it warps take several.
pub(crate) fn grid(units: u32, lanes: u32, max_blocks: u32) -> u32 {
    units.div_ceil(BLOCK_THREADS / lanes).clamp(1, max_blocks.max(1))
}

/// Why there is no kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoKernel {
    /// One line.
    pub(crate) reason: String,
    /// What the compiler said.
    pub(crate) log: String,
}

/// Compiled kernels on disk, one file for each source, architecture and kind.
#[derive(Clone, Debug)]
pub(crate) struct CodeCache {
    /// Made when needed, with mode 0700; `None` turns the cache off.
    pub(crate) directory: Option<PathBuf>,
}

/// A file starts with the digest of its key and its code, so a file that was cut short, altered
/// or renamed to another key does not match.
const DIGEST_BYTES: usize = 32;

/// Far above any real kernel (about 20 KB); bounds what a load reads.
const MAX_CODE_BYTES: u64 = 16 << 20;

impl CodeCache {
    /// Where code that [`Self::load`] gave came from, in words.
    pub(crate) fn origin(&self) -> String {
        match &self.directory {
            Some(directory) => format!("loaded from cache {}", directory.display()),
            None => "loaded from cache".into(),
        }
    }

    /// The code that [`Self::store`] kept. `kind` names the form and the compiler's version
    /// ("cubin 12.9"), as one compiler's output may be wrong for another driver.
    pub(crate) fn load(&self, architecture: &str, kind: &str) -> Option<Vec<u8>> {
        let directory = self.directory.as_deref()?;
        let key = Key::new(architecture, kind);
        match key.load(directory) {
            Ok(code) => Some(code),
            Err(error) => {
                tracing::debug!(directory = %directory.display(), file = key.file_name, %error, "no cached kernel");
                None
            }
        }
    }

    /// Keeps `code` for later processes, replacing what was there.
    pub(crate) fn store(&self, architecture: &str, kind: &str, code: &[u8]) {
        let Some(directory) = self.directory.as_deref() else { return };
        let key = Key::new(architecture, kind);
        if let Err(error) = key.store(directory, code) {
            tracing::debug!(directory = %directory.display(), file = key.file_name, %error, "kernel not cached");
        }
    }
}

struct Key {
    digest: [u8; DIGEST_BYTES],
    file_name: String,
}

impl Key {
    fn new(architecture: &str, kind: &str) -> Self {
        let mut hasher = Sha256::new();
        for part in [SOURCE, architecture, kind] {
            // The length keeps ("a", "bc") and ("ab", "c") apart.
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let digest: [u8; DIGEST_BYTES] = hasher.finalize().into();
        let hex: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        let file_name = format!("{}-{}-{hex}", readable(architecture), readable(kind));
        Self { digest, file_name }
    }

    fn digest_with(&self, code: &[u8]) -> [u8; DIGEST_BYTES] {
        Sha256::new().chain_update(self.digest).chain_update(code).finalize().into()
    }

    fn load(&self, directory: &Path) -> io::Result<Vec<u8>> {
        let most = DIGEST_BYTES as u64 + MAX_CODE_BYTES;
        let bytes = private_file::read(directory, &self.file_name, most)?;
        match bytes.split_at_checked(DIGEST_BYTES) {
            Some((digest, code)) if digest == self.digest_with(code) => Ok(code.to_vec()),
            _ => Err(refused("its digest does not match")),
        }
    }

    fn store(&self, directory: &Path, code: &[u8]) -> io::Result<()> {
        private_file::replace(directory, &self.file_name, &[&self.digest_with(code), code])
    }
}

/// `text` as part of a file name, for people who look into the directory; the digest beside it is
/// what tells keys apart.
fn readable(text: &str) -> String {
    let keep = |character: char| {
        if character.is_ascii_alphanumeric() || character == '_' { character } else { '_' }
    };
    text.chars().take(32).map(keep).collect()
}

fn refused(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::FileType;
    use rustix::process::geteuid;

    use super::*;

    const CODE: &[u8] = b"\x7fELF and so on";

    fn cache_in(directory: &tempfile::TempDir) -> (CodeCache, PathBuf) {
        let path = directory.path().join("kvferry").join("kernels");
        (CodeCache { directory: Some(path.clone()) }, path)
    }

    fn only_file(directory: &Path) -> PathBuf {
        let files: Vec<_> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].clone()
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn source_defines_the_entries_and_the_same_sizes() {
        for entry in Entry::ALL {
            let ways = ["(const ", "("].map(|after| format!("\n{}{after}", entry.name()));
            assert!(ways.iter().any(|way| SOURCE.contains(way)), "{entry:?}");
        }
        for (name, value) in [
            ("BLOCK", BLOCK_THREADS as usize),
            ("INLINE_DESCRIPTORS", INLINE_DESCRIPTORS),
            ("INLINE_FEW_DESCRIPTORS", INLINE_FEW_DESCRIPTORS),
            ("COMPACT_DESCRIPTORS", COMPACT_DESCRIPTORS),
            ("COMPACT_FEW_DESCRIPTORS", COMPACT_FEW_DESCRIPTORS),
        ] {
            assert!(SOURCE.contains(&format!("#define {name} {value}\n")), "{name}");
        }
    }

    #[test]
    fn grid_gives_each_descriptor_a_warp_until_the_bound() {
        for (count, lanes, max_blocks, blocks) in [
            (1, 32, 528, 1),
            (8, 32, 528, 1),
            (9, 32, 528, 2),
            (9, 64, 528, 3),
            (8192, 32, 528, 528),
            (u32::MAX, 64, u32::MAX, 1 << 30),
            (0, 32, 528, 1),
            (100, 32, 0, 1),
        ] {
            assert_eq!(
                grid(count, lanes, max_blocks),
                blocks,
                "{count} descriptors, {lanes} lanes"
            );
        }
    }

    #[test]
    fn stored_code_is_loaded_for_the_same_architecture_and_kind_only() {
        let directory = tempfile::tempdir().unwrap();
        let (cache, path) = cache_in(&directory);
        assert_eq!(cache.load("sm_90", "cubin 12.9"), None);
        cache.store("sm_90", "cubin 12.9", b"first");
        cache.store("sm_90", "cubin 12.9", CODE);
        assert_eq!(cache.load("sm_90", "cubin 12.9").as_deref(), Some(CODE));
        assert_eq!(cache.load("sm_90", "cubin 13.5"), None);
        assert_eq!(cache.load("sm_90c", "ubin 12.9"), None);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(only_file(&path)).unwrap().permissions().mode() & 0o077, 0);
    }

    #[test]
    fn hostile_names_stay_inside_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let (cache, path) = cache_in(&directory);
        let architecture = format!("../../gfx90a:sramecc+:xnack-/\0{}", "x".repeat(500));
        cache.store(&architecture, "../hsaco", CODE);
        assert_eq!(cache.load(&architecture, "../hsaco").as_deref(), Some(CODE));
        only_file(&path);
        // Both names read the same once sanitised.
        assert_eq!(cache.load(&architecture.replace(':', "+"), "../hsaco"), None);
    }

    #[test]
    fn cut_or_altered_file_is_ignored_and_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (cache, path) = cache_in(&directory);
        cache.store("sm_90", "cubin", CODE);
        let file = only_file(&path);
        let whole = fs::read(&file).unwrap();
        for len in 0..whole.len() {
            fs::write(&file, &whole[..len]).unwrap();
            assert_eq!(cache.load("sm_90", "cubin"), None, "cut to {len} bytes");
        }
        for at in 0..whole.len() {
            let mut altered = whole.clone();
            altered[at] ^= 1;
            fs::write(&file, &altered).unwrap();
            assert_eq!(cache.load("sm_90", "cubin"), None, "byte {at} altered");
        }
        cache.store("sm_90", "cubin", CODE);
        assert_eq!(cache.load("sm_90", "cubin").as_deref(), Some(CODE));
    }

    #[test]
    fn file_of_another_key_is_ignored_under_this_name() {
        let directory = tempfile::tempdir().unwrap();
        let (cache, path) = cache_in(&directory);
        cache.store("sm_80", "cubin", CODE);
        fs::rename(only_file(&path), path.join(Key::new("sm_90", "cubin").file_name)).unwrap();
        assert_eq!(cache.load("sm_90", "cubin"), None);
    }

    #[test]
    fn what_others_may_write_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (cache, path) = cache_in(&directory);
        cache.store("sm_90", "cubin", CODE);
        let file = only_file(&path);
        for mode in [0o620, 0o602] {
            set_mode(&file, mode);
            assert_eq!(cache.load("sm_90", "cubin"), None, "file mode {mode:o}");
        }
        set_mode(&file, 0o600);
        for mode in [0o770, 0o1777] {
            set_mode(&path, mode);
            assert_eq!(cache.load("sm_90", "cubin"), None, "directory mode {mode:o}");
            cache.store("sm_80", "cubin", CODE);
            assert_eq!(only_file(&path), file, "stored into a directory of mode {mode:o}");
        }
        set_mode(&path, 0o700);
        assert_eq!(cache.load("sm_90", "cubin").as_deref(), Some(CODE));
    }

    #[test]
    fn what_another_user_owns_is_refused() {
        if !geteuid().is_root() {
            eprintln!("SKIP what_another_user_owns_is_refused: only root can give files away");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (cache, path) = cache_in(&directory);
        cache.store("sm_90", "cubin", CODE);
        let file = only_file(&path);
        std::os::unix::fs::chown(&file, Some(12345), None).unwrap();
        assert_eq!(cache.load("sm_90", "cubin"), None, "file");
        std::os::unix::fs::chown(&file, Some(0), None).unwrap();
        std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
        assert_eq!(cache.load("sm_90", "cubin"), None, "directory");
    }

    #[test]
    fn link_or_pipe_in_place_of_the_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (cache, path) = cache_in(&directory);
        cache.store("sm_90", "cubin", CODE);
        let file = only_file(&path);
        let elsewhere = directory.path().join("elsewhere");
        fs::rename(&file, &elsewhere).unwrap();
        symlink(&elsewhere, &file).unwrap();
        assert_eq!(cache.load("sm_90", "cubin"), None);
        fs::remove_file(&file).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &file, FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
        assert_eq!(cache.load("sm_90", "cubin"), None);
    }

    #[test]
    fn cache_without_a_usable_directory_does_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for directory in [None, Some(file.path().to_owned()), Some(file.path().join("below"))] {
            let cache = CodeCache { directory };
            cache.store("sm_90", "cubin", CODE);
            assert_eq!(cache.load("sm_90", "cubin"), None);
        }
    }
}
