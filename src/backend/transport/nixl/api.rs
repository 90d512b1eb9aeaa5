//! The C interface of NIXL: the functions that are used, and guards around what they hand out.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use libloading::Library;

use super::NixlError;

type Status = c_int;
type Handle = *mut c_void;

pub(super) const SUCCESS: Status = 0;
pub(super) const IN_PROGRESS: Status = 1;
const DRAM: c_int = 0;
const WRITE: c_int = 1;
/// One lock around every call into an agent: owner, worker and progress thread all use it.
const SYNC_STRICT: c_int = 1;
/// How long the progress thread of an agent rests when it found nothing. UCX without hardware moves bytes only
/// while somebody calls it; resting less costs a core that the model wants.
const PROGRESS_PAUSE_US: u64 = 100;

/// As the header lays it out.
#[repr(C)]
struct AgentConfig {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    sync: c_int,
    workers: u32,
    progress_pause_us: u64,
    listen_pause_us: u64,
    telemetry: bool,
}

macro_rules! functions {
    ($($field:ident = $name:literal : fn($($arg:ty),*);)*) => {
        /// The functions that are used. They stay good for as long as the process: the library leaves threads and
        /// exit handlers behind and is never unloaded.
        pub(super) struct Api {
            $($field: unsafe extern "C" fn($($arg),*) -> Status,)*
        }

        impl Api {
            /// Loads the library and finds every function, or says what is missing.
            pub(super) fn load(path: &Path) -> Result<Arc<Api>, NixlError> {
                let no = |e: libloading::Error| NixlError::Library {
                    path: path.to_path_buf(),
                    reason: e.to_string(),
                };
                // SAFETY: the user names the library; its initialisers are as trusted as this program.
                let library = unsafe { Library::new(path) }.map_err(no)?;
                let api = Api {
                    $($field: {
                        // SAFETY: declared as in the header of the library.
                        let symbol = unsafe { library.get($name) };
                        *symbol.map_err(no)?
                    },)*
                };
                std::mem::forget(library);
                Ok(Arc::new(api))
            }
        }
    };
}

functions! {
    create_agent = b"nixl_capi_create_configured_agent\0" : fn(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent = b"nixl_capi_destroy_agent\0" : fn(Handle);
    plugin_params = b"nixl_capi_get_plugin_params\0" : fn(Handle, *const c_char, *mut Handle, *mut Handle);
    destroy_mem_list = b"nixl_capi_destroy_mem_list\0" : fn(Handle);
    destroy_params = b"nixl_capi_destroy_params\0" : fn(Handle);
    create_backend = b"nixl_capi_create_backend\0" : fn(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend = b"nixl_capi_destroy_backend\0" : fn(Handle);
    create_reg_list = b"nixl_capi_create_reg_dlist\0" : fn(c_int, *mut Handle);
    add_reg = b"nixl_capi_reg_dlist_add_desc\0" : fn(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_list = b"nixl_capi_destroy_reg_dlist\0" : fn(Handle);
    register = b"nixl_capi_register_mem\0" : fn(Handle, Handle, Handle);
    deregister = b"nixl_capi_deregister_mem\0" : fn(Handle, Handle, Handle);
    local_metadata = b"nixl_capi_get_local_md\0" : fn(Handle, *mut *mut c_void, *mut usize);
    load_remote = b"nixl_capi_load_remote_md\0" : fn(Handle, *const c_void, usize, *mut *mut c_char);
    forget_remote = b"nixl_capi_invalidate_remote_md\0" : fn(Handle, *const c_char);
    create_list = b"nixl_capi_create_xfer_dlist\0" : fn(c_int, *mut Handle);
    add_copy = b"nixl_capi_xfer_dlist_add_desc\0" : fn(Handle, usize, usize, u64);
    destroy_list = b"nixl_capi_destroy_xfer_dlist\0" : fn(Handle);
    create_request = b"nixl_capi_create_xfer_req\0" : fn(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post = b"nixl_capi_post_xfer_req\0" : fn(Handle, Handle, Handle);
    status = b"nixl_capi_get_xfer_status\0" : fn(Handle, Handle);
    release_request = b"nixl_capi_release_xfer_req\0" : fn(Handle, Handle);
    destroy_request = b"nixl_capi_destroy_xfer_req\0" : fn(Handle);
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

fn check(call: &'static str, code: Status) -> Result<(), NixlError> {
    if code == SUCCESS { Ok(()) } else { Err(NixlError::Call { call, code }) }
}

fn text(call: &'static str, s: &str) -> Result<CString, NixlError> {
    CString::new(s).map_err(|_| NixlError::Call { call, code: -1 })
}

/// An agent with the UCX plugin and its registered memory.
#[derive(Debug)]
pub(super) struct Agent {
    api: Arc<Api>,
    agent: Handle,
    backend: Handle,
    registered: Vec<Handle>,
}

// SAFETY: the agent is created with strict synchronisation, so calls may come from any thread and several at
// once; everything else is written before the value is shared and read after.
unsafe impl Send for Agent {}
// SAFETY: as above.
unsafe impl Sync for Agent {}

/// A posted or prepared write. Released only when it has ended.
#[derive(Debug)]
pub(super) struct Request(Handle);

// SAFETY: a handle of the library, used by one thread at a time.
unsafe impl Send for Request {}

impl Agent {
    pub(super) fn new(api: Arc<Api>, name: &str) -> Result<Agent, NixlError> {
        let name = text("create agent", name)?;
        let config = AgentConfig {
            progress_thread: true,
            listen_thread: false,
            listen_port: 0,
            sync: SYNC_STRICT,
            workers: 1,
            progress_pause_us: PROGRESS_PAUSE_US,
            listen_pause_us: 0,
            telemetry: false,
        };
        let mut agent =
            Agent { api, agent: ptr::null_mut(), backend: ptr::null_mut(), registered: Vec::new() };
        let api = agent.api.clone();
        // SAFETY: a NUL-terminated name, a configuration as the header has it, and a place for the handle.
        check("create agent", unsafe { (api.create_agent)(name.as_ptr(), &config, &mut agent.agent) })?;
        let (mut kinds, mut params) = (ptr::null_mut(), ptr::null_mut());
        let plugin = c"UCX".as_ptr();
        // SAFETY: a live agent and places for two handles.
        let code = unsafe { (api.plugin_params)(agent.agent, plugin, &mut kinds, &mut params) };
        check("parameters of UCX", code)?;
        // SAFETY: handles of the call above, and a place for the new one.
        let made = unsafe { (api.create_backend)(agent.agent, plugin, params, &mut agent.backend) };
        // SAFETY: handles of the call above, given back once.
        unsafe {
            (api.destroy_mem_list)(kinds);
            (api.destroy_params)(params);
        }
        check("create UCX", made)?;
        Ok(agent)
    }

    /// Registers memory until the agent is dropped.
    ///
    /// # Safety
    /// The memory stays mapped for as long as the agent.
    pub(super) unsafe fn register(&mut self, base: usize, len: usize) -> Result<(), NixlError> {
        let mut list = ptr::null_mut();
        // SAFETY: a place for the handle.
        check("create list", unsafe { (self.api.create_reg_list)(DRAM, &mut list) })?;
        // SAFETY: a live list; no metadata goes with plain memory.
        let added = unsafe { (self.api.add_reg)(list, base, len, 0, ptr::null(), 0) };
        let done = check("add to list", added).and_then(|()| {
            // SAFETY: live agent and list; the caller vouches for the memory.
            check("register", unsafe { (self.api.register)(self.agent, list, ptr::null_mut()) })
        });
        match done {
            Ok(()) => self.registered.push(list),
            // SAFETY: ours, given back once.
            Err(_) => drop(unsafe { (self.api.destroy_reg_list)(list) }),
        }
        done
    }

    /// What another agent needs to reach the registered memory.
    pub(super) fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: a live agent and places for the answer.
        check("metadata", unsafe { (self.api.local_metadata)(self.agent, &mut data, &mut len) })?;
        // SAFETY: on success the library allocated `len` bytes with malloc and gave them to us.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec();
        // SAFETY: as above, freed once.
        unsafe { libc::free(data) };
        Ok(bytes)
    }

    /// Makes another agent reachable and returns its name.
    pub(super) fn load_remote(&self, metadata: &[u8]) -> Result<CString, NixlError> {
        let mut name = ptr::null_mut();
        let (data, len) = (metadata.as_ptr().cast(), metadata.len());
        // SAFETY: a live agent, bytes that live through the call, a place for the answer.
        check("load metadata", unsafe { (self.api.load_remote)(self.agent, data, len, &mut name) })?;
        // SAFETY: on success a NUL-terminated string from malloc, ours now.
        let owned = unsafe { CStr::from_ptr(name) }.to_owned();
        // SAFETY: as above, freed once.
        unsafe { libc::free(name.cast()) };
        Ok(owned)
    }

    pub(super) fn forget_remote(&self, name: &CStr) {
        // SAFETY: a live agent and a NUL-terminated name. An agent that is not known is an error code only.
        unsafe { (self.api.forget_remote)(self.agent, name.as_ptr()) };
    }

    fn list(&self, copies: impl Iterator<Item = (usize, usize)>) -> Result<List<'_>, NixlError> {
        let mut list = List { api: &self.api, handle: ptr::null_mut() };
        // SAFETY: a place for the handle.
        check("create list", unsafe { (self.api.create_list)(DRAM, &mut list.handle) })?;
        for (at, len) in copies {
            // SAFETY: a live list; addresses are checked by the library when the request is made.
            check("add to list", unsafe { (self.api.add_copy)(list.handle, at, len, 0) })?;
        }
        Ok(list)
    }

    /// Prepares a write of (local address, remote address, bytes). Nothing is posted.
    pub(super) fn prepare(&self, to: &CStr, copies: &[(usize, usize, usize)]) -> Result<Request, NixlError> {
        let local = self.list(copies.iter().map(|c| (c.0, c.2)))?;
        let remote = self.list(copies.iter().map(|c| (c.1, c.2)))?;
        let mut request = ptr::null_mut();
        // SAFETY: live agent and lists, a NUL-terminated name, a place for the handle; the library copies the
        // lists.
        let code = unsafe {
            (self.api.create_request)(
                self.agent,
                WRITE,
                local.handle,
                remote.handle,
                to.as_ptr(),
                &mut request,
                ptr::null_mut(),
            )
        };
        check("create request", code)?;
        Ok(Request(request))
    }

    /// Posts a prepared write: [`SUCCESS`], [`IN_PROGRESS`], or an error after which it may still land.
    ///
    /// # Safety
    /// The local memory of the request is registered and nobody writes it before the request has ended.
    pub(super) unsafe fn post(&self, request: &Request) -> Status {
        // SAFETY: a live agent and a request of it; the caller vouches for the memory.
        unsafe { (self.api.post)(self.agent, request.0, ptr::null_mut()) }
    }

    pub(super) fn status(&self, request: &Request) -> Status {
        // SAFETY: a live agent and a request of it.
        unsafe { (self.api.status)(self.agent, request.0) }
    }

    /// Gives back a request that has ended or was never posted.
    pub(super) fn release(&self, request: Request) {
        // SAFETY: a live agent and a request of it, given back once. If the agent keeps it, so do we: the handle
        // leaks instead of being freed under a write.
        unsafe {
            if (self.api.release_request)(self.agent, request.0) == SUCCESS {
                (self.api.destroy_request)(request.0);
            }
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.agent.is_null() {
            return;
        }
        for list in self.registered.drain(..) {
            // SAFETY: a live agent and a list that was registered with it, given back once.
            unsafe {
                (self.api.deregister)(self.agent, list, ptr::null_mut());
                (self.api.destroy_reg_list)(list);
            }
        }
        // SAFETY: ours, given back once; the agent goes last and takes the plugin with it.
        unsafe {
            if !self.backend.is_null() {
                (self.api.destroy_backend)(self.backend);
            }
            (self.api.destroy_agent)(self.agent);
        }
    }
}

struct List<'a> {
    api: &'a Api,
    handle: Handle,
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: ours, given back once.
            unsafe { (self.api.destroy_list)(self.handle) };
        }
    }
}

/// The library: the path given, or the one in `SAPWOOD_NIXL` (a file, or the folder it is in), or what the
/// system finds under its name.
pub(super) fn library(given: Option<&Path>) -> PathBuf {
    const NAME: &str = "libnixl_capi.so";
    let path = given.map(Path::to_path_buf).or_else(|| std::env::var_os("SAPWOOD_NIXL").map(PathBuf::from));
    match path {
        Some(p) if p.is_dir() => p.join(NAME),
        Some(p) => p,
        None => PathBuf::from(NAME),
    }
}
