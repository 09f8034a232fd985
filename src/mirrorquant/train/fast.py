"""The fast training step: one CUDA graph that holds all of it.

A step is the same as the plain loop's, batch for batch and formula for formula; it only moves less memory and asks the
CPU for nothing:

- The images live on the device, and so does an epoch's plan: the order of its images, the random numbers of its
  augmentation, and for each of its steps the learning rate and β. A counter on the device says which step it is.
- All latents of a group lie in one flat tensor, and so do the optimizer's moments. Pulling back, the update of the
  optimizer, settling and projecting are then one elementwise function of flat tensors, which compiles to one kernel,
  whatever the method; the methods' own hooks are what is compiled.
- The network computes with copies of the weights in its own precision (bfloat16 under autocast), which that kernel
  writes. The latent is the float32 master, so the model's own weights need not be written at each step: ``sync`` does
  it before anybody looks.
- The first steps run as they are, which compiles them; then a step is captured, and from there on replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from mirrorquant import methods
from mirrorquant._text import first_line
from mirrorquant.data import Loader
from mirrorquant.methods import REF, Method
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.train import beside, compiling

__all__ = ["FastStep", "Unsupported"]

WARM_UP = 3
ALIGNMENT = 64  # numbers; compiled kernels want tensors that start at multiples of 16 bytes


class Unsupported(RuntimeError):
    """The fast step cannot serve this; the message says why."""


class FastStep:
    """Calling it with the number k trains on batch k. It reads the state of model and optimizer when it is built.

    Args:
        model: a model in training, on its device and in its memory format.
        opt: its optimizer, around a plain Adam or SGD.
        loader: the batches.
        lr_at: the learning rate of a step.
        losses: a scalar on the device, to which each step's loss is added.
        dtype: what the network computes in: bfloat16 (autocast), or float32.
        compiled: whether the step is compiled; False is for tests.
        say: told where the graph cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        opt: MirrorDescent,
        loader: Loader,
        lr_at: Callable[[int], float],
        losses: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        compiled: bool = True,
        say: Callable[[str], None] = print,
    ) -> None:
        self.model, self.opt, self.loader, self.lr_at, self.losses, self.say = model, opt, loader, lr_at, losses, say
        self.dtype, self.device = dtype, losses.device
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self.parts = [part for i in range(len(opt.param_groups)) for part in _parts(opt, i, names, dtype)]
        self.weights = {name: w for part in self.parts for name, w in part.weights.items()}
        self.channels_last = any(_is_channels_last(w) for w in self.weights.values())
        self.moving = [part for part in self.parts if not part.frozen]
        self.rows = torch.zeros(loader.batches_per_epoch, len(opt.param_groups), len(_Row), device=self.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.order, self.draws = (t.clone() for t in loader.epoch(0))
        self.offsets = torch.arange(loader.batch_size, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.epoch, self.next, self.done, self.runs, self.capture = -1, -1, 0, 0, self.device.type == "cuda"
        self.planned: tuple[int, list[Tensor]] | None = None
        self._forward: Callable[..., Tensor] = self._loss
        self._update: Callable[..., None] = _update
        if compiled:
            torch.compiler.reset()  # or what earlier runs of this process left would count against the limit
            self._forward = compiling.compiled(self._loss, dynamic=False)
            self._update = compiling.compiled(_update, dynamic=False)

    def __call__(self, k: int) -> None:
        """Step number k; in order, but any k may be the first."""
        epoch, place = divmod(k, self.loader.batches_per_epoch)
        if epoch != self.epoch or k != self.next:
            self._begin(epoch, place, k)
        if self.graph is None and self.capture and self.runs >= WARM_UP:
            self.graph = self.captured(self._step, "this step")
            self.capture = self.graph is not None
        if self.graph is not None:
            self.graph.replay()
        else:
            with self.beside():
                self._step()
        self.next, self.done, self.runs = k + 1, self.done + 1, self.runs + 1
        if place == self.loader.batches_per_epoch // 2:
            self.planned = epoch + 1, self._plan(epoch + 1)  # while the device is busy

    @property
    def ready(self) -> bool:
        """Whether a step is only replayed by now."""
        return self.graph is not None or (not self.capture and self.runs >= WARM_UP)

    @torch.no_grad()
    def sync(self) -> None:
        """Brings the model's weights, the optimizer's state and batch norm's counters to where the latents are."""
        if not self.done:
            return
        lr = self.lr_at(self.next - 1)
        for group in self.opt.param_groups:
            group["lr"] = lr
        self.opt.steps = self.next - 1
        self.opt._advance([float(group["anneal"](self.next)) for group in self.opt.param_groups])
        for part in self.moving:
            part.count(self.done)
        for norm in self._norms():
            norm.num_batches_tracked.add_(self.done)  # type: ignore[union-attr]
        self.opt._write(rounded=False)
        self.done = 0

    # An epoch.

    def _begin(self, epoch: int, place: int, k: int) -> None:
        """Copies the epoch's plan to the device."""
        planned, self.planned = self.planned, None
        if planned is None or planned[0] != epoch or k != self.next:
            self.next = k
            planned = epoch, self._plan(epoch)
        for tensor, host in zip((self.order, self.draws, self.rows), planned[1], strict=True):
            tensor.copy_(host, non_blocking=True)
        self.place.fill_(place)
        self.epoch = epoch

    def _plan(self, epoch: int) -> list[Tensor]:
        """Order, random numbers, and what each step needs to know for each group, on the CPU."""
        steps = range(epoch * self.loader.batches_per_epoch, (epoch + 1) * self.loader.batches_per_epoch)
        plan = [*self.loader.plan(epoch), torch.tensor([self._rows(step) for step in steps])]
        return [t.pin_memory() for t in plan] if self.device.type == "cuda" else plan

    def _rows(self, step: int) -> list[list[float]]:
        """Computed in double precision, like the plain optimizer does."""
        rows = []
        for index, group in enumerate(self.opt.param_groups):
            beta, lr = float(group["anneal"](step)), self.lr_at(step)
            scaled = float(lr * group["method"].step_scale(beta))
            part = next((part for part in self.moving if part.index == index), None)
            taken = part.counted + self.done + step - self.next if part else 0
            size, root = part.rule.step_size(scaled, taken + 1) if part else (0.0, 1.0)
            rows.append([size, root, beta, float(group["anneal"](step + 1)), lr])
        return rows

    # A step.

    def _step(self) -> None:
        with _hidden_counters(self._norms()), beside.convolutions():
            loss = self._forward(self.weights, self.place)
            leaves = [w for part in self.moving for w in part.weights.values()]
            grads = torch.autograd.grad(loss, leaves) if leaves else ()
            beside.join()
        with torch.no_grad():
            start = 0
            for part in self.moving:
                own = grads[start : start + len(part.weights)]
                start += len(own)
                torch._foreach_copy_(part.grads, [_flatten(g, like) for g, like in zip(own, part.layout, strict=True)])
                row = self.rows[:, part.index]
                self._update(
                    part.method, part.rule, part.grad, part.latents, part.moments, part.weight, row, self.place
                )
            self.losses += loss.detach()
            self.place += 1

    def _loss(self, weights: dict[str, Tensor], place: Tensor) -> Tensor:
        """Batch, augmentation, forward pass and loss: one function, so that they compile together."""
        chosen = place * self.loader.batch_size + self.offsets
        x, y = self.loader.compose(self.order[chosen], self.draws[chosen])
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return F.cross_entropy(functional_call(self.model, weights, (x,)), y)

    def captured(self, work: Callable[[], None], what: str) -> torch.cuda.CUDAGraph | None:
        """A CUDA graph of what the work does; None where it cannot be captured, which is said."""
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError as error:
            self.say(f"{what} cannot be captured in a CUDA graph ({first_line(error)}): it runs without one, slower")
            return None
        return graph

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What warms up for a capture runs on a stream of its own."""
        if not self.capture:
            yield
            return
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _norms(self) -> list[nn.modules.batchnorm._BatchNorm]:
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        return [m for m in norms if m.num_batches_tracked is not None and m.momentum is not None]


_Row = ("step_size", "root", "beta", "next_beta", "lr")


class Part:
    """The parameters of one group that compute in one precision, in flat tensors.

    ``latents`` (one tensor, or one a level of a lifted method) are the master, with the optimizer's ``moments`` beside;
    ``weight`` and ``grad`` are what the network computes with, ``weights`` and ``grads`` views of them, one a tensor.
    """

    def __init__(self, opt: MirrorDescent, index: int, params: dict[str, Tensor], dtype: torch.dtype) -> None:
        group = opt.param_groups[index]
        self.index, self.method, self.rule = index, group["method"], _rule(opt.base, opt.base.param_groups[index])
        self.frozen = opt.finalized and not isinstance(self.method, REF)
        moved = [opt.state.get(p, {}).get("latent", p) for p in params.values()]
        self.states = [opt.base.state[t] for t in moved] if not self.frozen else []
        self.layout = [p.detach() for p in params.values()]
        self.starts, end = [], 0
        for p in self.layout:
            self.starts.append(end)
            end += -(-p.numel() // ALIGNMENT) * ALIGNMENT
        lifted = moved[0].shape[: moved[0].dim() - self.layout[0].dim()]
        like = self.layout[0].new_zeros
        self.weight, self.grad = (like(end, dtype=dtype) for _ in range(2))
        latent = like(*lifted, end, dtype=moved[0].dtype)
        moments = [torch.zeros_like(latent) for _ in self.rule.moments]
        self.latents = list(latent) if lifted else [latent]
        self.moments = [list(moment) if lifted else [moment] for moment in moments]
        self.grads = [self.grad[a : a + p.numel()] for a, p in zip(self.starts, self.layout, strict=True)]
        self.weights = {}
        for name, view, p in zip(params, self.views(self.weight), self.layout, strict=True):
            self.weights[name] = view.copy_(p).detach().requires_grad_(not self.frozen)
        if self.frozen:
            return
        for tensor, view in zip(moved, self.views(latent), strict=True):
            tensor.data = view.copy_(tensor.detach())
        self.method.write(self.weight, self.latents if lifted else latent, group["beta"])
        if len({int(state.get("step", 0)) for state in self.states}) > 1:
            raise Unsupported("the optimizer has taken more steps for some parameters than for others")
        self.counted = int(self.states[0].get("step", 0))
        for name, flat in zip(self.rule.moments, moments, strict=True):
            for state, view in zip(self.states, self.views(flat), strict=True):
                if state.get(name) is not None:
                    view.copy_(state[name])
                state[name] = view
        self.count(0)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors of which a flat one (or each row of it) is made up, in shape and memory format."""
        parts = [flat[..., a : a + p.numel()] for a, p in zip(self.starts, self.layout, strict=True)]
        return [_shape(part, p) for part, p in zip(parts, self.layout, strict=True)]

    def count(self, steps: int) -> None:
        """Tells the optimizer's state of steps that were taken."""
        self.counted += steps
        for state in self.states:
            if self.rule.counts:
                state["step"] = torch.tensor(float(self.counted))


def _parts(opt: MirrorDescent, index: int, names: dict[Tensor, str], dtype: torch.dtype) -> list[Part]:
    """A group's matrices and kernels in the precision of the network, its vectors (biases, norms) in float32."""
    group = opt.param_groups[index]
    if type(group["method"]) not in methods.Method.registry.values() or (
        type(group["method"]).__module__ != methods.__name__
    ):
        raise Unsupported(f"{type(group['method']).__name__} is no method of this library's own")
    if group["method"].step_scale(2.0) != 1.0 and opt.base.param_groups[index]["weight_decay"]:
        raise Unsupported(f"{type(group['method']).__name__} divides weight decay by beta, the fast step does not")
    if any(p.dtype != torch.float32 or p.dim() == 0 or p.numel() == 0 for p in group["params"]):
        raise Unsupported("there are parameters that are not float32, or without a dimension, or empty")
    wide = {names[p]: p for p in group["params"] if p.dim() > 1}
    thin = {names[p]: p for p in group["params"] if p.dim() <= 1}
    if dtype == torch.float32:
        wide, thin = {**wide, **thin}, {}
    kinds = ((wide, dtype), (thin, torch.float32))
    return [Part(opt, index, params, kind) for params, kind in kinds if params]


def _update(
    method: Method,
    rule: Adam | SGD,
    grad: Tensor,
    latents: list[Tensor],
    moments: list[list[Tensor]],
    weight: Tensor,
    rows: Tensor,
    place: Tensor,
) -> None:
    """``MirrorDescent.step`` on flat tensors: pull back, the base optimizer's update, settle, project.

    A lifted method has a tensor a level: all is elementwise then, and compiles to one kernel.
    """
    size, root, beta, next_beta, lr = rows.index_select(0, place)[0].unbind()
    latent: Any = latents if len(latents) > 1 else latents[0]
    pulled = method.pull_back(grad.to(latents[0].dtype), latent, beta)
    each = zip(pulled if len(latents) > 1 else [pulled], latents, *moments, strict=True)
    moved: Any = [rule.update(g, x, own, size, root) for g, x, *own in each]
    moved = method.settle(moved if len(latents) > 1 else moved[0], beta, lr)
    method.write(weight, moved, next_beta)
    for old, new in zip(latents, moved if len(latents) > 1 else [moved], strict=True):
        old.copy_(new)


class Adam:
    """The update of ``torch.optim.Adam``."""

    moments = ("exp_avg", "exp_avg_sq")
    counts = True

    def __init__(self, group: dict[str, Any]) -> None:
        if group["amsgrad"] or group["maximize"]:
            raise Unsupported("Adam has amsgrad or maximize set")
        (self.beta1, self.beta2), self.eps, self.decay = group["betas"], group["eps"], group["weight_decay"]

    def step_size(self, lr: float, step: int) -> tuple[float, float]:
        """lr / (1 − β₁ᵏ), and √(1 − β₂ᵏ)."""
        step = max(step, 1)
        return lr / (1 - self.beta1**step), math.sqrt(1 - self.beta2**step)

    def update(self, grad: Tensor, x: Tensor, moments: list[Tensor], size: Tensor, root: Tensor) -> Tensor:
        """x − size · m / (√v / root + ε), after both moments took the gradient in."""
        grad = grad + self.decay * x if self.decay else grad
        mean = torch.lerp(moments[0], grad, 1 - self.beta1)
        square = self.beta2 * moments[1] + (1 - self.beta2) * grad * grad
        moments[0].copy_(mean)
        moments[1].copy_(square)
        moved: Tensor = x - size * (mean / (square.sqrt() / root + self.eps))
        return moved


class SGD:
    """The update of ``torch.optim.SGD``, with momentum or without."""

    counts = False

    def __init__(self, group: dict[str, Any]) -> None:
        if group["nesterov"] or group["maximize"] or group["dampening"]:
            raise Unsupported("SGD has nesterov, maximize or dampening set")
        self.momentum, self.decay = group["momentum"], group["weight_decay"]
        self.moments = ("momentum_buffer",) if self.momentum else ()

    def step_size(self, lr: float, step: int) -> tuple[float, float]:
        """The learning rate."""
        return lr, 1.0

    def update(self, grad: Tensor, x: Tensor, moments: list[Tensor], size: Tensor, root: Tensor) -> Tensor:
        """x − size · b, with b = momentum · b + gradient."""
        grad = grad + self.decay * x if self.decay else grad
        if moments:
            grad = self.momentum * moments[0] + grad
            moments[0].copy_(grad)
        return x - size * grad


def _rule(base: torch.optim.Optimizer, group: dict[str, Any]) -> Adam | SGD:
    rules: dict[type, type[Adam | SGD]] = {torch.optim.Adam: Adam, torch.optim.SGD: SGD}
    if type(base) not in rules or group.get("decoupled_weight_decay"):
        raise Unsupported(f"the base optimizer is {type(base).__name__}, not a plain Adam or SGD")
    return rules[type(base)](group)


# Layouts: a flat tensor holds each parameter as it lies in memory.


def _is_channels_last(t: Tensor) -> bool:
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def _shape(flat: Tensor, like: Tensor) -> Tensor:
    """A view of n numbers (d×n: of each row) in the shape and memory format of a parameter."""
    if _is_channels_last(like):
        out, channels, height, width = like.shape
        return flat.view(*flat.shape[:-1], out, height, width, channels).movedim(-1, -3)
    return flat.view(*flat.shape[:-1], *like.shape)


def _flatten(grad: Tensor, like: Tensor) -> Tensor:
    """The inverse: a view, where the gradient has the parameter's memory format."""
    return grad.movedim(1, -1).reshape(-1) if _is_channels_last(like) else grad.reshape(-1)


@contextmanager
def _hidden_counters(norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Batch norms without their counters, which nothing reads and which would cost a kernel each."""
    counters = [norm.num_batches_tracked for norm in norms]
    for norm in norms:
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, counter in zip(norms, counters, strict=True):
            norm.num_batches_tracked = counter
