//! The hidden command `kvferry decoder`: the decode load in a process of its own, which prints its
//! steps until nobody reads them.

use std::io::Write;
use std::time::Duration;

use clap::Args;
use kvferry_engine::device::load::{LoadKind, Loads};
use kvferry_engine::{Config, DeviceName, open_device};

use super::steps::{Line, steps_of};
use crate::Failure;

#[derive(Args, Debug)]
#[group(skip)]
pub(crate) struct Options {
    #[arg(long)]
    device: DeviceName,
}

/// How often steps are printed. The steps themselves run on a thread that does not wait for this.
const PRINT_EVERY: Duration = Duration::from_millis(5);

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let device = open_device(options.device, &Config::from_env()?)?;
    let load = Loads::open(device.info())?.start(LoadKind::Decode, true)?;
    let mut output = std::io::stdout().lock();
    let mut lines = serde_json::to_vec(&Line::About { about: load.about().to_owned() })?;
    lines.push(b'\n');
    // Ends when the reader is gone.
    while output.write_all(&lines).and_then(|()| output.flush()).is_ok() {
        lines.clear();
        // The clock is what is waited for: steps are read together, not one by one.
        std::thread::sleep(PRINT_EVERY);
        for step in steps_of(&load.read()?) {
            serde_json::to_writer(&mut lines, &Line::Step(step))?;
            lines.push(b'\n');
        }
    }
    Ok(())
}
