/* Loads libkvferry.so as a plugin host would and moves bytes between two processes in every form.
 * smoke LIBRARY [DEVICE]   runs the test; DEVICE is "host" (default), "cuda:0", "rocm:0"
 * smoke LIBRARY DEVICE peer   is the other process: prints its name and the addresses of its memory */
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvferry.h"

#define PAGES 64u
#define LAYERS 4u
#define ROW 4096u
#define SIZE ((uint64_t)PAGES * LAYERS * ROW)

static const kvferry_api *api;

static void fail(const char *what, long status) {
    char why[512] = "";
    api->last_error(why, sizeof why);
    fprintf(stderr, "smoke: %s: %ld: %s\n", what, status, why);
    exit(1);
}

#define OK(call)                                   \
    do {                                           \
        kvferry_status status_ = (call);           \
        if (status_ != KVFERRY_OK) fail(#call, status_); \
    } while (0)
#define IS(call, expected)                                 \
    do {                                                   \
        kvferry_status status_ = (call);                   \
        if (status_ != (expected)) fail(#call " is not " #expected, status_); \
    } while (0)
#define CHECK(condition) \
    do { if (!(condition)) fail(#condition, 0); } while (0)

static const kvferry_api *load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "smoke: %s\n", dlerror());
        exit(1);
    }
    const kvferry_api *(*entry)(uint32_t) = (const kvferry_api *(*)(uint32_t))dlsym(library, "kvferry_load");
    if (!entry || entry(KVFERRY_ABI_VERSION + 1) || !entry(KVFERRY_ABI_VERSION)) exit(2);
    const kvferry_api *table = entry(KVFERRY_ABI_VERSION);
    /* Opened twice, and closed while an engine runs, it is the same library: its threads go on. */
    void *again = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (dlsym(again, "kvferry_load") != (void *)entry) exit(3);
    dlclose(again);
    kvferry_config config = {.struct_size = sizeof config, .devices = "host"};
    kvferry_engine engine = 0;
    if (table->create(&config, &engine)) exit(4);
    dlclose(library);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    entry = (const kvferry_api *(*)(uint32_t))dlsym(library, "kvferry_load");
    if (entry(KVFERRY_ABI_VERSION) != table || table->destroy(engine)) exit(5);
    return table;
}

static kvferry_engine start(const char *device) {
    char devices[64];
    snprintf(devices, sizeof devices, strcmp(device, "host") ? "host,%s" : "%s", device);
    const char *settings[] = {"MC_KVFERRY_STRICT=0"};
    kvferry_config config = {sizeof config, devices, NULL, NULL, NULL, settings, 1};
    kvferry_engine engine = 0;
    OK(api->create(&config, &engine));
    return engine;
}

static uint64_t on_device(const char *device) { return strcmp(device, "host") ? 1 : 0; }

static kvferry_batch_status finish(kvferry_batch batch) {
    kvferry_batch_status status = {.struct_size = sizeof status};
    OK(api->wait(batch, 20 * 1000 * 1000, &status));
    if (status.state != KVFERRY_COMPLETED) fail("a batch did not complete", status.state);
    OK(api->poll(batch, &status));
    CHECK(status.state == KVFERRY_COMPLETED);
    OK(api->release(batch));
    IS(api->poll(batch, &status), KVFERRY_NOT_FOUND);
    return status;
}

/* Host memory is filled and compared here; a GPU's through transfers to and from host memory. */
static uint64_t host_memory(kvferry_engine engine) {
    uint64_t address = 0;
    OK(api->allocate(engine, 0, SIZE, &address));
    return address;
}

static void copy(kvferry_target own, uint32_t opcode, uint64_t local, uint64_t remote, uint64_t length) {
    kvferry_range range = {local, remote, length};
    kvferry_batch batch;
    OK(api->submit_ranges(own, opcode, &range, 1, NULL, &batch));
    finish(batch);
}

/* Memory of malloc's, at an odd address. */
static uint64_t heap_memory(kvferry_engine engine) {
    unsigned char *memory = malloc(SIZE + 3);
    CHECK(memory);
    memset(memory, 0, SIZE + 3);
    uint32_t served = 0;
    OK(api->register_memory(engine, (uintptr_t)memory + 3, SIZE, &served));
    CHECK(served == 1);
    return (uintptr_t)memory + 3;
}

static void free_heap_memory(kvferry_engine engine, uint64_t address) {
    OK(api->unregister_memory(engine, address));
    free((void *)(uintptr_t)(address - 3));
}

static unsigned char pattern(uint64_t at) { return (unsigned char)(at * 131 + (at >> 8) * 7 + 3); }

static int peer(const char *device) {
    kvferry_engine engine = start(device);
    uint64_t memory = 0;
    OK(api->allocate(engine, (uint32_t)on_device(device), SIZE, &memory));
    uint64_t heap = heap_memory(engine);
    char name[256];
    OK(api->name(engine, name, sizeof name, NULL));
    size_t size = 0;
    OK(api->export_segment(engine, NULL, 0, &size));
    char *segment = malloc(size);
    OK(api->export_segment(engine, segment, size, &size));
    printf("%s %llu %llu %zu\n", name, (unsigned long long)memory, (unsigned long long)heap, size);
    fwrite(segment, 1, size, stdout);
    fflush(stdout);
    free(segment);
    (void)!read(0, name, 1); /* until the other process closes the pipe */
    OK(api->free(engine, memory));
    free_heap_memory(engine, heap);
    OK(api->destroy(engine));
    return 0;
}

static void *poll_stale(void *argument) {
    kvferry_batch_status status = {.struct_size = sizeof status};
    for (int i = 0; i < 10000; i++) {
        kvferry_batch batch = {*(kvferry_engine *)argument, (uint64_t)i << 30 | 77};
        CHECK(api->poll(batch, &status) == KVFERRY_NOT_FOUND);
    }
    return NULL;
}

/* Whichever comes first: a cancelled batch ends once, and says so. Twenty tries over TCP and in place. */
static void cancel_at_once(kvferry_target target, uint64_t local, uint64_t remote) {
    for (int i = 0; i < 20; i++) {
        kvferry_range range = {local, remote, SIZE};
        kvferry_batch batch;
        OK(api->submit_ranges(target, i % 2 ? KVFERRY_READ : KVFERRY_WRITE, &range, 1, NULL, &batch));
        OK(api->cancel(batch));
        OK(api->cancel(batch));
        kvferry_batch_status status = {.struct_size = sizeof status};
        OK(api->wait(batch, 20 * 1000 * 1000, &status));
        CHECK(status.state == KVFERRY_COMPLETED ||
              (status.state == KVFERRY_FAILED && status.failure == KVFERRY_CANCELLED));
        OK(api->cancel(batch));
        OK(api->release(batch));
        IS(api->cancel(batch), KVFERRY_NOT_FOUND);
    }
}

static void read_counts(kvferry_engine engine, uint64_t *completed, uint64_t *ended, uint64_t *bytes) {
    kvferry_statistics all = {.struct_size = sizeof all};
    OK(api->statistics(engine, &all));
    CHECK(all.running == 0 && all.regions > 0 && all.registered_bytes >= SIZE);
    *completed = *ended = *bytes = 0;
    for (size_t i = 0; i < sizeof all.paths / sizeof *all.paths; i++) {
        *completed += all.paths[i].completed;
        *ended += all.paths[i].completed + all.paths[i].failed + all.paths[i].cancelled;
        *bytes += all.paths[i].bytes;
    }
}

static void misuse(kvferry_engine engine, kvferry_target target, uint64_t memory) {
    kvferry_batch batch;
    kvferry_range range = {memory, 0, 16};
    char text[4];
    IS(api->create(NULL, NULL), KVFERRY_INVALID_ARGUMENT);
    IS(api->open(engine, NULL, &target), KVFERRY_INVALID_ARGUMENT);
    IS(api->open(engine, "not an address", &target), KVFERRY_INVALID_ARGUMENT);
    IS(api->import_segment(engine, "garbage", 7, &target), KVFERRY_INVALID_ARGUMENT);
    IS(api->name(engine, text, sizeof text, NULL), KVFERRY_INVALID_ARGUMENT);
    IS(api->name(engine, NULL, sizeof text, NULL), KVFERRY_INVALID_ARGUMENT);
    IS(api->name(engine + 100, text, sizeof text, NULL), KVFERRY_NOT_FOUND);
    IS(api->submit_ranges(target, KVFERRY_WRITE, &range, 1, NULL, NULL), KVFERRY_INVALID_ARGUMENT);
    IS(api->submit_ranges(target, 7, &range, 1, NULL, &batch), KVFERRY_INVALID_ARGUMENT);
    IS(api->submit_ranges(target, KVFERRY_WRITE, NULL, 1, NULL, &batch), KVFERRY_INVALID_ARGUMENT);
    IS(api->submit_ranges(target, KVFERRY_WRITE, &range, SIZE_MAX, NULL, &batch), KVFERRY_INVALID_ARGUMENT);
    IS(api->submit_ranges(target, KVFERRY_WRITE, &range, 1, NULL, &batch), KVFERRY_INVALID_ARGUMENT);
    kvferry_target stale = {engine, 12345};
    IS(api->submit_ranges(stale, KVFERRY_WRITE, &range, 1, NULL, &batch), KVFERRY_NOT_FOUND);
    kvferry_submit_options options = {sizeof options, 9, 0, NULL, KVFERRY_OFFLOAD_AUTO, 0, NULL, 0};
    IS(api->submit_ranges(target, KVFERRY_WRITE, &range, 1, &options, &batch), KVFERRY_INVALID_ARGUMENT);
    for (int i = 0; i < 2; i++) {
        options.struct_size = i ? 20 : 3; /* Half a pointer. */
        IS(api->submit_ranges(target, KVFERRY_WRITE, &range, 1, &options, &batch), KVFERRY_INVALID_ARGUMENT);
    }
    kvferry_request requests[2] = {{KVFERRY_WRITE, 0, memory, target, 0, 0}, {7, 0, memory, target, 0, 0}};
    IS(api->submit_requests(engine, requests, 2, NULL, &batch), KVFERRY_INVALID_ARGUMENT);
    char why[256];
    CHECK(api->last_error(why, sizeof why) > 1 && strstr(why, "request 1: opcode 7"));
    const char *bad[] = {"MC_KVFERRY_STREAMS=many"};
    kvferry_config config = {sizeof config, "host", NULL, NULL, NULL, bad, 1};
    IS(api->create(&config, &engine), KVFERRY_BAD_SETTING);
    CHECK(api->last_error(why, sizeof why) > 1 && strstr(why, "MC_KVFERRY_STREAMS"));
    static int own_memory[64];
    uint32_t served = 0;
    uint64_t own = (uintptr_t)own_memory;
    IS(api->register_memory(engine, own, sizeof own_memory, &served), KVFERRY_OK);
    CHECK(served == 1);
    IS(api->register_memory(engine, own + 1, 1, &served), KVFERRY_INVALID_ARGUMENT);
    IS(api->register_memory(engine, own, 0, &served), KVFERRY_INVALID_ARGUMENT);
    IS(api->unregister_memory(engine, own), KVFERRY_OK);
    IS(api->unregister_memory(engine, own), KVFERRY_NOT_FOUND);
    uint64_t allocated = 0;
    OK(api->allocate(engine, 0, ROW, &allocated));
    OK(api->unregister_memory(engine, allocated));
    OK(api->free(engine, allocated));
    IS(api->free(engine, allocated), KVFERRY_NOT_FOUND);
    void *closed = mmap(NULL, ROW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(closed != MAP_FAILED);
    IS(api->register_memory(engine, (uintptr_t)closed, ROW, &served), KVFERRY_OK);
    CHECK(served == 0 && api->last_error(why, sizeof why) > 1 && strstr(why, "read and written"));
    range = (kvferry_range){(uintptr_t)closed, memory, 16};
    IS(api->submit_ranges(target, KVFERRY_WRITE, &range, 1, NULL, &batch), KVFERRY_INVALID_ARGUMENT);
    IS(api->unregister_memory(engine, (uintptr_t)closed), KVFERRY_OK);
    munmap(closed, ROW);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, poll_stale, &engine) == 0);
    poll_stale(&engine);
    pthread_join(thread, NULL);
}

/* Whatever GPUs and vendors' libraries there are, or are not. */
static void defaults_are_enough(void) {
    kvferry_engine engine = 0;
    char text[512];
    OK(api->create(NULL, &engine));
    OK(api->device(engine, 0, text, sizeof text, NULL));
    CHECK(strcmp(text, "host:0") == 0);
    OK(api->destroy(engine));
    kvferry_config config = {.struct_size = sizeof config, .devices = "host,cuda:77"};
    CHECK(api->create(&config, &engine) != KVFERRY_OK);
    CHECK(api->last_error(text, sizeof text) > 1);
    config.devices = "host";
    setenv("MC_KVFERRY_STREAMS", "many", 1);
    IS(api->create(&config, &engine), KVFERRY_BAD_SETTING);
    CHECK(api->last_error(text, sizeof text) > 1 && strstr(text, "MC_KVFERRY_STREAMS"));
    /* A setting wins over the environment. */
    const char *good[] = {"MC_KVFERRY_STREAMS=2"};
    config.settings = good, config.settings_count = 1;
    OK(api->create(&config, &engine));
    unsetenv("MC_KVFERRY_STREAMS");
    OK(api->destroy(engine));
}

/* The child says what it saw and is then killed: valgrind would call what other threads hold lost. */
static void forked_child_is_refused(kvferry_engine engine) {
    int answer[2];
    CHECK(pipe(answer) == 0);
    pid_t child = fork();
    if (child == 0) {
        kvferry_engine other;
        char refused = api->create(NULL, &other) == KVFERRY_FORKED && api->destroy(engine) == KVFERRY_FORKED;
        (void)!write(answer[1], &refused, 1);
        raise(SIGKILL);
    }
    close(answer[1]);
    char refused = 0;
    CHECK(read(answer[0], &refused, 1) == 1 && refused);
    close(answer[0]);
    waitpid(child, NULL, 0);
}

int main(int count, char **arguments) {
    if (count < 2) return 64;
    const char *device = count > 2 ? arguments[2] : "host";
    api = load(arguments[1]);
    if (count > 3) return peer(device);

    int to[2], from[2];
    if (pipe(to) || pipe(from)) return 65;
    pid_t child = fork();
    if (child == 0) {
        dup2(to[0], 0), dup2(from[1], 1);
        close(to[0]), close(to[1]), close(from[0]), close(from[1]);
        execl(arguments[0], arguments[0], arguments[1], device, "peer", (char *)NULL);
        _exit(66);
    }
    close(to[0]), close(from[1]);
    FILE *answer = fdopen(from[0], "r");
    char name[256];
    unsigned long long theirs, their_heap;
    size_t segment_size;
    if (fscanf(answer, "%255s %llu %llu %zu", name, &theirs, &their_heap, &segment_size) != 4) return 67;
    fgetc(answer);
    char *segment = malloc(segment_size);
    if (fread(segment, 1, segment_size, answer) != segment_size) return 68;

    kvferry_engine engine = start(device);
    char own_name[256];
    OK(api->name(engine, own_name, sizeof own_name, NULL));
    kvferry_target target, imported, own;
    OK(api->open(engine, name, &target));
    OK(api->import_segment(engine, segment, segment_size, &imported));
    free(segment);
    uint64_t host = host_memory(engine), memory = host;
    if (on_device(device)) OK(api->allocate(engine, 1, SIZE, &memory));
    OK(api->open(engine, own_name, &own));
    OK(api->refresh(own));
    unsigned char *bytes = (unsigned char *)(uintptr_t)host;

    int ready = -1;
    OK(api->event_descriptor(engine, &ready));

    for (int form = 0; form < 4; form++) {
        for (uint64_t at = 0; at < SIZE; at++) bytes[at] = pattern(at + (uint64_t)form);
        if (memory != host) copy(own, KVFERRY_WRITE, host, memory, SIZE);
        kvferry_batch batch;
        if (form == 0) {
            kvferry_range ranges[PAGES * LAYERS];
            for (uint32_t i = 0; i < PAGES * LAYERS; i++) {
                uint64_t other = (uint64_t)(i * 37u % (PAGES * LAYERS)) * ROW;
                ranges[i] = (kvferry_range){memory + (uint64_t)i * ROW, theirs + other, ROW};
            }
            OK(api->submit_ranges(target, KVFERRY_WRITE, ranges, PAGES * LAYERS, NULL, &batch));
            memset(ranges, 0xff, sizeof ranges); /* the list was copied */
            finish(batch);
            for (uint32_t i = 0; i < PAGES * LAYERS; i++) {
                uint64_t other = (uint64_t)(i * 37u % (PAGES * LAYERS)) * ROW;
                ranges[i] = (kvferry_range){memory + (uint64_t)i * ROW, theirs + other, ROW};
            }
            memset(bytes, 0, SIZE);
            if (memory != host) copy(own, KVFERRY_WRITE, host, memory, SIZE);
            OK(api->submit_ranges(imported, KVFERRY_READ, ranges, PAGES * LAYERS, NULL, &batch));
        } else if (form == 1) {
            kvferry_strided rows = {memory, theirs, ROW, PAGES * LAYERS, ROW, ROW};
            OK(api->submit_strided(target, KVFERRY_WRITE, &rows, 1, NULL, &batch));
            finish(batch);
            memset(bytes, 0, SIZE);
            if (memory != host) copy(own, KVFERRY_WRITE, host, memory, SIZE);
            OK(api->submit_strided(target, KVFERRY_READ, &rows, 1, NULL, &batch));
        } else if (form == 2) {
            uint32_t local[PAGES], remote[PAGES];
            for (uint32_t i = 0; i < PAGES; i++) local[i] = i, remote[i] = i * 37u % PAGES;
            kvferry_pages here = {memory, local, PAGES, ROW, PAGES * ROW, 0};
            kvferry_pages there = {theirs, remote, PAGES, ROW, PAGES * ROW, 0};
            kvferry_paged paged = {here, there, LAYERS, 1, ROW};
            kvferry_submit_options options = {sizeof options, KVFERRY_NO_PRODUCER, 1, NULL, KVFERRY_OFFLOAD_AUTO, 0, NULL, 0};
            OK(api->submit_paged(target, KVFERRY_WRITE, &paged, 1, &options, &batch));
            finish(batch);
            memset(bytes, 0, SIZE);
            if (memory != host) copy(own, KVFERRY_WRITE, host, memory, SIZE);
            OK(api->submit_paged(target, KVFERRY_READ, &paged, 1, NULL, &batch));
        } else {
            kvferry_request requests[PAGES];
            uint64_t piece = SIZE / PAGES;
            for (uint32_t i = 0; i < PAGES; i++)
                requests[i] = (kvferry_request){KVFERRY_WRITE, 0, memory + i * piece,
                                                i % 2 ? target : imported, theirs + i * piece, piece};
            OK(api->submit_requests(engine, requests, PAGES, NULL, &batch));
            finish(batch);
            memset(bytes, 0, SIZE);
            if (memory != host) copy(own, KVFERRY_WRITE, host, memory, SIZE);
            for (uint32_t i = 0; i < PAGES; i++) requests[i].opcode = KVFERRY_READ;
            OK(api->submit_requests(engine, requests, PAGES, NULL, &batch));
        }
        struct pollfd wait_for = {ready, POLLIN, 0};
        CHECK(poll(&wait_for, 1, 20000) == 1);
        kvferry_batch_status status = finish(batch);
        CHECK(status.bytes == SIZE && status.path != KVFERRY_PATH_NONE);
        if (memory != host) copy(own, KVFERRY_READ, host, memory, SIZE);
        for (uint64_t at = 0; at < SIZE; at++)
            if (bytes[at] != pattern(at + (uint64_t)form)) fail("wrong bytes", (long)at);
    }

    /* Memory of malloc's: over TCP there, in place here. */
    uint64_t heap = heap_memory(engine);
    unsigned char *heap_bytes = (unsigned char *)(uintptr_t)heap;
    for (int there = 0; there < 2; there++) {
        unsigned char *mine = there ? bytes : heap_bytes;
        kvferry_range range = {there ? memory : heap, there ? their_heap : theirs, SIZE};
        for (uint64_t at = 0; at < SIZE; at++) mine[at] = pattern(at + 11 + (uint64_t)there);
        if (there && memory != host) copy(own, KVFERRY_WRITE, host, memory, SIZE);
        kvferry_batch batch;
        OK(api->submit_ranges(target, KVFERRY_WRITE, &range, 1, NULL, &batch));
        kvferry_batch_status status = finish(batch);
        int by_tcp = status.path == KVFERRY_PATH_TCP || status.path == KVFERRY_PATH_TCP_STAGED;
        CHECK(by_tcp == there);
        memset(mine, 0, SIZE);
        if (there && memory != host) copy(own, KVFERRY_WRITE, host, memory, SIZE);
        OK(api->submit_ranges(target, KVFERRY_READ, &range, 1, NULL, &batch));
        finish(batch);
        if (there && memory != host) copy(own, KVFERRY_READ, host, memory, SIZE);
        for (uint64_t at = 0; at < SIZE; at++)
            if (mine[at] != pattern(at + 11 + (uint64_t)there)) fail("wrong bytes of malloc's", (long)at);
    }
    free_heap_memory(engine, heap);

    uint64_t completed, ended, bytes_moved, before[3];
    read_counts(engine, &before[0], &before[1], &before[2]);
    CHECK(before[0] == before[1] && before[2] >= 8 * SIZE);
    cancel_at_once(target, memory, theirs);
    cancel_at_once(target, memory, their_heap);
    copy(own, KVFERRY_WRITE, host, memory == host ? host + SIZE / 2 : memory, SIZE / 2);
    read_counts(engine, &completed, &ended, &bytes_moved);
    CHECK(ended == before[1] + 41 && completed > before[0]);
    CHECK(bytes_moved == before[2] + (completed - before[0] - 1) * SIZE + SIZE / 2);

    CHECK(api->struct_size >= offsetof(kvferry_api, record_step) + sizeof api->record_step);
    OK(api->record_step(engine, 0, 3 * 1000 * 1000));
    IS(api->record_step(engine, 100, 1), KVFERRY_NOT_FOUND);

    misuse(engine, target, memory);
    defaults_are_enough();
    forked_child_is_refused(engine);
    /* A structure of an older header. */
    kvferry_statistics old = {.struct_size = 32, .fallbacks = 77};
    OK(api->statistics(engine, &old));
    CHECK(old.struct_size == 32 && old.fallbacks == 77);
    OK(api->close(target));
    IS(api->close(target), KVFERRY_NOT_FOUND);
    OK(api->close(imported));
    if (memory != host) OK(api->free(engine, memory));
    OK(api->free(engine, host));
    IS(api->free(engine, host), KVFERRY_NOT_FOUND);
    OK(api->destroy(engine));
    IS(api->destroy(engine), KVFERRY_NOT_FOUND);
    close(to[1]);
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) return 69;
    puts("smoke: ok");
    return 0;
}
