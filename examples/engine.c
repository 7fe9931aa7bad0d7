/* A small engine: moves one KV cache page by page from a prefill to a decode process.
 *
 *   cc -Iinclude examples/engine.c -o engine -ldl
 *   ./engine target/release/libkvferry.so [host|cuda:0|rocm:0]
 *
 * Both roles run in this program; between two processes only the name and the addresses would
 * travel, by whatever the engine talks with. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvferry.h"

enum { PAGES = 256, LAYERS = 32, ROW = 4096 };

static const kvferry_api *kv;

static void check(kvferry_status status, const char *doing) {
    if (status == KVFERRY_OK) return;
    char why[512];
    kv->last_error(why, sizeof why);
    fprintf(stderr, "%s: %s\n", doing, why);
    exit(1);
}

int main(int count, char **arguments) {
    const char *path = count > 1 ? arguments[1] : "libkvferry.so.0";
    const char *device = count > 2 ? arguments[2] : "host";
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    const kvferry_api *(*load)(uint32_t) = (const kvferry_api *(*)(uint32_t))dlsym(library, "kvferry_load");
    kv = load ? load(KVFERRY_ABI_VERSION) : NULL;
    if (!kv) return fprintf(stderr, "%s has no ABI version %u\n", path, KVFERRY_ABI_VERSION), 1;

    kvferry_config config = {.struct_size = sizeof config, .devices = device};
    kvferry_engine prefill, decode;
    check(kv->create(&config, &prefill), "starting prefill");
    check(kv->create(&config, &decode), "starting decode");

    /* Each role has a cache of all layers: page n of layer l begins at
     * cache + (l * PAGES + n) * ROW. An engine with a cache of its own registers it instead. */
    uint64_t bytes = (uint64_t)PAGES * LAYERS * ROW, from, to;
    check(kv->allocate(prefill, 0, bytes, &from), "allocating the cache of prefill");
    check(kv->allocate(decode, 0, bytes, &to), "allocating the cache of decode");

    char name[256];
    kvferry_target peer;
    check(kv->name(decode, name, sizeof name, NULL), "asking for the name of decode");
    check(kv->open(prefill, name, &peer), "opening decode");

    /* The request's pages, wherever they lie on either side: one call for all layers. */
    uint32_t here[100], there[100];
    for (uint32_t i = 0; i < 100; i++) here[i] = i * 2, there[i] = PAGES - 1 - i;
    kvferry_paged pages = {
        .local = {from, here, 100, ROW, PAGES * ROW, 0},
        .remote = {to, there, 100, ROW, PAGES * ROW, 0},
        .layers = LAYERS, .rows = 1, .row_bytes = ROW,
    };
    kvferry_batch batch;
    check(kv->submit_paged(peer, KVFERRY_WRITE, &pages, 1, NULL, &batch), "submitting");

    kvferry_batch_status status = {.struct_size = sizeof status};
    check(kv->wait(batch, 10 * 1000 * 1000, &status), "waiting");
    if (status.state != KVFERRY_COMPLETED) check(status.failure, "moving the pages");
    printf("%llu bytes of %d pages arrived\n", (unsigned long long)status.bytes, 100);

    check(kv->release(batch), "releasing the batch");
    check(kv->close(peer), "closing decode");
    check(kv->destroy(prefill), "ending prefill");
    check(kv->destroy(decode), "ending decode");
    return 0;
}
