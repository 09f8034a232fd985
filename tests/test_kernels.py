"""Kernels: every path gives the layer that torch gives; what is damaged is refused; installing needs no compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

import mirrorquant
from mirrorquant.levels import Levels
from mirrorquant.packing import kernels
from mirrorquant.packing.kernels import fallback, gpu, ops
from mirrorquant.packing.kernels.layer import Epilogue, Geometry
from mirrorquant.packing.kernels.prepared import HEADER_BYTES, weight

PATHS = kernels.available()
BINARY, TERNARY = (-1.0, 1.0), (-1.0, 0.0, 1.0)
LEVELS = [BINARY, TERNARY, (-0.25, 0.25), (0.0, 1.0), (-0.5, 0.5, 1.5), (-1.0, 0.0, 3.0), (-2.0, -1.0, 0.5, 1.0)]
ROOT = Path(__file__).parent.parent
TOLERANCE = 2e-6  # of max|level| * sum|x| over what an output sums; for +-1 that is the sum of |w x|

needs_native = pytest.mark.skipif(len(PATHS) == 1, reason="no native kernels here")


def codes_of(shape: tuple[int, ...], levels: tuple[float, ...]) -> Tensor:
    return torch.randint(0, len(levels), shape, dtype=torch.uint8)


def conv64(x: Tensor, codes: Tensor, levels: tuple[float, ...], **window: object) -> tuple[Tensor, Tensor]:
    """The convolution in float64, and the scale of its rounding errors."""
    values = torch.tensor(levels, dtype=torch.float64)[codes.long()]
    bound = torch.full_like(values, max(map(abs, levels)))
    return F.conv2d(x.double(), values, **window), F.conv2d(x.double().abs(), bound, **window)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, object]:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    wide = groups > 1 and draw(st.booleans())  # native groups are wide ones
    inputs = draw(st.integers(8, 20) if wide else st.integers(1, 40))
    outputs = draw(st.integers(16, 40) if wide else st.integers(1, 80))
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (5, 5), (2, 3), (1, 4), (7, 7)]))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 3)]))
    padding = draw(st.sampled_from([(0, 0), (1, 1), (2, 3), (4, 0)]))
    least = [max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]) for i in (0, 1)]
    return {
        "groups": groups,
        "shape": (groups * outputs, inputs, *kernel),
        "stride": draw(st.sampled_from([(1, 1), (2, 2), (1, 2), (3, 1)])),
        "padding": padding,
        "dilation": dilation,
        "batch": draw(st.sampled_from([1, 2, 3])),
        "size": [draw(st.integers(low, low + 12)) for low in least],
        "levels": draw(st.sampled_from(LEVELS)),
        "channels_last": draw(st.booleans()),
        "scale": draw(st.booleans()),
        "shift": draw(st.booleans()),
        "residual": draw(st.booleans()),
        "relu": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None)
@given(case=convolutions())
def test_convolutions_are_those_of_float64(path: str, case: dict) -> None:
    check_convolution(path, case)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("levels", LEVELS)
def test_one_channel_with_strides_of_channels_last_is_right(path: str, levels: tuple[float, ...]) -> None:
    """torch's own convolution is not, on processors with AVX-512."""
    case = {"groups": 1, "shape": (8, 1, 7, 7), "stride": (1, 2), "padding": (4, 0), "dilation": (1, 1), "batch": 2}
    case |= {"size": [4, 7], "levels": levels, "channels_last": True, "seed": 0}
    check_convolution(path, case | dict.fromkeys(("scale", "shift", "residual", "relu"), True))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=1500, deadline=None)
@given(case=convolutions())
def test_thousands_of_convolutions_are_those_of_float64(path: str, case: dict) -> None:
    check_convolution(path, case)


def check_convolution(path: str, case: dict) -> None:
    torch.manual_seed(case["seed"])
    shape, levels, groups = case["shape"], case["levels"], case["groups"]
    codes = codes_of(shape, levels)
    x = torch.randn(case["batch"], shape[1] * groups, *case["size"])
    x = x.to(memory_format=torch.channels_last) if case["channels_last"] else x
    window = {key: case[key] for key in ("stride", "padding", "dilation", "groups")}
    exact, bound = conv64(x, codes, levels, **window)
    epilogue = {
        "scale": torch.rand(shape[0]) + 0.5 if case["scale"] else None,
        "shift": torch.randn(shape[0]) if case["shift"] else None,
        "residual": torch.randn(exact.shape) if case["residual"] else None,
        "relu": case["relu"],
    }
    with kernels.force(path):
        prepared = kernels.prepare(codes, levels, groups)
        run = {"shape": shape, "levels": levels, **window}
        y = kernels.conv2d(x, prepared, **run)
        finished = kernels.conv2d(x, prepared, **run, **epilogue)
        signs = kernels.conv2d(x, prepared, **run, activation="binary")
        finished_signs = kernels.conv2d(x, prepared, **run, **epilogue, activation="binary")
    assert y.is_contiguous(memory_format=suggest_memory_format(x))
    assert bool(((y - exact).abs() <= TOLERANCE * bound).all())
    after = fallback.finish(exact, Epilogue(**epilogue))
    size = bound * (epilogue["scale"].max() if case["scale"] else 1) + after.abs() + exact.abs() + 1
    assert bool(((finished - after).abs() <= TOLERANCE * size).all())
    binary, _ = conv64(Levels(-1, 1).nearest(x), codes, levels, **window)
    if fallback.affine(levels) is None:
        torch.testing.assert_close(signs, binary.float())
    else:  # rounded once where the levels are halves and quarters: float32 holds the sum itself
        assert torch.equal(signs, binary.float())
        assert torch.equal(finished_signs, fallback.finish(*after_scale(binary.float(), levels, Epilogue(**epilogue))))


def after_scale(y: Tensor, levels: tuple[float, ...], epilogue: Epilogue) -> tuple[Tensor, Epilogue]:
    """The levels' constant belongs to the scale where they are symmetric, as the kernels have it."""
    a, b = fallback.affine(levels)
    if b == 0:
        y, epilogue = y / a, fallback.fold(epilogue, a, y, y.shape[1])
    return y, epilogue


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 200),
    inputs=st.integers(1, 700),
    rows=st.sampled_from([(1,), (2,), (3, 2), (7,), (8,), (17,), ()]),
    levels=st.sampled_from(LEVELS),
    relu=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_linear_layers_are_those_of_float64(path, outputs, inputs, rows, levels, relu, seed) -> None:
    torch.manual_seed(seed)
    codes, x = codes_of((outputs, inputs), levels), torch.randn(*rows, inputs)
    values = torch.tensor(levels, dtype=torch.float64)[codes.long()]
    scale, shift, residual = torch.rand(outputs), torch.randn(outputs), torch.randn(*rows, outputs)
    with kernels.force(path):
        prepared = kernels.prepare(codes, levels)
        run = {"shape": codes.shape, "levels": levels}
        y = kernels.linear(x, prepared, **run)
        signs = kernels.linear(x, prepared, **run, activation="binary")
        bytes_ = kernels.linear(
            x, prepared, **run, activation="int8", scale=scale, shift=shift, residual=residual, relu=relu
        )
    assert y.shape == (*rows, outputs)
    bound = max(map(abs, levels)) * x.double().abs().sum(-1, keepdim=True)
    assert bool(((y - x.double() @ values.T).abs() <= TOLERANCE * bound).all())
    if fallback.affine(levels) is not None:
        assert torch.equal(signs, (Levels(-1, 1).nearest(x).double() @ values.T).float())
    with kernels.force("torch"):
        expected = kernels.linear(
            x,
            kernels.prepare(codes, levels),
            **run,
            activation="int8",
            scale=scale,
            shift=shift,
            residual=residual,
            relu=relu,
        )
    torch.testing.assert_close(
        bytes_, expected, rtol=0 if fallback.affine(levels) else 1e-5, atol=0 if fallback.affine(levels) else 1e-4
    )


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("path", PATHS)
def test_a_linear_layer_takes_inputs_of_four_dimensions(path: str, levels: tuple[float, ...]) -> None:
    """As of windows in a transformer: outputs lie along the last axis, also where another one is as long."""
    x, codes = torch.randn(2, 5, 3, 5), codes_of((5, 5), levels)
    scale, shift = torch.rand(5) + 0.5, torch.randn(5)
    with kernels.force(path):
        prepared = kernels.prepare(codes, levels)
        for kind in (torch.float32, torch.float64):
            y = kernels.linear(x.to(kind), prepared, shape=(5, 5), levels=levels, scale=scale, shift=shift)
            expected = F.linear(x.to(kind), fallback.decode(codes, levels).to(kind)) * scale + shift
            assert torch.allclose(y, expected.to(kind), atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_int8_is_its_definition(path: str) -> None:
    torch.manual_seed(0)
    codes, x = codes_of((70, 1000), BINARY), torch.randn(5, 1000)
    x[3] = 0
    step = x.abs().amax(1, keepdim=True) / 127
    q = torch.where(step > 0, x / step, 0).round()
    exact = (q.double() @ (2 * codes.double() - 1).T).float() * step
    with kernels.force(path):
        y = kernels.linear(x, kernels.prepare(codes, BINARY), shape=codes.shape, levels=BINARY, activation="int8")
    assert torch.equal(y, exact)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("x", "sign"), [(0.0, 1.0), (-0.0, 1.0), (float("nan"), -1.0), (1e-45, 1.0), (-1e-45, -1.0)])
def test_the_sign_of_zero_is_plus_one(path: str, x: float, sign: float) -> None:
    codes = torch.ones(3, 5, dtype=torch.uint8)
    with kernels.force(path):
        y = kernels.linear(
            torch.full((1, 5), x), kernels.prepare(codes, BINARY), shape=(3, 5), levels=BINARY, activation="binary"
        )
    assert y.tolist() == [[5 * sign] * 3]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_visible(path: str, rows: int, bad: float) -> None:
    codes, x = codes_of((10, 300), BINARY), torch.randn(rows, 300)
    x[0, 7] = bad
    with kernels.force(path):
        y = kernels.linear(x, kernels.prepare(codes, BINARY), shape=codes.shape, levels=BINARY)
    assert not bool(y[0].isfinite().any())
    assert bool(y[1:].isfinite().all())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("levels", [BINARY, TERNARY, (0.0, 1.0), (-1.0, 0.0, 3.0)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_int8_row_that_is_not_finite_is_nan_on_every_path(path: str, levels: tuple, bad: float) -> None:
    torch.manual_seed(0)
    codes, x = codes_of((70, 300), levels), torch.randn(9, 300)
    run = {"shape": codes.shape, "levels": levels, "activation": "int8"}
    with kernels.force(path):
        prepared = kernels.prepare(codes, levels)
        expected = kernels.linear(x, prepared, **run)
        x[4, 7] = bad
        for relu in (False, True):
            y = kernels.linear(x, prepared, **run, relu=relu)
            assert bool(y[4].isnan().all())
            others = torch.arange(9) != 4
            assert torch.equal(y[others], expected[others].relu() if relu else expected[others])


def zeros_without_memory(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def shrunk(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() - 4)
    return t


def leaked(t: Tensor) -> Tensor:
    """A tensor of vmap outside of it."""
    kept: list[Tensor] = []
    torch.vmap(lambda row: kept.append(row) or row * 1)(t[None])
    return kept[0]


def operands(conv: bool) -> tuple[dict[str, Tensor], dict[str, object]]:
    torch.manual_seed(0)
    codes = codes_of((20, 9, 3, 3) if conv else (20, 9), BINARY)
    x = torch.randn(2, 9, 6, 6) if conv else torch.randn(3, 9)
    size = (2, 20, 4, 4) if conv else (3, 20)
    given = {"x": x, "prepared": kernels.prepare(codes, BINARY), "scale": torch.rand(20), "shift": torch.randn(20)}
    return {**given, "residual": torch.randn(size)}, {"shape": codes.shape, "levels": BINARY}


OPERANDS = ["x", "prepared", "scale", "shift", "residual"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("name", ["x", "scale", "shift", "residual"])
def test_negated_views_and_zeros_without_memory_count_as_what_they_are(path: str, conv: bool, name: str) -> None:
    with kernels.force(path):
        given, run = operands(conv)
        call = kernels.conv2d if conv else kernels.linear
        expected = call(**given, **run)
        assert torch.equal(call(**{**given, name: torch._neg_view(-given[name])}, **run), expected)
        imaginary = torch.complex(torch.zeros_like(given[name]), -given[name]).conj().imag
        assert imaginary.is_neg()
        assert torch.equal(call(**{**given, name: imaginary}, **run), expected)
        nothing = call(**{**given, name: torch.zeros_like(given[name])}, **run)
        assert torch.equal(call(**{**given, name: zeros_without_memory(given[name])}, **run), nothing)


SPOILED = {
    "meta": (lambda t: t.to("meta"), r"{name} is on meta, but x is on cpu|prepared is on cpu, but x is on meta"),
    "freed": (freed, r"{name} is .* but only 0 of the .* bytes"),
    "shrunk": (shrunk, r"{name} is .* but only .* of the .* bytes"),
    "sparse": (lambda t: t.to_sparse(), r"{name} is torch.sparse_coo"),
    "nested": (lambda t: torch.nested.as_nested_tensor(t[None]), r"{name} is nested"),
    "vmap": (leaked, r"{name} is a wrapper without memory"),
    "functional": (torch._to_functional_tensor, r"{name} is .* but only 0 of the .* bytes"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("kind", SPOILED)
def test_operands_without_memory_are_errors_that_name_them(path: str, conv: bool, name: str, kind: str) -> None:
    spoil, message = SPOILED[kind]
    with kernels.force(path):
        given, run = operands(conv)
        given[name] = spoil(given[name])
        with pytest.raises(ValueError, match=message.format(name=name)):
            (kernels.conv2d if conv else kernels.linear)(**given, **run)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["x", "scale", "shift", "residual"])
def test_kernels_refuse_what_needs_a_gradient(path: str, name: str) -> None:
    with kernels.force(path):
        given, run = operands(False)
        given[name].requires_grad_()
        with pytest.raises(ValueError, match=f"{name} requires a gradient"):
            kernels.linear(**given, **run)
        with torch.no_grad():
            assert not kernels.linear(**given, **run).requires_grad


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_does_not_reach_the_kernels(path: str, conv: bool, dtype: torch.dtype) -> None:
    with kernels.force(path):
        given, run = operands(conv)
        given |= {name: given[name].to(dtype) for name in ("x", "residual")}
        call = kernels.conv2d if conv else kernels.linear
        expected = call(**given, **run)
        with torch.autocast("cpu", torch.bfloat16):
            y = call(**given, **run)
    assert y.dtype == dtype
    assert torch.equal(y, expected)


def test_a_weight_prepared_for_torch_runs_with_its_own_levels_only() -> None:
    codes, x = codes_of((4, 6), BINARY), torch.randn(2, 6)
    with kernels.force("torch"):
        prepared = kernels.prepare(codes, BINARY)
        with pytest.raises(ValueError, match=r"not prepared for .* with 1 groups and the levels \[-2.0, 2.0\]"):
            kernels.linear(x, prepared, shape=(4, 6), levels=(-2.0, 2.0))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "levels", [(1.0, -1.0), (1.0, 1.0), (0.0, float("nan")), (0.0, float("inf")), (0.0, 1e39), (1.0,)]
)
def test_levels_that_are_none_are_refused(path: str, levels: tuple[float, ...]) -> None:
    codes, x = torch.zeros(4, 6, dtype=torch.uint8), torch.randn(2, 6)
    with kernels.force(path):
        with pytest.raises(ValueError, match="levels"):
            kernels.prepare(codes, levels)
        prepared = kernels.prepare(codes, BINARY)
        with pytest.raises(ValueError, match="levels"):
            kernels.linear(x, prepared, shape=(4, 6), levels=levels)


@pytest.mark.parametrize("path", PATHS)
def test_codes_without_memory_are_refused(path: str) -> None:
    codes = torch.ones(20, 9, dtype=torch.uint8)
    with kernels.force(path):
        expected = kernels.prepare(torch.zeros_like(codes), BINARY)
        assert torch.equal(kernels.prepare(zeros_without_memory(codes), BINARY), expected)
        for spoil in (freed, shrunk, leaked, lambda t: t.to("meta"), lambda t: t.to_sparse()):
            with pytest.raises(ValueError, match="codes"):
                kernels.prepare(spoil(codes), BINARY)


def test_a_packed_model_without_numbers_names_the_devices() -> None:
    layer = nn.Linear(512, 1024)
    layer.weight.data.sign_()
    packed = mirrorquant.pack(nn.Sequential(layer)).to("meta")
    assert packed.layers() == ["0"]
    with pytest.raises(ValueError, match=r"prepared is on meta, but x is on cpu"):
        packed(torch.randn(4, 512))
    assert packed(torch.randn(4, 512, device="meta")).shape == (4, 1024)


def fuzz_calls(path: str, count: int) -> None:
    """Runs apart, so that a crash is seen."""
    command = [sys.executable, "-X", "faulthandler", str(ROOT / "tests/fuzz_calls.py"), str(count), "0", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("path", PATHS)
def test_hostile_calls_end_in_the_right_numbers_or_an_exception(path: str) -> None:
    fuzz_calls(path, 60)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_hundreds_of_hostile_calls_end_in_the_right_numbers_or_an_exception(path: str) -> None:
    fuzz_calls(path, 600)


@pytest.mark.parametrize("path", PATHS)
def test_tiny_and_huge_inputs_keep_their_precision(path: str) -> None:
    torch.manual_seed(1)
    codes = codes_of((64, 2048), BINARY)
    values = 2 * codes.double() - 1
    for size in (1e-30, 1e30):
        x = size * torch.randn(1, 2048) * torch.logspace(-6, 0, 2048)
        with kernels.force(path):
            y = kernels.linear(x, kernels.prepare(codes, BINARY), shape=codes.shape, levels=BINARY)
        assert bool(((y - x.double() @ values.T).abs() <= TOLERANCE * x.double().abs().sum()).all())


@pytest.mark.parametrize("path", PATHS)
def test_sums_beyond_sixteen_bits(path: str) -> None:
    codes = torch.ones(2, 70_001, dtype=torch.uint8)
    x = torch.full((1, 70_001), -1.0)
    with kernels.force(path):
        prepared = kernels.prepare(codes, BINARY)
        for activation in ("binary", "float32"):
            y = kernels.linear(x, prepared, shape=codes.shape, levels=BINARY, activation=activation)
            assert y.tolist() == [[-70_001.0] * 2]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["float32", "binary"])
def test_an_empty_batch_gives_an_empty_result(path: str, activation: str) -> None:
    codes = codes_of((5, 4, 3, 3), BINARY)
    with kernels.force(path):
        prepared = kernels.prepare(codes, BINARY)
        y = kernels.conv2d(torch.empty(0, 4, 6, 6), prepared, shape=codes.shape, levels=BINARY, activation=activation)
        flat = kernels.prepare(codes.view(5, 36), BINARY)
        z = kernels.linear(torch.empty(0, 36), flat, shape=(5, 36), levels=BINARY, activation=activation)
    assert y.shape == (0, 5, 4, 4)
    assert z.shape == (0, 5)


@pytest.mark.parametrize("path", PATHS)
def test_depthwise_and_other_dtypes(path: str) -> None:
    torch.manual_seed(0)
    codes, x = codes_of((12, 1, 3, 3), TERNARY), torch.randn(2, 12, 7, 7)
    with kernels.force(path):
        prepared = kernels.prepare(codes, TERNARY, 12)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0.1)):
            y = kernels.conv2d(x.to(dtype), prepared, shape=codes.shape, levels=TERNARY, groups=12, padding=(1, 1))
            exact = F.conv2d(x.double(), codes.double() - 1, padding=1, groups=12)
            assert y.dtype == dtype
            torch.testing.assert_close(y.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("path", PATHS)
def test_the_default_dtype_changes_nothing(path: str) -> None:
    codes, x = codes_of((20, 16, 3, 3), BINARY), torch.randn(2, 16, 5, 5)
    before = torch.get_default_dtype()
    with kernels.force(path):
        prepared = kernels.prepare(codes, BINARY)
        expected = kernels.conv2d(x, prepared, shape=codes.shape, levels=BINARY)
        try:
            torch.set_default_dtype(torch.float64)
            found = kernels.conv2d(x, kernels.prepare(codes, BINARY), shape=codes.shape, levels=BINARY)
        finally:
            torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@needs_native
def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    codes, x = codes_of((70, 30, 3, 3), BINARY), torch.randn(3, 30, 9, 11)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            prepared = kernels.prepare(codes, BINARY)
            run = {"shape": codes.shape, "levels": BINARY, "padding": (1, 1)}
            results.append([kernels.conv2d(x, prepared, **run, activation=a) for a in ("float32", "binary")])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 30), st.integers(1, 4), st.integers(1, 4)),
    levels=st.sampled_from([BINARY, TERNARY]),
)
def test_a_prepared_weight_reads_back(shape: tuple[int, ...], levels: tuple[float, ...]) -> None:
    codes = codes_of(shape, levels)
    prepared = kernels.prepare(codes, levels)
    assert torch.equal(weight(prepared, Geometry(shape, levels)), fallback.decode(codes, levels))


@pytest.mark.parametrize("levels", [BINARY, TERNARY])
@pytest.mark.parametrize("inputs", [64, 512, 777])
def test_the_layout_for_gpus_reads_back(levels: tuple[float, ...], inputs: int) -> None:
    codes = codes_of((5, inputs), levels)
    prepared = gpu.prepare(codes, levels)
    assert gpu.is_gpu(prepared, codes.shape, levels)
    assert not gpu.is_gpu(kernels.prepare(codes, levels), codes.shape, levels)
    assert torch.equal(gpu.unpack(prepared, codes.shape, levels, torch.float32), fallback.decode(codes, levels))
    words = prepared[HEADER_BYTES:].view(torch.int32).view(len(levels) - 1, 5, -1, 16)
    assert int(words[0, 3, 0, 7] >> 2 & 1) == int(codes[3, 16 * 2 + 7] > 0)


def damaged(prepared: Tensor, kind: str) -> Tensor:
    bad = prepared.clone()
    match kind:
        case "magic":
            bad[0] ^= 1
        case "layout":
            bad[8] = 77
        case "levels":
            bad[12] = 9
        case "shape":
            bad[16:24] = torch.tensor([255] * 7 + [127], dtype=torch.uint8)
        case "groups":
            bad[48] = 5
        case "length":
            bad[56] ^= 1
        case "truncated":
            bad = bad[:-1].contiguous()
        case "header-only":
            bad = bad[:HEADER_BYTES].contiguous()
        case "short":
            bad = bad[:10].contiguous()
        case "empty":
            bad = bad[:0]
        case "long":
            bad = torch.cat([bad, bad])
        case "dtype":
            bad = bad.float()
        case "strided":
            bad = torch.stack([bad, bad], 1)[:, 0]
        case "matrix":
            bad = bad[None]
    return bad


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind",
    [
        "magic",
        "layout",
        "levels",
        "shape",
        "groups",
        "length",
        "truncated",
        "header-only",
        "short",
        "empty",
        "long",
        "dtype",
        "strided",
        "matrix",
    ],
)
def test_a_damaged_prepared_weight_is_refused(path: str, kind: str) -> None:
    codes, x = codes_of((16, 8, 3, 3), BINARY), torch.randn(1, 8, 5, 5)
    with kernels.force(path):
        prepared = damaged(kernels.prepare(codes, BINARY), kind)
        for activation in ("float32", "binary"):
            with pytest.raises(ValueError, match="prepare"):
                kernels.conv2d(x, prepared, shape=codes.shape, levels=BINARY, activation=activation)


@pytest.mark.parametrize("path", PATHS)
def test_any_bytes_behind_a_good_header_stay_in_bounds(path: str) -> None:
    codes, x = codes_of((20, 9, 3, 3), BINARY), torch.randn(2, 9, 6, 6)
    with kernels.force(path):
        prepared = kernels.prepare(codes, BINARY)
        body = prepared[HEADER_BYTES:-8]  # in torch's layout the levels come last, which are compared
        body.copy_(torch.randint(0, 256, body.shape, dtype=torch.uint8))
        for activation in ("float32", "binary"):
            y = kernels.conv2d(x, prepared, shape=codes.shape, levels=BINARY, activation=activation)
            assert y.shape == (2, 20, 4, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (16, 9, 3, 3)}, "needs 9 \\* 1 channels"),
        ({"shape": (8, 8, 3, 3)}, r"not prepared for a layer of the shape \[8, 8, 3, 3\]"),
        ({"levels": TERNARY}, r"not prepared for .* the levels \[-1.0, 0.0, 1.0\]"),
        ({"stride": (0, 1)}, "stride is \\[0, 1\\]"),
        ({"padding": (-1, 0)}, "padding is"),
        ({"dilation": (9, 9)}, "too small"),
        ({"groups": 2}, "groups"),
        ({"activation": "int4"}, "int4"),
        ({"scale": torch.ones(3)}, "scale is"),
        ({"shift": torch.ones(16, dtype=torch.float64)}, "shift is"),
        ({"residual": torch.ones(1, 16, 3, 4)}, "residual is"),
        ({"x": torch.ones(1, 8, 5)}, "x is 3-D"),
        ({"x": torch.ones(1, 8, 5, 5, dtype=torch.int32)}, "floating-point"),
    ],
)
def test_errors_name_what_does_not_fit(change: dict, message: str) -> None:
    codes = codes_of((16, 8, 3, 3), BINARY)
    call = {"x": torch.randn(1, 8, 5, 5), "shape": codes.shape, "levels": BINARY, **change}
    with pytest.raises(ValueError, match=message):
        kernels.conv2d(prepared=kernels.prepare(codes, BINARY), **call)


@needs_native
@pytest.mark.parametrize("path", PATHS[:-1])
def test_rows_far_apart_take_no_longer(path: str) -> None:
    """Of a kernel that is dilated over a billion rows only the middle one meets the image."""
    codes, x, far = codes_of((16, 16, 3, 1), BINARY), torch.randn(1, 16, 2, 2), 2**30
    with kernels.force(path):
        prepared = kernels.prepare(codes, BINARY)
        y = kernels.conv2d(x, prepared, shape=codes.shape, levels=BINARY, padding=(far, 0), dilation=(far, 1))
    torch.testing.assert_close(y, F.conv2d(x, 2 * codes[:, :, 1:2].float() - 1))


@pytest.mark.parametrize("activation", ["float32", "binary"])
def test_padding_beyond_all_memory_is_refused(activation: str) -> None:
    prepared, far = kernels.prepare(torch.ones(1, 1, 1, 1, dtype=torch.uint8), BINARY), 2**30
    options = {"padding": (far, far), "stride": (far, far), "activation": activation}
    with pytest.raises(RuntimeError, match=r"too large|not enough memory"):
        kernels.conv2d(torch.ones(1, 1, 1, 1), prepared, shape=(1, 1, 1, 1), levels=BINARY, **options)


@pytest.mark.parametrize(
    ("codes", "levels", "groups", "message"),
    [
        (torch.zeros(2, 3), BINARY, 1, "uint8"),
        (torch.full((2, 3), 2, dtype=torch.uint8), BINARY, 1, "go up to 2"),
        (torch.zeros(2, 3, dtype=torch.uint8), (1.0,), 1, "levels"),
        (torch.zeros(2, 3, dtype=torch.uint8), BINARY, 3, "divide"),
        (torch.zeros(2, 3, 4, dtype=torch.uint8), BINARY, 1, "shape"),
        (torch.zeros(0, 3, dtype=torch.uint8), BINARY, 1, "at least 1"),
    ],
)
def test_prepare_refuses_what_is_no_weight(codes: Tensor, levels: tuple, groups: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.prepare(codes, levels, groups)


class Net(nn.Module):
    """A convolution and a linear layer from prepared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_shape, self.fc_shape = (16, 8, 3, 3), (10, 16)
        self.register_buffer("conv", kernels.prepare(codes_of(self.conv_shape, BINARY), BINARY))
        self.register_buffer("fc", kernels.prepare(codes_of(self.fc_shape, TERNARY), TERNARY))
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        options = {"shape": self.conv_shape, "levels": BINARY, "scale": self.scale, "relu": True, "padding": (1, 1)}
        x = kernels.conv2d(x, self.conv, **options) + 1
        return kernels.linear(x.mean((2, 3)), self.fc, shape=self.fc_shape, levels=TERNARY)


@pytest.mark.parametrize("path", PATHS)
def test_compile_and_export_see_the_operators(path: str) -> None:
    with kernels.force(path):
        net, x = Net().eval(), torch.randn(2, 8, 6, 6)
        with torch.no_grad():
            expected = net(x)
            exported = torch.export.export(net, (x,))
            assert "mirrorquant.conv2d" in str(exported.graph)
            assert torch.equal(exported.module()(x), expected)
            compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), expected)
            torch.testing.assert_close(compiled(x[:1].to(memory_format=torch.channels_last)), expected[:1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["float32", "binary"])
def test_operators_pass_opcheck(path: str, activation: str) -> None:
    with kernels.force(path):
        codes = codes_of((16, 8, 3, 3), BINARY)
        prepared, x = kernels.prepare(codes, BINARY), torch.randn(2, 8, 6, 6)
        tail = (torch.rand(16), torch.randn(16), torch.randn(2, 16, 3, 3), True)
        window = (activation, [2, 2], [1, 1], [1, 1], 1)
        for inputs in (x, x.to(memory_format=torch.channels_last)):
            torch.library.opcheck(ops.conv2d, (inputs, prepared, list(codes.shape), list(BINARY), *window, *tail))
        flat = kernels.prepare(codes.view(16, 72), BINARY)
        rows = (torch.randn(3, 72), flat, [16, 72], list(BINARY), activation, None, None, None, False)
        torch.library.opcheck(ops.linear, rows)


def test_meta_tensors_have_shapes() -> None:
    prepared = kernels.prepare(codes_of((16, 8, 3, 3), BINARY), BINARY).to("meta")
    y = kernels.conv2d(torch.empty(2, 8, 6, 6, device="meta"), prepared, shape=(16, 8, 3, 3), levels=BINARY)
    assert y.shape == (2, 16, 4, 4)


def test_describe_says_which_path_and_why() -> None:
    assert kernels.active() in kernels.describe()
    with kernels.force("torch"):
        assert kernels.active() == "torch"
        assert "forced by force()" in kernels.describe()


def test_an_unknown_or_missing_path_is_refused() -> None:
    with pytest.raises(ValueError, match="one of avx512, avx2, portable, torch"), kernels.force("neon"):
        pass
    for path in {"avx512", "avx2", "portable"} - set(PATHS):
        with pytest.raises(RuntimeError, match="choose one of"), kernels.force(path):
            pass


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_the_variable_chooses_the_path() -> None:
    code = "from mirrorquant.packing import kernels; print(kernels.describe())"
    path = PATHS[-2:][0]  # not the one that would be chosen anyway, where there is another
    told = python(code, MIRRORQUANT_KERNELS=path)
    assert told.stdout.startswith(path), told.stderr
    assert "forced by MIRRORQUANT_KERNELS" in told.stdout
    assert "MIRRORQUANT_KERNELS is 'sse9'" in python(code, MIRRORQUANT_KERNELS="sse9").stderr
    assert "forced" not in python(code, MIRRORQUANT_KERNELS="").stdout


def test_the_command_line_tells_of_a_wrong_variable_in_one_line() -> None:
    code = "import sys; from mirrorquant.cli import main; sys.exit(main(['kernels']))"
    told = python(code, MIRRORQUANT_KERNELS="sse9")
    assert told.returncode == 1
    assert [line for line in told.stderr.splitlines() if "MIRRORQUANT_KERNELS is 'sse9'" in line] == [
        "mirrorquant: MIRRORQUANT_KERNELS is 'sse9', but it must be one of avx512, avx2, portable, torch"
    ]
    assert "Traceback" not in told.stderr


def test_without_the_library_torch_runs_and_says_so() -> None:
    code = """
import pathlib, torch
from mirrorquant.packing.kernels import native
native._FILE = pathlib.Path("not-built.so"); native._load.cache_clear()
from mirrorquant.packing import kernels
print(kernels.describe())
codes = torch.ones(4, 6, dtype=torch.uint8)
print(kernels.linear(torch.ones(1, 6), kernels.prepare(codes, (-1, 1)), shape=(4, 6), levels=(-1, 1)).tolist())
"""
    told = python(code, MIRRORQUANT_KERNELS="")
    assert "without native kernels: they were not compiled when mirrorquant was installed" in told.stdout, told.stderr
    assert "[[6.0, 6.0, 6.0, 6.0]]" in told.stdout


@pytest.mark.slow
def test_building_without_a_compiler_says_so_in_one_line(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "src").symlink_to(ROOT / "src")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp"]
    for compiler, built in (("/no/such/compiler", False), (None, len(kernels.available()) > 1)):
        environment = {**os.environ, **({"CC": compiler} if compiler else {})}
        done = subprocess.run(
            [*command, str(tmp_path / "temp")],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "lib/mirrorquant/packing/kernels/_kernels.so").exists() == built
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("mirrorquant: native kernels are not built")
        ]
        assert len(lines) == (not built)


def test_a_repeated_call_is_planned_once_and_skips_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what makes a tiny layer cost microseconds."""
    given, run = operands(True)
    expected = kernels.conv2d(**given, **run)

    def never(*arguments: object) -> None:
        raise AssertionError("planned or dispatched again")

    monkeypatch.setattr(Geometry, "size", never)
    monkeypatch.setattr(ops, "conv2d", never)
    assert torch.equal(kernels.conv2d(**given, **run), expected)


def test_sources_travel_with_the_package() -> None:
    """All that setup.py compiles, and all that those files include."""
    folder = Path(mirrorquant.__file__).parent / "packing/kernels/csrc"
    compiled = set(re.findall(r"\b((?:api|path_\w+)\.c)\b", (ROOT / "setup.py").read_text()))
    assert compiled == {path.name for path in folder.glob("*.c")}
    included = {name for path in folder.iterdir() for name in re.findall(r'#include "(.+)"', path.read_text())}
    assert included == {path.name for path in folder.glob("*.h")}
    assert "csrc" in (ROOT / "MANIFEST.in").read_text() + (ROOT / "pyproject.toml").read_text()
