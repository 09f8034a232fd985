"""The graph engine: one CUDA graph per training step, and one per validation.

A step is the plain engine's, batch for batch and formula for formula; it moves less memory and needs nothing from the
CPU but a few numbers:

- Images that fit are on the device, and so is the plan of an epoch: the order of its images and the random numbers of
  its augmentation. A counter on the device knows the batch. Streamed images are copied to the device while it computes.
- All latents of a group are one flat tensor, and so are the optimizer's moments. The hooks of the method and the step
  of a torch optimizer of the same class over the flat tensors are compiled together, into one kernel for elementwise
  methods, and one more per tensor where a scale follows its latent. A method that is not elementwise, has learnt scales
  or scales per channel, or has more state gets its tensors one by one.
- The network computes with copies of the weights in its own precision (bfloat16 under autocast), which that kernel
  writes. The latent is the float32 master: the model's own weights are written by ``sync``.
- β and the learning rate are tensors on the device, filled before each step.
- The first steps run as they are, which compiles them; then a step is captured, and replayed from there on.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from mirrorquant._text import first_line
from mirrorquant.data import Images, Loader, StreamedLoader
from mirrorquant.methods import REF, Method
from mirrorquant.optimizer import MirrorDescent, beta_at
from mirrorquant.quantized import Quantized, from_logs, project, pull_back, settle, to_logs
from mirrorquant.train import beside, compiling
from mirrorquant.train.distributed import statistics
from mirrorquant.train.engine import PlainEngine, Unsupported
from mirrorquant.train.evaluate import BATCH, Score
from mirrorquant.train.objective import SCORES, Batch
from mirrorquant.train.task import Task

__all__ = ["GraphEngine"]

WARM_UP = 3
ALIGNMENT = 64  # numbers; compiled kernels want tensors that start at multiples of 16 bytes
_BETA, _NEXT, _LR, _SCALED_LR = range(4)  # the columns of ``knobs``


class GraphEngine(PlainEngine):
    """Trains a task from the current state of its model and optimizer.

    Args:
        task: the task, with its model on its device and in its memory format.
        say: gets a message where something cannot be captured.
    """

    name = "graph"

    def __init__(self, task: Task, say: Callable[[str], None]) -> None:
        super().__init__(task)
        self.say, self.device = say, task.device
        self.feed = _Streamed(task) if isinstance(task.loader, StreamedLoader) else _Resident(task)
        task.model.train()
        if not _moves_each_number(task.opt.base):
            raise Unsupported(f"{type(task.opt.base).__name__} does not move each number of a tensor on its own")
        self.knobs = torch.zeros(len(task.opt.param_groups), 4, device=self.device)
        names: dict[Tensor, str] = {p: name for name, p in task.model.named_parameters()}
        groups = range(len(task.opt.param_groups))
        self.parts = [part for i in groups for part in _parts(task.opt, i, names, task.dtype)]
        self.weights = {name: w for part in self.parts for name, w in part.weights.items()}
        self.moving = [part for part in self.parts if not part.frozen]
        for part in self.moving if task.accumulate * task.world.size > 1 else []:
            part.sum_in_float32()
        self.masters = [(part.index, part.master) for part in self.moving if part.master is not None]
        for index, group in enumerate(task.opt.param_groups):
            scales = [p for p in group["params"] if p not in names]
            self.masters += [(index, Master(scale, [scale], lambda t: [t])) for scale in scales]
        self.base = _flat_optimizer(task.opt, self.masters, self.knobs) if self.masters else None
        self.next, self.unsynced, self.runs = -1, 0, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capture = self.device.type == "cuda"
        self.validation: _Validation | None = None
        self.scores = isinstance(task.data.val, Images) and task.world.size == 1
        if task.compile:
            torch.compiler.reset()  # or the graphs of earlier runs in this process would count against the limit
        self._forward = compiling.compiled(self._loss, task.compile, task.device)
        self._move = compiling.compiled(self._update, task.compile, task.device)

    @property
    def ready(self) -> bool:
        """Whether a step is only replayed by now."""
        return self.graph is not None or (not self.capture and self.runs >= WARM_UP)

    def step(self, k: int) -> None:
        """Trains on batch k; in order, but any k may be the first."""
        self.feed.begin(k)
        self._fill_knobs(k)
        if self.graph is None and self.capture and self.runs >= WARM_UP:
            self.graph = self.captured(self._step, "this step")
        if self.graph is not None:
            self.graph.replay()
        else:
            with self.beside():
                self._step()
        self.next, self.unsynced, self.runs = k + 1, self.unsynced + 1, self.runs + 1
        self.feed.look_ahead(k + 1)  # while the device is busy

    def score(self) -> Score:
        """The score of the rounded network on the validation images."""
        if self.scores:
            try:
                self.validation = self.validation or _Validation(self)
                return self.validation()
            except Exception as error:  # it compiles whatever the model is made of
                self.scores = False
                self.say(f"validation cannot run in a CUDA graph ({first_line(error)}): using the slower path")
        self.sync()
        return super().score()

    @torch.no_grad()
    def sync(self) -> None:
        """Brings the model's weights, the optimizer's state and batch norm's counters to where the latents are."""
        if not self.unsynced:
            return
        opt, lr = self.task.opt, self.task.lr(self.next - 1)
        for index, master in self.masters:
            assert self.base is not None
            master.return_state(opt.base, self.base, opt.base.param_groups[index])
        for group in opt.param_groups:
            group["lr"] = lr
        opt.arrive(self.next)
        for norm in self._norms():
            norm.num_batches_tracked.add_(self.unsynced * self.task.accumulate)  # type: ignore[union-attr]
        self.unsynced = 0

    def _fill_knobs(self, k: int) -> None:
        """β, the next β and the learning rate of each group, computed in double precision as everywhere."""
        rows, lr = [], self.task.lr(k)
        for group in self.task.opt.param_groups:
            beta = beta_at(group, k)
            rows.append([beta, beta_at(group, k + 1), lr, lr * float(group["method"].step_scale(beta))])
        host = torch.tensor(rows)
        self.knobs.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)

    # A step.

    def _step(self) -> None:
        count, world = self.task.accumulate, self.task.world
        leaves = [w for part in self.moving for w in part.weights.values()]
        for i in range(count):
            with _hidden_counters(self._norms()), beside.convolutions():
                loss = self._forward(self.weights, *self.feed.share(i))
                grads = list(torch.autograd.grad(loss, leaves)) if leaves else []
                beside.join()
            with torch.no_grad():
                for part in self.moving:
                    part.take_gradients([grads.pop(0) for _ in part.weights], add=i > 0)
                self.losses += loss.detach()
        with torch.no_grad():
            if world.size > 1:
                world.average([*(part.total for part in self.moving), *statistics(self.task.model)])
            for part in self.moving:
                part.take_total()
            self._move()
            self.feed.end()

    def _loss(self, weights: dict[str, Tensor], *share: Tensor) -> Tensor:
        """Batch, augmentation, forward pass and loss: one function, so that they compile together."""
        images, labels = self.feed.compose(*share)
        batch = Batch(self.task.laid_out(images), labels)
        with self.task.autocast():
            loss = self.task.objective(functional_call(self.task.model, weights, (batch.images,)), batch)
        return loss / self.task.accumulate

    def _update(self) -> None:
        """``MirrorDescent.step`` on flat tensors."""
        groups = [part.quantized(self.knobs) for part in self.moving]
        with torch.no_grad():
            pull_back(groups)
            to_logs(groups)
            if self.base is not None:
                inspect.unwrap(type(self.base).step)(self.base)  # without the hooks around it, which break the graph
            from_logs(groups)
            settle(groups)
            for part in self.moving:
                part.refit()
            project([part.quantized(self.knobs, _NEXT) for part in self.moving], rounded=False)

    def captured(self, work: Callable[[], None], what: str) -> torch.cuda.CUDAGraph:
        """A CUDA graph of the work."""
        torch.cuda.synchronize(self.device)
        graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[self.device.index or 0]
        before = generator.clone_state()
        try:
            with torch.cuda.graph(graph, capture_error_mode=self.feed.capture):
                work()
        except RuntimeError as error:
            generator.graphsafe_set_state(before)  # or it would believe that the capture goes on
            raise Unsupported(f"{what} cannot be captured in a CUDA graph: {first_line(error)}") from error
        return graph

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work that warms up for a capture runs on its own stream."""
        if not self.capture:
            yield
            return
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _norms(self) -> list[nn.modules.batchnorm._BatchNorm]:
        """Batch norms whose counters can be left out of a step; SyncBatchNorm needs its own."""
        norms = [m for m in self.task.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        norms = [m for m in norms if not isinstance(m, nn.SyncBatchNorm)]
        return [m for m in norms if m.num_batches_tracked is not None and m.momentum is not None]


class _Resident:
    """Batches of images that are on the device: the plan of an epoch is there too, and a counter of its batches."""

    capture = "global"

    def __init__(self, task: Task) -> None:
        assert isinstance(task.loader, Loader)
        self.loader, self.device, self.count = task.loader, task.device, task.accumulate
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.order, self.draws = (t.clone() for t in self.loader.epoch(0))
        rank, processes = task.world.part
        self.offsets = torch.arange(self.loader.batch_size, device=self.device).chunk(processes)[rank].chunk(self.count)
        self.planned: tuple[int, list[Tensor]] | None = None
        self.next = -1

    def begin(self, k: int) -> None:
        """Copies the plan of an epoch to the device where one starts, or training does."""
        epoch, place = divmod(k, self.loader.batches_per_epoch)
        if place == 0 or k != self.next:
            planned, self.planned = self.planned, None
            if planned is None or planned[0] != epoch:
                planned = epoch, self._plan(epoch)
            for tensor, host in zip((self.order, self.draws), planned[1], strict=True):
                tensor.copy_(host, non_blocking=True)
            self.place.fill_(place)
        self.next = k + 1

    def look_ahead(self, k: int) -> None:
        """Plans the next epoch in the middle of one."""
        epoch, place = divmod(k - 1, self.loader.batches_per_epoch)
        if place == self.loader.batches_per_epoch // 2:
            self.planned = epoch + 1, self._plan(epoch + 1)

    def _plan(self, epoch: int) -> list[Tensor]:
        """The order of the images and the random numbers of their augmentation, on the CPU."""
        plan = list(self.loader.plan(epoch))
        return [t.pin_memory() for t in plan] if self.device.type == "cuda" else plan

    def share(self, i: int) -> tuple[Tensor, ...]:
        """The counter, and part i of the places in a batch."""
        return self.place, self.offsets[i]

    def compose(self, place: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of a part."""
        chosen = place * self.loader.batch_size + offsets
        return self.loader.compose(self.order[chosen], self.draws[chosen])

    def end(self) -> None:
        """Counts the batch."""
        self.place += 1


class _Streamed:
    """Batches that come from files: each is copied to the device on its own stream, beside the step before it."""

    capture = "thread_local"  # a thread of the loader pins memory meanwhile

    def __init__(self, task: Task) -> None:
        assert isinstance(task.loader, StreamedLoader)
        self.loader, self.device, self.count = task.loader, task.device, task.accumulate
        count = task.loader.batch_size // task.world.size
        images = torch.zeros(count, *task.data.shape, dtype=torch.uint8, device=self.device)
        images = images.contiguous(memory_format=torch.channels_last)
        self.batch = [images, torch.zeros(count, dtype=torch.int64, device=self.device)]
        self.next_batch, self.ready = [t.clone() for t in self.batch], -1
        self.stream: Any = None
        if self.device.type == "cuda":
            self.stream, self.taken = torch.cuda.Stream(self.device), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def begin(self, k: int) -> None:
        """Puts batch k where the step reads it."""
        if self.ready != k:
            self.look_ahead(k)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        for tensor, new in zip(self.batch, self.next_batch, strict=True):
            tensor.copy_(new)
        if self.stream is not None:
            self.taken.record()

    def look_ahead(self, k: int) -> None:
        """Waits for batch k from the workers, and copies it; not before the step before it has begun."""
        if self.stream is not None:
            self.taken.synchronize()
        arrived = self.loader.raw(k)
        with torch.cuda.stream(self.stream):  # no other one for None
            for tensor, host in zip(self.next_batch, arrived, strict=True):
                tensor.copy_(host, non_blocking=True)
        self.ready = k

    def share(self, i: int) -> tuple[Tensor, ...]:
        """Part i of the images and labels."""
        return self.batch[0].chunk(self.count)[i], self.batch[1].chunk(self.count)[i]

    def compose(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The images as the network takes them."""
        return self.loader.data.normalise(images), labels

    def end(self) -> None:
        """Nothing: the host counts batches."""


class _Validation:
    """Rounds the latents and evaluates the network that they give, in one CUDA graph."""

    def __init__(self, engine: GraphEngine) -> None:
        task, self.engine = engine.task, engine
        assert isinstance(task.data.val, Images)
        self.images = task.data.val
        self.rounded = [(part, torch.zeros_like(part.image)) for part in engine.moving]
        self.weights = {name: weight.detach() for name, weight in engine.weights.items()}
        for part, image in self.rounded:
            self.weights |= dict(zip(part.weights, part.views(image), strict=True))
        self.totals = torch.zeros(SCORES, device=engine.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._tally = compiling.compiled(self._batch, task.compile, task.device)
        self._round = compiling.compiled(self._rounding, task.compile, task.device)

    @torch.no_grad()
    def __call__(self) -> Score:
        if self.graph is not None:
            self.graph.replay()
        else:
            with self.engine.beside():
                self._run()
            if self.engine.capture:
                self.graph = self.engine.captured(self._run, "validation")
        return Score.of(self.totals, len(self.images))

    def _run(self) -> None:
        model = self.engine.task.model
        model.eval()
        try:
            self._round()
            self.totals.zero_()
            for start in range(0, len(self.images), BATCH):
                batch = slice(start, start + BATCH)
                self.totals += self._tally(self.weights, self.images.images[batch], self.images.labels[batch])
        finally:
            model.train()

    def _rounding(self) -> None:
        with torch.no_grad():
            for part, image in self.rounded:
                project([part.quantized(self.engine.knobs, _NEXT)._replace(weight=image)], rounded=True)

    def _batch(self, weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        task, x = self.engine.task, self.engine.task.laid_out(self.engine.task.data.normalise(images))
        with task.autocast():
            logits = functional_call(task.model, weights, (x,))
        return task.objective.tally(logits, labels)


class Master:
    """A tensor that the flat optimizer moves, and the tensors of the user's optimizer that are views of it."""

    def __init__(self, tensor: Tensor, members: list[Tensor], views: Callable[[Tensor], list[Tensor]]) -> None:
        self.tensor, self.members, self.views = tensor, members, views
        tensor.grad = torch.zeros_like(tensor)

    def take_state(self, base: Optimizer, flat: Optimizer) -> None:
        """Moments become flat tensors; what is not a moment, such as a step count, must be the same for all members."""
        states = [base.state.get(member, {}) for member in self.members]
        for name, value in states[0].items():
            if isinstance(value, Tensor) and value.shape == self.members[0].shape:
                value = torch.zeros_like(self.tensor)
                for view, state in zip(self.views(value), states, strict=True):
                    view.copy_(state[name])
            elif any(state.get(name) != value for state in states):
                raise Unsupported("the optimizer has taken more steps for some parameters than for others")
            elif isinstance(value, Tensor):
                value = value.to(self.tensor.device).clone()
            flat.state[self.tensor][name] = value

    def return_state(self, base: Optimizer, flat: Optimizer, group: dict[str, Any]) -> None:
        """The inverse; moments are views."""
        device = self.tensor.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        for name, value in flat.state[self.tensor].items():
            values = [value for _ in self.members]
            if isinstance(value, Tensor):
                moment = value.shape == self.tensor.shape
                values = self.views(value) if moment else [value.to(device, copy=True) for _ in self.members]
            for member, own in zip(self.members, values, strict=True):
                base.state[member][name] = own


class Part:
    """Parameters of one group that compute in one precision, in flat tensors; or one parameter in its own shape.

    ``state["latent"]`` is the master that the base optimizer moves; the network computes with ``image`` and gives
    ``image.grad``; ``weights`` are views of the image, one per parameter. Flat tensors have rows of ``ALIGNMENT``
    numbers, each of one parameter; ``scales`` are those of the parameters, and ``rows`` says which of them a row has.
    """

    scales: Tensor | None = None
    rows: Tensor

    def __init__(
        self, opt: MirrorDescent, index: int, params: dict[str, Tensor], dtype: torch.dtype, *, flat: bool
    ) -> None:
        method = opt.param_groups[index]["method"]
        self.index, self.flat, self.layout = index, flat, [p.detach() for p in params.values()]
        self.method: Method = method  # REF projects a float weight from its float32 master, like any other method
        self.frozen = opt.finalized and not isinstance(method, REF)
        moved = [opt.state.get(p, {}).get("latent", p) for p in params.values()]
        like, counts = self.layout[0], [-(-p.numel() // ALIGNMENT) for p in self.layout]
        self.starts = [ALIGNMENT * row for row in itertools.accumulate(counts, initial=0)][:-1]
        rows = sum(counts), ALIGNMENT
        self.image = like.new_zeros(rows, dtype=dtype) if flat else torch.zeros_like(like, dtype=dtype)
        self.weights = {}
        for name, view, p in zip(params, self.views(self.image), self.layout, strict=True):
            self.weights[name] = view.copy_(p).detach().requires_grad_(not self.frozen)
        self.image.grad = self.total = torch.zeros_like(self.image)
        self.state: dict[str, Any] = opt.state.get(next(iter(params.values())), {})
        if flat and not self.frozen:
            lifted = moved[0].shape[: moved[0].dim() - like.dim()]
            self.state = {"latent": like.new_zeros(*lifted, *rows, dtype=moved[0].dtype)}
            for tensor, view in zip(moved, self.views(self.state["latent"]), strict=True):
                tensor.data = view.copy_(tensor.detach())
            if method.scale is not None and not isinstance(method, REF):
                self._hold_scales([opt.state[p]["scale"] for p in params.values()], counts)
        self.master = None
        if not self.frozen:
            self.master = Master(self.state["latent"], moved, self.views)
            with torch.no_grad():  # in the flat tensor and of a float32 β, as later on: the last bit may depend on them
                self.image.copy_(self.method.image(self.seen(), like.new_tensor(opt.param_groups[index]["beta"])))

    def _hold_scales(self, scales: list[Tensor], counts: list[int]) -> None:
        """Makes the scales of the parameters, with so many rows each, views of one tensor."""
        self.scales = torch.cat([scale.detach().reshape(1) for scale in scales])
        for scale, own in zip(scales, self.scales, strict=True):
            scale.data = own.view(scale.shape)
        self.rows = torch.arange(len(scales)).repeat_interleave(torch.tensor(counts)).to(self.image.device)

    def seen(self) -> dict[str, Any]:
        """The state, in which a flat part has a scale per row."""
        return self.state if self.scales is None else {**self.state, "scale": self.scales[self.rows].unsqueeze(1)}

    def refit(self) -> None:
        """Computes the scales of a flat part again if they follow the latents."""
        if self.scales is None:
            return
        for scale, latent in zip(self.scales, self.views(self.state["latent"]), strict=True):
            self.method.refit({"latent": latent, "scale": scale.view([1] * latent.dim())})

    def quantized(self, knobs: Tensor, beta: int = _BETA) -> Quantized:
        """The part as one tensor of the optimizer, with the current β or the next."""
        row = knobs[self.index]
        return Quantized("", self.image, self.seen(), self.method, row[beta], row[_LR])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors of which a flat one (or each of several) is made up, in shape and memory format."""
        if not self.flat:
            return [flat]
        numbers = flat.flatten(-2)
        parts = [numbers[..., a : a + p.numel()] for a, p in zip(self.starts, self.layout, strict=True)]
        return [_shape(part, p) for part, p in zip(parts, self.layout, strict=True)]

    def sum_in_float32(self) -> None:
        """Adds gradients up in float32, apart from that of the image, whose precision would lose small ones."""
        self.total = self.total.float()

    def take_gradients(self, grads: list[Tensor], *, add: bool = False) -> None:
        """Copies the gradients of the weights into the total, or adds them to it."""
        (torch._foreach_add_ if add else torch._foreach_copy_)(self.views(self.total), grads)

    def take_total(self) -> None:
        """Makes the total the gradient of the image."""
        if self.total is not self.image.grad:
            self.image.grad.copy_(self.total)  # type: ignore[union-attr]


def _parts(opt: MirrorDescent, index: int, names: dict[Tensor, str], dtype: torch.dtype) -> list[Part]:
    """A group's matrices and kernels in the precision of the network, its vectors (biases, norms) in float32."""
    group, method = opt.param_groups[index], opt.param_groups[index]["method"]
    if method.step_scale(2.0) != 1.0 and opt.base.param_groups[index].get("weight_decay"):
        raise Unsupported(f"{type(method).__name__} divides weight decay by beta, the graph engine does not")
    params = {names[p]: p for p in group["params"] if p in names}  # all but learnt scales
    if any(p.dtype != torch.float32 or p.dim() == 0 or p.numel() == 0 for p in params.values()):
        raise Unsupported("there are parameters that are not float32, or without a dimension, or empty")
    if not (opt.finalized or isinstance(method, REF) or all("latent" in opt.state.get(p, {}) for p in params.values())):
        raise Unsupported("there are parameters without a latent")
    flat = isinstance(method, REF) or _elementwise(method)
    found: dict[tuple[torch.dtype, str], dict[str, Tensor]] = {}
    for name, p in params.items():
        kind = dtype if p.dim() > 1 else torch.float32
        found.setdefault((kind, "" if flat else name), {})[name] = p
    return [Part(opt, index, members, kind, flat=flat) for (kind, _), members in found.items()]


def _elementwise(method: Method) -> bool:
    """Whether the tensors of a method can be one flat tensor; its hooks ignore a scale."""
    if method.scale is not None and (method.learns_scale or method.scale.per != "tensor"):
        return False
    try:
        return _tried(method)
    except Exception:  # it is for matrices alone
        return False


def _tried(method: Method) -> bool:
    """Whether the hooks give the same for some tensors and for all of their numbers in one."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((3, 4), (2, 1, 5), (7, 1))]
    if method.start(tensors[0], method.lift(tensors[0])):
        return False

    def results(weight: Tensor, grad: Tensor) -> list[Tensor]:
        latent = method.lift(weight)
        hooks = [latent, method.pull_back(grad, latent, 3.0), method.settle(latent.clone(), 3.0, 0.1)]
        hooks += [method.project(latent, 3.0), method.round(latent, 3.0)]
        return [t.flatten(t.dim() - weight.dim()) for t in hooks]

    apart = zip(*[results(t, t.cos()) for t in tensors], strict=True)
    flat = torch.cat([t.flatten() for t in tensors])
    together = results(flat, flat.cos())
    return all(torch.allclose(torch.cat(a, -1), b, 1e-4, 1e-5) for a, b in zip(apart, together, strict=True))


def _moves_each_number(base: Optimizer) -> bool:
    """Whether an optimizer moves a flat tensor as it moves the tensors that this is made of: tried on some."""
    off, known = ("foreach", "fused", "capturable"), inspect.signature(type(base)).parameters
    options = {k: v for k, v in base.defaults.items() if k in known and k not in off}
    options |= {k: False for k in off if k in known} | ({"lr": float(options["lr"])} if "lr" in options else {})

    def moved(*tensors: Tensor) -> Tensor:
        kind: Any = type(base)
        optimizer = kind(tensors, **options)
        for _ in range(3):
            for tensor in tensors:
                tensor.grad = tensor.cos()
            optimizer.step()
        return torch.cat([tensor.flatten() for tensor in tensors])

    numbers = torch.linspace(-3, 3, 3 * ALIGNMENT)
    matrix, vector = numbers[:-ALIGNMENT].view(ALIGNMENT, 2).clone(), numbers[-ALIGNMENT:].clone()
    try:
        return torch.allclose(moved(matrix, vector), moved(numbers.view(-1, ALIGNMENT).clone()), 1e-4, 1e-6)
    except Exception:  # it is for matrices alone, or wants a closure
        return False


def _flat_optimizer(opt: MirrorDescent, masters: list[tuple[int, Master]], knobs: Tensor) -> Optimizer:
    """An optimizer of the same class over the masters, whose learning rates are on the device."""
    changed = {"foreach": False, "fused": False, "capturable": knobs.is_cuda}
    groups: list[dict[str, Any]] = []
    for index, theirs in enumerate(opt.base.param_groups):
        own = {k: changed.get(k, v) for k, v in theirs.items() if k not in ("params", "param_names", "initial_lr")}
        params = [master.tensor for i, master in masters if i == index]
        groups += [{**own, "params": params, "lr": knobs[index, _SCALED_LR]}] if params else []
    kind: Any = type(opt.base)
    known = inspect.signature(kind).parameters
    flat: Optimizer = kind(groups, **{k: changed.get(k, v) for k, v in opt.base.defaults.items() if k in known})
    for _, master in masters:
        master.take_state(opt.base, flat)
    return flat


# Layouts: a flat tensor holds each parameter as it lies in memory.


def _shape(flat: Tensor, like: Tensor) -> Tensor:
    """A view of n numbers (d×n: of each row) in the shape and memory format of a parameter."""
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        out, channels, height, width = like.shape
        return flat.view(*flat.shape[:-1], out, height, width, channels).movedim(-1, -3)
    return flat.view(*flat.shape[:-1], *like.shape)


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
