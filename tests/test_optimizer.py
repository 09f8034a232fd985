"""MirrorDescent as a torch optimizer: exact at the end, transparent in between, and loud when misused."""

import copy
import json
import pickle
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from conftest import anneal_for, batch, small_network, train
from torch import nn

import mirrorquant as mq
from mirrorquant import BINARY, TERNARY, Levels, optimizer

LEVELS = {"binary": BINARY, "ternary": TERNARY, "user": Levels(-0.3, 0.1, 0.7)}


def wrap(model, method="md-tanh-s", base=torch.optim.Adam, lr=0.01, **options):
    options.setdefault("anneal", anneal_for(method))
    return mq.MirrorDescent(base(mq.split(model, everything=True), lr=lr), method=method, **options)


def quantized_weights(model):
    return [p for name, p in model.named_parameters() if not name.startswith("1.")]


# Exact at the end.


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "bfloat16", "float64"])
def test_after_finalize_every_weight_is_exactly_a_level(method, levels, layout):
    if method in ("md-tanh-bounded", "md-tanh") and levels != "binary":
        pytest.skip("md-tanh has two levels")
    model = small_network()
    model = {
        "contiguous": lambda m: m,
        "channels_last": lambda m: m.to(memory_format=torch.channels_last),
        "bfloat16": lambda m: m.to(torch.bfloat16),
        "float64": lambda m: m.double(),
    }[layout](model)
    opt = wrap(model, method, levels=LEVELS[levels])
    strides = [p.stride() for p in model.parameters()]
    train(model, opt, 8)
    opt.finalize()
    for p in quantized_weights(model):
        assert set(p.detach().unique().tolist()) <= set(torch.tensor(LEVELS[levels], dtype=p.dtype).tolist())
        wide = torch.float64 if layout == "float64" else torch.float32
        assert opt.latent(p).dtype == wide
    assert [p.stride() for p in model.parameters()] == strides


def test_after_finalize_tied_and_zero_size_tensors_hold_their_levels(method):
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.scalar = nn.Parameter(torch.tensor(0.2))
    opt = wrap(model, method)
    for _ in range(3):
        (model(torch.randn(5, 4)).square().mean() + model.scalar.square()).backward()
        opt.step()
        opt.zero_grad()
    opt.finalize()
    assert first.weight is second.weight
    for p in model.parameters():
        assert BINARY.holds(p.detach())


def test_quantized_gives_exact_levels_inside_and_the_soft_weights_back(method):
    model = small_network()
    opt = wrap(model, method)
    train(model, opt, 5)
    soft = [p.detach().clone() for p in model.parameters()]

    def check_inside():
        with opt.quantized(), opt.quantized():
            for p in quantized_weights(model):
                assert BINARY.holds(p.detach())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_inside()
    assert all(torch.equal(a, b) for a, b in zip(soft, model.parameters(), strict=True))


def test_finalize_rounds_for_good_and_goes_on_training_what_stayed_float(method):
    model = small_network()
    opt = wrap(model, method)
    train(model, opt, 3)
    opt.finalize()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, opt, 3)
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert torch.equal(p, old) != name.startswith("1."), name


# A genuine optimizer.


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ],
)
def test_ref_is_bit_identical_to_the_bare_optimizer(make):
    bare, wrapped = small_network(), small_network()
    plain = make(bare.parameters())
    opt = mq.MirrorDescent(make(wrapped.parameters()), method="ref")
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (plain, opt)]
    for k in range(10):
        for model, o in ((bare, plain), (wrapped, opt)):
            train(model, o, 1, start=k)
        for scheduler in schedulers:
            scheduler.step()
    for a, b in zip(bare.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not opt.state


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
        lambda p: torch.optim.NAdam(p),
    ],
)
def test_any_base_optimizer_moves_the_latents_as_it_would_move_weights(make):
    """The latents of md-tanh-s follow exactly what the bare optimizer does with the same gradients."""
    model = small_network()
    opt = mq.MirrorDescent(make(mq.split(model, everything=True, norms=True)))
    twins = [opt.latent(p).clone() for p in model.parameters()]
    bare = make(twins)
    for k in range(5):
        x, y = batch(k)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for twin, p in zip(twins, model.parameters(), strict=True):
            twin.grad = p.grad.clone()
        bare.step()
        opt.step()
        for twin, p in zip(twins, model.parameters(), strict=True):
            assert torch.equal(twin, opt.latent(p))
            image = torch.tanh(opt.beta * twin.double())
            # 2σ(2x) − 1: twice the error of σ, allowed 3 units of the last place at 1, and the rounding of 2x and of w.
            assert (p.detach().double() - image).abs().max() <= 8 * torch.finfo(torch.float32).eps


def test_adagrad_keeps_its_sums_for_latents_of_another_shape():
    model = small_network()
    opt = wrap(model, "md-softmax-s", torch.optim.Adagrad)
    train(model, opt, 2)
    assert opt.base.state[opt.latent(model[0].weight)]["sum"].shape == (2, *model[0].weight.shape)
    assert model[0].weight not in opt.base.state


def test_several_methods_and_level_sets_side_by_side(tmp_path):
    model = small_network()
    groups = [
        {"params": model[0].parameters(), "method": "md-softmax-s", "levels": TERNARY},
        {"params": model[1].parameters(), "method": "ref", "lr": 0.1},
        {"params": model[3].parameters(), "method": mq.methods.BC(0.1 * BINARY)},
        {"params": model[6].parameters(), "anneal": mq.schedules.constant(5.0)},
    ]
    opt = mq.MirrorDescent(torch.optim.Adam(groups, lr=0.01), method="gd-tanh", anneal=mq.schedules.geometric(2.0))
    train(model, opt, 4)
    assert [group["beta"] for group in opt.param_groups] == [16.0, 16.0, 16.0, 5.0]
    assert opt.latent(model[0].weight).shape == (3, *model[0].weight.shape)
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    opt.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    opt.finalize()
    assert TERNARY.holds(model[0].weight.detach())
    assert Levels(-0.1, 0.1).holds(model[3].weight.detach())
    assert BINARY.holds(model[6].weight.detach())


def test_add_param_group_quantizes_the_new_group():
    model, head = small_network(), nn.Linear(3, 3)
    opt = wrap(model)
    before = head.weight.detach().clone()
    opt.add_param_group({"params": list(head.named_parameters()), "levels": TERNARY, "lr": 0.1})
    torch.testing.assert_close(head.weight.detach(), (torch.tanh(before - 0.5) + torch.tanh(before + 0.5)) / 2)
    assert opt.base.param_groups[-1]["lr"] == 0.1
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": list(head.named_parameters())})
    assert len(opt.param_groups) == len(opt.base.param_groups) == 3


def test_lr_schedulers_clipping_and_accumulation_act_on_the_models_parameters():
    model = small_network()
    opt = wrap(model, base=torch.optim.SGD, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.1)
    x, y = batch(0)
    for _ in range(2):
        nn.functional.cross_entropy(model(x), y).backward()
    accumulated = model[0].weight.grad.clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    before = opt.latent(model[0].weight).clone()
    opt.step()
    expected = before - accumulated * (0.01 / (norm + 1e-6))
    torch.testing.assert_close(opt.latent(model[0].weight), expected)
    scheduler.step()
    opt.step()
    assert opt.base.param_groups[0]["lr"] == pytest.approx(0.1)


def test_grad_scaler_and_autocast():
    model = small_network()
    opt = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for k in range(3):
        x, y = batch(k)
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if k == 1:
            model[0].weight.grad[0, 0, 0, 0] = float("inf")
        latents = {p: opt.latent(p).clone() for p in quantized_weights(model)}
        scaler.step(opt)
        scaler.update()
        moved = [not torch.equal(latent, opt.latent(p)) for p, latent in latents.items()]
        assert all(moved) if k != 1 else not any(moved)
    assert scaler.get_scale() == 512.0
    assert opt.steps == 2


def test_closures_and_lbfgs():
    model, twin = small_network(), small_network()
    opt, plain = wrap(model), wrap(twin)
    x, y = batch(0)

    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert opt.step(closure).requires_grad
    train(twin, plain, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    # LBFGS evaluates several times a step, each time at the image of its own trial point.
    w = nn.Parameter(torch.tensor([0.5, -0.2]))
    base = torch.optim.LBFGS([w], max_iter=5, line_search_fn="strong_wolfe")
    opt = mq.MirrorDescent(base, "gd-tanh", anneal=mq.schedules.constant())
    seen = []

    def quadratic():
        opt.zero_grad()
        torch.testing.assert_close(w.detach(), torch.tanh(opt.beta * opt.latent(w)))
        seen.append(w.detach().clone())
        loss = (w - torch.tensor([-1.0, 1.0])).square().sum()
        loss.backward()
        return loss

    for _ in range(4):
        loss = opt.step(quadratic)
    assert loss < 0.05
    assert len(seen) > 4
    opt.finalize()
    assert w.tolist() == [-1.0, 1.0]


def test_bfloat16_weights_keep_a_float32_latent_that_small_steps_move():
    w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=1e-4))
    for _ in range(10):
        w.grad = torch.ones_like(w)
        opt.step()
    torch.testing.assert_close(opt.latent(w), torch.full((3,), 0.999), rtol=0, atol=1e-6)


def test_the_weights_device_counts_and_not_the_default_one(method):
    model = small_network()
    opt = wrap(model, method, torch.optim.SGD)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with torch.device("meta"):
        opt.step()
        opt.finalize()


def test_parameters_without_gradients_are_left_where_they_are(method):
    model = small_network()
    opt = wrap(model, method, anneal=mq.schedules.constant(1.0))
    before = [p.detach().clone() for p in quantized_weights(model)]
    for p in model[0].parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    moved = [not torch.allclose(p, q, atol=1e-6) for p, q in zip(before, quantized_weights(model), strict=True)]
    if method.startswith("bc"):  # signs move only where the latent crosses zero
        assert not any(moved[2:])
    elif method == "pq":  # its proximal step needs no gradient
        assert all(moved)
    else:
        assert moved == [True, True, False, False, False]


def test_the_memory_added_is_the_latent_and_nothing_that_grows(method):
    model = small_network()
    opt = wrap(model, method)
    train(model, opt, 2)
    copies = 2 if "softmax" in method or "pmf" in method else 1
    for p in quantized_weights(model):
        assert list(opt.state[p]) == ["latent"]
        assert opt.latent(p).numel() == copies * p.numel()
        assert opt.latent(p).grad is None

    def held():
        return sum(t.numel() for state in opt.base.state.values() for t in state.values())

    before = held()
    train(model, opt, 3, start=2)
    assert held() == before


# Compiled and distributed.


@pytest.mark.parametrize(("method", "operation"), [("md-tanh-s", "tanh"), ("md-softmax-s", "tanh")])
def test_a_compiled_step_has_the_projection_of_all_weights_in_one_graph(method, operation):
    torch.compiler.reset()
    model, twin = small_network(), small_network()
    options = {"base": torch.optim.SGD, "anneal": mq.schedules.geometric(1.05)}
    opt, plain = wrap(model, method, **options), wrap(twin, method, **options)
    graphs = []

    def backend(graph_module, _):
        graphs.append([getattr(node.target, "__name__", node.target) for node in graph_module.graph.nodes])
        return graph_module.forward

    compiled = torch.compile(opt.step, backend=backend)
    for k in range(8):
        for m, o, step in ((model, opt, compiled), (twin, plain, plain.step)):
            x, y = batch(k)
            o.zero_grad()
            nn.functional.cross_entropy(m(x), y).backward()
            step()
        if k == 3:
            settled = len(graphs)
    projections = [graph.count(operation) for graph in graphs if operation in graph]
    assert set(projections) == {5}  # all five weights together, whether β is a constant there or any number
    assert len(graphs) == settled
    assert opt.steps == plain.steps == 8
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_by_inductor_a_step_gives_the_same_weights(method):
    torch.compiler.reset()
    w, twin = (nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), method=method, anneal=anneal_for(method))
    plain = mq.MirrorDescent(torch.optim.SGD([twin], lr=0.1), method=method, anneal=anneal_for(method))
    compiled = torch.compile(opt.step)
    for k in range(4):
        w.grad, twin.grad = torch.sin(k + torch.arange(6.0)), torch.sin(k + torch.arange(6.0))
        compiled()
        plain.step()
    torch.testing.assert_close(w, twin, rtol=1e-5, atol=1e-6)


PREPARE = """
    import copy, sys, torch
    from torch import nn
    import torch.distributed as dist
    rank, folder, tests = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path.insert(0, tests)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous")
    from conftest import small_network, batch
    import mirrorquant as mq
"""

DDP = """
    model = nn.parallel.DistributedDataParallel(small_network()[5:])
    opt = mq.MirrorDescent(torch.optim.SGD(mq.split(model), lr=0.1))
    for k in range(5):
        x, y = batch(k)
        x = x.flatten(1)[:, :64]
        opt.zero_grad()
        nn.functional.cross_entropy(model(x[rank::2]), y[rank::2]).backward()
        opt.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    assert torch.equal(*both)
    single = small_network()[5:]
    opt = mq.MirrorDescent(torch.optim.SGD(mq.split(single), lr=0.1))
    for k in range(5):
        x, y = batch(k)
        opt.zero_grad()
        nn.functional.cross_entropy(single(x.flatten(1)[:, :64]), y).backward()
        opt.step()
    torch.testing.assert_close(weights, torch.cat([p.detach().flatten() for p in single.parameters()]))
    dist.destroy_process_group()
"""

SHARDED = """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def build(method, seed, base):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(model)
        return model, mq.MirrorDescent(base(mq.split(model)), method, anneal=mq.schedules.geometric(1.1))

    def train(model, opt, steps):
        for k in steps:
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(k))
            opt.zero_grad()
            (model(x) - x[:, :4]).square().mean().backward()
            opt.step()

    def whole(model):
        return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])

    bases = [lambda p: torch.optim.Adam(p, lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)]
    full = StateDictOptions(full_state_dict=True)
    for number, (base, method, options) in enumerate([
        (bases[0], "md-tanh-s", None), (bases[0], "md-softmax-s", full), (bases[1], "bc", None), (bases[1], "pq", full)
    ]):
        model, opt = build(method, 0, base)
        train(model, opt, range(3))
        weights, state = get_state_dict(model, opt, options=options)
        if options is None:
            dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/{number}")
        saved = copy.deepcopy((weights, state))
        train(model, opt, range(3, 7))
        again, other = build(method, 1, base)
        if options is None:
            saved = get_state_dict(again, other)
            dcp.load({"model": saved[0], "optim": saved[1]}, checkpoint_id=f"{folder}/{number}")
        set_state_dict(again, other, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
        assert other.steps == 3, method
        train(again, other, range(3, 7))
        assert torch.equal(whole(again), whole(model)), method
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        single = mq.MirrorDescent(base(mq.split(alone)), method, anneal=mq.schedules.geometric(1.1))
        train(alone, single, range(7))
        torch.testing.assert_close(whole(model), torch.cat([p.detach().flatten() for p in alone.parameters()]))
        x, outputs = torch.ones(3, 8), []
        for network, each in ((model, opt), (alone, single)):  # FSDP2 keeps what it has gathered for a forward pass
            with torch.no_grad():
                outputs.append([network(x)])
                with each.quantized():
                    outputs[-1].append(network(x))
                outputs[-1].append(network(x))
        torch.testing.assert_close(*outputs)
        average = mq.Average(opt) if method != "pq" else None
        train(model, opt, [7])
        if average is not None:
            with average.applied():
                pass
        assert mq.summary(opt).quantized == mq.summary(single).quantized == 8 * 16 + 16 * 4
        assert str(mq.summary(model)).startswith("tensor")
    opt.finalize()
    mq.save(model, f"{folder}/{rank}.safetensors")
    loaded = mq.load(f"{folder}/{rank}.safetensors", nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    plain = torch.cat([p.detach().flatten() for p in mq.unpack(loaded).parameters()])
    assert torch.equal(plain, whole(model))
    try:
        mq.pack(model)
    except mq.PackError as error:
        assert "0.weight is spread over several processes" in str(error)
    else:
        raise AssertionError("a sharded model was packed")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("body", [DDP, SHARDED], ids=["ddp", "fsdp2"])
def test_two_processes_train_save_and_resume_as_one(body, tmp_path, pytestconfig):
    script = tmp_path / "script.py"
    # Gloo's threads may still hold tensors and then abort a regular exit: torch's race, not part of the promise.
    script.write_text(textwrap.dedent(PREPARE + body) + "import os; os._exit(0)\n")
    arguments = [str(tmp_path), str(pytestconfig.rootpath / "tests")]
    ranks = [subprocess.Popen([sys.executable, str(script), str(rank), *arguments]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


# Copies and saved states.


def test_pickling_and_deepcopy_keep_model_and_optimizer_together(method):
    model = small_network()
    opt = wrap(model, method)
    train(model, opt, 3)
    clones = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
    train(model, opt, 3, start=3)
    for clone, clone_opt in clones:
        train(clone, clone_opt, 3, start=3)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), clone.parameters(), strict=True))


def test_copies_leave_a_scheduler_behind_and_move_themselves():
    model = small_network()
    opt = wrap(model)
    torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    clone, clone_opt = pickle.loads(pickle.dumps((model, opt)))
    before = [p.detach().clone() for p in model.parameters()]
    train(clone, clone_opt, 1)
    assert clone_opt.steps == 1
    assert opt.steps == 0
    assert same(before, list(model.parameters()))


def test_every_hyperparameter_reaches_the_base_and_comes_back_from_a_state():
    model = small_network()
    opt = wrap(model)
    opt.param_groups[1].update(betas=(0.5, 0.6), weight_decay=0.01)
    train(model, opt, 1)
    assert opt.base.param_groups[1]["betas"] == (0.5, 0.6)
    fresh = wrap(small_network())
    fresh.load_state_dict(opt.state_dict())
    assert fresh.param_groups[1]["betas"] == (0.5, 0.6)
    assert fresh.param_groups[1]["weight_decay"] == 0.01


def test_what_a_base_optimizer_keeps_in_its_groups_is_kept():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    w = nn.Parameter(torch.zeros(2))
    opt = mq.MirrorDescent(Counting([w], lr=0.1))
    for _ in range(3):
        w.grad = torch.ones(2)
        opt.step()
    assert opt.param_groups[0]["count"] == 3


def test_state_dict_is_plain_and_loads_with_weights_only(tmp_path, method):
    model = small_network()
    opt = wrap(model, method)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for k in range(4):
        train(model, opt, 1, start=k)
        scheduler.step()
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    other = small_network(seed=1)
    fresh = wrap(other, method)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert fresh.steps == 4
    assert fresh.beta == opt.beta
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in opt.param_groups]
    for p, q in zip(quantized_weights(model), quantized_weights(other), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_that_version_0_1_saved_goes_on_bit_exactly(base, steps, method):
    model, other = small_network(), small_network(seed=1)
    opt, fresh = wrap(model, method, base), wrap(other, method, base)
    train(model, opt, steps)
    state, renamed = copy.deepcopy(opt.state_dict()), {new: old for old, new in optimizer._RENAMED.items()}
    for group in state["param_groups"]:
        name = json.loads(group["method"])["class"]  # all that was saved of a method, beside its levels
        group["method"] = renamed.get(name, name)
    train(other, fresh, 1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh.load_state_dict(state)
    assert fresh.steps == steps
    for m, o in ((model, opt), (other, fresh)):
        train(m, o, 4, start=steps)
    assert same(model.parameters(), other.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adagrad(p),
    ],
)
def test_the_state_of_a_new_optimizer_starts_anew_and_has_a_place_for_what_will_be_kept(make):
    model, other = small_network(), small_network()
    opt, used = (mq.MirrorDescent(make(mq.split(m, everything=True))) for m in (model, other))
    new = copy.deepcopy(opt.state_dict())
    train(model, opt, 4)
    assert {i: set(entry) for i, entry in new["state"].items()} == {
        i: set(entry) for i, entry in opt.state_dict()["state"].items()
    }
    start = copy.deepcopy(small_network().state_dict())
    train(other, used, 2)
    other.load_state_dict(start)
    used.load_state_dict(new)
    train(other, used, 4)
    assert same(model.parameters(), other.parameters())


def test_a_state_that_lost_something_of_the_base_optimizer_is_refused():
    model = small_network()
    opt = wrap(model)
    train(model, opt, 2)
    state = opt.state_dict()
    assert set(state) == {"state", "param_groups"}  # all that torch.distributed.checkpoint keeps
    del state["state"][3]["exp_avg"]
    with pytest.raises(ValueError, match=r"20 entries of Adam, but 21 were saved: the rest was lost"):
        wrap(small_network()).load_state_dict(state)


def test_a_finalized_state_stays_finalized():
    model, other = small_network(), small_network(seed=1)
    opt, fresh = wrap(model), wrap(other)
    train(model, opt, 3)
    opt.finalize()
    fresh.load_state_dict(opt.state_dict())
    assert fresh.finalized
    assert all(torch.equal(p, q) for p, q in zip(quantized_weights(model), quantized_weights(other), strict=True))


def test_loading_under_another_schedule_says_so():
    model = small_network()
    opt = wrap(model, anneal=mq.schedules.geometric(1.5))
    train(model, opt, 2)
    with pytest.warns(UserWarning, match="goes on with another schedule"):
        wrap(small_network(), anneal=mq.schedules.geometric(2.0)).load_state_dict(opt.state_dict())


def test_a_schedule_that_fails_at_the_loaded_step_changes_nothing():
    model, other = small_network(), small_network(seed=1)
    opt, fresh = wrap(model), wrap(other, anneal=lambda k: 1.0 if k < 2 else 0.5)
    train(model, opt, 3)
    before = snapshot(other, fresh)
    with pytest.raises(ValueError, match=r"beta is 0\.5 at step 3"):
        fresh.load_state_dict(opt.state_dict())
    assert same(before, snapshot(other, fresh))
    assert fresh.steps == 0


def test_a_finalized_state_keeps_its_weights_whatever_the_schedule_says():
    method = mq.methods.MD(TERNARY, mq.mirror_from(lambda x: 2 / torch.pi * torch.atan(x), (-1, 1)))
    w, v = nn.Parameter(torch.linspace(-2, 2, 9)), nn.Parameter(torch.zeros(9))
    opt, fresh = (mq.MirrorDescent(torch.optim.SGD([p], lr=0.1), method, anneal=lambda k: 1.0 + k) for p in (w, v))
    opt.finalize()
    for _ in range(5):
        opt.step()
    fresh.load_state_dict(opt.state_dict())
    assert torch.equal(w, v)


def test_finalize_checks_what_the_method_rounded():
    class Wrong(mq.Method):
        """Does not round."""

        def project(self, latent, beta):
            return latent

        def round(self, latent, beta):
            return latent

    opt = mq.MirrorDescent(torch.optim.SGD([nn.Parameter(torch.tensor([0.3]))], lr=0.1), Wrong())
    with pytest.raises(RuntimeError, match=r"Wrong\.round left parameter 0 of group 0 off its"):
        opt.finalize()


def test_groups_are_not_added_inside_quantized_or_quantized_after_finalize():
    opt, head = wrap(small_network()), nn.Linear(3, 3)
    group = {"params": list(head.named_parameters())}
    with opt.quantized(), pytest.raises(RuntimeError, match=r"inside quantized\(\)"):
        opt.add_param_group(group)
    opt.finalize()
    with pytest.raises(RuntimeError, match="can only be 'ref'"):
        opt.add_param_group(group)
    opt.add_param_group({**group, "method": "ref"})


def test_frozen_parameters_given_directly_are_left_alone():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    frozen = layer.bias.clone()
    opt = mq.MirrorDescent(torch.optim.Adam(layer.parameters()))
    opt.finalize()
    assert torch.equal(layer.bias, frozen)
    assert BINARY.holds(layer.weight.detach())


def test_a_frozen_parameter_is_not_trained_in_float_later_on():
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    opt = mq.MirrorDescent(torch.optim.Adam(layer.named_parameters()))
    frozen = layer.bias.clone()
    layer.bias.requires_grad_(True)
    layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="bias was frozen when the optimizer was built"):
        opt.step()
    assert torch.equal(layer.bias, frozen)


def test_capture_in_a_cuda_graph_is_refused(monkeypatch):
    model = small_network()
    opt = wrap(model)
    before = snapshot(model, opt)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="each replay would use the same beta"):
        opt.step()
    assert same(before, snapshot(model, opt))


# Bad input: a clear error, and everything as it was.


def snapshot(model, opt=None):
    tensors = [p.detach().clone() for p in model.parameters()]
    return tensors + ([opt.latent(p).clone() for p in quantized_weights(model)] if opt else [])


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "md-tan"}, "Did you mean 'md-tanh'"),
        ({"levels": [1, -1]}, "increase strictly"),
        ({"levels": [1]}, "two or more"),
        ({"levels": 2}, r"levels are 2, but they must be a sequence of numbers"),
        ({"anneal": 1.02}, r"anneal is 1\.02, but it must be a function of the step"),
        ({"anneal": mq.schedules.constant(0.5)}, "beta is 0.5 at step 0, but MDTanhS needs a beta from 1 to 1e35"),
        ({"anneal": lambda k: float("nan")}, "beta is nan"),
        ({"anneal": mq.schedules.constant(1e36)}, "to 1e35"),
        ({"method": "md-tanh-bounded", "levels": TERNARY}, "two levels only"),
    ],
)
def test_bad_construction_leaves_everything_as_it_was(options, message):
    model = small_network()
    base = torch.optim.Adam(mq.split(model), lr=0.01)
    weights, groups = snapshot(model), [list(g["params"]) for g in base.param_groups]
    with pytest.raises((ValueError, TypeError), match=message):
        mq.MirrorDescent(base, **options)
    assert same(weights, snapshot(model))
    assert [list(map(id, g["params"])) for g in base.param_groups] == [list(map(id, ps)) for ps in groups]


@pytest.mark.parametrize("method", ["md-tanh", "md-softmax"])
def test_weights_that_stay_on_their_levels_cannot_decay(method):
    """Their latents become infinite, and infinity less a part of itself is NaN."""
    base = torch.optim.SGD(mq.split(small_network()), lr=0.1, weight_decay=0.01)
    with pytest.raises(ValueError, match=rf"use weight_decay=0, or '{method}-bounded'"):
        mq.MirrorDescent(base, method)
    opt = wrap(small_network(), method)
    opt.param_groups[1]["weight_decay"] = 0.01
    with pytest.raises(ValueError, match=r"weight_decay is 0\.01"):
        opt.step()
    model = small_network()
    opt = wrap(model, method, torch.optim.AdamW, lr=0.1, anneal=mq.schedules.geometric(1.5))
    train(model, opt, 20)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    opt.finalize()


def test_a_used_base_optimizer_is_refused():
    model = small_network()
    base = torch.optim.Adam(mq.split(model), lr=0.01)
    train(model, base, 1)
    with pytest.raises(ValueError, match="already has state"):
        mq.MirrorDescent(base)
    with pytest.raises(TypeError, match="plain torch optimizer"):
        mq.MirrorDescent(wrap(model))


def test_levels_that_coincide_in_the_weights_dtype_are_refused():
    w = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"not finite and distinct in torch\.bfloat16"):
        mq.MirrorDescent(torch.optim.Adam([w]), levels=[1.0, 1.001])


def test_groups_that_are_all_float_are_refused():
    with pytest.raises(ValueError, match="no parameter is left to quantize"):
        mq.MirrorDescent(torch.optim.Adam([{"params": small_network().parameters(), "method": "ref"}]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradients_are_refused_by_name(method, bad):
    model = small_network()
    opt = wrap(model, method)
    train(model, opt, 2)
    model[3].weight.grad[0, 0, 0, 0] = bad
    before, state = snapshot(model, opt), copy.deepcopy(opt.base.state_dict())
    with pytest.raises(ValueError, match=r"gradient of 3.weight holds NaN or inf at step 2"):
        opt.step()
    assert same(before, snapshot(model, opt))
    assert opt.steps == 2
    for i, saved in state["state"].items():
        for key, value in opt.base.state_dict()["state"][i].items():
            assert torch.equal(torch.as_tensor(saved[key]), torch.as_tensor(value))


@pytest.mark.parametrize("method", [m for m in mq.methods.names() if m != "ref"])
def test_sparse_gradients_move_the_latents_as_dense_ones_do(method):
    latents, words = [], torch.tensor([1, 2, 2, 5])
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(8, 4, sparse=sparse)
        opt = mq.MirrorDescent(torch.optim.SGD(mq.split(model, only=nn.Embedding), lr=0.1), method=method)
        for _ in range(2):
            (model(words) - 2).square().sum().backward()
            opt.step()
            opt.zero_grad()
        latents.append(opt.latent(model.weight))
    torch.testing.assert_close(*latents)


def test_large_finite_gradients_are_no_bad_gradients():
    w = nn.Parameter(torch.zeros(4))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=1e-38))
    w.grad = torch.full((4,), 3e38)
    opt.step()
    assert (w < 0).all()


def test_step_and_load_inside_quantized_are_refused(method):
    model = small_network()
    opt = wrap(model, method)
    train(model, opt, 1)
    before = snapshot(model, opt)
    with opt.quantized():
        with pytest.raises(RuntimeError, match=r"inside quantized\(\)"):
            opt.step()
        with pytest.raises(RuntimeError, match=r"inside quantized\(\)"):
            opt.load_state_dict(opt.state_dict())
        with pytest.raises(RuntimeError, match=r"copying or pickling is not possible inside quantized\(\)"):
            copy.deepcopy((model, opt))
    assert same(before, snapshot(model, opt))


def test_hooks_on_loading_are_called_as_torch_calls_them():
    opt, other = wrap(small_network()), wrap(small_network())
    state, seen = opt.state_dict(), []

    def later(optimizer, given):
        return {**given, "param_groups": [{**group, "steps": 7} for group in given["param_groups"]]}

    other.register_load_state_dict_pre_hook(later)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.steps))
    with pytest.warns(UserWarning, match="another schedule"):
        other.load_state_dict(state)
    assert seen == [7]
    assert state["param_groups"][0]["steps"] == 0


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (lambda: wrap(small_network(), "bc"), "saved with .*BC"),
        (lambda: wrap(small_network(), levels=TERNARY), r"-1.0, 0.0, 1.0"),
        (lambda: mq.MirrorDescent(torch.optim.Adam(small_network().parameters())), "build it as it was"),
        (lambda: torch.optim.Adam(small_network().parameters()), "not a state of MirrorDescent"),
    ],
)
def test_the_state_of_another_method_is_refused(theirs, message):
    model = small_network()
    opt = wrap(model)
    train(model, opt, 2)
    before = snapshot(model, opt)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(theirs().state_dict())
    assert same(before, snapshot(model, opt))


def test_a_scheduler_of_the_base_optimizer_is_refused():
    """It would have no effect, whether it is attached before or afterwards, even in the middle of training."""
    base = torch.optim.Adam(mq.split(small_network()))
    early = torch.optim.lr_scheduler.StepLR(base, 2)
    with pytest.raises(ValueError, match="attach it to MirrorDescent"):
        mq.MirrorDescent(base)
    model = small_network()
    opt = wrap(model)
    train(model, opt, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(opt.base, 1)
    before = snapshot(model, opt)
    with pytest.raises(RuntimeError, match="has a learning-rate scheduler: attach it to MirrorDescent instead"):
        train(model, opt, 1)
    assert same(before, snapshot(model, opt))
    del early, scheduler


def test_steps_of_the_base_optimizer_alone_are_noticed():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    base = torch.optim.Adam(mq.split(model))
    opt = mq.MirrorDescent(base, "bc")
    model(torch.randn(8, 3)).sum().backward()
    base.step()
    with pytest.raises(
        RuntimeError, match=r"base optimizer has taken steps by itself, .* call step\(\) and zero_grad\(\)"
    ):
        opt.finalize()
    opt.step()
    opt.finalize()


def test_vectors_that_nobody_chose_to_quantize_are_reported():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.warns(mq.HealthWarning, match=r"^3 of 4 quantized tensors are vectors, .*: mq\.split\(model\) leaves"):
        mq.MirrorDescent(torch.optim.Adam(model.parameters()), "bc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mq.MirrorDescent(torch.optim.Adam(mq.split(model, everything=True)), "bc")
        mq.MirrorDescent(torch.optim.Adam([model[0].bias]), "bc")


def test_the_state_of_another_model_is_refused():
    model = nn.Linear(3, 2)
    opt = mq.MirrorDescent(torch.optim.Adam(model.parameters()))
    other = mq.MirrorDescent(torch.optim.Adam(nn.Linear(4, 2).parameters()))
    with pytest.raises(ValueError, match=r"has shape torch.Size\(\[2, 4\]\), but the model needs"):
        opt.load_state_dict(other.state_dict())


def test_a_diverged_latent_is_not_rounded():
    model = small_network()
    opt = wrap(model)
    opt.latent(model[3].weight)[0] = float("nan")
    with pytest.raises(RuntimeError, match=r"latent of 3\.weight holds NaN"):
        opt.finalize()
    assert not opt.finalized


@pytest.mark.parametrize("value", [None, "fast"])
def test_a_schedule_that_gives_no_number_is_named(value):
    base = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(TypeError, match=f"anneal gives {value!r} at step 0, but beta must be a number"):
        mq.MirrorDescent(base, anneal=lambda step: value)


# Weights changed behind the optimizer's back.


def restored(model, state):
    """A copy of a state, since loading may keep tensors of what it is given."""
    model.load_state_dict(copy.deepcopy(state))


@pytest.mark.parametrize("last", ["model", "optimizer"])
def test_early_stopping_goes_back_by_loading_both_states_in_either_order(method, last):
    model, twin = small_network(), small_network()
    opt, other = wrap(model, method), wrap(twin, method)
    train(model, opt, 3)
    train(twin, other, 3)
    best = copy.deepcopy({"optimizer": opt.state_dict(), "model": model.state_dict()})
    train(model, opt, 5, start=3)
    for name in sorted(best, key=lambda name: name == last):
        {"model": model, "optimizer": opt}[name].load_state_dict(best[name])
    for o in (opt, other):
        with o.quantized():
            pass
    for m, o in ((model, opt), (twin, other)):
        train(m, o, 3, start=3)
        o.finalize()
    assert same(model.parameters(), twin.parameters())
    assert same(model.buffers(), twin.buffers())


@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data"])
def test_early_stopping_without_the_optimizers_state_is_refused_and_not_undone(method, how):
    model = small_network()
    opt = wrap(model, method, lr=0.1)
    train(model, opt, 2)
    best = copy.deepcopy(model.state_dict())
    train(model, opt, 6, start=2)
    if how == "load_state_dict":
        restored(model, best)
    else:
        with torch.no_grad():
            for name, p in model.named_parameters():
                (p.data if how == "data" else p).copy_(best[name])
    before = snapshot(model, opt)
    if method.startswith("bc"):  # whose weights always are on their levels, and so are those that were loaded
        opt.finalize()
        assert same(model.parameters(), [best[name] for name, _ in model.named_parameters()])
        return
    with pytest.raises(RuntimeError, match=r"0\.weight was changed since .*saved together, in either order"):
        opt.finalize()
    assert same(before, snapshot(model, opt))
    assert not opt.finalized


@pytest.mark.parametrize("call", ["step", "quantized", "add_param_group"])
def test_whatever_would_undo_a_change_of_the_weights_refuses(call):
    model, head = small_network(), nn.Linear(3, 3)
    opt = wrap(model)
    train(model, opt, 2)
    nn.init.normal_(model[3].weight)
    before = snapshot(model, opt)
    calls = {
        "step": opt.step,
        "quantized": lambda: opt.quantized().__enter__(),
        "add_param_group": lambda: opt.add_param_group({"params": list(head.named_parameters())}),
    }
    with pytest.raises(RuntimeError, match=rf"3\.weight was changed since .*{call}\(\) would undo the change"):
        calls[call]()
    assert same(before, snapshot(model, opt))
    assert opt.steps == 2
    with pytest.warns(UserWarning, match=r"does not belong to the model's weights: 3\.weight was changed"):
        state = opt.state_dict()
    opt.load_state_dict(state)
    opt.step()


def test_a_change_inside_quantized_is_told_when_it_is_undone():
    model = small_network()
    opt = wrap(model)
    soft = snapshot(model)
    with pytest.raises(RuntimeError, match=r"leaving quantized\(\) would undo the change"), opt.quantized():
        nn.init.normal_(model[3].weight)
    assert same(soft, snapshot(model))

    def failing():
        with opt.quantized():
            nn.init.normal_(model[3].weight)
            raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        failing()


def test_a_rounded_network_that_was_kept_is_taken_over_by_finalize(method):
    model, levels = small_network(), BINARY if method in ("md-tanh-bounded", "md-tanh") else 0.1 * TERNARY
    opt = wrap(model, method, lr=0.1, levels=levels)
    train(model, opt, 2)
    with opt.quantized():
        best = copy.deepcopy(model.state_dict())
    for name in best.keys() & {"0.weight", "3.weight", "6.weight"}:
        best[name].neg_()  # far from what the latents say by now
        assert best[name].any()
    restored(model, best)
    opt.finalize()
    assert same([best[name] for name, _ in model.named_parameters()], snapshot(model))
    fresh_model = small_network(seed=1)
    fresh = wrap(fresh_model, method, lr=0.1, levels=levels)
    fresh.load_state_dict(opt.state_dict())  # the latents fit
    assert same(quantized_weights(model), quantized_weights(fresh_model))


@pytest.mark.parametrize("how", ["load_state_dict", "data"])
def test_a_rounded_network_that_is_loaded_after_finalize_is_the_one_that_is_saved(method, how):
    model = small_network()
    opt = wrap(model, method)
    opt.finalize()
    best = {name: value.neg() if name.endswith("weight") else value for name, value in model.state_dict().items()}
    if how == "load_state_dict":
        restored(model, best)
    else:
        model[0].weight.data.copy_(best["0.weight"])
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    fresh_model = small_network(seed=1)
    fresh = wrap(fresh_model, method)
    fresh_model.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    assert torch.equal(fresh_model[0].weight, best["0.weight"])
    assert same(snapshot(model), snapshot(fresh_model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_weights_of_half_precision_are_not_undone_either(dtype):
    model = nn.Linear(64, 8, bias=False).to(dtype)
    opt = wrap(model)
    best = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        opt.latent(model.weight).add_(0.05)
    model.weight.grad = torch.zeros_like(model.weight)
    opt.step()
    restored(model, model.state_dict())
    opt.step()  # its own weights
    restored(model, best)
    for action in (opt.step, opt.finalize):
        with pytest.raises(RuntimeError, match="weight was changed since"):
            action()


def test_a_rounded_network_is_taken_over_even_after_training_diverged():
    model = small_network()
    opt = wrap(model)
    with opt.quantized():
        best = copy.deepcopy(model.state_dict())
    for p in quantized_weights(model):
        opt.latent(p).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="holds NaN"):
        opt.finalize()
    restored(model, best)
    opt.finalize()
    assert same(snapshot(model), [best[name] for name, _ in model.named_parameters()])


def test_weights_that_come_off_their_levels_after_finalize_are_refused():
    model = small_network()
    opt = wrap(model)
    soft = copy.deepcopy(model.state_dict())
    opt.finalize()
    rounded = copy.deepcopy(model.state_dict())
    restored(model, soft)
    for action in (opt.step, opt.finalize):
        with pytest.raises(RuntimeError, match=r"0\.weight is off its levels, although the optimizer is finalized"):
            action()
    restored(model, {**rounded, "0.weight": -rounded["0.weight"]})
    opt.finalize()
    train(model, opt, 1)
    assert torch.equal(model[0].weight, -rounded["0.weight"])


@pytest.mark.parametrize("swap", ["average", "sam", "clamp", "half", "channels_last", "rounded", "broadcast"])
def test_weights_that_come_back_are_no_change(method, swap):
    """Averages swapped in and out, sharpness-aware steps, conversions that keep or hardly touch the values."""
    model = small_network()
    opt = wrap(model, method)
    train(model, opt, 2)
    own = copy.deepcopy(model.state_dict())
    if swap == "average":
        restored(model, {name: value + 0.5 if value.is_floating_point() else value for name, value in own.items()})
        restored(model, own)
    elif swap == "half":
        model.half().float()
    elif swap == "channels_last":
        model.to(memory_format=torch.channels_last)
        restored(model, own)
    elif swap == "rounded":
        with opt.quantized():
            own = copy.deepcopy(model.state_dict())
        restored(model, own)
    with torch.no_grad():
        for p in model.parameters():
            if swap == "sam":
                step = torch.full_like(p, 0.01)
                p.add_(step).sub_(step)
            elif swap == "clamp":
                p.clamp_(-10, 10)
            elif swap == "broadcast":
                p.copy_(p.clone())
    train(model, opt, 1, start=2)
    with opt.quantized():
        pass
    opt.state_dict()
    opt.finalize()


def test_a_latent_may_be_changed_by_hand():
    model = small_network()
    opt = wrap(model)
    opt.latent(model[0].weight).fill_(-0.5)
    opt.finalize()
    assert (model[0].weight == -1).all()


def test_weights_that_are_nan_are_no_change_of_their_own():
    w = nn.Parameter(torch.tensor([0.5, -0.5]))
    opt = mq.MirrorDescent(torch.optim.SGD([w], lr=0.1), check_gradients=False)
    w.grad = torch.tensor([float("nan"), 1.0])
    opt.step()
    with torch.no_grad():
        w.copy_(w.clone())
    opt.step()
    with pytest.raises(RuntimeError, match="holds NaN: training diverged"):
        opt.finalize()


def test_a_copied_optimizer_notices_changes_too():
    for clone in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        model, opt = clone((lambda m: (m, wrap(m)))(small_network()))
        train(model, opt, 1)
        model, opt = clone((model, opt))
        nn.init.normal_(model[0].weight)
        with pytest.raises(RuntimeError, match=r"0\.weight was changed"):
            opt.step()


def test_lbfgs_and_compiled_steps_notice_changes_and_nothing_else():
    w = nn.Parameter(torch.tensor([0.5, -0.2]))
    opt = mq.MirrorDescent(torch.optim.LBFGS([w], max_iter=3, line_search_fn="strong_wolfe"))

    def closure():
        opt.zero_grad()
        loss = (w - 0.5).square().sum()
        loss.backward()
        return loss

    v = nn.Parameter(torch.linspace(-1, 1, 6))
    other = mq.MirrorDescent(torch.optim.SGD([v], lr=0.1))
    torch.compiler.reset()
    compiled = torch.compile(other.step, backend="eager")
    for _ in range(3):
        opt.step(closure)
        v.grad = torch.ones(6)
        compiled()
    assert other.steps == 3
    with torch.no_grad():
        v.neg_()
        w.neg_()
    with pytest.raises(RuntimeError, match="was changed"):
        compiled()
    with pytest.raises(RuntimeError, match="was changed"):
        opt.step(closure)
