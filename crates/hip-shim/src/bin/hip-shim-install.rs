//! Writes the stand-ins for AMD's libraries to a folder: `hip-shim-install FOLDER`. What version
//! they are of, and what they lack, KVFERRY_HIP_SHIM_VERSION and KVFERRY_HIP_SHIM_ABSENT say.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("hip-shim-install: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let folder: PathBuf = std::env::args_os().nth(1).ok_or("which folder?")?.into();
    let version = match std::env::var("KVFERRY_HIP_SHIM_VERSION") {
        Ok(text) => text.parse().map_err(|error| format!("version {text}: {error}"))?,
        Err(_) => hip_shim::VERSION,
    };
    let absent = std::env::var("KVFERRY_HIP_SHIM_ABSENT").unwrap_or_default();
    let absent: Vec<&str> = absent.split(',').filter(|name| !name.is_empty()).collect();
    hip_shim::install(&folder, version, &absent).map_err(|error| error.to_string())
}
