//! Pages of a device whose contents are told from their seeds.

use std::sync::Arc;
use std::time::Duration;

use kvferry_device::conformance::ApplicationStream;
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_device::{Device, Error as DeviceError};
use kvferry_engine::{
    Buffer, DeviceName, Engine, PageBatch, PageKey, PageShape, PageStore, State, StoreOptions,
    WhenFull, open_device,
};

use crate::common::config;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// For what is expected not to come.
pub(crate) const MOMENT: Duration = Duration::from_millis(20);

pub(crate) const PAGES: u32 = 48;

pub(crate) const LAYERS: u32 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Host,
    Sim,
    #[cfg(feature = "cuda")]
    Cuda,
    #[cfg(feature = "rocm")]
    Rocm,
}

/// Pages of a device whose contents are told from their seeds.
pub(crate) struct Bench {
    pub(crate) engine: Arc<Engine>,
    pub(crate) memory: Buffer,
    pub(crate) shape: PageShape,
    pub(crate) control: Option<Arc<SimControl>>,
    pub(crate) stream: Option<Box<dyn Fn() -> Box<dyn ApplicationStream>>>,
}

pub(crate) struct Held<'a>(pub(crate) &'a SimControl);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Of layers in which pages lie side by side.
pub(crate) fn shape(page_bytes: u64) -> PageShape {
    let layer_stride = u64::from(PAGES) * page_bytes + 320;
    let layers = LAYERS;
    PageShape { addr: 0, pages: PAGES, page_bytes, layers, layer_stride, page_stride: page_bytes }
}

impl Bench {
    /// `None` without such a device, and says so.
    pub(crate) fn open(kind: Kind, shape: PageShape) -> Option<Self> {
        Self::open_with(kind, shape, &[])
    }

    pub(crate) fn open_with(kind: Kind, shape: PageShape, knobs: &[(&str, &str)]) -> Option<Self> {
        let config = config(knobs);
        let host = kvferry_device::host().expect("always there");
        let gpu = |name| open_device(name, &config);
        let mut control = None;
        let mut stream: Option<Box<dyn Fn() -> Box<dyn ApplicationStream>>> = None;
        let device: Option<Result<_, DeviceError>> = match kind {
            Kind::Host => None,
            Kind::Sim => {
                let (device, its) = sim(&SimOptions::default()).expect("always there");
                control = Some(Arc::clone(&its));
                stream = Some(Box::new(move || Box::new(its.stream())));
                Some(Ok(device))
            }
            #[cfg(feature = "cuda")]
            Kind::Cuda => {
                use kvferry_device::cuda::application_stream;
                stream = Some(Box::new(|| Box::new(application_stream(0).expect("a stream"))));
                Some(gpu(DeviceName::Cuda(0)))
            }
            #[cfg(feature = "rocm")]
            Kind::Rocm => {
                use kvferry_device::rocm::application_stream;
                stream = Some(Box::new(|| Box::new(application_stream(0).expect("a stream"))));
                Some(gpu(DeviceName::Rocm(0)))
            }
        };
        let _ = (gpu, DeviceName::Host);
        let devices: Vec<Arc<dyn Device>> = match device {
            None => vec![host],
            Some(Ok(device)) => vec![device, host],
            Some(Err(error)) => {
                let name = format!("{kind:?}").to_lowercase();
                kvferry_device::conformance::skip(&name, &error);
                return None;
            }
        };
        let engine = Engine::new(config.clone(), devices).expect("an engine");
        let PageShape { pages, page_bytes, layers, layer_stride, page_stride, .. } = shape;
        let len =
            layer_stride * u64::from(layers - 1) + page_stride * u64::from(pages - 1) + page_bytes;
        let memory = engine.allocate(&engine.devices()[0], len).expect("memory");
        let shape = PageShape { addr: memory.addr(), ..shape };
        Some(Self { engine, memory, shape, control, stream })
    }

    pub(crate) fn store(&self, options: StoreOptions) -> PageStore {
        PageStore::new(&self.engine, 0, self.shape, options).expect("a store")
    }

    pub(crate) fn control(&self) -> &SimControl {
        self.control.as_ref().expect("simulated")
    }

    /// Nothing runs on the simulated GPU until the guard is dropped, be it by a failing test.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.control().hold();
        Held(self.control())
    }

    pub(crate) fn stream(&self) -> Box<dyn ApplicationStream> {
        self.stream.as_ref().expect("a device with streams")()
    }

    /// Bytes of a page in all layers.
    pub(crate) fn page_bytes(&self) -> u64 {
        self.shape.page_bytes * u64::from(self.shape.layers)
    }

    /// Where a page's rows are in the memory.
    pub(crate) fn rows(&self, page: u32) -> impl Iterator<Item = (u32, u64)> {
        let PageShape { layers, layer_stride, page_stride, .. } = self.shape;
        (0..layers).map(move |layer| {
            (layer, u64::from(layer) * layer_stride + u64::from(page) * page_stride)
        })
    }

    /// Contents of the page as of a seed; 0 is zeros.
    pub(crate) fn fill(&self, page: u32, seed: u64) {
        for (layer, offset) in self.rows(page) {
            let bytes = row(seed, layer, self.shape.page_bytes);
            self.memory.write(offset, &bytes).expect("inside");
        }
    }

    pub(crate) fn fill_all(&self, seed: impl Fn(u32) -> u64) {
        (0..self.shape.pages).for_each(|page| self.fill(page, seed(page)));
    }

    pub(crate) fn holds(&self, page: u32, seed: u64) -> bool {
        self.rows(page).all(|(layer, offset)| {
            let mut found = vec![0; self.shape.page_bytes as usize];
            self.memory.read(offset, &mut found).expect("inside");
            found == row(seed, layer, self.shape.page_bytes)
        })
    }

    pub(crate) fn check(&self, page: u32, seed: u64) {
        assert!(self.holds(page, seed), "page {page} is not of seed {seed}");
    }

    pub(crate) fn check_all(&self, seed: impl Fn(u32) -> u64) {
        (0..self.shape.pages).for_each(|page| self.check(page, seed(page)));
    }
}

pub(crate) fn row(seed: u64, layer: u32, len: u64) -> Vec<u8> {
    let mix = |at: u64| (at + 1).wrapping_mul(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let byte = |at: u64| (mix(at + u64::from(layer) * 131) >> 32) as u8;
    (0..len).map(|at| if seed == 0 { 0 } else { byte(at) }).collect()
}

pub(crate) fn options(bench: &Bench, pages: u64) -> StoreOptions {
    // A slot is a page whose rows begin on borders of 64 bytes.
    let slot = bench.shape.page_bytes.next_multiple_of(64) * u64::from(bench.shape.layers);
    StoreOptions { when_full: WhenFull::Refuse, ..StoreOptions::with_budget(pages * slot) }
}

pub(crate) fn key(number: u64) -> PageKey {
    PageKey(u128::from(number) << 64 | 0xF00D)
}

pub(crate) fn done(store: &PageStore, batch: &PageBatch) {
    assert_eq!(store.wait(batch, PATIENCE), Ok(State::Completed));
}

pub(crate) fn simulated(shape: PageShape) -> Bench {
    Bench::open(Kind::Sim, shape).expect("always there")
}
