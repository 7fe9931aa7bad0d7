// What ci/bindings.sh makes src/generated/hiprtc.rs of.
#include <hip/hiprtc.h>
