"""A schedule's time line for people: text, SVG, and traces of measured runs."""
