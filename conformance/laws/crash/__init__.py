"""Laws on crashes of ranks or machines during a save."""
