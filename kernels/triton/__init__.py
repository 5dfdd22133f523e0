"""The operations in Triton, their tables of sizes, and repairs of its interpreter."""
