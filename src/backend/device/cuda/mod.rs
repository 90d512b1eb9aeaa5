//! NVIDIA devices.
//!
//! The driver library is found at run time. Without it, or with one that is too old, every constructor
//! answers with an error value; nothing aborts. No toolkit is needed, neither to build nor to run.
#![expect(unsafe_code, reason = "calls the driver through a table of C functions")]

mod api;
mod measure;

pub use measure::MeasureError;

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use api::{Api, BatchAttributes, Code, Handle};

use super::driver::{Capabilities, Driver, DriverError, EventId, StreamId};
use super::job::Direction;
use super::kernels::{Kernel, Ring, Side};
use super::plan::PlanOptions;
use super::stream::{DevicePlane, StreamDevice};
use super::{DeviceError, Waker};
use crate::backend::host::Order;
use crate::pool::Geometry;

/// A CUDA device as a [`Device`](super::Device).
pub type CudaDevice = StreamDevice<CudaDriver>;

/// Where the kernels come from: `ptx`, or `fatbin` and its architectures.
pub const IMAGE_KIND: &str = include_str!(concat!(env!("OUT_DIR"), "/kv_kind.txt"));
static COPY_SMALL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kv_copy_small.img"));
static COPY_LARGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kv_copy_large.img"));
static BULK: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kv_bulk.img"));

/// Why a CUDA device cannot be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver library was found.
    #[error("no CUDA driver: libcuda was not found")]
    NoDriver,
    /// The driver is older than what is needed.
    #[error("the CUDA driver lacks {name}")]
    NoSymbol {
        /// The function that is missing.
        name: &'static str,
    },
    /// There is no such device.
    #[error("no CUDA device {ordinal}; there are {devices}")]
    NoDevice {
        /// The one asked for.
        ordinal: u32,
        /// How many there are.
        devices: u32,
    },
    /// The current context is not the primary one of the device, so its streams cannot be mixed with ours.
    #[error("the current CUDA context is not the primary context of the device")]
    ForeignContext,
    /// A call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl From<CudaError> for DeviceError {
    fn from(e: CudaError) -> DeviceError {
        DeviceError::Cuda(e)
    }
}

fn check(call: &'static str, code: Code) -> Result<(), DriverError> {
    if code == api::SUCCESS { Ok(()) } else { Err(DriverError { call, code }) }
}

// Device attributes and flags, by their numbers in cuda.h.
const ATTRIBUTE_PROCESSORS: u32 = 16;
const ATTRIBUTE_MAJOR: u32 = 75;
const ATTRIBUTE_MINOR: u32 = 76;
const ATTRIBUTE_SHARED_OPTIN: u32 = 97;
const FUNCTION_SHARED_MAX: u32 = 8;
const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_NO_TIMING: u32 = 2;
const REGISTER_PORTABLE_MAPPED: u32 = 1 | 2;
const SOURCE_ORDER_STREAM: u32 = 1;
const SOURCE_ORDER_ANY: u32 = 3;

/// What a device is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CudaInfo {
    /// Its name.
    pub name: String,
    /// Version of the driver, 1000 x major + 10 x minor.
    pub driver_version: u32,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Processors.
    pub processors: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Shared memory that a block can opt in to.
    pub shared_bytes: u32,
}

/// Says what devices there are, without making a context.
pub fn devices() -> Result<Vec<CudaInfo>, CudaError> {
    let api = Api::load()?;
    let count = count(&api)?;
    (0..count).map(|ordinal| Ok(info(&api, ordinal as c_int)?)).collect()
}

fn count(api: &Api) -> Result<u32, DriverError> {
    let mut n: c_int = 0;
    // SAFETY: plain calls with a valid out pointer.
    unsafe {
        check("cuInit", (api.init)(0))?;
        check("cuDeviceGetCount", (api.device_count)(&mut n))?;
    }
    Ok(u32::try_from(n).unwrap_or(0))
}

fn info(api: &Api, ordinal: c_int) -> Result<CudaInfo, DriverError> {
    let (mut device, mut version, mut memory) = (0, 0, 0usize);
    let mut name = [0u8; 128];
    // SAFETY: out pointers are valid; the name buffer is of the length that is passed.
    unsafe {
        check("cuDeviceGet", (api.device)(&mut device, ordinal))?;
        check("cuDriverGetVersion", (api.driver_version)(&mut version))?;
        check("cuDeviceTotalMem", (api.device_memory)(&mut memory, device))?;
        let buffer = name.as_mut_ptr().cast();
        check("cuDeviceGetName", (api.device_name)(buffer, name.len() as c_int, device))?;
    }
    let attribute = |which: u32| {
        let mut value: c_int = 0;
        // SAFETY: a valid out pointer.
        let code = unsafe { (api.device_attribute)(&mut value, which, device) };
        check("cuDeviceGetAttribute", code).map(|()| u32::try_from(value).unwrap_or(0))
    };
    let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
    Ok(CudaInfo {
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        driver_version: u32::try_from(version).unwrap_or(0),
        capability: (attribute(ATTRIBUTE_MAJOR)?, attribute(ATTRIBUTE_MINOR)?),
        processors: attribute(ATTRIBUTE_PROCESSORS)?,
        memory_bytes: memory as u64,
        shared_bytes: attribute(ATTRIBUTE_SHARED_OPTIN)?,
    })
}

/// How batches reach the copy engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Batching {
    V2,
    V1,
    Loop,
}

/// The driver of one device: its primary context, one stream per direction, the kernels.
pub struct CudaDriver {
    api: Api,
    info: CudaInfo,
    device: c_int,
    context: Handle,
    streams: [Handle; 3],
    events: Vec<Handle>,
    modules: Vec<Handle>,
    /// Entry points by kernel and list length; null where there is none.
    functions: [[Handle; 2]; 10],
    ring: Option<Ring>,
    batching: Batching,
    owned: Vec<u64>,
    /// Events with time stamps, for measuring.
    timers: Vec<Handle>,
    abandoned: bool,
}

// SAFETY: handles of the driver may be used from any thread; each call makes the context current first.
unsafe impl Send for CudaDriver {}

/// Makes the context current for its life and restores what was.
struct Current<'a>(&'a Api);

impl<'a> Current<'a> {
    fn new(api: &'a Api, context: Handle) -> Result<Current<'a>, DriverError> {
        // SAFETY: the context is retained for the life of the driver.
        check("cuCtxPushCurrent", unsafe { (api.ctx_push)(context) })?;
        Ok(Current(api))
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut old = std::ptr::null_mut();
        // SAFETY: pops what `new` pushed.
        unsafe { (self.0.ctx_pop)(&mut old) };
    }
}

impl CudaDriver {
    /// Opens device `ordinal`: retains its primary context, makes streams, loads the kernels. Kernels that
    /// the driver does not take are left out; the copy engine then does their work.
    pub fn open(ordinal: u32) -> Result<CudaDriver, CudaError> {
        let api = Api::load()?;
        let devices = count(&api)?;
        if ordinal >= devices {
            return Err(CudaError::NoDevice { ordinal, devices });
        }
        let info = info(&api, ordinal as c_int)?;
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: valid out pointers; the device exists.
        unsafe {
            check("cuDeviceGet", (api.device)(&mut device, ordinal as c_int))?;
            check("cuDevicePrimaryCtxRetain", (api.primary_retain)(&mut context, device))?;
        }
        let batching = match (api.batch_v2, api.batch_v1) {
            (Some(_), _) => Batching::V2,
            (None, Some(_)) => Batching::V1,
            (None, None) => Batching::Loop,
        };
        let null = std::ptr::null_mut();
        let mut driver = CudaDriver {
            api,
            info,
            device,
            context,
            streams: [null; 3],
            events: Vec::new(),
            modules: Vec::new(),
            functions: [[null; 2]; 10],
            ring: None,
            batching,
            owned: Vec::new(),
            timers: Vec::new(),
            abandoned: false,
        };
        driver.make_streams()?;
        driver.load_kernels()?;
        Ok(driver)
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &CudaInfo {
        &self.info
    }

    /// Checks that the calling thread's current context, if it has one, is the one used here: streams of
    /// another context cannot be waited for.
    pub fn check_context(&self) -> Result<(), CudaError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: a valid out pointer.
        check("cuCtxGetCurrent", unsafe { (self.api.ctx_current)(&mut current) })?;
        if current.is_null() || current == self.context { Ok(()) } else { Err(CudaError::ForeignContext) }
    }

    /// Allocates device memory that lives as long as the driver.
    pub fn alloc(&mut self, bytes: usize) -> Result<u64, DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let mut address = 0;
        // SAFETY: a valid out pointer.
        check("cuMemAlloc", unsafe { (self.api.mem_alloc)(&mut address, bytes) })?;
        self.owned.push(address);
        Ok(address)
    }

    fn make_streams(&mut self) -> Result<(), DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: valid out pointers.
        check("cuCtxGetStreamPriorityRange", unsafe {
            (self.api.stream_priorities)(&mut least, &mut greatest)
        })?;
        for direction in Direction::ALL {
            // A request waits for a load, nobody waits for a backup.
            let priority = if direction == Direction::HostToDevice { greatest } else { least };
            let stream = &mut self.streams[direction.index()];
            // SAFETY: a valid out pointer.
            let code = unsafe { (self.api.stream_create)(stream, STREAM_NON_BLOCKING, priority) };
            check("cuStreamCreateWithPriority", code)?;
        }
        Ok(())
    }

    fn load_kernels(&mut self) -> Result<(), DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let api = self.api;
        let mut load = |image: &'static [u8], kernels: &[(Kernel, bool)]| {
            let mut module = std::ptr::null_mut();
            // SAFETY: the image is a fatbin or zero-terminated PTX made by the build script.
            let code = unsafe { (api.module_load)(&mut module, image.as_ptr().cast()) };
            if let Err(e) = check("cuModuleLoadData", code) {
                tracing::warn!(error = %e, images = IMAGE_KIND, "the driver does not take a kernel image");
                return;
            }
            self.modules.push(module);
            for &(kernel, large) in kernels {
                let slot = &mut self.functions[kernel as usize][usize::from(large)];
                // SAFETY: a valid out pointer and a zero-terminated name.
                let code = unsafe { (api.module_function)(slot, module, kernel.symbol(large).as_ptr()) };
                if code != api::SUCCESS {
                    *slot = std::ptr::null_mut();
                }
            }
        };
        let registers: Vec<Kernel> = Kernel::ALL.into_iter().filter(|&k| k != Kernel::Bulk).collect();
        let with = |large| registers.iter().map(|&k| (k, large)).collect::<Vec<_>>();
        if self.info.capability.0 >= 8 {
            load(COPY_SMALL, &with(false));
            load(COPY_LARGE, &with(true));
        }
        if self.info.capability.0 >= 9 {
            load(BULK, &[(Kernel::Bulk, false), (Kernel::Bulk, true)]);
        }
        self.ring = Ring::fitting(self.info.shared_bytes).filter(|ring| {
            self.functions[Kernel::Bulk as usize].iter().all(|&f| {
                // SAFETY: the function was found; the value fits what the device offers.
                !f.is_null()
                    && unsafe {
                        (api.function_attribute)(f, FUNCTION_SHARED_MAX, ring.shared_bytes() as c_int)
                    } == api::SUCCESS
            })
        });
        Ok(())
    }

    fn stream(&self, stream: StreamId) -> Handle {
        match stream {
            StreamId::Copy(direction) => self.streams[direction.index()],
            StreamId::Compute(handle) => handle as usize as Handle,
        }
    }

    fn loop_copies(
        &self,
        stream: Handle,
        src: &[u64],
        dst: &[u64],
        len: &[usize],
    ) -> Result<(), DriverError> {
        for ((&from, &to), &bytes) in src.iter().zip(dst).zip(len) {
            // SAFETY: the contract of `Driver::copy`.
            check("cuMemcpyAsync", unsafe { (self.api.copy_async)(to, from, bytes, stream) })?;
        }
        Ok(())
    }
}

/// The callback of a host function: calls a waker that was boxed for it.
///
/// # Safety
/// `data` is a `Box<Waker>` turned into a pointer, passed once.
unsafe extern "C" fn wake(data: *mut c_void) {
    // SAFETY: the contract.
    let waker = unsafe { Box::from_raw(data.cast::<Waker>()) };
    // A panic must not cross into the driver's thread.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&**waker));
}

// SAFETY: these are the driver's own streams and events, whose documentation gives what the trait asks for.
unsafe impl Driver for CudaDriver {
    fn capabilities(&self) -> Capabilities {
        let has = |large: usize| {
            let page_kernels = &self.functions[..Kernel::CopyDesc as usize];
            page_kernels.iter().all(|f| !f[large].is_null())
        };
        Capabilities {
            kernels: has(0),
            ring: self.ring,
            large_params: has(1),
            processors: self.info.processors,
        }
    }

    fn create_event(&mut self) -> Result<EventId, DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let mut event = std::ptr::null_mut();
        // SAFETY: a valid out pointer.
        check("cuEventCreate", unsafe { (self.api.event_create)(&mut event, EVENT_NO_TIMING) })?;
        self.events.push(event);
        Ok(EventId((self.events.len() - 1) as u32))
    }

    fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let event = self.events[event.0 as usize];
        // SAFETY: the event is ours and alive; the stream is ours or alive by the caller's word.
        check("cuEventRecord", unsafe { (self.api.event_record)(event, self.stream(stream)) })
    }

    fn is_done(&mut self, event: EventId) -> Result<bool, DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        // SAFETY: the event is ours and alive.
        match unsafe { (self.api.event_query)(self.events[event.0 as usize]) } {
            api::SUCCESS => Ok(true),
            api::NOT_READY => Ok(false),
            code => Err(DriverError { call: "cuEventQuery", code }),
        }
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<(), DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let event = self.events[event.0 as usize];
        // SAFETY: as for `record`.
        check("cuStreamWaitEvent", unsafe { (self.api.stream_wait)(self.stream(stream), event, 0) })
    }

    fn register_host(&mut self, base: NonNull<u8>, len: usize) -> Result<u64, DriverError> {
        if len == 0 {
            return Ok(base.as_ptr() as u64);
        }
        let _current = Current::new(&self.api, self.context)?;
        let pointer = base.as_ptr().cast::<c_void>();
        let mut address = 0;
        // SAFETY: the range is mapped; it is unregistered before it is unmapped. The address of a kernel
        // is asked for, it need not be that of the host.
        unsafe {
            let code = (self.api.host_register)(pointer, len, REGISTER_PORTABLE_MAPPED);
            check("cuMemHostRegister", code)?;
            check("cuMemHostGetDevicePointer", (self.api.host_pointer)(&mut address, pointer, 0))?;
        }
        Ok(address)
    }

    fn unregister_host(&mut self, base: NonNull<u8>, len: usize) -> Result<(), DriverError> {
        if len == 0 {
            return Ok(());
        }
        let _current = Current::new(&self.api, self.context)?;
        // SAFETY: registered by `register_host`, nothing in flight by the contract.
        check("cuMemHostUnregister", unsafe { (self.api.host_unregister)(base.as_ptr().cast()) })
    }

    fn abandon(&mut self) {
        self.abandoned = true;
    }

    fn notify(&mut self, stream: StreamId, waker: &Waker) -> Result<(), DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let data = Box::into_raw(Box::new(Arc::clone(waker))).cast::<c_void>();
        // SAFETY: the callback gets the box exactly once.
        let code = unsafe { (self.api.launch_host)(self.stream(stream), wake, data) };
        if code != api::SUCCESS {
            // SAFETY: the driver refused the call, so the box is still ours.
            drop(unsafe { Box::from_raw(data.cast::<Waker>()) });
        }
        check("cuLaunchHostFunc", code)
    }

    unsafe fn copy(
        &mut self,
        direction: Direction,
        src: &mut [u64],
        dst: &mut [u64],
        len: &mut [usize],
        settled: bool,
    ) -> Result<(), DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let stream = self.streams[direction.index()];
        if src.len() == 1 {
            return self.loop_copies(stream, src, dst, len);
        }
        let source_order = if settled { SOURCE_ORDER_ANY } else { SOURCE_ORDER_STREAM };
        // "Prefer overlap with compute" helps batches of small copies and slows large ones down; 128 KiB is
        // where others measured the border.
        let flags = u32::from(len.iter().all(|&n| n <= 128 << 10));
        let mut attributes = BatchAttributes { source_order, flags, ..BatchAttributes::default() };
        let (mut first, mut failed, n) = (0usize, usize::MAX, src.len());
        let (d, s, l) = (dst.as_mut_ptr(), src.as_mut_ptr(), len.as_mut_ptr());
        // SAFETY: three lists of length `n`, one attribute that holds from the first copy on; the addresses
        // are good by the contract of the trait.
        let code = unsafe {
            match (self.batching, self.api.batch_v2, self.api.batch_v1) {
                (Batching::V2, Some(batch), _) => batch(d, s, l, n, &mut attributes, &mut first, 1, stream),
                (Batching::V1, _, Some(batch)) => {
                    batch(d, s, l, n, &mut attributes, &mut first, 1, &mut failed, stream)
                }
                _ => api::NOT_SUPPORTED,
            }
        };
        match code {
            // Some drivers export the call and do not have it; none of the copies was taken then.
            api::NOT_SUPPORTED | api::INVALID_VALUE | api::CALL_REQUIRES_NEWER_DRIVER => {
                if self.batching != Batching::Loop {
                    tracing::warn!(code, "batched copies are not supported, copying one by one");
                    self.batching = Batching::Loop;
                }
                self.loop_copies(stream, src, dst, len)
            }
            code => check("cuMemcpyBatchAsync", code),
        }
    }

    unsafe fn launch(
        &mut self,
        direction: Direction,
        kernel: Kernel,
        large: bool,
        record: *mut c_void,
        ring: Option<Ring>,
        grid: u32,
    ) -> Result<(), DriverError> {
        let _current = Current::new(&self.api, self.context)?;
        let function = self.functions[kernel as usize][usize::from(large)];
        if function.is_null() {
            return Err(DriverError { call: "cuModuleGetFunction", code: api::NOT_SUPPORTED });
        }
        let mut ring_value = ring.unwrap_or(Ring { stages: 0, stage_bytes: 0 });
        let mut parameters = [record, (&raw mut ring_value).cast()];
        let shared = ring.map_or(0, Ring::shared_bytes);
        let (block, stream) = (kernel.block_threads(), self.streams[direction.index()]);
        let none = std::ptr::null_mut();
        // SAFETY: the record is what the kernel takes, by the contract; the driver copies the parameters
        // before it returns. A kernel without ring ignores the second pointer.
        let code = unsafe {
            let p = parameters.as_mut_ptr();
            (self.api.launch)(function, grid, 1, 1, block, 1, 1, shared, stream, p, none)
        };
        check("cuLaunchKernel", code)
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        if self.abandoned {
            return;
        }
        // Codes are ignored: a context that failed answers every call with its failure.
        if let Ok(_current) = Current::new(&self.api, self.context) {
            // SAFETY: each handle was made here and is destroyed once; freeing memory waits for its use.
            unsafe {
                self.streams.iter().filter(|s| !s.is_null()).for_each(|&s| {
                    (self.api.stream_destroy)(s);
                });
                self.events.iter().chain(&self.timers).for_each(|&e| {
                    (self.api.event_destroy)(e);
                });
                self.owned.iter().for_each(|&address| {
                    (self.api.mem_free)(address);
                });
                self.modules.iter().for_each(|&m| {
                    (self.api.module_unload)(m);
                });
            }
        }
        // SAFETY: retained in `open`.
        unsafe { (self.api.primary_release)(self.device) };
    }
}

impl CudaDevice {
    /// Opens a device and allocates `pages` pages per pool in it, with the staging memory that `options`
    /// asks for. Embedders with pools of their own use [`StreamDevice::new`].
    pub fn open(
        ordinal: u32,
        geometry: Arc<Geometry>,
        pages: [u32; 3],
        order: Order,
        mut options: PlanOptions,
    ) -> Result<CudaDevice, DeviceError> {
        let mut driver = CudaDriver::open(ordinal)?;
        let mut planes = Vec::new();
        for p in geometry.planes() {
            let n = u64::from(pages[p.pool().index()]);
            let bytes = usize::try_from(n.saturating_mul(p.page_bytes())).unwrap_or(usize::MAX);
            let base = driver.alloc(bytes.max(1))?;
            let (page_step, layer_step, part_step) = match order {
                Order::PageFirst => (p.page_bytes(), p.layer_bytes(), p.part_bytes()),
                Order::LayerFirst => (p.part_bytes(), n * p.layer_bytes(), n * p.part_bytes()),
            };
            let side = Side { base, page_step, layer_step, part_step, table: 0 };
            planes.push(DevicePlane { side, bases: None });
        }
        if options.staging_bytes > 0 {
            options.staging = driver.alloc(usize::try_from(options.staging_bytes).unwrap_or(usize::MAX))?;
        }
        let can = driver.capabilities();
        options.ring = can.ring;
        options.local_blocks = can.processors.max(1);
        // SAFETY: the planes were allocated above and live as long as the driver, which the device owns.
        unsafe { StreamDevice::new(driver, geometry, pages, planes, options) }
    }

    /// Measures both directions ([`CudaDriver::measure`]) and plans by the result from now on. Waits.
    pub fn calibrate(&mut self) -> Result<(), MeasureError> {
        let quota = self.options_mut().quota_blocks;
        let to_host = self.driver_mut().measure(Direction::DeviceToHost, quota)?;
        let to_device = self.driver_mut().measure(Direction::HostToDevice, quota)?;
        tracing::info!(?to_host, ?to_device, quota, "measured the link");
        let options = self.options_mut();
        (options.to_host, options.to_device) = (to_host, to_device);
        Ok(())
    }
}
