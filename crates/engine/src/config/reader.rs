//! Reading knobs: each value by the parser of its field, and where it came from.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::knobs::{KNOBS, UNSET, knob};

/// A knob's value and where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The environment variable.
    pub name: &'static str,
    /// The value in force.
    pub value: String,
    /// Where it came from.
    pub source: Source,
}

/// Where a knob's value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nobody set it.
    Default,
    /// The environment variable of that name.
    Environment,
    /// A profile of the device, which `kvferry doctor --calibrate` made.
    Profile,
    /// The program that runs the engine: a field of [`Config`](super::Config) that it changed.
    Program,
}

/// A knob with a value that it does not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?} is not accepted: expected {accepts}")]
pub struct KnobError {
    /// The environment variable.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// What it accepts.
    pub accepts: &'static str,
}

pub(super) const CACHE: &str = "MC_KVFERRY_CACHE_DIR";

/// Looks knobs up, and keeps the values in force.
pub(super) struct Reader<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
    settings: Vec<Setting>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<OsString>) -> Self {
        Self { lookup, settings: Vec::with_capacity(KNOBS.len()) }
    }

    /// Every knob that was read, in order.
    pub(super) fn into_settings(self) -> Vec<Setting> {
        self.settings
    }

    pub(super) fn read<T>(
        &mut self,
        name: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<T, KnobError> {
        let knob = knob(name);
        let (text, source) = match (self.lookup)(name) {
            Some(value) => (value.to_string_lossy().into_owned(), Source::Environment),
            None => (knob.default.to_owned(), Source::Default),
        };
        let parsed = parse(text.trim());
        self.settings.push(Setting { name, value: text.trim().to_owned(), source });
        parsed.ok_or(KnobError { name, value: text, accepts: knob.accepts })
    }

    /// As [`Self::read`], for a knob without a default.
    pub(super) fn read_if_set<T>(
        &mut self,
        name: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, KnobError> {
        if (self.lookup)(name).is_some() {
            return self.read(name, parse).map(Some);
        }
        self.settings.push(Setting { name, value: UNSET.to_owned(), source: Source::Default });
        Ok(None)
    }

    pub(super) fn cache_directory(&mut self) -> Result<Option<PathBuf>, KnobError> {
        if let Some(value) = (self.lookup)(CACHE) {
            let path = PathBuf::from(&value);
            let shown = value.to_string_lossy().into_owned();
            let off = matches!(shown.trim(), "off" | "0");
            if !off && !path.is_absolute() {
                return Err(KnobError { name: CACHE, value: shown, accepts: knob(CACHE).accepts });
            }
            self.settings.push(Setting { name: CACHE, value: shown, source: Source::Environment });
            return Ok((!off).then_some(path));
        }
        let absolute =
            |name: &str| (self.lookup)(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
        let path = base.map(|base| base.join("kvferry"));
        let value = path.as_ref().map_or("off".into(), |path| path.display().to_string());
        self.settings.push(Setting { name: CACHE, value, source: Source::Default });
        Ok(path)
    }
}

fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Bytes, with an optional binary suffix.
fn size(text: &str) -> Option<u64> {
    let suffixes = [("K", 10), ("M", 20), ("G", 30)];
    let (digits, shift) = suffixes
        .into_iter()
        .find_map(|(suffix, shift)| Some((text.strip_suffix(suffix)?, shift)))
        .unwrap_or((text, 0));
    number(digits)?.checked_mul(1 << shift)
}

pub(super) fn within(range: RangeInclusive<u64>) -> impl Fn(&str) -> Option<u64> {
    move |text| number(text).filter(|number| range.contains(number))
}

pub(super) fn sized(range: RangeInclusive<u64>) -> impl Fn(&str) -> Option<u64> {
    move |text| size(text).filter(|size| range.contains(size))
}

/// From `least` to a day.
pub(super) fn seconds(least: u64) -> impl Fn(&str) -> Option<Duration> {
    let within = within(least..=86_400);
    move |text| within(text).map(Duration::from_secs)
}

pub(super) fn on_or_off(text: &str) -> Option<bool> {
    match text {
        "on" | "1" => Some(true),
        "off" | "0" => Some(false),
        _ => None,
    }
}
