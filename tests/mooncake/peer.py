"""A stock Mooncake process on host memory, driven by JSON lines: one order a line on standard input,
one answer each on standard output. It ends with its input.

usage: peer.py BYTES   registers one buffer of BYTES
"""

import ctypes
import json
import os
import sys

# What the library prints does not belong between the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from mooncake.engine import TransferEngine

engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = ctypes.create_string_buffer(int(sys.argv[1]))
address = ctypes.addressof(memory)
assert engine.register_memory(address, len(memory)) == 0


def get(order):
    """Leaves bytes in the file."""
    with open(order["file"], "wb") as file:
        file.write(memory.raw[order["offset"] : order["offset"] + order["len"]])


def put(order):
    """Takes bytes from the file."""
    with open(order["file"], "rb") as file:
        data = file.read()
    ctypes.memmove(address + order["offset"], data, len(data))


def move(order):
    """Returns Mooncake's code: 0 if all bytes moved."""
    many = getattr(engine, f"batch_transfer_sync_{order['op']}")
    return many(order["peer"], [address + at for at in order["local"]], order["remote"], order["len"])


def unregister(_):
    return engine.unregister_memory(address)


def register(_):
    return engine.register_memory(address, len(memory))


def probe(order):
    return engine.send_probe(order["peer"])


orders = {call.__name__: call for call in (get, put, move, register, unregister, probe)}


def answer(value):
    print(json.dumps(value), file=answers, flush=True)


answer({"name": f"127.0.0.1:{engine.get_rpc_port()}", "address": address, "length": len(memory)})
for line in sys.stdin:
    order = json.loads(line)
    answer(orders[order["do"]](order))
# Without the library's own end, which waits for its threads.
os._exit(0)
