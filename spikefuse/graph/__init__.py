"""A backend of torch.compile that fuses networks of neurons: passes over the captured graph."""
