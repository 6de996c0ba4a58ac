/* SPDX-License-Identifier: Apache-2.0 */
/** @file All that comes before there are leases, under which nothing slow may happen. */
#ifndef READY_H
#define READY_H

#include "pull/states.h"

/* From the ranks that are there to a plan: nothing is written. */
fanin_status pull_connect(pull *p, fanin_error *error); /**< PULL_CONNECT */
fanin_status pull_agree(pull *p, fanin_error *error);   /**< PULL_AGREE */
fanin_status pull_tables(pull *p, fanin_error *error);  /**< PULL_TABLES */
fanin_status pull_plan(pull *p, fanin_error *error);    /**< PULL_PLAN */

/* From a plan to all that its reads need. */
fanin_status pull_settle(pull *p, fanin_error *error);  /**< PULL_SETTLE */
fanin_status pull_ranges(pull *p, fanin_error *error);  /**< PULL_RANGES */
fanin_status pull_paths(pull *p, fanin_error *error);   /**< PULL_PATHS */
fanin_status pull_room(pull *p, fanin_error *error);    /**< PULL_ROOM */
fanin_status pull_detail(pull *p, fanin_error *error);  /**< PULL_DETAIL */
fanin_status pull_streams(pull *p, fanin_error *error); /**< PULL_STREAMS */

#endif
