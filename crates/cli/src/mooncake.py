"""One of the two Mooncake processes of `kvferry bench --peer mooncake`, driven by JSON lines: one order
a line on standard input, one answer each on standard output. It ends with its input.

usage: python3 -c SCRIPT host|ORDINAL   where its memory is: the host, or a CUDA device
"""

import ctypes
import importlib.metadata
import json
import mmap
import os
import sys
import time

# What the library prints does not belong between the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from mooncake.engine import TransferEngine

memory = None


class Mapping:
    """A file that the bench fills and checks. On the host it is the memory that moves."""

    def __init__(self, file, bytes):
        with open(file, "r+b") as opened:
            self.map = mmap.mmap(opened.fileno(), bytes)
        self.view = ctypes.c_char.from_buffer(self.map)
        self.file_address = self.address = ctypes.addressof(self.view)
        self.bytes = bytes

    def load(self):
        """The file's bytes, into the memory that moves."""

    def store(self):
        """The other way."""

    def free(self):
        del self.view
        self.map.close()


class Cuda:
    """The driver calls that device memory needs; Mooncake uses the same primary context."""

    def __init__(self, ordinal):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed with CUDA error {code}")


class DeviceMemory(Mapping):
    """Memory of a CUDA device that is as large as the file."""

    def __init__(self, file, bytes):
        super().__init__(file, bytes)
        address = ctypes.c_uint64()
        cuda.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(bytes))
        self.address = address.value

    def load(self):
        device, host = ctypes.c_uint64(self.address), ctypes.c_void_p(self.file_address)
        cuda.call("cuMemcpyHtoD_v2", device, host, ctypes.c_size_t(self.bytes))
        # The call may return before the last bytes are there.
        cuda.call("cuCtxSynchronize")

    def store(self):
        device, host = ctypes.c_uint64(self.address), ctypes.c_void_p(self.file_address)
        # So may those by which Mooncake's threads copy.
        cuda.call("cuCtxSynchronize")
        cuda.call("cuMemcpyDtoH_v2", host, device, ctypes.c_size_t(self.bytes))

    def free(self):
        cuda.call("cuMemFree_v2", ctypes.c_uint64(self.address))
        super().free()


def hold(order):
    """Registers memory as large as the file, and returns its address."""
    global memory
    memory = kind(order["file"], order["bytes"])
    code = engine.register_memory(memory.address, memory.bytes)
    if code != 0:
        raise RuntimeError(f"register_memory returned {code}")
    return memory.address


def load(_):
    memory.load()


def store(_):
    memory.store()


def free(_):
    global memory
    code = engine.unregister_memory(memory.address)
    memory.free()
    memory = None
    if code != 0:
        raise RuntimeError(f"unregister_memory returned {code}")


def move(order):
    """Moves all pieces again and again, so many a call: once to warm up, and then until the times or
    the seconds are over. Returns the nanoseconds of each time, and what failed, which ends it."""
    transfer = getattr(engine, f"batch_transfer_sync_{order['op']}")
    local = [memory.address + at for at in order["local"]]
    remote = [order["address"] + at for at in order["remote"]]
    lengths, most = order["lengths"], order["pieces_per_call"]
    calls = [
        (local[at : at + most], remote[at : at + most], lengths[at : at + most])
        for at in range(0, len(lengths), most)
    ]

    def once():
        for number, call in enumerate(calls, 1):
            code = transfer(order["peer"], *call)
            if code != 0:
                return f"call {number} of {len(calls)} returned {code}"
        return None

    failure, took = once(), []
    end = time.monotonic() + order["seconds"]
    while failure is None and (not took or len(took) < order["times"] and time.monotonic() < end):
        start = time.perf_counter_ns()
        failure = once()
        took.append(time.perf_counter_ns() - start)
    return {"took": took, "failure": failure}


def answer(value):
    print(json.dumps(value), file=answers, flush=True)


def wheel():
    """Name and version of the package that Mooncake came in."""
    names = importlib.metadata.packages_distributions().get("mooncake", ["mooncake"])
    try:
        return f"{names[0]} {importlib.metadata.version(names[0])}"
    except importlib.metadata.PackageNotFoundError:
        return names[0]


kind, cuda = Mapping, None
if sys.argv[1] != "host":
    kind, cuda = DeviceMemory, Cuda(int(sys.argv[1]))
engine = TransferEngine()
if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
    sys.exit("Mooncake's engine does not initialize")
orders = {order.__name__: order for order in (hold, load, store, free, move)}
answer({"name": f"127.0.0.1:{engine.get_rpc_port()}", "wheel": wheel()})
for line in sys.stdin:
    order = json.loads(line)
    try:
        answer({"done": orders[order["do"]](order)})
    except Exception as error:
        answer({"error": f"{order['do']}: {error}"})
# Without the library's own end, which waits for its threads.
os._exit(0)
