//! The copy kernel for one architecture: found in the cache or compiled by hipRTC, so that no
//! transfer waits for a compiler.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;

use hip_sys::{comgr, hiprtc};

use super::functions::Failure;
use super::library::{Comgr, Hip, Hiprtc, Version};
use crate::error::{Error, Result};
use crate::kernel::{self, CodeCache, NoKernel};

/// The kernel for `architecture`, the full name of a device's own, as `load` makes it from code;
/// also where the code came from, in words.
pub(super) fn prepare<K>(
    hip: &'static Hip,
    architecture: &str,
    directories: &[PathBuf],
    cache: &CodeCache,
    load: impl Fn(&[u8]) -> Result<K>,
) -> Result<(K, String), NoKernel> {
    let kind = format!("hiprtc-{}", hip.version);
    if let Some(code) = cache.load(architecture, &kind) {
        match load(&code) {
            Ok(kernel) => return Ok((kernel, cache.origin())),
            Err(error) => {
                tracing::debug!(%error, %architecture, kind, "cached kernel does not load")
            }
        }
    }
    let none = |reason| NoKernel { reason, log: String::new() };
    let compiler = Compiler::load(hip, directories).map_err(|error| none(no_compiler(error)))?;
    let code = compiler.compile(kernel::SOURCE, c"copy.cu", architecture)?;
    let kernel = load(&code)
        .map_err(|error| none(format!("code for {architecture} does not load: {error}")))?;
    cache.store(architecture, &kind, &code);
    Ok((kernel, format!("compiled for {architecture} by hipRTC {}", hip.version)))
}

fn no_compiler(error: Error) -> String {
    match error {
        Error::LibraryMissing { library, reason } => format!(
            "cannot load {library}: {reason}; install hipRTC of the same ROCm as HIP or add its folder to \
             LD_LIBRARY_PATH"
        ),
        error => error.to_string(),
    }
}

/// The first version that refuses an architecture that it does not know (7.2.4). Others end the
/// process (5.2 to 6.4.3); what is between was not tried.
const REFUSES_UNKNOWN: (u32, u32) = (7, 2);

/// hipRTC, and what knows its architectures.
#[derive(Debug)]
pub(super) struct Compiler {
    pub(super) hiprtc: &'static Hiprtc,
    comgr: Result<&'static Comgr>,
    version: Version,
}

impl Compiler {
    pub(super) fn load(hip: &'static Hip, directories: &[PathBuf]) -> Result<Self> {
        let hiprtc = Hiprtc::load(hip, directories)?;
        let comgr = Comgr::load(hiprtc, directories);
        Ok(Self { hiprtc, comgr, version: hip.version })
    }

    /// Names of architectures without features, as in `gfx942`.
    pub(super) fn architectures(&self) -> Result<Vec<String>> {
        let comgr = self.comgr.clone()?;
        let error = |failure: Failure| Error::Call {
            call: failure.call,
            device: Comgr::LIBRARY.into(),
            name: "comgr status".into(),
            code: i32::try_from(failure.code).unwrap_or(i32::MAX),
        };
        let mut count = 0;
        // SAFETY: comgr writes one number.
        unsafe { comgr.amd_comgr_get_isa_count(&mut count) }.map_err(error)?;
        let name = |index| {
            let mut name: *const c_char = std::ptr::null();
            // SAFETY: comgr writes one pointer.
            unsafe { comgr.amd_comgr_get_isa_name(index, &mut name) }.map_err(error)?;
            // SAFETY: it wrote a text that lives as long as the library does.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            Ok(name.strip_prefix(TARGET).unwrap_or(&name).to_owned())
        };
        (0..count).map(name).collect()
    }

    /// Refuses what hipRTC does not know, by name or by feature, before a compile ends the process.
    fn check(&self, architecture: &str) -> Result<(), String> {
        let version = self.version;
        let comgr = match &self.comgr {
            Ok(comgr) => comgr,
            Err(_) if (version.major, version.minor) >= REFUSES_UNKNOWN => return Ok(()),
            Err(error) => {
                return Err(format!(
                    "nothing tells whether HIP {version} knows {architecture:?}, and a compile for one that \
                     it does not know would end the process: {error}"
                ));
            }
        };
        let unknown = || {
            format!(
                "HIP {version} does not know {architecture:?}; install a ROCm that supports this GPU"
            )
        };
        let name = CString::new(format!("{TARGET}{architecture}")).map_err(|_| unknown())?;
        let mut metadata = comgr::amd_comgr_metadata_node_s { handle: 0 };
        // hipRTC fails where this does: it parses the name in the same way.
        // SAFETY: the name ends with a zero; comgr writes one handle.
        unsafe { comgr.amd_comgr_get_isa_metadata(name.as_ptr(), &mut metadata) }
            .map_err(|_| unknown())?;
        // SAFETY: just made, destroyed once.
        let _ = unsafe { comgr.amd_comgr_destroy_metadata(metadata) };
        Ok(())
    }

    /// Compiles for an architecture with or without features; `file` is what the compiler calls the
    /// source in its log.
    pub(super) fn compile(
        &self,
        source: &str,
        file: &CStr,
        architecture: &str,
    ) -> Result<Vec<u8>, NoKernel> {
        let hiprtc = self.hiprtc;
        self.check(architecture).map_err(|reason| NoKernel { reason, log: String::new() })?;
        let fail = |failure: Failure, log: String| {
            let silent = failure.is(hiprtc::HIPRTC_ERROR_COMPILATION) && log.is_empty();
            let name = hiprtc.name(failure.code);
            NoKernel {
                reason: format!(
                    "{} failed for {architecture}: {name} ({}), hipRTC {}{}",
                    failure.call,
                    failure.code,
                    self.version,
                    if silent { SILENT } else { "" }
                ),
                log,
            }
        };
        let source = CString::new(source).expect("the source is text without zeros");
        let mut program = Program { hiprtc, raw: std::ptr::null_mut() };
        // SAFETY: both texts end with a zero and hipRTC copies them; there are no headers.
        unsafe {
            hiprtc.hiprtcCreateProgram(
                &mut program.raw,
                source.as_ptr(),
                file.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        }
        .map_err(|failure| fail(failure, String::new()))?;
        let architecture_option = CString::new(format!("--gpu-architecture={architecture}"))
            .expect("a name that was checked has no zero");
        let options = [architecture_option.as_ptr(), c"--std=c++17".as_ptr()];
        // SAFETY: the program exists, the options outlive the call.
        unsafe {
            hiprtc.hiprtcCompileProgram(program.raw, options.len() as c_int, options.as_ptr())
        }
        .map_err(|failure| fail(failure, program.log()))?;
        program
            .output(Hiprtc::hiprtcGetCodeSize, Hiprtc::hiprtcGetCode)
            .map_err(|failure| fail(failure, program.log()))
    }
}

/// What comgr puts before the name of an architecture.
const TARGET: &str = "amdgcn-amd-amdhsa--";

/// Seen with 5.7.1, 6.4.3 and 7.2.4, and a TMPDIR that does not exist.
const SILENT: &str = "; the compiler left no log, as it does when it cannot write its temporary files: \
     make /tmp writable, or set TMPDIR to a folder that is (TMPDIR=/dev/shm)";

/// A program that hipRTC holds until drop.
struct Program {
    hiprtc: &'static Hiprtc,
    raw: hiprtc::hiprtcProgram,
}

impl Program {
    fn output(
        &self,
        size: unsafe fn(&Hiprtc, hiprtc::hiprtcProgram, *mut usize) -> Result<(), Failure>,
        bytes: unsafe fn(&Hiprtc, hiprtc::hiprtcProgram, *mut c_char) -> Result<(), Failure>,
    ) -> Result<Vec<u8>, Failure> {
        let mut len = 0;
        // SAFETY: the program exists; hipRTC writes one number.
        unsafe { size(self.hiprtc, self.raw, &mut len) }?;
        let mut output = vec![0; len];
        // SAFETY: hipRTC writes as many bytes as it just said.
        unsafe { bytes(self.hiprtc, self.raw, output.as_mut_ptr().cast()) }?;
        Ok(output)
    }

    fn log(&self) -> String {
        let log = self
            .output(Hiprtc::hiprtcGetProgramLogSize, Hiprtc::hiprtcGetProgramLog)
            .unwrap_or_default();
        let text = CStr::from_bytes_until_nul(&log).map_or(&log[..], CStr::to_bytes);
        String::from_utf8_lossy(text).trim().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { self.hiprtc.hiprtcDestroyProgram(&mut self.raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::skip;
    use crate::rocm::fake::again;

    fn compiler() -> Option<Compiler> {
        let compiler = Hip::load(&[]).and_then(|hip| Compiler::load(hip, &[]));
        compiler.inspect_err(|error| skip("hiprtc", error)).ok()
    }

    /// None of crates/hip-shim, which is the host's C++ compiler, and one that can be asked what it
    /// knows.
    fn real_compiler() -> Option<Compiler> {
        let compiler = compiler()?;
        // SAFETY: it is loaded already.
        let library = unsafe { libloading::Library::new(&compiler.hiprtc.path) };
        // SAFETY: only looked up.
        let is_marked = |library: libloading::Library| unsafe {
            library.get::<fn()>(b"kvferry_hip_shim_fail").is_ok()
        };
        if library.is_ok_and(is_marked) {
            skip("hiprtc", &"it is the stand-in of crates/hip-shim");
            return None;
        }
        compiler.architectures().inspect_err(|error| skip("comgr", error)).ok()?;
        Some(compiler)
    }

    #[test]
    fn the_kernel_compiles_for_the_gpus_that_hiprtc_knows() {
        let Some(compiler) = real_compiler() else { return };
        let known = compiler.architectures().expect("asked before");
        let knows = |architecture: &&str| known.iter().any(|known| known == architecture);
        for required in ["gfx90a", "gfx942"] {
            assert!(knows(&required), "{known:?}");
        }
        for architecture in ["gfx90a", "gfx942", "gfx950"].into_iter().filter(knows) {
            for features in ["", ":sramecc+:xnack-"] {
                let architecture = format!("{architecture}{features}");
                let code = compiler
                    .compile(kernel::SOURCE, c"copy.cu", &architecture)
                    .unwrap_or_else(|none| panic!("{}\n{}", none.reason, none.log));
                assert!(code.starts_with(b"\x7fELF"), "{architecture}");
                let named = format!("{TARGET}{architecture}");
                let names =
                    |code: &[u8]| code.windows(named.len()).any(|at| at == named.as_bytes());
                assert!(names(&code), "the code is for {architecture}");
            }
        }
    }

    /// Each of these would end the process if hipRTC were asked to compile for it, up to 6.4.
    #[test]
    fn what_hiprtc_does_not_know_is_refused_and_the_process_lives() {
        let Some(compiler) = real_compiler() else { return };
        for architecture in [
            "",
            "gfx999",
            "sm_90",
            "gfx942:nonsense+",
            "gfx942:xnack",
            "gfx942:",
            "gfx942 ",
            "gfx1100:xnack+",
            "gfx942\0",
            "gfx942 -g",
        ] {
            let none = compiler
                .compile(kernel::SOURCE, c"copy.cu", architecture)
                .expect_err("no such architecture");
            assert!(none.reason.contains("does not know"), "{architecture:?}: {}", none.reason);
        }
    }

    #[test]
    fn bad_source_gives_the_compilers_words_and_their_place() {
        let Some(compiler) = real_compiler() else { return };
        let none = compiler.compile("nonsense", c"bad.cu", "gfx90a").expect_err("no program");
        assert!(none.reason.contains("HIPRTC_ERROR_COMPILATION (6)"), "{}", none.reason);
        assert!(!none.reason.contains("TMPDIR"), "{}", none.reason);
        // clang's words or, on a stand-in, those of whatever C++ compiler there is.
        for word in ["bad.cu:1:1: error: ", "nonsense"] {
            assert!(none.log.contains(word), "{}", none.log);
        }
    }

    #[test]
    fn a_compiler_without_a_folder_for_its_files_is_explained() {
        let Some(compiler) = real_compiler() else { return };
        let missing = std::ffi::OsStr::new("/nonexistent/kvferry");
        // The compiler reads the environment itself, and tests share theirs.
        again("rocm::compile::tests::a_compiler_without", &[("TMPDIR", missing)], || {
            let none = compiler
                .compile(kernel::SOURCE, c"copy.cu", "gfx90a")
                .expect_err("the compiler has no place for its files");
            for word in ["(6)", "no log", "TMPDIR"] {
                assert!(none.reason.contains(word), "{word}: {}", none.reason);
            }
        });
    }

    #[test]
    fn without_comgr_only_versions_that_refuse_by_themselves_are_trusted() {
        let Some(Compiler { hiprtc, .. }) = compiler() else { return };
        let with = |major, minor| {
            let comgr =
                Err(Error::LibraryMissing { library: Comgr::LIBRARY, reason: "gone".into() });
            Compiler { hiprtc, comgr, version: Version { major, minor, patch: 0 } }
        };
        for (major, minor) in [(5, 7), (6, 4), (7, 1)] {
            let refused = with(major, minor).check("gfx942").expect_err("nothing to ask");
            assert!(refused.contains("end the process"), "{refused}");
        }
        for (major, minor) in [(7, 2), (8, 0)] {
            assert_eq!(with(major, minor).check("gfx942"), Ok(()), "{major}.{minor}");
        }
    }

    #[test]
    fn code_is_compiled_once_and_then_comes_from_the_cache() {
        let Some(_) = real_compiler() else { return };
        let hip = Hip::load(&[]).expect("loaded before");
        let directory = tempfile::tempdir().expect("a folder");
        let cache = CodeCache { directory: Some(directory.path().to_owned()) };
        let prepare = || prepare(hip, "gfx90a", &[], &cache, |code| Ok(code.to_vec()));
        let (compiled, origin) = prepare().expect("it compiles");
        assert_eq!(origin, format!("compiled for gfx90a by hipRTC {}", hip.version));
        let (cached, origin) = prepare().expect("it is there");
        assert!(origin.starts_with("loaded from cache"), "{origin}");
        assert!(compiled == cached, "other code");
    }

    #[test]
    fn code_that_the_device_refuses_is_a_reason_and_is_not_kept() {
        let Some(_) = real_compiler() else { return };
        let hip = Hip::load(&[]).expect("loaded before");
        let directory = tempfile::tempdir().expect("a folder");
        let cache = CodeCache { directory: Some(directory.path().to_owned()) };
        let refuse = |_: &[u8]| Err::<(), _>(Error::SameProcess { device: "rocm:0".into() });
        let none = prepare(hip, "gfx90a", &[], &cache, refuse).expect_err("refused");
        assert!(none.reason.starts_with("code for gfx90a does not load: "), "{}", none.reason);
        let kept = std::fs::read_dir(directory.path()).expect("a folder").count();
        assert_eq!(kept, 0);
    }
}
