"""Alias of an import path that existing programs use; no logic."""

from monarch.mesh import Extent, MeshTrait, NDSlice, Shape, ShapeExt, Slice, iter_ranks
