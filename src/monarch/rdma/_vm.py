"""The kernel's door to another process's memory: `process_vm_readv`, `process_vm_writev`, and locks to pair with them.

One system call moves bytes straight between two address spaces: no help from the other interpreter, which may hold its
lock, be in C code or be stopped. The kernel allows it between processes of one user (Yama `ptrace_scope` 0, or
CAP_SYS_PTRACE); where it does not, calls fail with EPERM and the caller takes another rung. See process_vm_readv(2).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from array import array

_libc = ctypes.CDLL(None, use_errno=True)
AVAILABLE = (
    sys.platform == "linux"
    and hasattr(_libc, "process_vm_readv")
    and hasattr(os, "memfd_create")
    and struct.calcsize("P") == 8
)
#: the kernel moves at most this many ranges (IOV_MAX) and bytes (MAX_RW_COUNT) in one call
MAX_RANGES = 1024
MAX_BYTES = 0x7FFF_F000

if AVAILABLE:
    _readv, _writev = _libc.process_vm_readv, _libc.process_vm_writev
    for _f in (_readv, _writev):
        _f.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
        _f.restype = ctypes.c_ssize_t


def read(pid: int, local: array[int], remote: array[int]) -> int:
    """Fills the local ranges from the remote ones, in order; the number of bytes moved.

    Ranges are flat arrays of unsigned 64-bit words: address, length, address, length, ... Fewer bytes than asked for
    means that a remote range ends in memory that is not there. Raises OSError: ESRCH (no such process), EPERM (not
    allowed), EFAULT (not even the first page is there).
    """
    n = _readv(pid, local.buffer_info()[0], len(local) >> 1, remote.buffer_info()[0], len(remote) >> 1, 0)
    if n < 0:
        raise _error()
    return int(n)


def write(pid: int, local: array[int], remote: array[int]) -> int:
    """As `read`, the other way."""
    n = _writev(pid, local.buffer_info()[0], len(local) >> 1, remote.buffer_info()[0], len(remote) >> 1, 0)
    if n < 0:
        raise _error()
    return int(n)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def copy(dst: int, src: int, nbytes: int) -> None:
    """memcpy within this process; other threads run meanwhile."""
    ctypes.memmove(dst, src, nbytes)


_F_OFD_SETLK = 37
_F_RDLCK, _F_WRLCK, _F_UNLCK = 0, 1, 2
_FLOCK = struct.Struct("@hhqqi")


def lock(fd: int, at: int, *, exclusive: bool) -> bool:
    """Takes a lock on byte `at` of a file, for this open file description; False when somebody holds a rival one.

    The kernel lets go of it when the description is closed, however its process dies.
    """
    import fcntl

    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(_F_WRLCK if exclusive else _F_RDLCK, os.SEEK_SET, at, 1, 0))
    except BlockingIOError:
        return False
    except PermissionError:  # EACCES is the other name of "held by somebody"
        return False
    return True


def unlock(fd: int, at: int) -> None:
    import fcntl

    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(_F_UNLCK, os.SEEK_SET, at, 1, 0))
