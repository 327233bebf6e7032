"""A training run with a CUDA graph equals an eager one bit for bit."""

import pytest
import torch

from spikefuse.train.cli import main
from spikefuse.train.cuda_graph import EAGER_STEPS, GraphedStep

OPTIONS = {
    "poisson, adam": "--model mlp --encoding poisson",
    "conv, adamw, clipped": "--model conv --optimizer adamw --weight-decay 0.01 --clip 0.5",
    "sgd, cosine": "--model conv --optimizer sgd --lr 0.05 --schedule cosine --warmup 0.5",
    "bf16, parts": "--model conv --precision bf16 --accumulate 2",
    "chunks, every step": "--model mlp --tbptt 3 --loss every --flip --label-smoothing 0.1",
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch, tmp_path):
    """Disable cuDNN's nondeterministic algorithms, which also affect eager runs."""
    monkeypatch.chdir(tmp_path)
    from spikefuse.train import run

    make = run._trainer

    def trainer(*arguments):
        made = make(*arguments)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        return made

    monkeypatch.setattr(run, "_trainer", trainer)


def train(out, options):
    common = "--device cuda --batch-size 128 -T 8 --epochs 3 --decay 0.5 --threshold 0.5"
    assert main(["train", *common.split(), *options.split(), "--out", out]) == 0
    return torch.load(f"{out}/last.ckpt", weights_only=True, map_location="cpu")


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_run(name, monkeypatch):
    replays = []
    record = GraphedStep._record
    monkeypatch.setattr(
        GraphedStep, "_record", lambda self, *batch: (replays.append(self), record(self, *batch))
    )
    eager = train("eager", OPTIONS[name])
    assert replays == []
    graph = train("graph", OPTIONS[name] + " --cuda-graph")
    (step,) = replays  # recorded once
    assert step.done == 30
    assert step.graph is not None
    assert graph["global_step"] == eager["global_step"] == 30
    assert eager["state_dict"].keys() == graph["state_dict"].keys()
    for key, value in eager["state_dict"].items():
        assert torch.equal(value, graph["state_dict"][key]), key
    for a, b in zip(eager["spikefuse"]["history"], graph["spikefuse"]["history"], strict=True):
        assert [a[k] for k in ("train_loss", "val_loss")] == [
            b[k] for k in ("train_loss", "val_loss")
        ]


def test_resumed(tmp_path):
    options = OPTIONS["poisson, adam"] + " --cuda-graph"
    straight = train("straight", options)
    train("halves", options + " --epochs 2")
    assert main(["train", "--resume", "halves/last.ckpt", "--epochs", "3"]) == 0
    resumed = torch.load("halves/last.ckpt", weights_only=True, map_location="cpu")
    for key, value in straight["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][key]), key


def test_a_checkpoint_of_a_graph_resumes_on_a_cpu(tmp_path):
    train("run", OPTIONS["conv, adamw, clipped"] + " --cuda-graph --epochs 1")
    resume = ["train", "--resume", "run/last.ckpt", "--device", "cpu", "--epochs", "2"]
    assert main(resume) == 2
    assert main([*resume, "--no-cuda-graph"]) == 0
    assert main(["eval", "run/last.ckpt", "--device", "cpu"]) == 0


class Counted:
    """Stands in for Lightning's wrapper of an optimizer."""

    def __init__(self):
        self.calls = []

    def _on_before_step(self):
        self.calls.append("before")

    def _on_after_step(self):
        self.calls.append("after")


def test_a_batch_of_another_shape_runs_eagerly():
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.1, fused=True)

    def step(inputs, labels):
        optimizer.zero_grad()
        loss = (weight * inputs.float()).sum() + labels.sum()
        loss.backward()
        optimizer.step()
        return loss.detach(), inputs, labels

    graphed, counted = GraphedStep(step, optimizer), Counted()
    expected = torch.ones(3)
    for count in [4] * (EAGER_STEPS + 3) + [2] + [4] * 2:
        inputs = torch.randint(0, 9, (count, 3), dtype=torch.uint8, device="cuda")
        loss, _, _ = graphed(counted, inputs, torch.zeros(count, device="cuda"))
        total = inputs.sum(0).cpu().float()
        assert loss.item() == pytest.approx((expected * total).sum().item(), rel=1e-5)
        expected = expected - 0.1 * total
        torch.testing.assert_close(weight.detach().cpu(), expected)
    assert graphed.graph is not None
    assert counted.calls == ["before", "after"] * (EAGER_STEPS + 6)
