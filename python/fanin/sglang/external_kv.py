# SPDX-License-Identifier: Apache-2.0
"""What was computed with the old weights and is not in SGLang's radix tree.

``/flush_cache`` empties the tree and HiCache's host memory. HiCache's storage, LMCache and the
embeddings of images outlive it, and are found by tokens and hashes, whatever the weights were. The
end of an update drops what can say that it did; an engine that has more is refused.
"""

from __future__ import annotations

import sys
from typing import Any

#: Of a request's ``external_kv``.
CHOICES = ("drop", "keep")


def storage_of(scheduler: Any) -> Any:
    """HiCache's storage backend, None if there is none."""
    tree = getattr(scheduler, "tree_cache", None)
    if not getattr(tree, "enable_storage", False):
        return None
    return getattr(getattr(tree, "cache_controller", None), "storage_backend", None)


def what_stays(scheduler: Any) -> str:
    """What nothing drops at an update, "" if all is dropped."""
    if getattr(scheduler, "enable_lmcache", False):
        return "LMCache does not say whether it has dropped what it has"
    if getattr(scheduler, "decode_offload_manager", None) is not None:
        return "what a decode server offloads has no call that drops it"
    kind = type(storage_of(scheduler))
    said = getattr(getattr(kind, "clear", None), "__annotations__", {}).get("return")
    if kind is not type(None) and said not in (bool, "bool"):
        return f"{kind.__name__}, HiCache's storage, does not say whether it has dropped all"
    return ""


def drop(scheduler: Any) -> str:
    """Drops it; why it could not, "" if it did. Nothing generates meanwhile."""
    schedule = sys.modules.get("sglang.srt.managers.mm_schedule")
    embeddings = getattr(schedule, "embedding_cache", None)
    if embeddings is not None:
        embeddings.clear()
    storage = storage_of(scheduler)
    if storage is None or what_stays(scheduler):  # then the request has said "keep"
        return ""
    try:
        scheduler.flush_cache()  # what is still on its way there
        # The tree's call also forgets what is known to be there, and tells nothing of success.
        if storage.clear() is True and scheduler.tree_cache.clear_storage_backend():
            return ""
        why = "it says no"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return f"HiCache's storage has not dropped what the old weights computed: {why}"
