//! Names in the environment that look like knobs and are none.

use std::fmt::{self, Display};

use crate::config::{Config, KNOBS, Knob};

/// A name that looks like a knob and is none of this version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownKnob {
    /// The environment variable.
    pub name: String,
    /// The knob that was probably meant.
    pub meant: Option<&'static str>,
}

impl UnknownKnob {
    fn new(name: String) -> Self {
        // What all have in front makes nothing alike.
        let own = |name: &'_ str| {
            let rest = name.strip_prefix("MC_KVFERRY_").or_else(|| name.strip_prefix("MC_"));
            rest.unwrap_or(name).to_owned()
        };
        let likeness = |knob: &Knob| strsim::jaro_winkler(&own(&name), &own(knob.name));
        let alike = KNOBS.iter().map(|knob| (likeness(knob), knob.name));
        let meant = alike.max_by(|one, other| one.0.total_cmp(&other.0));
        let meant = meant.filter(|(likeness, _)| *likeness > 0.8).map(|(_, knob)| knob);
        Self { name, meant }
    }
}

impl Display for UnknownKnob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not a knob of this version", self.name)?;
        match self.meant {
            Some(meant) => write!(f, "; was {meant} meant?"),
            None => Ok(()),
        }
    }
}

impl Config {
    /// Warns about names in the environment that look like knobs and are none, as
    /// [`Config::from_env`] does.
    pub fn warn_of_unknown_names() {
        for unknown in Self::unknown_names() {
            tracing::warn!("{unknown}; `kvferry doctor` lists the knobs");
        }
    }

    /// Names in the environment that look like knobs and are none, sorted.
    pub fn unknown_names() -> Vec<UnknownKnob> {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        let mut names: Vec<_> = unknown(names).collect();
        names.sort_unstable();
        names.into_iter().map(UnknownKnob::new).collect()
    }
}

/// Names that look like knobs of ours and are not.
fn unknown(names: impl Iterator<Item = String>) -> impl Iterator<Item = String> {
    names.filter(|name| {
        name.starts_with("MC_KVFERRY_") && KNOBS.iter().all(|knob| knob.name != name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_like_a_knob_that_is_none_is_noticed() {
        let names = ["MC_KVFERRY_STREAM", "MC_KVFERRY_STREAMS", "MC_TCP_LANES_PER_PEER", "PATH"]
            .map(String::from);
        assert_eq!(unknown(names.into_iter()).collect::<Vec<_>>(), ["MC_KVFERRY_STREAM"]);
    }

    #[test]
    fn a_typo_is_answered_with_the_knob_that_was_meant_and_nonsense_with_none() {
        for (typo, meant) in [
            ("MC_KVFERRY_STREAM", Some("MC_KVFERRY_STREAMS")),
            ("MC_KVFERRY_TILES_BYTES", Some("MC_KVFERRY_TILE_BYTES")),
            ("MC_KVFERRY_TCP_LANES", Some("MC_TCP_LANES_PER_PEER")),
            ("MC_KVFERRY_PINED_MB", Some("MC_KVFERRY_PINNED_MB")),
            ("MC_KVFERRY_FORCE_TCP", Some("MC_FORCE_TCP")),
            ("MC_KVFERRY_XYZZY", None),
            ("MC_KVFERRY_", None),
        ] {
            assert_eq!(UnknownKnob::new(typo.into()).meant, meant, "{typo}");
        }
        let text = UnknownKnob::new("MC_KVFERRY_STREAM".into()).to_string();
        assert!(text.ends_with("was MC_KVFERRY_STREAMS meant?"), "{text}");
    }
}
