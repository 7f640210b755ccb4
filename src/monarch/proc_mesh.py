"""Old import path; use `monarch.actor`."""

import warnings

from monarch.actor import HostMesh, ProcMesh, this_host, this_proc  # noqa: F401

warnings.warn("monarch.proc_mesh is deprecated; import from monarch.actor", DeprecationWarning, stacklevel=2)
