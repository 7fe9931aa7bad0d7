//! What decides on this machine how kvferry works, and is no device: for reports.

use std::fmt::Write;
use std::path::Path;

/// Variables whose values are part of a report: those that choose devices, libraries and knobs.
const VARIABLES: [&str; 8] =
    ["MC_", "HIP_", "ROCR_", "ROCM_", "HSA_", "CUDA_", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"];

/// Parts of names of variables whose values stay here.
const SECRETS: [&str; 4] = ["KEY", "TOKEN", "SECRET", "PASSWORD"];

/// One fact a line.
pub(crate) fn facts() -> String {
    let mut text = String::new();
    let mut fact = |name: &str, value: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}: {value}");
    };
    for (name, file, key) in
        [("processor", "/proc/cpuinfo", "model name"), ("memory", "/proc/meminfo", "MemTotal")]
    {
        let content = std::fs::read_to_string(file).unwrap_or_default();
        let line = content.lines().find_map(|line| line.strip_prefix(key)?.split_once(':'));
        fact(name, line.map_or_else(|| "unknown".into(), |(_, value)| value.trim().into()));
    }
    for (name, file) in [
        ("kernel", "/proc/version"),
        ("processors", "/sys/devices/system/cpu/online"),
        ("NUMA nodes", "/sys/devices/system/node/online"),
        ("huge pages", "/sys/kernel/mm/transparent_hugepage/enabled"),
        ("NVIDIA driver", "/proc/driver/nvidia/version"),
        ("amdgpu driver", "/sys/module/amdgpu/version"),
        ("ptrace scope", "/proc/sys/kernel/yama/ptrace_scope"),
        ("cgroup", "/proc/self/cgroup"),
    ] {
        let content = std::fs::read_to_string(file);
        let first = content.as_deref().map(|content| content.lines().next().unwrap_or_default());
        fact(name, first.map_or_else(|error| error.to_string(), str::to_owned));
    }
    let groups = std::fs::read_dir("/sys/kernel/iommu_groups").map_or(0, Iterator::count);
    fact("IOMMU groups", groups.to_string());
    for path in ["/dev/kfd", "/dev/dri", "/dev/nvidiactl", "/dev/shm", "/.dockerenv"] {
        let there = Path::new(path).exists();
        fact(path, if there { "there" } else { "not there" }.into());
    }
    for (name, value) in variables(std::env::vars_os()) {
        fact(&name, value);
    }
    text
}

/// The variables that belong into a report, sorted, without the values of secrets.
fn variables(
    all: impl Iterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
) -> Vec<(String, String)> {
    let lossy = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    let mut chosen: Vec<_> = all
        .map(|(name, value)| (lossy(name), lossy(value)))
        .filter(|(name, _)| VARIABLES.iter().any(|prefix| name.starts_with(prefix)))
        .map(|(name, value)| match SECRETS.iter().any(|part| name.contains(part)) {
            true => (name, "(set, not shown)".into()),
            false => (name, value),
        })
        .collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_the_variables_that_matter_and_no_secret() {
        let all = [
            ("ROCR_VISIBLE_DEVICES", "1"),
            ("HOME", "/root"),
            ("MC_KVFERRY_AUTH_KEY", "hunter2"),
            ("HF_TOKEN", "hunter3"),
            ("MC_KVFERRY_STREAMS", "2"),
        ];
        let all = all.into_iter().map(|(name, value)| (name.into(), value.into()));
        let expected = [
            ("MC_KVFERRY_AUTH_KEY", "(set, not shown)"),
            ("MC_KVFERRY_STREAMS", "2"),
            ("ROCR_VISIBLE_DEVICES", "1"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(variables(all), expected);
    }
}
