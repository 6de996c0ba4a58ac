/* SPDX-License-Identifier: Apache-2.0 */
/** @file A look as Prometheus' text. */
#ifndef LOOK_METRICS_H
#define LOOK_METRICS_H

#include "fetch/look.h"

/** Text exposition format 0.0.4, to be freed. What a rank that does not answer would say is left
    out, but for fanin_rank_up. */
char *look_metrics(const session *s, const look *l, const problems *p);

#endif
