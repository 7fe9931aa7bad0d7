//! Stand-ins for AMD's libraries, for tests: `libamdhip64`, `libhiprtc` and `libamd_comgr` with the
//! functions that kvferry calls, on a machine that has no AMD GPU.
//!
//! Built as one library that exports all of them; [`install`](install()) makes the files that a
//! program finds by their names, with the functions that each has in the version asked for. Its
//! behaviour is read from the environment: README.md says which variables there are.
//!
//! Two ways to answer a call. *Simulated*: memory of the host is the memory of the GPUs, a thread
//! runs the work of a stream, and the host's C++ compiler makes kernels. *Forwarding*: the call
//! goes to libcuda or NVRTC, so that code for HIP runs on an NVIDIA GPU.

#![expect(
    non_snake_case,
    non_upper_case_globals,
    reason = "functions and constants have AMD's names"
)]

mod call;
mod errors;
mod exports;
mod faults;
mod forwarding;
mod install;
mod settings;
mod simulated;

pub use self::install::{BUILT, VERSION, install};
