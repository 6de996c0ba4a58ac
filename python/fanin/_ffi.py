# SPDX-License-Identifier: Apache-2.0
"""The C library's structures and functions, as its public headers declare them.

Nothing here calls the library; :mod:`fanin._library` loads it and applies :data:`PROTOTYPES`.
Structures that begin with ``struct_size`` may grow at their end in later versions of the library.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
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


class Error(Structure):
    """``fanin_error``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("status", c_int32),
        ("rank", c_int32),
        ("sys_errno", c_int32),
        ("ucx_status", c_int32),
        ("phase", c_char * 16),
        ("address", c_char * 64),
        ("key", c_char * 640),
        ("message", c_char * 512),
        ("remedy", c_char * 256),
    ]


class LogLine(Structure):
    """``fanin_log_line``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("level", c_int32),
        ("lost", c_uint32),
        ("time_ns", c_uint64),
        ("event", c_char * 48),
        ("message", c_char * 976),
    ]


class Memory(Structure):
    """``fanin_memory``"""

    _fields_ = [("kind", c_int32), ("device", c_int32)]


class Stream(Structure):
    """``fanin_stream``"""

    _fields_ = [("handle", c_void_p), ("device", c_int32)]


class Box(Structure):
    """``fanin_box``"""

    _fields_ = [
        ("offset", c_uint64 * MAX_DIMS),
        ("extent", c_uint64 * MAX_DIMS),
        ("stride", c_int64 * MAX_DIMS),
        ("address", c_void_p),
    ]


class Tensor(Structure):
    """``fanin_tensor``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("dtype", c_int32),
        ("n_dims", c_uint32),
        ("shape", c_uint64 * MAX_DIMS),
        ("boxes", POINTER(Box)),
        ("n_boxes", c_size_t),
        ("memory", Memory),
        ("flags", c_uint32),
    ]


class Pair(Structure):
    """``fanin_pair``"""

    _fields_ = [("key", c_char_p), ("value", c_char_p)]


class ServerConfig(Structure):
    """``fanin_server_config``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("world_id", c_uint8 * WORLD_ID_SIZE),
        ("rank", c_uint32),
        ("world_size", c_uint32),
        ("bind", c_char_p),
        ("allow", c_char_p),
        ("base_port", c_uint16),
        ("flags", c_uint32),
        ("lease_ms", c_uint32),
        ("max_sessions", c_uint32),
        ("max_memory", c_uint64),
        ("idle_ms", c_uint32),
        ("log", c_void_p),
        ("log_cookie", c_void_p),
        ("data_threads", c_uint32),
        ("peer_cpu", c_uint32),
        ("stranger_share_ms", c_uint32),
        ("own_share_ms", c_uint32),
        ("nice", c_int32),
        ("secret_file", c_char_p),
        ("stranger_cpu", c_uint32),
        ("tls_cert", c_char_p),
        ("tls_key", c_char_p),
        ("tls_ca", c_char_p),
        ("max_bytes_per_second", c_uint64),
    ]


class CommitOptions(Structure):
    """``fanin_commit_options``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("flags", c_uint32),
        ("cast", c_int32),
        ("stream", Stream),
        ("deltas", c_uint32),
    ]


_SHAPES: dict[str, Any] = {"held_up_by": c_char * 64, "drain_waits": c_uint64 * DRAIN_BUCKETS}


class ServerStats(Structure):
    """``fanin_server_stats``"""

    _fields_ = [
        ("struct_size", c_size_t),
        *((name, _SHAPES.get(name, c_uint64)) for name in SERVER_STATS),
    ]


class ClientConfig(Structure):
    """``fanin_client_config``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("server_name", c_char_p),
        ("world_id", c_uint8 * WORLD_ID_SIZE),
        ("connect_timeout_ms", c_uint32),
        ("lost_ms", c_uint32),
        ("max_inflight", c_uint64),
        ("max_catalog", c_uint64),
        ("streams_per_rank", c_uint32),
        ("path", c_int32),
        ("no_unix", c_bool),
        ("no_ucx", c_bool),
        ("log", c_void_p),
        ("log_cookie", c_void_p),
        ("no_checksums", c_bool),
        ("partial", c_bool),
        ("threads", c_uint32),
        ("trust_containers", c_bool),
        ("trust_other_users", c_bool),
        ("secret_file", c_char_p),
        ("tls_cert", c_char_p),
        ("tls_key", c_char_p),
        ("tls_ca", c_char_p),
    ]


ProgressFn = CFUNCTYPE(None, c_void_p, c_uint64, c_uint64)


class RankProgress(Structure):
    """``fanin_rank_progress``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("path", c_int32),
        ("address", c_char_p),
        ("bytes_done", c_uint64),
        ("bytes_total", c_uint64),
        ("quiet_ms", c_uint64),
    ]


class PullProgress(Structure):
    """``fanin_pull_progress``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("bytes_done", c_uint64),
        ("bytes_total", c_uint64),
        ("ranks", POINTER(POINTER(RankProgress))),
        ("n_ranks", c_size_t),
        ("slowest", POINTER(RankProgress)),
    ]


RankProgressFn = CFUNCTYPE(None, c_void_p, POINTER(PullProgress))


class RelayConfig(Structure):
    """``fanin_relay_config``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("client", POINTER(ClientConfig)),
        ("server", POINTER(ServerConfig)),
        ("unit_bytes", c_uint64),
        ("place", c_char_p),
    ]


class RelayStats(Structure):
    """``fanin_relay_stats``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("units", c_uint64),
        ("landed", c_uint64),
        ("bytes_from_origin", c_uint64),
        ("bytes_from_relays", c_uint64),
        ("bytes_handed_on", c_uint64),
        ("late", c_uint64),
        ("taken_over", c_uint64),
        ("holders", c_uint64),
        ("forbidden", c_uint64),
    ]


class PullOptions(Structure):
    """``fanin_pull_options``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("publication", c_char_p),
        ("rule", c_int32),
        ("step", c_uint64),
        ("timeout_ms", c_uint32),
        ("max_attempts", c_uint32),
        ("progress", ProgressFn),
        ("progress_cookie", c_void_p),
        ("dtype", c_int32),
        ("stream", Stream),
        ("spare_file", c_bool),
        ("trust_config", c_bool),
        ("max_bytes", c_uint64),
        ("verify", c_bool),
        ("max_file_bytes", c_uint64),
        ("rank_progress", RankProgressFn),
        ("deltas", c_bool),
        ("delta_from", c_char_p),
    ]


class ResultInfo(Structure):
    """``fanin_result_info``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("step", c_uint64),
        ("world_id", c_uint8 * WORLD_ID_SIZE),
        ("bytes", c_uint64),
        ("tensors", c_uint64),
        ("reads", c_uint64),
        ("restarts", c_uint32),
        ("stale", c_uint32),
        ("reused", c_bool),
        ("path", c_int32),
        ("path_reason", c_char_p),
        ("connect_ns", c_uint64),
        ("catalog_ns", c_uint64),
        ("plan_ns", c_uint64),
        ("wait_ns", c_uint64),
        ("begin_ns", c_uint64),
        ("read_ns", c_uint64),
        ("scatter_ns", c_uint64),
        ("end_ns", c_uint64),
        ("write_ns", c_uint64),
        ("total_ns", c_uint64),
        ("fixed_ns", c_uint64),
        ("ranks_json", c_char_p),
        ("map_ns", c_uint64),
        ("table_ns", c_uint64),
        ("transport_checksums", c_int32),
        ("verified", c_bool),
        ("verify_ns", c_uint64),
        ("base_step", c_uint64),
        ("patch_bytes", c_uint64),
        ("apply_ns", c_uint64),
        ("whole_because", c_char_p),
    ]


class RankInfo(Structure):
    """``fanin_rank_info``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("world_size", c_uint32),
        ("address", c_char_p),
        ("server_name", c_char_p),
        ("world_id", c_uint8 * 16),
        ("incarnation", c_uint8 * 16),
        ("software", c_char_p),
        ("ucx_version", c_char_p),
        ("status", c_int32),
        ("message", c_char_p),
        ("silent", c_bool),
    ]


class PublicationInfo(Structure):
    """``fanin_publication_info``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("rank", c_uint32),
        ("state", c_int32),
        ("step", c_uint64),
        ("epoch", c_uint64),
        ("catalog_version", c_uint64),
        ("tensors", c_uint64),
        ("bytes", c_uint64),
        ("key_digest", c_uint8 * 16),
        ("state_age_ms", c_uint64),
        ("commit_age_ms", c_uint64),
        ("taken_back", c_uint64),
        ("patches", c_uint64),
        ("patch_bytes", c_uint64),
    ]


class Owner(Structure):
    """``fanin_owner``"""

    _fields_ = [
        ("rank", c_uint32),
        ("offset", c_uint64 * MAX_DIMS),
        ("extent", c_uint64 * MAX_DIMS),
        ("bytes", c_uint64),
        ("region", c_uint32),
        ("region_offset", c_uint64),
        ("packed", c_bool),
    ]


class Entry(Structure):
    """``fanin_entry``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("dtype", c_int32),
        ("n_dims", c_uint32),
        ("shape", c_uint64 * MAX_DIMS),
        ("bytes", c_uint64),
        ("owners", POINTER(Owner)),
        ("n_owners", c_size_t),
    ]


class WatchEvent(Structure):
    """``fanin_watch_event``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("step", c_uint64),
        ("step_newest", c_uint64),
        ("spread_ns", c_uint64),
        ("slowest_rank", c_int32),
    ]


class RankState(Structure):
    """``fanin_rank_state``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_uint32),
        ("address", c_char_p),
        ("state", c_int32),
        ("step", c_uint64),
        ("state_age_ms", c_uint64),
    ]


class Objects(Structure):
    """``fanin_objects``"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("list", c_void_p),
        ("count", c_size_t),
        ("item", c_void_p),
        ("read", c_void_p),
        ("doubtful", c_void_p),
        ("n_doubtful", c_size_t),
        ("devices", c_uint64),
        ("digest", c_uint8 * 16),
        ("owner", c_void_p),
        ("how", c_void_p),
        ("keep", c_void_p),
        ("kept", c_void_p),
    ]


NameFn = CFUNCTYPE(c_bool, c_void_p, c_char_p)
RankFn = CFUNCTYPE(c_bool, c_void_p, POINTER(RankInfo))
PublicationFn = CFUNCTYPE(c_bool, c_void_p, POINTER(PublicationInfo))
# The entry as an address: there may be tens of thousands, which are read by struct.
EntryFn = CFUNCTYPE(c_bool, c_void_p, c_void_p)
PairFn = CFUNCTYPE(c_bool, c_void_p, c_char_p, c_char_p)
WatchFn = CFUNCTYPE(c_bool, c_void_p, POINTER(WatchEvent))
QuietFn = CFUNCTYPE(c_bool, c_void_p, c_uint64, POINTER(RankState), c_size_t)
PingFn = CFUNCTYPE(c_bool, c_void_p, POINTER(RankInfo), c_uint64)

_handle = c_void_p
_handle_out = POINTER(c_void_p)
_error = POINTER(Error)
_status = c_int32

#: Function: (type of the result, types of the arguments).
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "fanin_version": (c_char_p, []),
    "fanin_status_name": (c_char_p, [_status]),
    "fanin_status_text": (c_char_p, [_status]),
    "fanin_status_is_retryable": (c_bool, [_status]),
    "fanin_dtype_name": (c_char_p, [c_int32]),
    "fanin_dtype_from_name": (c_int32, [c_char_p]),
    "fanin_dtype_bits": (c_uint32, [c_int32]),
    "fanin_path_name": (c_char_p, [c_int32]),
    "fanin_path_from_name": (c_int32, [c_char_p]),
    "fanin_sweep_adapter_directory": (_status, [c_char_p, POINTER(c_uint64), _error]),
    "fanin_adapter_name": (c_bool, [c_char_p, c_char_p, c_size_t]),
    "fanin_log_choice": (_status, [c_char_p, POINTER(c_int32), POINTER(c_int32), _error]),
    "fanin_log_ring_create": (_status, [c_uint32, c_int32, _handle_out, _error]),
    "fanin_log_ring_write": (None, [c_void_p, c_int32, c_char_p, c_char_p]),
    "fanin_log_ring_read": (_status, [_handle, c_uint32, POINTER(LogLine)]),
    "fanin_log_ring_close": (None, [_handle]),
    "fanin_log_ring_destroy": (None, [_handle_out]),
    "fanin_trace_start": (_status, [c_char_p, _error]),
    "fanin_trace_stop": (_status, [_error]),
    "fanin_server_config_init": (None, [POINTER(ServerConfig), c_size_t]),
    "fanin_server_create": (_status, [POINTER(ServerConfig), _handle_out, _error]),
    "fanin_server_port": (c_uint16, [_handle]),
    # The tensors are packed into a buffer: its address is passed.
    "fanin_server_put": (_status, [_handle, c_char_p, c_void_p, c_size_t, c_bool, _error]),
    "fanin_server_remove": (_status, [_handle, c_char_p, c_char_p, _error]),
    "fanin_server_set_metadata": (_status, [_handle, c_char_p, POINTER(Pair), c_size_t, _error]),
    "fanin_server_begin_update": (_status, [_handle, c_char_p, _error]),
    "fanin_commit_options_init": (None, [POINTER(CommitOptions), c_size_t]),
    "fanin_server_commit": (_status, [_handle, c_char_p, c_uint64, POINTER(CommitOptions), _error]),
    "fanin_server_abort_update": (_status, [_handle, c_char_p, _error]),
    "fanin_server_withdraw": (_status, [_handle, c_char_p, _error]),
    "fanin_server_pause": (_status, [_handle, c_char_p, c_char_p, _error]),
    "fanin_server_resume": (_status, [_handle, c_char_p, _error]),
    "fanin_server_list": (_status, [_handle, c_char_p, NameFn, c_void_p, _error]),
    "fanin_server_get_stats": (_status, [_handle, POINTER(ServerStats)]),
    "fanin_server_prometheus": (_status, [_handle, c_char_p, c_size_t, POINTER(c_size_t)]),
    "fanin_server_destroy": (None, [_handle_out, c_uint32]),
    "fanin_client_config_init": (None, [POINTER(ClientConfig), c_size_t]),
    "fanin_client_create": (_status, [POINTER(ClientConfig), _handle_out, _error]),
    "fanin_client_destroy": (None, [_handle_out]),
    "fanin_client_cancel": (None, [_handle]),
    "fanin_client_connect": (_status, [_handle, POINTER(c_char_p), c_size_t, c_uint32, _error]),
    "fanin_client_disconnect": (None, [_handle]),
    "fanin_pull_options_init": (None, [POINTER(PullOptions), c_size_t]),
    "fanin_client_pull": (
        _status,
        [_handle, POINTER(PullOptions), c_void_p, c_size_t, _handle_out, _error],
    ),
    "fanin_client_pull_adapter": (
        _status,
        [_handle, POINTER(PullOptions), c_char_p, _handle_out, _error],
    ),
    "fanin_client_pull_model": (
        _status,
        [_handle, POINTER(PullOptions), c_char_p, _handle_out, _error],
    ),
    "fanin_client_begin": (
        _status,
        [_handle, POINTER(PullOptions), c_void_p, c_size_t, _handle_out, _error],
    ),
    "fanin_destination_create": (_status, [c_void_p, c_size_t, _handle_out, _error]),
    "fanin_destination_touched": (None, [_handle]),
    "fanin_destination_free": (None, [_handle_out]),
    "fanin_client_pull_into": (
        _status,
        [_handle, POINTER(PullOptions), _handle, _handle_out, _error],
    ),
    "fanin_client_begin_into": (
        _status,
        [_handle, POINTER(PullOptions), _handle, _handle_out, _error],
    ),
    "fanin_session_read": (_status, [_handle, c_size_t, c_size_t, _error]),
    "fanin_session_step": (c_uint64, [_handle]),
    "fanin_session_end": (_status, [_handle_out, _handle_out, _error]),
    "fanin_session_abandon": (None, [_handle_out]),
    "fanin_relay_config_init": (None, [POINTER(RelayConfig), c_size_t]),
    "fanin_relay_create": (
        _status,
        [POINTER(RelayConfig), POINTER(c_char_p), c_size_t, _handle_out, _error],
    ),
    "fanin_relay_destroy": (None, [_handle_out]),
    "fanin_relay_cancel": (None, [_handle]),
    "fanin_relay_pull_into": (
        _status,
        [_handle, POINTER(PullOptions), c_void_p, c_size_t, _handle_out, _error],
    ),
    "fanin_relay_release": (None, [_handle]),
    "fanin_relay_get_stats": (None, [_handle, POINTER(RelayStats)]),
    "fanin_result_get": (None, [_handle, POINTER(ResultInfo)]),
    "fanin_result_free": (None, [_handle_out]),
    "fanin_client_ranks": (_status, [_handle, RankFn, c_void_p, _error]),
    "fanin_client_list": (_status, [_handle, c_uint32, PublicationFn, c_void_p, _error]),
    "fanin_client_catalog": (
        _status,
        [_handle, c_char_p, c_char_p, c_uint32, EntryFn, c_void_p, _error],
    ),
    "fanin_client_metadata": (_status, [_handle, c_char_p, c_uint32, PairFn, c_void_p, _error]),
    "fanin_client_wait": (_status, [_handle, POINTER(PullOptions), POINTER(c_uint64), _error]),
    "fanin_client_watch": (_status, [_handle, c_char_p, c_uint32, WatchFn, c_void_p, _error]),
    "fanin_client_follow": (
        _status,
        [_handle, c_char_p, c_uint32, WatchFn, c_uint32, QuietFn, c_void_p, _error],
    ),
    "fanin_client_ping": (_status, [_handle, c_uint32, PingFn, c_void_p, _error]),
}

#: Likewise; these call Python's functions, and are called with the GIL.
WITH_GIL: dict[str, tuple[Any, list[Any]]] = {
    "fanin_describe_objects": (c_bool, [POINTER(Objects), c_void_p, c_void_p, c_void_p]),
}


def apply(library: ctypes.CDLL) -> None:
    """Gives every function of *library* its prototype. AttributeError: a function is missing."""
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    for name, (result, arguments) in WITH_GIL.items():
        setattr(library, name, ctypes.PYFUNCTYPE(result, *arguments)((name, library)))
