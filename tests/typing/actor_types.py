"""What a type checker must infer for users' programs. Checked by `make lint`; never run."""

from typing_extensions import assert_type

from monarch.actor import (
    Accumulator,
    Actor,
    Channel,
    Future,
    Port,
    PortReceiver,
    ValueMesh,
    concurrent_endpoint,
    endpoint,
    this_host,
)


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.n = start

    @endpoint
    async def value(self) -> int:
        return self.n

    @endpoint
    async def add(self, by: int, *, times: int = 1) -> str:
        return "done"

    @endpoint(instrument=False)
    async def quiet(self) -> float:
        return 1.0

    @endpoint(explicit_response_port=True)
    async def later(self, port: Port[bytes], n: int) -> None: ...

    @concurrent_endpoint
    async def overlapping(self, x: str) -> list[str]:
        return [x]


class Plain(Actor):
    @endpoint
    def both(self, a: int, b: str) -> tuple[int, str]:
        return a, b


async def program() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    v = procs.spawn("v", Counter, 1)
    assert_type(v, Counter)
    assert_type(await v.value.choose(), int)
    assert_type(await v.value.call_one(), int)
    assert_type(v.value.call(), Future[ValueMesh[int]])
    assert_type((await v.add.call(1, times=2)).values(), list[str])
    assert_type(await v.quiet.call_one(), float)
    assert_type(await v.later.call_one(3), bytes)
    assert_type(await v.overlapping.call_one("x"), list[str])
    assert_type(v.slice(gpus=0), Counter)
    for f in v.value.stream():
        assert_type(f.get(timeout=1), int)
    p = procs.spawn("p", Plain)
    assert_type(p.both.call_one(1, "x").get(), tuple[int, str])
    assert_type(await Accumulator(v.value, 0.0, lambda acc, x: acc + x).accumulate(), float)
    port, receiver = Channel[int].open()
    assert_type(port, Port[int])
    assert_type(receiver, PortReceiver[int])
    assert_type(await receiver.recv(), int)

    v.add.call("not an int")  # type: ignore[arg-type]
    v.value.call(1)  # type: ignore[call-arg]
