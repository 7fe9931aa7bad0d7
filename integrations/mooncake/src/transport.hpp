// kvferry as a transport of Mooncake's transfer engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kvferry.h"
#include "plugin.hpp"
#include "transport/transport.h"

#ifdef USE_EVENT_DRIVEN_COMPLETION
#error "completion is polled here: build Mooncake without USE_EVENT_DRIVEN_COMPLETION"
#endif

namespace kvferry {

/// Stands where the engine's transport "tcp" stood, under the protocol that stock peers accept. The
/// local segment names kvferry's port for Mooncake's TCP protocol, so stock peers are served by
/// kvferry; each buffer's name, which that protocol does not use, says where kvferry engines find
/// this one. Transfers to peers that say no such thing go to the transport that stood here.
class KvferryTransport final : public mooncake::Transport {
   public:
    /// Throws std::runtime_error. Nothing is published before publish().
    KvferryTransport(const kvferry_api& api, const EngineOptions& options,
                     std::shared_ptr<mooncake::TransferMetadata> metadata,
                     std::shared_ptr<mooncake::Transport> stock);
    ~KvferryTransport() override = default;

    /// Names kvferry's port in the local segment. Throws std::runtime_error.
    void publish();

    kvferry_status statistics(kvferry_statistics* statistics) const {
        return engine_.api().statistics(engine_.handle(), statistics);
    }

    mooncake::Status submitTransfer(BatchID batch_id,
                                    const std::vector<TransferRequest>& entries) override;
    mooncake::Status submitTransferTask(const std::vector<TransferTask*>& task_list) override;
    mooncake::Status getTransferStatus(BatchID batch_id, size_t task_id,
                                       TransferStatus& status) override;

   private:
    /// Requests to one kvferry peer, in one batch.
    struct Group;

    int registerLocalMemory(void* addr, size_t length, const std::string& location,
                            bool remote_accessible, bool update_metadata) override;
    int unregisterLocalMemory(void* addr, bool update_metadata) override;
    int registerLocalMemoryBatch(const std::vector<BufferEntry>& buffer_list,
                                 const std::string& location) override;
    int unregisterLocalMemoryBatch(const std::vector<void*>& addr_list) override;
    const char* getName() const override { return "kvferry"; }

    Group group(SegmentID target_id) const;
    void submit(Group& group);
    kvferry_status submit(const Group& group, size_t first, size_t count);
    void remove_buffer(uint64_t addr);

    // Before kvferry's engine, so that it ends after it.
    const std::shared_ptr<mooncake::Transport> stock_;
    Engine engine_;
    /// The name of the buffers that kvferry serves.
    const std::string buffer_name_;
    /// Held while the local segment is changed.
    std::mutex segment_mutex_;
};

}  // namespace kvferry
