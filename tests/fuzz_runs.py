"""Damages the files of run folders and reads them with every command: `python tests/fuzz_runs.py 2000`.

Bytes are changed, or the content is, with its checksum recomputed, or another kind of file takes the place of one.
Each command must end in one line of the library's own, or do its work; where only bytes were changed, a run that goes
on must end bit-identical to one that was never touched.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch

from mirrorquant.cli import main
from mirrorquant.train import Config, Interrupted, Run, checkpoint

TINY = ["iterations=6", "batch_size=16", "eval_every=2", "log_every=1", "checkpoint_every=2", "width=4"]
SECONDS = 60  # for one command; it takes a fraction of one
COMMANDS = {
    "checkpoint.pt": ["train"],
    "checkpoint.pt.previous": ["train"],
    "metrics.jsonl": ["train", "curves"],
    "best.pt": ["eval", "summary", "pack", "pack-file"],
    "config.json": ["train", "eval", "summary", "curves", "pack"],
    "summary.json": ["table", "curves", "curves-file"],
    ".lock": ["train"],
}
ODD_VALUES = [
    None,
    True,
    -1,
    0,
    3,
    2**70,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "\x1b[31m",
    b"x",
]
ODD_VALUES += [[], {}, (), [[]], {"x": None}, {0: 1}, "a:b", "../..", "-1,1"]


def make(folder):
    """A finished run, and one that was stopped, as `folder`/finished and `folder`/stopped."""
    setting = Config.from_recipe("digits/digitsnet/binary/md-tanh-s", [*TINY, "histogram_every=3"])
    Run(setting, folder / "finished", quiet=True).train()
    run = Run(setting, folder / "stopped", quiet=True)
    advance = run.advance

    def interrupted():
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        advance()

    run.advance = interrupted
    with contextlib.suppress(Interrupted):
        run.train()
    for name in ("best.pt", "summary.json"):
        shutil.copy(folder / "finished" / name, folder / "stopped" / name)


def change_bytes(content, rng):
    """Flipped bits, a cut, an addition, a lost or repeated stretch, or other bytes altogether."""
    content, place = bytearray(content), rng.randrange(len(content) + 1)
    kind = rng.randrange(6)
    if kind == 0 and content:
        content[place % len(content)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del content[place:]
    elif kind == 2:
        content += rng.randbytes(rng.randint(1, 50))
    elif kind == 3:
        del content[place : place + rng.randint(1, 50)]
    elif kind == 4:
        content[place:place] = content[place : place + rng.randint(1, 500)]
    else:
        content = bytearray(rng.randbytes(rng.randint(0, 300)))
    return bytes(content)


def odd_tensor(tensor, rng):
    """Something in the place of a tensor that no run would write there."""
    if tensor.numel() > 1 << 20:  # it is one already
        return torch.zeros(())
    kinds = [
        lambda: torch.full_like(tensor.float(), float("nan")),
        lambda: tensor.double() if tensor.dtype == torch.float32 else tensor.float(),
        lambda: tensor.flatten()[:1].clone(),
        lambda: tensor.unsqueeze(0).clone(),
        lambda: torch.zeros(()),
        lambda: torch.zeros(0),
        lambda: tensor.float().to_sparse() if tensor.dim() else torch.zeros(1).to_sparse(),
        lambda: torch.zeros(1).expand(1 << 40),
        lambda: torch.complex(tensor.float(), tensor.float()),
        lambda: torch.nn.Parameter(tensor.float()),
        lambda: torch.empty(tensor.shape, device="meta"),
        lambda: tensor.to(torch.int8),
        lambda: -tensor.float(),
    ]
    return rng.choice(kinds)()


def change_content(value, rng, depth=0):
    """A copy of something nested with one place changed: another value, a lost key, a new one."""
    if isinstance(value, dict) and value and (depth < 1 or rng.random() < 0.8):
        changed, key = dict(value), rng.choice(list(value))
        kind = rng.random()
        if kind < 0.1:
            del changed[key]
        elif kind < 0.15:
            changed[rng.choice([7, "extra", "\ud800", (1, 2)])] = changed.pop(key)
        elif kind < 0.2:
            changed["extra"] = rng.choice(ODD_VALUES)
        else:
            changed[key] = change_content(value[key], rng, depth + 1)
        return changed
    if isinstance(value, (list, tuple)) and value and rng.random() < 0.8:
        place, changed = rng.randrange(len(value)), list(value)
        kind = rng.random()
        if kind < 0.15:
            del changed[place]
        elif kind < 0.3:
            changed.append(changed[place])
        else:
            changed[place] = change_content(value[place], rng, depth + 1)
        return type(value)(changed)
    if isinstance(value, torch.Tensor) and rng.random() < 0.8:
        return odd_tensor(value, rng)
    if rng.random() < 0.05:
        deep = []
        for _ in range(rng.choice([50, 2000])):
            deep = [deep]
        return deep
    return rng.choice(ODD_VALUES)


def changed_state(path, rng):
    """The bytes of a checkpoint with other content and the right checksum."""
    state, buffer = checkpoint.load(path), io.BytesIO()
    for _ in range(rng.randint(1, 2)):
        state = change_content(state, rng)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # to write what is nested deeper than it can be read
    torch.save(state, buffer)
    sys.setrecursionlimit(limit)
    return checkpoint.sealed(buffer.getvalue())


def as_json(value):
    """JSON text, even of what has none: bytes, keys that are not strings, more levels than Python writes."""
    try:
        return json.dumps(value, default=repr, skipkeys=True)
    except RecursionError:
        return "[" * 3_000 + "]" * 3_000  # which starts as no object does


def changed_json(path, rng):
    """The bytes of a JSON file with other content, with the right checksum if it is a configuration."""
    kind = rng.randrange(8)
    if kind == 0:
        return b"[" * 100_000
    if kind == 1:
        return (b'{"a":' * 5_000) + b"1" + b"}" * 5_000
    if kind == 2:
        return path.read_bytes().replace(b": ", b": 9" + b"9" * 5_000, 1)
    content = json.loads(path.read_bytes())
    content.pop("sha256", None)
    changed = change_content(content, rng) if content else {}
    text = as_json(changed)
    if path.name == "config.json" and isinstance(changed, dict) and not text.startswith("["):
        changed = json.loads(text)  # with its keys as text
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
        return (json.dumps({**changed, "sha256": digest}, indent=1) + "\n").encode()
    return text.encode()


def changed_lines(path, rng):
    """A metrics file with a line changed, added or lost."""
    lines = path.read_bytes().splitlines()
    place = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        lines.insert(place, rng.choice([b"", b"{}", b"null", b"[" * 100_000, b"\xff\xfe", b'{"kind": "val"}', b"NaN"]))
    elif kind == 1:
        del lines[place]
    else:
        lines[place] = as_json(change_content(json.loads(lines[place]), rng)).encode()
    return b"\n".join(lines) + rng.choice([b"\n", b""])


def other_kind(path, rng):
    """A directory, a FIFO, a device, a socket, a loop of links or nothing where a file was."""
    path.unlink(missing_ok=True)
    kind = rng.randrange(7)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.symlink_to(path.name)
    elif kind == 4:
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == 5:
        path.touch()


def damage(folder, name, rng):
    """Changes one file of a run's folder; returns how."""
    path = folder / name
    if name.startswith("checkpoint") and rng.random() < 0.5:  # no spare to fall back to
        for other in folder.glob("checkpoint.*"):
            if other != path:
                other.unlink()
    kind = rng.choice(["bytes", "content", "content", "content", "kind"])
    if name == ".lock":
        kind = "kind"
    if kind == "kind":
        other_kind(path, rng)
    elif kind == "bytes":
        path.write_bytes(change_bytes(path.read_bytes(), rng))
    elif path.suffix == ".json":
        path.write_bytes(changed_json(path, rng))
    elif name == "metrics.jsonl":
        path.write_bytes(changed_lines(path, rng))
    else:
        path.write_bytes(changed_state(path, rng))
    return kind


def command_line(command, folder, out):
    return {
        "train": ["train", "--quiet", "--json", "--resume", str(folder)],
        "eval": ["eval", str(folder)],
        "summary": ["summary", str(folder)],
        "table": ["table", "--results", str(folder)],
        "curves": ["curves", str(folder), "--out", str(out / "curves.png")],
        "curves-file": ["curves", str(folder / "summary.json"), "--out", str(out / "curves.png")],
        "pack": ["pack", str(folder), "-o", str(out / "net.safetensors")],
        "pack-file": ["pack", str(folder / "best.pt"), "-o", str(out / "net.safetensors")],
    }[command]


def run_command(arguments):
    """The exit code and what was written to the error stream; an exception that escapes is a finding."""

    def expired(number, frame):
        raise AssertionError(f"no end within {SECONDS} s")

    told, printed = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("default")
            ignored = "constrained_layout not applied|Glyph|Casting complex|Initializing zero-element"
            warnings.filterwarnings("ignore", ignored)  # for labels and tensors that nobody would choose
            code = main(arguments)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, told.getvalue()


def outcome(made, scratch, rng):
    """One damaged file and one command: (description, None) if all is well, else what is wrong."""
    from test_train import assert_identical  # which imports this module

    name = rng.choice([n for n in COMMANDS for _ in range(1 if n == ".lock" else 4)])
    command = rng.choice(COMMANDS[name])
    folder, out = scratch / "run", scratch / "out"
    for path in (folder, out):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(made / "stopped", folder)
    out.mkdir()
    kind = damage(folder, name, rng)
    what = f"{command} with {kind} of {name} changed"
    try:
        code, told = run_command(command_line(command, folder, out))
        lines = [line for line in told.splitlines() if not line.startswith("warning: ")]  # a run this short has gaps
        if code == 0:
            if lines:
                return what, f"exit code 0, but {told!r}"
            if command == "train" and kind == "bytes":
                assert_identical(made / "finished", folder)
        elif code not in (1, 2) or len(lines) != 1 or not lines[0].startswith("mirrorquant: "):
            return what, f"exit code {code} and {told!r}"
    except BaseException:
        return what, traceback.format_exc()
    return f"{what}: {code}", None


def fuzz(count, seed, say=lambda text: None):
    """Runs so many cases and returns how they ended: a count by description, and the findings."""
    rng, ended, findings = random.Random(seed), {}, []
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "made"
        make(made)
        for number in range(count):
            what, wrong = outcome(made, Path(temporary), rng)
            if wrong:
                findings.append(f"case {number} of seed {seed}, {what}: {wrong}")
                say(findings[-1])
            else:
                ended[what] = ended.get(what, 0) + 1
    return ended, findings


if __name__ == "__main__":
    torch.set_num_threads(1)
    ended, findings = fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, lambda text: print(text))
    for what, times in sorted(ended.items()):
        print(f"{times:6} {what}")
    print(f"{sum(ended.values())} cases ended well, {len(findings)} did not")
    sys.exit(bool(findings))
