//! How bytes would go between any two devices, and why not the better way.

use std::fmt::Write;
use std::sync::Arc;

use comfy_table::Table;
use kvferry_engine::device::{Capabilities, Device, Vendor};
use kvferry_engine::{Config, OffloadMode, Policy};

use super::plain_table;

/// How bytes go between two devices.
#[derive(Debug, PartialEq)]
struct Way {
    what: String,
    /// Why it is not the best there is, if it is not.
    why: Option<String>,
}

impl Way {
    fn best(what: impl Into<String>) -> Self {
        Self { what: what.into(), why: None }
    }

    fn worse(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: Some(why.into()) }
    }
}

/// What doctor says of it: between processes of this host, over TCP, and to host memory.
pub(super) fn section(devices: &[Arc<dyn Device>], config: &Config) -> String {
    let mut text = String::from(
        "Between two processes of this host: the row's device is the submitter's memory, the column's \
         its peer's\n",
    );
    let (table, reasons) = matrix(devices, config);
    // Writing to a string does not fail.
    let _ = writeln!(text, "{table}");
    for (why, pairs) in reasons {
        let _ = writeln!(text, "{}: {why}", pairs.join(", "));
    }
    if config.proof {
        text += "Each pair moves test patterns before traffic uses it (MC_KVFERRY_PROOF).\n";
    }
    text += "\nOver TCP, to and from a kvferry node of any host\n";
    for device in devices {
        let _ = writeln!(text, "{}", line(device, over_tcp(device, config)));
    }
    let gpus: Vec<_> = devices.iter().filter(|device| !is_host(device)).collect();
    if !gpus.is_empty() {
        text += "\nBetween a GPU and host memory of its own process\n";
    }
    for device in gpus {
        let _ = writeln!(text, "{}", line(device, offload(device, config)));
    }
    text
}

fn line(device: &Arc<dyn Device>, Way { what, why }: Way) -> String {
    let why = why.map(|why| format!("; {why}")).unwrap_or_default();
    format!("{}: {what}{why}", device.info())
}

/// The ways between all pairs, and the pairs that each reason against a better way is true of.
fn matrix(devices: &[Arc<dyn Device>], config: &Config) -> (Table, Vec<(String, Vec<String>)>) {
    let mut table = plain_table();
    let names = devices.iter().map(|device| device.info().to_string());
    table.set_header(std::iter::once(String::new()).chain(names));
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    for from in devices {
        let mut cells = vec![from.info().to_string()];
        for to in devices {
            let Way { what, why } = between(from, to, devices, config);
            cells.push(what);
            let Some(why) = why else { continue };
            let pair = format!("{} to {}", from.info(), to.info());
            match reasons.iter_mut().find(|(known, _)| *known == why) {
                Some((_, pairs)) => pairs.push(pair),
                None => reasons.push((why, vec![pair])),
            }
        }
        table.add_row(cells);
    }
    (table, reasons)
}

/// Between memory on `from` in one process and on `to` in another one, where the first submits and
/// has all devices.
fn between(
    from: &Arc<dyn Device>,
    to: &Arc<dyn Device>,
    all: &[Arc<dyn Device>],
    config: &Config,
) -> Way {
    let (here, there) = (from.info(), to.info());
    if config.force_tcp {
        let Way { what, .. } = worse_of(over_tcp(from, config), over_tcp(to, config));
        return Way::worse(what, "MC_FORCE_TCP is set");
    }
    let Some(executor) = executor(from, to, all) else {
        let why = match (here.vendor, there.vendor) {
            (Vendor::Host, _) | (_, Vendor::Host) => format!(
                "the driver cannot page-lock host memory for {}",
                if is_host(from) { there } else { here }
            ),
            (one, other) if one != other => "GPUs of two vendors do not reach each other".into(),
            _ => format!(
                "the driver gives {here} no access to {there}: see nvidia-smi topo -p2p r or rocm-smi \
                 --showtopoaccess, and the IOMMU and ACS settings"
            ),
        };
        return Way::worse("refused", format!("{why}; MC_FORCE_TCP=1 goes over TCP"));
    };
    if !there.capabilities.contains(Capabilities::IPC) {
        let why = format!(
            "no other process can open memory of {there}: its driver offers no IPC here; \
             MC_FORCE_TCP=1 goes over TCP"
        );
        return Way::worse("same process only", why);
    }
    let who = executor.info();
    let by = if who.uuid == here.uuid { String::new() } else { format!(" by {who}") };
    if who.vendor == Vendor::Host {
        return Way::best("memcpy");
    }
    match who.capabilities.contains(Capabilities::KERNEL) {
        true => Way::best(format!("kernel and DMA{by}")),
        false => Way::worse(format!("DMA{by}"), no_kernel(executor)),
    }
}

/// The device that copies: that of the submitter's memory or, for host memory, a GPU that reaches
/// both, at best the other end's own.
fn executor<'a>(
    from: &'a Arc<dyn Device>,
    to: &Arc<dyn Device>,
    all: &'a [Arc<dyn Device>],
) -> Option<&'a Arc<dyn Device>> {
    let (here, there) = (from.info().uuid, to.info().uuid);
    if from.reaches(&there) {
        return Some(from);
    }
    let able = |device: &&Arc<dyn Device>| device.reaches(&here) && device.reaches(&there);
    let able = all.iter().filter(able).min_by_key(|device| device.info().uuid != there);
    able.filter(|_| is_host(from))
}

/// A device's end of a transfer over TCP.
fn over_tcp(device: &Arc<dyn Device>, config: &Config) -> Way {
    if is_host(device) {
        return Way::best("TCP, host memory in place");
    }
    let slow = |why: String| Way::worse("TCP, piece by piece", why);
    if !config.tcp_staging {
        return slow("MC_TCP_GPU_STAGING turns staging off".into());
    }
    if !device.info().capabilities.contains(Capabilities::KERNEL) {
        return slow(no_kernel(device));
    }
    let (slots, megabytes) = (config.tcp_staging_slots, config.tcp_staging_slot_bytes >> 20);
    Way::best(format!("TCP, staged through {slots} pinned slots of {megabytes} MiB"))
}

fn worse_of(one: Way, other: Way) -> Way {
    match (&one.why, &other.why) {
        (None, Some(_)) => other,
        // Staged says more than host memory in place does.
        (None, None) if one.what.contains("in place") => other,
        _ => one,
    }
}

fn offload(device: &Arc<dyn Device>, config: &Config) -> Way {
    let kernel = device.info().capabilities.contains(Capabilities::KERNEL);
    let knobs = [config.offload_store, config.offload_load];
    if !kernel {
        return Way::worse("DMA alone", no_kernel(device));
    }
    if knobs.iter().all(|mode| *mode != OffloadMode::Auto) {
        let [store, load] = knobs;
        let why = "MC_KVFERRY_OFFLOAD_STORE and MC_KVFERRY_OFFLOAD_LOAD say so".to_owned();
        return Way::worse(format!("stores {store}, loads {load}"), why);
    }
    match config.policy {
        Policy::Strict => Way::worse("DMA alone", "MC_KVFERRY_POLICY=strict"),
        _ => Way::best("direct, kernel or staged, for each batch by its shape (MC_KVFERRY_POLICY)"),
    }
}

fn no_kernel(device: &Arc<dyn Device>) -> String {
    format!("{} has no copy kernel: {}", device.info(), device.info().kernel)
}

fn is_host(device: &Arc<dyn Device>) -> bool {
    device.info().vendor == Vendor::Host
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_device::sim::{SimOptions, sim};

    fn gpu(options: SimOptions) -> Arc<dyn Device> {
        sim(&options).expect("always there").0
    }

    fn with(knobs: &[(&str, &str)]) -> Config {
        let lookup = |asked: &str| match asked {
            "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
            _ => knobs.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.into()),
        };
        Config::from_lookup(lookup).expect("good knobs")
    }

    fn host() -> Arc<dyn Device> {
        kvferry_device::host().expect("always there")
    }

    #[test]
    fn the_best_way_is_named_and_needs_no_reason() {
        let all = [host(), gpu(SimOptions::default())];
        let config = Config::default();
        let way = |from: usize, to: usize| between(&all[from], &all[to], &all, &config);
        assert_eq!(way(0, 0), Way::best("memcpy"));
        assert_eq!(way(1, 1), Way::best("kernel and DMA"));
        assert_eq!(way(1, 0), Way::best("kernel and DMA"));
        assert_eq!(way(0, 1), Way::best("kernel and DMA by sim:0"), "the memory's own GPU copies");
        let text = section(&all, &config);
        assert!(!text.contains("sim:0 to"), "no pair has a better way:\n{text}");
        assert!(text.contains("sim:0: TCP, staged through 8 pinned slots of 16 MiB"), "{text}");
        assert!(text.contains("sim:0: direct, kernel or staged"), "{text}");
    }

    #[test]
    fn what_stands_in_the_way_of_a_better_one_is_said_of_each_pair() {
        let bare = gpu(SimOptions { kernel: false, ..SimOptions::default() });
        let closed = gpu(SimOptions { ordinal: 1, ipc: false, ..SimOptions::default() });
        let all = [host(), bare, closed];
        let config = Config::default();
        let text = section(&all, &config);
        for said in [
            "sim:0 to host:0, sim:0 to sim:0: sim:0 has no copy kernel: none: no compiler",
            "sim:0 to sim:1: the driver gives sim:0 no access to sim:1",
            "sim:1 to sim:1: no other process can open memory of sim:1",
            "sim:0: TCP, piece by piece; sim:0 has no copy kernel",
            "sim:0: DMA alone; sim:0 has no copy kernel",
        ] {
            assert!(text.contains(said), "{said:?} is not in\n{text}");
        }
    }

    #[test]
    fn knobs_that_forbid_the_better_way_are_named() {
        let all = [host(), gpu(SimOptions::default())];
        let way = |knobs| between(&all[1], &all[0], &all, &with(knobs));
        let forced = way(&[("MC_FORCE_TCP", "1")]);
        assert!(forced.what.starts_with("TCP, staged"), "{forced:?}");
        assert_eq!(forced.why.as_deref(), Some("MC_FORCE_TCP is set"));
        let slow = way(&[("MC_FORCE_TCP", "1"), ("MC_TCP_GPU_STAGING", "0")]);
        assert_eq!(slow.what, "TCP, piece by piece");
        let strict = offload(&all[1], &with(&[("MC_KVFERRY_POLICY", "strict")]));
        assert_eq!(strict, Way::worse("DMA alone", "MC_KVFERRY_POLICY=strict"));
    }
}
