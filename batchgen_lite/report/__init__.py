"""A run as one page of plots. Needs the extra ``report`` (plotly)."""
