// A libcuda of two GPUs that does nothing but write down what it is asked.

#include <cstdarg>
#include <cstdio>
#include <cstring>

typedef unsigned u32;
typedef unsigned long long u64;

static char said[4096];

static u32 say(const char* format, ...) {
    size_t used = strlen(said);
    va_list list;
    va_start(list, format);
    vsnprintf(said + used, sizeof said - used, format, list);
    va_end(list);
    return 0;
}

extern "C" {

// What was asked since the last time.
const char* stub_said() {
    static char copy[sizeof said];
    memcpy(copy, said, sizeof said);
    said[0] = 0;
    return copy;
}

u32 cuInit(u32) { return 0; }
u32 cuDeviceGetCount(int* count) { return *count = 2, 0; }
// Names that are no ordinals, so that they are not mixed up.
u32 cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal > 1) return 101;
    return *device = 40 + ordinal, 0;
}
u32 cuDeviceGetName(char* name, int, int device) { return sprintf(name, "GPU %d", device), 0; }
u32 cuDeviceGetAttribute(int* value, u32 attribute, int) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 10 ? 32 : int(1000 + attribute);
    return 0;
}
u32 cuDeviceCanAccessPeer(int* can, int device, int peer) {
    return *can = 1, say("can %d %d;", device, peer);
}
u32 cuDevicePrimaryCtxRetain(u64* context, int device) { return *context = 100 + device, 0; }
u32 cuCtxSetCurrent(u64 context) { return say("current %llu;", context); }
u32 cuCtxEnablePeerAccess(u64 peer, u32 flags) { return say("peer %llu %u;", peer, flags); }
u32 cuMemAlloc_v2(u64* addr, u64 bytes) { return *addr = 0x7000, say("alloc %llu;", bytes); }
u32 cuMemFree_v2(u64 addr) { return addr == 0x7000 ? say("free;") : 1; }
u32 cuMemHostAlloc(u64* host, u64 bytes, u32 flags) {
    return *host = 0x9000, say("host %llu %x;", bytes, flags);
}
u32 cuMemHostRegister_v2(u64, u64, u32) { return 712; }
u32 cuPointerGetAttribute(u64* value, u32 attribute, u64) {
    return *value = 0xabcdef0100000000 + attribute, 0;
}
u32 cuPointerGetAttributes(u32 count, u32* names, u32** values, u64 addr) {
    for (u32 at = 0; at < count && addr == 0x7000; at++) {
        *values[at] = names[at] == 2 ? 2 : names[at] == 9 ? 1 : 0;
    }
    return 0;
}
u32 cuEventCreate(u64* event, u32 flags) { return *event = 5, say("event %x;", flags); }
u32 cuEventQuery(u64) { return 600; }
u32 cuMemcpyAsync(u64 dst, u64 src, u64 bytes, u64 stream) {
    return say("copy %llx %llx %llu %llu;", dst, src, bytes, stream);
}
struct Copy {
    u64 src_x, src_y, src_type, src_host, src_device, src_array, src_pitch;
    u64 dst_x, dst_y, dst_type, dst_host, dst_device, dst_array, dst_pitch, width, height;
};
u32 cuMemcpy2DAsync_v2(const Copy* copy, u64 stream) {
    return say("rows %u %llx %llu %u %llx %llu %llu %llu %llu;", u32(copy->src_type), copy->src_device,
               copy->src_pitch, u32(copy->dst_type), copy->dst_device, copy->dst_pitch, copy->width,
               copy->height, stream);
}
u32 cuStreamWaitValue32_v2(u64 stream, u64 addr, u32 value, u32 flags) {
    return say("wait %llu %llx %u %u;", stream, addr, value, flags);
}
u32 cuLaunchKernel(u64 function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, u64 stream,
                   void** arguments, void**) {
    return say("launch %llu %u %u %u %u %u %u %u %llu %u;", function, gx, gy, gz, bx, by, bz, shared,
               stream, *static_cast<u32*>(arguments[0]));
}
u32 cuMemRetainAllocationHandle(u64* handle, u64 addr) {
    return addr == 0x8000 ? (*handle = 6, 0) : 1;
}
u32 cuMemRelease(u64 handle) { return say("release %llu;", handle); }
u32 cuMemGetAccess(u64* rights, const int* location, u64) {
    return *rights = 3, say("access %d %d;", location[0], location[1]);
}
}
