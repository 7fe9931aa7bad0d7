// One kvferry batch, and the slices of Mooncake's that end with it.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include "kvferry.h"
#include "transport/transport.h"

namespace kvferry {

/// Ends its slices exactly once: all of them completed, or all of them failed. It lives until the
/// last of its slices is given back.
class Submission {
   public:
    using Slice = mooncake::Transport::Slice;

    /// Takes a batch that was submitted, and its slices, of which there is one at least.
    static void begin(const kvferry_api& api, kvferry_batch batch, std::vector<Slice*> slices);

    /// The one that a slice belongs to; none if it failed before there was one, or is being submitted.
    static Submission* of(const Slice& slice);

    /// Asks kvferry how far it is, unless another thread is asking.
    void advance();

   private:
    Submission(const kvferry_api& api, kvferry_batch batch, std::vector<Slice*> slices);
    ~Submission() = default;

    static void given_back(Slice* slice);

    const kvferry_api& api_;
    const kvferry_batch batch_;
    const std::vector<Slice*> slices_;
    std::atomic<size_t> held_;
    std::mutex mutex_;
    bool ended_ = false;
};

}  // namespace kvferry
