"""What can be proven about a run on GPUs without one: on tensors that only say cuda:0."""
