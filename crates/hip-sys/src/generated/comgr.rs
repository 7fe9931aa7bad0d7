// comgr 3.0, amd_comgr/amd_comgr.h, bindgen 0.73.2; made by ci/bindings.sh

pub const AMD_COMGR_STATUS_SUCCESS: amd_comgr_status_s = 0;
pub const AMD_COMGR_STATUS_ERROR: amd_comgr_status_s = 1;
pub const AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT: amd_comgr_status_s = 2;
pub const AMD_COMGR_STATUS_ERROR_OUT_OF_RESOURCES: amd_comgr_status_s = 3;
pub type amd_comgr_status_s = ::core::ffi::c_uint;
pub use self::amd_comgr_status_s as amd_comgr_status_t;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct amd_comgr_metadata_node_s {
    pub handle: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of amd_comgr_metadata_node_s"]
        [::core::mem::size_of::<amd_comgr_metadata_node_s>() - 8usize];
    ["Alignment of amd_comgr_metadata_node_s"]
        [::core::mem::align_of::<amd_comgr_metadata_node_s>() - 8usize];
    ["Offset of field: amd_comgr_metadata_node_s::handle"]
        [::core::mem::offset_of!(amd_comgr_metadata_node_s, handle) - 0usize];
};
pub type amd_comgr_metadata_node_t = amd_comgr_metadata_node_s;
pub struct ComgrLibrary {
    __library: ::libloading::Library,
    pub amd_comgr_get_isa_count:
        Result<unsafe extern "C" fn(count: *mut usize) -> amd_comgr_status_t, ::libloading::Error>,
    pub amd_comgr_get_isa_name: Result<
        unsafe extern "C" fn(
            index: usize,
            isa_name: *mut *const ::core::ffi::c_char,
        ) -> amd_comgr_status_t,
        ::libloading::Error,
    >,
    pub amd_comgr_get_isa_metadata: Result<
        unsafe extern "C" fn(
            isa_name: *const ::core::ffi::c_char,
            metadata: *mut amd_comgr_metadata_node_t,
        ) -> amd_comgr_status_t,
        ::libloading::Error,
    >,
    pub amd_comgr_destroy_metadata: Result<
        unsafe extern "C" fn(metadata: amd_comgr_metadata_node_t) -> amd_comgr_status_t,
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
        let amd_comgr_get_isa_count =
            unsafe { __library.get(b"amd_comgr_get_isa_count\0") }.map(|sym| *sym);
        let amd_comgr_get_isa_name =
            unsafe { __library.get(b"amd_comgr_get_isa_name\0") }.map(|sym| *sym);
        let amd_comgr_get_isa_metadata =
            unsafe { __library.get(b"amd_comgr_get_isa_metadata\0") }.map(|sym| *sym);
        let amd_comgr_destroy_metadata =
            unsafe { __library.get(b"amd_comgr_destroy_metadata\0") }.map(|sym| *sym);
        Ok(ComgrLibrary {
            __library,
            amd_comgr_get_isa_count,
            amd_comgr_get_isa_name,
            amd_comgr_get_isa_metadata,
            amd_comgr_destroy_metadata,
        })
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
    pub unsafe fn amd_comgr_get_isa_metadata(
        &self,
        isa_name: *const ::core::ffi::c_char,
        metadata: *mut amd_comgr_metadata_node_t,
    ) -> amd_comgr_status_t {
        unsafe {
            (self.amd_comgr_get_isa_metadata.as_ref().expect("Expected function, got error."))(
                isa_name, metadata,
            )
        }
    }
    pub unsafe fn amd_comgr_destroy_metadata(
        &self,
        metadata: amd_comgr_metadata_node_t,
    ) -> amd_comgr_status_t {
        unsafe {
            (self.amd_comgr_destroy_metadata.as_ref().expect("Expected function, got error."))(
                metadata,
            )
        }
    }
}
