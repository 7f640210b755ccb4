"""GPU memory: what the allocator should be set to. Imported only when a CUDA tensor is seen."""

from __future__ import annotations

import functools
import os
import warnings


@functools.lru_cache(maxsize=1)
def check_allocator() -> None:
    """Warns, once, unless the CUDA allocator uses expandable segments, which a NIC can register behind one key."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    if "expandable_segments:true" not in settings.replace(" ", "").lower():
        warnings.warn(
            "CUDA memory is allocated without expandable segments, which RDMA needs for full performance: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment before torch is imported",
            UserWarning,
            stacklevel=5,
        )
