/* kvferry: moves LLM KV cache between GPUs, and between GPUs and host memory.
 *
 * The library exports one function, kvferry_load, which returns a table of all others:
 *
 *     void *library = dlopen("libkvferry.so.0", RTLD_NOW | RTLD_LOCAL);
 *     const kvferry_api *(*load)(uint32_t) = dlsym(library, "kvferry_load");
 *     const kvferry_api *api = load ? load(KVFERRY_ABI_VERSION) : NULL;
 *
 * Rules for all functions of the table:
 * - They may be called from any thread, also at once, and after another thread destroyed the engine:
 *   a handle that is gone is KVFERRY_NOT_FOUND, never a crash. A NULL where a pointer is needed, a
 *   misaligned array and a size that cannot be are KVFERRY_INVALID_ARGUMENT. Pointers that are not
 *   NULL must point to what they say.
 * - They return KVFERRY_OK or why not; last_error then has a sentence for a person. Nothing was
 *   done if it is not KVFERRY_OK, unless a function says otherwise.
 * - Nothing calls back, prints to standard output, installs a signal handler, or ends the process.
 *   Warnings go to standard error (MC_KVFERRY_LOG=off stops them).
 * - Structures begin with struct_size, which is sizeof of the structure that the caller was
 *   compiled with. Fields that a later version adds are zero for an older caller, and zero means the
 *   default. Reserved fields are zero.
 * - What a caller passes may be freed once the function has returned, except memory that is
 *   registered.
 * - In a child of a process that used the library, and that did not exec, every function that
 *   returns a kvferry_status returns KVFERRY_FORKED and touches nothing. kvferry_load, version and
 *   last_error answer as in the parent. The child keeps copies of the sockets: where the parent dies
 *   first, peers notice, and its ports are free, when the child has ended, too.
 *
 * Addresses are those of the process that owns the memory; sizes are bytes. */
#ifndef KVFERRY_H
#define KVFERRY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVFERRY_ABI_VERSION 1u

/* What functions return. */
typedef int32_t kvferry_status;
enum {
    KVFERRY_OK = 0,
    /* The arguments are wrong: fix the call. */
    KVFERRY_INVALID_ARGUMENT = 1,
    /* The handle, address, device or name is unknown, or is gone. */
    KVFERRY_NOT_FOUND = 2,
    /* It is still in use, or not ready yet: wait and try again. */
    KVFERRY_BUSY = 3,
    /* A knob (MC_...) has a value that it does not accept. */
    KVFERRY_BAD_SETTING = 4,
    /* No device or transport connects both ends. */
    KVFERRY_UNREACHABLE = 5,
    /* The peer is gone, does not answer, or gave an answer that cannot be used. */
    KVFERRY_PEER_LOST = 6,
    /* A device call failed. */
    KVFERRY_DEVICE_ERROR = 7,
    /* There is no more memory of that kind, or its budget is spent. */
    KVFERRY_OUT_OF_MEMORY = 8,
    /* A slower path would be taken, and MC_KVFERRY_STRICT=1 refuses that. */
    KVFERRY_REFUSED = 9,
    /* The system refused something: a port, a thread, a descriptor. */
    KVFERRY_SYSTEM = 10,
    /* The library was used before this process was forked. */
    KVFERRY_FORKED = 11,
    /* A fault of kvferry's own; please report the text of last_error. */
    KVFERRY_INTERNAL = 12,
    /* cancel, or destroy, ended the batch before all of it was moved. */
    KVFERRY_CANCELLED = 13
};

/* Handles are numbers and are never used twice in a process; zero is none. */
typedef uint64_t kvferry_engine;

/* A peer whose memory transfers read and write. */
typedef struct kvferry_target {
    kvferry_engine engine;
    uint64_t id;
} kvferry_target;

/* One submission. */
typedef struct kvferry_batch {
    kvferry_engine engine;
    uint64_t id;
} kvferry_batch;

typedef struct kvferry_config {
    uint64_t struct_size;
    /* Such as "host,cuda:0,cuda:1"; NULL: host memory and every GPU that this process sees. */
    const char *devices;
    /* Where peers ask for this engine's memory, host:port; port 0 is any free one. NULL:
     * "127.0.0.1:0", which only this host reaches. 0.0.0.0 (or [::]) is every address of this host, for
     * all three ports of create: whoever reaches any of its networks reaches them. It needs a name. */
    const char *listen;
    /* The host:port that peers open, if it is not the one listened on; port 0 in it is the port
     * listened on. NULL: the one listened on. */
    const char *name;
    /* Where peers that cannot map this process's memory reach it over TCP. NULL: the address of
     * listen, with a port of its own. */
    const char *batch_listen;
    /* "MC_...=value" each; they win over the environment. */
    const char *const *settings;
    uint64_t settings_count;
} kvferry_config;

/* KVFERRY_WRITE moves local to remote, KVFERRY_READ remote to local. */
enum { KVFERRY_READ = 0, KVFERRY_WRITE = 1 };

/* One piece of memory; length 0 copies nothing. */
typedef struct kvferry_range {
    uint64_t local;
    uint64_t remote;
    uint64_t length;
} kvferry_range;

/* count pieces of length bytes, each so many bytes behind the one before. */
typedef struct kvferry_strided {
    uint64_t local;
    uint64_t remote;
    uint64_t length;
    uint64_t count;
    uint64_t local_stride;
    uint64_t remote_stride;
} kvferry_strided;

/* One end of a paged copy: row r of layer l of page n begins at
 * address + n * page_stride + l * layer_stride + r * row_stride. */
typedef struct kvferry_pages {
    uint64_t address;
    const uint32_t *numbers;
    uint64_t count;
    uint64_t page_stride;
    uint64_t layer_stride;
    uint64_t row_stride;
} kvferry_pages;

/* The same pages of every layer; of each page, rows pieces of row_bytes. Page i of the one list is
 * copied to page i of the other. */
typedef struct kvferry_paged {
    kvferry_pages local;
    kvferry_pages remote;
    uint32_t layers;
    uint32_t rows;
    uint64_t row_bytes;
} kvferry_paged;

/* As an engine of Mooncake's kind asks: offset is an address of the target's process. */
typedef struct kvferry_request {
    uint32_t opcode;
    uint32_t reserved;
    uint64_t source;
    kvferry_target target;
    uint64_t offset;
    uint64_t length;
} kvferry_request;

enum { KVFERRY_NO_PRODUCER = 0, KVFERRY_STREAM = 1, KVFERRY_EVENT = 2 };

/* How a batch is run. NULL in the place of a pointer to it means the defaults. */
typedef struct kvferry_submit_options {
    uint64_t struct_size;
    /* Work of the caller's that has to be done before the first byte is read or written: what a
     * stream holds now, or what an event was last recorded behind. The stream's special values
     * (0, 1, 2) mean the stream that they mean on the calling thread. */
    uint32_t producer_kind;
    /* 1: no multiprocessor is used, only copy engines. */
    uint32_t without_kernel;
    void *producer;
    /* How bytes move between a GPU and host memory that it reaches; nothing to other batches. */
    uint32_t offload_mode;
    uint32_t reserved;
    /* Batches of the same engine and device that end before the first byte of this one is read or
     * written; the host does not wait. Those that have ended do not count; one over TCP that has not
     * is KVFERRY_BUSY. */
    const kvferry_batch *behind;
    uint64_t behind_count;
} kvferry_submit_options;

/* AUTO: what MC_KVFERRY_OFFLOAD_STORE, MC_KVFERRY_OFFLOAD_LOAD and MC_KVFERRY_POLICY say. */
enum {
    KVFERRY_OFFLOAD_AUTO = 0,
    KVFERRY_OFFLOAD_DIRECT = 1,
    KVFERRY_OFFLOAD_KERNEL = 2,
    KVFERRY_OFFLOAD_STAGED = 3
};

enum { KVFERRY_RUNNING = 0, KVFERRY_COMPLETED = 1, KVFERRY_FAILED = 2 };

/* What moved the bytes of a batch. */
enum {
    KVFERRY_PATH_NONE = 0,
    KVFERRY_PATH_KERNEL = 1,
    KVFERRY_PATH_DMA = 2,
    KVFERRY_PATH_MIXED = 3,
    KVFERRY_PATH_MEMCPY = 4,
    KVFERRY_PATH_TCP = 5,
    KVFERRY_PATH_TCP_STAGED = 6,
    KVFERRY_PATH_STAGED = 7
};

typedef struct kvferry_batch_status {
    uint64_t struct_size;
    /* KVFERRY_RUNNING, KVFERRY_COMPLETED or KVFERRY_FAILED. */
    uint32_t state;
    uint32_t path;
    /* Bytes that have landed: all of them, or none yet. */
    uint64_t bytes;
    /* Of a failed batch: the kind of failure; last_error has the reason. */
    kvferry_status failure;
    uint32_t reserved;
} kvferry_batch_status;

/* Batches that have ended, of one path. */
typedef struct kvferry_path_statistics {
    uint64_t completed;
    /* Without those that were cancelled. */
    uint64_t failed;
    uint64_t cancelled;
    /* Of those that completed. */
    uint64_t bytes;
} kvferry_path_statistics;

/* An engine's numbers now. Those that count begin at zero and only grow; a batch that poll or wait, on any
 * thread, has said to have ended is in them. */
typedef struct kvferry_statistics {
    uint64_t struct_size;
    /* Page-locked host memory that the engine holds for itself. */
    uint64_t pinned_bytes;
    /* Of it, what stages GPU memory for TCP. */
    uint64_t staging_bytes;
    /* Connections that were closed for what they said, or did not say in time. */
    uint64_t rejected_connections;
    /* Batches that have ended and went a slower way than they could have. */
    uint64_t fallbacks;
    /* Submissions that were refused: nothing moved. */
    uint64_t refused;
    /* Batches that have not ended. */
    uint64_t running;
    /* Registered regions, and their bytes. */
    uint64_t regions;
    uint64_t registered_bytes;
    /* Allocations of other processes that are mapped, and how many processes these are. */
    uint64_t mappings;
    uint64_t mapped_peers;
    /* Device memory that staged offload passes through. */
    uint64_t bounce_bytes;
    /* Host memory that is page-locked for GPUs, of the budget MC_KVFERRY_PINNED_MB: registered memory,
     * and slots that stage GPU memory for TCP. */
    uint64_t locked_bytes;
    /* By KVFERRY_PATH_*. */
    kvferry_path_statistics paths[8];
} kvferry_statistics;

typedef struct kvferry_api {
    /* sizeof of the table of the library that was loaded: a function at or behind it is not
     * there. */
    uint64_t struct_size;
    uint32_t abi_version;
    uint32_t reserved;

    /* Texts are copied to text, at most size bytes with the zero at the end; the return value is
     * what the whole text needs. text may be NULL if size is 0. */

    /* The library's version, as in "0.1.0". */
    size_t (*version)(char *text, size_t size);
    /* Why the last function that failed on this thread did, or why the batch that this thread last
     * asked about had failed. */
    size_t (*last_error)(char *text, size_t size);

    /* Opens devices and listens for peers. config may be NULL. Three ports are opened:
     * - that of listen, which tells anyone who asks what memory is registered;
     * - that of batch_listen, by which kvferry peers read and write registered memory. With
     *   MC_KVFERRY_AUTH_KEY_FILE only those with the same key may, else anyone may;
     * - a port beside that of listen, for Mooncake's TCP transport, which knows no keys: whoever
     *   reaches it reads and writes registered memory. MC_KVFERRY_MOONCAKE=off closes it, and so does
     *   MC_KVFERRY_AUTH_KEY_FILE unless MC_KVFERRY_MOONCAKE=on.
     * Processes of the same user and host also reach it by an abstract Unix socket. */
    kvferry_status (*create)(const kvferry_config *config, kvferry_engine *engine);
    /* Waits for batches in flight and for peers that use registered memory now, then ends the engine;
     * peers see it as lost. Memory that was registered may be freed then. KVFERRY_BUSY: the engine is
     * gone, but something still uses memory that last_error names: keep it. */
    kvferry_status (*destroy)(kvferry_engine engine);
    /* The host:port that peers open. needed (or NULL) gets what the whole text needs. */
    kvferry_status (*name)(kvferry_engine engine, char *text, size_t size, size_t *needed);
    /* Devices, from 0 on, by name: "host:0", "cuda:1". KVFERRY_NOT_FOUND behind the last. */
    kvferry_status (*device)(kvferry_engine engine, uint32_t index, char *text, size_t size,
                             size_t *needed);

    /* Makes memory a region that transfers use and peers may read and write: that of a device, and
     * host memory of any origin if the engine has the device host. Memory that kvferry cannot serve,
     * such as that of another GPU, or what may not be read and written, is accepted and ignored:
     * *served (or NULL) is then 0, and last_error says why. Host memory that did not come from
     * allocate cannot be mapped by other processes: those of this host reach it over TCP, too, which
     * is its only path and so no fallback (MC_KVFERRY_STRICT). */
    kvferry_status (*register_memory)(kvferry_engine engine, uint64_t address, uint64_t length,
                                      uint32_t *served);
    /* Ends the region that begins at address; waits for batches that use it. KVFERRY_BUSY: they did not
     * end within MC_KVFERRY_UNREGISTER_TIMEOUT_SEC, and it is as it was; or another thread is ending it. */
    kvferry_status (*unregister_memory)(kvferry_engine engine, uint64_t address);
    /* Memory of a device (by its index), registered. Host memory from here can be mapped by other
     * processes of this host, which copy to and from it without TCP. */
    kvferry_status (*allocate)(kvferry_engine engine, uint32_t device, uint64_t length,
                               uint64_t *address);
    /* Frees what allocate gave, also if it was unregistered before; waits for batches that use it.
     * KVFERRY_BUSY as of unregister_memory: it is not freed, and may be later. */
    kvferry_status (*free)(kvferry_engine engine, uint64_t address);

    /* Opens a peer by its name; the engine itself is one, too. Takes up to 10 seconds, and what the
     * resolver takes. Only kvferry peers: stock Mooncake processes are KVFERRY_UNREACHABLE from here
     * (they reach this engine; the other way there is only Rust's Node::open_mooncake). */
    kvferry_status (*open)(kvferry_engine engine, const char *name, kvferry_target *target);
    /* As open, from the text that the peer's export_segment gave, for engines that carry
     * descriptors themselves. */
    kvferry_status (*import_segment)(kvferry_engine engine, const void *segment, size_t size,
                                     kvferry_target *target);
    /* This engine's registered memory now, as text (JSON) without a zero at the end. */
    kvferry_status (*export_segment)(kvferry_engine engine, void *segment, size_t size,
                                     size_t *needed);
    /* Asks the peer again, so that transfers see what it registered since. */
    kvferry_status (*refresh)(kvferry_target target);
    /* Batches in flight go on. */
    kvferry_status (*close)(kvferry_target target);

    /* Begin to copy and return without waiting for the copies. The copies of a batch have no order
     * among each other. If the list is wrong nothing is copied, and last_error names the position.
     *
     * They may wait while the device's ring of descriptors has no room: it has 32 slots of 8192
     * pieces, and a batch of more than a few pieces takes at least one until its launches have ended.
     * Batches that wait, for a producer or behind others, hold 16 slots at most, about 130,000 pieces.
     * A call that finds no room waits for the oldest launch, or for what that waits for, and other
     * calls for the same device wait with it. (Between a GPU and host memory: 8 slots of 32,768 pieces
     * in each direction.) */
    kvferry_status (*submit_ranges)(kvferry_target target, uint32_t opcode,
                                    const kvferry_range *ranges, size_t count,
                                    const kvferry_submit_options *options, kvferry_batch *batch);
    kvferry_status (*submit_strided)(kvferry_target target, uint32_t opcode,
                                     const kvferry_strided *forms, size_t count,
                                     const kvferry_submit_options *options, kvferry_batch *batch);
    kvferry_status (*submit_paged)(kvferry_target target, uint32_t opcode,
                                   const kvferry_paged *forms, size_t count,
                                   const kvferry_submit_options *options, kvferry_batch *batch);
    /* Requests to any targets of one engine, in one batch. Where they are to several targets, or of
     * both opcodes, a position that last_error names may count those of one target and opcode alone:
     * it says so, and gives the address. */
    kvferry_status (*submit_requests)(kvferry_engine engine, const kvferry_request *requests,
                                      size_t count, const kvferry_submit_options *options,
                                      kvferry_batch *batch);

    /* The batch's status now. After the end it stays the same until release. */
    kvferry_status (*poll)(kvferry_batch batch, kvferry_batch_status *status);
    /* As poll, once the batch has ended or the time (microseconds) is over. */
    kvferry_status (*wait)(kvferry_batch batch, uint64_t timeout, kvferry_batch_status *status);
    /* Makes later work of a stream of the caller's wait for the batch, without the host. How the batch
     * ends the stream does not see. KVFERRY_BUSY: the batch goes over TCP and has not ended, or in
     * steps (MC_KVFERRY_MAX_RATE, MC_KVFERRY_POLICY=tail) of which not all are submitted. Then wait for
     * it on the host (poll, wait or the descriptor), and launch what needs it after that. */
    kvferry_status (*signal)(kvferry_batch batch, void *stream);
    /* Forgets a batch that has ended. */
    kvferry_status (*release)(kvferry_batch batch);
    /* A descriptor (an eventfd of the engine's: do not close it) that becomes readable when
     * batches end; reading it gives how many. It ends with the engine. */
    kvferry_status (*event_descriptor)(kvferry_engine engine, int *descriptor);

    kvferry_status (*statistics)(kvferry_engine engine, kvferry_statistics *statistics);

    /* Asks that what of a batch has not been moved yet is not, and returns at once. The batch ends
     * by itself, once: as failed with KVFERRY_CANCELLED if some of it was left out, or as completed
     * if it was too late, as it always is for what a GPU's queue has taken. Its memory is quiet when
     * it has ended, not before. What is to go over TCP and waits for a producer ends at once; a peer that
     * does not answer is given up after MC_TCP_STATUS_TIMEOUT_SEC. Of a batch that has ended it changes
     * nothing. */
    kvferry_status (*cancel)(kvferry_batch batch);

    /* Tells how long the model's last step on a device (by its index) took. Call it as each step ends
     * where MC_KVFERRY_POLICY=tail is set, which compares steps beside transfers between a GPU and host
     * memory with steps beside none: transfers slow down while the slowest steps are longer than
     * MC_KVFERRY_TAIL_BUDGET_PERCENT allows. Other policies ignore it. */
    kvferry_status (*record_step)(kvferry_engine engine, uint32_t device, uint64_t nanoseconds);
} kvferry_api;

/* The one symbol of the library. NULL if the library does not know that version. */
const kvferry_api *kvferry_load(uint32_t abi_version);

#ifdef __cplusplus
}
#endif

#endif
