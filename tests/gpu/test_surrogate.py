"""The kernels of tests/neurons/test_surrogate.py on a GPU."""

from tests.neurons.test_surrogate import (  # noqa: F401
    test_gradients_are_the_same_every_time,
    test_kernels,
    test_kernels_of_others,
    test_learned_along_with_everything_else,
)
