//! The vendors' libraries and compilers that were found. Needs no GPU.

use kvferry_engine::Config;

/// A line for each.
pub(super) fn lines(config: &Config) -> Vec<String> {
    let mut lines = Vec::new();
    #[cfg(feature = "cuda")]
    lines.extend(nvidia());
    #[cfg(feature = "rocm")]
    lines.extend(amd(config));
    if lines.is_empty() {
        lines.push("none wanted: built without cuda and rocm".into());
    }
    let _ = config;
    lines
}

#[cfg(feature = "cuda")]
fn nvidia() -> Vec<String> {
    let report = kvferry_engine::device::cuda::describe();
    let driver = match report.driver {
        Ok(version) => format!("NVIDIA driver: for CUDA up to {version}"),
        // Why is among the devices that are not available.
        Err(_) => "no NVIDIA driver".into(),
    };
    let compiler = match report.compiler {
        Ok(compiler) => {
            format!("NVRTC {}, for {}", compiler.version, compiler.architectures.join(" "))
        }
        Err(error) => format!(
            "no NVRTC, so no copy kernel that is not cached (the CUDA toolkit has it, and so does \
             pip install nvidia-cuda-nvrtc-cu12): {error}"
        ),
    };
    vec![driver, compiler]
}

#[cfg(feature = "rocm")]
fn amd(config: &Config) -> Vec<String> {
    use kvferry_engine::device::rocm::describe;
    if config.disable_hip {
        return vec!["HIP is not looked for: MC_DISABLE_HIP is set".into()];
    }
    // Why there is none is among the devices that are not available.
    let Ok(report) = describe(&config.rocm_directories) else {
        return vec!["no HIP".into()];
    };
    let absent = match report.absent.is_empty() {
        true => "none absent".to_owned(),
        false => format!("absent: {}", report.absent.join(", ")),
    };
    vec![
        format!("HIP {}: {}", report.version, report.path.display()),
        format!("functions: {} present, {absent}", report.present.len()),
        match report.compiler {
            Ok(compiler) => {
                let architectures = compiler
                    .architectures
                    .map_or_else(|error| error.to_string(), |names| names.join(" "));
                format!("hipRTC: {}, for {architectures}", compiler.path.display())
            }
            Err(error) => format!("no hipRTC, so no copy kernel that is not cached: {error}"),
        },
    ]
}
