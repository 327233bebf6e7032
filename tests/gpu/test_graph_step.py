"""Recorded steps equal eager ones bit for bit."""

import copy
import functools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spikefuse as sf
from spikefuse.transforms.graph_step import NotRecordable

STEPS = 12


def make_network(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), sf.LIF(), nn.Dropout(dropout)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 10))
    return sf.fuse(sf.Temporal(net)).cuda()


def batches(steps=STEPS, size=6):
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        x = torch.rand(4, size, 2, 8, 8, device="cuda", generator=generator)
        yield x, torch.randint(0, 10, (size,), device="cuda", generator=generator)


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.01),
    "fused sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, fused=True),
    "adam": lambda p, lr: torch.optim.Adam(p, lr, capturable=True),
    "fused adamw": lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr, capturable=True),
}


def eager(step):
    return step


def train(optimizer, wrap, *, amp=False, dropout=0.0, schedule=False, clip=False, batch=batches):
    net = make_network(dropout)
    rate = 0.0625
    if wrap is eager and optimizer in ("adam", "rmsprop"):
        # A capturable optimizer rounds a tensor and a number differently.
        rate = torch.tensor(rate, device="cuda")
    optimizer = OPTIMIZERS[optimizer](net.parameters(), rate)
    # By powers of two, which numbers and tensors multiply exactly.
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    @wrap
    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(net(x).float().mean(0), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        return {"loss": loss}

    torch.manual_seed(2)
    losses, rates = [], []
    for x, y in batch():
        losses.append(step(x, y)["loss"])
        if schedule:
            scheduler.step()
            rates.append([float(rate) for rate in scheduler.get_last_lr()])
    return [loss.item() for loss in losses], rates, net.state_dict(), step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"amp": True, "dropout": 0.5, "clip": True}])
def test_training(optimizer, options):
    *expected, _ = train(optimizer, eager, **options)
    *graph, step = train(optimizer, sf.graph_step, **options)
    assert (step.num_eager, step.num_graphs, step.num_replays) == (3, 1, STEPS - 3)
    assert expected[:2] == graph[:2]
    for name, value in expected[2].items():
        assert torch.equal(value, graph[2][name]), name


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "sgd"])
def test_schedules(optimizer):
    *expected, _ = train(optimizer, eager, schedule=True)
    *graph, step = train(optimizer, sf.graph_step, schedule=True)
    assert step.num_graphs == 1
    assert expected[:2] == graph[:2]
    for name, value in expected[2].items():
        assert torch.equal(value, graph[2][name]), name


def test_adam_becomes_capturable():
    net = make_network()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)

    @sf.graph_step
    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(net(x).mean(0), y).backward()
        optimizer.step()

    before = copy.deepcopy(net.state_dict())
    for x, y in batches():
        assert step(x, y) is None
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert not torch.equal(net.state_dict()["net.5.weight"], before["net.5.weight"])
    assert step.num_replays == STEPS - 3


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_accumulated_gradients(set_to_none, where):
    def run(wrap):
        net = make_network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True)

        @wrap
        def part(x, y):
            F.cross_entropy(net(x).mean(0), y).backward()

        def update():
            optimizer.step()
            optimizer.zero_grad(set_to_none)

        for i, (x, y) in enumerate(batches(24)):
            part(x, y)
            if i % 3 == 2:
                if where == "inside":
                    update()
                else:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none)
        return net.state_dict()

    expected, graph = run(eager), run(sf.graph_step)
    for name, value in expected.items():
        assert torch.equal(value, graph[name]), name


def test_gradients_set_to_zero_before_the_step():
    def run(wrap):
        net = make_network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1, fused=True)
        unused = nn.Parameter(torch.ones(3, device="cuda"))
        optimizer.add_param_group({"params": [unused]})

        @wrap
        def step(x, y):
            F.cross_entropy(net(x).mean(0), y).backward()
            optimizer.step()

        for x, y in batches():
            optimizer.zero_grad()
            step(x, y)
        assert unused.grad is None
        return {**net.state_dict(), "unused": unused}

    expected, graph = run(eager), run(sf.graph_step)
    for name, value in expected.items():
        assert torch.equal(value, graph[name]), name


def test_shapes_and_the_limit():
    sizes = [6] * 5 + [4] * 4 + [6, 4, 5, 5, 5, 3]

    def batch():
        for size in sizes:
            yield from batches(1, size)

    *expected, _ = train("fused sgd", eager, batch=batch)
    with pytest.warns(UserWarning, match="more than 2 graphs"):
        *graph, step = train(
            "fused sgd", lambda step: sf.graph_step(step, max_graphs=2), batch=batch
        )
    assert (step.num_graphs, step.num_replays) == (2, 2 + 2 + 2)
    assert expected[0] == graph[0]


def test_modes_settings_and_moves():
    net = make_network(0.5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    @sf.graph_step
    def predict(x):
        return net(x).mean(0)

    x = torch.rand(4, 6, 2, 8, 8, device="cuda")

    def check():
        net.eval()
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(predict(x), net(x).mean(0))

    check()
    net.train()
    for _ in range(4):
        predict(x)
    assert predict.num_graphs == 2
    check()
    net.load_state_dict({k: 2 * v for k, v in net.state_dict().items()})
    replays = predict.num_replays
    check()
    assert predict.num_replays == replays + 4
    net.load_state_dict({k: 2 * v for k, v in net.state_dict().items()}, assign=True)
    check()
    assert predict.num_graphs == 1
    net.to(memory_format=torch.channels_last)
    check()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for _ in range(4):
            assert torch.equal(predict(x), net(x).mean(0))
    del optimizer


def test_changed_settings_of_modules():
    net = make_network()
    lif = next(m for m in net.modules() if isinstance(m, sf.LIF))

    @sf.graph_step
    def step(x):
        y = net(x)
        return y, torch.autograd.grad(y.sum(), net.net[0].weight)[0]

    x = torch.rand(4, 6, 2, 8, 8, device="cuda")
    for owner, name, value in ((lif, "decay", 0.25), (lif.surrogate, "width", 2.0)):
        for _ in range(5):
            step(x)
        before = step(x)
        setattr(owner, name, value)
        for _ in range(5):
            found = step(x)
        assert not torch.equal(found[1], before[1])
        for a, b in zip(found, step.step(x), strict=True):
            assert torch.equal(a, b)
    assert step.num_graphs == 3


def test_graphs_that_replace_all_others():
    """A call of a module that is new to the step drops all graphs, and with them their memory."""
    layers = nn.ModuleList(nn.Linear(8, 8, device="cuda") for _ in range(4))

    @sf.graph_step
    def step(x, number):
        for layer in layers[:number]:
            x = layer(x).relu()
        return x

    x = torch.rand(6, 8, device="cuda")
    for number in (1, 2, 4, 2, 1):
        for _ in range(5):
            with torch.no_grad():
                y = step(x, number)
                assert torch.equal(y, step.step(x, number))
    assert step.num_graphs == 3


def test_restored_optimizers():
    def run(wrap):
        net = make_network()
        optimizer = torch.optim.Adam(net.parameters(), 0.01, fused=True)

        @wrap
        def step(x, y):
            optimizer.zero_grad()
            F.cross_entropy(net(x).mean(0), y).backward()
            optimizer.step()

        for i, (x, y) in enumerate(batches()):
            if i == 5:
                saved = copy.deepcopy(optimizer.state_dict())
            if i == 8:
                optimizer.load_state_dict(saved)
            if i == 10:
                optimizer.param_groups[0]["weight_decay"] = 0.1
            step(x, y)
        return net.state_dict()

    expected, graph = run(eager), run(sf.graph_step)
    for name, value in expected.items():
        assert torch.equal(value, graph[name]), name


def test_results_are_copies():
    step = sf.graph_step(lambda x: (x + 1, [x.expand(2, 3)], "text"))
    x = torch.zeros(3, device="cuda")
    results = [step(x + i) for i in range(6)]
    assert [r[0][0].item() for r in results] == [1, 2, 3, 4, 5, 6]
    assert results[5][2] == "text"
    assert results[5][1][0].shape == (2, 3)


def test_a_constant_input_stays_one():
    seen = []

    @sf.graph_step
    def step(x):
        seen.append(x.stride())
        return x.sum()

    image = torch.rand(3, 2, device="cuda")
    for i in range(5):
        assert step((image + i).expand(4, 3, 2)) == (image + i).expand(4, 3, 2).sum()
    assert seen[-1] == (0, 2, 1)


def reads(x):
    return x if x.sum().item() > 0 else -x


def branches(x):
    if x.sum() > 0:
        return x
    return -x


def moves(x):
    return x * torch.tensor(2.0).to(x.device)


def draws(x):
    return x * torch.rand(())


def python_draws(x):
    return x * random.random()


@functools.cache
def scaler_and_optimizer():
    w = torch.zeros(3, device="cuda", requires_grad=True)
    return torch.amp.GradScaler(), torch.optim.SGD([w], 0.1), w


def scales(x):
    scaler, optimizer, w = scaler_and_optimizer()
    optimizer.zero_grad()
    scaler.scale((w * x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return w


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (reads, r'test_graph_step.py:\d+: "return x if x.sum\(\).item\(\) > 0.* reads a value'),
        (branches, r'test_graph_step.py:\d+: "if x.sum\(\) > 0:" reads a value'),
        (moves, r"torch.tensor\(2.0\)"),
        (draws, "random numbers on the CPU"),
        (python_draws, "random numbers on the CPU"),
        (scales, r'"scaler.step\(optimizer\)" a GradScaler'),
    ],
)
def test_what_cannot_be_recorded(step, message):
    x = torch.ones(3, device="cuda")
    parts = scaler_and_optimizer()[1:2] if step is scales else ()
    graphed = sf.graph_step(step, *parts)
    for _ in range(3):
        graphed(x)
    with pytest.raises(NotRecordable, match=message):
        graphed(x)
    assert torch.cuda.memory_allocated() < 2**30  # the GPU is usable
    graphed = sf.graph_step(step, *parts, fallback=True)
    message = "a GradScaler reads on the host" if step is scales else message
    with pytest.warns(UserWarning, match=message) as caught:
        results = [graphed(x) for _ in range(6)]
    assert len([w for w in caught if "graph_step" in str(w.message)]) == 1
    assert all(result.shape == x.shape for result in results)
    assert graphed.num_replays == 0


def test_a_failed_recording_leaves_the_gpu_usable():
    calls = []

    def step(x):
        calls.append(0)
        if len(calls) == 4:
            torch.cuda.synchronize()  # not reported in advance
        return F.dropout(x)

    x = torch.ones(64, device="cuda")
    graphed = sf.graph_step(step)
    for _ in range(3):
        graphed(x)
    with pytest.raises(NotRecordable, match=r"torch.cuda.synchronize\(\)"):
        graphed(x)
    torch.manual_seed(0)
    expected = F.dropout(x)
    torch.manual_seed(0)
    assert torch.equal(graphed(x), expected)
    assert graphed.num_graphs == 1


def test_a_schedule_inside_the_step():
    net = make_network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    @sf.graph_step
    def step(x, y):
        F.cross_entropy(net(x).mean(0), y).backward()
        optimizer.step()
        scheduler.step()

    for x, y in batches(3):
        step(x, y)
    with pytest.raises(NotRecordable, match=r"call scheduler.step\(\) after the step"):
        step(x, y)


def test_settings_that_always_change():
    step = sf.graph_step(lambda x, number: x * number)
    x = torch.ones(3, device="cuda")
    with pytest.warns(UserWarning, match="give numbers that change as tensors"):
        assert [step(x, i)[0].item() for i in range(200)] == list(range(200))


def test_arguments():
    step = sf.graph_step(lambda *x: x[0])
    x = torch.ones(3, device="cuda")
    with pytest.raises(ValueError, match="on the CPU and another on a GPU"):
        step(x, x.cpu())
    with pytest.raises(ValueError, match="requires a gradient"):
        step(x.requires_grad_())
    with pytest.raises(TypeError, match="an argument is a Generator"):
        step(x.detach(), torch.Generator())
    with pytest.warns(UserWarning, match="no argument is on a GPU"):
        assert torch.equal(step(torch.zeros(3)), torch.zeros(3))


def test_workspaces_released_by_others():
    """As torch.compile does before it records CUDA graphs."""
    weight = torch.randn(32, 1 << 16, device="cuda", dtype=torch.bfloat16)  # sums over splits
    x = torch.randn(32, 1 << 16, device="cuda", dtype=torch.bfloat16)
    step = sf.graph_step(lambda x: x @ weight.T)
    expected = step(x)
    for _ in range(3):
        assert torch.equal(step(x), expected)
    assert step.num_replays
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.stream(step._pools[0].stream):  # takes what was released
        taken = [torch.full((1 << 23,), 1, device="cuda", dtype=torch.uint8) for _ in range(32)]
    torch.cuda.synchronize()
    assert torch.equal(step(x), expected)
    assert all(t.sum() == t.numel() for t in taken)


def test_no_warning_without_need():
    step = sf.graph_step(lambda x: x + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            step(torch.ones(3, device="cuda"))
    assert step.num_replays == 3


@pytest.mark.parametrize("rule", ["bptt", "sltt", "ottt", "e-prop", "d-rtrl"])
def test_online_in_parts(rule):
    """States and traces go through the graph as arguments and results."""

    def train(wrap):
        torch.manual_seed(0)
        neuron = sf.Recurrent(sf.ALIF(0.9), 16)
        net = sf.Temporal(nn.Sequential(nn.Linear(8, 16), neuron, nn.Linear(16, 4))).cuda()
        learner = sf.Online(net, rule)
        optimizer = torch.optim.SGD(net.parameters(), 0.5, fused=True)

        def step(x, state):
            optimizer.zero_grad()
            y, state = learner(x, state=state, return_state=True)
            y.square().mean().backward()
            optimizer.step()
            return y, state

        step, state, outputs = wrap(learner, optimizer)(step), None, []
        generator = torch.Generator("cuda").manual_seed(1)
        for _ in range(STEPS):
            x = torch.rand(3, 2, 8, device="cuda", generator=generator) * 4
            y, state = step(x, state)
            outputs.append(y.detach())
        return torch.stack(outputs), step

    expected, _ = train(lambda *parts: eager)
    found, step = train(sf.graph_step)
    assert step.num_replays >= STEPS - 6
    torch.testing.assert_close(found, expected)
