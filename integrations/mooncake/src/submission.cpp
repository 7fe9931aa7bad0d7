#include "submission.hpp"

#include <glog/logging.h>

#include <utility>

#include "plugin.hpp"

namespace kvferry {

void Submission::begin(const kvferry_api& api, kvferry_batch batch, std::vector<Slice*> slices) {
    auto* submission = new Submission(api, batch, std::move(slices));
    for (auto* slice : submission->slices_) {
        // Of what transports may keep in a slice, the one pointer that is nobody's in particular.
        slice->ascend_direct.handle = submission;
        // Another thread may already ask how far the request is.
        __atomic_store_n(&slice->cleanup_callback, &given_back, __ATOMIC_RELEASE);
    }
}

Submission::Submission(const kvferry_api& api, kvferry_batch batch, std::vector<Slice*> slices)
    : api_(api), batch_(batch), slices_(std::move(slices)), held_(slices_.size()) {}

Submission* Submission::of(const Slice& slice) {
    if (__atomic_load_n(&slice.cleanup_callback, __ATOMIC_ACQUIRE) != &given_back) return nullptr;
    return static_cast<Submission*>(slice.ascend_direct.handle);
}

void Submission::given_back(Slice* slice) {
    auto* submission = static_cast<Submission*>(slice->ascend_direct.handle);
    if (submission->held_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete submission;
}

void Submission::advance() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || ended_) return;
    kvferry_batch_status status{};
    status.struct_size = sizeof status;
    const auto asked = api_.poll(batch_, &status);
    if (asked == KVFERRY_OK && status.state == KVFERRY_RUNNING) return;
    ended_ = true;
    const bool completed = asked == KVFERRY_OK && status.state == KVFERRY_COMPLETED;
    if (!completed)
        LOG(ERROR) << "kvferry: a transfer of " << slices_.size()
                   << " requests failed: " << last_error(api_);
    api_.release(batch_);
    for (auto* slice : slices_) completed ? slice->markSuccess() : slice->markFailed();
}

}  // namespace kvferry
