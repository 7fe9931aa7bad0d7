//! hipRTC and kernels of the simulated GPU.

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;

use common::{Hip, alone, compile, kernel};
use hip_sys::*;

const COPY: &str = include_str!("../../device/kernels/copy.cu");

#[track_caller]
fn launch(
    hip: &Hip,
    function: hipFunction_t,
    (grid, block): (u32, u32),
    stream: hipStream_t,
    arguments: &mut [*mut c_void],
) -> hipError_t {
    // SAFETY: tests give a kernel its own arguments.
    unsafe {
        let arguments = arguments.as_mut_ptr();
        hip.library.hipModuleLaunchKernel(
            function,
            grid,
            1,
            1,
            block,
            1,
            1,
            0,
            stream,
            arguments,
            null_mut(),
        )
    }
}

#[test]
fn the_copy_kernel_runs_behind_what_the_stream_holds_with_the_arguments_of_its_launch() {
    let hip = Hip::load();
    let stream = hip.stream(hipStreamNonBlocking);
    let gate = hip.gate();
    let memory = hip.allocate(1 << 16);
    let base = memory.expose_provenance() as u64;
    let bytes: Vec<u8> = (0..1 << 15).map(|at: u32| (at.wrapping_mul(40_503) >> 7) as u8).collect();
    hip.copy(memory, bytes.as_ptr().cast(), bytes.len(), stream);
    hip.wait(hip.record(stream));
    // Odd lengths and places, in the ring and in the arguments.
    let piece = |at: u64| [base + at * 331, base + (1 << 15) + at * 331 + at % 2, 330];
    let ring: Vec<[u64; 3]> = (0..40).map(piece).collect();
    let mut inline = [0_u64; 16 * 3 + 1];
    (40..56).for_each(|at| inline[(at as usize - 40) * 3..][..3].copy_from_slice(&piece(at)));
    inline[48] = 16;
    gate.hold(stream);
    let (mut descriptors, mut count) = (ring.as_ptr().expose_provenance() as u64, 40_u32);
    let mut arguments = [(&raw mut descriptors).cast(), (&raw mut count).cast()];
    let copy = kernel(&hip, COPY, "kvferry_copy");
    assert_eq!(launch(&hip, copy, (3, 256), stream, &mut arguments), hipSuccess);
    (descriptors, count) = (0, 1 << 30);
    let copy = kernel(&hip, COPY, "kvferry_copy_inline_few");
    let mut arguments = [(&raw mut inline).cast()];
    assert_eq!(launch(&hip, copy, (2, 256), stream, &mut arguments), hipSuccess);
    inline.fill(u64::MAX);
    assert_eq!((descriptors, count, inline[0]), (0, 1 << 30, u64::MAX), "as a caller may");
    let half = memory.wrapping_byte_add(1 << 15);
    assert_eq!(hip.bytes(half, 1 << 15), vec![0; 1 << 15], "it ran before its turn");
    gate.open();
    hip.wait(hip.record(stream));
    let mut expected = vec![0; 1 << 15];
    for at in 0..56 {
        let (from, to) = (at * 331, at * 331 + at % 2);
        expected[to..to + 330].copy_from_slice(&bytes[from..from + 330]);
    }
    assert!(hip.bytes(half, 1 << 15) == expected);
}

#[test]
fn any_kernel_without_barriers_runs_once_for_each_thread() {
    let hip = Hip::load();
    let source = "extern \"C\" __global__ void __launch_bounds__(64) number(unsigned* out, int add) {\n\
                  unsigned at = blockIdx.x * blockDim.x + threadIdx.x;\n out[at] += at + add; }";
    let number = kernel(&hip, source, "number");
    let memory = hip.allocate(4 * 192);
    let (mut out, mut add) = (memory, 1000_i32);
    let mut arguments = [(&raw mut out).cast(), (&raw mut add).cast()];
    let stream = hip.stream(hipStreamNonBlocking);
    assert_eq!(launch(&hip, number, (3, 64), stream, &mut arguments), hipSuccess);
    hip.wait(hip.record(stream));
    let expected: Vec<u8> = (0..192_u32).flat_map(|at| (at + 1000).to_ne_bytes()).collect();
    assert_eq!(hip.bytes(memory, 4 * 192), expected);
    for shape in [(0, 64), (1, 0), (1, 1025)] {
        let refused = launch(&hip, number, shape, stream, &mut arguments);
        assert_eq!(refused, hipErrorInvalidConfiguration, "{shape:?}");
    }
}

#[test]
fn a_source_that_does_not_compile_gives_the_line_in_the_log() {
    let hip = Hip::load();
    let (code, log) = compile(&hip, "\nint f() { return nothing; }", &[]).expect_err("refused");
    assert_eq!(code, 6);
    assert!(log.contains("test.cu:2") && log.contains("nothing"), "{log}");
    let (code, log) = compile(&hip, "", &["--no-such-option"]).expect_err("refused");
    assert!(code == 6 && log.contains("--no-such-option"), "{log}");
    let unknown = ["--gpu-architecture=gfx999"];
    assert_eq!(compile(&hip, "", &unknown), Err((6, String::new())), "as HIP 7, with no words");
    compile(&hip, "", &["--gpu-architecture=gfx90a:sramecc+:xnack-", "-O3"]).expect("known");
}

#[test]
fn a_folder_for_temporary_files_that_is_missing_gives_an_empty_log() {
    const NAME: &str = "a_folder_for_temporary_files_that_is_missing_gives_an_empty_log";
    alone(NAME, &[], || {
        let hip = Hip::load();
        // SAFETY: this process runs no other test.
        unsafe { std::env::set_var("TMPDIR", "/nowhere") };
        assert_eq!(compile(&hip, "", &[]), Err((6, String::new())));
    });
}

#[test]
fn code_of_another_architecture_and_what_is_no_code_are_refused() {
    let hip = Hip::load();
    let code = compile(&hip, "", &["--gpu-architecture=gfx90a"]).expect("compiles");
    let mut module = null_mut();
    // SAFETY: whole code, and a text that does not begin like one.
    unsafe {
        let refused = hip.library.hipModuleLoadData(&mut module, code.as_ptr().cast());
        assert_eq!(refused, hipErrorNoBinaryForGpu);
        let text = c"no code".as_ptr().cast();
        assert_eq!(hip.library.hipModuleLoadData(&mut module, text), hipErrorInvalidImage);
    }
}
