// What ci/bindings.sh makes src/generated/comgr.rs of.
#include <amd_comgr/amd_comgr.h>
