//! What a caller asks for: which bytes, in which form, and in which order with its own work.

use std::fmt::{self, Display};
use std::str::FromStr;

use kvferry_device::Producer;

use crate::batch::BatchId;
use crate::plan::{Form, Op, Paged, Range, Strided};
use crate::target::Target;

/// Bytes to copy, in one of three forms. Each form's list is one batch.
#[derive(Clone, Copy, Debug)]
pub enum Copies<'a> {
    /// Range by range.
    Ranges(&'a [Range]),
    /// Runs of pieces with constant strides; a few bytes for the host however many pieces.
    Strided(&'a [Strided]),
    /// Pages by their numbers, of all layers; four bytes a page and end for the host.
    Paged(&'a [Paged<'a>]),
}

impl Copies<'_> {
    /// Pieces, empty ones too; of more than 64 bits can count, as many as they can.
    pub(crate) fn count(&self) -> u64 {
        fn of_forms(list: &[impl Form]) -> u64 {
            list.iter().map(|form| form.grid().count()).fold(0, u64::saturating_add)
        }
        match self {
            Self::Ranges(list) => list.len() as u64,
            Self::Strided(list) => of_forms(list),
            Self::Paged(list) => of_forms(list),
        }
    }

    /// Whether there is no byte to copy.
    pub(crate) fn are_empty(&self) -> bool {
        match self {
            Self::Ranges(list) => list.iter().all(|range| range.len == 0),
            Self::Strided(list) => list.iter().all(|form| form.grid().is_empty()),
            // Lists of different lengths are an error, and not nothing.
            Self::Paged(list) => list.iter().all(|form| {
                form.grid().is_empty() && form.local.numbers.len() == form.remote.numbers.len()
            }),
        }
    }
}

macro_rules! from_lists {
    ($($form:ident($item:ty);)*) => {
        $(impl<'a> From<&'a [$item]> for Copies<'a> {
            fn from(list: &'a [$item]) -> Self {
                Self::$form(list)
            }
        }

        impl<'a> From<&'a Vec<$item>> for Copies<'a> {
            fn from(list: &'a Vec<$item>) -> Self {
                Self::$form(list)
            }
        }

        impl<'a, const N: usize> From<&'a [$item; N]> for Copies<'a> {
            fn from(list: &'a [$item; N]) -> Self {
                Self::$form(list)
            }
        })*
    };
}

from_lists! {
    Ranges(Range);
    Strided(Strided);
    Paged(Paged<'a>);
}

/// One target's share of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The other end.
    pub target: &'a Target,
    /// Which way bytes go.
    pub op: Op,
    /// Which bytes.
    pub copies: Copies<'a>,
}

/// How a batch is run.
#[derive(Clone, Copy, Debug, Default)]
pub struct SubmitOptions<'a> {
    /// Work of the caller's own that has to be done before the first byte is read or written: what
    /// makes the source of a write, or what still uses the destination of a read. Without it there
    /// is no order with the caller's streams.
    pub after: Option<Producer>,
    /// Batches of this engine and of the device that copies which have to end before that, too. The
    /// device waits for them, the host does not. How they end makes no difference. One over TCP has to
    /// have ended.
    pub behind: &'a [BatchId],
    /// Leaves every multiprocessor to the model: DMA alone, one 2-D copy where there are strides.
    pub without_kernel: bool,
    /// How bytes move between a GPU and host memory that it reaches; means nothing for others.
    pub offload: OffloadMode,
}

/// How bytes move between a GPU's memory and host memory that it reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OffloadMode {
    /// What the knob of the direction says (`MC_KVFERRY_OFFLOAD_STORE`, `MC_KVFERRY_OFFLOAD_LOAD`)
    /// and, where that is `auto` too, what `MC_KVFERRY_POLICY` chooses by the shape of the batch.
    #[default]
    Auto,
    /// One DMA for each merged range, one 2-D DMA for each run with strides: no multiprocessor.
    Direct,
    /// The copy kernel reads or writes host memory in place.
    Kernel,
    /// A kernel gathers into, or scatters from, device memory, and a DMA does the rest.
    Staged,
}

impl OffloadMode {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Direct, Self::Kernel, Self::Staged];

    /// As knobs and command lines spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::Kernel => "kernel",
            Self::Staged => "staged",
        }
    }
}

impl Display for OffloadMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No offload mode has that name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no offload mode: expected auto, direct, kernel or staged")]
pub struct UnknownMode(String);

impl FromStr for OffloadMode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        let named = Self::ALL.into_iter().find(|mode| mode.name() == text);
        named.ok_or_else(|| UnknownMode(text.to_owned()))
    }
}
