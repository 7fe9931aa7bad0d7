// Memory of the host or of a GPU, for the test.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace test {

using Bytes = std::vector<uint8_t>;

class Memory {
   public:
    virtual ~Memory() = default;
    virtual uint64_t address() const = 0;
    /// Its first bytes.
    virtual void put(const Bytes& bytes) = 0;
    virtual Bytes get(size_t size) const = 0;
};

/// `device` is "host" or "cuda:N". Throws std::runtime_error.
std::unique_ptr<Memory> allocate(const std::string& device, size_t size);

}  // namespace test
