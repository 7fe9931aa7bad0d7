//! What a user asks of a bench of offload: cases, modes and directions.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvferry_engine::OffloadMode;

use super::cases::{self, Cache, Case, HostLayout};
use super::lane::direction_name;
use crate::Failure;
use crate::bench::{self, Ops};
use crate::case::Direction;

#[derive(Args, Debug)]
#[command(next_help_heading = "Options of --transport offload and --interference decode")]
#[group(skip)]
pub(crate) struct Options {
    /// How bytes move between the GPU and host memory, separated by commas; `all` is direct, kernel,
    /// staged and auto [default: all]
    #[arg(long, value_delimiter = ',', value_name = "MODE")]
    mode: Vec<Mode>,
    /// Move pages of a KV cache, separated by commas, such as 256x64x4096 for 256 pages of 64
    /// layers of 4096 bytes: layer by layer on the GPU, page by page on the host. :4 behind it
    /// makes runs of 4 neighbouring pages
    #[arg(long, value_delimiter = ',', value_name = "PAGESxLAYERSxBYTES")]
    pub(crate) cache: Vec<Cache>,
    /// Measure the alignment sweep of W10: items of 512 to 1600 bytes in steps of 16
    #[arg(long)]
    sweep: bool,
    /// Measure the 81 points of W11: 16 to 4096 pieces of 1 to 32 KiB
    #[arg(long)]
    grid: bool,
    /// How the host's memory lies [default: packed; of W10 and W12, which are about it, scattered]
    #[arg(long, value_enum)]
    pub(super) host_layout: Option<HostLayout>,
    /// Pieces of a shape or a sweep, at most: longer ones are cut
    #[arg(long, value_name = "N", default_value = "4194304")]
    most_pieces: NonZeroU64,
    /// Time so many transfers of each case, and write each of them to --json as a line of its own,
    /// too
    #[arg(long, value_name = "N", conflicts_with = "iterations", requires = "json")]
    pub(super) samples: Option<NonZeroU64>,
    /// Draw what was measured, as SVG: sweeps and grids against their sizes, other shapes as bars
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
}

/// How bytes move, as a command line says it.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Mode {
    /// DMA: one a piece, one 2-D copy a run of strides
    Direct,
    /// The copy kernel on mapped host memory
    Kernel,
    /// Gather or scatter in device memory, and one DMA
    Staged,
    /// What the engine chooses by the shape and its policy
    Auto,
    /// One after the other
    All,
}

impl Options {
    /// Whether any of them was given.
    pub(crate) fn are_given(&self) -> bool {
        !self.mode.is_empty()
            || !self.cache.is_empty()
            || self.sweep
            || self.grid
            || self.host_layout.is_some()
            || self.samples.is_some()
            || self.plot.is_some()
    }

    /// Only modes, a cache and a plot mean something beside a decoder.
    pub(crate) fn refuse_for_decode(&self) -> Result<(), Failure> {
        let has_more =
            self.sweep || self.grid || self.host_layout.is_some() || self.samples.is_some();
        match has_more {
            true => Err("--sweep, --grid, --host-layout and --samples are of --transport offload without --interference".into()),
            false => Ok(()),
        }
    }

    /// The modes asked for, each once.
    pub(crate) fn modes(&self) -> Vec<OffloadMode> {
        let every =
            [OffloadMode::Direct, OffloadMode::Kernel, OffloadMode::Staged, OffloadMode::Auto];
        let asked = |mode: &OffloadMode| {
            self.mode.is_empty()
                || self.mode.iter().any(|asked| match asked {
                    Mode::Direct => *mode == OffloadMode::Direct,
                    Mode::Kernel => *mode == OffloadMode::Kernel,
                    Mode::Staged => *mode == OffloadMode::Staged,
                    Mode::Auto => *mode == OffloadMode::Auto,
                    Mode::All => true,
                })
        };
        every.into_iter().filter(asked).collect()
    }

    pub(super) fn cases(&self, bench: &bench::Options) -> Result<Vec<Case>, Failure> {
        let most_pieces = self.most_pieces.get();
        let mut cases = Vec::new();
        let named = match &bench.shape {
            Some(selection) => Some(selection.clone()),
            None if self.cache.is_empty() && !self.sweep && !self.grid => {
                Some(DEFAULT_SHAPES.parse()?)
            }
            None => None,
        };
        for shape in named.iter().flat_map(|selection| &selection.shapes) {
            cases.push(Case::Shape { shape: (*shape).clone(), most_pieces });
        }
        cases.extend(self.cache.iter().copied().map(Case::Cache));
        if self.sweep {
            let count = SWEEP_PIECES.min(most_pieces);
            cases.extend(cases::item_sizes().map(|bytes| Case::Item { bytes, count }));
        }
        if self.grid {
            let points = cases::grid().filter(|&(count, _)| count <= most_pieces);
            cases.extend(points.map(|(count, bytes)| Case::Point { count, bytes }));
        }
        match cases.is_empty() {
            true => {
                Err("--most-pieces leaves no point of the grid: it has 16 pieces or more".into())
            }
            false => Ok(cases),
        }
    }
}

const DEFAULT_SHAPES: &str = "R6,W09b,W13";
/// Top-k of 2048 tokens in 78 layers, as W10 in the table.
const SWEEP_PIECES: u64 = 2048 * 78;

/// Directions that a line moves at once.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Ways(pub(crate) &'static [Direction]);

impl Ways {
    pub(crate) const H2D: Self = Self(&[Direction::Read]);
    pub(crate) const D2H: Self = Self(&[Direction::Write]);
    pub(crate) const BOTH: Self = Self(&[Direction::Read, Direction::Write]);

    /// What `--op` asks for.
    pub(crate) fn of(op: Option<Ops>) -> Result<Vec<Self>, Failure> {
        Ok(match op {
            None | Some(Ops::All) => vec![Self::H2D, Self::D2H, Self::BOTH],
            Some(Ops::H2d) => vec![Self::H2D],
            Some(Ops::D2h) => vec![Self::D2H],
            Some(Ops::Both) => vec![Self::BOTH],
            Some(Ops::Write | Ops::Read) => {
                return Err("between a GPU and host memory --op is h2d, d2h, both or all".into());
            }
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            [one] => direction_name(*one),
            _ => "both",
        }
    }
}
