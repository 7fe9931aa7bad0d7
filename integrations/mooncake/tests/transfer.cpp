// Moves R1 to R6 between real transfer engines of Mooncake's, with kvferry and without, and breaks
// things on the way.
//   transfer shapes LIBRARY SHAPES [DEVICE]     moves; DEVICE is "host" (default) or "cuda:N"
//   transfer faults LIBRARY SHAPES [DEVICE]     breaks
//   transfer peer LIBRARY SHAPES DEVICE KIND BYTES     the other process
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <thread>

#include "kvferry.h"
#include "kvferry_mooncake.h"
#include "../src/plugin.hpp"
#include "memory.hpp"
#include "peer.hpp"
#include "shapes.hpp"

using namespace test;
using mooncake::TransferEngine;
using mooncake::TransferRequest;
using mooncake::TransferStatusEnum;

namespace {

constexpr int kRounds = 5;
constexpr size_t kSmall = 1 << 20;

TransferRequest request(TransferRequest::OpCode opcode, uint64_t source, uint64_t segment,
                        uint64_t offset, size_t length) {
    TransferRequest request{};
    request.opcode = opcode;
    request.source = pointer(source);
    request.target_id = segment;
    request.target_offset = offset;
    request.length = length;
    return request;
}

const char* name_of_path(uint32_t path) {
    static const char* names[] = {"none",   "kernel", "dma",        "mixed",
                                  "memcpy", "tcp",    "tcp-staged", "staged"};
    return path < std::size(names) ? names[path] : "?";
}

/// What moved the bytes since `before`.
std::string paths(TransferEngine& engine, kvferry_statistics& before) {
    kvferry_statistics now{};
    now.struct_size = sizeof now;
    std::string moved;
    if (kvferry_mooncake_statistics(&engine, &now) == KVFERRY_OK) {
        for (uint32_t path = 0; path < std::size(now.paths); path++) {
            if (now.paths[path].bytes == before.paths[path].bytes) continue;
            moved.append(moved.empty() ? "kvferry " : "+");
            moved.append(name_of_path(path));
        }
        before = now;
    }
    return moved.empty() ? "mooncake tcp" : moved;
}

/// An engine here with memory of `device`, and one in another process with memory of the device of
/// the options.
class Pair {
   public:
    Pair(Kind here, const std::string& device, Kind there, const Options& options, size_t size)
        : is_stock_(here == Kind::Stock || there == Kind::Stock),
          title_(std::string(name_of(here)) + ' ' + device + " to " + name_of(there) + ' ' +
                 options.device),
          engine_(start(here, options)),
          local_(*engine_, device, size),
          peer_(there, options, size),
          segment_(engine_->openSegment(peer_.name())) {
        CHECK_THAT(segment_ != static_cast<uint64_t>(-1));
    }

    const std::string& title() const { return title_; }

    /// Moves a shape, compares every byte of the destination, and returns the seconds.
    double move(const Shape& shape, TransferRequest::OpCode opcode, uint64_t seed) {
        const bool writes = opcode == TransferRequest::WRITE;
        const uint64_t place = seed, source = seed + 1, background = seed + 2;
        const auto extent = shape.extent();
        const auto pieces = layout(shape, place);
        std::vector<TransferRequest> requests;
        for (const auto& piece : pieces)
            requests.push_back(request(
                opcode, local_.address() + (writes ? piece.source : piece.destination), segment_,
                peer_.address() + (writes ? piece.destination : piece.source), piece.length));
        local_.memory->put(pattern(writes ? source : background, extent));
        peer_.fill(writes ? background : source, extent);
        const auto outcome = transfer(*engine_, requests);
        CHECK_THAT(outcome.all(TransferStatusEnum::COMPLETED));
        if (writes) {
            CHECK_THAT(peer_.holds(background, shape.id, place, source));
        } else {
            auto expected = pattern(background, extent);
            apply(pieces, pattern(source, extent), expected);
            CHECK_THAT(local_.memory->get(extent) == expected);
        }
        return outcome.seconds;
    }

    /// What has moved the bytes since this was last asked.
    std::string path() {
        const auto path = paths(*engine_, told_);
        CHECK_THAT((path == "mooncake tcp") == is_stock_);
        return path;
    }

   private:
    bool is_stock_;
    std::string title_;
    std::unique_ptr<TransferEngine> engine_;
    Registered local_;
    Peer peer_;
    uint64_t segment_;
    kvferry_statistics told_{};
};

void an_unknown_address_fails_alone(const Options& options) {
    auto engine = start(Kind::Kvferry, options);
    Registered local(*engine, options.device, kSmall);
    Peer peer(Kind::Kvferry, options, kSmall);
    const auto segment = engine->openSegment(peer.name());
    const auto at = peer.address();
    const auto outcome = transfer(
        *engine, {request(TransferRequest::WRITE, local.address(), segment, at, 4096),
                  request(TransferRequest::WRITE, local.address(), segment, at + kSmall, 4096),
                  request(TransferRequest::WRITE, local.address() + kSmall, segment, at, 4096),
                  request(TransferRequest::WRITE, local.address(), segment, ~0ull, 4096),
                  request(TransferRequest::READ, local.address() + 8192, segment, at + 8192, 1),
                  request(TransferRequest::READ, local.address(), segment, at, 0)});
    using enum mooncake::Transport::TransferStatusEnum;
    const std::vector expected{COMPLETED, FAILED, FAILED, FAILED, COMPLETED, COMPLETED};
    CHECK_THAT(outcome.states == expected);
}

void memory_comes_and_goes(const Options& options) {
    auto engine = start(Kind::Kvferry, options);
    Registered local(*engine, options.device, kSmall);
    const auto register_again = [&](uint64_t address) {
        return engine->registerLocalMemory(pointer(address), kSmall, options.device);
    };
    const auto published = [&] {
        const auto id = mooncake::LOCAL_SEGMENT_ID;
        return engine->getMetadata()->getSegmentDescByID(id)->buffers.size();
    };
    CHECK_THAT(register_again(local.address()) != 0);
    CHECK_THAT(published() == 1);
    CHECK_THAT(engine->unregisterLocalMemory(pointer(local.address())) == 0);
    CHECK_THAT(published() == 0);
    CHECK_THAT(engine->unregisterLocalMemory(pointer(local.address())) != 0);
    CHECK_THAT(register_again(local.address()) == 0);
    CHECK_THAT(published() == 1);

    Peer peer(Kind::Kvferry, options, kSmall);
    const auto segment = engine->openSegment(peer.name());
    const auto write = [&](uint64_t to) {
        return transfer(*engine,
                        {request(TransferRequest::WRITE, local.address(), segment, to, 4096)});
    };
    CHECK_THAT(write(peer.address()).all(TransferStatusEnum::COMPLETED));
    const auto more = peer.register_more(kSmall);
    CHECK_THAT(engine->syncSegmentCache(peer.name()) == 0);
    CHECK_THAT(write(more).all(TransferStatusEnum::COMPLETED));
    peer.unregister(more);
    CHECK_THAT(engine->syncSegmentCache(peer.name()) == 0);
    CHECK_THAT(write(more).all(TransferStatusEnum::FAILED));
    CHECK_THAT(write(peer.address()).all(TransferStatusEnum::COMPLETED));

    // A batch of buffers, one of which overlaps: none stays.
    const auto first = allocate(options.device, kSmall), second = allocate(options.device, kSmall);
    std::vector<mooncake::BufferEntry> buffers{{pointer(first->address()), kSmall},
                                               {pointer(second->address()), kSmall}};
    CHECK_THAT(engine->registerLocalMemoryBatch(buffers, options.device) == 0);
    CHECK_THAT(published() == 3);
    CHECK_THAT(engine->unregisterLocalMemoryBatch({buffers[0].addr, buffers[1].addr}) == 0);
    CHECK_THAT(published() == 1);
    buffers.push_back({pointer(local.address()), kSmall});
    CHECK_THAT(engine->registerLocalMemoryBatch(buffers, options.device) != 0);
    CHECK_THAT(register_again(first->address()) == 0);
    CHECK_THAT(engine->unregisterLocalMemory(pointer(first->address())) == 0);
}

/// The engine offers all memory to all transports, so what nobody can serve is no failure.
void memory_that_nobody_may_read_is_accepted_and_not_published(const Options& options) {
    auto engine = start(Kind::Kvferry, options);
    void* memory = mmap(nullptr, kSmall, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK_THAT(memory != MAP_FAILED);
    CHECK_THAT(engine->registerLocalMemory(memory, kSmall, "*") == 0);
    const auto segment = engine->getMetadata()->getSegmentDescByID(mooncake::LOCAL_SEGMENT_ID);
    CHECK_THAT(segment->buffers.empty());
    CHECK_THAT(engine->unregisterLocalMemory(memory) == 0);
    munmap(memory, kSmall);
}

/// A node of kvferry's own, such as `kvferry serve`, has the same descriptor.
void a_node_outside_mooncake_is_a_kvferry_peer(const Options& options) {
    auto engine = start(Kind::Kvferry, options);
    Registered local(*engine, options.device, kSmall);
    const auto bytes = pattern(3, kSmall);
    local.memory->put(bytes);
    const auto& api = kvferry::load(options.library);
    kvferry::Engine node(api, {.devices = "host", .listen = "127.0.0.1:0", .name = {}});
    uint64_t address = 0;
    CHECK_THAT(api.allocate(node.handle(), 0, kSmall, &address) == KVFERRY_OK);
    const auto segment = engine->openSegment(node.name());
    const auto outcome = transfer(*engine, {request(TransferRequest::WRITE, local.address(),
                                                    segment, address, kSmall)});
    CHECK_THAT(outcome.all(TransferStatusEnum::COMPLETED));
    CHECK_THAT(std::equal(bytes.begin(), bytes.end(), static_cast<uint8_t*>(pointer(address))));
    kvferry_statistics statistics{};
    CHECK_THAT(paths(*engine, statistics) != "mooncake tcp");
}

void two_engines_of_one_process_reach_each_other_and_themselves(const Options& options) {
    auto one = start(Kind::Kvferry, options), two = start(Kind::Kvferry, options);
    Registered source(*one, options.device, kSmall), target(*two, options.device, kSmall);
    const auto bytes = pattern(7, kSmall);
    source.memory->put(bytes);
    target.memory->put(pattern(8, kSmall));
    const auto segment = one->openSegment(two->getLocalIpAndPort());
    const auto all = transfer(*one, {request(TransferRequest::WRITE, source.address(), segment,
                                             target.address(), kSmall)});
    CHECK_THAT(all.all(TransferStatusEnum::COMPLETED));
    CHECK_THAT(target.memory->get(kSmall) == bytes);
    const auto own = transfer(*one, {request(TransferRequest::WRITE, source.address(), 0,
                                             source.address() + kSmall / 2, kSmall / 2)});
    CHECK_THAT(own.all(TransferStatusEnum::COMPLETED));
    const auto now = source.memory->get(kSmall);
    CHECK_THAT(std::equal(now.begin(), now.begin() + kSmall / 2, now.begin() + kSmall / 2));
}

void a_batch_to_several_peers_is_each_peer_s_own(const Options& options) {
    auto engine = start(Kind::Kvferry, options);
    Registered local(*engine, options.device, kSmall);
    Peer ours(Kind::Kvferry, options, kSmall), stock(Kind::Stock, options, kSmall);
    std::vector<TransferRequest> requests;
    for (auto* peer : {&ours, &stock, &ours, &stock})
        requests.push_back(request(TransferRequest::WRITE, local.address(),
                                   engine->openSegment(peer->name()),
                                   peer->address() + requests.size() * 65536, 65536));
    CHECK_THAT(transfer(*engine, requests).all(TransferStatusEnum::COMPLETED));
    requests[1].target_offset = 4096;
    const auto outcome = transfer(*engine, requests);
    using enum mooncake::Transport::TransferStatusEnum;
    CHECK_THAT((outcome.states == std::vector{COMPLETED, FAILED, COMPLETED, COMPLETED}));
}

/// Each thread has batches of its own, to both peers at once; what one of them writes is read back.
void threads_share_an_engine(const Options& options) {
    constexpr size_t threads = 4, batches = 50, pieces = 16, length = 1024;
    auto engine = start(Kind::Kvferry, options);
    Registered local(*engine, options.device, kSmall);
    Registered back(*engine, options.device, kSmall);
    Peer one(Kind::Kvferry, options, kSmall), two(Kind::Kvferry, options, kSmall);
    local.memory->put(pattern(1, kSmall));
    back.memory->put(pattern(2, kSmall));
    const auto work = [&](size_t thread) {
        for (size_t batch = 0; batch < batches; batch++) {
            for (const auto opcode : {TransferRequest::WRITE, TransferRequest::READ}) {
                std::vector<TransferRequest> requests;
                for (size_t piece = 0; piece < pieces; piece++) {
                    const auto& peer = piece % 2 ? one : two;
                    const auto& memory = opcode == TransferRequest::WRITE ? local : back;
                    const auto at = (thread * pieces + piece) * length;
                    requests.push_back(request(opcode, memory.address() + at,
                                               engine->openSegment(peer.name()),
                                               peer.address() + at, length));
                }
                CHECK_THAT(transfer(*engine, requests).all(TransferStatusEnum::COMPLETED));
            }
        }
    };
    std::vector<std::thread> running;
    for (size_t thread = 0; thread < threads; thread++) running.emplace_back(work, thread);
    for (auto& thread : running) thread.join();
    auto expected = pattern(2, kSmall);
    apply({{0, 0, threads * pieces * length}}, pattern(1, kSmall), expected);
    CHECK_THAT(back.memory->get(kSmall) == expected);
}

/// As many threads poll the same tasks; each task ends once all the same.
void threads_share_a_batch(const Options& options) {
    constexpr size_t pieces = 64, length = kSmall / pieces;
    auto engine = start(Kind::Kvferry, options);
    Registered local(*engine, options.device, kSmall);
    Peer peer(Kind::Kvferry, options, kSmall);
    std::vector<TransferRequest> requests;
    for (size_t piece = 0; piece < pieces; piece++)
        requests.push_back(request(TransferRequest::WRITE, local.address() + piece * length,
                                   engine->openSegment(peer.name()),
                                   peer.address() + piece * length, length));
    for (int round = 0; round < 50; round++) {
        const auto batch = submit(*engine, requests);
        std::vector<std::thread> polling;
        for (int thread = 0; thread < 4; thread++)
            polling.emplace_back([&] {
                mooncake::TransferStatus status{};
                do CHECK_THAT(engine->getBatchTransferStatus(batch, status).ok());
                while (status.s == TransferStatusEnum::WAITING);
                CHECK_THAT(status.s == TransferStatusEnum::COMPLETED);
            });
        for (auto& thread : polling) thread.join();
        CHECK_THAT(finish(*engine, batch, pieces).all(TransferStatusEnum::COMPLETED));
    }
}

/// Host memory that nobody can map crosses a socket, so a stopped peer leaves it in flight.
void a_peer_that_is_killed_in_flight_fails_its_tasks_once(const Options& options) {
    constexpr size_t size = 64 << 20;
    auto engine = start(Kind::Kvferry, options);
    Registered local(*engine, "host", size);
    Peer peer(Kind::Kvferry, options, size), other(Kind::Kvferry, options, kSmall);
    const auto segment = engine->openSegment(peer.name());
    const auto to = [&](uint64_t id, uint64_t address, size_t count, size_t length) {
        std::vector<TransferRequest> requests;
        for (size_t at = 0; at < count; at++)
            requests.push_back(request(TransferRequest::WRITE, local.address() + at * length, id,
                                       address + at * length, length));
        return requests;
    };
    const auto requests = to(segment, peer.address(), 16, size / 16);
    CHECK_THAT(transfer(*engine, requests).all(TransferStatusEnum::COMPLETED));
    peer.signal(SIGSTOP);
    const auto batch = submit(*engine, requests);
    mooncake::TransferStatus status{};
    CHECK_THAT(engine->getTransferStatus(batch, 0, status).ok());
    CHECK_THAT(status.s == TransferStatusEnum::WAITING);
    CHECK_THAT(!engine->freeBatchID(batch).ok());
    peer.signal(SIGKILL);
    CHECK_THAT(finish(*engine, batch, requests.size()).all(TransferStatusEnum::FAILED));
    CHECK_THAT(transfer(*engine, requests).all(TransferStatusEnum::FAILED));
    const auto alive = to(engine->openSegment(other.name()), other.address(), 16, 4096);
    CHECK_THAT(transfer(*engine, alive).all(TransferStatusEnum::COMPLETED));
}

void without_the_library_the_engine_stays_as_it_was(const Options& options) {
    auto engine = start(Kind::Stock, options);
    const auto* before = engine->getTransport("tcp");
    const auto port = [](TransferEngine& engine) {
        const auto id = mooncake::LOCAL_SEGMENT_ID;
        return engine.getMetadata()->getSegmentDescByID(id)->tcp_data_port;
    };
    const auto port_before = port(*engine);
    const kvferry_mooncake_options absent{"/nowhere/libkvferry.so", nullptr, nullptr};
    const kvferry_mooncake_options wrong{options.library.c_str(), "abacus:0", nullptr};
    const kvferry_mooncake_options taken{options.library.c_str(), "host", "192.0.2.1:0"};
    for (const auto* refused : {&absent, &wrong, &taken}) {
        char why[512] = "";
        CHECK_THAT(kvferry_mooncake_install(engine.get(), refused, why, sizeof why) == -1);
        CHECK_THAT(std::strlen(why) > 10);
        CHECK_THAT(engine->getTransport("tcp") == before);
        CHECK_THAT(port(*engine) == port_before);
    }
    Peer peer(Kind::Stock, options, kSmall);
    Registered local(*engine, "host", kSmall);
    const auto segment = engine->openSegment(peer.name());
    CHECK_THAT(transfer(*engine, {request(TransferRequest::WRITE, local.address(), segment,
                                          peer.address(), 4096)})
                   .all(TransferStatusEnum::COMPLETED));
    // Too late, twice, and nothing at all.
    const kvferry_mooncake_options ours{options.library.c_str(), "host", nullptr};
    CHECK_THAT(kvferry_mooncake_install(engine.get(), &ours, nullptr, 0) == -1);
    auto fresh = start(Kind::Stock, options);
    const auto port_of_mooncake = port(*fresh);
    CHECK_THAT(kvferry_mooncake_install(fresh.get(), &ours, nullptr, 0) == 0);
    CHECK_THAT(port(*fresh) != port_of_mooncake);
    CHECK_THAT(kvferry_mooncake_install(fresh.get(), &ours, nullptr, 0) == -1);
    CHECK_THAT(kvferry_mooncake_install(nullptr, &ours, nullptr, 0) == -1);
    TransferEngine empty(false);
    CHECK_THAT(kvferry_mooncake_install(&empty, &ours, nullptr, 0) == -1);
}

/// Every shape between every pair, in both directions. They take turns, so that what else the
/// machine does hits all of them.
void all_shapes(const Options& options) {
    const auto shapes = read_shapes(options.shapes);
    size_t size = 0;
    for (const auto& shape : shapes) size = std::max<size_t>(size, shape.extent());
    std::vector<std::unique_ptr<Pair>> pairs;
    const auto add = [&](Kind here, const std::string& device, Kind there) {
        pairs.push_back(std::make_unique<Pair>(here, device, there, options, size));
    };
    add(Kind::Kvferry, options.device, Kind::Kvferry);
    // kvferry serves a GPU's memory to stock engines, which here have only the host's.
    add(Kind::Stock, "host", Kind::Kvferry);
    if (options.device == "host") {
        add(Kind::Kvferry, "host", Kind::Stock);
        add(Kind::Stock, "host", Kind::Stock);
    } else {
        add(Kind::Kvferry, "host", Kind::Kvferry);
    }
    printf("| shape | op | engines | best ms | GB/s | moved by |\n|---|---|---|---|---|---|\n");
    uint64_t seed = 1;
    for (const auto& shape : shapes) {
        for (const auto opcode : {TransferRequest::WRITE, TransferRequest::READ}) {
            std::vector<double> best(pairs.size(), 1e9);
            for (int round = 0; round < kRounds; round++, seed += 3)
                for (size_t at = 0; at < pairs.size(); at++)
                    best[at] = std::min(best[at], pairs[at]->move(shape, opcode, seed));
            for (size_t at = 0; at < pairs.size(); at++)
                printf("| %s | %s | %s | %.2f | %.2f | %s |\n", shape.id.c_str(),
                       opcode == TransferRequest::WRITE ? "write" : "read",
                       pairs[at]->title().c_str(), best[at] * 1e3,
                       static_cast<double>(shape.bytes()) / best[at] / 1e9,
                       pairs[at]->path().c_str());
            fflush(stdout);
        }
    }
}

/// Returns how many have passed; one that fails ends the process.
int all_faults(const Options& options) {
    int passed = 0;
    const auto run = [&](const char* name, void (*test)(const Options&)) {
        test(options);
        printf("ok: %s\n", name);
        fflush(stdout);
        passed++;
    };
#define RUN(test) run(#test, test)
    RUN(an_unknown_address_fails_alone);
    RUN(memory_comes_and_goes);
    RUN(memory_that_nobody_may_read_is_accepted_and_not_published);
    RUN(two_engines_of_one_process_reach_each_other_and_themselves);
    RUN(threads_share_an_engine);
    RUN(threads_share_a_batch);
    if (options.device == "host") {
        RUN(a_node_outside_mooncake_is_a_kvferry_peer);
        RUN(a_batch_to_several_peers_is_each_peer_s_own);
        RUN(a_peer_that_is_killed_in_flight_fails_its_tasks_once);
        RUN(without_the_library_the_engine_stays_as_it_was);
    }
#undef RUN
    return passed;
}

}  // namespace

int main(int count, char** arguments) try {
    const std::vector<std::string> words(arguments, arguments + count);
    // A stock engine makes a connection for each request otherwise, and runs out of ports.
    setenv("MC_TCP_ENABLE_CONNECTION_POOL", "1", 0);
    setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535", 0);
    setenv("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "65535", 0);
    setenv("MC_LOG_LEVEL", "ERROR", 0);
    Options options{.program = "/proc/self/exe", .library = {}, .shapes = {}};
    if (count >= 4) {
        options.library = words[2];
        options.shapes = words[3];
        if (count >= 5) options.device = words[4];
        if ((words[1] == "shapes" || words[1] == "faults") && count <= 5) {
            if (words[1] == "shapes") all_shapes(options);
            const int passed = words[1] == "shapes" ? 1 : all_faults(options);
            printf("%d passed, 0 failed\n", passed);
            return 0;
        }
        if (words[1] == "peer" && count == 7) {
            const auto kind = words[5] == "stock" ? Kind::Stock : Kind::Kvferry;
            return peer_main(kind, options, std::stoull(words[6]));
        }
    }
    std::cerr << "usage: transfer shapes|faults LIBRARY SHAPES [host|cuda:N]" << std::endl;
    return 2;
} catch (const std::exception& error) {
    fail(error.what());
}
