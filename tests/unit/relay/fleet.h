/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A fleet of readers on a clock of its own. Each decides by relay/schedule.h, as in a process.
 * Links are a fluid that flows share max-min fairly, each way of each host by itself. The trainer
 * is one rank. A request waits at a server until that sends fewer than it has threads.
 */
#ifndef FLEET_H
#define FLEET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FLEET_NOBODY SIZE_MAX

typedef struct fleet_options {
    size_t readers, units;
    double ticks;                    /**< of the clock while a link sends a unit */
    size_t neighbours;               /**< holders that a reader reads from; 0: all */
    size_t threads;                  /**< requests that a relay sends at a time; all */
    size_t origin_threads;           /**< and the trainer */
    size_t rack;                     /**< readers of a rack; 0: there are no racks */
    double spine;                    /**< a rack's link is that of its readers by it */
    size_t unsaid;                   /**< 1: readers do not know of racks */
    size_t batch;                    /**< units of a request */
    double unit_s;                   /**< of a link for one unit */
    double latency_s;                /**< of a message one way */
    size_t slow, dead, silent, late; /**< readers, or FLEET_NOBODY */
    double slow_by;                  /**< the slow one's uplink is divided by it */
    double at; /**< of one pull: when it dies, falls silent, comes */
} fleet_options;

typedef struct fleet_result {
    double times; /**< until the last reader's end, of one pull; without the late one */
    double late;  /**< the late one's own */
    double models; /**< that left the trainer */
    uint64_t told; /**< "this unit is here" that readers were told, of all */
} fleet_result;

fleet_options fleet_defaults(void);

/** False: some reader has not ended in 20 times one pull. */
bool fleet_run(const fleet_options *options, fleet_result *out);

#endif
