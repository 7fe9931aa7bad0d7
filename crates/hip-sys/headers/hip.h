// What ci/bindings.sh makes src/generated/hip.rs of.
#include <hip/hip_runtime_api.h>

// From 6.0 on the headers give this name to hipGetDevicePropertiesR0600. The function of that name
// fills the structure of HIP 5, which no header from 6.0 on describes.
#undef hipGetDeviceProperties
hipError_t hipGetDeviceProperties(void *properties, int device);
