//! What a user can say to a bench.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvferry_engine::DeviceName;

use crate::case::Tokens;
use crate::decode;
use crate::forms::Form;
use crate::interference::{self, Interference};
use crate::model::HeadSlice;
use crate::mooncake::PeerEngine;
use crate::offload;
use crate::shape::Selection;

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Shapes by id or name, separated by commas; `daily` and `all` are lists [default: daily, with
    /// --interference R2,R6,R3]
    #[arg(long)]
    pub(crate) shape: Option<Selection>,
    /// Move these models' KV caches instead, separated by commas: deepseek-v3, qwen2.5-7b, qwen3-4b
    /// or kimi-k3
    #[arg(long, value_delimiter = ',', conflicts_with = "shape")]
    pub(crate) model: Vec<String>,
    /// Move the KV cache of the model that this Hugging Face config.json describes
    #[arg(long, value_name = "PATH", conflicts_with_all = ["shape", "model"])]
    pub(crate) model_config: Option<PathBuf>,
    /// Tokens of a model's KV cache; `levels` is one after the other of 16 from 64 to 131072, of
    /// which those that do not fit into host memory are left out
    #[arg(long, default_value = "4096")]
    pub(super) tokens: Tokens,
    /// Tokens of a page of a model's KV cache
    #[arg(long, default_value = "64")]
    pub(super) page: NonZeroU64,
    /// Move one rank's slice of a model's heads, such as 1/4: the prefill process holds the first
    /// of 4 slices of each token, the decode process the rows of all 4
    #[arg(long, value_name = "K/N")]
    pub(crate) head_slice: Option<HeadSlice>,
    /// How the request says which bytes to move; the same bytes in every form [default: ranges; of
    /// --cache paged]
    #[arg(long, conflicts_with = "interference")]
    pub(crate) form: Option<Form>,
    /// Batches that are submitted before any is waited for. All copy the same bytes to the same
    /// destination, so that it can be verified although they overlap in time; times, bytes and
    /// rates are those of all of them together
    #[arg(long, value_name = "N", default_value = "1", conflicts_with = "interference")]
    pub(crate) in_flight: NonZeroUsize,
    /// Which way bytes go: write, read or both; with --transport offload and --interference decode
    /// h2d, d2h, both or all [default: write; there all]
    #[arg(long)]
    pub(crate) op: Option<Ops>,
    /// Where the prefill process keeps its KV cache: host, cuda:N or rocm:N
    #[arg(long, default_value = "host")]
    pub(crate) device: DeviceName,
    /// Where the decode process keeps its own [default: the same]
    #[arg(long)]
    pub(crate) peer_device: Option<DeviceName>,
    /// Timed transfers of each case; of offload fewer, but at least 3, where they take 2 s together
    /// [default: 20, of --tokens levels 3]
    #[arg(long)]
    iterations: Option<NonZeroU64>,
    /// How bytes move
    #[arg(long, default_value = "peer")]
    pub(crate) transport: Transport,
    /// Connections of --transport tcp, and of its ceiling
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) lanes: u16,
    /// Measure another engine's transfers of the same pieces, too, after ours in the same run: its
    /// best of several settings counts
    #[arg(long, value_name = "ENGINE", conflicts_with_all = ["interference", "in_flight"])]
    pub(super) peer: Option<PeerEngine>,
    /// Also time a bare kernel launch of the same descriptors, packed, without the engine; of at
    /// most 2 million
    #[arg(long)]
    pub(crate) bare: bool,
    /// Write one JSON object a line to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Seed of layouts and patterns
    #[arg(long, default_value = "1")]
    pub(crate) seed: u64,
    /// Measure transfers beside a compute load in the process that moves, and what each costs the
    /// other: at high and at normal stream priority, back to back and paced, three runs each in
    /// rotated order
    #[arg(long, value_name = "LOAD", conflicts_with_all = ["bare", "iterations"])]
    pub(crate) interference: Option<Interference>,
    /// Target rate of the paced transfers, in bursts every 50 ms [default: a tenth of what the
    /// shape reaches alone; of --interference decode 2.5]
    #[arg(long, value_name = "GIB_PER_S", requires = "interference", value_parser = interference::rate)]
    pub(crate) rate: Option<f64>,
    /// Milliseconds of each measurement of --interference
    #[arg(long, value_name = "MS", default_value = "500", value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub(crate) window: u64,
    #[command(flatten)]
    pub(crate) offload: offload::Options,
    #[command(flatten)]
    pub(crate) decode: decode::Options,
}

impl Options {
    pub(crate) fn iterations(&self) -> usize {
        let usual = if self.tokens == Tokens::Levels { 3 } else { 20 };
        self.iterations.map_or(usual, |iterations| iterations.get() as usize)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Ops {
    /// The prefill process writes
    Write,
    /// The decode process reads
    Read,
    /// Write, then read; of offload h2d and d2h at once
    Both,
    /// From host memory to the GPU
    H2d,
    /// From the GPU to host memory
    D2h,
    /// H2d, d2h and both at once, one after the other
    All,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Transport {
    /// Directly into the other process's memory, mapped over IPC
    Peer,
    /// Over sockets of loopback; the ceiling is that of bare sockets
    Tcp,
    /// Between a GPU and host memory, in one process; the ceiling is one contiguous DMA
    Offload,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Tcp => "tcp",
            Self::Offload => "offload",
        }
    }
}
