"""Random networks, packed and plain: they must do the same, call after call.

``python tests/fuzz_graphs.py 10000 [FIRST]`` compares that many networks and says how many of them ran fused. Each is a
class with a straight-line ``forward``, written as source: layers, in-place operators, views and aliases, constants,
state, random numbers; its attributes are changed between calls.
"""

import copy
import random
import sys
import types
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from packed import ALL_ON_BITS, Jitter, allowed, compiled_graphs
from torch import nn
from torch.utils._pytree import tree_leaves

import mirrorquant as mq
from mirrorquant.nn import BinaryActivation

HEADER = """
class Net(nn.Module):
    kept = 0.5

    def __init__(self):
        super().__init__()
{init}
    def helper(self, y, by=2.0):
        return y * by

    def forward(self, {arguments}):
{body}
"""


def ignored(net):
    """Changes nothing of the network."""


class Program:
    """Writes a network; a variable is its name, and its shape without the batch."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.init, self.body, self.count = [], [], 0
        self.events, self.variables, self.convs = [], [("x", (4, 6, 6))], []
        self.arguments = "x"
        self.noisy = []  # which are returned: a compiler does not draw numbers that nobody uses
        self.state = self.rng.random() < 0.45  # else an ordinary network, which must run fused
        self.impure = False

    def name(self, stem="v"):
        self.count += 1
        return f"{stem}{self.count}"

    def line(self, text):
        self.body.append(text)

    def module(self, text):
        name = self.name("m")
        self.init.append(f"self.{name} = {text}")
        return f"self.{name}"

    def new(self, expression, shape):
        name = self.name()
        self.line(f"{name} = {expression}")
        self.variables.append((name, shape))

    def pick(self, dims=None):
        fitting = [v for v in self.variables if dims is None or len(v[1]) == dims]
        return self.rng.choice(fitting[-4:] if self.rng.random() < 0.8 else fitting) if fitting else None

    def write(self):
        for _ in range(self.rng.randint(4, 12)):
            choices = [self.layer] * 5 + [self.activation] * 3 + [self.sum] * 3 + [self.change] * 2 + [self.view] * 3
            choices += [self.shape] * 2 + [self.constant] + ([self.stateful] * 2 if self.state else [])
            self.rng.choice(choices)()
        results = [v[0] for v in self.variables[1:][-3:]] or ["x"]
        if self.rng.random() < 0.3:
            results = [v[0] for v in self.rng.sample(self.variables, min(3, len(self.variables)))]
        results += [name for name in self.noisy if name not in results]
        self.line(f"return {', '.join(results)}{',' if len(results) == 1 else ''}")
        init = "\n".join(f"        {line}" for line in self.init) + "\n"
        body = "\n".join(f"        {line}" for line in self.body)
        return HEADER.format(init=init, body=body, arguments=self.arguments)

    # Layers and ordinary operators.

    def layer(self):
        name, shape = self.pick()
        if len(shape) == 1:
            width = self.rng.choice([4, 8, shape[0]])
            layer = self.module(f"nn.Linear({shape[0]}, {width}, bias={self.rng.random() < 0.5})")
            return self.new(f"{layer}({name})", (width,))
        c, h, w = shape
        used = [conv for conv in self.convs if conv[1] == c]
        if used and self.rng.random() < 0.15:
            conv, _, out = self.rng.choice(used)  # a module that is called twice
            return self.new(f"{conv}({name})", (out, h, w))
        out, groups, k = self.rng.choice([2, 4, c, c]), 1, self.rng.choice([1, 3])
        if self.rng.random() < 0.15:
            groups = out = c
        text = f"nn.Conv2d({c}, {out}, {k}, padding={k // 2}, groups={groups}, bias={self.rng.random() < 0.5})"
        conv = self.module(text)
        self.convs.append((conv, c, out))
        sign = f"{self.module('BinaryActivation()')}({name})" if self.rng.random() < 0.1 else name
        self.new(f"{conv}({sign})", (out, h, w))
        if self.rng.random() < 0.6:
            norm = self.module(f"nn.BatchNorm2d({out})")
            self.new(f"{norm}({self.variables[-1][0]})", (out, h, w))

    def activation(self):
        name, shape = self.pick()
        relu = self.module(f"nn.ReLU(inplace={self.rng.random() < 0.4})")
        forms = [f"{relu}({name})"] * 4 + [f"F.relu({name})", f"torch.relu({name})", f"{name}.relu()"]
        forms += [f"F.relu({name}, True)", f"F.relu_({name})", f"{name}.relu_()", f"F.relu({name}, inplace=True)"]
        forms += [f"F.hardtanh({name}, -1.0, 1.0)", f"F.hardtanh({name}, -2.0, 2.0, True)", f"torch.sigmoid({name})"]
        forms += [f"F.leaky_relu({name}, 0.1)", f"F.dropout({name}, 0.5, self.training)", f"{name}.clamp(-3, 3)"]
        forms += [f"{self.module('nn.Identity()')}({name})", f"{self.module('nn.Dropout(0.5)')}({name})"]
        self.new(self.rng.choice(forms), shape)

    def sum(self):
        a, shape = self.pick()
        same = [v[0] for v in self.variables if v[1] == shape]
        b = self.rng.choice(same)
        forms = [f"{a} + {b}"] * 4 + [f"torch.add({a}, {b})", f"{a}.add({b})", f"torch.add({a}, {b}, alpha=2)"]
        forms += [f"{a}.add_({b})", f"{a} - {b}", f"torch.maximum({a}, {b})", f"{a} * 0.5 + {b}"]
        if self.rng.random() < 0.25:
            self.line(f"{a} += {b}")
        else:
            self.new(self.rng.choice(forms), shape)

    def change(self):
        """In place, mostly of what others hold."""
        a, shape = self.pick()
        forms = [
            f"{a} *= 0.5",
            f"{a} += 1",
            f"{a}.mul_(2)",
            f"{a}[:, 0] = 0.25",
            f"{a}[:, :1] *= 3",
            f"{a}.clamp_(-4, 4)",
        ]
        forms += [f"{a}.sub_({a}.mean())", f"torch.mul({a}, 2, out={a})", f"{a}[{a} > 1] = 1.0", f"{a} /= 2"]
        forms += [f"{a}.copy_({b})" for b, other in self.variables if other == shape]
        self.line(self.rng.choice(forms))

    def view(self):
        """What shows the memory of something else, or may."""
        a, shape = self.pick()
        n = self.name
        if len(shape) == 1:
            forms = [(f"{a}.detach()", shape), (f"{a}[:, :]", shape), (f"{a}.view(-1, {shape[0]})", shape)]
            forms += [(f"{a}.unsqueeze(1).squeeze(1)", shape), (f"{a}.t().t()", shape), (f"{a}.clone()", shape)]
            forms += [(f"{a}.contiguous()", shape), (f"{a}.flip(1)", shape)]
            return self.new(*self.rng.choice(forms))
        c, h, w = shape
        forms = [(f"{a}.detach()", shape), (f"{a}[:, :]", shape), (f"{a}.transpose(2, 3)", (c, w, h))]
        forms += [(f"{a}.permute(0, 1, 3, 2)", (c, w, h)), (f"{a}.contiguous()", shape), (f"{a}.clone()", shape)]
        forms += [(f"{a}.flatten(1)", (c * h * w,)), (f"{a}.reshape({a}.size(0), -1)", (c * h * w,))]
        forms += [(f"{a}.flatten(2).unflatten(2, ({h}, {w}))", shape), (f"{a}[:, :, :, :].contiguous()", shape)]
        forms += [(f"{a}.expand(-1, -1, -1, -1)", shape), (f"{a}.unsqueeze(0).squeeze(0)", shape), (f"{a}.data", shape)]
        forms += [
            (f"{a}.detach().flatten(1)", (c * h * w,)),
            (f"{a}.to({a}.dtype)", shape),
            (f"{a}.view_as({a})", shape),
        ]
        forms += [(f"torch.narrow({a}, 1, 0, {c})", shape), (f"{a}.mT", (c, w, h)), (f"{a}.type_as({a})", shape)]
        if c > 1:
            forms += [(f"{a}[:, {c // 2}:]", (c - c // 2, h, w)), (f"{a}.narrow(1, 0, 1)", (1, h, w))]
            if c % 2 == 0:
                parts = [f"torch.chunk({a}, 2, 1)", f"{a}.chunk(2, dim=1)", f"{a}.split({c // 2}, 1)"]
                if self.rng.random() < 0.3:
                    one, two = n(), n()
                    self.line(f"{one}, {two} = {self.rng.choice(parts)}")
                    self.variables += [(one, (c // 2, h, w)), (two, (c // 2, h, w))]
                    return None
        return self.new(*self.rng.choice(forms))

    def shape(self):
        """What changes the size."""
        a, shape = self.pick()
        if len(shape) == 1:
            other, more = self.pick(1)
            return (
                self.new(f"torch.cat([{a}, {other}], 1)", (shape[0] + more[0],)) if shape[0] + more[0] < 200 else None
            )
        c, h, w = shape
        forms = []
        if h % 2 == 0 and w % 2 == 0:
            pool = self.module("nn.MaxPool2d(2)")
            forms += [(f"{pool}({a})", (c, h // 2, w // 2)), (f"F.avg_pool2d({a}, 2)", (c, h // 2, w // 2))]
        if h < 6 and w < 6:
            forms += [(f"F.interpolate({a}, scale_factor=2.0)", (c, 2 * h, 2 * w))]
        fitting = [v for v in self.variables if len(v[1]) == 3 and v[1][1:] == (h, w) and v[1][0] + c <= 8]
        if fitting:
            b, more = self.rng.choice(fitting)
            forms += [(f"torch.cat([{a}, {b}], 1)", (c + more[0], h, w))] * 2
        forms += [(f"F.adaptive_avg_pool2d({a}, 1).flatten(1)", (c,)), (f"{a}.mean((2, 3))", (c,))]
        forms += [(f"F.pad({a}, (1, 1, 0, 0))[:, :, :, 1:-1]", shape), (f"self.helper({a})", shape)]
        return self.new(*self.rng.choice(forms))

    def constant(self):
        a, (c, *rest) = self.pick()
        ones = ", 1" * len(rest)
        name = self.module(f"nn.Parameter(torch.ones(1, {c}{ones}))")
        buffer = self.name("b")
        self.init.append(f"self.register_buffer('{buffer}', torch.ones(1, {c}{ones}))")
        forms = [f"{a} + torch.arange({c}.0).reshape(1, {c}{ones})", f"{a} * {name}", f"{a} * self.{buffer}"]
        forms += [f"{a} + torch.ones({c}{ones})", f"{a} * (self.{buffer} * 2)", f"{a} / {c}", f"{a} * self.kept"]
        forms += [f"{a} + {a}.size(1)", f"{a} + torch.zeros(1).add_(1)"]
        self.new(self.rng.choice(forms), (c, *rest))

    # What a graph cannot hold.

    def stateful(self):
        a, (c, *rest) = self.pick()
        s, ones = self.name("s"), ", 1" * len(rest)
        kind = self.rng.randrange(22)
        shape = (c, *rest)
        event = shared = None
        if kind == 0:
            self.init.append(f"self.{s} = 0")
            self.line(f"self.{s} += 1")
            self.new(f"{a} + self.{s}", shape)
        elif kind == 1:
            self.init.append(f"self.{s} = []")
            self.line(f"self.{s}.append({a}.mean())")
            self.new(f"{a} + torch.stack(self.{s}).sum()", shape)
        elif kind == 2:
            self.init.append(f"self.register_buffer('{s}', torch.zeros(1, {c}{ones}))")
            self.line(
                self.rng.choice([f"self.{s}.add_({a}.mean())", f"self.{s} += 1", f"self.{s} = self.{s} + {a}.mean()"])
            )
            self.new(f"{a} + self.{s}", shape)
        elif kind == 3:
            self.init.append(f"self.{s} = None")
            self.line(f"self.{s} = {a} if self.{s} is None else {a} + self.{s}")
            self.new(f"self.{s} * 1", shape)
        elif kind == 4:
            self.init.append(f"self.{s} = 1.5")
            self.new(f"{a} * self.{s}", shape)
            event = lambda net: setattr(net, s, getattr(net, s) + 1)  # noqa: E731
        elif kind == 5:
            self.init.append(f"self.{s} = True")
            self.new(f"{a} * 2 if self.{s} else {a}.neg()", shape)
            event = lambda net: setattr(net, s, not getattr(net, s))  # noqa: E731
        elif kind == 6:
            self.init.append(f"self.{s} = {{'by': 2.0}}")
            self.new(f"{a} * self.{s}['by']", shape)
            event = lambda net: getattr(net, s).update(by=getattr(net, s)["by"] + 1)  # noqa: E731
        elif kind == 7:
            self.init.append(f"self.{s} = torch.ones(1, {c}{ones})")
            self.new(self.rng.choice([f"{a} * self.{s}", f"{a} * (self.{s} + 1)"]), shape)
            event = self.rng.choice(
                [lambda net: setattr(net, s, getattr(net, s) * 2), lambda net: getattr(net, s).mul_(3)]
            )
        elif kind == 8:
            self.new(f"{a} * STATE['by']", shape)
            event, shared = ignored, lambda space: space["STATE"].update(by=space["STATE"]["by"] + 1)
        elif kind == 9:
            self.line("STATE['n'] += 1")
            self.new(f"{a} * STATE['n']", shape)
        elif kind == 10:
            self.new(f"{a} + scaled({a})", shape)
            event, shared = ignored, lambda space: space["STATE"].update(by=space["STATE"]["by"] + 1)
        elif kind == 11:
            self.new(f"{a} + torch.randn({c}{ones})", shape)
        elif kind == 12:
            self.new(f"{a} + torch.randn_like({a})", shape)
        elif kind == 13:
            self.new(f"F.dropout({a}, 0.3, True)", shape)
        elif kind == 14:
            self.new(f"{a} * random.random()", shape)
        elif kind == 15:
            self.new(f"{a} * float(np.random.rand())", shape)
        elif kind == 16:
            norm = self.module(f"nn.BatchNorm2d({c})" if rest else f"nn.BatchNorm1d({c})").removeprefix("self.")
            self.new(f"self.{norm}({a})", shape)
            event = lambda net: getattr(net, norm).running_mean.add_(1)  # noqa: E731
        elif kind == 17:
            self.init.append(f"self.{s} = [torch.ones(1, {c}{ones})]")
            self.new(f"{a} + self.{s}[0]", shape)
            event = lambda net: getattr(net, s)[0].add_(1)  # noqa: E731
        elif kind == 18:
            act = self.module("nn.ReLU()").removeprefix("self.")
            self.new(f"self.{act}({a})", shape)
            event = lambda net: setattr(net, act, nn.Sigmoid())  # noqa: E731
        elif kind == 19:
            self.line(f"{s} = torch.zeros(1, {c}{ones})")
            self.line(f"{s} += {a}.mean()")
            self.new(f"{a} + {s}", shape)
        elif kind == 20 and "seen" not in self.arguments:
            self.arguments += ", seen=[]"
            self.line("seen.append(1)")
            self.new(f"{a} + len(seen)", shape)
        else:
            self.new(f"{a} if {a}.mean() > 0.1 else {a} * 3", shape)
        if kind in (11, 12, 13):
            self.noisy.append(self.variables[-1][0])
        if event is not None:
            self.events.append((event, shared))


SUPPORT = """
STATE = {"by": 2.0, "n": 0}

def scaled(y):
    return y * STATE["by"]
"""


class Differs(AssertionError):
    """A packed network that does something else than the plain one."""


def build(seed):
    """A network by its seed, what changes it between calls, and the namespace that it lives in."""
    program = Program(seed)
    source = SUPPORT + program.write()
    module = sys.modules[f"fuzzed_{seed}"] = types.ModuleType(f"fuzzed_{seed}")  # where a compiler looks for it
    space = module.__dict__
    space.update(torch=torch, nn=nn, F=F, random=random, np=np, BinaryActivation=BinaryActivation, source=source)
    exec(compile(source, f"<network {seed}>", "exec"), space)
    torch.manual_seed(seed)
    model = space["Net"]().eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            size = 2.0 ** -round(0.5 * np.log2(module.weight[0].numel()))
            module.weight.copy_(size * torch.where(module.weight < 0, -1.0, 1.0))
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_()
    return model, program.events, space


def seeded(k):
    torch.manual_seed(k)
    random.seed(k)
    np.random.seed(k)  # noqa: NPY002 (that of networks, too)


def image(seed, k):
    generator = torch.Generator().manual_seed(1000 * seed + k)
    x = torch.randn(2, 4, 6, 6, generator=generator)
    return x.contiguous(memory_format=torch.channels_last) if (seed + k) % 3 == 0 else x


def calls(network, events, space, seed, dtype=torch.float32, inside=None):
    """Results of several calls and what each left of its input, the network being changed in between."""
    found = []
    kept = copy.deepcopy(space["STATE"])
    for default in space["Net"].forward.__defaults__ or ():
        default.clear()
    for k in range(4):
        if k >= 2 and events:
            event, shared = events[k % len(events)]
            event(inside or network)
            if shared is not None:
                shared(space)
        seeded(k)
        x = image(seed, k).to(dtype)
        with torch.no_grad():
            y = network(x)
        found.append([leaf.clone() for leaf in tree_leaves(y)] + [x])
    space["STATE"].clear()
    space["STATE"].update(kept)
    return found


def check(seed):
    """Whether the packed network ran fused; raises an error with the source where it differs from the plain one."""
    model, events, space = build(seed)
    try:
        with torch.no_grad():
            copy.deepcopy(model)(image(seed, 0))
    except (RuntimeError, IndexError):
        return None  # no valid network
    if not any(isinstance(module, (nn.Conv2d, nn.Linear)) for module in model.modules()):
        return None
    space["STATE"].update(by=2.0, n=0)
    for default in space["Net"].forward.__defaults__ or ():
        default.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = mq.pack(model)
        exact = calls(copy.deepcopy(model).double(), events, space, seed, torch.float64)
        with Jitter():
            rough = calls(copy.deepcopy(model).double(), events, space, seed, torch.float64)
        expected = calls(copy.deepcopy(model), events, space, seed)
        with compiled_graphs() as graphs:
            got = calls(packed, events, space, seed, inside=packed.network)
    if not packed.fused:
        return False  # the call in which torch failed to compile it was repeated, with what it draws and counts
    for k, (a, b, r, e) in enumerate(zip(got, expected, rough, exact, strict=True)):
        for one, two, jittered, reference in zip(a, b, r, e, strict=True):
            bound = allowed(reference, jittered)
            off = float((one.double() - two.double()).abs().max()) if one.shape == two.shape else float("inf")
            if not off <= bound and not torch.equal(one.isfinite(), torch.zeros_like(one, dtype=torch.bool)):
                raise Differs(f"network {seed}, call {k}: off by {off:g}, allowed {bound:g}\n{space['source']}")
    return bool(graphs)


def main(count, first=0):
    """Compares networks; prints how many there were, ran fused and differed."""
    torch.set_num_threads(1)
    for module, name, value in ALL_ON_BITS:
        setattr(module, name, value)
    done = fused = plain = plain_fused = 0
    wrong = []
    seed = first
    while done < count:
        try:
            result = check(seed)
        except Differs as error:
            wrong.append(seed)
            print(str(error).splitlines()[0], flush=True)
            result = False
        if result is not None:
            done += 1
            fused += result
            ordinary = not Program(seed).state
            plain, plain_fused = plain + ordinary, plain_fused + (ordinary and result)
            if done % 500 == 0:
                print(f"{done} networks, {fused} fused, {len(wrong)} differ", flush=True)
        seed += 1
    print(
        f"{done} networks (seeds {first} to {seed - 1}): {fused} ran fused, of {plain} without state {plain_fused}; "
        f"{len(wrong)} differ {wrong[:20]}"
    )
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
