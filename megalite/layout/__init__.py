"""Where everything lies: ranks on axes, parameters on ranks, buckets, rectangles. No torch."""
