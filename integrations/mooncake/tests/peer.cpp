#include "peer.hpp"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>

#include "kvferry_mooncake.h"

namespace test {

using mooncake::TransferEngine;
using mooncake::TransferRequest;
using mooncake::TransferStatus;
using mooncake::TransferStatusEnum;

void fail(const std::string& what) {
    std::cerr << "transfer: " << what << std::endl;
    std::_Exit(1);
}

const char* name_of(Kind kind) { return kind == Kind::Stock ? "stock" : "kvferry"; }

std::unique_ptr<TransferEngine> start(Kind kind, const Options& options) {
    auto engine = std::make_unique<TransferEngine>(false);
    CHECK_THAT(engine->init("P2PHANDSHAKE", "127.0.0.1") == 0);
    CHECK_THAT(engine->installTransport("tcp", nullptr));
    if (kind == Kind::Stock) return engine;
    const auto devices = options.device == "host" ? "host" : "host," + options.device;
    const kvferry_mooncake_options ours{options.library.c_str(), devices.c_str(), nullptr};
    char why[1024] = "";
    if (kvferry_mooncake_install(engine.get(), &ours, why, sizeof why)) fail(why);
    return engine;
}

bool Outcome::all(TransferStatusEnum state) const {
    for (const auto found : states)
        if (found != state) return false;
    return !states.empty();
}

mooncake::BatchID submit(TransferEngine& engine, const std::vector<TransferRequest>& requests) {
    const auto batch = engine.allocateBatchID(requests.size());
    // The engine may not keep a pointer into the caller's list.
    auto* given = new std::vector<TransferRequest>(requests);
    CHECK_THAT(engine.submitTransfer(batch, *given).ok());
    for (auto& request : *given) request = {};
    delete given;
    return batch;
}

Outcome finish(TransferEngine& engine, mooncake::BatchID batch, size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    Outcome outcome{};
    for (size_t task = 0; task < count; task++) {
        TransferStatus status{};
        do {
            CHECK_THAT(engine.getTransferStatus(batch, task, status).ok());
            if (status.s == TransferStatusEnum::WAITING) sched_yield();
            CHECK_THAT(std::chrono::steady_clock::now() < deadline);
        } while (status.s == TransferStatusEnum::WAITING);
        outcome.states.push_back(status.s);
    }
    for (size_t task = 0; task < count; task++) {
        TransferStatus again{};
        CHECK_THAT(engine.getTransferStatus(batch, task, again).ok());
        CHECK_THAT(again.s == outcome.states[task]);
        const auto& ended = mooncake::Transport::toBatchDesc(batch).task_list[task];
        CHECK_THAT(ended.slice_count == 1);
        CHECK_THAT(ended.success_slice_count + ended.failed_slice_count == 1);
    }
    CHECK_THAT(engine.freeBatchID(batch).ok());
    return outcome;
}

Outcome transfer(TransferEngine& engine, const std::vector<TransferRequest>& requests) {
    const auto begin = std::chrono::steady_clock::now();
    const auto batch = submit(engine, requests);
    auto outcome = finish(engine, batch, requests.size());
    outcome.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return outcome;
}

Peer::Peer(Kind kind, const Options& options, size_t size) {
    int to[2], from[2];
    CHECK_THAT(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    process_ = fork();
    CHECK_THAT(process_ >= 0);
    if (process_ == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(to[0], 0);
        dup2(from[1], 1);
        const auto bytes = std::to_string(size);
        execl(options.program.c_str(), options.program.c_str(), "peer", options.library.c_str(),
              options.shapes.c_str(), options.device.c_str(), name_of(kind), bytes.c_str(),
              nullptr);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = fdopen(to[1], "w");
    from_ = fdopen(from[0], "r");
    std::istringstream(ask("")) >> name_ >> address_;
}

Peer::~Peer() {
    fclose(to_);
    fclose(from_);
    waitpid(process_, nullptr, 0);
}

void Peer::fill(uint64_t seed, size_t size) {
    ask("fill " + std::to_string(seed) + ' ' + std::to_string(size));
}

bool Peer::holds(uint64_t seed, const std::string& shape, uint64_t layout, uint64_t source) {
    std::ostringstream line;
    line << "holds " << seed << ' ' << shape << ' ' << layout << ' ' << source;
    return ask(line.str()) == "yes";
}

uint64_t Peer::register_more(size_t size) {
    return std::stoull(ask("register " + std::to_string(size)));
}

void Peer::unregister(uint64_t address) { ask("unregister " + std::to_string(address)); }

void Peer::signal(int number) { CHECK_THAT(kill(process_, number) == 0); }

std::string Peer::ask(const std::string& line) {
    if (!line.empty()) {
        fprintf(to_, "%s\n", line.c_str());
        fflush(to_);
    }
    char answer[256] = "";
    if (!fgets(answer, sizeof answer, from_)) fail("a peer ended: " + line);
    std::string text(answer);
    text.pop_back();
    return text;
}

int peer_main(Kind kind, const Options& options, size_t size) {
    const auto shapes = read_shapes(options.shapes);
    auto engine = start(kind, options);
    const Registered local(*engine, options.device, size);
    const auto& memory = local.memory;
    std::cout << engine->getLocalIpAndPort() << ' ' << local.address() << std::endl;
    std::map<uint64_t, std::unique_ptr<Registered>> more;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string command;
        words >> command;
        if (command == "fill") {
            uint64_t seed = 0;
            size_t extent = 0;
            words >> seed >> extent;
            memory->put(pattern(seed, extent));
            std::cout << "done" << std::endl;
        } else if (command == "holds") {
            uint64_t seed = 0, place = 0, source = 0;
            std::string id;
            words >> seed >> id >> place >> source;
            const auto shape = std::find_if(shapes.begin(), shapes.end(),
                                            [&](const Shape& shape) { return shape.id == id; });
            CHECK_THAT(shape != shapes.end());
            const auto extent = shape->extent();
            auto expected = pattern(seed, extent);
            apply(layout(*shape, place), pattern(source, extent), expected);
            std::cout << (memory->get(extent) == expected ? "yes" : "no") << std::endl;
        } else if (command == "register") {
            size_t bytes = 0;
            words >> bytes;
            auto buffer = std::make_unique<Registered>(*engine, options.device, bytes);
            std::cout << buffer->address() << std::endl;
            more.emplace(buffer->address(), std::move(buffer));
        } else if (command == "unregister") {
            uint64_t address = 0;
            words >> address;
            CHECK_THAT(more.erase(address) == 1);
            std::cout << "done" << std::endl;
        } else {
            fail("no such command: " + line);
        }
    }
    return 0;
}

}  // namespace test
