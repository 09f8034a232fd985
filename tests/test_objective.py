"""The objective against direct formulas, and as runs use it."""

import shutil

import pytest
import torch
from test_train import SHORT, assert_identical, config, signalled
from torch import nn

import mirrorquant as mq
from mirrorquant.train import Best, Config, ConfigError, Interrupted, Run, build
from mirrorquant.train.objective import Batch, Objective, TeacherError


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return Batch(torch.randn(6, 1, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0]))


@pytest.fixture
def logits(batch):
    return torch.randn(6, 5, dtype=torch.float64, requires_grad=True)


def log_softmax(x):
    return x - x.exp().sum(1, keepdim=True).log()


def cross_entropy(logits, labels):
    return -log_softmax(logits)[range(6), labels].mean()


def test_the_default_is_mean_cross_entropy(logits, batch):
    torch.testing.assert_close(Objective()(logits, batch), cross_entropy(logits, batch.labels))


def test_label_smoothing_spreads_a_share_of_the_target_over_all_classes(logits, batch):
    expected = 0.7 * cross_entropy(logits, batch.labels) - 0.3 * log_softmax(logits).mean()
    torch.testing.assert_close(Objective(label_smoothing=0.3)(logits, batch), expected)


def test_the_logit_scale_is_a_factor_of_the_logits(logits, batch):
    torch.testing.assert_close(Objective(logit_scale=0.25)(logits, batch), cross_entropy(logits / 4, batch.labels))


def test_labels_may_be_probabilities_of_mixed_images(logits, batch):
    first, second = (
        torch.eye(5, dtype=torch.float64)[batch.labels],
        torch.eye(5, dtype=torch.float64)[[1, 0, 2, 3, 1, 4]],
    )
    mixed = batch._replace(labels=0.8 * first + 0.2 * second)
    expected = -(mixed.labels * log_softmax(logits)).sum(1).mean()
    torch.testing.assert_close(Objective()(logits, mixed), expected)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_distillation_is_a_divergence_from_the_teacher_beside_the_labels(logits, batch, share):
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(4, 5).double())
    objective = Objective(teacher=teacher, temperature=3.0, hard_share=share, logit_scale=2.0)
    taught, learnt = log_softmax(teacher(batch.images) / 3), log_softmax(2 * logits / 3)
    divergence = (taught.exp() * (taught - learnt)).sum(1).mean()
    expected = share * cross_entropy(2 * logits, batch.labels) + (1 - share) * 9 * divergence
    loss = objective(logits, batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert logits.grad.abs().sum() > 0


def test_any_callable_may_teach_if_its_answers_fit(logits, batch):
    objective = Objective(teacher=lambda images: logits.detach().sum(1, keepdim=True))
    expected = r"^teacher function gives \(6, 1\) for images of shape \(6, 1, 2, 2\), expected \(6, 5\), one number per"
    with pytest.raises(TeacherError, match=expected):
        objective(logits, batch)


def test_a_tally_counts_right_answers_and_sums_losses_without_smoothing(logits, batch):
    right, among, loss = Objective(label_smoothing=0.3, logit_scale=0.5).tally(logits, batch.labels)
    assert int(right) == int((logits.argmax(1) == batch.labels).sum())
    first = logits.topk(min(5, logits.shape[1])).indices
    assert int(among) == int((first == batch.labels[:, None]).any(1).sum())
    torch.testing.assert_close(loss, 6 * cross_entropy(logits / 2, batch.labels).float())


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    Run(config("width=4", recipe="digits/digitsnet/ref"), folder, quiet=True).train()
    return folder


def test_a_run_learns_from_the_best_network_of_another_and_resumes_bit_exactly(tmp_path, teacher):
    settings = config("width=4", f"teacher={teacher}", "temperature=2", "hard_share=0.5")
    run = Run(settings, tmp_path / "whole", quiet=True)
    objective, images = run.task.objective, run.task.batch(0).images
    with torch.no_grad():
        torch.testing.assert_close(objective.teacher(images), Best.load(teacher).model(images))
    assert (objective.temperature, objective.hard_share, objective.teacher.training) == (2.0, 0.5, False)
    taught = run.train()
    alone = Run(config("width=4"), tmp_path / "alone", quiet=True).train()
    assert taught["loss_curve"] != alone["loss_curve"]
    with pytest.raises(Interrupted):
        signalled(Run(settings, tmp_path / "cut", quiet=True), 17).train()
    Run.resume(tmp_path / "cut", quiet=True).train()
    assert_identical(tmp_path / "whole", tmp_path / "cut")


def test_a_teacher_has_the_logit_scale_that_it_was_trained_with(tmp_path):
    settings = config("width=4", "logit_scale=0.25", recipe="digits/digitsnet/ref")
    Run(settings, tmp_path / "teacher", quiet=True).train()
    student = Run(config("width=4", f"teacher={tmp_path / 'teacher'}"), tmp_path / "student", quiet=True)
    images = student.task.batch(0).images
    with torch.no_grad():
        expected = Best.load(tmp_path / "teacher").model(images) / 4
        torch.testing.assert_close(student.task.objective.teacher(images), expected)
    student.folder.release()


def test_a_packed_file_teaches_like_its_run(tmp_path):
    Run(config("width=4", "logit_scale=0.25"), tmp_path / "teacher", quiet=True).train()
    mq.save(mq.load(tmp_path / "teacher"), tmp_path / "net.safetensors")
    curves = []
    for teacher in ("teacher", "net.safetensors"):
        student = Run(config("width=4", f"teacher={tmp_path / teacher}"), tmp_path / f"by {teacher}", quiet=True)
        assert student.task.objective.teacher.logit_scale == 0.25
        curves.append(student.train()["loss_curve"])
    assert curves[0] == curves[1]


def test_another_teacher_is_noticed_when_a_run_resumes(tmp_path, teacher):
    shutil.copytree(teacher, tmp_path / "teacher")
    settings = config("width=4", f"teacher={tmp_path / 'teacher'}")
    with pytest.raises(Interrupted):
        signalled(Run(settings, tmp_path / "run", quiet=True), 17).train()
    resumed = Run.resume(tmp_path / "run", quiet=True)
    resumed._restore()
    assert not [text for text in resumed.messages if "teacher" in text]
    resumed.metrics.close()
    resumed.folder.release()
    shutil.rmtree(tmp_path / "teacher")
    Run(config("width=4", "seed=5", recipe="digits/digitsnet/ref"), tmp_path / "teacher", quiet=True).train()
    run = Run.resume(tmp_path / "run", quiet=True)
    run.train()
    assert f"teacher {tmp_path / 'teacher'} is not the network that this run has learnt from so far" in run.messages


def test_loading_a_network_leaves_the_generator_alone(teacher):
    state = torch.get_rng_state()
    Best.load(teacher)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("engine", ["plain", "graph"])
def test_a_teacher_sees_the_very_images_of_the_student(tmp_path, teacher, engine):
    """Augmented, and of several parts each its own."""
    settings = config("width=4", "augment=crop-flip", f"teacher={teacher}", f"engine={engine}", "accumulate=4")
    run, seen, taught = Run(settings, tmp_path / "run", quiet=True), [], []
    run.task.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    run.task.objective.teacher.register_forward_pre_hook(lambda _, inputs: taught.append(inputs[0].clone()))
    for _ in range(2):
        run.advance()
    run.folder.release()
    assert len(seen) == len(taught) == 8
    assert all(torch.equal(a, b) for a, b in zip(seen, taught, strict=True))
    assert not torch.equal(seen[0], seen[1])


class Shy(nn.Module):
    """A teacher that knows nothing."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes

    def forward(self, x):
        return x.new_zeros(len(x), self.classes)


def test_a_teacher_may_be_any_module(tmp_path):
    settings = config("width=4", "teacher=test_objective:Shy", "temperature=1", "hard_share=0")
    run = Run(settings, tmp_path / "run", quiet=True)
    batch = run.task.batch(0)
    logits = run.task.model(batch.images)
    expected = -torch.log_softmax(logits, 1).mean() - torch.log(torch.tensor(10.0))  # KL from the uniform distribution
    torch.testing.assert_close(run.task.objective(logits, batch), expected)
    run.folder.release()


class Talkative(Shy):
    """A teacher with another number of outputs."""

    def forward(self, x):
        return x.new_zeros(len(x), self.classes + 2)


class Pair(Shy):
    def forward(self, x):
        return super().forward(x), x


class Flat(Shy):
    """A teacher for images of another shape."""

    def forward(self, x):
        return x.view(-1, 3 * 32 * 32)


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ("Talkative", r"gives \(32, 12\) for images of shape \(32, 1, 8, 8\), expected \(32, 10\), one number"),
        ("Pair", r"gives tuple for images of shape .*, expected \(32, 10\)"),
        ("Flat", r"fails on images of shape \(32, 1, 8, 8\): RuntimeError: "),
    ],
)
def test_a_teacher_that_fails_is_named(tmp_path, teacher, said):
    run = Run(config("width=4", f"teacher=test_objective:{teacher}"), tmp_path / "run", quiet=True)
    with pytest.raises(TeacherError, match=f"^teacher test_objective:{teacher} {said}"):
        run.train()


def test_a_run_on_mixed_images_resumes_bit_exactly(tmp_path):
    mixed = ["augment=crop-flip", "cutout=3", "mixup=0.5", "cutmix=1.0", "alternating_flip=true"]
    settings = config("width=4", *mixed)
    whole = Run(settings, tmp_path / "whole", quiet=True)
    assert whole.task.batch(0).labels.shape == (32, 10)
    curve = whole.train()["loss_curve"]
    assert curve != Run(config("width=4"), tmp_path / "plain", quiet=True).train()["loss_curve"]
    with pytest.raises(Interrupted):
        signalled(Run(settings, tmp_path / "cut", quiet=True), 17).train()
    Run.resume(tmp_path / "cut", quiet=True).train()
    assert_identical(tmp_path / "whole", tmp_path / "cut")


def test_a_teacher_of_other_classes_or_none_at_all_is_an_error(tmp_path, teacher):
    other = Config.from_recipe("digits/digitsnet/ref", [*SHORT, "data=synthetic:1x8x8:7", f"teacher={teacher}"])
    with pytest.raises(ConfigError, match=r"teacher .* has 10 classes, but there are 7"):
        Run(other, tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match=r"^teacher .* was trained on digits, but this run trains on fashion-mnist"):
        build._teacher(Config.from_recipe("fashion-mnist/digitsnet/ref", [f"teacher={teacher}"]), 10)
    with pytest.raises(ConfigError, match=r"^teacher .*nowhere: .*nowhere/config\.json cannot be read"):
        Run(config(f"teacher={tmp_path / 'nowhere'}"), tmp_path / "other", quiet=True)
    (tmp_path / "net.txt").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match=r"^teacher .*net\.txt is not a mirrorquant checkpoint: name a run's"):
        Run(config(f"teacher={tmp_path / 'net.txt'}"), tmp_path / "other", quiet=True)
    for about, said in (
        ({"classes": 7}, "has 7 classes"),
        ({"data": 3}, "was trained on 3"),
        ({"logit_scale": "a"}, "'a'"),
    ):
        mq.save(Best.load(teacher).packed(), tmp_path / "net.safetensors", about=about)
        with pytest.raises(ConfigError, match=rf"^teacher .*net\.safetensors.*{said}"):
            Run(config(f"teacher={tmp_path / 'net.safetensors'}"), tmp_path / "other", quiet=True)
    with pytest.raises(ConfigError, match=r"^teacher torch:zeros: .* no signature .*; write a function that calls it"):
        Run(config("teacher=torch:zeros"), tmp_path / "other", quiet=True)
    with pytest.raises(ConfigError, match=r"^cutout is 16, which erases all of each 8×8 image: make it smaller"):
        Run(config("cutout=16"), tmp_path / "other", quiet=True)
    with pytest.raises(ConfigError, match=r"^teacher nowhere:Mine: .* there is no module 'nowhere'"):
        Run(config("teacher=nowhere:Mine"), tmp_path / "third", quiet=True)


def test_smoothing_and_scale_of_a_configuration_reach_the_loss(tmp_path):
    curves = []
    for name, overrides in {"plain": [], "smooth": ["label_smoothing=0.2"], "scaled": ["logit_scale=0.1"]}.items():
        curves.append(Run(config("width=4", *overrides), tmp_path / name, quiet=True).train()["loss_curve"])
    assert len({str(curve[0]) for curve in curves}) == 3


def test_of_equal_logits_the_first_five_count():
    right, among, _ = Objective().tally(torch.zeros(10, 10), torch.arange(10))
    assert (int(right), int(among)) == (1, 5)


def test_a_network_that_gives_nan_has_no_label_among_the_first_five():
    right, among, _ = Objective().tally(torch.full((4, 10), torch.nan), torch.arange(1, 5))
    assert (int(right), int(among)) == (0, 0)
