"""Geometry: slices of ranks, labelled shapes, extents and points, and value meshes.

Pure values: nothing here does I/O, starts a thread, or knows of actors, hosts or messages.
"""

from monarch.mesh.extent import Extent, MissingDimensionError, Point
from monarch.mesh.shape import Region, Shape, ShapeExt, iter_ranks
from monarch.mesh.slices import NDSlice, Slice
from monarch.mesh.trait import MeshTrait
from monarch.mesh.values import ValueMesh, merge_runs

__all__ = [
    "Extent",
    "MeshTrait",
    "MissingDimensionError",
    "NDSlice",
    "Point",
    "Region",
    "Shape",
    "ShapeExt",
    "Slice",
    "ValueMesh",
    "iter_ranks",
    "merge_runs",
]
