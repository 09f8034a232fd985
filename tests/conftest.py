"""What several tests share: a small network that has everything, and one schedule that suits each method."""

import os
import tempfile

import packed
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

import mirrorquant as mq

METHODS = [name for name in mq.methods.names() if name not in ("ref", "pq-levels")]  # those with fixed levels
torch.set_num_threads(1)

# A busy machine is no failure, and on CI every run tries the same examples.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("any-machine")

# torch keys its cache of compiled code without the processor's vectors, see mirrorquant.train.compiling.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(
        tempfile.gettempdir(), f"mirrorquant-inductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}"
    ),
)


def pytest_configure(config):
    """Most tests take a few steps of a few weights, which is hardly healthy; those of the warning ask for it."""
    config.addinivalue_line("filterwarnings", "ignore::mirrorquant.HealthWarning")


def anneal_for(method):
    return mq.schedules.ramp(0.001) if method == "pq" else mq.schedules.geometric(1.05, every=3)


def small_network(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 16, 3))


def batch(k, dtype=torch.float32):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(8, 2, 6, 6, generator=generator).to(dtype)
    return x, torch.randint(0, 3, (8,), generator=generator)


def train(model, opt, steps, start=0):
    for k in range(start, start + steps):
        x, y = batch(k, next(model.parameters()).dtype)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        opt.step()


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@pytest.fixture
def small_on_bits(request, monkeypatch):
    """Small layers on bits, too, and small networks compiled, except in tests that are marked ``by_default``."""
    if not request.node.get_closest_marker("by_default"):
        for module, name, value in packed.ALL_ON_BITS:
            monkeypatch.setattr(module, name, value)
