# SPDX-License-Identifier: Apache-2.0
"""Trainer ranks for the engine checks: nixl-fetch's stand-in, and servers in this process.

The servers in this process lend torch tensors to the library as a trainer does: by reference,
under the names that the parameters have in memory, each rank its chunk of dimension 0. The
environment names the tool (NIXL_FETCH) and the library (FANIN_LIBRARY).
"""
import contextlib
import ctypes
import os
import select
import subprocess
import tempfile

import torch

FETCH = os.environ["NIXL_FETCH"]
MAX_DIMS = 8
DTYPES = {torch.float32: b"F32", torch.bfloat16: b"BF16", torch.float16: b"F16"}


class Box(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_uint64 * MAX_DIMS),
        ("extent", ctypes.c_uint64 * MAX_DIMS),
        ("stride", ctypes.c_int64 * MAX_DIMS),
        ("address", ctypes.c_void_p),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int32),
        ("n_dims", ctypes.c_uint32),
        ("shape", ctypes.c_uint64 * MAX_DIMS),
        ("boxes", ctypes.POINTER(Box)),
        ("n_boxes", ctypes.c_size_t),
        ("memory", ctypes.c_int32 * 2),
    ]


class Pair(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char_p), ("value", ctypes.c_char_p)]


class Config(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("world_id", ctypes.c_uint8 * 16),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("bind", ctypes.c_char_p),
        ("allow", ctypes.c_char_p),
        ("base_port", ctypes.c_uint16),
        ("flags", ctypes.c_uint32),
        ("lease_ms", ctypes.c_uint32),
        ("max_sessions", ctypes.c_uint32),
        ("max_memory", ctypes.c_uint64),
        ("idle_ms", ctypes.c_uint32),
        ("log", ctypes.c_void_p),
        ("log_cookie", ctypes.c_void_p),
    ]


class Error(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("status", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sys_errno", ctypes.c_int32),
        ("ucx_status", ctypes.c_int32),
        ("phase", ctypes.c_char * 16),
        ("address", ctypes.c_char * 64),
        ("key", ctypes.c_char * 640),
        ("message", ctypes.c_char * 512),
        ("remedy", ctypes.c_char * 256),
    ]


library = ctypes.CDLL(os.environ["FANIN_LIBRARY"])
library.fanin_server_port.argtypes = [ctypes.c_void_p]
library.fanin_server_port.restype = ctypes.c_uint16
library.fanin_server_destroy.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint32]
library.fanin_server_destroy.restype = None


def call(function, *arguments):
    """One call of the library, whose last argument is an error."""
    error = Error(struct_size=ctypes.sizeof(Error))
    if function(*arguments, ctypes.byref(error)) != 0:
        raise RuntimeError(f"{error.message.decode()}: {error.remedy.decode()}")


def shard(name, value, rank, world_size):
    """The rows that torch.chunk gives this rank; the last ranks may get none."""
    starts = [0]
    for chunk in value.chunk(world_size):
        starts.append(starts[-1] + chunk.shape[0])
    tensor = Tensor(
        struct_size=ctypes.sizeof(Tensor),
        name=name.encode(),
        dtype=library.fanin_dtype_from_name(DTYPES[value.dtype]),
        n_dims=value.dim(),
    )
    tensor.shape[: value.dim()] = value.shape
    if rank + 1 >= len(starts):
        return tensor
    rows = value[starts[rank] : starts[rank + 1]]
    box = Box(address=rows.data_ptr())
    box.offset[0] = starts[rank]
    box.extent[: rows.dim()] = rows.shape
    box.stride[: rows.dim()] = [step * rows.element_size() for step in rows.stride()]
    tensor.boxes = ctypes.pointer(box)
    tensor.n_boxes = 1
    return tensor


def start_rank(rank, world_size, world_id, tensors, metadata):
    config = Config()
    library.fanin_server_config_init(ctypes.byref(config), ctypes.sizeof(config))
    config.rank, config.world_size = rank, world_size
    config.world_id[:] = world_id
    server = ctypes.c_void_p()
    call(library.fanin_server_create, ctypes.byref(config), ctypes.byref(server))
    shards = [shard(name, value, rank, world_size) for name, value in tensors.items()]
    array = (Tensor * len(shards))(*shards)
    call(library.fanin_server_put, server, b"lora:0", array, ctypes.c_size_t(len(shards)), False)
    pairs = (Pair * len(metadata))(*[Pair(k.encode(), v.encode()) for k, v in metadata.items()])
    call(library.fanin_server_set_metadata, server, b"lora:0", pairs, ctypes.c_size_t(len(pairs)))
    call(library.fanin_server_commit, server, b"lora:0", ctypes.c_uint64(1), None)
    return server


@contextlib.contextmanager
def ranks_of(tensors, metadata, world_size=4):
    """Ranks in this process that hold these tensors; yields the tool's arguments that name them."""
    tensors = {name: value.detach() for name, value in tensors.items()}
    world_id, servers = os.urandom(16), []
    try:
        for rank in range(world_size):
            servers.append(start_rank(rank, world_size, world_id, tensors, metadata))
        yield [",".join(f"127.0.0.1:{library.fanin_server_port(s)}" for s in servers)]
    finally:
        for server in servers:
            library.fanin_server_destroy(ctypes.byref(server), 1000)


@contextlib.contextmanager
def serve(world_size, *arguments):
    """The tool's own ranks, on ephemeral ports; yields the tool's arguments that name them."""
    with tempfile.TemporaryDirectory() as scratch:
        info = os.path.join(scratch, "nixl_info.json")
        process = subprocess.Popen(
            [FETCH, "serve", "--quiet", "-n", str(world_size), "--info", info, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            line = ""
            if select.select([process.stdout], [], [], 120)[0]:
                line = process.stdout.readline()
            if not line.startswith("ready:"):
                raise RuntimeError("the ranks did not get ready")
            yield [info]
        finally:
            process.terminate()
            process.wait(timeout=60)
            process.stdout.close()


def pull(target, directory, *arguments):
    """The directory, with what nixl-fetch pulled into it."""
    command = [FETCH, "pull", *target, "--run", "0", "--timeout", "120s", "--quiet"]
    done = subprocess.run(
        [*command, "--out", str(directory), *arguments], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"the pull failed: {done.stderr.strip()}")
    return directory
