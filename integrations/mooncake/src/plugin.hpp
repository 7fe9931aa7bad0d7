// libkvferry.so and engines of it, without a word of Mooncake.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "kvferry.h"

namespace kvferry {

/// Loads the library, which then stays: its threads would not outlive it. Throws
/// std::runtime_error.
const kvferry_api& load(const std::string& path);

/// Why the last call of this thread failed.
std::string last_error(const kvferry_api& api);

/// Options of an Engine; empty is kvferry's default.
struct EngineOptions {
    std::string devices;
    std::string listen;
    std::string name;
};

/// One kvferry engine, and the peers that it has opened.
class Engine {
   public:
    /// Throws std::runtime_error.
    Engine(const kvferry_api& api, const EngineOptions& options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    const kvferry_api& api() const { return api_; }
    kvferry_engine handle() const { return handle_; }

    /// The host:port that peers open. Throws std::runtime_error.
    std::string name() const;

    /// The descriptor of the memory that is registered now, as JSON. Throws std::runtime_error.
    std::string segment() const;

    /// The target of a peer, opened when it is first asked for. `version` stands for what the
    /// caller knows of the peer's memory: when it is another object than the last time, the peer is
    /// asked again. Takes up to 10 seconds, in which only callers for the same peer wait.
    kvferry_status target(const std::string& peer, const std::shared_ptr<const void>& version,
                          kvferry_target* target);

    /// Closes a target that is of no more use; the next call for the peer opens another.
    void forget(const std::string& peer, kvferry_target target);

   private:
    struct Peer {
        std::mutex mutex;
        std::shared_ptr<const void> version;
        kvferry_target target{};
    };

    std::shared_ptr<Peer> peer(const std::string& name);

    const kvferry_api& api_;
    kvferry_engine handle_ = 0;
    std::mutex mutex_;
    std::map<std::string, std::shared_ptr<Peer>> peers_;
};

}  // namespace kvferry
