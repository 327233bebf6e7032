"""Compare event networks whose neurons all GPUs share with the same networks on one GPU.

torchrun --nproc_per_node 2 tests/distributed/programs/sharded_neurons.py
"""

from __future__ import annotations

import faulthandler
import os

import torch
import torch.distributed as dist

from tests.distributed.event_networks import compare, fewer_neurons_than_ranks
from tests.processes import SECONDS


def main() -> None:
    faulthandler.dump_traceback_later(1.5 * SECONDS, exit=True)  # a rank may wait for ever
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    compare(None, str(device), impl="triton")
    compare(None, str(device), capacity=0.2)
    fewer_neurons_than_ranks(str(device))
    print(f"rank {dist.get_rank()}: all is well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
