# SPDX-License-Identifier: Apache-2.0
"""``python -m fanin.sync TRAINER [URL...]``: a registry and its routes in a process of its own."""

import sys

from fanin.fleet.command import main

if __name__ == "__main__":
    sys.exit(main())
