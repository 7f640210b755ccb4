"""Optimisers and data-parallel training: the same numbers as one process computes."""

import pytest
import torch

import monarch


def two_layers():
    return torch.nn.Sequential(
        *(torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    ],
    ids=["sgd", "adam", "adamw", "fused"],
)
def test_optimisers_step_as_in_one_process(pair, make):
    start = torch.linspace(-1, 1, 12).reshape(3, 4)
    local = torch.nn.Parameter(start.clone())
    with pair.activate():
        there = torch.nn.Parameter(torch.tensor(start.tolist()))

    def train(p):
        optimizer = make([p])
        for _ in range(3):
            optimizer.zero_grad()
            (p * p).sum().backward()
            optimizer.step()

    train(local)
    with pair.activate():
        train(there)
    torch.testing.assert_close(monarch.inspect(there.detach(), gpus=1), local.detach())


def test_data_parallel_training_equals_training_in_one_process(pair):
    torch.manual_seed(0)
    local = two_layers()
    x = torch.randn(4, 5, 32)
    weights = {k: v.clone() for k, v in local.state_dict().items()}
    optimizer = torch.optim.SGD(local.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        local(x).square().mean().backward()
        optimizer.step()
    with pair.activate():
        model = two_layers()
        model.load_state_dict({k: torch.tensor(v.tolist()) for k, v in weights.items()})
        both = torch.tensor(x.tolist()).reshape(2, 2, 5, 32)
        mine = both.index_select(0, pair.rank_tensor("gpus").reshape(1)).squeeze(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(10):
            optimizer.zero_grad()
            model(mine).square().mean().backward()
            for p in model.parameters():
                p.grad.reduce_("gpus", "avg")
            optimizer.step()
    for there, here in zip(model.parameters(), local.parameters()):
        torch.testing.assert_close(monarch.inspect(there.detach(), gpus=1), here.detach(), rtol=1e-3, atol=1e-5)
