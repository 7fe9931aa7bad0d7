// comgr 3.0, amd_comgr/amd_comgr.h, bindgen 0.73.2; made by ci/bindings.sh

pub const AMD_COMGR_STATUS_SUCCESS: amd_comgr_status_s = 0;
pub const AMD_COMGR_STATUS_ERROR: amd_comgr_status_s = 1;
pub const AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT: amd_comgr_status_s = 2;
pub const AMD_COMGR_STATUS_ERROR_OUT_OF_RESOURCES: amd_comgr_status_s = 3;
pub type amd_comgr_status_s = ::core::ffi::c_uint;
pub use self::amd_comgr_status_s as amd_comgr_status_t;
pub struct ComgrLibrary {
    __library: ::libloading::Library,
    pub amd_comgr_get_version:
        Result<unsafe extern "C" fn(major: *mut usize, minor: *mut usize), ::libloading::Error>,
    pub amd_comgr_get_isa_count:
        Result<unsafe extern "C" fn(count: *mut usize) -> amd_comgr_status_t, ::libloading::Error>,
    pub amd_comgr_get_isa_name: Result<
        unsafe extern "C" fn(
            index: usize,
            isa_name: *mut *const ::core::ffi::c_char,
        ) -> amd_comgr_status_t,
        ::libloading::Error,
    >,
}
impl ComgrLibrary {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = unsafe { ::libloading::Library::new(path) }?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let amd_comgr_get_version =
            unsafe { __library.get(b"amd_comgr_get_version\0") }.map(|sym| *sym);
        let amd_comgr_get_isa_count =
            unsafe { __library.get(b"amd_comgr_get_isa_count\0") }.map(|sym| *sym);
        let amd_comgr_get_isa_name =
            unsafe { __library.get(b"amd_comgr_get_isa_name\0") }.map(|sym| *sym);
        Ok(ComgrLibrary {
            __library,
            amd_comgr_get_version,
            amd_comgr_get_isa_count,
            amd_comgr_get_isa_name,
        })
    }
    pub unsafe fn amd_comgr_get_version(&self, major: *mut usize, minor: *mut usize) {
        unsafe {
            (self.amd_comgr_get_version.as_ref().expect("Expected function, got error."))(
                major, minor,
            )
        }
    }
    pub unsafe fn amd_comgr_get_isa_count(&self, count: *mut usize) -> amd_comgr_status_t {
        unsafe {
            (self.amd_comgr_get_isa_count.as_ref().expect("Expected function, got error."))(count)
        }
    }
    pub unsafe fn amd_comgr_get_isa_name(
        &self,
        index: usize,
        isa_name: *mut *const ::core::ffi::c_char,
    ) -> amd_comgr_status_t {
        unsafe {
            (self.amd_comgr_get_isa_name.as_ref().expect("Expected function, got error."))(
                index, isa_name,
            )
        }
    }
}
