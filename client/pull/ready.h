/* SPDX-License-Identifier: Apache-2.0 */
/** @file From the ranks that are there to a plan, and connections that bytes come by: nothing is
    leased, and nothing is written. */
#ifndef READY_H
#define READY_H

#include "pull/states.h"

fanin_status pull_connect(pull *p, fanin_error *error); /**< PULL_CONNECT */
fanin_status pull_agree(pull *p, fanin_error *error);   /**< PULL_AGREE */
fanin_status pull_tables(pull *p, fanin_error *error);  /**< PULL_TABLES */
fanin_status pull_plan(pull *p, fanin_error *error);    /**< PULL_PLAN */
fanin_status pull_streams(pull *p, fanin_error *error); /**< PULL_STREAMS */

#endif
