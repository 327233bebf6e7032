"""A training run with a CUDA graph equals an eager one bit for bit."""

import pytest
import torch

import spikefuse as sf
from spikefuse.data import drop_events
from spikefuse.train.cli import main
from spikefuse.train.training_module import TrainingModule

OPTIONS = {
    "poisson, adam": "--model mlp --encoding poisson",
    "conv, adamw, clipped": "--model conv --optimizer adamw --weight-decay 0.01 --clip 0.5",
    "sgd, cosine": "--model conv --optimizer sgd --lr 0.05 --schedule cosine --warmup 0.5",
    "bf16, parts": "--model conv --precision bf16 --accumulate 2",
    "chunks, every step": "--model mlp --tbptt 3 --loss every --flip --label-smoothing 0.1",
    "chunks, last step": "--model mlp --tbptt 3 --loss last --rate-penalty 0.5 --accumulate 2",
    "augmented": "--model conv --flip --cutout 3 --erase 0.5 --trivial-augment",
    "mixed, every step": "--model mlp --loss every --mixup 0.4 --cutmix 1",
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
def test_the_same_run(name, monkeypatch, capsys):
    steps = []
    monkeypatch.setattr(TrainingModule, "on_train_end", lambda self: steps.append(self.graph))
    eager = train("eager", OPTIONS[name] + " --no-cuda-graph")
    assert "not recorded as a CUDA graph: --no-cuda-graph" in capsys.readouterr().out
    graph = train("graph", OPTIONS[name])
    assert "training steps are recorded as a CUDA graph" in capsys.readouterr().out
    assert steps[0] is None
    assert (steps[1].num_eager, steps[1].num_graphs, steps[1].num_replays) == (3, 1, 27)
    assert graph["global_step"] == eager["global_step"] == 30
    assert eager["state_dict"].keys() == graph["state_dict"].keys()
    for key, value in eager["state_dict"].items():
        assert torch.equal(value, graph["state_dict"][key]), key
    for a, b in zip(eager["spikefuse"]["history"], graph["spikefuse"]["history"], strict=True):
        assert [a[k] for k in ("train_loss", "val_loss")] == [
            b[k] for k in ("train_loss", "val_loss")
        ]


OTHERS = {
    "radam": "--optimizer radam --schedule one-cycle --rate-penalty 0.1",
    "adamax": "--optimizer adamax --schedule step --weight-decay 0.01",
    "rmsprop": "--optimizer rmsprop --lr 1e-4 --ema 0.9 --patience 9",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_are_recorded(name, monkeypatch):
    """Some of these optimizers compute their bias correction in float32 in a graph."""
    steps = []
    monkeypatch.setattr(TrainingModule, "on_train_end", lambda self: steps.append(self.graph))
    eager = train("eager", f"--model mlp {OTHERS[name]} --no-cuda-graph")
    graph = train("graph", f"--model mlp {OTHERS[name]}")
    assert (steps[1].obstacle, steps[1].num_graphs, steps[1].num_replays) == ("", 1, 27)
    losses = [[row["train_loss"] for row in run["spikefuse"]["history"]] for run in (eager, graph)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_resumed(tmp_path):
    options = OPTIONS["poisson, adam"]
    straight = train("straight", options)
    train("halves", options + " --epochs 2")
    assert main(["train", "--resume", "halves/last.ckpt", "--epochs", "3"]) == 0
    resumed = torch.load("halves/last.ckpt", weights_only=True, map_location="cpu")
    for key, value in straight["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][key]), key


def test_a_checkpoint_of_a_graph_resumes_on_a_cpu(tmp_path):
    train("run", OPTIONS["conv, adamw, clipped"] + " --epochs 1")
    assert main(["train", "--resume", "run/last.ckpt", "--device", "cpu", "--epochs", "2"]) == 0
    assert main(["eval", "run/last.ckpt", "--device", "cpu"]) == 0


def test_loss_scaling_runs_eagerly(capsys):
    train("run", OPTIONS["bf16, parts"].replace("bf16", "16"))
    assert "the loss scaling of precision 16 may skip steps" in capsys.readouterr().out


def test_events_are_dropped_in_a_graph():
    """The draws of a replay are those of an eager step, and others at each replay."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    step = sf.graph_step(lambda x: drop_events(x, generator))
    frames = torch.full((64, 5, 2, 8, 8), 6, dtype=torch.uint8, device="cuda")
    torch.manual_seed(0)
    found = [step(frames) for _ in range(6)]
    assert (step.num_eager, step.num_replays) == (3, 3)
    torch.manual_seed(0)
    expected = [drop_events(frames, generator) for _ in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[4], found[5])
