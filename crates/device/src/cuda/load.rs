//! The loads of `kernels/load.cu` on an NVIDIA GPU.
//!
//! A load has a stream of its own, not blocking and of normal priority, in the device's primary
//! context: to the GPU it is the model of the process that moves bytes. One thread keeps a few
//! steps queued and waits for the oldest by an event. It never waits for the device, and while it
//! waits it sleeps, so that it takes no processor from the thread that submits transfers. The decode
//! load alone waits for every step before it launches the next, as a decoder does that has to see
//! the token (`decode.rs`).

mod decode;
mod module;
mod steps;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys;

use self::decode::Decode;
use self::module::{Buffer, Module};
use self::steps::{Launch, Running};
use super::context::Context;
use super::library::Cuda;
use super::{count_devices, identity};
use crate::error::{Error, Result};
use crate::load::{Body, LoadError, LoadKind};

const SOURCE: &str = include_str!("../../kernels/load.cu");

/// Threads of a block, as in the source.
const BLOCK_THREADS: u32 = 256;
/// Rows and columns of a block's tile of the product, as in the source.
const TILE: u32 = 128;

/// Columns of the product, and its depth: a layer of a model of 4096.
const COLUMNS: u32 = 4096;
const DEPTH: u32 = 4096;
/// Rows of the product are as many tiles as take this long, within a bound that memory sets.
const GEMM_STEP: Duration = Duration::from_millis(2);
const MAX_ROW_TILES: u32 = 128;
/// How long a short block is, and how often a step fills the GPU with them.
const BLOCK_TIME: Duration = Duration::from_micros(40);
const BLOCK_WAVES: u32 = 6;
/// Bytes that a step of the memory load reads and writes; a GPU with little memory gets an eighth
/// of it.
const MEMORY_BYTES: u64 = 2 << 30;

/// Seeds of the product's operands.
const SEEDS: [u32; 2] = [1, 1 << 30];

/// The loads, compiled for one GPU.
#[derive(Debug)]
pub(crate) struct CudaLoads {
    context: Arc<Context>,
    module: Arc<Module>,
    capability: u32,
    /// Blocks that are on the GPU at once, of kernels that need few registers.
    resident: u32,
    memory_bytes: u64,
    /// Sizes that were measured: tiles of rows, and iterations of a block.
    sizes: Mutex<Sizes>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    row_tiles: Option<u32>,
    iterations: Option<u32>,
}

impl CudaLoads {
    /// Compiles the loads for GPU `ordinal`.
    pub(crate) fn open(ordinal: u32) -> Result<Self, LoadError> {
        let asked = format!("cuda:{ordinal}");
        let cuda = Cuda::load()?;
        let count = count_devices(cuda, &asked)?;
        if ordinal >= count {
            let reason = format!("this process sees {count} of them, numbered from 0");
            return Err(Error::NoDevice { device: asked, reason }.into());
        }
        let error = |failure| cuda.error(failure, &asked);
        let device = identity::device(cuda, ordinal).map_err(error)?;
        let (info, capability) = identity::info(cuda, device, ordinal).map_err(error)?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the device comes from cuDeviceGet; the driver writes one number.
            unsafe { cuda.cuDeviceGetAttribute(&mut value, attribute, device) }.map_err(error)?;
            Ok::<_, Error>(u32::try_from(value).unwrap_or(1).max(1))
        };
        use sys::CUdevice_attribute as Attribute;
        let processors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let threads = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
        let context = Context::retain(cuda, device, ordinal, info.uuid)?;
        let module = Module::compile(&context, capability, SOURCE)?;
        Ok(Self {
            context,
            module: Arc::new(module),
            capability,
            resident: processors * (threads / BLOCK_THREADS).max(1),
            memory_bytes: info.memory_bytes,
            sizes: Mutex::default(),
        })
    }

    /// What is needed to run a load, and what a step of it does.
    pub(crate) fn prepare(&self, kind: LoadKind) -> Result<(String, Body), LoadError> {
        let (about, running) = match kind {
            LoadKind::Gemm => self.gemm()?,
            LoadKind::Blocks => self.blocks()?,
            LoadKind::Memory => self.memory()?,
            LoadKind::Decode => {
                let decode = Decode::new(self)?;
                return Ok((decode.about(), Box::new(move |shared| decode.run(shared))));
            }
        };
        Ok((about, Box::new(move |shared| running.run(shared))))
    }

    fn gemm(&self) -> Result<(String, Running), LoadError> {
        if self.capability < 80 {
            return Err(LoadError::Unsupported {
                device: self.context.to_string(),
                load: LoadKind::Gemm,
                reason: format!(
                    "it needs bfloat16 tensor cores, compute capability 8.0; this is {}.{}",
                    self.capability / 10,
                    self.capability % 10
                ),
            });
        }
        let bytes = |rows: u32| u64::from(rows) * u64::from(DEPTH) * 2;
        let a = Buffer::new(&self.context, bytes(MAX_ROW_TILES * TILE))?;
        let b = Buffer::new(&self.context, bytes(COLUMNS))?;
        let c =
            Buffer::new(&self.context, u64::from(MAX_ROW_TILES * TILE * 2) * u64::from(COLUMNS))?;
        let (a_addr, b_addr, c_addr) = (a.addr, b.addr, c.addr);
        let mut running = Running::new(self, vec![a, b, c])?;
        for (addr, len, seed) in
            [(a_addr, bytes(MAX_ROW_TILES * TILE), SEEDS[0]), (b_addr, bytes(COLUMNS), SEEDS[1])]
        {
            running.launch = Launch {
                function: self.module.fill,
                grid: [self.resident, 1],
                arguments: [addr, len / 2, seed.into(), 0, 0],
            };
            running.time(1)?;
        }
        let with_rows = |row_tiles: u32| Launch {
            function: self.module.gemm,
            grid: [COLUMNS / TILE, row_tiles],
            arguments: [a_addr, b_addr, c_addr, COLUMNS.into(), DEPTH.into()],
        };
        let known = self.sizes().row_tiles;
        let row_tiles = match known {
            Some(row_tiles) => row_tiles,
            None => {
                const TRIAL: u32 = 32;
                running.launch = with_rows(TRIAL);
                scaled(TRIAL, running.step_time()?, GEMM_STEP).clamp(1, MAX_ROW_TILES)
            }
        };
        self.sizes().row_tiles = Some(row_tiles);
        running.launch = with_rows(row_tiles);
        let about = format!(
            "bfloat16 product of {} x {DEPTH} by {DEPTH} x {COLUMNS} on tensor cores",
            row_tiles * TILE
        );
        Ok((about, running))
    }

    fn blocks(&self) -> Result<(String, Running)> {
        let sink = Buffer::new(&self.context, 4)?;
        let addr = sink.addr;
        let mut running = Running::new(self, vec![sink])?;
        let with = |waves: u32, iterations: u32| Launch {
            function: self.module.blocks,
            grid: [self.resident * waves, 1],
            arguments: [addr, iterations.into(), 0, 0, 0],
        };
        let known = self.sizes().iterations;
        let iterations = match known {
            Some(iterations) => iterations,
            None => {
                // Long enough that starting the launch does not count.
                const TRIAL: u32 = 50_000;
                running.launch = with(1, TRIAL);
                scaled(TRIAL, running.step_time()?, BLOCK_TIME).max(1)
            }
        };
        self.sizes().iterations = Some(iterations);
        running.launch = with(BLOCK_WAVES, iterations);
        let about = format!(
            "{} blocks of {} us, {} at once, {} multiply-adds a thread",
            self.resident * BLOCK_WAVES,
            BLOCK_TIME.as_micros(),
            self.resident,
            iterations * 2
        );
        Ok((about, running))
    }

    fn memory(&self) -> Result<(String, Running)> {
        let bytes = MEMORY_BYTES.min(self.memory_bytes / 8) / 16 * 16;
        let buffer = Buffer::new(&self.context, bytes)?;
        let launch = Launch {
            function: self.module.memory,
            grid: [self.resident, 1],
            arguments: [buffer.addr, bytes / 16, 0, 0, 0],
        };
        let mut running = Running::new(self, vec![buffer])?;
        running.launch = launch;
        let about = format!("reads and writes {:.2} GB of device memory", bytes as f64 / 1e9);
        Ok((about, running))
    }

    fn sizes(&self) -> MutexGuard<'_, Sizes> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The size that takes `wanted`, if `size` takes `took` and time grows with size.
fn scaled(size: u32, took: Duration, wanted: Duration) -> u32 {
    let factor = wanted.as_secs_f64() / took.as_secs_f64().max(1e-9);
    (f64::from(size) * factor).round() as u32
}

fn report(result: Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, "a load did not end cleanly");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::skip;
    use crate::cuda::compile::{Compiler, targets};
    use crate::load::Loads;

    fn loads() -> Option<CudaLoads> {
        match CudaLoads::open(0) {
            Ok(loads) => Some(loads),
            Err(error) => {
                skip("cuda", &error);
                None
            }
        }
    }

    #[test]
    fn the_source_has_the_block_and_the_tile_of_the_launches() {
        assert!(SOURCE.contains(&format!("#define BLOCK {BLOCK_THREADS}\n")));
        assert!(SOURCE.contains(&format!("#define TILE {TILE}\n")));
        for kernel in ["fill", "blocks", "memory", "weights", "gemm"] {
            assert!(SOURCE.contains(&format!("ENTRY kvferry_load_{kernel}(")), "{kernel}");
        }
    }

    #[test]
    fn the_loads_compile_for_every_architecture_and_what_does_not_is_an_error_with_the_log() {
        let compiler = match Compiler::load() {
            Ok(compiler) => compiler,
            Err(error) => return skip("nvrtc", &error),
        };
        for &architecture in compiler.architectures.iter().filter(|&&known| known >= 70) {
            for target in targets(&compiler.architectures, architecture) {
                let code = compiler.compile_source(SOURCE, c"load.cu", &target);
                let code = code.unwrap_or_else(|error| {
                    panic!("{target}: {}\n{}", error.reason, error.log);
                });
                assert!(!code.is_empty(), "{target}");
            }
        }
        let newest = compiler.architectures.iter().max().expect("it knows some");
        let error = compiler
            .compile_source("no kernel at all", c"load.cu", &format!("sm_{newest}"))
            .expect_err("it is not C++");
        assert!(error.reason.contains("NVRTC_ERROR_COMPILATION (6)"), "{error:?}");
        assert!(error.log.contains("load.cu(1)"), "{error:?}");
    }

    #[test]
    fn a_source_that_does_not_compile_is_an_error_that_names_the_device() {
        let Some(loads) = loads() else { return };
        let error = Module::compile(&loads.context, loads.capability, "no kernel at all")
            .expect_err("it is not C++");
        let LoadError::NotCompiled { device, log, .. } = &error else { panic!("{error}") };
        assert_eq!(device, "cuda:0");
        assert!(log.contains("load.cu(1)"), "{error}");
    }

    #[test]
    fn a_machine_without_a_gpu_or_a_compiler_gives_an_error_and_no_panic() {
        if let Err(error) = CudaLoads::open(0) {
            assert!(
                matches!(error, LoadError::Device(_) | LoadError::NotCompiled { .. }),
                "{error}"
            );
        }
        assert!(matches!(CudaLoads::open(u32::MAX), Err(LoadError::Device(_))));
    }

    #[test]
    fn every_load_keeps_running_on_the_gpu() {
        let Some(cuda) = loads() else { return };
        let info = crate::cuda::open(0, &crate::cuda::CudaOptions::default()).expect("it is there");
        let loads = Loads::open(info.info()).expect("they just compiled");
        for kind in LoadKind::ALL {
            if kind == LoadKind::Gemm && cuda.capability < 80 {
                continue;
            }
            let load = loads.start(kind, true).expect("it starts");
            let first = load.read().expect("it runs");
            assert_eq!(first.durations.len() as u64, first.steps, "{kind}");
            let start = std::time::Instant::now();
            let mut steps = first.durations;
            while steps.len() < 100 {
                steps.extend(load.read().expect("it runs").durations);
                assert!(start.elapsed().as_secs() < 30, "{kind}: {} steps", steps.len());
                std::thread::yield_now();
            }
            steps.sort_unstable();
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("{kind}: {}, median step {:?}\n", load.about(), steps[50]),
            );
            assert!(steps[50] > Duration::from_micros(50), "{kind}: {:?}", steps[50]);
        }
    }

    /// What `kvferry_load_fill` writes.
    fn filled(index: u64, seed: u32) -> f32 {
        let mut bits = ((index / 2) as u32).wrapping_add(seed).wrapping_mul(2_654_435_761);
        bits ^= bits >> 15;
        bits = bits.wrapping_mul(2_246_822_519);
        bits ^= bits >> 13;
        let word = (bits & 0x807f_807f) | 0x3f00_3f00;
        f32::from_bits((word >> (index % 2 * 16)) << 16)
    }

    #[test]
    fn the_product_is_that_of_the_two_matrices() {
        let Some(loads) = loads() else { return };
        let (_, running) = match loads.gemm() {
            Ok(prepared) => prepared,
            Err(error) => return skip("tensor cores", &error),
        };
        running.time(1).expect("one step");
        let (rows, columns, depth) =
            (u64::from(running.launch.grid[1] * TILE), u64::from(COLUMNS), u64::from(DEPTH));
        let _scope = loads.context.enter().expect("it is ours");
        // Every residue modulo the tile, in different tiles; the first and the last of all.
        let samples = (0..256).map(|index| (index * 8191 % rows, index * 4099 % columns));
        for (row, column) in samples.chain([(0, 0), (rows - 1, columns - 1)]) {
            let mut value = [0_u16];
            let addr = running.launch.arguments[2] + (row * columns + column) * 2;
            // SAFETY: the address is inside C, the stream is idle, and the copy is waited for.
            unsafe {
                let cuda = loads.context.cuda;
                cuda.cuMemcpyDtoHAsync_v2(value.as_mut_ptr().cast(), addr, 2, running.stream)
                    .and_then(|()| cuda.cuStreamSynchronize(running.stream))
            }
            .expect("two bytes");
            let value = f32::from_bits(u32::from(value[0]) << 16);
            let expected: f64 = (0..depth)
                .map(|k| {
                    let a = filled(row * depth + k, SEEDS[0]);
                    f64::from(a) * f64::from(filled(column * depth + k, SEEDS[1]))
                })
                .sum();
            // A bfloat16 has eight bits.
            let error = (f64::from(value) - expected).abs();
            assert!(error <= 0.1 + expected.abs() / 200.0, "{row}, {column}: {value}, {expected}");
        }
    }
}
