"""Alias of an import path that existing programs use; no logic."""

from monarch.mesh import Extent, Point, Region, Shape, Slice
