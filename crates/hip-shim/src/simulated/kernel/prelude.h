// What a kernel's source finds before it when the stand-in compiles it for the CPU: the words that
// HIP adds to C++, and launches as loops. A kernel must not synchronise its threads.

#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace hip_shim {

struct Dimensions {
    unsigned x, y, z;
};

// One launch: grid, then block.
struct Launch {
    Dimensions grid, block;
};

// The arguments of a launch, which the caller may change as soon as it has returned.
template <typename... Types>
void* pack(void (*)(Types...), void** arguments) {
    unsigned at = 0;
    (void)arguments;
    // Braces keep the order.
    return new std::tuple<Types...>{*static_cast<Types*>(arguments[at++])...};
}

template <typename... Types>
void drop(void (*)(Types...), void* packed) {
    delete static_cast<std::tuple<Types...>*>(packed);
}

}  // namespace hip_shim

static thread_local hip_shim::Dimensions blockIdx, threadIdx, blockDim, gridDim;

namespace hip_shim {

// Once for each thread of a block, block after block.
template <typename... Types>
void run(void (*kernel)(Types...), void* packed, const Launch* launch) {
    auto& arguments = *static_cast<std::tuple<Types...>*>(packed);
    gridDim = launch->grid;
    blockDim = launch->block;
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
                for (threadIdx.z = 0; threadIdx.z < blockDim.z; threadIdx.z++)
                    for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)
                        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
                            std::apply(kernel, arguments);
}

// Once, for a function that has its own loops over blocks and threads.
template <typename... Types>
void run_whole(void (*kernel)(Types...), void* packed, const Launch* launch) {
    gridDim = launch->grid;
    blockDim = launch->block;
    std::apply(kernel, *static_cast<std::tuple<Types...>*>(packed));
}

}  // namespace hip_shim

#define HIP_SHIM_ENTRY(NAME, KERNEL, RUN)                                                        \
    extern "C" void* hip_shim_pack_##NAME(void** arguments) {                                    \
        return hip_shim::pack(KERNEL, arguments);                                                \
    }                                                                                            \
    extern "C" void hip_shim_run_##NAME(void* packed, const hip_shim::Launch* launch) {          \
        hip_shim::RUN(KERNEL, packed, launch);                                                   \
    }                                                                                            \
    extern "C" void hip_shim_drop_##NAME(void* packed) { hip_shim::drop(KERNEL, packed); }

