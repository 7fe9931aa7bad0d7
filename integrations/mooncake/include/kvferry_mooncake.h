/* Puts kvferry into a transfer engine of Mooncake's (the classic one), in the place of its "tcp". */
#ifndef KVFERRY_MOONCAKE_H
#define KVFERRY_MOONCAKE_H

#include <stddef.h>

#include "kvferry.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NULL in the place of a pointer to it, or of a field, means the default. */
typedef struct kvferry_mooncake_options {
    /* libkvferry.so. Default: the environment's KVFERRY_LIBRARY, else "libkvferry.so.0" where the
     * system's loader finds it. */
    const char *library;
    /* As kvferry_config has it. Default: host memory and every GPU that this process sees. */
    const char *devices;
    /* Where kvferry listens, host:port. Default: any free port of the host that the engine's own
     * name says. The host that peers are told is that one in any case. */
    const char *listen;
} kvferry_mooncake_options;

/* Installs kvferry into an engine: a mooncake::TransferEngine *, which is what Mooncake's C API
 * calls a transfer_engine_t. The engine must be initialised, have the transport "tcp", and have no
 * memory registered yet; no other thread may use it during the call. Memory that is registered from
 * then on moves by kvferry's best path between engines that have kvferry, and by Mooncake's TCP
 * protocol to and from those that do not.
 *
 * Returns 0, or -1: then the engine is as it was, and error (or NULL) holds a sentence that says
 * why, cut off after size bytes. */
int kvferry_mooncake_install(void *engine, const kvferry_mooncake_options *options, char *error,
                             size_t size);

/* What kvferry has done for an engine: statistics->struct_size must be set, as for kvferry_api's. Of
 * transfers to stock engines it knows nothing. KVFERRY_NOT_FOUND for an engine without kvferry. */
kvferry_status kvferry_mooncake_statistics(void *engine, kvferry_statistics *statistics);

#ifdef __cplusplus
}
#endif

#endif
