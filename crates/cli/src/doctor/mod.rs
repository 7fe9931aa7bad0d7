//! Explains what kvferry finds on this machine, and what it would use; measures what it should use.

mod libraries;
mod system;
mod ways;

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use comfy_table::{Table, presets};
use kvferry_engine::calibrate::{Effort, calibrate};
use kvferry_engine::device::{Device, Error};
use kvferry_engine::{
    Config, DeviceName, KNOBS, Profile, Source, Tuning, open_device, visible_gpus,
};

use crate::{Failure, machine};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Measures devices first, a few seconds each, and keeps the best values for later processes
    #[arg(long)]
    calibrate: bool,
    /// Device that --calibrate measures: host, cuda:N or rocm:N [default: every GPU]
    #[arg(long, value_name = "DEVICE", requires = "calibrate")]
    device: Option<DeviceName>,
    /// Writes all of it, and what is known of the machine, to this file instead: to send to whoever
    /// looks into a problem
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let config = Config::from_env()?;
    if options.calibrate {
        calibrate_all(&config, options.device)?;
    }
    let devices = Devices::open(&config)?;
    let text = findings(&config, &devices)?;
    match &options.report {
        None => print!("{text}"),
        Some(file) => {
            let (machine, profiles) = (machine::facts(), profiles(&config, &devices.open)?);
            std::fs::write(file, format!("{text}\nMachine\n{machine}{profiles}"))
                .map_err(|e| format!("cannot write {}: {e}", file.display()))?;
            println!("wrote {}", file.display());
        }
    }
    Ok(())
}

/// The devices that can be used, and why others cannot.
struct Devices {
    open: Vec<Arc<dyn Device>>,
    missing: Vec<Error>,
}

impl Devices {
    fn open(config: &Config) -> Result<Self, Failure> {
        let (mut open, mut missing) = (vec![open_device(DeviceName::Host, config)?], Vec::new());
        for gpus in visible_gpus(config) {
            let names = gpus.unwrap_or_else(|error| {
                missing.push(error);
                Vec::new()
            });
            for name in names {
                match open_device(name, config) {
                    Ok(device) => open.push(device),
                    Err(error) => missing.push(error),
                }
            }
        }
        Ok(Self { open, missing })
    }
}

/// All that doctor finds, as it prints it.
fn findings(config: &Config, Devices { open, missing }: &Devices) -> Result<String, Failure> {
    let mut text = String::new();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    writeln!(text, "kvferry {version}, host identity (boot id) {}", boot.trim())?;
    writeln!(text, "\nDevices")?;
    writeln!(text, "{}", device_table(open))?;
    for error in missing {
        writeln!(text, "not available: {}", explain(error))?;
    }
    writeln!(text, "\nLibraries and compilers")?;
    for line in libraries::lines(config) {
        writeln!(text, "{line}")?;
    }
    writeln!(text, "\n{}", ways::section(open, config))?;
    writeln!(text, "System")?;
    writeln!(text, "{}", system::table(config))?;
    writeln!(text, "\nValues in force, device by device")?;
    let (table, unused) = tuning_table(open, config);
    writeln!(text, "{table}")?;
    for line in unused {
        writeln!(text, "{line}")?;
    }
    writeln!(text, "\nKnobs")?;
    writeln!(text, "{}", knob_table(config))?;
    for unknown in Config::unknown_names() {
        writeln!(text, "{unknown}")?;
    }
    Ok(text)
}

/// The profiles that are used, whole.
fn profiles(config: &Config, devices: &[Arc<dyn Device>]) -> Result<String, Failure> {
    let mut text = String::new();
    for device in devices {
        // Why one is not used is among the findings.
        let Ok(Some(profile)) = Profile::load(config, device.info()) else { continue };
        let profile = serde_json::to_string_pretty(&profile)?;
        writeln!(text, "\nProfile of {}\n{profile}", device.info())?;
    }
    Ok(text)
}

/// Measures one device, or every GPU, and keeps the profiles. A GPU is measured against the next
/// one that it reaches, too.
fn calibrate_all(config: &Config, device: Option<DeviceName>) -> Result<(), Failure> {
    if config.cache_directory.is_none() {
        return Err("there is no folder to keep a profile in: set MC_KVFERRY_CACHE_DIR".into());
    }
    let gpus: Vec<_> = visible_gpus(config).into_iter().flatten().flatten().collect();
    let names = device.map_or_else(|| gpus.clone(), |name| vec![name]);
    if names.is_empty() {
        return Err("no GPU is visible to calibrate; name a device with --device".into());
    }
    for name in names {
        let device = open_device(name, config)?;
        let others = gpus.iter().filter(|other| **other != name);
        let other = others
            .filter_map(|other| open_device(*other, config).ok())
            .find(|other| device.reaches(&other.info().uuid));
        let start = Instant::now();
        let profile = calibrate(config, &device, other.as_ref(), Effort::on(&*device))?;
        let file = profile.store(config, device.info())?.unwrap_or_default();
        let link = other.map(|other| format!(", and to {}", other.info())).unwrap_or_default();
        println!(
            "{name}: measured {} times on it{link} in {:.1} s, kept in {}",
            profile.samples.len(),
            start.elapsed().as_secs_f64(),
            file.display()
        );
    }
    println!();
    Ok(())
}

/// What runs on each device and why, and which profiles are not used.
fn tuning_table(devices: &[Arc<dyn Device>], config: &Config) -> (Table, Vec<String>) {
    let mut table = plain_table();
    table.set_header(["device", "knob", "value", "from"]);
    let mut unused = Vec::new();
    for device in devices {
        let info = device.info();
        let profile = Profile::load(config, info).unwrap_or_else(|error| {
            unused.push(error.to_string());
            None
        });
        let measured = profile.as_ref().map_or("", |profile| &profile.date);
        for setting in Tuning::new(config, info, profile.as_ref()).settings() {
            let from = match setting.source {
                Source::Profile => format!("profile of {measured}"),
                source => source_name(source).to_owned(),
            };
            table.add_row([&info.to_string(), setting.name, &setting.value, &from]);
        }
    }
    (table, unused)
}

fn source_name(source: Source) -> &'static str {
    match source {
        Source::Default => "default",
        Source::Environment => "environment",
        Source::Profile => "profile",
        Source::Program => "program",
    }
}

fn explain(error: &Error) -> String {
    match error {
        Error::LibraryMissing { .. } => format!("{error} (host memory works without it)"),
        _ => error.to_string(),
    }
}

fn device_table(devices: &[Arc<dyn Device>]) -> Table {
    let mut table = plain_table();
    table.set_header([
        "device",
        "name",
        "architecture",
        "memory",
        "PCI",
        "UUID",
        "abilities",
        "copy kernel",
    ]);
    for device in devices {
        let info = device.info();
        let abilities =
            info.capabilities.iter_names().map(|(name, _)| name.to_lowercase()).collect::<Vec<_>>();
        let or_none = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
        table.add_row([
            info.to_string(),
            info.name.clone(),
            or_none(&info.architecture),
            format!("{:.1} GiB", info.memory_bytes as f64 / (1u64 << 30) as f64),
            or_none(info.pci_bus_id.as_deref().unwrap_or_default()),
            info.uuid.to_string(),
            abilities.join(", "),
            info.kernel.clone(),
        ]);
    }
    table
}

fn knob_table(config: &Config) -> Table {
    let mut table = plain_table();
    table.set_header(["knob", "value", "from", "accepts", "changes"]);
    for (knob, setting) in KNOBS.iter().zip(config.settings()) {
        let source = source_name(setting.source);
        table.add_row([knob.name, &setting.value, source, knob.accepts, knob.about]);
    }
    table
}

fn plain_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table
}
