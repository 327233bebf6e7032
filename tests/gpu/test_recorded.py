"""Replays of a recorded network equal eager calls bit for bit, in any loop.

python -m tests.gpu.test_recorded prints the time and memory of a training loop.
"""

from __future__ import annotations

import copy
import gc
import statistics
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import spikefuse as sf
from spikefuse.graph import capture
from spikefuse.graph import recorded as module
from spikefuse.graph.recorded import WARMUP, buffers_of, recorded

pytestmark = [
    # TorchDynamo looks for gradients of its inputs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
]


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make_network(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 10)).cuda()


def make_spiking():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3, bias=False), nn.BatchNorm2d(8), sf.LIF()]
    layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), sf.LIF(), nn.Flatten()]
    return sf.Temporal(nn.Sequential(*layers, nn.Linear(8 * 36, 10))).cuda()


def batches(count=10, shape=(6, 2, 8, 8), seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [2 * torch.rand(*shape, device="cuda", generator=generator) for _ in range(count)]


def compiled(net, record=True):
    """A copy of the network whose graphs are recorded, or run as they are; and its recordings."""
    copied, made = copy.deepcopy(net), []

    def backend(graph, example_inputs):
        if not record:
            return graph.forward
        made.append(recorded(graph.forward, buffers_of(graph)))
        return made[-1]

    return copied, torch.compile(copied, backend=backend), made


def run_both(loop, net, replays=None):
    """Run a loop on a network and its recorded copy, and compare all that it returns."""
    results = []
    for record in (False, True):
        copied, run, made = compiled(net, record)
        torch.manual_seed(5)
        found = loop(run, copied)
        grads = [p.grad for p in copied.parameters()]
        results.append([found, grads, dict(copied.state_dict())])
        torch.cuda.synchronize()
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert not any(r.obstacle for r in made), [r.obstacle for r in made]
    if replays is not None:
        assert [r.num_replays for r in made] == replays
    return made


@pytest.fixture(autouse=True)
def deterministic():
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def train(net, parts, *, amp=False, scaled=False, set_to_none=True, optimizer="sgd", x=None):
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
        "fused adam": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    }
    optimizer = kinds[optimizer](parts.parameters())
    scaler, losses = torch.amp.GradScaler(enabled=scaled), []
    for batch in x or batches():
        optimizer.zero_grad(set_to_none)
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = net(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parts.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)
    return losses


@pytest.mark.parametrize("optimizer", ["sgd", "fused adam"])
@pytest.mark.parametrize(
    "options", [{}, {"amp": True}, {"scaled": True}, {"set_to_none": False}], ids=str
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training(optimizer, options, dropout):
    """With dropout, random numbers equal those of eager steps."""
    run_both(
        lambda *nets: train(*nets, optimizer=optimizer, **options),
        make_network(dropout),
        [10 - WARMUP],
    )


@pytest.mark.parametrize("amp", [False, True])
def test_fused_spiking_networks(amp):
    results = []
    for mode in ("eager", "recorded"):
        net = make_spiking()
        run, x = sf.fuse(net, mode=mode), batches(10, (4, 6, 2, 8, 8))
        results.append([train(run, net, amp=amp, x=x), dict(net.state_dict())])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("gradients", [False, True])
def test_biases_and_scales_of_a_network_in_evaluation(gradients):
    """All sums are exact, so that fused spikes equal those of PyTorch's layers."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), sf.LIF(0.5, 0.5)]
    for _ in range(3):
        conv, norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, eps=2.0**-10)
        nn.init.uniform_(norm.running_mean, -1, 1)
        norm.running_var.copy_(4.0 ** torch.randint(-1, 2, (8,)) - norm.eps)
        layers += [conv, norm, sf.LIF(0.5, 0.5)]
    net = sf.Temporal(nn.Sequential(*layers)).cuda().eval()
    with torch.no_grad():
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            if not name.endswith(("running_var", "num_batches_tracked")):
                tensor.copy_((8 * tensor).round() / 8)
    fused = sf.fuse(copy.deepcopy(net), "recorded")
    for batch in batches(10, (4, 6, 2, 8, 8)):
        x = (8 * batch).round() / 8
        with torch.set_grad_enabled(gradients):
            found = [m(x) for m in (net, fused)]
        assert 0.05 < found[0].mean() < 0.95
        assert torch.equal(*found)
    assert fused.fusion.summary.startswith("3 of 3 ")
    assert fused.fusion.reports[0].num_biases == 1
    if gradients:
        for y in found:
            y.square().sum().backward()
        for a, b in zip(fused.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)


def test_evaluation_between_steps():
    def loop(net, parts):
        found = []
        for epoch in range(4):
            parts.train()
            found += train(net, parts, x=batches(5, seed=epoch))
            parts.eval()
            with torch.no_grad():
                found += [net(x) for x in batches(5)]
            with torch.inference_mode():
                found += [net(x).clone() for x in batches(5)]
        return found

    run_both(loop, make_network())


def test_results_and_gradients_stay():
    def loop(net, parts):
        outputs, grads = [], []
        for x in batches():
            outputs.append(net(x))
            outputs[-1].square().sum().backward()
            grads.append([p.grad for p in parts.parameters()])
            parts.zero_grad()
        return outputs, grads

    run_both(loop, make_network(), [7])


def test_live_forward_passes_and_kept_graphs():
    def loop(net, parts):
        grads = []
        for x, y in zip(batches(), batches(seed=2), strict=True):
            a, b = net(x), net(y)
            weight = parts[0].weight
            grads += torch.autograd.grad(a.sum() + b.square().sum(), weight, retain_graph=True)
            grads += torch.autograd.grad((a * b).sum(), weight)
        return grads

    (made,) = run_both(loop, make_network())
    assert made.num_replays >= 8
    assert made.num_eager >= 8


def test_gradients_of_inputs_and_accumulation():
    def loop(net, parts):
        found = []
        for i, x in enumerate(batches(12)):
            x = x.requires_grad_()
            net(x * 2).square().sum().backward()
            found.append(x.grad)
            if i % 3 == 2:
                parts.zero_grad()
        return found

    run_both(loop, make_network(), [9])


def test_networks_that_interleave():
    """A generator and its critic, each of two graphs alive at once."""
    results = []
    for record in (False, True):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)).cuda()
        generator = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 64)).cuda()
        (g, run_g, a), (c, run_c, b) = compiled(generator, record), compiled(critic, record)
        optimizers, losses = [torch.optim.SGD(m.parameters(), 0.1) for m in (g, c)], []
        for i in range(20):
            z, real = torch.rand(2, 32, 64, device="cuda")
            optimizers[1].zero_grad()
            loss = run_c(run_g(z[:, :16]).detach()).mean() - run_c(real).mean()
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss = -run_c(run_g(z[:, 16:32])).mean()
            loss.backward()
            optimizers[0].step()
            losses.append(loss)
            if i % 4 == 3:
                with torch.no_grad():
                    losses.append(run_c(real))
        results.append([*losses, *g.parameters(), *c.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert min(sum(r.num_replays for r in found) for found in (a, b)) >= 15


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x)


def test_graph_breaks():
    def loop(net, parts):
        return train(net, parts, x=batches(12, (32, 64)))

    run_both(loop, Broken().cuda(), [9, 9])


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
        for i, x in enumerate(batches(9, (5, 4))):
            parts.zero_grad()
            a, b, index = net(x)
            loss = a.square().sum()
            (loss if i % 2 else loss + b.square().sum()).backward()
            found += [[p.grad for p in parts.parameters()], index]
        return found

    run_both(loop, Heads().cuda(), [6])


def test_moved_parameters_and_shapes():
    def loop(net, parts):
        found = []
        for i, x in enumerate(batches(16)):
            if i == 6:
                state = {k: 2 * v for k, v in parts.state_dict().items()}
                parts.load_state_dict(state, assign=True)
            if i == 11:
                parts[0].weight.requires_grad_(False)
            found.append(net(x[: 6 if i < 14 else 4]))
            found[-1].square().sum().backward()
        return found

    run_both(loop, make_network())


def test_other_streams_and_threads():
    net = make_network().eval()
    copied, run, made = compiled(net)
    inputs = batches(64)
    with torch.no_grad():
        expected = [net(x) for x in inputs]
        for x in inputs[:6]:
            run(x)
    found = [None] * len(inputs)

    @torch.no_grad()
    def work(part):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for i in range(part, len(inputs), 4):
                found[i] = run(inputs[i])
        stream.synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x)
    assert sum(r.num_replays for r in made) >= 60
    del copied


def test_a_backward_pass_on_another_stream():
    def loop(net, parts):
        for x in batches(12):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                net(x).square().sum().backward()
            torch.cuda.current_stream().wait_stream(stream)

    run_both(loop, make_network(), [9])


def test_inside_other_recordings():
    net, x = make_network(), batches(1)[0]
    copied, run, made = compiled(net)
    for _ in range(5):
        run(x).sum().backward()
    assert made[0].num_replays == 2
    optimizer = torch.optim.SGD(copied.parameters(), 0.01, fused=True)

    @sf.graph_step(copied, optimizer)
    def step(x):
        optimizer.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(x).item() for _ in range(8)]
    assert step.num_replays == 5
    assert losses[-1] < losses[0]
    with torch.no_grad():
        for _ in range(5):
            run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x)
        graph.replay()
        torch.testing.assert_close(y, copied(x))
    y = checkpoint(run, x, use_reentrant=False)
    y.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        run(x).sum().backward()
    assert made[0].num_replays == 2


def usable():
    """The GPU, its allocator and its generator work after a capture has failed."""
    torch.manual_seed(3)
    before = F.dropout(torch.ones(64, device="cuda"))
    torch.manual_seed(3)
    assert torch.equal(before, F.dropout(torch.ones(64, device="cuda")))
    stream = torch.cuda.Stream()
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    for _ in range(8):
        x = torch.ones(1 << 20, device="cuda")
        x.record_stream(stream)
        del x
    torch.cuda.synchronize()
    torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - start < 3 * (1 << 22)
    run = recorded(lambda x: (F.dropout(x) + 1,))
    for _ in range(5):
        run(torch.ones(64, device="cuda"))
    assert run.num_replays == 2
    assert not run.obstacle


def waits_in_forward(x):
    return (x * x.sum().item(),)


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return g * float(g.sum() >= 0) * 2


def waits_in_backward(x):
    return (_Waits.apply(x),)


def draws_on_the_cpu(x):
    return (x * torch.rand(()),)


@pytest.mark.parametrize("function", [waits_in_forward, waits_in_backward, draws_on_the_cpu])
def test_what_cannot_be_captured(function):
    run, x = recorded(function), torch.ones(3, device="cuda", requires_grad=True)

    def loop():
        for _ in range(6):
            x.grad = None
            run(x)[0].sum().backward()

    with pytest.warns(UserWarning, match="is not recorded as a CUDA graph") as caught:
        loop()
    assert len([w for w in caught if "CUDA graph" in str(w.message)]) == 1
    assert run.num_replays == 0
    expected = "random numbers on the CPU" if function is draws_on_the_cpu else "waits for the GPU"
    assert expected in run.obstacle
    usable()


def test_out_of_memory():
    def function(x):
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
        return (x + 1,)

    run, x = recorded(function), torch.ones(3, device="cuda")
    with pytest.warns(UserWarning, match="OutOfMemoryError: CUDA out of memory"):
        results = [run(x)[0] for _ in range(6)]
    assert all(torch.equal(y, x + 1) for y in results)
    usable()


def test_memory_is_shared_and_freed(monkeypatch):
    monkeypatch.setattr(module, "_pools", weakref.WeakSet())
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    size = 1 << 24  # 64 MiB

    def function(x):
        y = x.expand(size // 4, 4).contiguous()
        for _ in range(4):
            y = y.sin()
        return (y.sum(0),)

    x, held = torch.ones(4, device="cuda", requires_grad=True), []
    runs = [recorded(function) for _ in range(3)]
    for run in runs:
        for _ in range(5):
            run(x)[0].sum().backward()
        assert run.num_replays == 2
        torch.cuda.empty_cache()
        held.append((torch.cuda.memory_reserved() - before) >> 20)
    assert len(module._pools) == 1
    assert held[2] < held[0] + 64, held
    graphs = [weakref.ref(r.graph) for run in runs for r in run._recordings.values()]
    del runs, run
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not any(graph() for graph in graphs)
    assert torch.cuda.memory_reserved() - before < 64 << 20


def test_failed_captures_keep_no_memory():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def function(x):
        return (x.expand(1 << 26).contiguous().sum() * x.sum().item(),)

    for _ in range(3):
        run = recorded(function)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                run(torch.ones(1, device="cuda"))
        assert run.obstacle
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 512 << 20


def test_the_recording_mark_is_per_thread():
    with capture.recorded_step():
        found = []
        thread = threading.Thread(target=lambda: found.append(capture.is_in_recorded_step()))
        thread.start()
        thread.join()
        assert found == [False]
        assert capture.is_in_recorded_step()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    net = make_network().to("cuda:1")

    def loop(net, parts):
        return train(net, parts, x=[x.to("cuda:1") for x in batches()])

    run_both(loop, net, [7])


def main() -> None:
    """Print times of a training loop: GPU-bound, and of the host alone."""
    from spikefuse.models import resnet18

    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = True
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, shape in (("28x28, T=32, B=100", (32, 100, 1, 28, 28)), ("host", (2, 2, 1, 28, 28))):
        for mode in ("eager", "recorded"):
            torch.manual_seed(0)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            layers = resnet18(lambda: sf.LIF(decay=0.2, threshold=0.3), 1, 10, (28, 28), "cifar")
            net = sf.Temporal(layers).cuda().to(memory_format=torch.channels_last)
            net = sf.fuse(net, mode=mode)
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True)
            x, y = torch.rand(shape, device="cuda"), torch.randint(10, shape[1:2], device="cuda")

            def step(net=net, optimizer=optimizer, x=x, y=y):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = F.cross_entropy(net(x).float().mean(0), y)
                loss.backward()
                optimizer.step()

            times = []
            for i in range(40):
                torch.cuda.synchronize()
                start = time.perf_counter()
                step()
                host = time.perf_counter() - start
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start, host))
                if i == 9:
                    times.clear()
            total, host = (1e3 * statistics.median(t) for t in zip(*times, strict=True))
            reserved = torch.cuda.memory_reserved() >> 20
            peak = torch.cuda.max_memory_allocated() >> 20
            print(f"{name}, {mode}: {total:.2f} ms, host {host:.2f} ms; peak {peak} MiB, "
                  f"reserved {reserved} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
