//! What AMD's libraries on this machine are and have, for people who ask why something does not
//! work.

use std::path::PathBuf;

use super::compile::Compiler;
use super::library::Hip;
use crate::error::Result;

/// The HIP that this process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryReport {
    /// The file.
    pub path: PathBuf,
    /// As in `6.4.43484`.
    pub version: String,
    /// Functions that kvferry has a use for, and this version has.
    pub present: Vec<&'static str>,
    /// Those that it does not have. None of them is needed by every device: without those
    /// libamdhip64 is not loaded.
    pub absent: Vec<&'static str>,
    /// The run-time compiler, or why there is none: then every copy is DMA.
    pub compiler: Result<CompilerReport>,
}

/// The run-time compiler that belongs to the HIP of a [`LibraryReport`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompilerReport {
    /// The file.
    pub path: PathBuf,
    /// What it compiles for, without features: `gfx942`. Or why that cannot be asked.
    pub architectures: Result<Vec<String>>,
}

/// Loads libamdhip64 and its compiler, and says what they are. Needs no GPU.
///
/// `directories` are folders that the loader does not know, looked into last.
///
/// # Errors
/// [`crate::Error::LibraryMissing`] with what was said of each place that was looked into, or
/// [`crate::Error::SymbolMissing`].
pub fn describe(directories: &[PathBuf]) -> Result<LibraryReport> {
    let hip = Hip::load(directories)?;
    let names = |wanted: bool| {
        let symbols = hip.symbols().into_iter();
        symbols.filter(|&(_, present)| present == wanted).map(|(name, _)| name).collect()
    };
    let compiler = Compiler::load(hip, directories).map(|compiler| CompilerReport {
        path: compiler.hiprtc.path.clone(),
        architectures: compiler.architectures(),
    });
    Ok(LibraryReport {
        path: hip.path.clone(),
        version: hip.version.to_string(),
        present: names(true),
        absent: names(false),
        compiler,
    })
}
