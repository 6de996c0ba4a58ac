/* SPDX-License-Identifier: Apache-2.0 */
/** @file From a plan to all that its reads need but leases, under which nothing slow may happen. */
#ifndef PREPARE_H
#define PREPARE_H

#include "pull/states.h"

fanin_status pull_settle(pull *p, fanin_error *error); /**< PULL_SETTLE */
fanin_status pull_ranges(pull *p, fanin_error *error); /**< PULL_RANGES */
fanin_status pull_paths(pull *p, fanin_error *error);  /**< PULL_PATHS */
fanin_status pull_room(pull *p, fanin_error *error);   /**< PULL_ROOM */
fanin_status pull_detail(pull *p, fanin_error *error); /**< PULL_DETAIL */

#endif
