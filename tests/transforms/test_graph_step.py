"""What `graph_step` does on a CPU, and its bookkeeping on a tape in place of CUDA graphs.

`tests/gpu/test_graph_step.py` has real recordings.
"""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F

import spikefuse as sf
from spikefuse.graph import capture
from spikefuse.transforms.graph_step import NotRecordable
from tests.graph import tape


def test_a_cpu_calls_the_step():
    net = sf.Temporal(torch.nn.Sequential(torch.nn.Linear(4, 3), sf.LIF()))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    @sf.graph_step
    def step(x, scale=1.0):
        """Train."""
        optimizer.zero_grad()
        loss = scale * net(x).sum()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "scale": scale}

    x = 4 * torch.rand(5, 2, 4)
    weight = net.net[0].weight.detach().clone()
    result = step(x, scale=2.0)
    assert step.__name__ == "step"
    assert step.__doc__ == "Train."
    assert result["scale"] == 2.0
    assert not result["loss"].requires_grad
    assert not torch.equal(net.net[0].weight, weight)
    assert repr(step).endswith("0 graphs, 0 replays, 1 eager")


def test_wrong_options():
    with pytest.raises(TypeError, match="got a Parameter: expected a function, then modules"):
        sf.graph_step(torch.nn.Linear(1, 1).weight)
    with pytest.raises(TypeError, match="got a list: expected a function, then modules"):
        sf.graph_step(lambda x: x, [torch.nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="warmup is 1"):
        sf.graph_step(lambda x: x, warmup=1)


@pytest.fixture
def fake_cuda(monkeypatch):
    torch.compiler.reset()  # it compiles nothing of what was called on a tape
    tape.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_changed_settings_of_modules_are_recorded_anew(fake_cuda):
    layers = torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3), sf.LIF()
    net = sf.fuse(sf.Temporal(torch.nn.Sequential(*layers)))
    _, dropout, norm, lif = net.net
    net.eval()  # dropout would draw random numbers on the CPU
    x, found = torch.rand(5, 2, 4), []

    @sf.graph_step
    def step(x):
        return net(x)

    for owner, name, value in (
        (lif, "decay", 0.5),  # as before
        (lif, "decay", 0.25),
        (lif, "reset", "soft"),
        (lif.surrogate, "width", 2.0),
        (dropout, "p", 0.25),
        (norm, "momentum", 0.5),
        (lif.surrogate, "width", 4.0),
        (lif.surrogate, "width", 2.0),  # has a graph
    ):
        setattr(owner, name, value)
        for _ in range(5):
            step(x)
        found.append(step.num_graphs)
    assert found == [1, 2, 3, 4, 5, 6, 7, 7]
    assert lif.surrogate.width == 2.0


def test_replaced_parts_of_neurons_are_recorded_anew(fake_cuda):
    lif = sf.LIF(surrogate=sf.surrogate.Sigmoid(2.0))
    layer = sf.Recurrent(lif, 3)
    net = sf.Temporal(torch.nn.Sequential(torch.nn.Linear(4, 3), layer))
    x = torch.rand(5, 2, 4)

    @sf.graph_step
    def step(x):
        with torch.no_grad():
            return net(x, impl="reference")  # compiles nothing

    other, spare = sf.surrogate.Arctan(2.0), sf.LIF(0.25)
    for owner, name, value in (
        (lif, "decay", torch.tensor(0.5)),
        (lif, "decay", torch.tensor(0.75)),
        (lif, "surrogate", other),
        (other, "width", torch.tensor(3.0)),
        (other, "width", torch.tensor(4.0)),
        (layer, "self_connections", False),
        (lif, "decay", torch.nn.Parameter(torch.tensor(0.5))),
        (layer, "neuron", spare),
        (spare, "decay", torch.nn.Parameter(torch.tensor(0.5))),
    ):
        setattr(owner, name, value)
        eager = step.num_eager
        step(x)
        assert step.num_eager == eager + 1
        for _ in range(5):
            step(x)
        assert step.num_replays > 0
        step.num_replays = 0
    assert any(p is spare.decay for p in step._parameters)


def make_training():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def usual(wrap, net, optimizer):
    @wrap
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return lambda i, x, y: step(x, y)


def gradients_cleared_in_between(wrap, net, optimizer):
    run = usual(wrap, net, optimizer)

    def cleared(i, x, y):
        if i % 5 == 4:
            optimizer.zero_grad()
        return run(i, x, y)

    return cleared


def zero_grad_at_the_end(wrap, net, optimizer):
    @wrap
    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return lambda i, x, y: step(x, y)


def accumulation_with_a_flag(wrap, net, optimizer):
    @wrap
    def step(x, y, last):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return lambda i, x, y: step(x, y, i % 4 == 3)


def accumulation_outside(wrap, net, optimizer, set_to_none=True):
    @wrap
    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    def run(i, x, y):
        loss = step(x, y)
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        return loss

    return run


def accumulation_of_zeros(wrap, net, optimizer):
    return accumulation_outside(wrap, net, optimizer, set_to_none=False)


def update_alone(wrap, net, optimizer):
    @wrap
    def update(scale):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return 2 * scale

    def run(i, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        update(torch.ones(()))
        return loss

    return run


def frozen_for_a_while(wrap, net, optimizer):
    run = usual(wrap, net, optimizer)

    def frozen(i, x, y):
        net[0].weight.requires_grad_(not 12 <= i < 24)
        return run(i, x, y)

    return frozen


@pytest.mark.parametrize(
    "loop",
    [
        usual,
        gradients_cleared_in_between,
        zero_grad_at_the_end,
        accumulation_with_a_flag,
        accumulation_outside,
        accumulation_of_zeros,
        update_alone,
        frozen_for_a_while,
    ],
)
def test_loops(loop, fake_cuda):
    results, steps = [], []

    def recorded(step):
        steps.append(sf.graph_step(step))
        return steps[-1]

    for wrap in (lambda step: step, recorded):
        net, optimizer = make_training()
        run, generator = loop(wrap, net, optimizer), torch.Generator().manual_seed(1)
        losses = []
        for i in range(40):
            x = torch.randn(5, 4, generator=generator)
            y = torch.randint(0, 3, (5,), generator=generator)
            losses.append(run(i, x, y).detach())
        results.append([*losses, *net.parameters()])
    assert steps[0].num_replays > 20
    if loop in (usual, gradients_cleared_in_between):
        assert (steps[0].num_eager, steps[0].num_graphs) == (3, 1)
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_changed_arguments_and_unknown_results(fake_cuda):
    for function, message in (
        (lambda total, x: total.add_(x), "changes an argument in place"),
        (lambda total, x: object(), "returns a object: return tensors"),
    ):
        step = sf.graph_step(function)
        for _ in range(3):
            step(torch.zeros(2), torch.ones(2))
        with pytest.raises(NotRecordable, match=message):
            step(torch.zeros(2), torch.ones(2))


def test_a_stream_keeps_its_state_to_itself(fake_cuda):
    stream = sf.Stream(sf.LIF())
    step = sf.graph_step(lambda x: stream(x))
    for _ in range(3):
        step(torch.ones(1, 2))
    with pytest.raises(NotRecordable, match="runs a Stream, whose state replays would not follow"):
        step(torch.ones(1, 2))
    before = stream.state
    stream(torch.ones(1, 2))
    assert stream.state is not before
    stream.reset()
    x = torch.full((8, 1, 2), 0.7)
    step = sf.graph_step(lambda x: stream(x), fallback=True)
    with pytest.warns(UserWarning, match="runs a Stream"):
        y = torch.stack([step(x_t) for x_t in x])
    assert torch.equal(y, sf.LIF()(x))
    assert y.sum() > 0


class Attention(torch.nn.Module):
    """Uses the parameters of a module that it does not call, `attention.out_proj`."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def make_compiled():
    return torch.compile(torch.nn.Linear(4, 4), backend="eager")


@pytest.mark.parametrize("make", [Attention, make_compiled])
def test_parameters_of_modules_that_are_not_called(make, fake_cuda):
    results, steps = [], []
    for wrap in (lambda step: step, sf.graph_step):
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x, net=net):
            loss = net(x).square().mean()
            loss.backward()
            return loss

        steps.append(wrap(step) if wrap is not sf.graph_step else wrap(step, net))
        for i in range(12):
            steps[-1](torch.rand(3, 2, 4))
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        results.append([*net.parameters()])
    assert steps[-1].num_replays > 0
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)


class Trainer:
    """Whose step has parts that its variables do not show."""

    def __init__(self):
        self.net, self.optimizer = make_training()

    def forward_and_backward(self, x):
        self.net(x).sum().backward()

    def step(self, x):
        self.optimizer.zero_grad()
        self.forward_and_backward(x)
        self.optimizer.step()


@pytest.mark.parametrize("has_gradients", [False, True])
def test_parts_that_are_not_known(has_gradients, fake_cuda):
    """A graph would write gradients that no replay gives to the parameters."""
    trainer, x = Trainer(), torch.rand(2, 4)
    with pytest.raises(ValueError, match="the step calls a SGD that graph_step does not know"):
        sf.graph_step(trainer.step)(x)
    trainer.optimizer.zero_grad()
    step = sf.graph_step(trainer.forward_and_backward)
    for _ in range(3):
        step(x)
    if not has_gradients:
        trainer.optimizer.zero_grad()
    before = [p.grad for p in trainer.net.parameters()]
    with pytest.raises(NotRecordable, match="of a module that graph_step does not know gets a gr"):
        step(x)
    assert all(p.grad is g for p, g in zip(trainer.net.parameters(), before, strict=True))


def test_parts(fake_cuda):
    """Given to a function or a decorator, as arguments of the step, or in its variables."""
    ways = "eager", "function", "decorator", "arguments", "variables"
    results = [trained(way) for way in ways]
    assert all(torch.equal(x, results[0]) for x in results)


def trained(way):
    trainer = Trainer()
    net, optimizer = trainer.net, trainer.optimizer

    def with_parts(x, net, optimizer):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    def with_variables(x):
        with_parts(x, net, optimizer)

    options = {}
    if way == "function":
        step = sf.graph_step(trainer.step, net, optimizer)
    elif way == "decorator":
        step = sf.graph_step(net, optimizer, warmup=3)(trainer.step)
    elif way == "arguments":
        step, options = sf.graph_step(with_parts), {"net": net, "optimizer": optimizer}
    elif way == "variables":
        step = sf.graph_step(max_graphs=2)(with_variables)
    else:
        step = trainer.step
    for i in range(6):
        step(torch.full((2, 4), i / 8), **options)
    if way != "eager":
        assert (step.num_eager, step.num_graphs, step.num_replays) == (3, 1, 3)
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_replaced_and_loaded_parts(fake_cuda):
    """Parameters at other addresses, and the state of an optimizer, are recorded anew."""
    results = []
    for wrap in (lambda step, *_: step, sf.graph_step):
        net, optimizer = make_training()

        def run(x, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()

        step = wrap(run, net, optimizer)
        for i in range(24):
            if i == 6:
                net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})
            if i == 11:
                optimizer.load_state_dict(optimizer.state_dict())
            if i == 16:
                for p in net.parameters():
                    p.data = p.data.clone()
            step(torch.full((2, 4), i / 8))
        results.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert (step.num_eager, step.num_graphs) == (9, 1)
    assert torch.equal(*results)


def test_replaced_modules(fake_cuda):
    """Layers, with parameters or without, and tensors of one that was there."""
    net, x = make_training()[0], torch.ones(2, 4)
    net = torch.nn.Sequential(net, torch.nn.Sequential())

    @sf.graph_step(net)
    def step(x):
        with torch.no_grad():
            return net(x)

    for change in (
        lambda: None,
        lambda: net[0].__setitem__(2, torch.nn.Linear(8, 2)),
        lambda: net[0].__setitem__(1, torch.nn.ReLU()),
        lambda: setattr(net[0][0], "bias", torch.nn.Parameter(torch.ones(8))),
        lambda: net[1].append(torch.nn.BatchNorm1d(2).eval()),
        lambda: net[1][0].register_buffer("running_mean", torch.ones(2)),
        lambda: net[1].append(torch.nn.ReLU()),
        lambda: setattr(net[0][2], "bias", None),
        lambda: net[1].__delitem__(1),
    ):
        change()
        num_replays = step.num_replays
        for _ in range(5):
            torch.testing.assert_close(step(x), net(x).detach(), rtol=0, atol=0)
        assert step.num_replays > num_replays


def test_other_warnings_of_a_step(fake_cuda):
    """A fallback looks for lines that wait for the GPU, among the warnings."""

    def warns(x):
        warnings.warn("of the user", stacklevel=1)
        return x + 1

    step = sf.graph_step(warns, fallback=True)
    for _ in range(4):
        with pytest.warns(UserWarning, match="of the user"):
            step(torch.ones(2))

    def waits(x):
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        return x + 1

    step = sf.graph_step(waits, fallback=True)
    for _ in range(2):
        with pytest.warns(UserWarning, match="called a synchronizing"):
            step(torch.ones(2))
    with pytest.warns(UserWarning, match=r'py:\d+: "warnings.warn\(.* reads a value of the GPU'):
        step(torch.ones(2))
    assert "reads a value" in step.obstacle


def test_networks_are_compiled_once(fake_cuda):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    net = torch.compile(net, backend=backend)
    step = sf.graph_step(lambda x: net(x))
    for _ in range(5):
        step(torch.rand(2, 4))
    net(torch.rand(2, 4))
    assert step.num_replays == 2
    assert len(compiled) == 1


def test_inference_mode(fake_cuda):
    net = torch.nn.Linear(4, 3)
    inside = sf.graph_step(torch.inference_mode()(lambda x: net(x)))
    outside = sf.graph_step(lambda x: net(x))
    for _ in range(5):
        x = torch.rand(2, 4)
        assert torch.equal(inside(x), net(x))
        with torch.inference_mode():
            assert torch.equal(outside(torch.rand(2, 4).copy_(x)), net(x))
    assert inside.num_replays == outside.num_replays == 2


def test_unusual_groups_of_optimizers(fake_cuda):
    net = torch.nn.Linear(4, 3)
    groups = {"params": []}, {"params": net.parameters(), "layers": ["first"]}
    optimizer = torch.optim.SGD(groups, 0.1)

    @sf.graph_step
    def step(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    for _ in range(5):
        step(torch.rand(2, 4))
    assert step.num_replays == 2


def test_recordings_that_do_not_end(fake_cuda, monkeypatch):
    """An interrupt, and an error that CUDA reports at the end of a recording."""
    num_ended, calls = 0, []

    def capture_end(graph):
        nonlocal num_ended
        num_ended += 1
        if num_ended == 2:
            end(graph)
        raise RuntimeError("capture was invalidated")

    def interrupted(x):
        calls.append(x)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return x + 1

    step = sf.graph_step(interrupted, warmup=2)
    step(torch.ones(2)), step(torch.ones(2))
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(2))
    assert tape.Graph.active is None
    end = tape.Graph.capture_end
    monkeypatch.setattr(tape.Graph, "capture_end", capture_end)
    step = sf.graph_step(lambda x: x + 1, warmup=2, fallback=True)
    with pytest.warns(UserWarning, match="capture was invalidated"):
        assert [step(torch.ones(2)).sum() for _ in range(3)] == [4, 4, 4]
    assert num_ended == 2


def test_a_step_inside_another_is_part_of_it(fake_cuda):
    net = torch.nn.Linear(4, 3)
    inner = sf.graph_step(lambda x: net(x))
    outer = sf.graph_step(lambda x: inner(x) + 1, net)
    for _ in range(6):
        x = torch.rand(2, 4)
        assert torch.equal(outer(x), net(x) + 1)
    assert (outer.num_replays, inner.num_graphs) == (3, 0)


def test_several_gpus(fake_cuda, monkeypatch):
    """A recording on the stream of another GPU would be empty."""
    used, current = [], [0]

    @contextlib.contextmanager
    def device(index):
        current[0] = index.type
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(
        torch.cuda, "stream", lambda s: used.append((current[0], s)) or contextlib.nullcontext()
    )
    step = sf.graph_step(lambda x: x + 1)
    for x in (torch.ones(2), torch.ones(2, device="meta"), torch.ones(2)):
        for _ in range(2):
            step(x)
    assert len(set(used)) == 2  # one for each

    net = torch.nn.Linear(2, 3, device="meta")
    step = sf.graph_step(lambda x: net(x.to("meta")), warmup=2)
    step(torch.ones(2)), step(torch.ones(2))
    with pytest.raises(NotRecordable, match="it uses cpu and meta: a graph has one GPU"):
        step(torch.ones(2))


def test_a_batch_on_the_cpu_does_not_turn_graphs_off(fake_cuda, monkeypatch):
    monkeypatch.setattr(capture, "is_cuda", lambda x: x.dtype == torch.float64)
    step = sf.graph_step(lambda x: x + 1)
    with pytest.warns(UserWarning, match="no argument is on a GPU"):
        step(torch.ones(2))
    for _ in range(5):
        step(torch.ones(2, dtype=torch.float64))
    assert step.num_replays == 2
    assert not step.obstacle


def test_a_schedule_of_the_momentum(fake_cuda):
    net, optimizer = make_training()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)

    @sf.graph_step
    def step(x):
        net(x).sum().backward()
        optimizer.step()

    def loop():
        for _ in range(140):
            step(torch.rand(2, 4))
            scheduler.step()

    with pytest.warns(UserWarning, match="OneCycleLR with cycle_momentum=False"):
        loop()
    assert step.num_replays == 0


class States(torch.nn.Module):
    """A neuron of another library, whose state is a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        self.state = torch.zeros(4)
        for now in x:
            self.state = 0.5 * self.state + self.layer(now)
        return self.state


def test_states_that_are_buffers(fake_cuda):
    net = States()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    @sf.graph_step
    def step(x):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    for _ in range(6):
        step(torch.ones(2, 5, 3))
    assert step.num_replays > 0
