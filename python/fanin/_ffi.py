# SPDX-License-Identifier: Apache-2.0
"""The C library's structures and functions, as its public headers declare them.

Nothing here calls the library; :mod:`fanin._library` loads it and applies :data:`PROTOTYPES`.
Structures that begin with ``struct_size`` may grow at their end in later versions of the library.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_uint64, c_void_p
from typing import Any

from fanin._counters import SERVER_STATS

MAX_DIMS = 8
WORLD_ID_SIZE = 16
DRAIN_BUCKETS = 13

OK = 0
ERR_TIMEOUT = -201
ERR_CANCELLED = -202

LOG_ERROR, LOG_WARNING, LOG_INFO, LOG_DEBUG = 1, 2, 3, 4

MEMORY_DETECT, MEMORY_HOST, MEMORY_CUDA = 0, 1, 2

SERVER_OPEN, SERVER_TRUSTED_NETWORK, SERVER_NO_UCX = 1, 2, 4
SERVER_TRUST_CONTAINERS, SERVER_INSECURE = 8, 16
SERVER_NO_RELAYS = 64
TENSOR_KEEP = 1
COMMIT_SNAPSHOT, COMMIT_WAIT = 1, 2
STEP_NEWEST, STEP_EXACT, STEP_AT_LEAST = 0, 1, 2

#: Names of ``fanin_publication_info.state``.
PUBLICATION_STATES = ("unpublished", "stable", "draining", "writing", "paused")

_KINDS: dict[str, Any] = {
    **{"none": None, "bool": c_bool, "char": c_char, "text": c_char_p, "size": ctypes.c_size_t},
    **{"u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": c_uint64},
    **{"i32": ctypes.c_int32, "i64": ctypes.c_int64, "status": ctypes.c_int32},
    **{"void": c_void_p, "handle": c_void_p},
}


def _kind(name: str) -> Any:
    """The type of this name, of :data:`_KINDS` or this module; ``*``: a pointer to it."""
    if name.startswith("*"):
        return POINTER(_kind(name[1:]))
    return _KINDS[name] if name in _KINDS else globals()[name]


def fields(text: str) -> list[tuple[str, Any]]:
    """Of a structure, from ``kind name name[count]; kind name``, in the order of its members."""
    found: list[tuple[str, Any]] = []
    for kind, *names in map(str.split, text.split(";")):
        for name, _, count in (one.rstrip("]").partition("[") for one in names):
            found.append((name, _kind(kind) * int(count) if count else _kind(kind)))
    return found


class Error(Structure):
    """``fanin_error``"""

    _fields_ = fields(
        "size struct_size; i32 status rank sys_errno ucx_status; char phase[16] address[64] "
        "key[640] message[512] remedy[256]"
    )


class LogLine(Structure):
    """``fanin_log_line``"""

    _fields_ = fields(
        "size struct_size; i32 level; u32 lost; u64 time_ns; char event[48] message[976]"
    )


class Memory(Structure):
    """``fanin_memory``"""

    _fields_ = fields("i32 kind device")


class Stream(Structure):
    """``fanin_stream``"""

    _fields_ = fields("void handle; i32 device")


class Box(Structure):
    """``fanin_box``"""

    _fields_ = fields("u64 offset[8] extent[8]; i64 stride[8]; void address")


class Tensor(Structure):
    """``fanin_tensor``"""

    _fields_ = fields(
        "size struct_size; text name; i32 dtype; u32 n_dims; u64 shape[8]; *Box boxes; "
        "size n_boxes; Memory memory; u32 flags"
    )


class Pair(Structure):
    """``fanin_pair``"""

    _fields_ = fields("text key value")


class ServerConfig(Structure):
    """``fanin_server_config``"""

    _fields_ = fields(
        "size struct_size; text name; u8 world_id[16]; u32 rank world_size; text bind allow; "
        "u16 base_port; u32 flags lease_ms max_sessions; u64 max_memory; u32 idle_ms; "
        "void log log_cookie; u32 data_threads peer_cpu stranger_share_ms own_share_ms; i32 nice; "
        "text secret_file; u32 stranger_cpu; text tls_cert tls_key tls_ca; "
        "u64 max_bytes_per_second"
    )


class CommitOptions(Structure):
    """``fanin_commit_options``"""

    _fields_ = fields("size struct_size; u32 flags; i32 cast; Stream stream; u32 deltas")


_SHAPES: dict[str, Any] = {"held_up_by": c_char * 64, "drain_waits": c_uint64 * DRAIN_BUCKETS}


class ServerStats(Structure):
    """``fanin_server_stats``"""

    _fields_ = fields("size struct_size") + [
        (name, _SHAPES.get(name, c_uint64)) for name in SERVER_STATS
    ]


class ClientConfig(Structure):
    """``fanin_client_config``"""

    _fields_ = fields(
        "size struct_size; text server_name; u8 world_id[16]; u32 connect_timeout_ms lost_ms; "
        "u64 max_inflight max_catalog; u32 streams_per_rank; i32 path; bool no_unix no_ucx; "
        "void log log_cookie; bool no_checksums partial; u32 threads;"
        "bool trust_containers trust_other_users; text secret_file tls_cert tls_key tls_ca"
    )


ProgressFn = CFUNCTYPE(None, c_void_p, c_uint64, c_uint64)


class RankProgress(Structure):
    """``fanin_rank_progress``"""

    _fields_ = fields(
        "size struct_size; i32 rank path; text address; u64 bytes_done bytes_total quiet_ms"
    )


class PullProgress(Structure):
    """``fanin_pull_progress``"""

    _fields_ = fields(
        "size struct_size; u64 bytes_done bytes_total; **RankProgress ranks; size n_ranks; "
        "*RankProgress slowest"
    )


RankProgressFn = CFUNCTYPE(None, c_void_p, POINTER(PullProgress))


class RelayConfig(Structure):
    """``fanin_relay_config``"""

    _fields_ = fields(
        "size struct_size; *ClientConfig client; *ServerConfig server; u64 unit_bytes; text place"
    )


class RelayStats(Structure):
    """``fanin_relay_stats``"""

    _fields_ = fields(
        "size struct_size; u64 units landed bytes_from_origin bytes_from_relays bytes_handed_on "
        "late taken_over holders forbidden"
    )


class PullOptions(Structure):
    """``fanin_pull_options``"""

    _fields_ = fields(
        "size struct_size; text publication; i32 rule; u64 step; u32 timeout_ms max_attempts; "
        "ProgressFn progress; void progress_cookie; i32 dtype; Stream stream; bool spare_file "
        "trust_config; u64 max_bytes; bool verify; u64 max_file_bytes; "
        "RankProgressFn rank_progress; bool deltas; text delta_from"
    )


class ResultInfo(Structure):
    """``fanin_result_info``"""

    _fields_ = fields(
        "size struct_size; u64 step; u8 world_id[16]; u64 bytes tensors reads; u32 restarts "
        "stale; bool reused; i32 path; text path_reason; u64 connect_ns catalog_ns plan_ns "
        "wait_ns begin_ns read_ns scatter_ns end_ns write_ns total_ns fixed_ns; text ranks_json; "
        "u64 map_ns table_ns; i32 transport_checksums; bool verified; u64 verify_ns base_step "
        "patch_bytes apply_ns; text whole_because"
    )


class RankInfo(Structure):
    """``fanin_rank_info``"""

    _fields_ = fields(
        "size struct_size; i32 rank; u32 world_size; text address server_name; u8 world_id[16] "
        "incarnation[16]; text software ucx_version; i32 status; text message; bool silent"
    )


class PublicationInfo(Structure):
    """``fanin_publication_info``"""

    _fields_ = fields(
        "size struct_size; text name; u32 rank; i32 state; u64 step epoch catalog_version "
        "tensors bytes; u8 key_digest[16]; u64 state_age_ms commit_age_ms taken_back patches "
        "patch_bytes"
    )


class Owner(Structure):
    """``fanin_owner``"""

    _fields_ = fields(
        "u32 rank; u64 offset[8] extent[8] bytes; u32 region; u64 region_offset; bool packed"
    )


class Entry(Structure):
    """``fanin_entry``"""

    _fields_ = fields(
        "size struct_size; text name; i32 dtype; u32 n_dims; u64 shape[8] bytes; *Owner owners; "
        "size n_owners"
    )


class WatchEvent(Structure):
    """``fanin_watch_event``"""

    _fields_ = fields("size struct_size; u64 step step_newest spread_ns; i32 slowest_rank")


class RankState(Structure):
    """``fanin_rank_state``"""

    _fields_ = fields("size struct_size; u32 rank; text address; i32 state; u64 step state_age_ms")


class Objects(Structure):
    """``fanin_objects``"""

    _fields_ = fields(
        "size struct_size; void list; size count; void item read doubtful; size n_doubtful; "
        "u64 devices; u8 digest[16]; void owner how keep kept"
    )


NameFn = CFUNCTYPE(c_bool, c_void_p, c_char_p)
RankFn = CFUNCTYPE(c_bool, c_void_p, POINTER(RankInfo))
PublicationFn = CFUNCTYPE(c_bool, c_void_p, POINTER(PublicationInfo))
# The entry as an address: there may be tens of thousands, which are read by struct.
EntryFn = CFUNCTYPE(c_bool, c_void_p, c_void_p)
PairFn = CFUNCTYPE(c_bool, c_void_p, c_char_p, c_char_p)
WatchFn = CFUNCTYPE(c_bool, c_void_p, POINTER(WatchEvent))
QuietFn = CFUNCTYPE(c_bool, c_void_p, c_uint64, POINTER(RankState), ctypes.c_size_t)
PingFn = CFUNCTYPE(c_bool, c_void_p, POINTER(RankInfo), c_uint64)


def _prototypes(text: str) -> dict[str, tuple[Any, list[Any]]]:
    lines = [line.split() for line in text.strip().splitlines()]
    return {name: (_kind(result), [*map(_kind, kinds)]) for name, result, *kinds in lines}


#: Function: (type of the result, types of the arguments). Tensors are packed into a buffer, whose
#: address is passed.
PROTOTYPES = _prototypes("""
fanin_version text
fanin_status_name text status
fanin_status_text text status
fanin_status_is_retryable bool status
fanin_dtype_name text i32
fanin_dtype_from_name i32 text
fanin_dtype_bits u32 i32
fanin_path_name text i32
fanin_path_from_name i32 text
fanin_sweep_adapter_directory status text *u64 *Error
fanin_adapter_name bool text text size
fanin_log_choice status text *i32 *i32 *Error
fanin_log_ring_create status u32 i32 *handle *Error
fanin_log_ring_write none void i32 text text
fanin_log_ring_read status handle u32 *LogLine
fanin_log_ring_close none handle
fanin_log_ring_destroy none *handle
fanin_trace_start status text *Error
fanin_trace_stop status *Error
fanin_server_config_init none *ServerConfig size
fanin_server_create status *ServerConfig *handle *Error
fanin_server_port u16 handle
fanin_server_put status handle text void size bool *Error
fanin_server_remove status handle text text *Error
fanin_server_set_metadata status handle text *Pair size *Error
fanin_server_begin_update status handle text *Error
fanin_commit_options_init none *CommitOptions size
fanin_server_commit status handle text u64 *CommitOptions *Error
fanin_server_abort_update status handle text *Error
fanin_server_withdraw status handle text *Error
fanin_server_pause status handle text text *Error
fanin_server_resume status handle text *Error
fanin_server_list status handle text NameFn void *Error
fanin_server_get_stats status handle *ServerStats
fanin_server_prometheus status handle text size *size
fanin_server_destroy none *handle u32
fanin_client_config_init none *ClientConfig size
fanin_client_create status *ClientConfig *handle *Error
fanin_client_destroy none *handle
fanin_client_cancel none handle
fanin_client_connect status handle *text size u32 *Error
fanin_client_disconnect none handle
fanin_pull_options_init none *PullOptions size
fanin_client_pull status handle *PullOptions void size *handle *Error
fanin_client_pull_adapter status handle *PullOptions text *handle *Error
fanin_client_pull_model status handle *PullOptions text *handle *Error
fanin_client_begin status handle *PullOptions void size *handle *Error
fanin_destination_create status void size *handle *Error
fanin_destination_touched none handle
fanin_destination_free none *handle
fanin_client_pull_into status handle *PullOptions handle *handle *Error
fanin_client_begin_into status handle *PullOptions handle *handle *Error
fanin_session_read status handle size size *Error
fanin_session_step u64 handle
fanin_session_end status *handle *handle *Error
fanin_session_abandon none *handle
fanin_relay_config_init none *RelayConfig size
fanin_relay_create status *RelayConfig *text size *handle *Error
fanin_relay_destroy none *handle
fanin_relay_cancel none handle
fanin_relay_pull_into status handle *PullOptions void size *handle *Error
fanin_relay_release none handle
fanin_relay_get_stats none handle *RelayStats
fanin_result_get none handle *ResultInfo
fanin_result_free none *handle
fanin_client_ranks status handle RankFn void *Error
fanin_client_list status handle u32 PublicationFn void *Error
fanin_client_catalog status handle text text u32 EntryFn void *Error
fanin_client_metadata status handle text u32 PairFn void *Error
fanin_client_wait status handle *PullOptions *u64 *Error
fanin_client_watch status handle text u32 WatchFn void *Error
fanin_client_follow status handle text u32 WatchFn u32 QuietFn void *Error
fanin_client_ping status handle u32 PingFn void *Error
""")

#: Likewise; these call Python's functions, and are called with the GIL.
WITH_GIL = _prototypes("fanin_describe_objects bool *Objects void void void")


def apply(library: ctypes.CDLL) -> None:
    """Gives every function of *library* its prototype. AttributeError: a function is missing."""
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    for name, (result, arguments) in WITH_GIL.items():
        setattr(library, name, ctypes.PYFUNCTYPE(result, *arguments)((name, library)))
