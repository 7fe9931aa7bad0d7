// Transfer engines of Mooncake's, with kvferry or stock, in this process and in others.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"
#include "shapes.hpp"
#include "transfer_engine.h"

namespace test {

/// How the test was called.
struct Options {
    std::string program;
    std::string library;
    std::string shapes;
    std::string device = "host";
};

[[noreturn]] void fail(const std::string& what);

#define CHECK_THAT(condition)                                                     \
    do {                                                                          \
        if (!(condition)) test::fail(std::string(__FILE__) + ":" +                \
                                     std::to_string(__LINE__) + ": " #condition); \
    } while (0)

enum class Kind { Stock, Kvferry };
const char* name_of(Kind kind);

/// An engine that is ready for memory.
std::unique_ptr<mooncake::TransferEngine> start(Kind kind, const Options& options);

inline void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

/// Memory that is registered while it lives.
struct Registered {
    Registered(mooncake::TransferEngine& engine, const std::string& device, size_t size)
        : engine(engine), memory(allocate(device, size)) {
        CHECK_THAT(engine.registerLocalMemory(pointer(address()), size, device) == 0);
    }
    ~Registered() { CHECK_THAT(engine.unregisterLocalMemory(pointer(address())) == 0); }
    uint64_t address() const { return memory->address(); }

    mooncake::TransferEngine& engine;
    std::unique_ptr<Memory> memory;
};

struct Outcome {
    std::vector<mooncake::TransferStatusEnum> states;
    double seconds;

    bool all(mooncake::TransferStatusEnum state) const;
};

/// One batch, from the submission until every task has ended; it is then freed.
Outcome transfer(mooncake::TransferEngine& engine,
                 const std::vector<mooncake::TransferRequest>& requests);

/// Submits a batch, and spoils the list that it was submitted from.
mooncake::BatchID submit(mooncake::TransferEngine& engine,
                         const std::vector<mooncake::TransferRequest>& requests);
/// Polls until every task has ended, asks for each again, which must not change anything, sees that
/// each ended once, and frees the batch. It has no seconds.
Outcome finish(mooncake::TransferEngine& engine, mooncake::BatchID batch, size_t count);

/// Another process with an engine and registered memory, which does what it is told.
class Peer {
   public:
    Peer(Kind kind, const Options& options, size_t size);
    ~Peer();
    Peer(const Peer&) = delete;

    const std::string& name() const { return name_; }
    uint64_t address() const { return address_; }

    /// Fills so much of its memory with a pattern.
    void fill(uint64_t seed, size_t size);
    /// Whether its memory is, as far as a shape's layout goes, this pattern with the pieces of
    /// another one laid over.
    bool holds(uint64_t seed, const std::string& shape, uint64_t layout, uint64_t source);
    /// Registers one more buffer of this size, and returns its address.
    uint64_t register_more(size_t size);
    void unregister(uint64_t address);
    void signal(int number);

   private:
    std::string ask(const std::string& line);

    pid_t process_ = 0;
    FILE* to_ = nullptr;
    FILE* from_ = nullptr;
    std::string name_;
    uint64_t address_ = 0;
};

/// What the other process runs.
int peer_main(Kind kind, const Options& options, size_t size);

}  // namespace test
