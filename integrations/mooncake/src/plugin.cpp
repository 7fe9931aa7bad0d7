#include "plugin.hpp"

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>

namespace kvferry {

namespace {

/// The text that a function of the table writes into a buffer.
template <typename Write>
std::string text(Write write) {
    std::string text(write(nullptr, 0), '\0');
    text.resize(text.empty() ? 0 : write(text.data(), text.size()));
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
}

const char* or_null(const std::string& text) { return text.empty() ? nullptr : text.c_str(); }

std::runtime_error failure(const kvferry_api& api, const std::string& doing) {
    return std::runtime_error(doing + ": " + last_error(api));
}

}  // namespace

const kvferry_api& load(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("loading kvferry: ") + dlerror());
    auto entry = reinterpret_cast<decltype(&kvferry_load)>(dlsym(library, "kvferry_load"));
    const kvferry_api* api = entry ? entry(KVFERRY_ABI_VERSION) : nullptr;
    // The last function that is used here.
    constexpr auto needed = offsetof(kvferry_api, statistics) + sizeof(kvferry_api::statistics);
    if (!api || api->struct_size < needed) {
        dlclose(library);
        throw std::runtime_error(path + " is no kvferry library of this version (ABI " +
                                 std::to_string(KVFERRY_ABI_VERSION) + ")");
    }
    return *api;
}

std::string last_error(const kvferry_api& api) {
    return text([&](char* to, size_t size) { return api.last_error(to, size); });
}

Engine::Engine(const kvferry_api& api, const EngineOptions& options) : api_(api) {
    kvferry_config config{};
    config.struct_size = sizeof config;
    config.devices = or_null(options.devices);
    config.listen = or_null(options.listen);
    config.name = or_null(options.name);
    if (api_.create(&config, &handle_) != KVFERRY_OK) throw failure(api_, "starting kvferry");
}

Engine::~Engine() { api_.destroy(handle_); }

std::string Engine::name() const {
    size_t needed = 0;
    api_.name(handle_, nullptr, 0, &needed);
    std::string name(needed, '\0');
    if (api_.name(handle_, name.data(), name.size(), nullptr) != KVFERRY_OK)
        throw failure(api_, "asking kvferry for its name");
    name.pop_back();
    return name;
}

std::string Engine::segment() const {
    size_t needed = 0;
    api_.export_segment(handle_, nullptr, 0, &needed);
    std::string segment(needed, '\0');
    if (api_.export_segment(handle_, segment.data(), segment.size(), &needed) != KVFERRY_OK)
        throw failure(api_, "asking kvferry for its descriptor");
    segment.resize(needed);
    return segment;
}

std::shared_ptr<Engine::Peer> Engine::peer(const std::string& name) {
    std::lock_guard lock(mutex_);
    auto& peer = peers_[name];
    if (!peer) peer = std::make_shared<Peer>();
    return peer;
}

kvferry_status Engine::target(const std::string& name, const std::shared_ptr<const void>& version,
                              kvferry_target* target) {
    const auto peer = this->peer(name);
    std::lock_guard lock(peer->mutex);
    kvferry_status known = KVFERRY_OK;
    if (peer->target.id && peer->version != version) known = api_.refresh(peer->target);
    if (!peer->target.id || known == KVFERRY_PEER_LOST) {
        // One that does not answer may work nevertheless: transfers tell whether it is lost.
        kvferry_target opened{};
        const auto status = api_.open(handle_, name.c_str(), &opened);
        if (status == KVFERRY_OK) {
            if (peer->target.id) api_.close(peer->target);
            peer->target = opened;
            known = KVFERRY_OK;
        } else if (!peer->target.id) {
            return status;
        }
    }
    // Whoever could not be asked now is asked again at the next transfer.
    if (known == KVFERRY_OK) peer->version = version;
    *target = peer->target;
    return KVFERRY_OK;
}

void Engine::forget(const std::string& name, kvferry_target target) {
    const auto peer = this->peer(name);
    std::lock_guard lock(peer->mutex);
    if (peer->target.id != target.id) return;
    api_.close(peer->target);
    peer->target = {};
}

}  // namespace kvferry
