"""What a whole network needs, seen in the graph that PyTorch captures."""
