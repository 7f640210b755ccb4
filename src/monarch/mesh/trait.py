"""`MeshTrait`: slicing, reshaping and measuring for anything that is laid out over labelled ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from monarch.mesh.extent import Extent
from monarch.mesh.shape import Shape, ShapeExt
from monarch.mesh.slices import Slice, row_major_strides

if TYPE_CHECKING:
    from builtins import slice as slice_  # MeshTrait.slice hides the builtin within the class

_M = TypeVar("_M", bound="MeshTrait")
_T = TypeVar("_T")


class _Computed(Generic[_T]):
    """A property without a setter slot, so that assigning to the instance hides it.

    User actors subclass `MeshTrait` and may well set `self.sizes`; a `property` would refuse that.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, mesh: None, owner: type) -> _Computed[_T]: ...
    @overload
    def __get__(self, mesh: object, owner: type | None = None) -> _T: ...
    def __get__(self, mesh: object | None, owner: type | None = None) -> _T | _Computed[_T]:
        return self if mesh is None else self._compute(mesh)


class MeshTrait(ABC):
    """Elements laid out over labelled dimensions.

    Subclasses say which ranks they hold, and make the same kind of mesh over others.
    """

    @property
    @abstractmethod
    def _ndslice(self) -> Slice:
        """The ranks of this mesh."""

    @property
    @abstractmethod
    def _labels(self) -> Sequence[str]:
        """Names of the dimensions of `_ndslice`."""

    @abstractmethod
    def _new_with_shape(self: _M, shape: Shape) -> _M:
        """A mesh of the same elements over other labels, dimensions or fewer of its ranks."""

    def slice(self: _M, **dims: int | slice_) -> _M:
        """Part of the mesh: `mesh.slice(hosts=0, gpus=slice(0, 4))`.

        An integer picks one index and drops the dimension; a `slice` keeps it, bounds as for a list.

        Raises:
            TypeError: the mesh has no such dimension.
            IndexError: an integer is negative or beyond its dimension.
            ValueError: a `slice` selects nothing, or its step is not positive.
        """
        if not dims:
            return self
        return self._new_with_shape(ShapeExt.slice(Shape(self._labels, self._ndslice), **dims))

    def split(self: _M, **kwargs: Sequence[str] | int) -> _M:
        """The mesh with dimensions split: `mesh.split(workers=("row", "col"), col=2)`.

        Args:
            **kwargs: for an existing dimension, the names it becomes, outermost first; for a new name, its
                size. At most one size per split dimension may be left out, and is inferred.

        Raises:
            ValueError: the sizes do not fit or are unknown, a name repeats or does not exist, names are given
                as one string, or a size is not used.
        """
        names, sizes = self._split_arguments(kwargs)
        unused = dict(sizes)
        new_labels: list[str] = []
        new_sizes: list[int] = []
        new_strides: list[int] = []
        ndslice = self._ndslice
        for label, n, stride in zip(self._labels, ndslice.sizes, ndslice.strides):
            parts = names.get(label)
            if parts is None:
                parts, part_sizes = (label,), [n]
            else:
                part_sizes = _fit(label, n, parts, sizes)
            for part in parts:
                unused.pop(part, None)
            new_labels += parts
            new_sizes += part_sizes
            new_strides += [stride * inner for inner in row_major_strides(part_sizes)]
        if unused:
            raise ValueError(f"unused size constraints: {unused}")
        shape = Slice(offset=ndslice.offset, sizes=new_sizes, strides=new_strides)
        return self._new_with_shape(Shape(new_labels, shape))

    def _split_arguments(
        self, kwargs: dict[str, Sequence[str] | int]
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
        names: dict[str, tuple[str, ...]] = {}
        sizes: dict[str, int] = {}
        for key, value in kwargs.items():
            if key not in self._labels:
                if not isinstance(value, int):
                    raise ValueError(
                        f"{key!r} is not an existing dim (they are {list(self._labels)}); "
                        f"expected an integer size for a new dim, got {value!r}"
                    )
                if value < 1:
                    raise ValueError(f"size of {key!r} must be positive, not {value}")
                sizes[key] = value
            elif isinstance(value, (str, int)) or not all(isinstance(name, str) for name in value):
                raise ValueError(f"expected a sequence of names to split {key!r} into, got {value!r}")
            else:
                names[key] = tuple(value)
        return names, sizes

    def rename(self: _M, **names: str) -> _M:
        """The mesh with other dimension names: `mesh.rename(host="dp")`; names may be swapped.

        Raises:
            ValueError: no such dimension, or a name would repeat.
        """
        return self.split(**{old: (new,) for old, new in names.items()})

    def flatten(self: _M, name: str) -> _M:
        """The mesh with one dimension over all its elements, in row-major order.

        Raises:
            ValueError: the elements are neither dense nor evenly spaced along a single dimension.
        """
        ndslice = self._ndslice
        # Dimensions of one element do not matter for where the elements lie.
        wide = [(n, stride) for n, stride in zip(ndslice.sizes, ndslice.strides) if n != 1]
        sizes = [n for n, _ in wide]
        if len(wide) == 1:
            stride = wide[0][1]
        elif tuple(s for _, s in wide) == row_major_strides(sizes):
            stride = 1
        else:
            raise ValueError(f"cannot flatten sparse mesh: {ndslice!r} is not dense in row-major order")
        flat = Slice(offset=ndslice.offset, sizes=[math.prod(sizes)], strides=[stride])
        return self._new_with_shape(Shape([name], flat))

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Number of elements in all, along a dimension, or of several (product); KeyError if unknown."""
        if dim is None:
            return len(self._ndslice)
        if not isinstance(dim, str):
            return math.prod(self.size(d) for d in dim)
        if dim not in self._labels:
            raise KeyError(f"mesh does not have dimension {dim!r}; it has {list(self._labels)}")
        return self._ndslice.sizes[list(self._labels).index(dim)]

    @_Computed
    def sizes(self) -> dict[str, int]:
        """Size of each dimension by its label, in order."""
        return dict(zip(self._labels, self._ndslice.sizes))

    @_Computed
    def extent(self) -> Extent:
        """Labels and sizes of the mesh."""
        return Extent(self._labels, self._ndslice.sizes)

    def __len__(self) -> int:
        return len(self._ndslice)


def _fit(label: str, n: int, parts: tuple[str, ...], sizes: dict[str, int]) -> list[int]:
    """Sizes for the parts a dimension of size `n` is split into, at most one of them inferred."""
    unknown = [part for part in parts if part not in sizes]
    if len(unknown) > 1:
        raise ValueError(
            f"cannot infer the sizes of {unknown} in {label}={parts!r}: "
            f"specify all but one as arguments, e.g. {unknown[0]}=2"
        )
    inferred, remainder = divmod(n, math.prod(sizes.get(part, 1) for part in parts))
    if remainder or (not unknown and inferred != 1):
        known = tuple(sizes.get(part, "?") for part in parts)
        raise ValueError(f"Dimension {label!r} of size {n} is not evenly divided by {parts!r} with sizes {known!r}")
    return [sizes.get(part, inferred) for part in parts]
