"""What the tests of packed models share: networks on their levels, bounds on rounding, and ways to damage a file."""

import copy
import hashlib
import json
import random
import re
import struct
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import mirrorquant as mq
from mirrorquant.packing import fuse, layers, model

SHAPES = {"digitsnet": (1, 8, 8), "mobilenetv2": (3, 32, 32), "resnet18": (3, 32, 32), "vgg16": (3, 32, 32)}

# With these values small layers run on bits, too, and small networks are compiled.
ALL_ON_BITS = [(layers, name, 1) for name in ("_FEWEST_WEIGHTS", "_MANY_WEIGHTS", "_FEWEST_CHANNELS")]
ALL_ON_BITS += [(model, "_FEWEST_FUSED", 0)]


def on_levels(model, levels=mq.BINARY, seed=0):
    """The model with random levels for weights and likely statistics in its batch norms, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.tensor(tuple(levels))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(q[torch.randint(len(q), parameter.shape, generator=generator)])
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.copy_(torch.randn(module.num_features, generator=generator))
                module.running_var.copy_(20 + 40 * torch.rand(module.num_features, generator=generator))
                module.num_batches_tracked.fill_(1000)
                if module.affine:
                    module.weight.copy_(0.5 + torch.rand(module.num_features, generator=generator))
                    module.bias.copy_(torch.randn(module.num_features, generator=generator))
    return model.eval()


def network(name, levels=mq.BINARY, **options):
    return on_levels(mq.models.build(name, 10, **options), levels)


def images(name, count=4, seed=1):
    return torch.randn(count, *SHAPES[name], generator=torch.Generator().manual_seed(seed))


def same_state(a, b):
    """Whether two models have the same class, and the same tensors to the bit."""
    one, two = a.state_dict(), b.state_dict()
    equal = all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(one.values(), two.values(), strict=True))
    return type(a) is type(b) and list(one) == list(two) and equal


def held_as_bits(packed):
    """The names of the convolution and linear layers whose weights were found on levels, whatever they compute with."""
    layers = [(name, m) for name, m in packed.plain.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    bits = {id(p) for name, p in packed.plain.named_parameters() if name in packed.runs}
    return [name for name, layer in layers if id(layer.weight) in bits]


@contextmanager
def compiled_graphs():
    """Collects the graphs of the packed models that are compiled meanwhile, each as the names of what it calls."""
    graphs, rewrite = [], fuse.fuse

    def spy(graph):
        rewrite(graph)
        graphs.append([_called(node) for node in graph.nodes if node.op.startswith("call")])

    fuse.fuse = spy
    try:
        yield graphs
    finally:
        fuse.fuse = rewrite


def _called(node):
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


# Rounding.


class Jitter(TorchDispatchMode):
    """Computes as if each operator rounded its result to 19 bits, which float32 does better than in any order."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        views = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        for tensor in tree_leaves(result) if args and not views else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
                noise = torch.randint(0, 2, tensor.shape, generator=self.generator).to(tensor.dtype) * 2 - 1
                tensor.add_(noise, alpha=2.0**-19 * float(tensor.abs().max().nan_to_num(0, 0, 0)))
        return result


def allowed(exact, rough):
    """How far a result in float32 may be from the exact one, by what rounding does to it in float64."""
    exact, rough = exact.double(), rough.double()
    return 16 * float(torch.maximum((rough - exact).abs().max(), 2.0**-19 * exact.abs().max())) if exact.numel() else 0


@torch.no_grad()
def agree(got, model, *inputs, **options):
    """Asserts that these are the model's outputs, as exactly as float32 can tell."""
    model = copy.deepcopy(model).double()

    def run():
        wide = tree_map(lambda x: x.detach().double() if torch.is_tensor(x) and x.is_floating_point() else x, inputs)
        more = tree_map(lambda x: x.detach().double() if torch.is_tensor(x) and x.is_floating_point() else x, options)
        return tree_leaves(model(*copy.deepcopy(wide), **more))

    exact = run()
    with Jitter():
        rough = run()
    for one, reference, jittered in zip(tree_leaves(got), exact, rough, strict=True):
        assert one.shape == reference.shape
        if reference.is_floating_point():
            off = float((one.double() - reference).abs().max())
            assert off <= allowed(reference, jittered), f"off by {off}, allowed {allowed(reference, jittered)}"


# Damage.


def sealed(header, body):
    """A file with a header (a dictionary, or its text) and a digest that fits."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    content = struct.pack("<Q", len(text)) + text + body
    place = re.search(rb'"sha256\W+([0-9a-f]{64})', content)
    if place is None:
        return content
    before, after = content[: place.start(1)], content[place.end(1) :]
    return before + hashlib.sha256(before + b"0" * 64 + after).hexdigest().encode() + after


def split(content):
    """Header (a dictionary) and body of a file."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def damaged(content, rng):
    """The content with a random change: bits, lengths, blocks. The digest is left as it is."""
    changed = bytearray(content)
    kind = rng.randrange(8)
    at = rng.randrange(len(changed))
    if kind <= 2:
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del changed[at:]
    elif kind == 4:
        changed[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
    elif kind == 5:
        del changed[at : at + rng.choice([1, 8, 100])]
    elif kind == 6:
        length = rng.choice([0, 1, 2**24, 2**40, 2**63, 2**64 - 1, rng.randrange(2 * len(changed))])
        changed[:8] = struct.pack("<Q", length)
    else:
        other = rng.randrange(len(changed))
        changed[at : at + 16], changed[other : other + 16] = changed[other : other + 16], changed[at : at + 16]
    return bytes(changed)


_ODD = [None, True, -1, 0, 1, 3, 255, 2**31, 2**62, 2**63, 10**30, 0.5, -1.5, 1e308, "", "F32", "U8", "x" * 1000]
_ODD += [
    "\ud800",
    "\x1b[2J\x07",
    "\u202egnp.exe",
    "\n\r",
    "\0",
    "../../x",
    "caf\u00e9",
    -(2**63),
    2**64,
    10**4000,
    1e-320,
]
_ODD += [[], [[]], {}, [0], [2**40, 2**40], [1, 2, 3, 4, 5], {"a": 1}, "float32", "float16", "resnet18", "os:system"]


def forged(content, rng):
    """The content with a lying header, or other bits, and a digest that fits."""
    header, body = split(content)
    told = json.loads(header["__metadata__"]["mirrorquant"])
    kind = rng.randrange(12)
    if kind == 10:
        return sealed(_spoiled_text(header, told, rng), body)
    if kind == 11:
        return sealed(_misplaced(header, rng), body)
    if kind == 0:
        changed = bytearray(body)
        for _ in range(rng.choice([1, 8])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return sealed(header, bytes(changed))
    if kind == 1:
        return sealed(header, body[: rng.randrange(len(body))] if rng.random() < 0.5 else body + rng.randbytes(9))
    if kind == 2:
        deep = "[" * rng.choice([10, 1000, 200_000])
        text = json.dumps(header).replace('"shape": [', f'"shape": {deep}', 1).encode()
        return sealed(text if rng.random() < 0.5 else deep.encode(), body)
    if kind == 3:
        names = [name for name in header if name != "__metadata__"]
        twice = json.dumps(header)[:-1] + f', "{rng.choice(names)}": ' + json.dumps(header[rng.choice(names)]) + "}"
        return sealed(twice.encode(), body)
    if kind <= 6:
        _change(told, rng)
        header["__metadata__"]["mirrorquant"] = json.dumps(told)
    else:
        metadata = header.pop("__metadata__")
        _change(header, rng)
        header = {"__metadata__": metadata, **header}
    return sealed(json.dumps(header, separators=(",", ":")).encode(), body)


def _spoiled_text(header, told, rng):
    """The header's text with what JSON or UTF-8 does not allow, in the outer or the inner description."""
    values = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, '"\\ud800"', '"\\udfff\\ud800"', "0x1", "'a'", "01"]
    values += ["[" * depth + "]" * depth for depth in (20, 40, 300, 900, 990, 5000)]
    values += ['{"a":' * depth + "1" + "}" * depth for depth in (40, 490, 980)]
    value, outer = rng.choice(values), rng.random() < 0.4
    tree, mark = (header, "MARK") if outer else (told, "MARK")
    places = [key for key in tree if key != "__metadata__"]
    place = rng.choice([*places, "more"])
    tree[place] = {"x": mark} if place == "about" else mark
    if not outer:
        text = json.dumps(told).replace('"MARK"', value)
        header["__metadata__"]["mirrorquant"] = text
        text = json.dumps(header, separators=(",", ":"))
    else:
        text = json.dumps(header, separators=(",", ":")).replace('"MARK"', value)
    content = text.encode()
    if rng.random() < 0.3:
        at = rng.randrange(110, len(content))
        content = (
            content[:at] + rng.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0"]) + content[at:]
        )
    if rng.random() < 0.2:
        lone = json.dumps("\ud83d").encode()[1:-1]
        content = content.replace(b'"mirrorquant":"', b'"mirrorquant":"' + lone, 1)
    return content


def _misplaced(header, rng):
    """The header with tensors in other places: negative, swapped, overlapping, beyond the end, or by another name."""
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.choice([1, 1, 3])):
        one, two = header[rng.choice(names)], header[rng.choice(names)]
        begin, end = one["data_offsets"]
        places = [[-end, -begin], [end, begin], two["data_offsets"], [begin - 1, end - 1], [begin + 1, end + 1]]
        places += [[begin, end + 1], [0, end], [2**62, 2**62 + end - begin], [-1, -1], [float(begin), float(end)]]
        one["data_offsets"] = rng.choice(places)
        if rng.random() < 0.3:
            one["shape"] = rng.choice([[0], [0, 2**61], [-1], [1] * 17, [*one["shape"], 1], one["shape"][::-1]])
    if rng.random() < 0.5:
        name = rng.choice(names)
        odd = rng.choice(["\x1b]0;x\x07", "a\nb", "\ud800", "\u202e", "x" * 100_000, "", ".", "a\0b"])
        header = {odd if key == name else key: value for key, value in header.items()}
    return json.dumps(header, separators=(",", ":")).encode()


def _change(tree, rng):
    """Changes, removes or adds something, anywhere in a tree of dictionaries and lists."""
    places = []

    def walk(node):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(tree)
    for _ in range(rng.choice([1, 1, 2, 4])):
        node, key = rng.choice(places)
        what = rng.randrange(4)
        try:
            if what == 0:
                del node[key]
            elif what == 1 and isinstance(node, dict):
                node[f"{key}x"] = node.pop(key)
            elif what == 2 and type(node[key]) is int:
                node[key] += rng.choice([-8, -1, 1, 8, 2**20])
            else:
                node[key] = rng.choice(_ODD)
        except (KeyError, IndexError):  # a change before this one removed it
            continue


def generator(seed):
    return random.Random(seed)
