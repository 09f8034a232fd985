"""Changed packed files: each must be rejected in one line, or be consistent, and none may take much memory.

    python tests/fuzz_files.py [COUNT] [SEED] [EVERY]

Half of the files are damaged and must be rejected for their digest; the others are forged, with a matching digest.
One file in EVERY also goes through the command line. The memory of the process is limited to 1 GB above what it has
after a few hundred files. Prints the outcomes as JSON.
"""

import collections
import io
import json
import resource
import socket
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from packed import damaged, forged, generator, images, network, on_levels, same_state
from torch import nn

import mirrorquant as mq
from mirrorquant.cli import main as command
from mirrorquant.packing import PackError, file

MEMORY = 1 << 30


def small():
    """Everything that a file can hold, in little space."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    model = on_levels(nn.Sequential(*layers, nn.Linear(3, 2)))
    with torch.no_grad():
        model[0].weight.mul_(torch.tensor([0.5, 1.0, 2.0, 3.0]).reshape(4, 1, 1, 1))
        model[4].weight.copy_(mq.TERNARY.nearest(torch.randn(3, 16)))
        model[5].weight.copy_(torch.randn(2, 3))
    return model


ABOUT = {"data": "digits", "shape": [1, 8, 8], "classes": 10, "note": {"accuracy": [98.6]}}
ORIGINALS = [
    (model, file.dump(model, ABOUT), x)
    for model, x in ((small(), torch.ones(2, 1, 4, 4)), (network("digitsnet"), images("digitsnet", 2)))
]


def changed(seed):
    """A model, its file with a change, an input, and whether the digest fits."""
    rng = generator(seed)
    original, content, x = rng.choice(ORIGINALS)
    fits = rng.random() < 0.5
    return original, content, (forged if fits else damaged)(content, rng), x, fits


def outcome(seed, path):
    """The outcome for a changed file: refused, the same model, or another model that a forger sealed."""
    original, content, found, x, fits = changed(seed)
    path.write_bytes(found)
    loaded, told = None, ""
    try:
        loaded = mq.load(path, None if mq.models.identify(original) else original)
    except PackError as error:
        told = str(error)
    if loaded is None:
        assert told.startswith(str(path)), told
        assert told.isprintable(), told
        return "refused"
    assert fits or found == content, "an altered file was loaded"
    plain = mq.unpack(loaded)
    mq.save(loaded, path)  # what was loaded can be saved, and comes back
    assert mq.load(path, None if mq.models.identify(original) else original).about == loaded.about
    if same_state(plain, original):
        return "the same model"
    with torch.no_grad():
        y, expected = loaded(x), plain.eval()(x)
    assert y.shape == expected.shape
    if all(bool((t.abs() < 1e6).all()) for t in (expected, *plain.state_dict().values())):
        torch.testing.assert_close(y.double(), expected.double(), rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    return "another model, sealed as such"


def by_command(seed, path):
    """The exit codes of summary, eval and export for a changed file."""
    path.write_bytes(changed(seed)[2])
    codes = []
    onnx = str(path.with_suffix(".onnx"))
    for arguments in (["summary"], ["summary", "--json"], ["eval"], ["export", "--to", "onnx", "-o", onnx]):
        out, problem = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(problem):
            codes.append(command([arguments[0], str(path), *arguments[1:]]))
        assert codes[-1] in (0, 1), arguments
        lines = problem.getvalue().splitlines()
        assert len(lines) == codes[-1], (arguments, lines)
        assert all(line.isprintable() for line in [*lines, *out.getvalue().split("\n")]), (arguments, lines)
    return "summary {}, eval {}, export {}".format(codes[0], *codes[2:])


def no_network(*arguments, **options):
    raise AssertionError("a file started a download")


def main():
    given = [int(argument) for argument in sys.argv[1:]]
    count, seed, every = (*given, *(1000, 0, 20)[len(given) :])
    socket.socket.connect = socket.getaddrinfo = no_network
    warnings.simplefilter("ignore")
    outcomes, commands = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        for number in range(300):
            outcome(number, path)
        by_command(0, path)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        for number in range(seed, seed + count):
            outcomes[outcome(number, path)] += 1
            if number % every == 0:
                commands[by_command(number, path)] += 1
    print(json.dumps({"files": count, **outcomes, "by command": commands}))


if __name__ == "__main__":
    main()
