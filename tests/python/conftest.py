# SPDX-License-Identifier: Apache-2.0
"""What all tests of this folder start with."""

from __future__ import annotations

import signal

# Shells have what they run in the background ignore SIGINT, and processes inherit that; tests
# interrupt themselves and their children.
if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
    signal.signal(signal.SIGINT, signal.default_int_handler)
