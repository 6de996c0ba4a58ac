/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a rank counts, once. Whatever lists counters is made of this table, or docs/generate.py
 * writes it: structs, wire, Prometheus pages, JSON of nixl-fetch and its schemas, Python's structs.
 *
 * - BOTH(key, name, metric, label, help): a member of fanin_server_stats, and of fanin_rank_stats,
 *   which has it from the key of stats_ok.
 * - OWN(name, metric, label, help): of fanin_server_stats alone.
 * - TOLD(key, name, metric, label, help): of stats_ok and fanin_rank_stats alone; requests.c
 *   works it out.
 *
 * A metric that ends in _total is a counter, any other a gauge. One with _seconds is counted in
 * nanoseconds. metric NULL: the page shows it in another way. Rows of one metric follow one
 * another, and the first has its help.
 */
#ifndef COUNTERS_H
#define COUNTERS_H

/* clang-format off */
#define COUNTERS(BOTH, OWN, TOLD) \
    BOTH(1, pulls_good, "fanin_pulls_total", "result=\"good\"", "Leases that ended, by result.") \
    BOTH(2, pulls_stale, "fanin_pulls_total", "result=\"stale\"", "") \
    BOTH(3, pulls_abandoned, "fanin_pulls_total", "result=\"abandoned\"", "") \
    BOTH(4, begins_granted, "fanin_begins_total", "result=\"granted\"", \
         "Requests for a lease, by result.") \
    BOTH(5, begins_refused, "fanin_begins_total", "result=\"refused\"", "") \
    OWN(reads_streamed, "fanin_reads_total", "result=\"streamed\"", \
        "Read requests on data connections, by result.") \
    OWN(reads_refused, "fanin_reads_total", "result=\"refused\"", "") \
    BOTH(10, bytes_streamed, "fanin_streamed_bytes_total", NULL, \
         "Tensor bytes sent on data connections.") \
    OWN(bytes_patches, "fanin_patch_bytes_total", NULL, \
        "Of the bytes sent on data connections, those of patches.") \
    BOTH(6, updates, "fanin_updates_total", NULL, "Updates that began.") \
    BOTH(7, commits, "fanin_commits_total", NULL, "Steps committed.") \
    OWN(commits_withdrawn, "fanin_commits_withdrawn_total", NULL, \
        "Steps that were never published because an update began before their stream was done.") \
    OWN(patches_made, "fanin_patches_total", "result=\"made\"", \
        "Commits for which a patch was asked, by result.") \
    OWN(patches_lacking, "fanin_patches_total", "result=\"none\"", "") \
    OWN(aborts, "fanin_aborts_total", NULL, "Updates aborted.") \
    BOTH(26, drain_wait_ns_total, "fanin_drain_wait_seconds_total", NULL, \
         "Time that begin_update waited for readers.") \
    BOTH(12, drain_wait_ns_max, "fanin_drain_wait_seconds_max", NULL, \
         "Longest time that a begin_update waited for readers.") \
    OWN(drains_expired, "fanin_drains_expired_total", NULL, \
        "Updates that began when the lease time was over, not when readers were done.") \
    OWN(drains_cut, "fanin_drains_cut_total", NULL, \
        "Updates that did not wait for a peer that had had its share of the minute.") \
    OWN(sessions_opened, "fanin_connections_opened_total", NULL, "Connections admitted.") \
    OWN(sessions_refused, "fanin_connections_refused_total", NULL, "Connections refused.") \
    OWN(sessions_evicted, "fanin_sessions_evicted_total", NULL, \
        "Idle sessions that were closed to make room for others.") \
    OWN(requests_delayed, "fanin_requests_delayed_total", NULL, \
        "Times that a connection waited for its peer's share of CPU time.") \
    OWN(log_lines_left_out, "fanin_log_lines_left_out_total", NULL, \
        "Lines that peers caused, and that were counted instead of written.") \
    OWN(protocol_errors, "fanin_protocol_errors_total", NULL, \
        "Messages that the protocol does not allow.") \
    OWN(control_cpu_ns, "fanin_control_cpu_seconds_total", NULL, \
        "CPU time of the thread that serves control connections.") \
    TOLD(27, cpu_ns, "fanin_control_cpu_seconds_total", NULL, \
        "CPU time of the thread that serves control connections.") \
    BOTH(33, data_cpu_ns, "fanin_data_cpu_seconds_total", NULL, \
         "CPU time of the threads that send tensors on data connections.") \
    OWN(sessions, "fanin_connections", NULL, "Control and data connections now.") \
    TOLD(8, sessions, "fanin_control_sessions", NULL, "Control connections now.") \
    BOTH(28, sends_waiting, "fanin_sends_waiting", NULL, \
         "Data connections now with bytes that the peer, or the network, does not take yet.") \
    BOTH(9, leases, "fanin_leases", NULL, "Leases that readers hold now.") \
    BOTH(11, publications, "fanin_publications", NULL, "Publications now.") \
    OWN(publications_paused, "fanin_publications_paused", NULL, \
        "Publications between pause and resume now.") \
    OWN(tensors, "fanin_tensors", NULL, "Shards registered now.") \
    OWN(session_memory, "fanin_connection_memory_bytes", NULL, \
        "Memory that all connections take now.") \
    OWN(ipc_mappers, "fanin_ipc_mappers", NULL, \
        "Sessions that were given keys to map CUDA memory.") \
    BOTH(34, relays, "fanin_relays", NULL, \
         "Offers now of readers that hand on what they have read.") \
    BOTH(37, relay_units, "fanin_relay_units_total", NULL, \
         "Units that such readers have got, as they told.") \
    BOTH(35, relay_bytes_origin, "fanin_relay_bytes_total", "from=\"origin\"", \
         "Bytes that such readers have got of ranks and of each other, as they told.") \
    BOTH(36, relay_bytes_relays, "fanin_relay_bytes_total", "from=\"relay\"", "") \
    BOTH(38, relay_late, "fanin_relay_late_total", NULL, \
         "Units that came late, and were asked of somebody else.") \
    BOTH(39, relay_taken_over, "fanin_relay_taken_over_total", NULL, \
         "Units that another reader took from the trainer, as whose turn it was did not.") \
    BOTH(29, bytes_tls, NULL, NULL, "Of bytes_streamed, those inside TLS.") \
    BOTH(30, bytes_cma, NULL, NULL, "Bytes of good pulls, as their ends told.") \
    BOTH(31, bytes_rdma, NULL, NULL, "Bytes of good pulls, as their ends told.") \
    BOTH(32, bytes_cuda_ipc, NULL, NULL, "Bytes of good pulls, as their ends told.") \
    OWN(held_up_ns_max, NULL, NULL, "Longest time that one peer's leases held an update up.")
/* clang-format on */

#define COUNTER_NOT_SHOWN(...) /* a row that a list leaves out */

#endif
