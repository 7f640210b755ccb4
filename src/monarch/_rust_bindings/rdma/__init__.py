"""Where existing programs look for the error of a failed start."""

from monarch.rdma import RDMAInitError as RdmaInitError
