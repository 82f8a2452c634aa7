"""Models on torch: from a name to tensors, and from a step's plan to tokens."""
