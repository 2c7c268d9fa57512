"""Device meshes: tables of ranks, their views and their groups."""
