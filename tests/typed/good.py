import torch
from torch import nn

import spikefuse as sf


class Adaptive(sf.Neuron):
    v, a = sf.State(), sf.State()

    def __init__(
        self,
        decay: float = 0.9,
        rho: float = 0.97,
        beta: float = 0.18,
        surrogate: sf.surrogate.Surrogate = sf.surrogate.Arctan(),
    ) -> None:
        super().__init__()
        self.decay, self.rho, self.beta, self.surrogate = decay, rho, beta, surrogate

    def step(
        self, x: torch.Tensor, v: torch.Tensor, a: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        h = self.decay * v + x
        s = self.surrogate(h - (1 + self.beta * a))
        return s, (h * (1 - s), self.rho * a + s)


net = sf.Temporal(
    nn.Sequential(nn.Linear(10, 20), sf.LIF(0.9, reset="soft"), nn.Linear(20, 5), Adaptive())
)
fused = sf.fuse(net)
logits: torch.Tensor = fused(torch.rand(4, 2, 10)).mean(0)
spikes, state = sf.LIF(sf.LearnableTimeConstant(2.0))(torch.rand(4, 2, 3), return_state=True)
resnet = sf.models.resnet18(sf.LIF, 3, 10, (32, 32))
converted: nn.Module = sf.convert(nn.Sequential(nn.Linear(2, 3)))
recurrent = sf.Recurrent(sf.LIF(), 8, bias=True)
with sf.record(net) as record:
    net(torch.rand(4, 2, 10))
recording = sf.data.Recording([3, 5], [0, 7], [1, 0], [10, 250], size=(2, 34, 34))
rate: float = record["net.1"]["spikes"].mean().item()


@sf.graph_step(net)
def step(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = net(x)
    return y


y: torch.Tensor = sf.checkpoint(net, torch.rand(4, 2, 10))
