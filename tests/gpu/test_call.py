"""tests/scan/test_execution.py on a GPU: the bits that kernels write with the spikes."""

from tests.scan.test_execution import (  # noqa: F401
    test_bits_are_not_written_where_steps_share_bytes,
    test_bits_are_written_with_the_spikes,
    test_gradients_of_one_call_may_lie_in_any_order,
)
