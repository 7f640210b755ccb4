"""monarch: actors in meshes, supervision, one-sided transfers and distributed tensors, from one script."""

from monarch.mesh import Extent, NDSlice, Shape
from monarch.version import __version__

__all__ = ["Extent", "NDSlice", "Shape", "__version__"]
