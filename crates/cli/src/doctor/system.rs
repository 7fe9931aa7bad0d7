//! What the system gives a process that kvferry needs, and what to do where that is too little.

use std::path::Path;

use comfy_table::Table;
use kvferry_engine::Config;
use rustix::fs::{MemfdFlags, memfd_create, statvfs};
use rustix::process::{Resource, getrlimit};

use super::plain_table;

/// One thing that was looked at.
#[derive(Debug, PartialEq)]
struct Check {
    what: &'static str,
    found: String,
    /// What to do, if it may be too little.
    advice: Option<String>,
}

/// What the system says of itself, as far as it is asked.
#[derive(Clone, Debug)]
struct System {
    /// Bytes of /dev/shm, and those that are free.
    shared_memory: Result<(u64, u64), String>,
    /// Whether memory without a name can be made.
    memfd: Result<(), String>,
    /// This process's namespaces, as the kernel numbers them.
    namespaces: Vec<(&'static str, String)>,
    open_files: Limit,
    locked_memory: Limit,
    max_mappings: Option<u64>,
    /// What a control group leaves of the memory.
    memory_limit: Option<u64>,
    nvidia: Option<String>,
    amd: Option<String>,
}

/// Soft and hard; none is no limit.
#[derive(Clone, Copy, Debug)]
struct Limit {
    soft: Option<u64>,
    hard: Option<u64>,
}

/// The number of the first PID namespace, that of a process outside all containers, on every Linux
/// (`PROC_PID_INIT_INO`).
const FIRST_PID_NAMESPACE: &str = "4026531836";

/// Lanes of many peers, exports on their way and sockets: what a busy process has open at most.
const OPEN_FILES: u64 = 4096;

/// Less of it is a container's default of 64 MiB, or little more.
const SHARED_MEMORY: u64 = 1 << 30;

pub(super) fn table(config: &Config) -> Table {
    let mut table = plain_table();
    table.set_header(["what", "found", "to do"]);
    for Check { what, found, advice } in checks(&System::now(), config) {
        table.add_row([what, &found, &advice.unwrap_or_else(|| "-".into())]);
    }
    table
}

impl System {
    fn now() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let number = |path: &str| read(path)?.trim().parse().ok();
        let first_line = |path: &str| Some(read(path)?.lines().next()?.trim().to_owned());
        let limit = |resource| {
            let limit = getrlimit(resource);
            Limit { soft: limit.current, hard: limit.maximum }
        };
        let namespace = |kind: &'static str| {
            let link = std::fs::read_link(Path::new("/proc/self/ns").join(kind)).ok()?;
            let text = link.to_string_lossy().into_owned();
            let number = text.split_once('[')?.1.trim_end_matches(']').to_owned();
            Some((kind, number))
        };
        Self {
            shared_memory: statvfs("/dev/shm")
                .map(|it| (it.f_blocks * it.f_frsize, it.f_bavail * it.f_frsize))
                .map_err(|error| error.to_string()),
            memfd: memfd_create("kvferry-doctor", MemfdFlags::CLOEXEC)
                .and_then(|file| rustix::fs::ftruncate(&file, 4096))
                .map_err(|error| error.to_string()),
            namespaces: ["pid", "net", "ipc", "user"].into_iter().filter_map(namespace).collect(),
            open_files: limit(Resource::Nofile),
            locked_memory: limit(Resource::Memlock),
            max_mappings: number("/proc/sys/vm/max_map_count"),
            memory_limit: number("/sys/fs/cgroup/memory.max")
                .or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes")),
            nvidia: first_line("/proc/driver/nvidia/version"),
            amd: first_line("/sys/module/amdgpu/version"),
        }
    }
}

fn checks(system: &System, config: &Config) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut add = |what, found, advice: Option<String>| checks.push(Check { what, found, advice });
    match &system.shared_memory {
        Ok((bytes, free)) => add(
            "/dev/shm",
            format!("{}, {} free", mebibytes(*bytes), mebibytes(*free)),
            (*bytes < SHARED_MEMORY).then(|| {
                "kvferry's own host memory is not in it, but that of engines and of the vendors' \
                 libraries is: docker run --shm-size=16g"
                    .into()
            }),
        ),
        Err(error) => add("/dev/shm", error.clone(), Some("mount a tmpfs there".into())),
    }
    match &system.memfd {
        Ok(()) => add("memfd_create", "works".into(), None),
        Err(error) => add(
            "memfd_create",
            error.clone(),
            Some("host memory that peers can map cannot be made: allow it in the sandbox".into()),
        ),
    }
    let of = |kind| system.namespaces.iter().find(|(it, _)| *it == kind).map(|(_, it)| it.as_str());
    let in_container = of("pid").is_some_and(|number| number != FIRST_PID_NAMESPACE);
    let shown = system.namespaces.iter().map(|(kind, number)| format!("{kind} {number}"));
    let advice = "a container. Processes reach each other's memory if `net` is the same in both (they \
                  meet at a Unix socket of it); NVIDIA's drivers may want the same `ipc` and `pid`, too: \
                  docker run --network, --ipc and --pid=container:NAME";
    add(
        "namespaces",
        shown.collect::<Vec<_>>().join(", "),
        in_container.then(|| advice.to_owned()),
    );
    let files = system.open_files;
    add(
        "open files",
        files.shown(|count| count.to_string()),
        files.soft.filter(|&soft| soft < OPEN_FILES).map(|_| {
            let most = files.hard.map_or(65_536, |hard| hard.min(65_536));
            format!("each peer takes some, and so do exports on their way: ulimit -n {most}")
        }),
    );
    // No advice: GPUs' drivers page-lock by themselves, and do not ask it.
    add("locked memory", system.locked_memory.shown(mebibytes), None);
    let wanted = 2 * config.max_mappings as u64;
    if let Some(most) = system.max_mappings {
        add(
            "mappings a process",
            most.to_string(),
            (most < wanted).then(|| {
                format!(
                    "MC_KVFERRY_MAX_MAPPINGS ({}) may not fit: sysctl vm.max_map_count=262144",
                    config.max_mappings
                )
            }),
        );
    }
    let budget = config.pinned_budget();
    // Without a limit, old control groups have a number near 2^63.
    let limit = system.memory_limit.filter(|&limit| limit < 1 << 62);
    let of = limit.map(|limit| format!(", the control group has {}", mebibytes(limit)));
    add(
        "page-locked memory",
        format!("at most {}{}", mebibytes(budget), of.unwrap_or_default()),
        limit.filter(|&limit| limit <= budget).map(|limit| {
            let most = (limit / 4 * 3) >> 20;
            format!("more than the control group allows: MC_KVFERRY_PINNED_MB={most}")
        }),
    );
    add("NVIDIA driver", system.nvidia.clone().unwrap_or_else(|| "none".into()), None);
    add(
        "amdgpu driver",
        system.amd.clone().unwrap_or_else(|| "none, or the kernel's own".into()),
        None,
    );
    checks
}

impl Limit {
    fn shown(&self, number: impl Fn(u64) -> String) -> String {
        let shown = |limit: Option<u64>| limit.map_or("no limit".into(), &number);
        format!("{}, at most {}", shown(self.soft), shown(self.hard))
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> System {
        let limit = Limit { soft: Some(65_536), hard: Some(65_536) };
        System {
            shared_memory: Ok((64 << 30, 60 << 30)),
            memfd: Ok(()),
            namespaces: vec![("pid", FIRST_PID_NAMESPACE.into()), ("net", "4026531833".into())],
            open_files: limit,
            locked_memory: Limit { soft: None, hard: None },
            max_mappings: Some(65_530),
            memory_limit: Some(u64::MAX / 2),
            nvidia: Some("NVRM version: 580.95".into()),
            amd: None,
        }
    }

    /// What there is to do, by what was looked at.
    fn advised(system: &System) -> Vec<(&'static str, String)> {
        let all = checks(system, &Config::default()).into_iter();
        all.filter_map(|check| Some((check.what, check.advice?))).collect()
    }

    #[test]
    fn a_good_system_needs_nothing_and_this_one_can_be_asked() {
        assert_eq!(advised(&good()), []);
        assert!(checks(&System::now(), &Config::default()).len() >= 8);
    }

    #[test]
    fn each_thing_that_is_too_little_is_said_with_what_to_do() {
        let config = Config::default();
        let low = Limit { soft: Some(1024), hard: Some(4096) };
        for (system, what, advice) in [
            (System { shared_memory: Ok((64 << 20, 0)), ..good() }, "/dev/shm", "--shm-size"),
            (System { shared_memory: Err("gone".into()), ..good() }, "/dev/shm", "tmpfs"),
            (System { memfd: Err("denied".into()), ..good() }, "memfd_create", "sandbox"),
            (
                System { namespaces: vec![("pid", "4026532201".into())], ..good() },
                "namespaces",
                "container",
            ),
            (System { open_files: low, ..good() }, "open files", "ulimit -n 4096"),
            (System { max_mappings: Some(4096), ..good() }, "mappings a process", "max_map_count"),
            (
                System { memory_limit: Some(config.pinned_budget() / 2), ..good() },
                "page-locked memory",
                "MC_KVFERRY_PINNED_MB=",
            ),
        ] {
            let found = advised(&system);
            let [(of, text)] = &found[..] else { panic!("{what}: {found:?}") };
            assert!(*of == what && text.contains(advice), "{what}: {found:?}");
        }
    }
}
