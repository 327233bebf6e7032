"""Former name of `spikefuse.kernels.channels`."""

from spikefuse.kernels.channels import ChannelLayout

Place = ChannelLayout
