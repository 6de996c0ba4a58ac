/* SPDX-License-Identifier: Apache-2.0 */
#include "guests/descriptor_limit.h"
#include "guests/admission.h"
#include "error_set.h"

#include <inttypes.h>
#include <dirent.h>
#include <stdio.h>
#include <sys/resource.h>

#define DESCRIPTORS 48 /* of the server itself: listeners, epoll, UCX */
#define SESSIONS_LEAST 2

static rlim_t open_descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    rlim_t count = 0;
    while (d && readdir(d))
        count++;
    if (d)
        closedir(d);
    return count;
}

static void choose(fanin_server_config *c, rlim_t most, rlim_t besides,
                   const logger *log, bool *limited_out)
{
    rlim_t room = most == RLIM_INFINITY ? SESSIONS_DEFAULT
                  : most > besides      ? most - besides
                                        : 0;
    *limited_out = room < SESSIONS_DEFAULT;
    c->max_sessions = !*limited_out           ? SESSIONS_DEFAULT
                      : room > SESSIONS_LEAST ? (uint32_t)room
                                              : SESSIONS_LEAST;
    if (*limited_out)
        log_write(log, FANIN_LOG_INFO, "descriptor-limit",
                  "%u connections at most, half of them from one peer; a worker "
                  "takes up to 5: `ulimit -Hn %" PRIu64
                  "` (LimitNOFILE, --ulimit nofile) before the trainer starts makes "
                  "room for %u",
                  (unsigned)c->max_sessions, (uint64_t)(SESSIONS_DEFAULT + besides),
                  SESSIONS_DEFAULT);
}

fanin_status descriptors_allow(fanin_server_config *c, const logger *log,
                               bool *limited_out, fanin_error *error)
{
    struct rlimit limit;
    rlim_t besides = open_descriptors() + REFUSED_PEERS + DESCRIPTORS;
    *limited_out = false;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        limit.rlim_cur = limit.rlim_max = RLIM_INFINITY;
    if (c->max_sessions == 0)
        choose(c, limit.rlim_max, besides, log, limited_out);
    rlim_t need = besides + c->max_sessions;
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= need)
        return FANIN_OK;
    rlim_t before = limit.rlim_cur;
    bool enough = limit.rlim_max == RLIM_INFINITY || limit.rlim_max >= need;
    limit.rlim_cur = need;
    if (enough && setrlimit(RLIMIT_NOFILE, &limit) == 0) {
        log_write(log, FANIN_LOG_INFO, "descriptor-limit",
                  "raised the soft limit of open files from %" PRIu64 " to %" PRIu64,
                  (uint64_t)before, (uint64_t)need);
        return FANIN_OK;
    }
    char remedy[160];
    snprintf(remedy, sizeof remedy,
             "raise it with `ulimit -n %" PRIu64
             "` (hard limit), or lower max_sessions of fanin_server_config",
             (uint64_t)need);
    error_place place = {.phase = "create", .remedy = remedy};
    return error_set(error, FANIN_ERR_LIMIT, &place,
                     "%" PRIu64 " open files are allowed, %u sessions need %" PRIu64,
                     (uint64_t)limit.rlim_max, (unsigned)c->max_sessions,
                     (uint64_t)need);
}
