"""A schedule's time line, drawn: as text, as SVG and HTML, and as a trace.

Reading order: `style` (colours, names, units), `draw_text`, `draw_svg`, then `trace` (measured
steps, Chrome traces).
"""
