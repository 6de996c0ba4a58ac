# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
# fmt: off
"""What a rank counts. Made by docs/generate.py of common/counters/counters.h."""

SERVER_STATS = tuple(
    """
pulls_good pulls_stale pulls_abandoned begins_granted begins_refused bytes_streamed
reads_streamed reads_refused updates commits aborts commits_withdrawn drain_wait_ns_total
drain_wait_ns_max drains_expired sessions_opened sessions_refused protocol_errors sessions
leases publications tensors session_memory ipc_mappers publications_paused sessions_evicted
requests_delayed log_lines_left_out drains_cut held_up_ns_max held_up_by drain_waits
sends_waiting bytes_tls bytes_cma bytes_rdma bytes_cuda_ipc control_cpu_ns data_cpu_ns relays
relay_units relay_bytes_origin relay_bytes_relays relay_late relay_taken_over bytes_patches
patches_made patches_lacking
""".split()
)
"""Members of ``fanin_server_stats`` behind its size, in their order."""

TOLD: dict[str, tuple[str, dict[str, str]]] = {
    "pulls_good": ("fanin_pulls_total", {"result": "good"}),
    "pulls_stale": ("fanin_pulls_total", {"result": "stale"}),
    "pulls_abandoned": ("fanin_pulls_total", {"result": "abandoned"}),
    "begins_granted": ("fanin_begins_total", {"result": "granted"}),
    "begins_refused": ("fanin_begins_total", {"result": "refused"}),
    "bytes_streamed": ("fanin_streamed_bytes_total", {}),
    "updates": ("fanin_updates_total", {}),
    "commits": ("fanin_commits_total", {}),
    "drain_wait_ns_total": ("fanin_drain_wait_seconds_total", {}),
    "drain_wait_ns_max": ("fanin_drain_wait_seconds_max", {}),
    "cpu_ns": ("fanin_control_cpu_seconds_total", {}),
    "data_cpu_ns": ("fanin_data_cpu_seconds_total", {}),
    "sessions": ("fanin_control_sessions", {}),
    "sends_waiting": ("fanin_sends_waiting", {}),
    "leases": ("fanin_leases", {}),
    "publications": ("fanin_publications", {}),
    "relays": ("fanin_relays", {}),
    "relay_units": ("fanin_relay_units_total", {}),
    "relay_bytes_origin": ("fanin_relay_bytes_total", {"from": "origin"}),
    "relay_bytes_relays": ("fanin_relay_bytes_total", {"from": "relay"}),
    "relay_late": ("fanin_relay_late_total", {}),
    "relay_taken_over": ("fanin_relay_taken_over_total", {}),
}
"""What ``nixl-fetch status`` tells of a rank: the metric of each member, and its labels."""

METRICS = {
    "fanin_pulls_total": "Leases that ended, by result.",
    "fanin_begins_total": "Requests for a lease, by result.",
    "fanin_streamed_bytes_total": "Tensor bytes sent on data connections.",
    "fanin_updates_total": "Updates that began.",
    "fanin_commits_total": "Steps committed.",
    "fanin_drain_wait_seconds_total": "Time that begin_update waited for readers.",
    "fanin_drain_wait_seconds_max": "Longest time that a begin_update waited for readers.",
    "fanin_control_cpu_seconds_total": "CPU time of the thread that serves control connections.",
    "fanin_data_cpu_seconds_total": "CPU time of the threads that send tensors on data connections.",
    "fanin_control_sessions": "Control connections now.",
    "fanin_sends_waiting": "Data connections now with bytes that the peer, or the network, does not take yet.",
    "fanin_leases": "Leases that readers hold now.",
    "fanin_publications": "Publications now.",
    "fanin_relays": "Offers now of readers that hand on what they have read.",
    "fanin_relay_units_total": "Units that such readers have got, as they told.",
    "fanin_relay_bytes_total": "Bytes that such readers have got of ranks and of each other, as they told.",
    "fanin_relay_late_total": "Units that came late, and were asked of somebody else.",
    "fanin_relay_taken_over_total": "Units that another reader took from the trainer, as whose turn it was did not.",
}
"""Those metrics, and what they are."""
