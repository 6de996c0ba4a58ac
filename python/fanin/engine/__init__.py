# SPDX-License-Identifier: Apache-2.0
"""What every engine needs and no engine has: the half of the plugins that knows neither of them.

:mod:`fanin.vllm` and :mod:`fanin.sglang` stand on this package, and :mod:`fanin.fleet` takes from
it what it shares with them. Nothing here imports an engine or one of these three.
"""
