#include "memory.hpp"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

namespace test {

namespace {

class HostMemory final : public Memory {
   public:
    explicit HostMemory(size_t size) : bytes_(new uint8_t[size]) {}
    uint64_t address() const override { return reinterpret_cast<uint64_t>(bytes_.get()); }
    void put(const Bytes& bytes) override { std::memcpy(bytes_.get(), bytes.data(), bytes.size()); }
    Bytes get(size_t size) const override { return Bytes(bytes_.get(), bytes_.get() + size); }

   private:
    std::unique_ptr<uint8_t[]> bytes_;
};

/// The few functions of NVIDIA's driver that are needed; nothing is linked.
class Cuda {
   public:
    explicit Cuda(int ordinal) {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) throw std::runtime_error(dlerror());
        const auto find = [library](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
                dlsym(library, name));
            if (!function) throw std::runtime_error(std::string("libcuda has no ") + name);
        };
        int (*init)(unsigned);
        int (*retain)(void**, int);
        find(init, "cuInit");
        find(retain, "cuDevicePrimaryCtxRetain");
        find(set_current, "cuCtxSetCurrent");
        find(allocate, "cuMemAlloc_v2");
        find(free, "cuMemFree_v2");
        find(to_device, "cuMemcpyHtoD_v2");
        find(to_host, "cuMemcpyDtoH_v2");
        check(init(0), "cuInit");
        check(retain(&context, ordinal), "cuDevicePrimaryCtxRetain");
        check(set_current(context), "cuCtxSetCurrent");
    }

    static void check(int result, const char* call) {
        if (result) throw std::runtime_error(std::string(call) + ": " + std::to_string(result));
    }

    void* context = nullptr;
    int (*set_current)(void*);
    int (*allocate)(uint64_t*, size_t);
    int (*free)(uint64_t);
    int (*to_device)(uint64_t, const void*, size_t);
    int (*to_host)(void*, uint64_t, size_t);
};

class CudaMemory final : public Memory {
   public:
    CudaMemory(int ordinal, size_t size) : cuda_(ordinal) {
        Cuda::check(cuda_.allocate(&address_, size), "cuMemAlloc");
    }
    ~CudaMemory() override { cuda_.free(address_); }
    uint64_t address() const override { return address_; }
    void put(const Bytes& bytes) override {
        Cuda::check(cuda_.to_device(address_, bytes.data(), bytes.size()), "cuMemcpyHtoD");
    }
    Bytes get(size_t size) const override {
        Bytes bytes(size);
        Cuda::check(cuda_.to_host(bytes.data(), address_, size), "cuMemcpyDtoH");
        return bytes;
    }

   private:
    Cuda cuda_;
    uint64_t address_ = 0;
};

}  // namespace

std::unique_ptr<Memory> allocate(const std::string& device, size_t size) {
    if (device == "host") return std::make_unique<HostMemory>(size);
    if (device.rfind("cuda:", 0) == 0)
        return std::make_unique<CudaMemory>(std::stoi(device.substr(5)), size);
    throw std::runtime_error("no such device: " + device);
}

}  // namespace test
