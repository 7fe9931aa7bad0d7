//! What is passed on as it is has one layout and one set of values in both APIs.

use std::mem::offset_of;

use cudarc::driver::sys;
use hip_sys::*;

use super::code::hip_code;
use super::device::cuda_attribute;

/// Same size, and each pair of fields at the same place.
macro_rules! assert_same {
    ($hip:ty, $cuda:ty; $($hip_field:ident = $cuda_field:ident),* $(,)?) => {
        assert_eq!(size_of::<$hip>(), size_of::<$cuda>());
        $(assert_eq!(offset_of!($hip, $hip_field), offset_of!($cuda, $cuda_field));)*
    };
}

#[test]
fn structures_have_one_layout() {
    assert_same!(hipMemAllocationProp, sys::CUmemAllocationProp;
        type_ = type_, __bindgen_anon_1 = requestedHandleTypes, location = location,
        win32HandleMetaData = win32HandleMetaData, allocFlags = allocFlags);
    assert_same!(hipMemLocation, sys::CUmemLocation; type_ = type_, id = id);
    assert_same!(hipMemAccessDesc, sys::CUmemAccessDesc; location = location, flags = flags);
    assert_same!(hipMemPoolProps, sys::CUmemPoolProps;
        allocType = allocType, handleTypes = handleTypes, location = location,
        win32SecurityAttributes = win32SecurityAttributes, maxSize = maxSize);
    assert_same!(hipMemPoolPtrExportData, sys::CUmemPoolPtrExportData; reserved = reserved);
    assert_same!(hipIpcMemHandle_t, sys::CUipcMemHandle; reserved = reserved);
    assert_same!(hipUUID, sys::CUuuid; bytes = bytes);
    assert_same!(hip_Memcpy2D, sys::CUDA_MEMCPY2D;
        srcXInBytes = srcXInBytes, srcY = srcY, srcMemoryType = srcMemoryType, srcHost = srcHost,
        srcDevice = srcDevice, srcArray = srcArray, srcPitch = srcPitch,
        dstXInBytes = dstXInBytes, dstY = dstY, dstMemoryType = dstMemoryType, dstHost = dstHost,
        dstDevice = dstDevice, dstArray = dstArray, dstPitch = dstPitch,
        WidthInBytes = WidthInBytes, Height = Height);
}

#[test]
fn values_that_are_passed_on_are_the_same() {
    use sys::{CUevent_flags, CUfunction_attribute, CUpointer_attribute, CUstreamCaptureMode};
    use sys::{CUmemAccess_flags, CUmemAllocationType, CUmemLocationType, CUmemorytype};
    use sys::{CUstream_flags, CUstreamCaptureStatus, CUstreamWaitValue_flags};
    let pairs = [
        (hipStreamNonBlocking, CUstream_flags::CU_STREAM_NON_BLOCKING as u32),
        (hipEventBlockingSync, CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32),
        (hipEventDisableTiming, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32),
        (hipEventInterprocess, CUevent_flags::CU_EVENT_INTERPROCESS as u32),
        (hipStreamWaitValueGte, CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32),
        (hipStreamWaitValueEq, CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32),
        (hipStreamWaitValueAnd, CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_AND as u32),
        (hipStreamWaitValueNor, CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_NOR as u32),
        (hipStreamCaptureModeGlobal, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL as u32),
        (
            hipStreamCaptureModeThreadLocal,
            CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as u32,
        ),
        (hipStreamCaptureModeRelaxed, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32),
        (hipStreamCaptureStatusNone, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32),
        (
            hipStreamCaptureStatusActive,
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32,
        ),
        (hipMemoryTypeHost, CUmemorytype::CU_MEMORYTYPE_HOST as u32),
        (hipMemoryTypeDevice, CUmemorytype::CU_MEMORYTYPE_DEVICE as u32),
        (hipMemAllocationTypePinned, CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32),
        (hipMemLocationTypeDevice, CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32),
        (
            hipMemAccessFlagsProtReadWrite,
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32,
        ),
        (
            hipMemHandleTypePosixFileDescriptor,
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0,
        ),
        (
            hipIpcMemLazyEnablePeerAccess,
            sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32,
        ),
        (hipHostMallocPortable, sys::CU_MEMHOSTALLOC_PORTABLE),
        (hipHostMallocMapped, sys::CU_MEMHOSTALLOC_DEVICEMAP),
        (hipHostMallocWriteCombined, sys::CU_MEMHOSTALLOC_WRITECOMBINED),
        (hipHostRegisterPortable, sys::CU_MEMHOSTREGISTER_PORTABLE),
        (hipHostRegisterMapped, sys::CU_MEMHOSTREGISTER_DEVICEMAP),
        (hipHostRegisterIoMemory, sys::CU_MEMHOSTREGISTER_IOMEMORY),
        (
            HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK as u32,
        ),
        (
            HIP_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32,
        ),
        (
            HIP_POINTER_ATTRIBUTE_DEVICE_POINTER,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER as u32,
        ),
        (
            HIP_POINTER_ATTRIBUTE_HOST_POINTER,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER as u32,
        ),
        (
            HIP_POINTER_ATTRIBUTE_BUFFER_ID,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as u32,
        ),
        (
            HIP_POINTER_ATTRIBUTE_IS_MANAGED,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as u32,
        ),
        (
            HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32,
        ),
        (
            HIP_POINTER_ATTRIBUTE_RANGE_SIZE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as u32,
        ),
        (
            HIP_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as u32,
        ),
    ];
    for (at, (hip, cuda)) in pairs.into_iter().enumerate() {
        assert_eq!(hip, cuda, "pair {at}");
    }
}

#[test]
fn attributes_are_asked_for_by_nvidias_numbers() {
    use sys::CUdevice_attribute as Cuda;
    let pairs = [
        (hipDeviceAttributeMaxThreadsPerBlock, Cuda::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        (hipDeviceAttributeWarpSize, Cuda::CU_DEVICE_ATTRIBUTE_WARP_SIZE),
        (hipDeviceAttributeMaxPitch, Cuda::CU_DEVICE_ATTRIBUTE_MAX_PITCH),
        (hipDeviceAttributeMultiprocessorCount, Cuda::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        (hipDeviceAttributeIntegrated, Cuda::CU_DEVICE_ATTRIBUTE_INTEGRATED),
        (hipDeviceAttributeCanMapHostMemory, Cuda::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
        (hipDeviceAttributeConcurrentKernels, Cuda::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS),
        (hipDeviceAttributePciBusId, Cuda::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
        (hipDeviceAttributePciDeviceId, Cuda::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID),
        (hipDeviceAttributePciDomainId, Cuda::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID),
        (
            hipDeviceAttributeMaxThreadsPerMultiProcessor,
            Cuda::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
        ),
        (hipDeviceAttributeAsyncEngineCount, Cuda::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
        (hipDeviceAttributeUnifiedAddressing, Cuda::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
        (
            hipDeviceAttributeComputeCapabilityMajor,
            Cuda::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        ),
        (
            hipDeviceAttributeComputeCapabilityMinor,
            Cuda::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        ),
        (
            hipDeviceAttributeStreamPrioritiesSupported,
            Cuda::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED,
        ),
        (hipDeviceAttributeManagedMemory, Cuda::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
        (
            hipDeviceAttributeCanUseStreamWaitValue,
            Cuda::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
        ),
        (
            hipDeviceAttributeHostRegisterSupported,
            Cuda::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
        ),
        (
            hipDeviceAttributeVirtualMemoryManagementSupported,
            Cuda::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        ),
        (hipDeviceAttributeMemoryPoolsSupported, Cuda::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
        (
            hipDeviceAttributeMemoryPoolSupportedHandleTypes,
            Cuda::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
        ),
    ];
    for (hip, cuda) in pairs {
        assert_eq!(cuda_attribute(hip), Some(cuda as u32), "{cuda:?}");
    }
    assert_eq!(cuda_attribute(hipDeviceAttributeNumberOfXccs), None);
}

#[test]
fn codes_keep_their_meaning() {
    use sys::CUresult::*;
    let pairs = [
        (CUDA_ERROR_INVALID_VALUE, hipErrorInvalidValue),
        (CUDA_ERROR_OUT_OF_MEMORY, hipErrorOutOfMemory),
        (CUDA_ERROR_NOT_INITIALIZED, hipErrorNotInitialized),
        (CUDA_ERROR_DEINITIALIZED, hipErrorDeinitialized),
        (CUDA_ERROR_NO_DEVICE, hipErrorNoDevice),
        (CUDA_ERROR_INVALID_DEVICE, hipErrorInvalidDevice),
        (CUDA_ERROR_INVALID_IMAGE, hipErrorInvalidImage),
        (CUDA_ERROR_INVALID_CONTEXT, hipErrorInvalidContext),
        (CUDA_ERROR_MAP_FAILED, hipErrorMapFailed),
        (CUDA_ERROR_ALREADY_MAPPED, hipErrorAlreadyMapped),
        (CUDA_ERROR_NO_BINARY_FOR_GPU, hipErrorNoBinaryForGpu),
        (CUDA_ERROR_ECC_UNCORRECTABLE, hipErrorECCNotCorrectable),
        (CUDA_ERROR_NVLINK_UNCORRECTABLE, hipErrorECCNotCorrectable),
        (CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, hipErrorPeerAccessUnsupported),
        (CUDA_ERROR_OPERATING_SYSTEM, hipErrorOperatingSystem),
        (CUDA_ERROR_INVALID_HANDLE, hipErrorInvalidHandle),
        (CUDA_ERROR_NOT_FOUND, hipErrorNotFound),
        (CUDA_ERROR_NOT_READY, hipErrorNotReady),
        (CUDA_ERROR_ILLEGAL_ADDRESS, hipErrorIllegalAddress),
        (CUDA_ERROR_LAUNCH_TIMEOUT, hipErrorLaunchTimeOut),
        (CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, hipErrorPeerAccessAlreadyEnabled),
        (CUDA_ERROR_CONTEXT_IS_DESTROYED, hipErrorContextIsDestroyed),
        (CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, hipErrorHostMemoryAlreadyRegistered),
        (CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, hipErrorHostMemoryNotRegistered),
        (CUDA_ERROR_ILLEGAL_INSTRUCTION, hipErrorLaunchFailure),
        (CUDA_ERROR_MISALIGNED_ADDRESS, hipErrorLaunchFailure),
        (CUDA_ERROR_LAUNCH_FAILED, hipErrorLaunchFailure),
        (CUDA_ERROR_NOT_SUPPORTED, hipErrorNotSupported),
        (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, hipErrorStreamCaptureUnsupported),
        (CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, hipErrorStreamCaptureInvalidated),
        (CUDA_ERROR_STREAM_CAPTURE_ISOLATION, hipErrorStreamCaptureIsolation),
        (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, hipErrorStreamCaptureImplicit),
        (CUDA_ERROR_CAPTURED_EVENT, hipErrorCapturedEvent),
        (CUDA_ERROR_EXTERNAL_DEVICE, hipErrorUnknown),
        (CUDA_ERROR_INVALID_CLUSTER_SIZE, hipErrorUnknown),
        (CUDA_ERROR_UNKNOWN, hipErrorUnknown),
    ];
    for (cuda, hip) in pairs {
        assert_eq!(hip_code(cuda as u32), hip, "{cuda:?}");
    }
    assert_eq!(hip_code(123_456), hipErrorUnknown, "newer than both");
}
