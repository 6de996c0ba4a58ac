# SPDX-License-Identifier: Apache-2.0
"""Many engines and one step: what :mod:`fanin.sync` and :mod:`fanin.pool` are made of.

Every module here says "all engines to step N". ``pool`` posts a step of an adapter, ``registry``
brings a step of a whole model, and ``transport`` does that for code that sends buckets.
"""
