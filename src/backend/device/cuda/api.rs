//! The functions of libcuda, loaded at run time.
//!
//! cudarc finds and opens the library; its own wrappers panic where a library or a symbol is missing and
//! turn unknown result codes into invalid enum values, so the symbols are looked up here and codes stay
//! numbers. Nothing is looked up after [`Api::load`].

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;

use super::CudaError;

pub(super) type Code = i32;
pub(super) type Handle = *mut c_void;

pub(super) const SUCCESS: Code = 0;
pub(super) const INVALID_VALUE: Code = 1;
pub(super) const NOT_READY: Code = 600;
pub(super) const NOT_SUPPORTED: Code = 801;
/// "The call requires a newer driver": what a stub of a newer entry point answers.
pub(super) const CALL_REQUIRES_NEWER_DRIVER: Code = 36;

/// Attributes of a batch. The layout is that of the first version; later ones gave a name to the id.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct BatchAttributes {
    pub(super) source_order: c_uint,
    pub(super) source_hint: Location,
    pub(super) destination_hint: Location,
    pub(super) flags: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Location {
    kind: c_uint,
    id: c_int,
}

const _: () = assert!(size_of::<BatchAttributes>() == 24);

pub(super) type BatchV2 = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut BatchAttributes,
    *mut usize,
    usize,
    Handle,
) -> Code;
pub(super) type BatchV1 = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut BatchAttributes,
    *mut usize,
    usize,
    *mut usize,
    Handle,
) -> Code;

/// Declares the table and its loader: field, symbol, signature.
macro_rules! api {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*);)*) => {
        #[derive(Clone, Copy)]
        pub(super) struct Api {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> Code,)*
            pub(super) batch_v2: Option<BatchV2>,
            pub(super) batch_v1: Option<BatchV1>,
        }

        impl Api {
            /// Opens the library and looks up every symbol; a missing one is an error value.
            pub(super) fn load() -> Result<Api, CudaError> {
                // SAFETY: opening the driver runs its initialisers, which is what a CUDA program asks for.
                if unsafe { !sys::is_culib_present() } {
                    return Err(CudaError::NoDriver);
                }
                Ok(Api {
                    // SAFETY: the signature is that of the driver's documentation for this symbol.
                    $($field: unsafe { symbol($symbol)? },)*
                    // SAFETY: as above; these two came with driver 13 and 12.8.
                    batch_v2: unsafe { symbol("cuMemcpyBatchAsync_v2") }.ok(),
                    // SAFETY: as above.
                    batch_v1: unsafe { symbol("cuMemcpyBatchAsync") }.ok(),
                })
            }
        }
    };
}

/// # Safety
/// `F` is the signature of the function, and the library was seen to be present.
unsafe fn symbol<F: Copy>(name: &'static str) -> Result<F, CudaError> {
    // SAFETY: presence was checked, so this does not panic; the library is never closed, so the copied
    // pointer stays valid.
    let found = unsafe { sys::culib().get::<F>(name.as_bytes()) };
    found.map(|f| *f).map_err(|_| CudaError::NoSymbol { name })
}

api! {
    init = "cuInit": fn(c_uint);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device = "cuDeviceGet": fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_uint, c_int);
    device_memory = "cuDeviceTotalMem_v2": fn(*mut usize, c_int);
    primary_retain = "cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    primary_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    ctx_push = "cuCtxPushCurrent_v2": fn(Handle);
    ctx_pop = "cuCtxPopCurrent_v2": fn(*mut Handle);
    ctx_current = "cuCtxGetCurrent": fn(*mut Handle);
    stream_priorities = "cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int);
    stream_create = "cuStreamCreateWithPriority": fn(*mut Handle, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2": fn(Handle);
    stream_wait = "cuStreamWaitEvent": fn(Handle, Handle, c_uint);
    event_create = "cuEventCreate": fn(*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(Handle);
    event_record = "cuEventRecord": fn(Handle, Handle);
    event_query = "cuEventQuery": fn(Handle);
    event_synchronize = "cuEventSynchronize": fn(Handle);
    event_elapsed = "cuEventElapsedTime": fn(*mut f32, Handle, Handle);
    host_register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister": fn(*mut c_void);
    host_pointer = "cuMemHostGetDevicePointer_v2": fn(*mut u64, *mut c_void, c_uint);
    mem_alloc = "cuMemAlloc_v2": fn(*mut u64, usize);
    mem_free = "cuMemFree_v2": fn(u64);
    copy_async = "cuMemcpyAsync": fn(u64, u64, usize, Handle);
    module_load = "cuModuleLoadData": fn(*mut Handle, *const c_void);
    module_unload = "cuModuleUnload": fn(Handle);
    module_function = "cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    function_attribute = "cuFuncSetAttribute": fn(Handle, c_uint, c_int);
    launch = "cuLaunchKernel": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    launch_host = "cuLaunchHostFunc": fn(Handle, unsafe extern "C" fn(*mut c_void), *mut c_void);
}
