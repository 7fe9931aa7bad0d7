//! Calls that fail because a test wants them to.
//!
//! `hipEventRecord:3=719` fails the third call of that function, `:3+` the third and all later
//! ones. `lost:hipModuleLaunchKernel:2=719` loses the device at that call: it and everything that
//! needs a device after it fails, and no work runs any more.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use hip_sys::hipError_t;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Fault {
    function: String,
    /// The first call that fails, counted from 1.
    from: u64,
    /// All calls after it, too.
    onwards: bool,
    code: hipError_t,
    /// Loses the device.
    lost: bool,
}

static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());
/// Whether there are any; most calls look no further.
static ANY: AtomicBool = AtomicBool::new(false);
/// What a lost device answers; 0 while it works.
static LOST: AtomicU32 = AtomicU32::new(0);

/// Calls of one function.
#[derive(Debug)]
pub(crate) struct Calls(AtomicU64);

impl Calls {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

/// What this call of `function` fails with, if it is to fail.
#[inline]
pub(crate) fn injected(
    function: &str,
    calls: &Calls,
    needs_device: fn(&str) -> bool,
) -> Option<hipError_t> {
    static FROM_ENVIRONMENT: Once = Once::new();
    FROM_ENVIRONMENT.call_once(|| {
        if let Ok(text) = std::env::var("KVFERRY_HIP_SHIM_FAIL") {
            let faults = parse(&text).unwrap_or_else(|| panic!("KVFERRY_HIP_SHIM_FAIL={text}"));
            set(faults);
        }
    });
    let call = calls.0.fetch_add(1, Ordering::Relaxed) + 1;
    if !ANY.load(Ordering::Relaxed) {
        return None;
    }
    fault(function, call, needs_device)
}

#[cold]
fn fault(function: &str, call: u64, needs_device: fn(&str) -> bool) -> Option<hipError_t> {
    let faults = FAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    let hit = faults.iter().find(|fault| {
        fault.function == function && (fault.from == call || fault.onwards && call > fault.from)
    });
    if let Some(fault) = hit {
        if fault.lost {
            LOST.store(fault.code, Ordering::Release);
        }
        return Some(fault.code);
    }
    lost().filter(|_| needs_device(function))
}

/// What a device that is lost answers.
pub(crate) fn lost() -> Option<hipError_t> {
    Some(LOST.load(Ordering::Acquire)).filter(|&code| code != 0)
}

fn set(faults: Vec<Fault>) {
    ANY.store(!faults.is_empty(), Ordering::Relaxed);
    *FAULTS.lock().unwrap_or_else(PoisonError::into_inner) = faults;
}

/// Replaces KVFERRY_HIP_SHIM_FAIL while the process runs; calls count on from where they are. Null
/// or an empty text ends all failures, but brings back no device that is lost. Returns 0, or 1 if
/// the text is none of this form.
///
/// # Safety
/// `text` is null or ends with a zero.
#[unsafe(no_mangle)]
unsafe extern "C" fn kvferry_hip_shim_fail(text: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let text = if text.is_null() { c"" } else { unsafe { CStr::from_ptr(text) } };
    match text.to_str().ok().and_then(parse) {
        Some(faults) => {
            set(faults);
            0
        }
        None => 1,
    }
}

fn parse(text: &str) -> Option<Vec<Fault>> {
    let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    entries.map(parse_one).collect()
}

fn parse_one(entry: &str) -> Option<Fault> {
    let (lost, entry) = match entry.strip_prefix("lost:") {
        Some(entry) => (true, entry),
        None => (false, entry),
    };
    let (function, rest) = entry.split_once(':')?;
    let (call, code) = rest.split_once('=')?;
    let (call, onwards) = match call.strip_suffix('+') {
        Some(call) => (call, true),
        None => (call, false),
    };
    let from = call.parse().ok().filter(|&from| from > 0)?;
    let code = code.parse().ok().filter(|&code| code > 0)?;
    Some(Fault { function: function.to_owned(), from, onwards, code, lost })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_failures_is_read_whole_or_not_at_all() {
        let fault = |function: &str, from, onwards, code, lost| {
            let function = function.to_owned();
            Fault { function, from, onwards, code, lost }
        };
        let text = "hipEventRecord:3=719, hipMalloc:1+=2,lost:hipModuleLaunchKernel:2=700";
        assert_eq!(
            parse(text),
            Some(vec![
                fault("hipEventRecord", 3, false, 719, false),
                fault("hipMalloc", 1, true, 2, false),
                fault("hipModuleLaunchKernel", 2, false, 700, true),
            ])
        );
        assert_eq!(parse(""), Some(vec![]));
        for bad in ["hipMalloc", "hipMalloc=2", "hipMalloc:0=2", "hipMalloc:1=0", "hipMalloc:x=2"] {
            assert_eq!(parse(&format!("hipFree:1=1,{bad}")), None, "{bad}");
        }
    }
}
