import spikefuse as sf

sf.LIF(resett="soft")  # error
sf.LIF(reset=3)  # error
sf.LIF(reset="zero")  # error
sf.LIF(surrogate="arctan")  # error
sf.LIF(decay="0.5")  # error
sf.ALIF(betta=0.1)  # error
sf.Recurrent(sf.LIF(), 8, 32)  # error
sf.fuse(3)  # error
sf.models.resnet18(sf.LIF, 3)  # error
sf.Temporal(3)  # error
sf.data.Recording([3], [0], [1], [10], sizes=(2, 34, 34))  # error
