"""Gradients of convolutions' weights, beside the backward pass.

Nothing in the backward pass waits for the gradient of a weight. Its convolution is compute-bound, and the batch norms
that lie between two convolutions are memory-bound: on a stream of its own it runs beside them. Within ``convolutions``
the inductor compiles a backward convolution as two, and the one for the weight is ``mirrorquant::weight_gradient``,
which takes the other stream while a CUDA graph is captured. ``join`` waits for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._inductor.config as inductor
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["convolutions", "join"]

_aten = torch.ops.aten
_pending: list[tuple[Tensor, ...]] = []  # what the other stream still reads
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def convolutions() -> Iterator[None]:
    """Code compiled in this context computes the gradients of convolution weights on a separate stream."""
    with inductor.patch(post_grad_custom_post_pass=_Split(), allow_buffer_reuse=False, inplace_buffers=False):
        yield


def join() -> None:
    """The current stream waits for the gradients of the weights."""
    for device in {tensors[0].device for tensors in _pending}:
        torch.cuda.current_stream(device).wait_stream(_streams[device])
    _pending.clear()


class _Split(CustomGraphPass):
    """convolution_backward into the gradient of the input and that of the weight."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph in place."""
        for node in list(graph.nodes):
            if node.target is not _aten.convolution_backward.default:
                continue
            *arguments, (wants_input, wants_weight, wants_bias) = node.args
            users = {user.args[1]: user for user in node.users}
            grad, x, weight, _, stride, padding, dilation, transposed, _, groups = arguments
            if not wants_weight or 1 not in users or transposed or groups != 1:
                continue
            with graph.inserting_before(node):
                own = graph.call_function(_op, (grad, x, weight, stride, padding, dilation))
                own.meta = dict(users[1].meta)
                rest = graph.call_function(node.target, (*arguments, [wants_input, False, wants_bias]))
                values = node.meta["val"]
                rest.meta = {**node.meta, "val": (values[0], None, values[2])}
            users[1].replace_all_uses_with(own)
            graph.erase_node(users[1])
            node.replace_all_uses_with(rest)
            graph.erase_node(node)
        graph.eliminate_dead_code()
        graph.lint()

    def uuid(self) -> str:
        """Names the pass in the inductor's cache."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@torch.library.custom_op("mirrorquant::weight_gradient", mutates_args=())
def _weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    side = None
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():
        side = _streams.get(grad.device) or torch.cuda.Stream(grad.device)  # type: ignore[no-untyped-call]
        _streams[grad.device] = side
        side.wait_stream(torch.cuda.current_stream(grad.device))
        _pending.append((grad, x, weight))  # or their memory would be used again before it was read
    with torch.cuda.stream(side):  # no other one for None
        result: Tensor
        _, result, _ = _aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, False, [0, 0], 1, [False, True, False]
        )
    return result


_weight_gradient.register_fake(lambda grad, x, weight, *_: torch.empty_like(weight))
_op = torch.ops.mirrorquant.weight_gradient.default
