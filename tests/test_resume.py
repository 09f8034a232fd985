"""Interrupting, saving, loading in a fresh process and going on is bit-identical to never having stopped."""

import random
import subprocess
import sys
from pathlib import Path

import torch
from conftest import METHODS, anneal_for, small_network, train

import mirrorquant as mq

STEPS = 60


def build(method):
    model = small_network()
    groups = mq.split(model, skip=["0.bias"])
    base = torch.optim.SGD(groups, lr=0.05, momentum=0.9) if method == "bc" else torch.optim.Adam(groups, lr=0.01)
    return model, mq.MirrorDescent(base, method=method, anneal=anneal_for(method))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def resume(folder):
    """The fresh process: goes on from every saved state to the end, and saves what comes out."""
    for file in sorted(folder.glob("*.pt")):
        saved = torch.load(file, weights_only=True)
        model, opt = build(saved["method"])
        torch.manual_seed(123)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        train(model, opt, STEPS - saved["step"], start=saved["step"])
        torch.save(weights(model), file.with_suffix(".end"))


def test_interrupting_at_random_steps_is_bit_exact(tmp_path):
    rng, whole, cases = random.Random(0), {}, []
    for method in METHODS:
        cases += [(method, step) for step in rng.sample(range(1, STEPS), 20)]
        model, opt = build(method)
        stops = sorted(step for name, step in cases if name == method)
        done = 0
        for step in [*stops, STEPS]:
            train(model, opt, step - done, start=done)
            done = step
            if step < STEPS:
                state = {"model": model.state_dict(), "optimizer": opt.state_dict(), "method": method, "step": step}
                torch.save(state, tmp_path / f"{method}@{step}.pt")
        whole[method] = weights(model)
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, timeout=300)
    ends = sorted(tmp_path.glob("*.end"))
    assert len(ends) == len(cases)
    for end in ends:
        assert torch.equal(torch.load(end, weights_only=True), whole[end.stem.split("@")[0]]), end.name


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
