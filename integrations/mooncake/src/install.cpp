#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "kvferry_mooncake.h"
#include "transfer_engine.h"
#include "transfer_engine_impl.h"
#include "transport.hpp"

namespace mooncake {

/// The name that Mooncake lets into its engine: it declares this class a friend and leaves it to
/// its users.
class TransferEngineImplTestPeer {
   public:
    static std::shared_ptr<Transport>* tcp(TransferEngine& engine) {
        if (!engine.impl_ || !engine.impl_->multi_transports_) return nullptr;
        auto& transports = engine.impl_->multi_transports_->transport_map_;
        const auto found = transports.find("tcp");
        return found == transports.end() ? nullptr : &found->second;
    }
};

}  // namespace mooncake

namespace {

using kvferry::KvferryTransport;
using mooncake::TransferEngine;
using mooncake::TransferEngineImplTestPeer;

std::string text(const char* given, const std::string& otherwise = {}) {
    return given ? given : otherwise;
}

void install(TransferEngine& engine, const kvferry_mooncake_options& options) {
    auto* tcp = TransferEngineImplTestPeer::tcp(engine);
    if (!tcp)
        throw std::runtime_error(
            "the engine has no transport \"tcp\": initialise it and install that before (TENT, the "
            "newer engine, has none of this kind)");
    if (dynamic_cast<KvferryTransport*>(tcp->get()))
        throw std::runtime_error("kvferry is installed already");
    const auto metadata = engine.getMetadata();
    const auto segment = metadata->getSegmentDescByID(mooncake::LOCAL_SEGMENT_ID);
    if (segment && !segment->buffers.empty())
        throw std::runtime_error("memory is registered already: install kvferry before");

    auto host = metadata->localRpcMeta().ip_or_host_name;
    if (host.find(':') != std::string::npos && host.front() != '[') host = "[" + host + "]";
    const auto* path = std::getenv("KVFERRY_LIBRARY");
    const auto& api = kvferry::load(text(options.library, text(path, "libkvferry.so.0")));
    const kvferry::EngineOptions ours{.devices = text(options.devices),
                                      .listen = text(options.listen, host + ":0"),
                                      .name = host + ":0"};
    auto transport = std::make_shared<KvferryTransport>(api, ours, metadata, *tcp);
    transport->publish();
    *tcp = std::move(transport);
}

}  // namespace

int kvferry_mooncake_install(void* engine, const kvferry_mooncake_options* options, char* error,
                             size_t size) {
    try {
        if (!engine) throw std::runtime_error("there is no engine");
        install(*static_cast<TransferEngine*>(engine),
                options ? *options : kvferry_mooncake_options{});
        return 0;
    } catch (const std::exception& failure) {
        if (error && size) {
            std::strncpy(error, failure.what(), size - 1);
            error[size - 1] = '\0';
        }
        return -1;
    }
}

kvferry_status kvferry_mooncake_statistics(void* engine, kvferry_statistics* statistics) {
    if (!engine) return KVFERRY_INVALID_ARGUMENT;
    const auto* tcp = TransferEngineImplTestPeer::tcp(*static_cast<TransferEngine*>(engine));
    const auto* ours = tcp ? dynamic_cast<const KvferryTransport*>(tcp->get()) : nullptr;
    return ours ? ours->statistics(statistics) : KVFERRY_NOT_FOUND;
}
