//! Explains what kvferry finds on this machine, and what it would use.

use std::sync::Arc;

use comfy_table::{Table, presets};
use kvferry_engine::device::{Capabilities, Device, Error};
use kvferry_engine::{Config, DeviceName, KNOBS, Source, open_device, visible_gpus};

use crate::Failure;

pub(crate) fn run() -> Result<(), Failure> {
    let config = Config::from_env()?;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    println!("kvferry {}, host identity (boot id) {}", env!("CARGO_PKG_VERSION"), boot.trim());
    println!("\nDevices");
    let mut devices = vec![open_device(DeviceName::Host, &config)?];
    let mut missing = Vec::new();
    for gpus in visible_gpus() {
        let names = gpus.unwrap_or_else(|error| {
            missing.push(error);
            Vec::new()
        });
        for name in names {
            match open_device(name, &config) {
                Ok(device) => devices.push(device),
                Err(error) => missing.push(error),
            }
        }
    }
    println!("{}", device_table(&devices));
    for error in &missing {
        println!("not available: {}", explain(error));
    }
    println!("\nReach (row copies to and from column, between two processes)");
    println!("{}", reach_table(&devices));
    println!("\nKnobs");
    println!("{}", knob_table(&config));
    Ok(())
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
        return "not reachable: no peer access".into();
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
        let source = match setting.source {
            Source::Default => "default",
            Source::Environment => "environment",
        };
        table.add_row([knob.name, &setting.value, source, knob.accepts, knob.about]);
    }
    table
}

fn plain_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table
}
