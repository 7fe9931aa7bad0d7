// One kvferry batch, and the slices of Mooncake's that end with it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvferry.h"
#include "transport/transport.h"

namespace kvferry {

/// Bytes that arrived, by what moved them (KVFERRY_PATH_...).
class PathBytes {
   public:
    static constexpr uint32_t kPaths = 16;

    void add(uint32_t path, uint64_t bytes) {
        if (path < kPaths) bytes_[path].fetch_add(bytes, std::memory_order_relaxed);
    }
    uint64_t of(uint32_t path) const {
        return path < kPaths ? bytes_[path].load(std::memory_order_relaxed) : 0;
    }

   private:
    std::atomic<uint64_t> bytes_[kPaths]{};
};

/// Ends its slices exactly once: all of them completed, or all of them failed. It lives until the
/// last of its slices is given back.
class Submission {
   public:
    using Slice = mooncake::Transport::Slice;

    /// Takes a batch that was submitted, and its slices, which are some. Adds to `moved` what it
    /// has moved.
    static void begin(const kvferry_api& api, kvferry_batch batch, std::vector<Slice*> slices,
                      std::shared_ptr<PathBytes> moved);

    /// The one that a slice belongs to; none if it failed before there was one.
    static Submission* of(const Slice& slice);

    /// Asks kvferry how far it is, unless another thread is asking.
    void advance();

   private:
    Submission(const kvferry_api& api, kvferry_batch batch, std::vector<Slice*> slices,
               std::shared_ptr<PathBytes> moved);
    ~Submission() = default;

    static void given_back(Slice* slice);

    const kvferry_api& api_;
    const kvferry_batch batch_;
    const std::vector<Slice*> slices_;
    const std::shared_ptr<PathBytes> moved_;
    std::atomic<size_t> held_;
    std::mutex mutex_;
    bool ended_ = false;
};

}  // namespace kvferry
