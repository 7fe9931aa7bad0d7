//! The installed library, with the calls that most tests make.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use hip_sys::hiprtc::HiprtcLibrary;
use hip_sys::*;
use tempfile::TempDir;

/// A copy of the library of this test's own, with state of its own.
pub(crate) struct Hip {
    pub(crate) library: HipLibrary,
    pub(crate) folder: TempDir,
}

impl Hip {
    pub(crate) fn load() -> Self {
        Self::without(&[])
    }

    pub(crate) fn without(absent: &[&str]) -> Self {
        let folder = installed(hip_shim::VERSION, absent);
        // SAFETY: its constructors are those of Rust's library.
        let library = unsafe { HipLibrary::new(folder.path().join("libamdhip64.so.7")) };
        Self { library: library.expect("loads"), folder }
    }

    pub(crate) fn rtc(&self) -> HiprtcLibrary {
        // SAFETY: as in `without`.
        unsafe { HiprtcLibrary::new(self.folder.path().join("libhiprtc.so.7")) }.expect("loads")
    }

    /// Replaces the failures of this copy.
    pub(crate) fn fail(&self, text: &str) {
        let text = CString::new(text).expect("no zero");
        let path = self.folder.path().join("libamdhip64.so.7");
        // SAFETY: the signature is that of `faults.rs`; the library is loaded already.
        unsafe {
            let library = libloading::Library::new(path).expect("loads");
            let fail: libloading::Symbol<unsafe extern "C" fn(*const c_char) -> c_int> =
                library.get(b"kvferry_hip_shim_fail").expect("exported");
            assert_eq!(fail(text.as_ptr()), 0);
        }
    }

    #[track_caller]
    pub(crate) fn allocate(&self, bytes: usize) -> *mut c_void {
        let mut addr = null_mut();
        // SAFETY: the library writes one address.
        assert_eq!(unsafe { self.library.hipMalloc(&mut addr, bytes) }, hipSuccess);
        addr
    }

    #[track_caller]
    pub(crate) fn stream(&self, flags: c_uint) -> hipStream_t {
        let mut stream = null_mut();
        // SAFETY: the library writes one stream.
        let made = unsafe { self.library.hipStreamCreateWithPriority(&mut stream, flags, 0) };
        assert_eq!(made, hipSuccess);
        stream
    }

    #[track_caller]
    pub(crate) fn fill(&self, addr: *mut c_void, byte: u8, len: usize, stream: hipStream_t) {
        // SAFETY: tests keep their memory.
        let filled = unsafe { self.library.hipMemsetD8Async(addr, byte, len, stream) };
        assert_eq!(filled, hipSuccess);
    }

    #[track_caller]
    pub(crate) fn copy(
        &self,
        dst: *mut c_void,
        src: *const c_void,
        len: usize,
        stream: hipStream_t,
    ) {
        // SAFETY: tests keep their memory.
        let copied =
            unsafe { self.library.hipMemcpyAsync(dst, src, len, hipMemcpyDefault, stream) };
        assert_eq!(copied, hipSuccess);
    }

    #[track_caller]
    pub(crate) fn event(&self) -> hipEvent_t {
        let mut event = null_mut();
        // SAFETY: the library writes one event.
        let made = unsafe { self.library.hipEventCreateWithFlags(&mut event, 0) };
        assert_eq!(made, hipSuccess);
        event
    }

    /// A new event behind what the stream holds.
    #[track_caller]
    pub(crate) fn record(&self, stream: hipStream_t) -> hipEvent_t {
        let event = self.event();
        // SAFETY: both live.
        assert_eq!(unsafe { self.library.hipEventRecord(event, stream) }, hipSuccess);
        event
    }

    pub(crate) fn query(&self, event: hipEvent_t) -> hipError_t {
        // SAFETY: the event lives.
        unsafe { self.library.hipEventQuery(event) }
    }

    #[track_caller]
    pub(crate) fn wait(&self, event: hipEvent_t) {
        // SAFETY: the event lives.
        assert_eq!(unsafe { self.library.hipEventSynchronize(event) }, hipSuccess);
    }

    /// What the memory holds now, without waiting for a stream.
    pub(crate) fn bytes(&self, addr: *const c_void, len: usize) -> Vec<u8> {
        let byte = |at| {
            let byte: *const u8 = addr.cast();
            // SAFETY: memory of the test; volatile, since a stream may write it.
            unsafe { byte.add(at).read_volatile() }
        };
        (0..len).map(byte).collect()
    }

    pub(crate) fn gate(&self) -> Gate<'_> {
        let mut word = null_mut();
        // SAFETY: the library writes one address.
        assert_eq!(unsafe { self.library.hipHostMalloc(&mut word, 64, 0) }, hipSuccess);
        Gate { hip: self, word: word.cast() }
    }

    pub(crate) fn last_error(&self) -> hipError_t {
        // SAFETY: always allowed.
        unsafe { self.library.hipGetLastError() }
    }
}

/// Holds streams up until it is opened.
pub(crate) struct Gate<'a> {
    hip: &'a Hip,
    word: *mut AtomicU32,
}

impl Gate<'_> {
    #[track_caller]
    pub(crate) fn hold(&self, stream: hipStream_t) {
        let word = self.word.cast();
        // SAFETY: the word is never freed.
        let held = unsafe {
            self.hip.library.hipStreamWaitValue32(stream, word, 1, hipStreamWaitValueGte, u32::MAX)
        };
        assert_eq!(held, hipSuccess);
    }

    pub(crate) fn open(&self) {
        // SAFETY: the word is never freed.
        unsafe { &*self.word }.store(1, Ordering::Release);
    }
}

/// A folder with the libraries of that version.
pub(crate) fn installed(version: u32, absent: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    hip_shim::install(folder.path(), version, absent).expect("installs");
    folder
}

const ALONE: &str = "KVFERRY_HIP_SHIM_TEST";

/// Whether this is the process that [`alone`] made for that test.
pub(crate) fn is_alone(test: &str) -> bool {
    std::env::var(ALONE).is_ok_and(|name| name == test)
}

/// Runs `body` in a process of its own, with those variables. `test` is the caller's name.
#[track_caller]
pub(crate) fn alone(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if is_alone(test) {
        return body();
    }
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([test, "--exact", "--nocapture"])
        .env(ALONE, test)
        .envs(variables.iter().copied())
        .output()
        .expect("starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    // Zero tests would be a success, too.
    assert!(output.status.success() && said.contains("1 passed"), "{said}{complained}");
}

/// Compiles and loads, and finds one kernel.
#[track_caller]
pub(crate) fn kernel(hip: &Hip, source: &str, name: &str) -> hipFunction_t {
    let code = compile(hip, source, &[]).expect("compiles");
    let name = CString::new(name).expect("no zero");
    let (mut module, mut function) = (null_mut(), null_mut());
    // SAFETY: whole code, a text with its zero; the library writes one name each.
    unsafe {
        let loaded = hip.library.hipModuleLoadData(&mut module, code.as_ptr().cast());
        assert_eq!(loaded, hipSuccess);
        let found = hip.library.hipModuleGetFunction(&mut function, module, name.as_ptr());
        assert_eq!(found, hipSuccess);
    }
    function
}

/// The code, or the compiler's result and log.
pub(crate) fn compile(hip: &Hip, source: &str, options: &[&str]) -> Result<Vec<u8>, (u32, String)> {
    let rtc = hip.rtc();
    let text = |text: &str| CString::new(text).expect("no zero");
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let (source, mut program, mut len) = (text(source), null_mut(), 0);
    // SAFETY: texts end with zeros and live; buffers are as long as the library says.
    unsafe {
        let name = c"test.cu".as_ptr();
        let made = rtc.hiprtcCreateProgram(&mut program, source.as_ptr(), name, 0, null(), null());
        assert_eq!(made, 0);
        let compiled = rtc.hiprtcCompileProgram(program, options.len() as c_int, options.as_ptr());
        if compiled != 0 {
            assert_eq!(rtc.hiprtcGetProgramLogSize(program, &mut len), 0);
            let mut log = vec![0_u8; len];
            assert_eq!(rtc.hiprtcGetProgramLog(program, log.as_mut_ptr().cast()), 0);
            log.pop();
            return Err((compiled, String::from_utf8(log).expect("text")));
        }
        assert_eq!(rtc.hiprtcGetCodeSize(program, &mut len), 0);
        let mut code = vec![0_u8; len];
        assert_eq!(rtc.hiprtcGetCode(program, code.as_mut_ptr().cast()), 0);
        assert_eq!(rtc.hiprtcDestroyProgram(&mut program), 0);
        Ok(code)
    }
}

/// Names that a library exports.
pub(crate) fn has(path: &Path, symbol: &str) -> bool {
    // SAFETY: as in `without`; the symbol is only looked for.
    unsafe {
        let library = libloading::Library::new(path).expect("loads");
        library.get::<unsafe extern "C" fn()>(symbol).is_ok()
    }
}
