"""The operations in Triton, the table of their tile sizes, and repairs of Triton's interpreter."""
