//! An application that waits for us on the GPU and in the driver at the same time (FAILURES.md
//! B20): a kernel spins until our transfer is done, and a copy on the legacy default stream waits
//! for the kernel.
//!
//! Not with `cuMemcpyDtoH`, nor with any copy to memory that is not page-locked: behind a kernel of a
//! blocking stream they hold the lock of the context while they wait, and no thread of the process
//! can launch anything (driver 580, on an H200).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::*;
use crate::cuda::compile::Compiler;
use crate::{CompactCopy, CompactEnd, Queue, QueueOptions, SliceSource, Work};

/// Says that it runs, then waits.
const SOURCE: &str = r#"
extern "C" __global__ void spin(volatile unsigned *words) {
    words[0] = 1;
    while (words[1] == 0) {}
}
"#;

const LEN: u64 = 1 << 20;

/// Bytes that the application copies.
const LANDING: u64 = 64;

#[test]
fn a_transfer_ends_while_a_kernel_of_a_blocking_stream_and_a_copy_behind_it_wait() {
    alone(
        "spinning::a_transfer_ends_while_a_kernel_of_a_blocking_stream_and_a_copy_behind_it_wait",
        || {
            case(sys::CUstream_flags::CU_STREAM_DEFAULT);
        },
    );
}

#[test]
fn a_transfer_ends_while_a_kernel_of_a_non_blocking_stream_waits() {
    alone("spinning::a_transfer_ends_while_a_kernel_of_a_non_blocking_stream_waits", || {
        case(sys::CUstream_flags::CU_STREAM_NON_BLOCKING);
    });
}

fn case(flags: sys::CUstream_flags) {
    // The first transfer of a device, whose code nothing has run yet, and a later one of a queue.
    for used in [false, true] {
        let Some(device) = first_device() else { return };
        let Some(mut spin) = Spin::new(flags) else { return };
        let memory = |bytes| Arc::clone(&device).allocate(bytes).expect("memory");
        let (source, destination) = (memory(LEN), memory(4 * LEN));
        let bytes: Vec<u8> =
            (0..LEN).map(|at| (at.wrapping_mul(0x9E37_79B1) >> 13) as u8).collect();
        // SAFETY: all of the memory, which nobody else uses.
        unsafe { device.write(source.addr(), &bytes) }.expect("writes");
        let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
        if used {
            transfer(&mut *queue, source.addr(), destination.addr());
        }
        // SAFETY: as above.
        unsafe { device.write(destination.addr(), &vec![0; 4 * LEN as usize]) }.expect("writes");

        let (calls, copied) = (AtomicBool::new(false), AtomicBool::new(false));
        let (ended, end) = mpsc::channel();
        let context = Arc::clone(&spin.driver.context);
        let landing = spin.landing.host as usize;
        let (src, dst) = (source.addr(), destination.addr());
        std::thread::scope(|scope| {
            // Dropped before the threads are waited for, also if something here fails.
            let running = spin.start();
            scope.spawn(|| {
                let _scope = context.enter().expect("enters");
                calls.store(true, Ordering::Release);
                let legacy = std::ptr::null_mut();
                // SAFETY: reads 64 bytes of the source, which nobody writes, into pinned memory that
                // is freed after this thread.
                let done = unsafe {
                    let cuda = context.cuda;
                    cuda.cuMemcpyDtoHAsync_v2(landing as *mut c_void, src, LANDING as usize, legacy)
                        .and_then(|()| cuda.cuStreamSynchronize(legacy))
                };
                copied.store(true, Ordering::Release);
                done.expect("copies");
            });
            eventually("the application copies", || calls.load(Ordering::Acquire));
            // Nothing tells that a call of the driver has begun to wait.
            std::thread::sleep(Duration::from_millis(50));
            scope.spawn(|| {
                transfer(&mut *queue, src, dst);
                let _ = ended.send(());
            });
            let in_time = end.recv_timeout(Duration::from_secs(10));
            let waits = !copied.load(Ordering::Acquire);
            drop(running);
            in_time.expect("the transfer waited for the application, which waits for it");
            let blocking = flags == sys::CUstream_flags::CU_STREAM_DEFAULT;
            assert!(
                waits || !blocking,
                "the application's copy did not wait, so nothing was shown"
            );
        });
        let mut found = vec![0; 4 * LEN as usize];
        // SAFETY: all of the memory, which nobody writes now.
        unsafe { device.read(destination.addr(), &mut found) }.expect("reads");
        assert!(found == bytes.repeat(4), "used before: {used}");
    }
}

/// The source four times, by each kernel and by DMA; returns when it has arrived.
fn transfer(queue: &mut dyn Queue, src: u64, dst: u64) {
    let part =
        |dst, len| move |at| CopyDescriptor { src: src + at * len, dst: dst + at * len, len };
    let ring: Vec<_> = (0..1024).map(part(dst, LEN / 1024)).collect();
    let inline: Vec<_> = (0..2).map(part(dst + LEN, LEN / 2)).collect();
    let end = |addr| CompactEnd { addr, row_stride: 1024, ..CompactEnd::default() };
    let (from, to) = (end(src), end(dst + 2 * LEN));
    let compact = [CompactCopy { src: from, dst: to, len: 1024, rows: 1024, layers: 1, pages: 1 }];
    let large = [CopyDescriptor { src, dst: dst + 3 * LEN, len: LEN }];
    let mut source = SliceSource(&ring);
    let mut all = Work { compact: &compact, large: &large, ..Work::pieces(&mut source) };
    let mut source = SliceSource(&inline);
    let mut few = Work::pieces(&mut source);
    // SAFETY: the caller keeps both memories until this returns, and the destinations are apart.
    let tickets = [&mut all, &mut few].map(|work| unsafe { queue.submit(work) }.expect("submits"));
    let completions = queue.completions();
    eventually("the transfer ends", || {
        queue.check().expect("works");
        tickets.iter().all(|&ticket| completions.done(ticket))
    });
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "it never came to this: {what}");
        std::thread::yield_now();
    }
}

/// The application: its kernel, its stream, the words that it shares with the processor, and where
/// its copy lands.
struct Spin {
    driver: CudaDriver,
    stream: sys::CUstream,
    module: sys::CUmodule,
    function: sys::CUfunction,
    words: Pinned,
    landing: Pinned,
}

impl Spin {
    fn new(flags: sys::CUstream_flags) -> Option<Self> {
        let compiler = match Compiler::load() {
            Ok(compiler) => compiler,
            Err(error) => {
                crate::conformance::skip("nvrtc", &error);
                return None;
            }
        };
        let options = CudaOptions { kernel: false, cache_directory: None };
        let driver = CudaDriver::open(0, &options).expect("opened before");
        let target = &driver.info.architecture;
        let code = compiler.compile_source(SOURCE, c"spin.cu", target).expect("compiles");
        let context = Arc::clone(&driver.context);
        let _scope = context.enter().expect("enters");
        let words = driver.allocate_pinned(2 * size_of::<u32>() as u64).expect("two words");
        let landing = driver.allocate_pinned(LANDING).expect("a few bytes");
        let (mut stream, mut module) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut function = std::ptr::null_mut();
        // SAFETY: the code is whole, as NVRTC made it, and the name ends with a zero; the driver
        // writes one module, one function and one stream.
        unsafe {
            let cuda = driver.cuda();
            cuda.cuModuleLoadData(&mut module, code.as_ptr().cast()).expect("loads");
            cuda.cuModuleGetFunction(&mut function, module, c"spin".as_ptr()).expect("has it");
            cuda.cuStreamCreateWithPriority(&mut stream, flags as c_uint, 0).expect("a stream");
        }
        Some(Self { driver, stream, module, function, words, landing })
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: one of two aligned words that live as long as `self`; the kernel, too, touches
        // them whole.
        unsafe { &*self.words.host.cast::<AtomicU32>().add(at) }
    }

    /// The kernel runs until the value is dropped.
    fn start(&mut self) -> Running<'_> {
        (0..2).for_each(|at| self.word(at).store(0, Ordering::Release));
        let mut words = self.words.device;
        let mut arguments: [*mut c_void; 1] = [(&raw mut words).cast()];
        {
            let _scope = self.driver.context.enter().expect("enters");
            // SAFETY: the kernel takes one pointer, to words that live until `Running` ends it.
            unsafe {
                self.driver.cuda().cuLaunchKernel(
                    self.function,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    0,
                    self.stream,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
            .expect("launches");
        }
        let running = Running(self);
        eventually("the kernel runs", || running.0.word(0).load(Ordering::Acquire) == 1);
        running
    }
}

/// Lets the kernel end when dropped.
struct Running<'a>(&'a Spin);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.word(1).store(1, Ordering::Release);
    }
}

impl Drop for Spin {
    fn drop(&mut self) {
        let _scope = self.driver.context.enter().expect("enters");
        let cuda = self.driver.cuda();
        // SAFETY: made by `new`, ended once; `Running` has let the kernel end.
        unsafe {
            let _ = cuda.cuStreamSynchronize(self.stream);
            let _ = cuda.cuStreamDestroy_v2(self.stream);
            let _ = cuda.cuModuleUnload(self.module);
        }
        let _ = self.driver.free_pinned(self.words);
        let _ = self.driver.free_pinned(self.landing);
    }
}
