"""Which backends this process has, and the warnings that go with them."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

from monarch.config import store

_SYSFS = "/sys/class/infiniband"


class RDMATcpFallbackWarning(Warning):
    """There is no RDMA NIC here: transfers to other hosts go over sockets."""


class RDMAReadTransferWarning(Warning):
    """Kept for programs that filter it; not emitted."""


class RDMAWriteTransferWarning(Warning):
    """Kept for programs that filter it; not emitted."""


@functools.lru_cache(maxsize=1)
def is_ibverbs_available() -> bool:
    """True when this machine has an RDMA NIC (InfiniBand, RoCE or EFA), whatever the configuration says of it."""
    try:
        return bool(os.listdir(_SYSFS))
    except OSError:
        return False


def get_rdma_backend() -> str:
    """ "ibverbs" when there is a NIC and `rdma_disable_ibverbs` is off, else "tcp" when `rdma_allow_tcp_fallback` is
    on, else "none". Processes of one host reach each other by better paths than either: see `RDMABuffer.path`."""
    if is_ibverbs_available() and not store.effective("rdma_disable_ibverbs"):
        return "ibverbs"
    return "tcp" if store.effective("rdma_allow_tcp_fallback") else "none"


def is_rdma_available() -> bool:
    """True when memory can be transferred without help of the owner's actors, by whatever path.

    Deprecated: `is_ibverbs_available` asks for hardware, `get_rdma_backend` for what is used.
    """
    warnings.warn(
        "is_rdma_available() is deprecated: use is_ibverbs_available() or get_rdma_backend()",
        DeprecationWarning,
        stacklevel=2,
    )
    return get_rdma_backend() != "none"


def before_register(data: Any) -> None:
    """What is said and refused before a buffer is looked at."""
    torch: Any = sys.modules.get("torch")
    tensor_type: Any = getattr(torch, "Tensor", ())
    if isinstance(data, tensor_type) and data.device.type == "cuda":
        from monarch.rdma import _cuda

        _cuda.check_allocator()
    backend = get_rdma_backend()
    if backend == "none":
        raise RuntimeError(
            "Tried to create an RDMABuffer, but RDMA is not available on this platform: there is no RDMA NIC, and "
            "sockets are turned off. Turn them on: monarch.configure(rdma_allow_tcp_fallback=True)"
        )
    if backend == "tcp":
        warnings.warn(
            "there is no RDMA NIC here: buffers are reached through the kernel on this host, over TCP from other hosts",
            RDMATcpFallbackWarning,
            stacklevel=3,
        )


for _kind in (RDMATcpFallbackWarning, RDMAReadTransferWarning, RDMAWriteTransferWarning):
    warnings.simplefilter("once", _kind, append=True)  # what the user set comes first
