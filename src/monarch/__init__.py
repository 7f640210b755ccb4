"""monarch: actors in meshes, supervision, one-sided transfers and distributed tensors, from one script.

Names are looked up on first use: importing this package, or `monarch.actor`, does not import torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from monarch.version import __version__ as __version__

IN_PAR = False

#: name -> where it lives; "module:" for a module itself
_HOMES = {
    "Extent": "monarch.mesh:Extent",
    "NDSlice": "monarch.mesh:NDSlice",
    "RemoteProcessGroup": "monarch.tensor:RemoteProcessGroup",
    "Shape": "monarch.mesh:Shape",
    "Stream": "monarch.tensor:Stream",
    "Tensor": "monarch.tensor:Tensor",
    "call_on_shard_and_fetch": "monarch.tensor:call_on_shard_and_fetch",
    "clear_runtime_config": "monarch.config:clear_runtime_config",
    "configure": "monarch.config:configure",
    "configured": "monarch.config:configured",
    "function_resolvers": "monarch.tensor.functions:resolvers",
    "fetch_shard": "monarch.tensor:fetch_shard",
    "get_active_mesh": "monarch.tensor:get_active_mesh",
    "get_active_stream": "monarch.tensor:get_active_stream",
    "get_global_config": "monarch.config:get_global_config",
    "get_runtime_config": "monarch.config:get_runtime_config",
    "inspect": "monarch.tensor:inspect",
    "no_mesh": "monarch.tensor:no_mesh",
    "reduce": "monarch.tensor:reduce",
    "reduce_": "monarch.tensor:reduce_",
    "remote": "monarch.tensor:remote",
    "show": "monarch.tensor:show",
    "slice_mesh": "monarch.tensor:slice_mesh",
    "to_mesh": "monarch.tensor:to_mesh",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'monarch' has no attribute {name!r}")
    module, _, attribute = home.partition(":")
    found = importlib.import_module(module)
    value = getattr(found, attribute) if attribute else found
    setattr(sys.modules[__name__], name, value)
    return value


class _Package(types.ModuleType):
    """Importing a submodule sets it as an attribute; a name of `__all__` keeps its meaning all the same."""

    def __setattr__(self, name: str, value: Any) -> None:
        home = _HOMES.get(name)
        if home is not None and not home.endswith(":") and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
