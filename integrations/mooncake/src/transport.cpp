#include "transport.hpp"

#include <glog/logging.h>
#include <json/json.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "error.h"
#include "submission.hpp"

namespace kvferry {

using mooncake::LOCAL_SEGMENT_ID;
using mooncake::Status;

namespace {

constexpr std::string_view kScheme = "kvferry://";

/// Where kvferry finds the engine that published a segment; empty if it has no kvferry.
std::string kvferry_name(const mooncake::TransferMetadata::SegmentDesc& segment) {
    for (const auto& buffer : segment.buffers)
        if (buffer.name.starts_with(kScheme)) return buffer.name.substr(kScheme.size());
    return {};
}

int error_of(kvferry_status status) {
    switch (status) {
        case KVFERRY_OK: return 0;
        case KVFERRY_NOT_FOUND: return ERR_ADDRESS_NOT_REGISTERED;
        case KVFERRY_BUSY: return ERR_BATCH_BUSY;
        case KVFERRY_OUT_OF_MEMORY: return ERR_MEMORY;
        default: return ERR_INVALID_ARGUMENT;
    }
}

}  // namespace

struct KvferryTransport::Group {
    SegmentID target_id;
    /// Its name for kvferry; empty if the peer has none.
    std::string peer;
    kvferry_target target{};
    std::shared_ptr<const void> version;
    std::vector<kvferry_request> requests;
    std::vector<Slice*> slices;
};

KvferryTransport::KvferryTransport(const kvferry_api& api, const EngineOptions& options,
                                   std::shared_ptr<mooncake::TransferMetadata> metadata,
                                   std::shared_ptr<mooncake::Transport> stock)
    : stock_(std::move(stock)),
      engine_(api, options),
      buffer_name_(std::string(kScheme) + engine_.name()) {
    metadata_ = std::move(metadata);
}

void KvferryTransport::publish() {
    Json::Value ours;
    std::string wrong;
    std::istringstream text(engine_.segment());
    if (!Json::parseFromStream(Json::CharReaderBuilder(), text, &ours, &wrong))
        throw std::runtime_error("kvferry's descriptor: " + wrong);
    const auto now = metadata_->getSegmentDescByID(LOCAL_SEGMENT_ID);
    if (!now) throw std::runtime_error("the engine has no local segment");
    auto segment = std::make_shared<SegmentDesc>(*now);
    segment->tcp_data_port = ours["tcp_data_port"].asInt();
    segment->tcp_proto_version = ours["tcp_proto_version"].asInt();
    metadata_->addLocalSegment(LOCAL_SEGMENT_ID, now->name, std::move(segment));
    if (metadata_->updateLocalSegmentDesc()) {
        // Without our ports, which close now.
        metadata_->addLocalSegment(LOCAL_SEGMENT_ID, now->name, std::make_shared<SegmentDesc>(*now));
        throw std::runtime_error("the local segment could not be published");
    }
}

Status KvferryTransport::submitTransfer(BatchID batch_id,
                                        const std::vector<TransferRequest>& entries) {
    auto& batch = toBatchDesc(batch_id);
    if (batch.task_list.size() + entries.size() > batch.batch_size)
        return Status::TooManyRequests("the batch has no room for so many requests");
    std::vector<TransferTask*> tasks;
    tasks.reserve(entries.size());
    for (const auto& request : entries) {
        auto& task = batch.task_list.emplace_back();
        task.batch_id = batch_id;
        task.transport_ = this;
        task.request = &request;
        tasks.push_back(&task);
    }
    return submitTransferTask(tasks);
}

Status KvferryTransport::submitTransferTask(const std::vector<TransferTask*>& task_list) {
    std::vector<Group> groups;
    std::vector<TransferTask*> stock;
    size_t at = 0;
    for (auto* task : task_list) {
        // The request is gone when this returns.
        const auto& request = *task->request;
        if (at >= groups.size() || groups[at].target_id != request.target_id) {
            const auto is_its = [&](const Group& group) {
                return group.target_id == request.target_id;
            };
            const auto found = std::find_if(groups.begin(), groups.end(), is_its);
            at = static_cast<size_t>(found - groups.begin());
            if (found == groups.end()) {
                groups.push_back(group(request.target_id));
                groups.back().requests.reserve(task_list.size());
                groups.back().slices.reserve(task_list.size());
            }
        }
        auto& group = groups[at];
        if (group.peer.empty()) {
            task->transport_ = stock_.get();
            stock.push_back(task);
            continue;
        }
        auto* slice = getSliceCache().allocate();
        slice->source_addr = request.source;
        slice->length = request.length;
        slice->opcode = request.opcode;
        slice->target_id = request.target_id;
        slice->status = Slice::PENDING;
        slice->task = task;
        slice->ascend_direct.dest_addr = request.target_offset;
        slice->cleanup_callback = nullptr;
        slice->ts = 0;
        task->total_bytes = request.length;
        task->slice_list.push_back(slice);
        task->slice_count = 1;
        kvferry_request ours{};
        ours.opcode = request.opcode == TransferRequest::WRITE ? KVFERRY_WRITE : KVFERRY_READ;
        ours.source = reinterpret_cast<uint64_t>(request.source);
        ours.offset = request.target_offset;
        ours.length = request.length;
        group.requests.push_back(ours);
        group.slices.push_back(slice);
    }
    for (auto& group : groups)
        if (!group.requests.empty()) submit(group);
    // What failed is told by its slices: the caller polls every task, and frees the batch.
    return stock.empty() ? Status::OK() : stock_->submitTransferTask(stock);
}

KvferryTransport::Group KvferryTransport::group(SegmentID target_id) const {
    Group group{};
    group.target_id = target_id;
    // Found a moment ago, when the engine chose this transport.
    if (const auto segment = metadata_->getSegmentDescByID(target_id)) {
        group.peer = kvferry_name(*segment);
        group.version = segment;
    }
    return group;
}

/// Submits all requests, and ends the slices of those that cannot be.
void KvferryTransport::submit(Group& group) {
    const size_t count = group.requests.size();
    kvferry_status status = KVFERRY_OK;
    // Twice: a peer that was restarted is found again, and so is one that another thread forgot.
    for (int attempt = 0; attempt < 2; attempt++) {
        status = engine_.target(group.peer, group.version, &group.target);
        if (status != KVFERRY_OK) break;
        for (auto& request : group.requests) request.target = group.target;
        status = submit(group, 0, count);
        if (status == KVFERRY_OK) return;
        if (status == KVFERRY_PEER_LOST) {
            engine_.forget(group.peer, group.target);
        } else if (status != KVFERRY_NOT_FOUND) {
            break;
        }
    }
    LOG(ERROR) << "kvferry: cannot submit " << count << " requests to " << group.peer << ": "
               << last_error(engine_.api());
    // One of them is wrong, perhaps; the others need not suffer for it.
    const bool alone = status == KVFERRY_INVALID_ARGUMENT && count > 1;
    for (size_t at = 0; at < count; at++)
        if (!alone || submit(group, at, 1) != KVFERRY_OK) group.slices[at]->markFailed();
}

kvferry_status KvferryTransport::submit(const Group& group, size_t first, size_t count) {
    std::vector<Slice*> slices(group.slices.begin() + first, group.slices.begin() + first + count);
    kvferry_batch batch{};
    const auto status = engine_.api().submit_requests(
        engine_.handle(), group.requests.data() + first, count, nullptr, &batch);
    if (status == KVFERRY_OK) Submission::begin(engine_.api(), batch, std::move(slices));
    return status;
}

Status KvferryTransport::getTransferStatus(BatchID batch_id, size_t task_id,
                                           TransferStatus& status) {
    auto& batch = toBatchDesc(batch_id);
    if (task_id >= batch.task_list.size())
        return Status::InvalidArgument("the batch has no task " + std::to_string(task_id));
    auto& task = batch.task_list[task_id];
    if (task.transport_ != this)
        return task.transport_->getTransferStatus(batch_id, task_id, status);
    const auto has_ended = [&task] {
        return __atomic_load_n(&task.success_slice_count, __ATOMIC_ACQUIRE) +
                   __atomic_load_n(&task.failed_slice_count, __ATOMIC_ACQUIRE) ==
               task.slice_count;
    };
    if (!has_ended()) {
        // While another thread is still submitting it there is none.
        if (auto* submission = Submission::of(*task.slice_list.front())) submission->advance();
    }
    const bool ended = has_ended();
    status.transferred_bytes = task.transferred_bytes;
    status.s = !ended                   ? TransferStatusEnum::WAITING
               : task.failed_slice_count ? TransferStatusEnum::FAILED
                                         : TransferStatusEnum::COMPLETED;
    if (ended) task.is_finished = true;
    return Status::OK();
}

int KvferryTransport::registerLocalMemory(void* addr, size_t length, const std::string&, bool,
                                          bool update_metadata) {
    BufferDesc buffer{};
    buffer.name = buffer_name_;
    buffer.addr = reinterpret_cast<uint64_t>(addr);
    buffer.length = length;
#ifdef ENABLE_MULTI_PROTOCOL
    buffer.protocol = "tcp";
#endif
    uint32_t served = 0;
    const auto& api = engine_.api();
    const auto status = api.register_memory(engine_.handle(), buffer.addr, length, &served);
    if (status != KVFERRY_OK) {
        LOG(ERROR) << "kvferry: cannot register " << length << " bytes at " << addr << ": "
                   << last_error(api);
        return error_of(status);
    }
    if (!served) {
        // Another transport's, or nobody's: the engine shows all memory to all of them.
        LOG(WARNING) << "kvferry does not serve " << length << " bytes at " << addr << ": "
                     << last_error(api);
        return 0;
    }
    std::lock_guard lock(segment_mutex_);
    return metadata_->addLocalMemoryBuffer(buffer, update_metadata);
}

int KvferryTransport::unregisterLocalMemory(void* addr, bool update_metadata) {
    // First its place in the segment, so that nobody finds it any more.
    remove_buffer(reinterpret_cast<uint64_t>(addr));
    const auto& api = engine_.api();
    const auto status = api.unregister_memory(engine_.handle(), reinterpret_cast<uint64_t>(addr));
    if (status != KVFERRY_OK && status != KVFERRY_NOT_FOUND)
        LOG(ERROR) << "kvferry: cannot unregister " << addr << ": " << last_error(api);
    const int published = update_metadata ? metadata_->updateLocalSegmentDesc() : 0;
    return status != KVFERRY_OK ? error_of(status) : published;
}

/// Mooncake's own removal takes the first buffer of an address, whichever transport's it is.
void KvferryTransport::remove_buffer(uint64_t addr) {
    std::lock_guard lock(segment_mutex_);
    const auto now = metadata_->getSegmentDescByID(LOCAL_SEGMENT_ID);
    if (!now) return;
    auto segment = std::make_shared<SegmentDesc>(*now);
    const auto removed = std::erase_if(segment->buffers, [&](const BufferDesc& buffer) {
        return buffer.addr == addr && buffer.name == buffer_name_;
    });
    if (removed) metadata_->addLocalSegment(LOCAL_SEGMENT_ID, now->name, std::move(segment));
}

int KvferryTransport::registerLocalMemoryBatch(const std::vector<BufferEntry>& buffer_list,
                                               const std::string& location) {
    for (const auto& buffer : buffer_list) {
        const int failed = registerLocalMemory(buffer.addr, buffer.length, location, true, false);
        // The engine takes back what was registered before it.
        if (failed) return failed;
    }
    return metadata_->updateLocalSegmentDesc();
}

int KvferryTransport::unregisterLocalMemoryBatch(const std::vector<void*>& addr_list) {
    int first = 0;
    for (auto* addr : addr_list)
        if (const int failed = unregisterLocalMemory(addr, false); failed && !first) first = failed;
    const int published = metadata_->updateLocalSegmentDesc();
    return first ? first : published;
}

}  // namespace kvferry
