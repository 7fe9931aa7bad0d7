//! Names of result codes.

use std::ffi::CStr;

use hip_sys::hiprtc::*;
use hip_sys::*;

/// The names of codes, from the constants that bear them.
macro_rules! names {
    ($function:ident, $code:ty; $($name:ident),* $(,)?) => {
        /// `None` of a code that has no name.
        pub(crate) fn $function(code: $code) -> Option<&'static CStr> {
            match code {
                $($name => {
                    const TEXT: &str = concat!(stringify!($name), "\0");
                    CStr::from_bytes_with_nul(TEXT.as_bytes()).ok()
                })*
                _ => None,
            }
        }
    };
}

names! { hip_name, hipError_t;
    hipSuccess,
    hipErrorInvalidValue,
    hipErrorOutOfMemory,
    hipErrorNotInitialized,
    hipErrorDeinitialized,
    hipErrorProfilerDisabled,
    hipErrorProfilerNotInitialized,
    hipErrorProfilerAlreadyStarted,
    hipErrorProfilerAlreadyStopped,
    hipErrorInvalidConfiguration,
    hipErrorInvalidPitchValue,
    hipErrorInvalidSymbol,
    hipErrorInvalidDevicePointer,
    hipErrorInvalidMemcpyDirection,
    hipErrorInsufficientDriver,
    hipErrorMissingConfiguration,
    hipErrorPriorLaunchFailure,
    hipErrorInvalidDeviceFunction,
    hipErrorNoDevice,
    hipErrorInvalidDevice,
    hipErrorInvalidImage,
    hipErrorInvalidContext,
    hipErrorContextAlreadyCurrent,
    hipErrorMapFailed,
    hipErrorUnmapFailed,
    hipErrorArrayIsMapped,
    hipErrorAlreadyMapped,
    hipErrorNoBinaryForGpu,
    hipErrorAlreadyAcquired,
    hipErrorNotMapped,
    hipErrorNotMappedAsArray,
    hipErrorNotMappedAsPointer,
    hipErrorECCNotCorrectable,
    hipErrorUnsupportedLimit,
    hipErrorContextAlreadyInUse,
    hipErrorPeerAccessUnsupported,
    hipErrorInvalidKernelFile,
    hipErrorInvalidGraphicsContext,
    hipErrorInvalidSource,
    hipErrorFileNotFound,
    hipErrorSharedObjectSymbolNotFound,
    hipErrorSharedObjectInitFailed,
    hipErrorOperatingSystem,
    hipErrorInvalidHandle,
    hipErrorIllegalState,
    hipErrorNotFound,
    hipErrorNotReady,
    hipErrorIllegalAddress,
    hipErrorLaunchOutOfResources,
    hipErrorLaunchTimeOut,
    hipErrorPeerAccessAlreadyEnabled,
    hipErrorPeerAccessNotEnabled,
    hipErrorSetOnActiveProcess,
    hipErrorContextIsDestroyed,
    hipErrorAssert,
    hipErrorHostMemoryAlreadyRegistered,
    hipErrorHostMemoryNotRegistered,
    hipErrorLaunchFailure,
    hipErrorCooperativeLaunchTooLarge,
    hipErrorNotSupported,
    hipErrorStreamCaptureUnsupported,
    hipErrorStreamCaptureInvalidated,
    hipErrorStreamCaptureMerge,
    hipErrorStreamCaptureUnmatched,
    hipErrorStreamCaptureUnjoined,
    hipErrorStreamCaptureIsolation,
    hipErrorStreamCaptureImplicit,
    hipErrorCapturedEvent,
    hipErrorStreamCaptureWrongThread,
    hipErrorGraphExecUpdateFailure,
    hipErrorInvalidChannelDescriptor,
    hipErrorInvalidTexture,
    hipErrorUnknown,
    hipErrorRuntimeMemory,
    hipErrorRuntimeOther,
}

names! { hiprtc_name, hiprtcResult;
    HIPRTC_SUCCESS,
    HIPRTC_ERROR_OUT_OF_MEMORY,
    HIPRTC_ERROR_PROGRAM_CREATION_FAILURE,
    HIPRTC_ERROR_INVALID_INPUT,
    HIPRTC_ERROR_INVALID_PROGRAM,
    HIPRTC_ERROR_INVALID_OPTION,
    HIPRTC_ERROR_COMPILATION,
    HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE,
    HIPRTC_ERROR_INTERNAL_ERROR,
}
