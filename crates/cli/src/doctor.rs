//! Explains what kvferry finds on this machine, and what it would use; measures what it should use.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use comfy_table::{Table, presets};
use kvferry_engine::calibrate::{Effort, calibrate};
use kvferry_engine::device::{Capabilities, Device, Error};
use kvferry_engine::{
    Config, DeviceName, KNOBS, Profile, Source, Tuning, open_device, visible_gpus,
};

use crate::{Failure, machine};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Measures devices first, a few seconds each, and keeps the best values for later processes
    #[arg(long)]
    calibrate: bool,
    /// Device to measure: host, cuda:N or rocm:N; without it, every GPU
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
    let text = findings(&config)?;
    match &options.report {
        None => print!("{text}"),
        Some(file) => {
            let report = format!("{text}\nMachine\n{}", machine::facts());
            std::fs::write(file, report)
                .map_err(|e| format!("cannot write {}: {e}", file.display()))?;
            println!("wrote {}", file.display());
        }
    }
    Ok(())
}

/// All that doctor finds, as it prints it.
fn findings(config: &Config) -> Result<String, Failure> {
    let mut text = String::new();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    writeln!(text, "kvferry {version}, host identity (boot id) {}", boot.trim())?;
    writeln!(text, "\nDevices")?;
    let mut devices = vec![open_device(DeviceName::Host, config)?];
    let mut missing = Vec::new();
    for gpus in visible_gpus(config) {
        let names = gpus.unwrap_or_else(|error| {
            missing.push(error);
            Vec::new()
        });
        for name in names {
            match open_device(name, config) {
                Ok(device) => devices.push(device),
                Err(error) => missing.push(error),
            }
        }
    }
    writeln!(text, "{}", device_table(&devices))?;
    for error in &missing {
        writeln!(text, "not available: {}", explain(error))?;
    }
    #[cfg(feature = "rocm")]
    for line in rocm_libraries(config) {
        writeln!(text, "{line}")?;
    }
    writeln!(text, "\nReach (row copies to and from column, between two processes)")?;
    writeln!(text, "{}", reach_table(&devices))?;
    writeln!(text, "\nValues in force, device by device")?;
    let (table, unused) = tuning_table(&devices, config);
    writeln!(text, "{table}")?;
    for line in unused {
        writeln!(text, "{line}")?;
    }
    writeln!(text, "\nKnobs")?;
    writeln!(text, "{}", knob_table(config))?;
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

/// Which of AMD's libraries are used, and what they have. Needs no GPU.
#[cfg(feature = "rocm")]
fn rocm_libraries(config: &Config) -> Vec<String> {
    use kvferry_engine::device::rocm::describe;
    let mut lines = vec![String::new(), "ROCm libraries".to_owned()];
    if config.disable_hip {
        lines.push("not looked for: MC_DISABLE_HIP is set".into());
        return lines;
    }
    // Why there is none is among the devices that are not available.
    let Ok(report) = describe(&config.rocm_directories) else {
        lines.push("none".into());
        return lines;
    };
    lines.push(format!("HIP {}: {}", report.version, report.path.display()));
    let absent = match report.absent.is_empty() {
        true => "none absent".to_owned(),
        false => format!("absent: {}", report.absent.join(", ")),
    };
    lines.push(format!("functions: {} present, {absent}", report.present.len()));
    lines.push(match report.compiler {
        Ok(compiler) => {
            let architectures = compiler
                .architectures
                .map_or_else(|error| error.to_string(), |names| names.join(" "));
            format!("hipRTC: {}, for {architectures}", compiler.path.display())
        }
        Err(error) => format!("no hipRTC, so no copy kernel that is not cached: {error}"),
    });
    lines
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

fn reach_table(devices: &[Arc<dyn Device>]) -> Table {
    let mut table = plain_table();
    let names = devices.iter().map(|device| device.info().to_string());
    table.set_header(std::iter::once(String::new()).chain(names));
    for from in devices {
        let cells = devices.iter().map(|to| how(from, to));
        table.add_row(std::iter::once(from.info().to_string()).chain(cells));
    }
    table
}

/// What a transfer between memory of the two would use, and why not the better way.
fn how(from: &Arc<dyn Device>, to: &Arc<dyn Device>) -> String {
    let (from, to_info) = (from.as_ref(), to.info());
    if !from.reaches(&to_info.uuid) {
        // A GPU copies for host memory, which reaches none.
        return match to.reaches(&from.info().uuid) && from.info().vendor.name() == "host" {
            true => format!("peer, copied by {to_info}"),
            false => "not reachable: no peer access".into(),
        };
    }
    if !to_info.capabilities.contains(Capabilities::IPC) {
        return "same process only: no IPC".into();
    }
    let kernel = from.info().capabilities.contains(Capabilities::KERNEL);
    match (from.info().vendor.name(), kernel) {
        ("host", _) => "peer, processor copies".into(),
        (_, true) => "peer, kernel and DMA".into(),
        (_, false) => "peer, DMA only: no copy kernel".into(),
    }
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
