// HIP 7.2.53211, hip/hiprtc.h, bindgen 0.73.2; made by ci/bindings.sh

pub const HIPRTC_SUCCESS: hiprtcResult = 0;
pub const HIPRTC_ERROR_OUT_OF_MEMORY: hiprtcResult = 1;
pub const HIPRTC_ERROR_PROGRAM_CREATION_FAILURE: hiprtcResult = 2;
pub const HIPRTC_ERROR_INVALID_INPUT: hiprtcResult = 3;
pub const HIPRTC_ERROR_INVALID_PROGRAM: hiprtcResult = 4;
pub const HIPRTC_ERROR_INVALID_OPTION: hiprtcResult = 5;
pub const HIPRTC_ERROR_COMPILATION: hiprtcResult = 6;
pub const HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE: hiprtcResult = 7;
pub const HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION: hiprtcResult = 8;
pub const HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION: hiprtcResult = 9;
pub const HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID: hiprtcResult = 10;
pub const HIPRTC_ERROR_INTERNAL_ERROR: hiprtcResult = 11;
pub const HIPRTC_ERROR_LINKING: hiprtcResult = 100;
pub type hiprtcResult = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug)]
pub struct _hiprtcProgram {
    _unused: [u8; 0],
}
pub type hiprtcProgram = *mut _hiprtcProgram;
pub struct HiprtcLibrary {
    __library: ::libloading::Library,
    pub hiprtcGetErrorString: Result<
        unsafe extern "C" fn(result: hiprtcResult) -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub hiprtcVersion: Result<
        unsafe extern "C" fn(
            major: *mut ::core::ffi::c_int,
            minor: *mut ::core::ffi::c_int,
        ) -> hiprtcResult,
        ::libloading::Error,
    >,
    pub hiprtcCompileProgram: Result<
        unsafe extern "C" fn(
            prog: hiprtcProgram,
            numOptions: ::core::ffi::c_int,
            options: *const *const ::core::ffi::c_char,
        ) -> hiprtcResult,
        ::libloading::Error,
    >,
    pub hiprtcCreateProgram: Result<
        unsafe extern "C" fn(
            prog: *mut hiprtcProgram,
            src: *const ::core::ffi::c_char,
            name: *const ::core::ffi::c_char,
            numHeaders: ::core::ffi::c_int,
            headers: *const *const ::core::ffi::c_char,
            includeNames: *const *const ::core::ffi::c_char,
        ) -> hiprtcResult,
        ::libloading::Error,
    >,
    pub hiprtcDestroyProgram:
        Result<unsafe extern "C" fn(prog: *mut hiprtcProgram) -> hiprtcResult, ::libloading::Error>,
    pub hiprtcGetProgramLog: Result<
        unsafe extern "C" fn(prog: hiprtcProgram, log: *mut ::core::ffi::c_char) -> hiprtcResult,
        ::libloading::Error,
    >,
    pub hiprtcGetProgramLogSize: Result<
        unsafe extern "C" fn(prog: hiprtcProgram, logSizeRet: *mut usize) -> hiprtcResult,
        ::libloading::Error,
    >,
    pub hiprtcGetCode: Result<
        unsafe extern "C" fn(prog: hiprtcProgram, code: *mut ::core::ffi::c_char) -> hiprtcResult,
        ::libloading::Error,
    >,
    pub hiprtcGetCodeSize: Result<
        unsafe extern "C" fn(prog: hiprtcProgram, codeSizeRet: *mut usize) -> hiprtcResult,
        ::libloading::Error,
    >,
}
impl HiprtcLibrary {
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
        let hiprtcGetErrorString =
            unsafe { __library.get(b"hiprtcGetErrorString\0") }.map(|sym| *sym);
        let hiprtcVersion = unsafe { __library.get(b"hiprtcVersion\0") }.map(|sym| *sym);
        let hiprtcCompileProgram =
            unsafe { __library.get(b"hiprtcCompileProgram\0") }.map(|sym| *sym);
        let hiprtcCreateProgram =
            unsafe { __library.get(b"hiprtcCreateProgram\0") }.map(|sym| *sym);
        let hiprtcDestroyProgram =
            unsafe { __library.get(b"hiprtcDestroyProgram\0") }.map(|sym| *sym);
        let hiprtcGetProgramLog =
            unsafe { __library.get(b"hiprtcGetProgramLog\0") }.map(|sym| *sym);
        let hiprtcGetProgramLogSize =
            unsafe { __library.get(b"hiprtcGetProgramLogSize\0") }.map(|sym| *sym);
        let hiprtcGetCode = unsafe { __library.get(b"hiprtcGetCode\0") }.map(|sym| *sym);
        let hiprtcGetCodeSize = unsafe { __library.get(b"hiprtcGetCodeSize\0") }.map(|sym| *sym);
        Ok(HiprtcLibrary {
            __library,
            hiprtcGetErrorString,
            hiprtcVersion,
            hiprtcCompileProgram,
            hiprtcCreateProgram,
            hiprtcDestroyProgram,
            hiprtcGetProgramLog,
            hiprtcGetProgramLogSize,
            hiprtcGetCode,
            hiprtcGetCodeSize,
        })
    }
    pub unsafe fn hiprtcGetErrorString(&self, result: hiprtcResult) -> *const ::core::ffi::c_char {
        unsafe {
            (self.hiprtcGetErrorString.as_ref().expect("Expected function, got error."))(result)
        }
    }
    pub unsafe fn hiprtcVersion(
        &self,
        major: *mut ::core::ffi::c_int,
        minor: *mut ::core::ffi::c_int,
    ) -> hiprtcResult {
        unsafe {
            (self.hiprtcVersion.as_ref().expect("Expected function, got error."))(major, minor)
        }
    }
    pub unsafe fn hiprtcCompileProgram(
        &self,
        prog: hiprtcProgram,
        numOptions: ::core::ffi::c_int,
        options: *const *const ::core::ffi::c_char,
    ) -> hiprtcResult {
        unsafe {
            (self.hiprtcCompileProgram.as_ref().expect("Expected function, got error."))(
                prog, numOptions, options,
            )
        }
    }
    pub unsafe fn hiprtcCreateProgram(
        &self,
        prog: *mut hiprtcProgram,
        src: *const ::core::ffi::c_char,
        name: *const ::core::ffi::c_char,
        numHeaders: ::core::ffi::c_int,
        headers: *const *const ::core::ffi::c_char,
        includeNames: *const *const ::core::ffi::c_char,
    ) -> hiprtcResult {
        unsafe {
            (self.hiprtcCreateProgram.as_ref().expect("Expected function, got error."))(
                prog,
                src,
                name,
                numHeaders,
                headers,
                includeNames,
            )
        }
    }
    pub unsafe fn hiprtcDestroyProgram(&self, prog: *mut hiprtcProgram) -> hiprtcResult {
        unsafe {
            (self.hiprtcDestroyProgram.as_ref().expect("Expected function, got error."))(prog)
        }
    }
    pub unsafe fn hiprtcGetProgramLog(
        &self,
        prog: hiprtcProgram,
        log: *mut ::core::ffi::c_char,
    ) -> hiprtcResult {
        unsafe {
            (self.hiprtcGetProgramLog.as_ref().expect("Expected function, got error."))(prog, log)
        }
    }
    pub unsafe fn hiprtcGetProgramLogSize(
        &self,
        prog: hiprtcProgram,
        logSizeRet: *mut usize,
    ) -> hiprtcResult {
        unsafe {
            (self.hiprtcGetProgramLogSize.as_ref().expect("Expected function, got error."))(
                prog, logSizeRet,
            )
        }
    }
    pub unsafe fn hiprtcGetCode(
        &self,
        prog: hiprtcProgram,
        code: *mut ::core::ffi::c_char,
    ) -> hiprtcResult {
        unsafe { (self.hiprtcGetCode.as_ref().expect("Expected function, got error."))(prog, code) }
    }
    pub unsafe fn hiprtcGetCodeSize(
        &self,
        prog: hiprtcProgram,
        codeSizeRet: *mut usize,
    ) -> hiprtcResult {
        unsafe {
            (self.hiprtcGetCodeSize.as_ref().expect("Expected function, got error."))(
                prog,
                codeSizeRet,
            )
        }
    }
}
