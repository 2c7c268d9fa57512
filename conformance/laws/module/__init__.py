"""Models in parallel: styles, models placed by hand, fully sharded ones."""
