"""Replays equal eager calls, on a tape in place of CUDA graphs.

`tests/gpu/test_recorded.py` has real ones.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from spikefuse.graph import capture
from spikefuse.graph import recorded as module
from spikefuse.graph.capture import NotRecordable
from spikefuse.graph.recorded import (
    MAX_MOVES,
    MAX_RECORDINGS,
    WARMUP,
    Recorded,
    buffers_of,
    recorded,
)
from tests.graph import tape

# TorchDynamo looks for gradients of its inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    tape.install(monkeypatch)
    torch.compiler.reset()
    monkeypatch.setattr(module, "_pools", weakref.WeakSet())


def make_network(**options):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, **options), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3))


def batches(count, size=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(size, 2, 4, 4, generator=generator) for _ in range(count)]


def compiled(net):
    """The network as two, the second of which replays; and its recordings."""
    copied, made = copy.deepcopy(net), []

    def backend(graph, example_inputs):
        made.append(recorded(graph.forward, buffers_of(graph)))
        return made[-1]

    return copied, torch.compile(copied, backend=backend), made


def check_state(net, other):
    for (name, x), y in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def run_both(loop, net=None, replays=None, eager=None):
    """Run a loop on a network and its recorded copy, and compare all that it returns."""
    net = net or make_network()
    copied, compiled_net, made = compiled(net)
    expected, found = loop(net, net), loop(compiled_net, copied)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    check_state(net, copied)
    for p, q in zip(net.parameters(), copied.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    if replays is not None:
        assert [r.num_replays for r in made] == replays
    if eager is not None:
        assert [r.num_eager for r in made] == eager
    return made


def sgd(net, **options):
    return torch.optim.SGD(net.parameters(), 0.1, **options)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_training(set_to_none, momentum):
    def loop(net, parts):
        optimizer, losses = sgd(parts, momentum=0.9), []
        for x in batches(10):
            optimizer.zero_grad(set_to_none)
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    (made,) = run_both(loop, make_network(momentum=momentum), [10 - WARMUP], [WARMUP])
    assert not made.obstacle


def test_accumulated_gradients():
    def loop(net, parts):
        optimizer = sgd(parts)
        for i, x in enumerate(batches(12)):
            net(x).square().mean().backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    run_both(loop, replays=[9])


def test_results_and_gradients_stay():
    def loop(net, parts):
        outputs, grads = [], []
        for x in batches(8):
            outputs.append(net(x))
            outputs[-1].sum().backward()
            grads.append([p.grad for p in parts.parameters()])
            parts.zero_grad()
        return outputs, grads

    run_both(loop, replays=[5])


def test_gradients_of_inputs_and_hooks():
    def loop(net, parts):
        found = []
        parts[4].bias.register_hook(lambda g: 2 * g)
        parts[0].weight.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone()))
        for x in batches(8):
            x = (2 * x).requires_grad_()
            net(3 * x).square().mean().backward()
            found.append(x.grad)
        return found

    run_both(loop, replays=[5])


def test_evaluation():
    def loop(net, parts):
        found = []
        parts.eval()
        for x in batches(5):
            with torch.no_grad():
                found.append(net(x))
        for x in batches(5):
            with torch.inference_mode():
                y = net(x)
                assert y.is_inference()
            found.append(y.clone())
        parts.train()
        for x in batches(6):
            net(x).sum().backward()
        with torch.no_grad():
            found += [net(x) for x in batches(5)]  # updates the running statistics
        return found

    made = run_both(loop)
    assert sum(r.num_replays for r in made) >= 2 + 3 + 2
    assert {r.obstacle for r in made} == {""}


def test_two_live_forward_passes():
    def loop(net, parts):
        losses = []
        for x, y in zip(batches(8), batches(8, seed=2), strict=True):
            a, b = net(x), net(y)
            losses.append((a - b).square().mean())
            losses[-1].backward()
        return losses

    run_both(loop, replays=[7], eager=[9])


def test_a_forward_pass_whose_results_are_dropped_is_over():
    def loop(net, parts):
        for x in batches(6):
            net(x).sum().backward()
        for x in batches(4):
            net(x).sum()

    run_both(loop, replays=[7])


def test_kept_graphs():
    def loop(net, parts):
        grads = []
        weight = parts[0].weight
        for x in batches(8):
            y = net(x)
            grads += torch.autograd.grad(y.sum(), weight, retain_graph=True)
            z = net(x + 1)  # the memory is in use
            grads += torch.autograd.grad(y.square().sum(), weight, retain_graph=True)
            grads += torch.autograd.grad(z.sum(), weight)
        return grads

    run_both(loop, replays=[7], eager=[9])


def test_errors_of_autograd():
    copied, net, made = compiled(make_network())
    x = batches(1)[0]
    for _ in range(6):
        y = net(x)
        y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    y = net(x)
    with torch.no_grad():
        copied[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    net(x).sum().backward()
    (g,) = torch.autograd.grad(net(x).sum(), copied[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.sum().backward()
    assert made[0].num_replays == 3 + 3
    copied.zero_grad()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.first(h), self.second(h), h.detach().argmax(-1)


def test_gradients_of_some_results():
    def loop(net, parts):
        found = []
        for i, x in enumerate(torch.rand(9, 5, 4)):
            parts.zero_grad()
            a, b, index = net(x)
            (a.sum() if i % 2 else (a.sum() + b.square().sum())).backward()
            found.append([p.grad for p in parts.parameters()])
            assert not index.requires_grad
            found.append(index)
        return found

    torch.manual_seed(0)
    x = torch.rand(9, 5, 4)
    made = run_both(lambda *nets: [torch.manual_seed(1), loop(*nets)][1:], Heads(), [6])
    assert not made[0].obstacle
    del x


def test_frozen_parameters_and_shapes():
    def loop(net, parts):
        for size in (5, 3):
            for freeze in (False, True):
                parts[0].weight.requires_grad_(not freeze)
                for x in batches(5, size):
                    net(x).sum().backward()

    made = run_both(loop)
    assert sum(r.num_replays for r in made) == 4 * 2


def test_moved_parameters():
    def loop(net, parts):
        found = []
        for i, x in enumerate(batches(14)):
            if i == 6:
                state = {k: 2 * v for k, v in parts.state_dict().items()}
                parts.load_state_dict(state, assign=True)
            if i == 10:
                parts[1].running_mean = torch.ones(4)
            y = net(x)
            y.sum().backward()
            found.append(y)
        return found

    made = run_both(loop)
    assert not any(r.obstacle for r in made)
    assert sum(r.num_replays for r in made) == 14 - WARMUP * len(made)


def test_parameters_that_always_move():
    net = make_network()
    copied, compiled_net, made = compiled(net)

    def run():
        for x in batches(20):
            for m in (net, copied):
                m[1].running_mean = m[1].running_mean.clone()
            assert torch.equal(compiled_net(x), net(x))
            compiled_net(x).sum().backward()
            net(x).sum().backward()

    with pytest.warns(UserWarning, match="its parameters or buffers move again and again"):
        run()
    check_state(net, copied)
    assert made[0].num_replays <= 2 * (MAX_MOVES + 1)


def test_many_shapes():
    _, net, made = compiled(nn.Linear(4, 3))
    net = torch.compile(
        net, dynamic=True, backend=lambda g, e: made.append(recorded(g, buffers_of(g))) or made[0]
    )

    def run():
        for size in range(2, 14):
            for _ in range(5):
                with torch.no_grad():
                    net(torch.rand(size, 4))

    with pytest.warns(UserWarning, match="more than 8 shapes and modes"):
        run()
    assert made[0].num_replays == 2 * MAX_RECORDINGS
    assert not made[0].obstacle


def test_several_networks_alive_at_once():
    """A generator and its critic, in both orders, share no memory that is in use."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    results, made = [], []
    for wrap in (False, True):
        g, c = copy.deepcopy(generator), copy.deepcopy(critic)
        run_g, run_c = g, c
        if wrap:
            g, run_g, made_g = compiled(g)
            c, run_c, made_c = compiled(c)
            made = [made_g, made_c]
        torch.manual_seed(1)
        optimizers, losses = (sgd(g), sgd(c)), []
        for _ in range(10):
            z, real = torch.rand(5, 3), torch.rand(5, 4)
            optimizers[1].zero_grad()
            loss = run_c(run_g(z).detach()).mean() - run_c(real).mean()
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss = -run_c(run_g(z)).mean()
            loss.backward()
            optimizers[0].step()
            losses.append(loss)
        results.append([*losses, *g.parameters(), *c.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert sum(r.num_replays for r in made[0]) >= 14
    assert sum(r.num_replays for r in made[1]) >= 16
    assert len(module._pools) > 1


class Broken(nn.Module):
    """Of which TorchDynamo captures two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x)


def test_graph_breaks():
    def loop(net, parts):
        torch.manual_seed(1)
        found = []
        for x in torch.rand(9, 5, 4):
            y = net(x)
            y.square().sum().backward()
            found.append(y)
        return found

    run_both(loop, Broken(), [6, 6])
    assert len(module._pools) == 2
    gc.collect()
    torch.compiler.reset()


def test_inputs_changed_in_place():
    def loop(net, parts):
        found = []
        for x in batches(6):
            y = net(x)
            found += [x, y]
        return found

    class Changes(nn.Module):
        def forward(self, x):
            return x.add_(1) * 2

    with pytest.warns(UserWarning, match="changes an input in place"):
        run_both(loop, Changes(), [0])


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return x * self.count


def test_changed_buffers_have_new_versions():
    copied, net, made = compiled(Counter())
    for i in range(1, 8):
        version = copied.count._version
        with torch.no_grad():
            assert torch.equal(net(torch.ones(2)), torch.full((2,), float(i)))
        assert copied.count._version > version
    assert made[0].num_replays == 4


def test_around_a_call():
    """What surrounds a call may need its operations."""
    net = make_network()
    _, compiled_net, made = compiled(net)
    x = batches(1)[0]
    for _ in range(5):
        compiled_net(x).sum().backward()
    assert made[0].num_replays == 2
    with capture.recorded_step():
        compiled_net(x).sum().backward()
    for reentrant in (False, True):
        y = checkpoint(compiled_net, x.clone().requires_grad_(), use_reentrant=reentrant)
        y.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        compiled_net(x).sum().backward()
    for _ in range(5):
        net(x).sum().backward()
    graph = tape.Graph()
    graph.capture_begin()
    compiled_net(x)
    graph.capture_end()
    assert made[0].num_replays == 2


def test_random_numbers():
    net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    _, compiled_net, made = compiled(net)
    results = [compiled_net(torch.ones(2, 4)) for _ in range(3)]
    for y in results:
        y.sum().backward()
    with pytest.warns(UserWarning, match="draws random numbers on the CPU"):
        results.append(compiled_net(torch.ones(2, 4)))
    torch.manual_seed(0)
    results.append(compiled_net(torch.ones(2, 4)))
    torch.manual_seed(0)
    assert torch.equal(results[-1], net(torch.ones(2, 4)))
    assert "random" in made[0].obstacle


def test_what_cannot_be_captured(monkeypatch):
    def reads(x):
        return (x * x.sum().item(),)

    run = recorded(reads, ())
    x = torch.ones(3)
    with pytest.warns(UserWarning, match="not permitted when stream is capturing") as caught:
        results = [run(x)[0] for _ in range(6)]
    assert len(caught) == 1
    assert all(torch.equal(y, 3 * x) for y in results)
    assert "RuntimeError" in run.obstacle

    def runs_out(x):
        if tape.Graph.active:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
        return (x + 1,)

    run = recorded(runs_out, ())
    with pytest.warns(UserWarning, match="not recorded as a CUDA graph: OutOfMemoryError: CUDA"):
        results = [run(x)[0] for _ in range(6)]
    assert all(torch.equal(y, x + 1) for y in results)
    assert run.obstacle.endswith("2 GiB.")


def test_what_is_not_on_one_gpu(monkeypatch):
    run = recorded(lambda *x: x)
    run(torch.ones(2), torch.ones(2, device="meta"))
    assert run.obstacle == "its inputs are not on one GPU, but on: cpu and meta"
    monkeypatch.setattr(capture, "is_cuda", lambda x: x.is_cuda)
    run = recorded(lambda *x: x)
    assert run(torch.ones(2))[0].sum() == 2
    assert run.obstacle
    run = recorded(lambda *x: x)
    assert run(3) == (3,)
    assert run.obstacle


def test_buffers_that_nothing_names(recwarn):
    """In case TorchDynamo should no longer name inputs by where they are."""
    run, mean = recorded(lambda w, mean: (w * mean.add_(1),)), torch.zeros(2)
    with torch.no_grad():
        for i in range(1, 6):
            assert run(nn.Parameter(torch.ones(2)), mean)[0].tolist() == [i, i]
    assert "changes an input in place" in run.obstacle
    assert [str(w.message) for w in recwarn] == [
        f"a network is not recorded as a CUDA graph: {run.obstacle}"
    ]


def test_dropped_recordings_are_freed():
    run = recorded(lambda x: (2 * x,))
    x = torch.ones(3, requires_grad=True)
    for _ in range(6):
        run(x)[0].sum().backward()
    (recording,) = run._recordings.values()
    graph = weakref.ref(recording.graph)
    y = run(x)[0]
    del recording, run
    assert graph() is not None
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 14.0))
    del y
    assert graph() is None
    assert not list(module._pools)


def test_calls_without_backward_are_not_recorded():
    """Kernels of backward have not run: a capture would have to compile them."""
    run = recorded(lambda x: (2 * x,))
    x = torch.ones(3, requires_grad=True)
    for _ in range(6):
        run(x)
    assert run.num_replays == 0
    run(x)[0].sum().backward()
    run(x)
    assert run.num_replays == 1


def test_layouts():
    """Broadcast and strided inputs, and gradients of any layout."""
    seen = []

    def function(x, w):
        seen.append((x.stride(), w.stride()))
        return (x.sum(0) + w @ w.mT, w.sum())

    run = recorded(function)
    w = torch.rand(4, 3).mT.requires_grad_()
    for i in range(8):
        x = torch.rand(3, 3, generator=torch.Generator().manual_seed(i)).expand(5, 3, 3)
        w.grad = None
        y, z = run(x, w)
        expected = function(x, w)
        assert torch.equal(y, expected[0])
        (y.sum() + 2 * z).backward()
        found = w.grad
        w.grad = None
        (expected[0].sum() + 2 * expected[1]).backward()
        assert torch.equal(found, w.grad)
        assert found.stride() == w.stride()
    assert len(set(seen)) == 1
    assert run.num_replays == 5


def test_threads():
    net = make_network().eval()
    copied, _, _ = compiled(net)
    names = [*dict(copied.named_parameters()), *dict(copied.named_buffers())]
    tensors = [*copied.parameters(), *copied.buffers()]

    def function(x, *tensors):
        values = dict(zip(names, tensors, strict=True))
        return (torch.func.functional_call(copied, values, (x,)),)

    run = recorded(function, range(1, 1 + len(tensors)))
    wrong, inputs = [], batches(40)
    with torch.no_grad():
        expected = [net(x) for x in inputs]

    @torch.no_grad()
    def work(part):
        for i in range(part, 40, 4):
            y = run(inputs[i], *tensors)[0]
            if not torch.equal(y, expected[i]):
                wrong.append(i)

    work(0)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert run.num_replays == 37


def test_gradients_are_copied_by_dtype():
    tensors = [torch.rand(3), None, torch.rand(2, 2).mT, torch.rand(5).half(), torch.rand(())]
    copies = module._Copies(tensors).make()
    for x, y in zip(tensors, copies, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert torch.equal(x, y)
            assert y.stride() == x.stride()
            assert y.storage_offset() % 64 == 0
            assert y.data_ptr() != x.data_ptr()


def test_unknown_outputs():
    run = recorded(lambda x: (2 * x, 3, None))
    for _ in range(6):
        assert run(torch.ones(2))[1:] == (3, None)
    assert run.num_replays == 3
    run = recorded(lambda x: (x.to_sparse(),))
    for _ in range(3):
        run(torch.ones(2))
    with pytest.warns(UserWarning, match="an output is a Tensor of layout torch.sparse_coo"):
        run(torch.ones(2))
    assert isinstance(run, Recorded)
    assert issubclass(NotRecordable, RuntimeError)


def test_autocast_and_loss_scale():
    def loop(net, parts):
        losses = []
        for x in batches(8):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(net(x).float(), torch.ones(5, 3))
            (1024 * loss).backward()
            losses.append(loss)
        return losses

    run_both(loop, replays=[5])
