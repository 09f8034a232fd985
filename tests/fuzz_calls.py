"""Hostile calls of the kernels: each must end in the right numbers or in an exception, and never in a crash.

    python tests/fuzz_calls.py [COUNT] [SEED] [PATH]

A call begins as a good one. Then operands are disguised (other strides, negated views, subclasses: the numbers stay
what they were), renumbered (expanded, overlapping, zeros without memory, NaN, infinity) or spoiled (freed, on another
device, of another dtype, sparse, fake: there are no numbers to be had); parameters are changed; and the call is made in
odd modes. Results are compared with float64, within the bounds that the kernels promise. The memory of the process is
limited, so that a call that asks for too much gets an exception. Prints the outcomes as JSON.
"""

import collections
import gc
import json
import math
import random
import resource
import sys
import warnings
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from mirrorquant.packing import kernels
from mirrorquant.packing.kernels import ops

LEVELS = [(-1.0, 1.0), (-1.0, 0.0, 1.0), (-0.25, 0.25), (0.0, 1.0), (-0.5, 0.5, 1.5), (-1.0, 0.0, 3.0)]
LEVELS += [(-2.0, -1.0, 0.5, 1.0)]
FLOAT_ERROR = 1.5e-5  # of the largest level times the sum of abs(x): see mirrorquant.packing.kernels
MEMORY = 6 << 30


class Subclass(Tensor):
    """A subclass that changes nothing."""


class Wrapper(Tensor):
    """A tensor that only wraps another one."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a wrapper")


# Disguises: the same numbers in other clothes.


def strided(t, rng):
    """Every second element of a longer tensor, along some dimension."""
    axis = rng.randrange(t.dim()) if t.dim() else 0
    return torch.stack([t, torch.full_like(t, 7)], axis + 1).flatten(axis, axis + 1)[
        (slice(None),) * axis + (slice(None, None, 2),)
    ]


def offset(t, rng):
    space = torch.empty(t.numel() + 5, dtype=t.dtype)
    view = space[rng.randrange(1, 5) :][: t.numel()].view(t.shape)
    return view.copy_(t)


def transposed(t, rng):
    order = list(range(t.dim()))
    rng.shuffle(order)
    back = sorted(range(t.dim()), key=order.__getitem__)
    return t.permute(order).contiguous().permute(back)


def negated(t, rng):
    return torch._neg_view(-t) if t.is_floating_point() else t


def imaginary(t, rng):
    """The imaginary part of a conjugate: a negated view with strides that users come by."""
    return torch.complex(torch.zeros_like(t), -t).conj().imag if t.dtype in (torch.float32, torch.float64) else t


def subclassed(t, rng):
    return t.as_subclass(Subclass)


def parameter(t, rng):
    return nn.Parameter(t, requires_grad=False)


def inference(t, rng):
    with torch.inference_mode():
        return t.clone()


def last(t, rng):
    return t.to(memory_format=torch.channels_last) if t.dim() == 4 else t


def lazy(t, rng):
    return torch._lazy_clone(t)


DISGUISES = [strided, offset, transposed, negated, imaginary, subclassed, parameter, inference, last, lazy]


# Changes of the numbers themselves; the reference sees them too.


def expanded(t, rng):
    axis = rng.randrange(t.dim()) if t.dim() else 0
    return t.narrow(axis, 0, 1).expand(t.shape) if t.dim() and t.numel() else t


def overlapping(t, rng):
    return t.contiguous().as_strided(t.shape, [1] * t.dim()) if t.numel() else t


def zeros(t, rng):
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def not_finite(t, rng):
    t = t.clone()
    for _ in range(rng.choice([1, 1, 3])):
        if t.numel():
            t.view(-1)[rng.randrange(t.numel())] = rng.choice([math.nan, math.inf, -math.inf])
    return t


def extreme(t, rng):
    return t * rng.choice([1e-30, 1e-42, 1e20, 0.0])


NUMBERS = [expanded, overlapping, zeros, not_finite, not_finite, extreme]


# What has no numbers that a kernel could use.


def freed(t, rng):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def shrunk(t, rng):
    t = t.clone()
    t.untyped_storage().resize_(max(t.untyped_storage().nbytes() - rng.choice([1, 4, 64]), 0))
    return t


def leaked(t, rng):
    kept = []
    torch.vmap(lambda row: kept.append(row) or row.clone())(t[None] if rng.random() < 0.5 or not t.dim() else t)
    return kept[0]


SPOILERS = {
    "meta": lambda t, rng: t.to("meta"),
    "fake": lambda t, rng: FakeTensorMode().from_tensor(t),
    "freed": freed,
    "shrunk": shrunk,
    "leaked": leaked,
    "wrapper": lambda t, rng: Wrapper(t),
    "functional": lambda t, rng: torch._to_functional_tensor(t),
    "sparse": lambda t, rng: t.to_sparse(),
    "mkldnn": lambda t, rng: t.float().to_mkldnn(),
    "nested": lambda t, rng: torch.nested.as_nested_tensor(t[None]),
    "quantized": lambda t, rng: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "none": lambda t, rng: None,
    "list": lambda t, rng: t.tolist(),
    "bool": lambda t, rng: t.bool(),
    "int": lambda t, rng: t.to(rng.choice([torch.int8, torch.int32, torch.int64, torch.uint16])),
    "complex": lambda t, rng: t.to(torch.complex64).conj(),
    "float8": lambda t, rng: t.float().to(torch.float8_e4m3fn),
    "empty": lambda t, rng: t.flatten()[:0],
    "longer": lambda t, rng: torch.cat([t, t]),
    "flat": lambda t, rng: t.flatten(),
    "deeper": lambda t, rng: t[None],
    "scalar": lambda t, rng: torch.tensor(1.0),
    "gradient": lambda t, rng: t.clone().requires_grad_(),
}


class Case:
    """One call: its operands, its parameters, and what the operands mean."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.conv = rng.random() < 0.5
        self.levels = rng.choice(LEVELS)
        self.groups, self.window = 1, {}
        if self.conv:
            self.groups = rng.choice([1, 1, 1, 2])
            kernel = rng.choice([(1, 1), (3, 3), (2, 3), (1, 4)])
            outputs, inputs = rng.choice([1, 5, 16, 33, 70]), rng.choice([1, 3, 8, 20, 40])
            self.shape = (self.groups * outputs, inputs, *kernel)
            self.window = {
                "stride": rng.choice([(1, 1), (2, 2), (1, 3)]),
                "padding": rng.choice([(0, 0), (1, 1), (2, 0)]),
                "dilation": rng.choice([(1, 1), (2, 1)]),
            }
            size = [rng.randrange(6, 10) for _ in range(2)]
            x = torch.randn(rng.choice([0, 1, 1, 2, 3]), inputs * self.groups, *size)
            self.activation = rng.choice(["float32", "binary"])
        else:
            self.shape = (rng.choice([1, 5, 64, 130]), rng.choice([1, 7, 64, 300, 700]))
            rows = rng.choice([(), (1,), (3,), (7,), (8,), (2, 3), (20,), (0,), (2, 0)])
            x = torch.randn(*rows, self.shape[1])
            self.activation = rng.choice(["float32", "binary", "int8"])
        self.dtype = rng.choice([torch.float32] * 8 + [torch.float64, torch.float16, torch.bfloat16])
        self.codes = torch.randint(0, len(self.levels), self.shape, dtype=torch.uint8)
        self.relu = rng.random() < 0.3
        self.operands = {"x": x.to(self.dtype), "prepared": kernels.prepare(self.codes, self.levels, self.groups)}
        y = self.product(x.double(), torch.ones(self.shape, dtype=torch.float64))
        if rng.random() < 0.5:
            self.operands["scale"] = torch.rand(self.shape[0]) + 0.5
        if rng.random() < 0.5:
            self.operands["shift"] = torch.randn(self.shape[0])
        if rng.random() < 0.5:
            self.operands["residual"] = torch.randn(y.shape).to(self.dtype)
        self.meaning = dict(self.operands)  # what a reference may read
        self.may_fail = self.must_fail = self.spoiled = self.unknown = False
        self.extra, self.told = {}, []

    def product(self, x, weight):
        if not self.conv:
            return F.linear(x, weight)
        return F.conv2d(x, weight, None, *self.window.values(), self.groups)

    # Hostility.

    def disguise(self, name):
        how = self.rng.choice(DISGUISES)
        if name == "prepared" and how in (strided, transposed):
            self.may_fail = True
        self.told.append(f"{name} {how.__name__}")
        self.operands[name] = how(self.operands[name], self.rng)

    def renumber(self, name):
        if name == "prepared":
            return
        how = self.rng.choice(NUMBERS)
        self.told.append(f"{name} {how.__name__}")
        value = how(self.operands[name], self.rng)
        self.operands[name] = value
        self.meaning[name] = torch.zeros(value.shape, dtype=value.dtype) if how is zeros else value.clone()

    def spoil(self, name):
        how = self.rng.choice(list(SPOILERS))
        before = self.operands[name]
        try:
            after = SPOILERS[how](before, self.rng)
        except Exception:  # torch has no such form of it
            return
        same = isinstance(after, Tensor) and after.layout == torch.strided and not after.is_nested
        same = same and type(after) is Tensor and after.dtype == before.dtype and after.shape == before.shape
        memory = how in ("meta", "fake", "freed", "shrunk", "leaked", "wrapper", "functional", "gradient")
        if (same and not memory) or (how in ("empty", "scalar", "flat", "longer", "deeper", "bool") and name == "x"):
            return  # as good as it was, or another good call
        self.told.append(f"{name} {how}")
        self.operands[name] = after
        self.spoiled = True
        if how == "none" and name not in ("x", "prepared"):
            self.meaning[name] = None
        elif how in ("gradient", "functional", "fake") or ((how == "shrunk" or how == "freed") and not before.numel()):
            self.may_fail = True
        else:
            self.must_fail = True

    def misparameter(self):
        rng, kind = self.rng, self.rng.randrange(8)
        odd = rng.choice([-1, 0, 2**31, 2**40, 2**62, 2**63, 2**64 + 1, 1.5, None, "1"])
        if kind == 0:
            shape = list(self.shape)
            shape[rng.randrange(len(shape))] = odd
            self.extra = {"shape": shape}
            self.must_fail = True
        elif kind == 1:
            levels = [math.nan, math.inf, 1e39, 5.0, -5.0, None, "1"]
            self.extra = {"levels": [*self.levels[:-1], rng.choice(levels)]}
            if rng.random() < 0.3:
                self.extra = {"levels": rng.choice([(), (1.0,), (1.0, 1.0), self.levels[::-1], (*self.levels, 9.0)])}
            if self.extra["levels"][:-1] == list(self.levels[:-1]) and self.extra["levels"][-1] == 5.0:
                self.levels = tuple(self.extra["levels"])
                self.may_fail = True
            else:
                self.must_fail = True
        elif kind == 2:
            self.extra = {"activation": rng.choice(["int4", "", None, 3, "float64"])}
            self.must_fail = True
        elif self.conv:
            name = rng.choice(["stride", "padding", "dilation", "groups"])
            value = odd if name == "groups" else rng.choice([(odd, 1), (1, odd), (1,), (1, 1, 1), 1, None])
            self.extra = {name: value}
            self.may_fail = self.unknown = True
            if name == "groups":
                self.groups = value
            else:
                self.window[name] = value
        self.told.append(f"parameters {self.extra}")

    # The call and its reference.

    def call(self):
        modes = ["plain"] * 6 + ["dispatcher", "meta-device", "modes"]
        if not self.spoiled:  # else torch itself may crash, before any kernel is called
            modes += ["vmap", "fake", "functionalize"]
        mode = self.rng.choice(modes)
        arguments = {"shape": self.shape, "levels": self.levels, "relu": self.relu, "activation": self.activation}
        arguments |= {**self.window, "groups": self.groups} if self.conv else {}
        arguments |= self.extra
        function = kernels.conv2d if self.conv else kernels.linear
        self.told.append(mode)
        with ExitStack() as stack:
            stack.enter_context(self.rng.choice([nullcontext, torch.no_grad, torch.inference_mode])())
            if mode == "dispatcher":
                op = ops.conv2d if self.conv else ops.linear
                o = [self.operands.get(name) for name in ("x", "prepared", "scale", "shift", "residual")]
                rest = [arguments[n] for n in ("stride", "padding", "dilation", "groups")] if self.conv else []
                geometry = [arguments[name] for name in ("shape", "levels", "activation")]
                return op(o[0], o[1], *geometry, *rest, *o[2:], arguments["relu"])
            if mode == "vmap":
                self.may_fail = True
                others = {k: v for k, v in self.operands.items() if k not in ("x", "residual")}
                residual = self.operands.get("residual")

                def one(x, residual):
                    lift = (lambda t: None if t is None else t[None]) if self.conv else (lambda t: t)
                    y = function(lift(x), residual=lift(residual), **others, **arguments)
                    return y[0] if self.conv else y

                return torch.vmap(one, in_dims=(0, None if residual is None else 0))(self.operands["x"], residual)
            if mode == "fake":
                self.may_fail = True
                fake = stack.enter_context(FakeTensorMode())
                stand = {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in self.operands.items()}
                return function(**stand, **arguments)
            if mode == "functionalize":
                self.may_fail = True
                names = list(self.operands)
                run = torch.func.functionalize(
                    lambda *tensors: function(**dict(zip(names, tensors, strict=True)), **arguments)
                )
                return run(*self.operands.values())
            if mode == "meta-device":
                stack.enter_context(torch.device("meta"))
            if mode == "modes":
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                before = torch.get_default_dtype()
                stack.callback(torch.set_default_dtype, before)
                torch.set_default_dtype(torch.float64)
                threads = torch.get_num_threads()
                stack.callback(torch.set_num_threads, threads)
                torch.set_num_threads(self.rng.choice([1, 2, 3]))
            return function(**self.operands, **arguments)

    def check(self, y):
        """Raises where the result is not that of float64; returns what it was."""
        assert isinstance(y, Tensor), type(y)
        shape = self.product(self.meaning["x"].double(), torch.ones(self.shape, dtype=torch.float64)).shape
        assert y.shape == shape, (y.shape, shape)
        assert y.dtype == self.dtype, y.dtype
        if torch._is_functional_tensor(y):
            y = torch._from_functional_tensor(y)
        if y.is_meta or type(y).__name__ == "FakeTensor":
            assert any("fake" in word or "meta" in word for word in self.told)
            return "shape"
        lower, exact, upper = self.reference()
        y = y.double()
        wrong = ~((y >= lower) & (y <= upper)) & exact.isfinite()
        assert not bool(wrong.any()), f"{int(wrong.sum())} numbers are wrong: {y[wrong][:3]} for {exact[wrong][:3]}"
        hidden = (
            y.isfinite() & ~exact.isfinite() & ~((y == 0) & (exact == -math.inf) if self.relu else torch.tensor(False))
        )
        assert not bool(hidden.any()), f"{int(hidden.sum())} numbers are finite that should not be"
        return "right"

    def reference(self):
        x, levels = self.meaning["x"], self.levels
        weight = torch.tensor(levels, dtype=torch.float64)[self.codes.long()]
        largest = torch.full_like(weight, max(map(abs, levels)))
        eps = torch.finfo(self.dtype).eps
        ulp = 8 * eps if self.dtype != torch.float32 else FLOAT_ERROR
        if self.activation == "binary":
            x = torch.where(x >= 0, 1.0, -1.0).double()
            y, error = self.product(x, weight), self.product(x.abs(), largest) * 4 * eps
        elif self.activation == "int8":
            step = x.abs().amax(-1, keepdim=True) / 127
            bad = ~step.isfinite()
            q = torch.where(step > 0, x / step, 0).round().clamp(-127, 127)
            y = self.product(q.double(), weight) * step.double()
            error = self.product(q.double().abs(), largest) * step.double() * 8 * eps
            if self.dtype != torch.float32:  # one step of an input that is halfway
                error = error + self.product(torch.ones_like(q).double(), largest) * step.double()
            y = torch.where(bad, math.nan, y)
        else:
            x = x.double()
            y, error = self.product(x, weight), self.product(x.abs(), largest) * ulp
        error = error + 1e-37 if self.dtype in (torch.float32, torch.bfloat16) else error + 1e-7 * (eps > 1e-4)
        axis = [1] * y.dim()
        axis[1 if self.conv else -1] = -1
        size = y.abs()
        scale, shift, residual = (self.meaning.get(name) for name in ("scale", "shift", "residual"))
        if scale is not None:
            scale = scale.double().view(axis)
            y, error, size = y * scale, error * scale.abs(), size * scale.abs().clamp_min(1)
        if shift is not None:
            y, size = y + shift.double().view(axis), size + shift.double().abs().view(axis)
        if residual is not None:
            y, size = y + residual.double(), size + residual.double().abs()
        error = error + 8 * eps * size
        most = torch.finfo(self.dtype).max
        y = torch.where((y.abs() + error > most) & y.isfinite(), math.nan, y)  # overflows, at the latest in the end
        lower, upper = y - error, y + error
        if self.relu:
            lower, upper = lower.relu(), upper.relu()
            y = torch.where(y.isfinite(), y.relu(), y)
        return lower, y, upper


def attempt(seed):
    """What became of one call: right, shape (of a fake result) or the exception's type; AssertionError where wrong."""
    case = Case(seed)
    rng = case.rng
    for name in rng.sample(list(case.operands), rng.choice([1, 1, 2])):
        rng.choice([case.disguise, case.disguise, case.renumber, case.spoil])(name)
    if rng.random() < 0.15:
        case.misparameter()
    y, kind, told = None, "", ""
    try:
        y = case.call()
    except Exception as error:  # not kept: its frames hold guards of torch
        kind, told = type(error).__name__, str(error)
    if kind:
        assert told, "an exception without a message"
        assert case.may_fail or case.must_fail, f"{case.told}: {kind}: {told}"
        return kind
    try:
        fake = y.is_meta or type(y).__name__ == "FakeTensor"
        assert not case.must_fail or fake, "a result where there can be none"
        return case.check(y)
    except AssertionError as error:
        raise AssertionError(f"{case.told}, {case.activation}, {case.dtype}: {error}") from error
    except Exception:
        if not case.unknown:
            raise
        return "right shape"  # of parameters that torch's own convolution does not take


def main():
    count, seed = (int(argument) for argument in (*sys.argv[1:3], *("1000", "0")[len(sys.argv[1:3]) :]))
    path = sys.argv[3] if len(sys.argv) > 3 else kernels.active()
    warnings.simplefilter("ignore")
    gc.disable()
    outcomes, wrong = collections.Counter(), []
    for number in range(100):  # what torch allocates once
        with kernels.force(path):
            try_one(number, wrong)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    wrong.clear()
    for number in range(seed, seed + count):
        with kernels.force(path):
            outcomes[try_one(number, wrong)] += 1
    print(json.dumps({"path": path, "calls": count, **dict(sorted(outcomes.items())), "first": wrong[:5]}))
    return bool(wrong)


KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def try_one(seed, wrong):
    """One call in a fresh state of torch's dispatcher.

    Guards of torch in the frames of an exception set that state when they are collected: so that is done in between.
    """
    if seed % 100 == 0:
        gc.collect()
    with torch._C._ForceDispatchKeyGuard(*KEYS):
        try:
            return attempt(seed)
        except AssertionError as error:
            wrong.append(f"{seed}: {error}")
            return "wrong"


if __name__ == "__main__":
    sys.exit(main())
