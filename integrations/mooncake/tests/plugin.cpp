// The part of the shim that knows nothing of Mooncake: loading the library, and peers by name.
//   plugin LIBRARY
#include "../src/plugin.hpp"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

using kvferry::Engine;
using kvferry::EngineOptions;

namespace {

#define CHECK_THAT(condition)                                                \
    do {                                                                     \
        if (!(condition)) {                                                  \
            fprintf(stderr, "plugin: line %d: %s\n", __LINE__, #condition);  \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

constexpr uint64_t kSize = 1 << 16;

template <typename Call>
std::string refusal(Call call) {
    try {
        call();
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return {};
}

uint64_t allocate(const Engine& engine) {
    uint64_t address = 0;
    CHECK_THAT(engine.api().allocate(engine.handle(), 0, kSize, &address) == KVFERRY_OK);
    return address;
}

/// What becomes of a copy of all of `from` to all of `to`.
kvferry_status copy(const Engine& engine, kvferry_target target, uint64_t from, uint64_t to) {
    const kvferry_range range{from, to, kSize};
    kvferry_batch batch{};
    const auto& api = engine.api();
    const auto status =
        api.submit_ranges(target, KVFERRY_WRITE, &range, 1, nullptr, &batch);
    if (status != KVFERRY_OK) return status;
    kvferry_batch_status found{};
    found.struct_size = sizeof found;
    CHECK_THAT(api.wait(batch, 10'000'000, &found) == KVFERRY_OK);
    CHECK_THAT(api.release(batch) == KVFERRY_OK);
    return found.state == KVFERRY_COMPLETED ? KVFERRY_OK : found.failure;
}

void a_library_that_is_none_is_refused_with_its_name(const char* library) {
    CHECK_THAT(refusal([] { kvferry::load("/nowhere/libkvferry.so"); }).find("/nowhere") !=
               std::string::npos);
    CHECK_THAT(refusal([] { kvferry::load("libm.so.6"); }).find("libm.so.6") != std::string::npos);
    CHECK_THAT(&kvferry::load(library) == &kvferry::load(library));
}

void an_engine_that_cannot_start_says_why(const kvferry_api& api) {
    const EngineOptions options{.devices = "abacus:0", .listen = {}, .name = {}};
    CHECK_THAT(refusal([&] { Engine(api, options); }).find("abacus") != std::string::npos);
}

void a_peer_is_opened_once_and_found_with_all_of_its_memory(const kvferry_api& api) {
    // Engines of one process know each other's memory without asking; by TCP they do not.
    setenv("MC_FORCE_TCP", "1", 1);
    const EngineOptions host{.devices = "host", .listen = {}, .name = "127.0.0.1:0"};
    Engine here(api, host), there(api, host);
    unsetenv("MC_FORCE_TCP");
    CHECK_THAT(here.segment().find(here.name()) != std::string::npos);
    const auto from = allocate(here);
    const auto first = std::make_shared<int>(1), second = std::make_shared<int>(2);
    kvferry_target target{}, again{};
    CHECK_THAT(here.target(there.name(), first, &target) == KVFERRY_OK);
    const auto to = allocate(there);
    CHECK_THAT(here.target(there.name(), first, &again) == KVFERRY_OK);
    CHECK_THAT(again.id == target.id);
    // Memory that came later is asked for by whoever names it.
    CHECK_THAT(copy(here, again, from, to) == KVFERRY_OK);
    CHECK_THAT(here.target(there.name(), second, &again) == KVFERRY_OK);
    CHECK_THAT(again.id == target.id);
    CHECK_THAT(copy(here, again, from, to + 1) == KVFERRY_INVALID_ARGUMENT);
    CHECK_THAT(copy(here, again, from, to) == KVFERRY_OK);
}

void a_peer_that_was_forgotten_or_restarted_is_opened_anew(const kvferry_api& api) {
    const EngineOptions host{.devices = "host", .listen = {}, .name = {}};
    Engine here(api, host);
    auto there = std::make_unique<Engine>(api, host);
    const auto name = there->name();
    const auto first = std::make_shared<int>(1), second = std::make_shared<int>(2);
    kvferry_target target{}, again{};
    CHECK_THAT(here.target(name, first, &target) == KVFERRY_OK);
    here.forget(name, target);
    CHECK_THAT(here.target(name, first, &again) == KVFERRY_OK);
    CHECK_THAT(again.id != target.id);
    here.forget(name, target);
    CHECK_THAT(here.target(name, first, &target) == KVFERRY_OK);
    CHECK_THAT(again.id == target.id);

    const auto from = allocate(here), to = allocate(*there);
    there.reset();
    CHECK_THAT(here.target(name, second, &again) == KVFERRY_OK);
    CHECK_THAT(again.id == target.id);
    CHECK_THAT(copy(here, again, from, to) == KVFERRY_PEER_LOST);
    here.forget(name, again);
    CHECK_THAT(here.target(name, second, &again) == KVFERRY_PEER_LOST);
    CHECK_THAT(!kvferry::last_error(api).empty());
    const EngineOptions same{.devices = "host", .listen = name, .name = {}};
    there = std::make_unique<Engine>(api, same);
    CHECK_THAT(here.target(name, second, &again) == KVFERRY_OK);
    CHECK_THAT(again.id != target.id);
    CHECK_THAT(copy(here, again, from, allocate(*there)) == KVFERRY_OK);
}

/// As one is whose machine is too busy to answer in time.
void a_peer_that_does_not_answer_is_used_as_it_is_known_and_asked_again(const kvferry_api& api) {
    static kvferry_api deaf;
    static int asked;
    deaf = api, asked = 0;
    const EngineOptions host{.devices = "host", .listen = {}, .name = {}};
    Engine here(deaf, host), there(api, host);
    const auto from = allocate(here), to = allocate(there);
    const auto first = std::make_shared<int>(1), second = std::make_shared<int>(2);
    kvferry_target target{}, again{};
    CHECK_THAT(here.target(there.name(), first, &target) == KVFERRY_OK);
    deaf.refresh = [](kvferry_target) -> kvferry_status {
        asked++;
        return KVFERRY_PEER_LOST;
    };
    deaf.open = [](kvferry_engine, const char*, kvferry_target*) -> kvferry_status {
        return KVFERRY_PEER_LOST;
    };
    for (int transfer = 1; transfer <= 2; transfer++) {
        CHECK_THAT(here.target(there.name(), second, &again) == KVFERRY_OK);
        CHECK_THAT(again.id == target.id && asked == transfer);
        CHECK_THAT(copy(here, again, from, to) == KVFERRY_OK);
    }
    deaf.refresh = api.refresh;
    CHECK_THAT(here.target(there.name(), second, &again) == KVFERRY_OK);
    CHECK_THAT(again.id == target.id);
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) {
        fprintf(stderr, "usage: plugin LIBRARY\n");
        return 2;
    }
    a_library_that_is_none_is_refused_with_its_name(arguments[1]);
    const auto& api = kvferry::load(arguments[1]);
    an_engine_that_cannot_start_says_why(api);
    a_peer_is_opened_once_and_found_with_all_of_its_memory(api);
    a_peer_that_was_forgotten_or_restarted_is_opened_anew(api);
    a_peer_that_does_not_answer_is_used_as_it_is_known_and_asked_again(api);
    printf("plugin: 5 passed, 0 failed\n");
    return 0;
}
