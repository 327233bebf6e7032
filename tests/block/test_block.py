"""Batch norm, residual and neuron as one operation, against PyTorch's norm and the eager loop."""

import copy
import itertools
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import spikefuse as sf
from spikefuse import reference
from spikefuse.block.block import Block, scan
from spikefuse.block.definition import Kind, with_batch_norm
from spikefuse.kernels.norm import statistics
from spikefuse.kernels.running import Running
from spikefuse.nn.neuron import call_neuron
from spikefuse.scan.records import Arguments, Wanted
from spikefuse.testing import DTYPES, LAYOUTS, lay_out, make_input, poisoned, run, within_budget
from tests.definitions import DEFINITIONS, SMOOTH, make

# Fewer neurons for the interpreter, but in more than one block of a float32 backward.
SHAPE = (3, 6, 5, 5) if torch.cuda.is_available() else (3, 6, 3, 3)
# Threads share kernels of any size, also where they end in the middle of a sample.
pytestmark = pytest.mark.usefixtures("any_threads", "two_threads")

# A block has one input, and synapses are not behind norms.
NAMES = [n for n in DEFINITIONS if n not in ("Gated", "StochasticLIF", "ShortTermPlasticity")]
NORMS = {3: nn.BatchNorm1d, 4: nn.BatchNorm1d, 5: nn.BatchNorm2d, 6: nn.BatchNorm3d}


def make_block(name="LIF", shape=SHAPE, device="cpu", seed=3, **options):
    channels = shape[1]
    norm = NORMS[len(shape) + 1](channels, **options)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(make_input((channels,), seed=seed).abs() + 0.5)
            norm.bias.copy_(make_input((channels,), seed=seed + 1) / 2)
    reset = {"CLIF": "own", "GatedLIF": "own", "IntegerLIF": "own", "LI": "none"}
    neuron = make(name, reset.get(name.split("-")[0], "hard"), channels, device)
    return Block(norm, neuron).to(device)


def make_inputs(num_steps, num, dtype=torch.float32, device="cpu", shape=SHAPE, constant=False):
    x = make_input((num_steps, *shape), dtype, device, 0, constant) * 2 + 1
    return (x, make_input((num_steps, *shape), dtype, device, 1))[:num]


def expected_of_step(block, inputs, state, impl):
    """The eager loop with the statistics that the kernels have found."""
    values, shifts = [], []
    for norm, x in zip(norms_of(block), inputs, strict=False):
        if norm.training or norm.running_mean is None:
            backend = "triton" if impl == "triton" else "numba"
            mean, scale, _, _ = statistics(x, norm.weight, Running(), norm.eps, backend)
        else:
            mean = norm.running_mean
            scale = torch.sqrt(norm.running_var + norm.eps).reciprocal()
            scale = scale if norm.weight is None else scale * norm.weight
        values += [mean, scale.detach()]
        shifts.append(torch.zeros_like(mean) if norm.bias is None else norm.bias.detach())
    values.insert(2, sum(shifts))
    kind = Kind(len(inputs) > 1, by_batch=False, normalizes_residual=len(values) > 3)
    definition = with_batch_norm(block.neuron, values, kind)
    return reference.scan(definition, inputs, state)


def norms_of(block):
    return [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def assert_matches(block, inputs, impls, state=None, layouts=LAYOUTS[:1], exact=True):
    """Outputs equal those of the eager loop with the same statistics, bit for bit. Gradients are
    held to the float64 error of PyTorch's norm and the eager loop, over the neurons that spike
    alike in all of them."""
    wanted, true = (run(block, inputs, state, how) for how in ("reference", "float64"))
    for impl, layout in itertools.product(impls, layouts):
        where = f"{impl}, {layout}"
        laid = [lay_out(x, layout) for x in inputs]
        with poisoned():
            actual = run(block, laid, state, impl)
        truncated = impl == "triton" and inputs[0].is_cpu and inputs[0].dtype == torch.bfloat16
        if exact and not truncated:
            outputs, states = expected_of_step(block, laid, state, impl)
            for a, b in zip((*actual.outputs, *actual.states), (*outputs, *states), strict=True):
                assert torch.equal(a, b), f"{where}: {(a != b).sum()} of {a.numel()} differ"
        rows = zip(actual.outputs, wanted.outputs, true.outputs, strict=True)
        alike = [((a - b).abs() < 0.5) & ((a - c).abs() < 0.5) for a, b, c in rows]
        alike = torch.stack([a.all(0) for a in alike]).all(0)
        assert alike.float().mean() > 0.97, f"{where}: {alike.float().mean()} spike alike"
        weights = [
            make_input(r.shape, device=r.device, seed=5 + i) * alike
            for i, r in enumerate((*actual.outputs, *actual.states))
        ]
        with poisoned():
            found = actual.backward(weights)
        expected, truth = (r.backward(weights, retain_graph=True) for r in (wanted, true))
        summed = truth["input 0"].double().norm().item()
        # The loop's error in one sum over all neurons may be small by chance.
        sums = [name for name in found if not name.startswith(("input", "state"))]
        error = max(((expected[n] - truth[n]).abs().max().item() for n in sums), default=0.0)
        for name, gradient in found.items():
            scale, least = (summed, error) if name in sums else (0.0, 0.0)
            label, share = f"{where}: gradient of {name}", 4.0 if exact else 8.0
            results = gradient, expected[name], truth[name]
            within_budget(label, results, share, scale, impl == "triton", least)


def cases():
    for name in NAMES:
        every = torch.cuda.is_available() or name == "LIF"
        for dtype in DTYPES if every else DTYPES[:1]:
            yield pytest.param(name, dtype, id=f"{name}-{dtype}")


@pytest.mark.parametrize(("name", "dtype"), [*cases()])
def test_equals_reference(name, dtype, backends):
    device, impls = backends.device, backends.impls
    # Numba compiles for seconds, to code that differs in the step and in how memory is accessed.
    is_new = name == "PLIF-channel" or (name == "LIF" and dtype != torch.float16)
    impls = impls if is_new else impls[-1:]
    block = make_block(name, device=device)
    # A CPU, whose interpreter is slow, sees short sequences of the first neuron only.
    for num_steps, num in ((3, 1), (19, 2))[0 if device == "cuda" or name == "LIF" else 1 :]:
        inputs = make_inputs(num_steps, num, dtype, device)
        layouts = LAYOUTS if device == "cuda" or name == "LIF" else LAYOUTS[:1]
        assert_matches(block, inputs, impls, None, layouts, name not in SMOOTH)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {}])
def test_modes(training, options, backends):
    block = make_block(device=backends.device, **options)
    inputs = make_inputs(11, 2, device=backends.device)
    block(*inputs)
    block.train(training)
    state = (make_input(SHAPE, device=backends.device, seed=8),)
    assert_matches(block, inputs, backends.impls, state)


@pytest.mark.parametrize("shape", [(7, 6), (5, 6, 9), (2, 6, 3, 2, 2), (3, 70), (2, 1, 4, 4)])
def test_shapes(shape, backends):
    block = make_block(shape=shape, device=backends.device)
    inputs = make_inputs(9, 1, device=backends.device, shape=shape)
    assert_matches(block, inputs, backends.impls)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("constant", [False, True])
def test_running_statistics_are_those_of_the_norm(momentum, constant, backends):
    for impl in (*backends.impls, "reference"):
        block = make_block(device=backends.device, momentum=momentum)
        norm = nn.BatchNorm2d(SHAPE[1], momentum=momentum).to(backends.device)
        for seed in range(2):
            (x,) = make_inputs(4, 1, device=backends.device, constant=constant)
            block(x + seed, impl=impl)
            norm((x + seed).flatten(0, 1))
        for name, buffer in norm.named_buffers():
            torch.testing.assert_close(block.norm.get_buffer(name), buffer, rtol=2e-6, atol=1e-6)


def test_statistics_with_a_mean_far_above_the_deviation(backends):
    x = make_input((8, 4, 6, 12, 12), device=backends.device) * 0.02 + 100
    for layout in LAYOUTS[:2]:
        for impl in backends.impls:
            found = statistics(lay_out(x, layout), None, Running(), 0.0, impl)
            variance, mean = torch.var_mean(x.double(), [0, 1, 3, 4], correction=0)
            assert ((found[0] - mean).abs() / variance.sqrt()).max() < 5e-4
            torch.testing.assert_close(found[3].double(), variance, rtol=1e-5, atol=0)


def test_few_spikes_differ_from_separate_norm_and_neuron(backends):
    """What PyTorch's norm rounds in another way may spike in another way: rarely."""
    block = make_block(device=backends.device)
    (x,) = make_inputs(16, 1, device=backends.device, shape=(4, 6, 10, 10))
    for impl in backends.impls:
        y = block(x, impl=impl)
        u = block.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        assert (y != block.neuron(u)).float().mean() < 1e-4


@pytest.mark.usefixtures("two_threads")
def test_steps_repeat_bit_for_bit(backends):
    results = []
    for _ in range(2):
        block = make_block(device=backends.device)
        (x,) = make_inputs(19, 1, device=backends.device, shape=(8, 6, 16, 16))
        x.requires_grad_()
        block(x, impl=backends.impls[0]).sum().backward()
        results.append([x.grad, *(p.grad for p in block.parameters()), *block.norm.buffers()])
    assert all(map(torch.equal, *results))


class TwoNorms(nn.Module):
    """A block whose residual has a norm of its own."""

    def __init__(self, device, **options):
        super().__init__()
        block, other = (make_block(device=device, seed=seed, **options) for seed in (3, 6))
        self.norm, self.residual_norm, self.neuron = block.norm, other.norm, block.neuron

    def forward(self, *inputs, state=None, return_state=False, impl="auto"):
        run = partial(scan, (self.norm, self.residual_norm), self.neuron, None)
        wanted = Wanted(return_state, impl=impl)
        return call_neuron(self.neuron, run, Arguments(inputs, state), wanted)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_the_residual(dtype, training, backends):
    block = TwoNorms(backends.device)
    inputs = make_inputs(11, 2, dtype, backends.device)
    block(*inputs)
    block.train(training)
    state = (make_input(SHAPE, device=backends.device, seed=8),)
    layouts = LAYOUTS if dtype == torch.float32 else LAYOUTS[:1]
    assert_matches(block, inputs, backends.impls, state, layouts)


@pytest.mark.parametrize("constant", [False, True])
def test_a_norm_of_a_residual_that_needs_no_gradient(constant, backends):
    block = TwoNorms(backends.device)
    x, residual = make_inputs(9, 2, device=backends.device)
    x, residual = (residual, x) if constant else (x, residual)
    found = []
    for impl in (*backends.impls, "reference"):
        leaf = x.clone().requires_grad_()
        y = block(leaf, residual, impl=impl)
        found.append(torch.autograd.grad((y * x).sum(), [leaf, *block.parameters()]))
    for gradients in found[:-1]:
        for gradient, expected in zip(gradients, found[-1], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 2])
def test_scales_that_a_step_computes(num, dtype, backends):
    """Without gradients, kernels on a GPU compute the scales of norms in evaluation."""
    block = (make_block, lambda device: TwoNorms(device))[num - 1](device=backends.device).eval()
    for i, norm in enumerate(norms_of(block)):
        norm.to(dtype).eps = 0.125 + i
        norm.running_mean.copy_(make_input((6,), seed=i))
        norm.running_var.copy_(make_input((6,), seed=i + 2).abs() + 0.25)
        norm.bias.data.copy_(make_input((6,), seed=i + 4))
    inputs = make_inputs(5, num, dtype, backends.device)
    for impl in backends.impls:
        with torch.no_grad():
            found = block(*inputs, impl=impl)
        assert torch.equal(found, block(*inputs, impl=impl))
        assert 0.02 < found.float().mean() < 0.98


class WithPotential(nn.Module):
    """A block that also gives the neuron's potential."""

    def __init__(self, block):
        super().__init__()
        self.block, self.norm = block, block.norm
        self.neuron = block.neuron

    def forward(self, *inputs, **options):
        return self.block(*inputs, **options, outputs=("spikes", "v"))


@pytest.mark.parametrize("training", [True, False])
def test_potentials(training, backends):
    block = make_block("PLIF-channel", device=backends.device)
    inputs = make_inputs(11, 2, device=backends.device)
    plain = block(*inputs, impl=backends.impls[-1])
    module = WithPotential(block).train(training)
    for impl in backends.impls:
        actual, expected = (run(module, inputs, None, how) for how in (impl, "reference"))
        alike = (actual.outputs[0] == expected.outputs[0]).all(0)
        assert alike.float().mean() > 0.97
        assert not training or torch.equal(actual.outputs[0], plain)
        v, (end,) = actual.outputs[1], actual.states
        assert torch.equal(v[-1], end)
        torch.testing.assert_close(v[:, alike], expected.outputs[1][:, alike])
        weights = [make_input(plain.shape, device=backends.device, seed=i) * alike for i in (5, 6)]
        weights.append(torch.zeros_like(end))
        found, wanted = actual.backward(weights), expected.backward(weights)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3, msg=name)


def test_pruned_norms():
    """Their hooks run where a norm is called, which a block does not do."""
    block, expected, x = make_block(), make_block(), make_inputs(4, 1)[0].detach()
    mask = torch.tensor([1.0, 0, 1, 0, 1, 1])
    prune.custom_from_mask(block.norm, "weight", mask)
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    for _ in range(2):
        block(x).sum().backward()
        optimizer.step()
    norm = block.norm.eval()
    assert not torch.equal(norm.weight_orig[mask == 1], expected.norm.weight[mask == 1])
    values = {**norm.state_dict(), "weight": mask * norm.weight_orig}
    known = expected.norm.eval().state_dict()
    expected.norm.load_state_dict({name: values[name] for name in known})
    assert torch.equal(block(x), expected(x))


@pytest.mark.parametrize("policy", [sf.memory.Recompute(), sf.memory.Bits(), sf.memory.SaveAll()])
def test_in_temporal(policy, backends):
    torch.manual_seed(0)
    conv, out = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 3, 1)
    block = make_block()
    net = sf.Temporal(nn.Sequential(conv, block, out), memory=policy).to(backends.device)
    x = make_input((20, 3, 2, 7, 7), device=backends.device)
    y, state = net(x, return_state=True)
    y.square().sum().backward()
    assert state.keys() == {"net.1.neuron"}
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    h = conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    plain = out(block(h).flatten(0, 1))
    plain.square().sum().backward()
    assert torch.equal(y.flatten(0, 1), plain)
    assert all(map(torch.equal, gradients, [p.grad for p in net.parameters()]))


def test_policy_of_a_block(backends):
    gradients = []
    for policy in (None, sf.memory.Bits()):
        block = make_block(device=backends.device)
        block.memory = policy
        (x,) = make_inputs(20, 1, device=backends.device)
        x.requires_grad_()
        y = block(x, impl=backends.impls[-1])
        # The input; of the norm the bias, the weight and four statistics.
        expected = x.numel() + 6 * block.norm.num_features
        kept = sum(t.numel() for t in y.grad_fn.saved_tensors) - expected
        assert kept == (0 if policy is None else 2 * x[0].numel())
        y.sum().backward()
        gradients.append([x.grad, *(p.grad for p in block.parameters())])
    assert all(map(torch.equal, *gradients))


def test_errors():
    block = make_block()
    x = torch.zeros(2, *SHAPE)
    with pytest.raises(TypeError, match="norm is a GroupNorm"):
        Block(nn.GroupNorm(2, 6), sf.LIF())
    with pytest.raises(TypeError, match="neuron is a ReLU"):
        Block(nn.BatchNorm2d(6), nn.ReLU())
    with pytest.raises(TypeError, match="memory is 'bits'"):
        Block(nn.BatchNorm2d(6), sf.LIF(), "bits")
    with pytest.raises(ValueError, match=r"memory is Checkpoint\(chunks=16\), .* to Temporal\(net"):
        Block(nn.BatchNorm2d(6), sf.LIF(), sf.memory.Checkpoint())
    with pytest.raises(ValueError, match="C = 6"):
        block(x[:, :, :5])
    with pytest.raises(ValueError, match="residual is"):
        block(x, x[:1])
    with pytest.raises(ValueError, match="has no variance"):
        block(torch.zeros(1, 1, 6, 1, 1))
    with pytest.raises(TypeError, match="float64"):
        block(x.double())


def test_errors_after_a_call_on_inputs_of_the_same_description():
    block, x = make_block(), make_inputs(2, 1)[0]
    block(x)
    with pytest.raises(TypeError, match="state must be a tuple"):
        block(x, state=x[0])
    with pytest.raises(ValueError, match=r"state v is \[6, 3, 3\]"):
        block(x, state=(x[0, 0],))
    with pytest.raises(ValueError, match="C = 5"):
        Block(nn.BatchNorm2d(5), block.neuron)(x)
    with pytest.raises(TypeError, match="x is a list"):
        block(x.tolist())
    with pytest.raises(TypeError, match="residual is a float"):
        block(x, 0.5)
    with pytest.raises(NotImplementedError, match="transforms of torch"):
        torch.func.vmap(block, randomness="same")(x[None])


# Each pair, not each three of them.
@pytest.mark.parametrize(
    ("name", "training", "to"),
    [
        (name, training, "meta" if (i + training) % 2 else torch.float64)
        for i, name in enumerate(("weight", "bias", "running_mean", "running_var"))
        for training in (True, False)
    ],
)
def test_a_norm_changed_after_a_call(name, training, to, backends):
    """Kernels would take addresses of another device, or values of another dtype, as they are."""
    x = make_inputs(2, 1, device=backends.device)[0]
    message = f"on meta, x on {backends.device}" if to == "meta" else "torch.float64"
    block = make_block(device=backends.device).train(training)
    net = copy.deepcopy(sf.fuse(sf.Temporal(nn.Sequential(block.norm, block.neuron))))
    checkpoint = copy.deepcopy(net)
    checkpoint.memory = sf.memory.Checkpoint(1)
    for module in (block, net, checkpoint):
        norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm2d))
        module(x)
        changed = getattr(norm, name).detach().to(to)
        setattr(norm, name, nn.Parameter(changed) if name in ("weight", "bias") else changed)
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            module(x)
        if module is block:
            assert f"{name} of the norm is {message}" in str(error.value)
        else:  # a captured network leaves such a norm to PyTorch
            assert re.search("meta|device|float64|Double|dtype|type", str(error.value))


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_a_norm_of_another_size(name, backends):
    """Kernels would read beyond the end."""
    x = make_inputs(2, 1, device=backends.device)[0]
    for training in (False, True):
        block = make_block(device=backends.device).train(training)
        net = copy.deepcopy(sf.fuse(sf.Temporal(nn.Sequential(block.norm, block.neuron))))
        for module in (block, net):
            norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm2d))
            module(x)
            changed = getattr(norm, name).detach()[:1].clone()
            setattr(norm, name, nn.Parameter(changed) if name in ("weight", "bias") else changed)
            # A captured network leaves such a norm to PyTorch.
            message = rf"{name} of the norm has shape \[1\]: expected" if module is block else name
            with pytest.raises((ValueError, RuntimeError), match=message):
                module(x)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_a_norm_with_strides(name, backends):
    """Kernels of a GPU would read and write the values between."""
    x = make_inputs(2, 1, device=backends.device)[0]
    for impl in backends.impls:
        block = make_block("LI", device=backends.device)
        expected = copy.deepcopy(block)(x, impl=impl)
        strided = getattr(block.norm, name).detach().repeat_interleave(2)[::2]
        strided = nn.Parameter(strided) if name in ("weight", "bias") else strided
        setattr(block.norm, name, strided)
        if impl == "triton" and name != "bias":
            with pytest.raises(ValueError, match=rf"{name} of the norm has strides \(2,\)"):
                block(x, impl=impl)
        else:
            assert torch.equal(block(x, impl=impl), expected)


def test_a_step_between_forward_and_backward(backends):
    """It updates the running statistics that a call in evaluation has read, and that the plain norm
    of a call in training has saved."""
    x, later = make_inputs(3, 2, device=backends.device)
    gradients = []
    for steps in (False, True):
        block = make_block("LI", device=backends.device)
        evaluated = block.eval()(x, impl=backends.impls[0])
        plain = block.norm.train()(x.flatten(0, 1))
        if steps:
            block(later, impl=backends.impls[0])
        (evaluated.cos().sum() + plain.cos().sum()).backward()
        gradients.append([p.grad for p in block.norm.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("training", [True, False])
def test_parameters_of_a_neuron_must_fit_the_channels(training):
    """Kernels would read beyond the values of the channels that exist."""
    x = torch.rand(3, 2, 6, 4)
    fitting, other = (
        Block(nn.BatchNorm1d(6), sf.PLIF(channels=channels)).train(training) for channels in (6, 4)
    )
    fitting(x)
    ((name, logit),) = fitting.neuron.named_parameters(prefix="neuron")
    replaced = partial(torch.func.functional_call, fitting, {name: logit[:4]})
    for call in (other, torch.compile(other, backend="eager"), replaced):
        with pytest.raises(ValueError, match=r"parameter 'decay' has shape \[4\].* C = 6"):
            call(x)


@pytest.mark.parametrize("training", [True, False])
def test_double_backward_is_refused(training):
    block = sf.nn.Block(nn.BatchNorm1d(3), sf.LIF()).train(training)
    x = torch.randn(4, 2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward through a spikefuse neuron"):
        gradient.sum().backward()


@pytest.mark.parametrize("is_training", [True, False])
def test_an_empty_batch(is_training, backends):
    for impl in (*backends.impls, "reference"):
        block = sf.nn.Block(nn.BatchNorm2d(4), sf.PLIF(channels=4)).to(backends.device)
        block.train(is_training)
        x = torch.rand(3, 0, 4, 2, 2, device=backends.device, requires_grad=True)
        y, states = block(x, return_state=True, impl=impl)
        (y.sum() + states[0].sum()).backward()
        assert (y.shape, states[0].shape, x.grad.shape) == (x.shape, x.shape[1:], x.shape)
        assert all(p.grad.eq(0).all() for p in block.parameters() if p.grad is not None)
        norm = block.norm
        assert norm.running_mean.eq(0).all()
        assert norm.running_var.eq(1).all()
        assert norm.num_batches_tracked == int(is_training)
