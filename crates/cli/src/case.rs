//! One thing to measure: a shape or a model's KV cache, in one direction.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::layout::Layout;
use crate::model::{HeadSlice, KvModel};
use crate::random;
use crate::shape::Selection;

/// What to move.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum Work {
    /// A shape of the table, by id.
    Shape(String),
    /// The KV cache of so many tokens, or a slice of its heads.
    Model {
        name: Option<String>,
        config: Option<PathBuf>,
        tokens: NonZeroU64,
        page: NonZeroU64,
        heads: Option<HeadSlice>,
    },
    /// Whatever the seed gives, of at most so many bytes.
    Random { most_bytes: u64, largest: bool },
}

/// How many tokens a model's KV cache has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Tokens {
    Exactly(NonZeroU64),
    /// Each of [`LEVELS`].
    Levels,
}

/// From one page of 64 to 128k: powers of two as far as 16k, and above that also halfway between.
const LEVELS: [u64; 16] = [
    64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 24_576, 32_768, 49_152, 65_536, 81_920,
    98_304, 131_072,
];

impl Tokens {
    pub(crate) fn each(self) -> Vec<NonZeroU64> {
        match self {
            Self::Exactly(tokens) => vec![tokens],
            Self::Levels => LEVELS.into_iter().filter_map(NonZeroU64::new).collect(),
        }
    }
}

impl FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "levels" => Ok(Self::Levels),
            number => number
                .parse()
                .map(Self::Exactly)
                .map_err(|_| "expected a number from 1 on, or levels".into()),
        }
    }
}

impl Work {
    /// Where its pieces lie; the same in every process for the same seed.
    pub(crate) fn layout(&self, seed: u64) -> Result<Layout, Failure> {
        match self {
            Self::Shape(id) => {
                let selection: Selection = id.parse()?;
                let shape = selection.shapes.first().ok_or("no shape")?;
                Ok(Layout::for_shape(shape, seed))
            }
            Self::Model { tokens, page, heads, .. } => {
                let model = self.model()?;
                let heads = heads.map(|slice| model.slice_of_heads(slice)).transpose()?;
                Ok(Layout::for_model(&model, *tokens, *page, heads, seed)?)
            }
            &Self::Random { most_bytes, largest } => Ok(random::layout(seed, most_bytes, largest)),
        }
    }

    /// The name to show.
    pub(crate) fn label(&self) -> Result<String, Failure> {
        match self {
            Self::Shape(id) => {
                let selection: Selection = id.parse()?;
                let shape = selection.shapes.first().ok_or("no shape")?;
                Ok(match &shape.name {
                    Some(name) => format!("{id} {name}"),
                    None => id.clone(),
                })
            }
            Self::Model { tokens, page, heads, .. } => {
                let heads = heads.map_or_else(String::new, |slice| format!(", heads {slice}"));
                Ok(format!("{} {tokens} tokens, page {page}{heads}", self.model()?.name))
            }
            Self::Random { .. } => Ok("random pieces".to_owned()),
        }
    }

    fn model(&self) -> Result<KvModel, Failure> {
        match self {
            Self::Model { config: Some(path), .. } => Ok(KvModel::from_config(path)?),
            Self::Model { name: Some(name), .. } => Ok(name.parse::<KvModel>()?),
            _ => Err("no model was named".into()),
        }
    }
}

/// Which process starts the transfer, and so which way it goes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Direction {
    /// The prefill process writes into the decode process's memory.
    Write,
    /// The decode process reads the prefill process's memory.
    Read,
}

impl Direction {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}
