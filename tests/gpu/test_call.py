"""tests/compiler/test_call.py on a GPU: the bits that kernels write with the spikes."""

from tests.compiler.test_call import (  # noqa: F401
    test_bits_are_not_written_where_steps_share_bytes,
    test_bits_are_written_with_the_spikes,
    test_gradients_of_one_call_may_lie_in_any_order,
)
