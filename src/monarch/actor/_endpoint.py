"""Endpoints: the decorators, what `mesh.method` is, and the adverbs that send messages."""

from __future__ import annotations

import functools
import inspect
import pickle
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, Union, overload

from monarch.actor import _values
from monarch.runtime import client
from monarch.runtime.calls import ManyCall, OneCall, StreamCall, ended, gone
from monarch.runtime.cell import SURELY_FITS, check_size
from monarch.runtime.client import current_here, current_host, current_node
from monarch.runtime.errors import SupervisionError
from monarch.runtime.failure import death_report
from monarch.runtime.future import Future
from monarch.runtime.node import NodeDown
from monarch.runtime.ports import Port, link_ports
from monarch.wire import pickling
from monarch.wire.frames import CALL, Frame

if TYPE_CHECKING:
    from monarch.actor._mesh import ActorMesh
    from monarch.mesh import Extent, ValueMesh

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
Selection = Literal["all", "choose"]
Propagator = Union[None, Literal["cached", "inspect", "mocked"], Callable[..., Any]]


class EndpointProperty(Generic[P, R]):
    """What the decorators leave in the class. On a mesh of that class, the attribute is an `Endpoint`."""

    def __init__(
        self,
        method: Callable[..., Any],
        propagator: Propagator = None,
        explicit_response_port: bool = False,
        instrument: bool = True,
        *,
        concurrent: bool = False,
    ) -> None:
        self._method = method
        self._propagator = propagator
        self._explicit_response_port = explicit_response_port or concurrent
        self._instrument = instrument
        self._concurrent = concurrent
        self._returning = concurrent and not explicit_response_port
        functools.update_wrapper(self, method, updated=())
        if getattr(method, "__isabstractmethod__", False):
            self.__isabstractmethod__ = True

    def __get__(self, instance: Any, owner: Any) -> Endpoint[P, R]:
        return self  # type: ignore[return-value]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self._method, "__name__", "?")
        raise TypeError(
            f"'EndpointProperty' object is not callable: {name}() is an endpoint and runs by messages. Inside the "
            f"actor put shared code in a plain helper method; from outside use mesh.{name}.call_one(...)."
        )

    @property
    def has_explicit_port(self) -> bool:
        """The method itself takes a response port."""
        return self._explicit_response_port and not self._returning


def _check_propagate(propagate: Any) -> None:
    if propagate not in (None, "cached", "inspect", "mocked") and not callable(propagate):
        raise ValueError(f"propagate={propagate!r}: expected None, 'cached', 'inspect', 'mocked' or a function")


class _Decorator(Protocol):
    """What `endpoint(...)` with options gives: takes the method of a plain endpoint."""

    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> EndpointProperty[P, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R]) -> EndpointProperty[P, R]: ...


class _PortedDecorator(Protocol):
    """The same with `explicit_response_port=True`: the result's type is what the port takes."""

    def __call__(self, method: Callable[Concatenate[Any, Port[R], P], Any]) -> EndpointProperty[P, R]: ...


@overload
def endpoint(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    method: Callable[Concatenate[Any, P], R],
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> _PortedDecorator: ...
@overload
def endpoint(
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> _Decorator: ...
def endpoint(
    method: Any = None,
    *,
    propagate: Propagator = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Makes a method of an Actor callable by messages.

    `propagate`: how `rref` finds output shapes (None, "cached", "inspect", "mocked" or a function of the arguments).
    `explicit_response_port`: the method is `(self, port, *args)` and answers by `port.send(...)`, whenever it wants.
    `instrument`: wrap each invocation in a trace span.
    """
    _check_propagate(propagate)
    if method is None:
        decorate: Any = endpoint
        return lambda m: decorate(
            m, propagate=propagate, explicit_response_port=explicit_response_port, instrument=instrument
        )
    if isinstance(method, EndpointProperty):
        raise ValueError("endpoint does not wrap another endpoint: use one decorator")
    if not callable(method):
        raise TypeError(f"endpoint wraps a method, not {type(method).__name__}")
    return EndpointProperty(method, propagate, explicit_response_port, instrument)


@overload
def concurrent_endpoint(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> EndpointProperty[P, R]: ...
@overload
def concurrent_endpoint(
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[True],
    instrument: bool = True,
) -> _PortedDecorator: ...
@overload
def concurrent_endpoint(
    *,
    propagate: Propagator = None,
    explicit_response_port: Literal[False] = False,
    instrument: bool = True,
) -> _Decorator: ...
def concurrent_endpoint(
    method: Any = None,
    *,
    propagate: Propagator = None,
    explicit_response_port: bool = False,
    instrument: bool = True,
) -> Any:
    """Like `endpoint`, but the (async) body runs as a task and the actor takes its next message at once.

    ValueError when the method is not `async def`, or already an endpoint.
    """
    _check_propagate(propagate)
    if method is None:
        decorate: Any = concurrent_endpoint
        return lambda m: decorate(
            m, propagate=propagate, explicit_response_port=explicit_response_port, instrument=instrument
        )
    if isinstance(method, EndpointProperty):
        raise ValueError("concurrent_endpoint does not wrap @endpoint: use one of the two decorators")
    if not inspect.iscoroutinefunction(method):
        raise ValueError("concurrent_endpoint can only wrap async endpoints: declare the method with async def")
    return EndpointProperty(method, propagate, explicit_response_port, instrument, concurrent=True)


class NotAnEndpoint:
    """A plain method looked up on a mesh: it cannot be called remotely without `as_endpoint`."""

    def __init__(self, mesh: ActorMesh[Any], name: str) -> None:
        self._mesh = mesh
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"Actor {self._mesh._class.__name__}.{self._name} is not annotated as an endpoint. To call it as one, add "
            f"the @endpoint decorator, or wrap it: as_endpoint(mesh.{self._name}).call_one(...)"
        )


@functools.lru_cache(maxsize=4096)
def _signature(method: Callable[..., Any], skip: int) -> inspect.Signature | None:
    try:
        sig = inspect.signature(method)
    except (TypeError, ValueError):
        return None
    return sig.replace(parameters=list(sig.parameters.values())[skip:])


@functools.lru_cache(maxsize=4096)
def _simple_arity(method: Callable[..., Any], skip: int) -> tuple[int, int] | None:
    """(least, most) positional arguments when positional calls need no full binding, else None."""
    sig = _signature(method, skip)
    if sig is None:
        return (0, 1 << 30)
    least = most = 0
    for p in sig.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            most = 1 << 30
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            most += 1
            if p.default is p.empty:
                least += 1
        elif p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            return None
    return least, most


class Endpoint(Generic[P, R]):
    """`mesh.method`: sends messages to the actors of the mesh. Not callable itself; use an adverb."""

    __slots__ = ("_mesh", "_meta", "_meta_host", "_method", "_mode", "_name", "_property", "_skip")

    def __init__(
        self,
        mesh: ActorMesh[Any],
        name: str,
        method: Callable[..., Any],
        *,
        explicit: bool,
        mode: int = 0,
        bound: int = 1,
        property: EndpointProperty[Any, Any] | None = None,
    ) -> None:
        self._mesh = mesh
        self._name = name
        self._method = method
        self._skip = bound + (1 if explicit else 0)
        self._mode = mode
        self._meta: bytes | None = None
        self._property = property

    # -- adverbs

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Every actor; the future gives a ValueMesh of the results when all answered.

        Raises TypeError here for arguments that do not fit. The future raises the ActorError of the lowest rank that
        failed, or SupervisionError as soon as a target is known to be dead.
        """
        if client.has_ended():
            return self._refused(args, kwargs)
        parts = self._encode(args, kwargs)
        mesh = self._mesh
        node = current_node()
        ranks = mesh._node_ranks()
        shape = mesh._result_shape()
        port = ManyCall(node, ranks, mesh._display_of, self._label(), lambda frames: _values.collect(shape, frames))
        now = current_here()
        if now.cell.id == mesh._id and node.id in ranks:
            port.future._self_call = now
        self._cast(node, ranks, parts, port.ident, port)
        return port.future

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """The only actor of the mesh. ValueError when the mesh has another size than 1."""
        mesh = self._mesh
        if mesh._count != 1:
            raise ValueError(
                f"call_one requires exactly 1 actor, but mesh has {mesh._count}; slice the mesh, or use call()"
            )
        return self._send_one(args, kwargs, 0)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """One actor, picked uniformly at random. SupervisionError when any of them is known to be dead, as with `call`:
        choose from a slice of the healthy ones."""
        dead = self._mesh._known_dead()
        return self._send_one(args, kwargs, random.randrange(self._mesh._count) if dead is None else dead)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Every actor; yields one future per actor, which complete in the order of the answers."""
        if client.has_ended():
            return iter([self._refused(args, kwargs) for _ in range(self._mesh._count)])
        parts = self._encode(args, kwargs)
        mesh = self._mesh
        node = current_node()
        ranks = mesh._node_ranks()
        port = StreamCall(node, ranks, mesh._display_of, self._label())
        self._cast(node, ranks, parts, port.ident, port)
        return iter([port.next_future() for _ in ranks])

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Every actor, without an answer. An exception in the endpoint fails the actor and its owner is told."""
        if client.has_ended():
            return self._check(args, kwargs)
        parts = self._encode(args, kwargs)
        mesh = self._mesh
        node = current_node()
        if mesh._count == 1:
            target, _, host = mesh._target(0)
            frame = Frame(CALL, target, node.id, mesh._id, parts, sender=current_here().cell.id)
            try:
                node.send(frame, host)
            except NodeDown:
                pass  # the owner was told; a broadcast never raises for remote reasons
            return
        self._cast(node, mesh._node_ranks(), parts, 0, None)

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Distributed tensors of the results; needs the tensor engine."""
        raise RuntimeError("rref() needs the tensor engine, which this installation does not include")

    # -- how

    def _label(self) -> str:
        return f"{self._mesh._mesh_name}.{self._name}()"

    def _check(self, args: Any, kwargs: Any) -> None:
        """TypeError for arguments that do not fit the method, before anything is sent."""
        if not kwargs:
            arity = _simple_arity(self._method, self._skip)
            if arity is not None and arity[0] <= len(args) <= arity[1]:
                return
        sig = _signature(self._method, self._skip)
        if sig is not None:
            try:
                sig.bind(*args, **kwargs)
            except TypeError as e:
                raise TypeError(f"{self._mesh._class.__name__}.{self._name}{sig}: {e}") from None

    def _encode(self, args: Any, kwargs: Any, index: int | None = None) -> tuple[Any, ...]:
        """The parts of a call to all actors, or to the one at `index`."""
        self._check(args, kwargs)
        meta = self._meta
        if meta is None:
            mesh = self._mesh
            labels, sizes = mesh._view_dims()
            meta = self._meta = pickling.dump_bytes((self._name, labels, sizes, self._mode, tuple(current_host())))
        payload = dump_call(args, kwargs, self._name)
        if payload.nbytes > SURELY_FITS:
            check_size(payload, current_here().cell, self._label())
        if payload.passengers:
            mesh = self._mesh
            nodes = mesh._node_ranks() if index is None else [mesh._target(index)[0]]
            link_ports(payload.passengers, [(node, mesh._id) for node in nodes], mesh._host_of)
        return (meta, payload.stream(), *payload.buffers)

    def _refused(self, args: Any, kwargs: Any) -> Future[Any]:
        self._check(args, kwargs)
        out: Future[Any] = Future._make()
        out._settle(error=ended("the client was shut down", self._label()))
        return out

    def _send_one(self, args: Any, kwargs: Any, index: int) -> Future[Any]:
        if client.has_ended():
            return self._refused(args, kwargs)
        parts = self._encode(args, kwargs, index)
        mesh = self._mesh
        node = current_node()
        target, rank, host = mesh._target(index)
        exit = node.exit_of(target, host)
        label = f"{mesh._mesh_name}.{self._name}()"
        port = OneCall(node, target, mesh._display_of, label)
        if exit is None:
            now = current_here()
            if now.cell.id == mesh._id and target == node.id:
                port.future._self_call = now
            frame = Frame(CALL, target, node.id, mesh._id, parts, rank=rank, reply=port.ident, sender=now.cell.id)
            try:
                node.send(frame, host)
                return port.future
            except NodeDown as e:
                exit = e.exit
        node.close_port(port.ident)
        port.future._settle(error=gone(mesh._exit(target, exit), mesh._display_of(target), label))
        return port.future

    def _cast(self, node: Any, ranks: dict[int, int], parts: Any, reply: int, port: Any) -> None:
        mesh = self._mesh
        template = Frame(CALL, 0, node.id, mesh._id, parts, reply=reply, sender=current_here().cell.id)
        for target, exit in node.cast(list(ranks.items()), template, mesh._host_of):
            if port is not None:
                port.node_down(target, mesh._exit(target, exit))

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle an endpoint: send the mesh, and look the endpoint up there")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"'{type(self).__name__}' object is not callable: use an adverb, for example "
            f"mesh.{self._name}.call_one(...), .call(...), .choose(...), .stream(...) or .broadcast(...)"
        )

    def __repr__(self) -> str:
        return f"<endpoint {self._label()}>"


def dump_call(args: Any, kwargs: Any, what: str) -> pickling.Payload:
    """Pickles arguments; on failure the original exception names the argument that refused, in a note."""
    try:
        return pickling.dumps((args, kwargs))
    except Exception as e:
        for i, arg in enumerate(args):
            path = _refusing(arg, f"argument {i}")
            if path:
                _note(e, f"{path} of {what}() cannot be sent in a message")
        for key, arg in kwargs.items():
            path = _refusing(arg, f"argument {key!r}")
            if path:
                _note(e, f"{path} of {what}() cannot be sent in a message")
        raise


def _refusing(arg: Any, name: str) -> str:
    try:
        pickling.dumps(arg)
    except Exception:
        return pickling.explain_failure(arg, name)
    return ""


def _note(e: BaseException, text: str) -> None:
    if hasattr(e, "add_note"):
        e.add_note(text)
    elif type(e) in (TypeError, ValueError, AttributeError, pickle.PicklingError) and e.args:  # Python 3.10
        e.args = (f"{e.args[0]}\n{text}", *e.args[1:])


def as_endpoint(
    not_an_endpoint: Any, *, propagate: Propagator = None, explicit_response_port: bool = False
) -> Endpoint[Any, Any]:
    """Treats an undecorated method of a spawned actor as an endpoint: `as_endpoint(mesh.helper).call_one(5)`."""
    if not isinstance(not_an_endpoint, NotAnEndpoint):
        raise ValueError("expected an method of a spawned actor, such as as_endpoint(mesh.some_plain_method)")
    mesh, name = not_an_endpoint._mesh, not_an_endpoint._name
    attr = inspect.getattr_static(mesh._class, name)
    static = isinstance(attr, staticmethod)
    method = attr.__func__ if isinstance(attr, (staticmethod, classmethod)) else attr
    if not callable(method):
        method = lambda self, *args, **kwargs: None
    return Endpoint(
        mesh, name, method, explicit=explicit_response_port, mode=2 if explicit_response_port else 1,
        bound=0 if static else 1,
    )  # fmt: skip


def send(
    endpoint: Endpoint[Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[Any] | None = None,
    selection: Selection = "all",
) -> None:
    """Like `broadcast` ("all") or `choose` ("choose"); replies, tagged with their rank, go to `port`."""
    if selection not in ("all", "choose"):
        raise ValueError(f"Invalid selection: {selection!r}; expected 'all' or 'choose'")
    to_workers = getattr(endpoint, "_send", None)  # a remote function of the tensor engine
    if to_workers is not None:
        to_workers(tuple(args), dict(kwargs), port, selection)
        return
    mesh = endpoint._mesh
    parts = endpoint._encode(tuple(args), dict(kwargs))
    node = current_node()
    reply = 0
    relay: _Relay | None = None
    if port is not None:
        reply_here = port._node == node.id
        if reply_here:
            reply = port._id
        else:
            relay = _Relay(port, mesh._count)
            reply = relay.ident = node.open_port(relay)
    ranks = mesh._node_ranks()
    if selection == "choose":
        target, rank, _ = mesh._target(random.randrange(mesh._count))
        ranks = {target: rank}
    template = Frame(CALL, 0, node.id, mesh._id, parts, reply=reply, sender=current_here().cell.id)
    for target, exit in node.cast(list(ranks.items()), template, mesh._host_of):
        if port is not None:
            report = death_report(mesh._display_of(target), exit.describe())
            port.exception(SupervisionError(report, endpoint._label()))


class _Relay(_values.Sink):
    """Passes replies on to a port that lives in another process."""

    def __init__(self, port: Port[Any], count: int) -> None:
        self.port, self.left, self.ident = port, count, 0

    def deliver(self, frame: Frame) -> None:
        node = current_node()
        self.left -= 1
        if self.left == 0:
            node.close_port(self.ident)
        out = Frame(
            frame.kind, self.port._node, node.id, self.port._id, frame.parts, flags=frame.flags, rank=frame.rank
        )
        try:
            node.send(out, self.port._host)
        except NodeDown:
            pass


class Accumulator(Generic[P, R, A]):
    """Folds the answers of every actor into one value, as they arrive.

    `endpoint`: what to call; `identity`: where the fold starts; `combine(acc, value)`: one step.
    """

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Calls the endpoint on every actor now; the future folds the answers when first observed."""
        from monarch.actor._returns_future import returns_future

        stream = self._endpoint.stream(*args, **kwargs)
        identity, combine = self._identity, self._combine

        async def fold() -> A:
            acc = identity
            for future in stream:
                acc = combine(acc, await future)
            return acc

        future: Future[A] = returns_future(fold)()
        return future


def has_endpoints(cls: type) -> dict[str, EndpointProperty[Any, Any]]:
    """The endpoints of an actor class, inherited ones included, by name."""
    found: dict[str, EndpointProperty[Any, Any]] = {}
    for base in reversed(cls.__mro__):
        for name, attr in vars(base).items():
            if isinstance(attr, EndpointProperty):
                found[name] = attr
            else:
                found.pop(name, None)
    return found


_unused: tuple[Any, ...] = (Awaitable,)
if TYPE_CHECKING:
    _extent: Extent
