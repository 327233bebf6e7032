"""Reports of what a network does and what it costs."""
