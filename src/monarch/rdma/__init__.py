"""One-sided transfers: read and write memory of another process without its help.

    buffer = RDMABuffer(tensor.view(torch.uint8).flatten())   # in the owner; send it in any message
    await buffer.read_into(mine)                              # wherever it arrived

See `docs/guide/rdma.md`. Torch is not imported here: buffers over memoryviews and bytearrays work without it.
"""

from monarch.rdma._action import RDMAAction
from monarch.rdma._backends import (
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)
from monarch.rdma._buffer import RDMABuffer
from monarch.rdma._errors import (
    RDMABufferDroppedError,
    RDMAError,
    RDMAInitError,
    RDMAOwnerDiedError,
    RDMATimeoutError,
)
from monarch.rdma._slab import allocate, allocate_tensor

__all__ = [
    "RDMAAction",
    "RDMABuffer",
    "RDMABufferDroppedError",
    "RDMAError",
    "RDMAInitError",
    "RDMAOwnerDiedError",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMATimeoutError",
    "RDMAWriteTransferWarning",
    "allocate",
    "allocate_tensor",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
]
