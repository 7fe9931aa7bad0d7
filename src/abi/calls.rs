//! Functions of the table about the library, engines, memory and targets.

use std::ffi::{OsString, c_char, c_int, c_void};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::time::Duration;

use kvferry_engine::device::{Error as DeviceError, MadeBy};
use kvferry_engine::{Config, DeviceName, Engine, Error, Path, open_device, visible_gpus};
use kvferry_node::{Node, NodeOptions};

use super::guard::{
    self, call, list, out, put, put_needed, put_structure, put_text, structure, text,
};
use super::plugin;
use super::status::Refusal;
use super::submit;
use super::types::{self, EngineHandle, PathStatistics, Statistics, Status, TargetHandle};

pub(super) unsafe extern "C" fn version(to: *mut c_char, size: usize) -> usize {
    // SAFETY: the caller's contract, as in the header.
    unsafe { put_text(env!("CARGO_PKG_VERSION"), to, size) }
}

pub(super) unsafe extern "C" fn last_error(to: *mut c_char, size: usize) -> usize {
    // SAFETY: the caller's contract, as in the header.
    unsafe { put_text(&guard::last_error(), to, size) }
}

pub(super) unsafe extern "C" fn create(
    config: *const types::Config,
    engine: *mut EngineHandle,
) -> Status {
    call(|| {
        out("engine", engine)?;
        // From now on forks are noticed.
        MadeBy::this_process();
        // SAFETY: the caller's contract, as in the header.
        let given = unsafe { structure("config", config) }?;
        // SAFETY: as above.
        let settings = unsafe { settings(&given) }?;
        let config = config_of(&settings)?;
        log(&config);
        // SAFETY: as above.
        let names = unsafe { text("devices", given.devices) }?;
        // SAFETY: as above.
        let listen = unsafe { text("listen", given.listen) }?;
        // SAFETY: as above.
        let batch_listen = unsafe { text("batch_listen", given.batch_listen) }?;
        // SAFETY: as above.
        let name = unsafe { text("name", given.name) }?;
        let defaults = NodeOptions::default();
        let listen = listen.map(address).transpose()?.unwrap_or(defaults.listen);
        let batch = batch_listen.map(address).transpose()?;
        let batch = batch.unwrap_or_else(|| SocketAddr::new(listen.ip(), 0));
        let devices = devices(names, &config)?
            .into_iter()
            .map(|name| open_device(name, &config))
            .collect::<Result<Vec<_>, _>>()?;
        let options = NodeOptions {
            listen,
            name: name.map(str::to_owned),
            batch_listen: Some(batch),
            ..defaults
        };
        let node = Node::start(Engine::new(config, devices)?, &options)?;
        // SAFETY: as above.
        unsafe { put("engine", engine, plugin::insert(node)) }
    })
}

/// The `NAME=value` texts of a configuration.
///
/// # Safety
/// As the header says.
unsafe fn settings(config: &types::Config) -> Result<Vec<(&str, &str)>, Refusal> {
    let count = usize::try_from(config.settings_count).unwrap_or(usize::MAX);
    // SAFETY: the caller's contract.
    let entries = unsafe { list("settings", config.settings, count) }?;
    let pair = |&entry: &*const c_char| {
        // SAFETY: the caller's contract.
        let entry = unsafe { text("a setting", entry) }?;
        let pair = entry.and_then(|entry| entry.split_once('='));
        pair.ok_or_else(|| Refusal::invalid(format!("{entry:?} is no setting: write NAME=value")))
    };
    entries.iter().map(pair).collect()
}

fn config_of(settings: &[(&str, &str)]) -> Result<Config, Refusal> {
    let given = |name: &str| {
        let found = settings.iter().rev().find(|(given, _)| *given == name);
        found.map(|(_, value)| OsString::from(value)).or_else(|| std::env::var_os(name))
    };
    let is_known = |name: &str| kvferry_engine::KNOBS.iter().any(|knob| knob.name == name);
    if let Some((name, _)) = settings.iter().find(|(name, _)| !is_known(name)) {
        let text = format!("{name} is not a knob of this version; `kvferry doctor` lists them");
        return Err(Refusal { status: super::numbers::BAD_SETTING, text });
    }
    Ok(Config::from_lookup(given)?)
}

/// Warnings go to standard error, unless the process has a subscriber of its own.
fn log(config: &Config) {
    let subscriber = tracing_subscriber::fmt().with_max_level(config.log);
    if subscriber.with_writer(std::io::stderr).try_init().is_ok() {
        Config::warn_of_unknown_names();
    }
}

fn address(text: &str) -> Result<SocketAddr, Refusal> {
    let resolved = text.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    resolved.ok_or_else(|| {
        Refusal::invalid(format!("{text:?} is no address to listen on: write host:port"))
    })
}

/// Host memory and every GPU where none are named: a machine without one is no error.
fn devices(names: Option<&str>, config: &Config) -> Result<Vec<DeviceName>, Refusal> {
    if let Some(names) = names {
        return names.split(',').map(|name| Ok(name.trim().parse::<DeviceName>()?)).collect();
    }
    let mut all = vec![DeviceName::Host];
    for gpus in visible_gpus(config) {
        match gpus {
            Ok(gpus) => all.extend(gpus),
            Err(error) => tracing::info!(%error, "no GPU of a vendor"),
        }
    }
    Ok(all)
}

pub(super) unsafe extern "C" fn destroy(engine: EngineHandle) -> Status {
    call(|| plugin::remove(engine))
}

pub(super) unsafe extern "C" fn name(
    engine: EngineHandle,
    to: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> Status {
    call(|| {
        let plugin = plugin::find(engine)?;
        // SAFETY: the caller's contract, as in the header.
        unsafe { put_needed(plugin.node.name(), to, size, needed) }
    })
}

pub(super) unsafe extern "C" fn device(
    engine: EngineHandle,
    index: u32,
    to: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> Status {
    call(|| {
        let plugin = plugin::find(engine)?;
        let device = device_at(&plugin.engine, index)?;
        // SAFETY: the caller's contract, as in the header.
        unsafe { put_needed(&device.info().to_string(), to, size, needed) }
    })
}

fn device_at(
    engine: &Engine,
    index: u32,
) -> Result<&std::sync::Arc<dyn kvferry_engine::device::Device>, Refusal> {
    let devices = engine.devices();
    devices.get(index as usize).ok_or_else(|| {
        Refusal::not_found(format!("device {index} does not exist: there are {}", devices.len()))
    })
}

pub(super) unsafe extern "C" fn register_memory(
    engine: EngineHandle,
    address: u64,
    length: u64,
    served: *mut u32,
) -> Status {
    call(|| {
        if !served.is_null() {
            out("served", served)?;
        }
        let plugin = plugin::find(engine)?;
        // SAFETY: the caller promises, as the header says, that the memory stays until it is
        // unregistered.
        let registered = unsafe { plugin.engine.register(address, length) };
        let is_served = match registered {
            Ok(()) => true,
            // An engine offers all memory to all its transports.
            Err(error) if is_foreign(&error) => {
                plugin.ignored().insert(address);
                guard::set_last_error(error.to_string());
                false
            }
            Err(error) => return Err(error.into()),
        };
        if !served.is_null() {
            // SAFETY: the caller's contract, as in the header.
            unsafe { put("served", served, is_served.into()) }?;
        }
        Ok(())
    })
}

fn is_foreign(error: &Error) -> bool {
    matches!(
        error,
        Error::NotDeviceMemory { .. }
            | Error::Device(DeviceError::NotExportable { .. } | DeviceError::NotAccessible { .. })
    )
}

pub(super) unsafe extern "C" fn unregister_memory(engine: EngineHandle, address: u64) -> Status {
    call(|| {
        let plugin = plugin::find(engine)?;
        match plugin.engine.unregister(address) {
            Err(Error::UnknownRegion { .. }) if plugin.ignored().remove(&address) => Ok(()),
            other => Ok(other?),
        }
    })
}

pub(super) unsafe extern "C" fn allocate(
    engine: EngineHandle,
    device: u32,
    length: u64,
    address: *mut u64,
) -> Status {
    call(|| {
        out("address", address)?;
        let plugin = plugin::find(engine)?;
        let device = device_at(&plugin.engine, device)?;
        let buffer = plugin.engine.allocate(device, length)?;
        let begins = buffer.addr();
        plugin.buffers().insert(begins, buffer);
        // SAFETY: the caller's contract, as in the header.
        unsafe { put("address", address, begins) }
    })
}

pub(super) unsafe extern "C" fn free(engine: EngineHandle, address: u64) -> Status {
    call(|| {
        let plugin = plugin::find(engine)?;
        let buffer = plugin.buffers().remove(&address);
        let unknown = || Refusal::not_found(format!("{address:#x} was not allocated here"));
        // Freed without the lock: it waits for batches.
        buffer.ok_or_else(unknown)?.free().map_err(|it| {
            let (buffer, busy) = *it;
            plugin.buffers().insert(address, buffer);
            busy.into()
        })
    })
}

pub(super) unsafe extern "C" fn open(
    engine: EngineHandle,
    name: *const c_char,
    target: *mut TargetHandle,
) -> Status {
    call(|| {
        out("target", target)?;
        // SAFETY: the caller's contract, as in the header.
        let name = unsafe { text("name", name) }?;
        let name = name.ok_or_else(|| Refusal::invalid("name is NULL"))?;
        let plugin = plugin::find(engine)?;
        let peer = plugin.node.open(name)?;
        // SAFETY: as above.
        unsafe { put("target", target, plugin.add_target(engine, peer)) }
    })
}

pub(super) unsafe extern "C" fn import_segment(
    engine: EngineHandle,
    segment: *const c_void,
    size: usize,
    target: *mut TargetHandle,
) -> Status {
    call(|| {
        out("target", target)?;
        // SAFETY: the caller's contract, as in the header.
        let segment = unsafe { list("segment", segment.cast::<u8>(), size) }?;
        let plugin = plugin::find(engine)?;
        let peer = plugin.node.open_segment(segment).map_err(Refusal::of_descriptor)?;
        // SAFETY: as above.
        unsafe { put("target", target, plugin.add_target(engine, peer)) }
    })
}

pub(super) unsafe extern "C" fn export_segment(
    engine: EngineHandle,
    segment: *mut c_void,
    size: usize,
    needed: *mut usize,
) -> Status {
    call(|| {
        let plugin = plugin::find(engine)?;
        let exported = plugin.node.segment().map_err(Refusal::of_descriptor)?;
        if !needed.is_null() {
            // SAFETY: the caller's contract, as in the header.
            unsafe { put("needed", needed, exported.len()) }?;
        }
        if segment.is_null() && size == 0 && !needed.is_null() {
            return Ok(());
        }
        if segment.is_null() || size < exported.len() {
            let needs = exported.len();
            return Err(Refusal::invalid(format!("the segment needs {needs} bytes, not {size}")));
        }
        // SAFETY: `size` bytes, which are enough.
        unsafe {
            let to = segment.cast::<u8>();
            std::ptr::copy_nonoverlapping(exported.as_ptr(), to, exported.len());
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn refresh(target: TargetHandle) -> Status {
    call(|| Ok(plugin::find(target.engine)?.target(target)?.refresh()?))
}

pub(super) unsafe extern "C" fn close(target: TargetHandle) -> Status {
    call(|| plugin::find(target.engine)?.close(target))
}

pub(super) unsafe extern "C" fn event_descriptor(
    engine: EngineHandle,
    descriptor: *mut c_int,
) -> Status {
    call(|| {
        out("descriptor", descriptor)?;
        let plugin = plugin::find(engine)?;
        let fd = plugin.engine.event_fd()?.as_raw_fd();
        // SAFETY: the caller's contract, as in the header.
        unsafe { put("descriptor", descriptor, fd) }
    })
}

pub(super) unsafe extern "C" fn statistics(
    engine: EngineHandle,
    statistics: *mut Statistics,
) -> Status {
    call(|| {
        let plugin = plugin::find(engine)?;
        let all = plugin.engine.statistics();
        let mut paths = [PathStatistics::default(); 8];
        for path in Path::ALL {
            let &counted = all.path(path);
            paths[submit::number(path) as usize] = PathStatistics {
                completed: counted.completed,
                failed: counted.failed,
                cancelled: counted.cancelled,
                bytes: counted.bytes,
            };
        }
        let now = Statistics {
            struct_size: 0,
            pinned_bytes: all.pinned_bytes,
            staging_bytes: all.staging_bytes,
            rejected_connections: plugin.node.rejected(),
            fallbacks: all.fallbacks,
            refused: all.refused,
            running: all.running,
            regions: all.regions,
            registered_bytes: all.registered_bytes,
            mappings: all.mappings,
            mapped_peers: all.mapped_peers,
            bounce_bytes: all.bounce_bytes,
            locked_bytes: all.locked_bytes,
            paths,
        };
        // SAFETY: the caller's contract, as in the header.
        unsafe { put_structure("statistics", statistics, &now) }
    })
}

pub(super) unsafe extern "C" fn record_step(
    engine: EngineHandle,
    device: u32,
    nanoseconds: u64,
) -> Status {
    call(|| {
        let plugin = plugin::find(engine)?;
        device_at(&plugin.engine, device)?;
        plugin.engine.record_step(device as usize, Duration::from_nanos(nanoseconds));
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use kvferry_device::sim::{SimOptions, sim};
    use kvferry_engine::device::host;
    use kvferry_engine::{Op, Range, State};

    use super::super::numbers::{NOT_FOUND, OK};
    use super::*;

    #[test]
    fn steps_that_a_caller_records_slow_transfers_down_under_the_tail_policy() {
        const PIECES: u64 = 512;
        const LONG: Duration = Duration::from_secs(60);
        let (gpu, control) = sim(&SimOptions::default()).expect("always there");
        let knobs = |name: &str| match name {
            "MC_KVFERRY_POLICY" => Some("tail".into()),
            "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
            _ => None,
        };
        let devices = [gpu, host().expect("always there")];
        let config = Config::from_lookup(knobs).expect("good knobs");
        let engine = Engine::new(config, devices.to_vec()).expect("an engine");
        let [on_gpu, on_host] =
            devices.map(|device| engine.allocate(&device, PIECES * 8192).expect("memory"));
        let node = Node::start(engine.clone(), &NodeOptions::default()).expect("a node");
        let handle = plugin::insert(node);
        // SAFETY: numbers.
        let step =
            |device, microseconds: u64| unsafe { record_step(handle, device, microseconds * 1000) };
        let range = |at: u64| Range {
            local: on_gpu.addr() + (at ^ 1) * 8192,
            remote: on_host.addr() + at * 4096,
            len: 4096,
        };
        let ranges: Vec<_> = (0..PIECES).map(range).collect();
        let own = engine.local().expect("itself");
        let submit = || engine.submit(&own, Op::Write, &ranges).expect("submits");
        let end = |batch| {
            let state = engine.wait(batch, LONG).expect("known").state;
            assert_eq!(state, State::Completed);
        };
        (0..256).for_each(|_| assert_eq!(step(0, 3000), OK));
        control.hold();
        let beside = submit();
        // A fifth longer, beside the batch.
        (0..512).for_each(|_| assert_eq!(step(0, 3600), OK));
        control.release();
        end(beside);
        let next = submit();
        assert!(engine.choice(next).expect("known").expect("an offload").in_steps);
        end(next);

        assert_eq!(step(2, 3000), NOT_FOUND);
        plugin::remove(handle).expect("it is there");
        assert_eq!(step(0, 3000), NOT_FOUND);
    }
}
