"""On a CPU the step is called; `tests/gpu/test_graph_step.py` has recordings."""

import pytest
import torch

import spikefuse as sf


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
    with pytest.raises(TypeError, match="step is a Parameter: expected a function"):
        sf.graph_step(torch.nn.Linear(1, 1).weight)
    with pytest.raises(ValueError, match="warmup is 1"):
        sf.graph_step(lambda x: x, warmup=1)
